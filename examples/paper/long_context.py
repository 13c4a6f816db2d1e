"""A longer context, a better model: GPT-2 at 1K to 4K, and documents read to 512 up to 16K tokens.

The claims (FlashAttention, arXiv 2205.14135, tables 4 and 5): GPT-2 with a context of 4K is 0.7
better in perplexity than with 1K, and still trains faster than others at 1K; long documents are
classified 6.4 points of F1 better when more of them is read.

    python examples/paper/long_context.py gpt2 --minutes 9           # again, to go on
    python examples/paper/long_context.py documents --minutes 9
    python examples/paper/long_context.py gpt2 --smoke               # seconds on a CPU

Needs transformers and tokenizers: pip install '.[paper]'. The text is that of text.py.

``gpt2`` trains GPT-2 small for ``--trunk`` steps at the shortest length. Each length goes on from
that model with the same number of tokens a step and the same steps, ``--every`` of each in turns;
embeddings of further positions begin as those of the first, repeated. From random weights longer
contexts are learnt later than short ones, and so are the new positions here. After each turn the
perplexity is measured on the same held-out tokens: windows of the longest length, which models of a
shorter one read piece by piece. So a run that is stopped has compared all lengths at the turns that
are over, and the learning rate falls with the step alone, so that there is no end which would have
to be known before.

``documents`` tells which package a source file of 8K to 16K tokens is of, with a small encoder that
reads the first tokens alone, 512 to 16K, one length after the other, the same documents a step.
Comments at the top, import lines and the package's name are removed, so that what follows counts.
With one label a document micro-F1 is the share that is right. A fifth of the documents is held out,
for the F1 that is reported. Another fifth is for validation: it chooses the length that the summary
names.

Each length has its checkpoint, resumes from exactly the saved state, and all add to one curve.
"""

from __future__ import annotations

import argparse
import collections
import functools
import math
import re
import sys
from pathlib import Path

import common
import numpy as np
import text as texts
import torch
import torch.nn.functional as F
from common import Clock, Record, Row, Training
from flashsdk.torch import attention
from steps import Inputs, compile_layers, loss_of
from text import VOCABULARIES, Corpus, corpus, documents, encode, tokenizer_of
from torch import Tensor, nn

BF16 = torch.bfloat16
WARM = 100  # steps until the learning rate is highest
DEFAULTS = {
    "gpt2": {
        "lengths": [1024, 2048, 4096],
        "steps": 6000,
        "rate": 6e-4,
        "characters": texts.CHARACTERS,
        "vocabulary": VOCABULARIES["gpt2"],
    },
    "documents": {
        "lengths": [512, 1024, 2048, 4096, 8192, 16384],
        "steps": 600,
        "rate": 1e-3,
        "characters": 10_000_000,
        "vocabulary": 8192,
    },
}

# ---- GPT-2


def gpt2(options: argparse.Namespace, record: Record, clock: Clock, out: Path, text: Corpus):
    import gpt2 as models

    def inputs(seqlen: int, seed: int) -> Inputs:
        return models.tokens(text, options.tokens // seqlen, seqlen, seed, options.device)

    models.register()
    shortest = min(options.lengths)

    def begun(name: str, seqlen: int, weights: dict[str, Tensor] | None = None) -> Training:
        model = models.build(options, "small", seqlen)
        model.config._attn_implementation = models.OURS
        if weights is not None:
            model.load_state_dict(with_positions(weights, seqlen))
        training = Training(out / f"{name}.pt", model, models.optimizer(model, options.rate), {})
        if options.compile:
            compile_layers(model)
        # Compiles, and changes nothing, so that the time of steps is that of steps.
        loss_of(model, inputs(seqlen, 0)).backward()
        model.zero_grad(set_to_none=True)
        return training

    def step(state: Row, training: Training, seqlen: int, before: int) -> dict[str, Tensor]:
        number = before + state["step"]
        # Rises with each optimizer, and falls without an end in sight: a run may always go on.
        rise, fall = (state["step"] + 1) / WARM, (WARM / (number + 1)) ** 0.5
        training.learning_rate(options.rate * min(rise, 1.0) * min(fall, 1.0))
        model, given = training.model, inputs(seqlen, number)
        loss = models.train_step(model, model, training.optimizer, given)
        numbers = {"seqlen": float(seqlen), "steps_before": float(before)}
        return {"loss": loss, **{name: torch.tensor(x) for name, x in numbers.items()}}

    trunk = begun("gpt2-trunk", shortest)
    part = functools.partial(step, training=trunk, seqlen=shortest, before=0)
    finished(trunk, part, options.trunk, options, record, clock, f"{shortest} tokens, all of them")
    if trunk.state["step"] < options.trunk:
        return
    weights = trunk.model.state_dict()
    trainings = {seqlen: begun(f"gpt2-{seqlen}", seqlen, weights) for seqlen in options.lengths}
    del trunk, weights
    for target in range(options.every, options.steps + 1, options.every):
        for seqlen, training in trainings.items():
            if training.state["step"] < target:
                part = functools.partial(
                    step, training=training, seqlen=seqlen, before=options.trunk
                )
                finished(training, part, target, options, record, clock, f"{seqlen} tokens")
            if training.state["step"] < target:
                return
            measured = {(row["seqlen"], row["steps"]) for row in record.rows}
            if training.state["step"] == target and (seqlen, target) not in measured:
                measure(options, record, training, text, seqlen)
        compare(record, options)


def with_positions(weights: dict[str, Tensor], seqlen: int) -> dict[str, Tensor]:
    """A model's weights for more positions, which begin as those that there are, repeated."""
    name = "transformer.wpe.weight"
    known = weights[name]
    return {**weights, name: known.repeat(-(-seqlen // len(known)), 1)[:seqlen]}


def measure(options, record: Record, training: Training, text: Corpus, seqlen: int) -> None:
    value = perplexity(training.model, text, seqlen, max(options.lengths), options)
    steps, seconds = training.state["step"], training.state["seconds"]
    tokens = (options.trunk + steps) * options.tokens
    ns = 1e9 * seconds / (steps * options.tokens)
    record.row(seqlen=seqlen, steps=steps, tokens=tokens, perplexity=value, ns_a_token=ns)
    record.save()
    print(f"{seqlen}, {steps} steps: perplexity {value:.3f}, {ns:.0f} ns a token")


def compare(record: Record, options: argparse.Namespace) -> None:
    """The lengths, each at its lowest perplexity of the turns that all have done.

    The text is read over and over, so that models get worse in the end. Where the shortest does so
    first, that is not to count for the others.
    """
    found = {(row["steps"], row["seqlen"]): row for row in record.rows}
    steps = {n for n, _ in found if all((n, seqlen) in found for seqlen in options.lengths)}
    if not steps:
        return
    rows = [
        min((found[n, seqlen] for n in sorted(steps)), key=lambda row: row["perplexity"])
        for seqlen in sorted(options.lengths)
    ]
    short, long = rows[0], rows[-1]
    less = short["perplexity"] - long["perplexity"]
    of_each = ", ".join(
        f"{row['seqlen']}: {row['perplexity']:.2f} after {row['steps']} steps" for row in rows
    )
    share = f"{100 * abs(less) / short['perplexity']:.1f} %"
    record.result["summary"] = (
        f"{abs(less):.2f} ({share}) {'less' if less >= 0 else 'more'} perplexity at "
        f"{long['seqlen']} than at {short['seqlen']} ({of_each}: the lowest of each). All continue "
        f"from one model, trained for {options.trunk} steps at {short['seqlen']}; "
        f"{long['ns_a_token'] / short['ns_a_token']:.2f}× the time a token"
    )
    record.save()


@torch.no_grad()
def perplexity(model: nn.Module, text: Corpus, seqlen: int, longest: int, options) -> float:
    """Of the same windows of ``longest`` tokens, read ``seqlen`` at a time."""
    model.eval()
    losses = []
    count = min(options.windows, len(text.held_out) // longest)
    if not count:
        sys.exit(f"--characters: {options.characters}; more, for {longest} held-out tokens")
    for window in range(count):
        tokens = text.held_out[window * longest : (window + 1) * longest].astype(np.int64)
        pieces = torch.from_numpy(tokens).view(-1, seqlen).to(options.device)
        # Not compiled: for few calls that would take longer than it saves.
        with torch.compiler.set_stance("force_eager"), torch.autocast(pieces.device.type, BF16):
            logits = model(input_ids=pieces).logits
        # The first token of every piece of the longest size has no context in any of the models.
        losses.append(
            F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), pieces[:, 1:].flatten())
        )
    model.train()
    return math.exp(torch.stack(losses).mean().item())


# ---- documents


def plain(text: str, package: str) -> str:
    """Without comments at the top, imports, and the name of the package."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.strip() and line[0] != "#"), 0)
    kept = [line for line in lines[first:] if not re.match(r"\s*(from|import)\b", line)]
    return re.sub(re.escape(package), "_", "\n".join(kept), flags=re.IGNORECASE)


def labelled(options) -> tuple[list[np.ndarray], np.ndarray, list[str]]:
    """Tokens and package of every long document, of the packages that have the most of them."""
    shared = common.folder(options.text, "text", options.smoke)
    kept = shared / f"documents-{options.documents}-{options.vocabulary}.pt"
    if not kept.exists():
        given = {"characters": options.characters, "vocabulary": options.vocabulary}
        corpus(options.text, **given, smoke=options.smoke)
        tokenizer = tokenizer_of(options.text, **given, smoke=options.smoke)
        packages, read = [], []
        for file, text in documents(options.documents, least=2 * options.shortest):
            if file.path.suffix == ".py":
                packages.append(file.path.parts[0].removesuffix(".py"))
                read.append(plain(text, packages[-1]))
        encoded = [torch.tensor(ids, dtype=torch.int32) for ids in encode(tokenizer, read)]
        common.write(kept, lambda path: common.save((packages, encoded), path))
    found: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for package, ids in zip(*torch.load(kept, weights_only=True)):
        if len(ids) >= options.shortest:
            found[package].append(ids[: max(options.lengths)].numpy().astype(np.int64))
    names = sorted(found, key=lambda name: (-len(found[name]), name))[: options.packages]
    names = [name for name in names if len(found[name]) >= 4]
    tokens = [ids for name in names for ids in found[name]]
    labels = np.array([i for i, name in enumerate(names) for _ in found[name]])
    order = np.random.default_rng(0).permutation(len(labels))
    return [tokens[i] for i in order], labels[order], names


class Encoder(nn.Module):
    """Reads tokens in both directions; the mean of the last layer is classified."""

    def __init__(self, vocabulary: int, seqlen: int, classes: int, width: int, layers: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(seqlen, width) * 0.02)
        layer = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(
            layer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            # PyTorch's own layer, with our attention in place of its own.
            inner = layer.self_attn
            qkv = F.linear(layer.norm1(x), inner.in_proj_weight, inner.in_proj_bias)
            q, k, v = qkv.unflatten(2, (3, -1, 64)).unbind(2)
            x = x + inner.out_proj(attention(q, k, v).flatten(2))
            x = x + layer.linear2(F.gelu(layer.linear1(layer.norm2(x))))
        return self.out(self.norm(x).mean(1))


@torch.no_grad()
def count_right(model: nn.Module, rows: Tensor, targets: Tensor, batch: int) -> int:
    right = 0
    with torch.autocast(rows.device.type, BF16):
        for some, labels in zip(rows.split(batch), targets.split(batch)):
            right += int((model(some).argmax(1) == labels).sum())
    return right


def classify(options: argparse.Namespace, record: Record, clock: Clock, out: Path) -> None:
    tokens, labels, names = labelled(options)
    held = len(labels) // 5
    if held == 0:
        sys.exit(f"--documents: {options.documents}; more, as there are {len(labels)} long")
    targets = torch.from_numpy(labels).to(options.device)
    print(f"{len(labels)} documents of {len(names)} packages, {held} held out, as many to validate")
    record.result.update(documents=len(labels), packages=len(names), held_out=held, validated=held)
    for seqlen in options.lengths:
        batch = options.batch
        # Documents are padded with token 0 where they end before the length.
        rows = torch.zeros(len(tokens), seqlen, dtype=torch.long)
        for row, ids in zip(rows, tokens):
            row[: min(seqlen, len(ids))] = torch.from_numpy(ids[:seqlen])
        rows = rows.to(options.device)
        torch.manual_seed(0)
        width, layers = (64, 1) if options.smoke else (128, 2)
        model = Encoder(options.vocabulary, seqlen, len(names), width, layers).to(options.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.05)
        training = Training(out / f"documents-{seqlen}.pt", model, optimizer, {})

        def step(
            state: Row, training=training, rows=rows, seqlen=seqlen, batch=batch
        ) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(state["step"])
            pick = torch.randint(2 * held, len(rows), (batch,), generator=generator).to(rows.device)
            left = 1 - state["step"] / options.steps
            training.learning_rate(options.rate * min(1.0, (state["step"] + 1) / WARM) * left)
            with torch.autocast(rows.device.type, BF16):
                logits = training.model(rows[pick])
            loss = F.cross_entropy(logits.float(), targets[pick])
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=True)
            return {"loss": loss, "seqlen": torch.tensor(float(seqlen))}

        finished(training, step, options.steps, options, record, clock, f"{seqlen} tokens")
        if training.state["step"] < options.steps:
            return
        right, validated = (
            count_right(model, rows[part], targets[part], batch)
            for part in (slice(held), slice(held, 2 * held))
        )
        low, high = common.wilson(right, held)
        row = {"seqlen": seqlen, "f1": right / held, "low": low, "high": high}
        replace(record, {**row, "validation_f1": validated / held})
        print(f"\n{seqlen}: micro-F1 {right / held:.4f} ({low:.4f} to {high:.4f})")
    rows_now = record.data["rows"]
    # Chosen on other documents than those reported, of which the best length is the luckiest too.
    first, best = rows_now[0], max(rows_now, key=lambda row: row["validation_f1"])
    record.result["summary"] = (
        f"{100 * (best['f1'] - first['f1']):+.1f} points of micro-F1 at {best['seqlen']} tokens, "
        f"chosen on {held} other documents, over {first['seqlen']} "
        f"({held} held-out documents of {len(names)} packages)"
    )
    common.plot(
        out / "documents.png",
        {"micro-F1": ([r["seqlen"] for r in rows_now], [r["f1"] for r in rows_now])},
        title="Which package a source file is of",
        x="tokens read",
        y="micro-F1",
        log="x",
    )


# ---- both


def finished(
    training: Training, step, steps: int, options, record: Record, clock: Clock, name: str
) -> None:
    training.run(
        step,
        record,
        clock,
        until=lambda state: state["step"] >= steps,
        show=lambda state, means: f"{name}  step {state['step']}  loss {means['loss']:.4f}",
        share=lambda state: state["step"] / options.steps,
        device=options.device,
    )


def replace(record: Record, row: Row) -> None:
    """The row of a length, which a run that finds the length trained measures again."""
    record.rows[:] = [r for r in record.rows if r["seqlen"] != row["seqlen"]]
    record.row(**row)
    record.rows.sort(key=lambda r: r["seqlen"])
    record.save()


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("what", choices=("gpt2", "documents"))
    parser.add_argument("--lengths", nargs="+", type=common.count)
    parser.add_argument("--steps", type=int, help="of each length")
    parser.add_argument(
        "--trunk", type=common.count, default=1000, help="steps before the lengths part"
    )
    parser.add_argument("--every", type=common.count, default=250, help="steps of a turn of gpt2")
    parser.add_argument("--tokens", type=common.count, default=32768, help="of a step of gpt2")
    parser.add_argument("--batch", type=common.count, default=16, help="documents a step")
    parser.add_argument("--rate", type=float, help="learning rate")
    texts.arguments(parser, vocabulary=0, characters=0)
    parser.add_argument("--documents", type=int, default=300_000_000, help="characters searched")
    parser.add_argument("--windows", type=common.count, default=64, help="of perplexity")
    parser.add_argument("--shortest", type=int, default=8192, help="tokens of a document")
    parser.add_argument("--packages", type=int, default=20, help="that are told apart")
    options = parser.parse_args()
    options.dropout, options.compile = 0.0, not options.smoke
    for name, value in DEFAULTS[options.what].items():
        setattr(options, name, getattr(options, name) or value)
    if options.smoke:
        options.lengths, options.steps, options.every, options.tokens = [32, 64], 2, 1, 128
        options.trunk = 1
        options.characters, options.vocabulary, options.windows = 800_000, 512, 2
        options.documents, options.shortest = 1_500_000, 64
    if options.what == "gpt2":
        longest = max(options.lengths)
        for seqlen in options.lengths:
            if seqlen < 2:
                parser.error(f"--lengths: {seqlen}; 2 or more")
            if longest % seqlen or options.tokens % seqlen:
                parser.error(f"--lengths: {seqlen} does not divide {longest} and --tokens")
    clock = Clock(options.minutes)
    out = common.folder(options.out, f"long_context-{options.what}", options.smoke)
    torch.set_float32_matmul_precision("high")
    settings = {"what": options.what, "lengths": options.lengths}
    if options.what == "gpt2":
        text = corpus(
            options.text,
            characters=options.characters,
            vocabulary=options.vocabulary,
            smoke=options.smoke,
        )
        settings |= {"tokens": options.tokens, "rate": options.rate, "text": text.digest}
        settings |= {"trunk": options.trunk, "windows": options.windows}
        run = functools.partial(gpt2, text=text)
    else:
        names = ("steps", "batch", "rate", "documents", "characters", "vocabulary", "shortest")
        settings |= {name: getattr(options, name) for name in (*names, "packages")}
        run = classify
    record = Record.of(options, out, "long_context", settings)
    if options.what == "gpt2":
        record.result["text_tokens"] = len(text.train)
    run(options, record, clock, out)
    print(record.result.get("summary", "stopped; run again to go on"))
    record.save()


if __name__ == "__main__":
    common.entry(main)
