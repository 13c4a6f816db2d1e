"""Real text that every machine has: sources and documentation of Python and of its packages.

Files are read in the order of a hash of their path below their root, up to so many bytes; each
twentieth is held out. What is there differs from machine to machine, so that records carry the
digest of what was read: compare losses of one digest only.

    python examples/paper/text.py       # makes what gpt2.py, bert.py and long_context.py read

The programs make it themselves where it is missing. To make it before, or beside what runs on a
GPU, saves that time.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import json
import os
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np
import torch
from torch import Tensor

ENDINGS = (".py", ".pyi", ".md", ".rst", ".txt")
LARGEST = 200_000  # bytes: above are tables and data more than text
HELD_OUT = 20  # one file of so many
CHARACTERS = 100_000_000
SAMPLE = 20_000_000  # characters that the vocabulary is chosen by
VOCABULARIES = {"gpt2": 50257, "bert": 30522}
PACKAGES = ("site-packages", "dist-packages", "__pycache__")


def roots() -> list[Path]:
    paths = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    return [*dict.fromkeys(path.resolve() for path in paths if path.exists())]


@dataclass(frozen=True)
class File:
    root: Path
    path: Path  # below root

    @property
    def order(self) -> bytes:
        return hashlib.sha256(str(self.path).encode()).digest()

    @property
    def held_out(self) -> bool:
        # Of the digest's end, as the files come in the order of its beginning.
        return int.from_bytes(self.order[-4:], "big") % HELD_OUT == 0

    def text(self) -> str:
        return (self.root / self.path).read_text("utf-8", errors="replace")


def files() -> list[File]:
    """All of them, in an order that spreads every package over the whole."""
    found = []
    for root in roots():
        for folder, below, names in os.walk(root):
            # The packages below the standard library are a root of their own.
            below[:] = [name for name in below if name not in PACKAGES]
            for name in names:
                path = Path(folder, name)
                if name.endswith(ENDINGS) and path.is_file() and path.stat().st_size <= LARGEST:
                    found.append(File(root, path.relative_to(root)))
    return sorted(found, key=lambda file: file.order)


def documents(size: int, least: int = 0) -> Iterator[tuple[File, str]]:
    """Files of at least ``least`` characters, each text once, until ``size`` characters came."""
    seen = set()
    total = 0
    for file in files():
        text = file.text()
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        if len(text) < max(least, 1) or digest in seen:
            continue
        seen.add(digest)
        yield file, text
        total += len(text)
        if total >= size:
            break


@dataclass
class Corpus:
    """Documents as tokens, one after the other, each ended by token 0."""

    train: np.ndarray  # uint16
    held_out: np.ndarray
    vocabulary: int
    digest: str

    def batch(self, batch: int, context: int, seed: int, *, held_out: bool = False) -> Tensor:
        """int64 (batch, context), places drawn from the seed alone."""
        tokens = self.held_out if held_out else self.train
        places = np.random.default_rng(seed).integers(len(tokens) - context, size=batch)
        return torch.from_numpy(
            np.stack([tokens[p : p + context] for p in places]).astype(np.int64)
        )

    def lengths(self) -> np.ndarray:
        """Of the training documents, the end token counted."""
        ends = np.flatnonzero(self.train == 0)
        return np.diff(ends, prepend=-1)


def arguments(
    parser: argparse.ArgumentParser, vocabulary: int, characters: int = CHARACTERS
) -> None:
    """What programs that read the text take."""
    parser.add_argument("--text", type=Path, help="folder of the text as tokens, of all programs")
    parser.add_argument("--characters", type=int, default=characters, help="of text")
    parser.add_argument("--vocabulary", type=int, default=vocabulary)


def corpus(folder: Path | None, *, characters: int, vocabulary: int, smoke: bool = False) -> Corpus:
    """Tokens of the machine's text, by a byte-level BPE trained on it; kept in ``folder``.

    Needs the package tokenizers.
    """
    stem = _stem(folder, characters, vocabulary, smoke)
    meta = stem.with_suffix(".json")
    # One program makes it, and those that start meanwhile wait for it.
    with stem.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not meta.exists():
            _make(stem, characters, vocabulary)
    found = json.loads(meta.read_text())
    train, held_out = (
        np.load(stem.with_suffix(f".{part}.npy"), mmap_mode="r") for part in ("train", "held_out")
    )
    return Corpus(train, held_out, found["vocabulary"], found["digest"])


def tokenizer_of(folder: Path | None, characters: int, vocabulary: int, smoke: bool = False):
    """The tokenizer of a corpus that is there."""
    from tokenizers import Tokenizer

    stem = _stem(folder, characters, vocabulary, smoke)
    return Tokenizer.from_file(str(stem.with_suffix(".tokenizer.json")))


def _stem(folder: Path | None, characters: int, vocabulary: int, smoke: bool) -> Path:
    return common.folder(folder, "text", smoke) / f"text-{characters}-{vocabulary}"


def encode(tokenizer, texts: list[str]) -> Iterator[list[int]]:
    """Tokens of each text. Some texts at a time, as tokenizers keeps more than numbers of each."""
    for first in range(0, len(texts), 256):
        yield from (found.ids for found in tokenizer.encode_batch_fast(texts[first : first + 256]))


def _sample(texts: list[str], characters: int) -> Iterator[str]:
    """Texts from all over, of about so many characters."""
    every = max(1, sum(map(len, texts)) // characters)
    return itertools.islice(texts, 0, None, every)


def _make(stem: Path, characters: int, vocabulary: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = list(documents(characters))
    texts = [text for _, text in found]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # A part of the text is enough to choose the words by.
    tokenizer.train_from_iterator(_sample(texts, SAMPLE), trainer)
    tokenizer.save(str(stem.with_suffix(".tokenizer.json")))
    parts: dict[str, list[np.ndarray]] = {"train": [], "held_out": []}
    for (file, _), ids in zip(found, encode(tokenizer, texts)):
        part = "held_out" if file.held_out else "train"
        parts[part].append(np.array([*ids, 0], dtype=np.uint16))
    digest = hashlib.sha256()
    for part, arrays in parts.items():
        tokens = np.concatenate(arrays or [np.zeros(0, np.uint16)])
        digest.update(tokens.tobytes())
        np.save(stem.with_suffix(f".{part}.npy"), tokens)
    meta = {
        "documents": len(texts),
        "characters": sum(map(len, texts)),
        "vocabulary": vocabulary,
        "digest": digest.hexdigest()[:16],
    }
    # Last, as it says that the rest is there.
    common.write(stem.with_suffix(".json"), lambda path: path.write_text(json.dumps(meta)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="folder, as the programs' own --text")
    parser.add_argument("--characters", type=int, default=CHARACTERS)
    parser.add_argument(
        "--vocabularies", type=int, nargs="+", default=[*VOCABULARIES.values()], help="of tokens"
    )
    options = parser.parse_args()
    for vocabulary in options.vocabularies:
        started = time.monotonic()
        made = corpus(options.text, characters=options.characters, vocabulary=vocabulary)
        print(
            f"{vocabulary}: {len(made.train)} tokens to train, {len(made.held_out)} held out, "
            f"digest {made.digest}, {time.monotonic() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    common.entry(main)
