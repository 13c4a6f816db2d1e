"""Real text that every machine has: sources and documentation of Python and of its packages.

Files are read in the order of a hash of their path below their root, up to so many bytes; each
twentieth is held out. What is there differs from machine to machine, so that records carry the
digest of what was read: compare losses of one digest only.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ENDINGS = (".py", ".pyi", ".md", ".rst", ".txt")
LARGEST = 200_000  # bytes: above are tables and data more than text
HELD_OUT = 20  # one file of so many
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


def corpus(folder: Path, *, characters: int, vocabulary: int) -> Corpus:
    """Tokens of the machine's text, by a byte-level BPE trained on it; kept in ``folder``.

    Needs the package tokenizers.
    """
    stem = _stem(folder, characters, vocabulary)
    meta = stem.with_suffix(".json")
    if not meta.exists():
        _make(stem, characters, vocabulary)
    found = json.loads(meta.read_text())
    train, held_out = (
        np.load(stem.with_suffix(f".{part}.npy"), mmap_mode="r") for part in ("train", "held_out")
    )
    return Corpus(train, held_out, found["vocabulary"], found["digest"])


def tokenizer_of(folder: Path, characters: int, vocabulary: int):
    """The tokenizer of a corpus that is there."""
    from tokenizers import Tokenizer

    stem = _stem(folder, characters, vocabulary)
    return Tokenizer.from_file(str(stem.with_suffix(".tokenizer.json")))


def _stem(folder: Path, characters: int, vocabulary: int) -> Path:
    return folder / f"text-{characters}-{vocabulary}"


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
    # A third of the text is enough to choose the words by.
    tokenizer.train_from_iterator(texts[::3], trainer)
    tokenizer.save(str(stem.with_suffix(".tokenizer.json")))
    parts: dict[str, list[np.ndarray]] = {"train": [], "held_out": []}
    for (file, _), encoding in zip(found, tokenizer.encode_batch(texts)):
        part = "held_out" if file.held_out else "train"
        parts[part].append(np.array([*encoding.ids, 0], dtype=np.uint16))
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
    stem.with_suffix(".json").write_text(json.dumps(meta))
