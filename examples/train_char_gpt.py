"""Trains a small GPT on real text twice: with flashsdk's attention and with standard attention.

    python examples/train_char_gpt.py                 # 2 to 3 minutes on 2 cores
    python examples/train_char_gpt.py --seconds 600   # longer, to a lower loss

The text is the source of Python's standard library, which every machine has, one character at a
time. Both models start from the same weights and see the same batches. Each lives in a process of
its own, so that its memory can be told apart, and the two take turns, so that whatever else the
machine does slows both. Prints and plots the losses, the time of a step and the memory, and fails
if the losses differ by more than TOLERANCE.

Exact attention changes nothing but the rounding. In hundreds of steps that moves a loss by some
millionths of a nat; without the gradient of k they are thousandths apart after twenty.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import string
import sys
import sysconfig
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import flashsdk as fs
import torch
import torch.nn.functional as F
from flashsdk.torch import attention
from torch import Tensor, nn

TOLERANCE = 1e-4  # nats, between the two losses of any step
KINDS = ("flashsdk", "standard")
COLOURS = {"flashsdk": "#0a7d5a", "standard": "#c2571a"}
ALPHABET = {c: i for i, c in enumerate(sorted(string.printable), start=1)}  # 0 is any other
MIB = 2**20


@dataclass(frozen=True)
class Config:
    context: int = 1024
    batch: int = 4
    layers: int = 4
    heads: int = 3
    dim: int = 192
    learning_rate: float = 1e-3
    warmup: int = 10  # steps


QUICK = Config(context=128, batch=2, layers=2, heads=2, dim=64)


# ---- text


def standard_library() -> list[Path]:
    """The modules of the standard library, packages left out, in the order of their names."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def load_text() -> Tensor:
    """All characters as numbers, int64 (characters,)."""
    files = [path.read_text("utf-8", errors="replace") for path in standard_library()]
    return torch.tensor([ALPHABET.get(c, 0) for c in "".join(files)])


def batch(text: Tensor, config: Config, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, (batch, context) each: a function of the step alone."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(len(text) - config.context, (config.batch, 1), generator=generator)
    rows = text[start + torch.arange(config.context + 1)]
    return rows[:, :-1], rows[:, 1:]


# ---- model


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as two matrix products with a softmax between, all in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, heads, seqlen, head_dim)
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5  # (batch, heads, seqlen, seqlen)
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (p @ v).transpose(1, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v, mask=fs.Causal())
    return out


ATTENTION = {"flashsdk": flash_attention, "standard": standard_attention}


class Block(nn.Module):
    def __init__(self, config: Config, kind: str):
        super().__init__()
        self.heads, self.attend = config.heads, ATTENTION[kind]
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.project = nn.Linear(config.dim, config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, 4 * config.dim), nn.GELU(), nn.Linear(4 * config.dim, config.dim)
        )

    def forward(self, x: Tensor) -> Tensor:  # (batch, seqlen, dim)
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        x = x + self.project(self.attend(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Transformer with learned positions, norms before each part, and the embedding as output."""

    def __init__(self, config: Config, kind: str):
        super().__init__()
        self.token = nn.Embedding(len(ALPHABET) + 1, config.dim)
        self.position = nn.Embedding(config.context, config.dim)
        self.blocks = nn.Sequential(*(Block(config, kind) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.dim)
        for name, weights in self.named_parameters():
            if weights.dim() == 2:
                depth = 2 * config.layers if name.endswith(("project.weight", "2.weight")) else 1
                nn.init.normal_(weights, std=0.02 / math.sqrt(depth))

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, seqlen) to (batch, seqlen, characters)
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.token.weight.T


# ---- one training, in a process of its own


def peak_memory() -> int:
    """Most bytes this process has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def train(pipe: Connection, kind: str, config: Config, text: Tensor) -> None:
    """Does a step for each number that comes, and answers with its loss and seconds.

    None ends it: the answer is how far memory grew over model, text and libraries.
    """
    torch.manual_seed(0)
    model = GPT(config, kind)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
    before = peak_memory()
    while (step := pipe.recv()) is not None:
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / config.warmup)
        inputs, targets = batch(text, config, step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        pipe.send((loss.item(), time.perf_counter() - started))
    pipe.send(peak_memory() - before)


@dataclass
class Run:
    """What one training has shown so far."""

    losses: list[float]  # nats per character
    seconds: list[float]  # per step
    memory: int = 0  # bytes

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds[1:] or self.seconds)  # the first one warms up


def train_both(config: Config, text: Tensor, steps: int, seconds: float) -> dict[str, Run]:
    """Both trainings, step by step in turns, until one of the limits is reached."""
    spawn = multiprocessing.get_context("spawn")
    pipes, workers, runs = {}, [], {kind: Run([], []) for kind in KINDS}
    for kind in KINDS:
        pipes[kind], theirs = spawn.Pipe()
        workers.append(spawn.Process(target=train, args=(theirs, kind, config, text), daemon=True))
        workers[-1].start()
    print("starting a process for each of the two", file=sys.stderr, flush=True)
    started = time.monotonic()
    for step in range(steps):
        for kind in KINDS if step % 2 else reversed(KINDS):
            pipes[kind].send(step)
            loss, elapsed = pipes[kind].recv()
            runs[kind].losses.append(loss)
            runs[kind].seconds.append(elapsed)
        spent = time.monotonic() - started
        show_progress(max((step + 1) / steps, spent / seconds), step + 1, runs)
        if spent > seconds:
            break
    for kind in KINDS:
        pipes[kind].send(None)
        runs[kind].memory = pipes[kind].recv()
    for worker in workers:
        worker.join()
    return runs


def show_progress(share: float, step: int, runs: dict[str, Run]) -> None:
    filled = round(24 * min(share, 1.0))
    losses = "  ".join(f"{kind} {run.losses[-1]:.3f}" for kind, run in runs.items())
    line = f"{'█' * filled}{'░' * (24 - filled)}  step {step}  loss: {losses}"
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="\n" if share >= 1 else "", file=sys.stderr, flush=True)
    elif step <= 10 or step % 10 == 0 or share >= 1:
        print(line, file=sys.stderr, flush=True)


# ---- what came out


def report(runs: dict[str, Run]) -> float:
    """Prints the comparison; returns the largest difference of the losses."""
    ours, standard = runs["flashsdk"], runs["standard"]
    steps = len(ours.losses)
    print(f"\n{'':24}{'flashsdk':>12}{'standard':>12}{'ratio':>9}")
    for step in sorted({0, *range(9, steps - 1, max(10, steps // 60 * 10)), steps - 1}):
        print(f"loss, step {step + 1:<13}{ours.losses[step]:12.4f}{standard.losses[step]:12.4f}")
    rows = (
        ("ms per step, median", ours.step_seconds * 1e3, standard.step_seconds * 1e3),
        ("memory of steps, MiB", ours.memory / MIB, standard.memory / MIB),
    )
    for name, mine, other in rows:
        print(f"{name:24}{mine:12.0f}{other:12.0f}{other / max(mine, 1e-9):8.2f}x")
    # Not max(), which forgets a NaN.
    apart = (torch.tensor(ours.losses) - torch.tensor(standard.losses)).abs().max().item()
    print(f"largest difference of the losses: {apart:.1e} nats, {TOLERANCE:g} allowed")
    return apart


def plot(runs: dict[str, Run], apart: float, config: Config, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curve, clock, memory) = plt.subplots(
        1, 3, figsize=(11, 4), width_ratios=(3, 1, 1), layout="constrained"
    )
    styles = {"flashsdk": {"linewidth": 4, "alpha": 0.55}, "standard": {"linewidth": 1.2}}
    for kind, run in runs.items():
        steps = range(1, len(run.losses) + 1)
        curve.plot(steps, run.losses, label=kind, color=COLOURS[kind], **styles[kind])
    curve.set(
        title=f"Losses, at most {apart:.0e} nats apart", xlabel="step", ylabel="nats per character"
    )
    curve.legend(frameon=False)
    for axes, title, values in (
        (clock, "ms per step", {kind: run.step_seconds * 1e3 for kind, run in runs.items()}),
        (memory, "memory of steps, MiB", {kind: run.memory / MIB for kind, run in runs.items()}),
    ):
        bars = axes.bar(list(values), list(values.values()), color=[COLOURS[k] for k in values])
        axes.bar_label(bars, fmt="%.0f")
        axes.set_title(title)
    for axes in (curve, clock, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"GPT, {config.layers} layers, dim {config.dim}, {config.heads} heads, context "
        f"{config.context}, batch {config.batch}, float32, {fs.get_num_threads()} threads"
    )
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="of each model (%(default)s)")
    parser.add_argument("--seconds", type=float, default=150, help="at most (%(default)s)")
    parser.add_argument("--context", type=int, default=Config.context, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo_train_char_gpt.png"), help="picture")
    parser.add_argument("--quick", action="store_true", help="a tiny model and 6 steps, as a check")
    arguments = parser.parse_args()
    config = QUICK if arguments.quick else Config(context=arguments.context)
    text = load_text()
    print(
        f"{len(text) / 1e6:.1f} million characters of {len(standard_library())} modules; {config}"
    )
    steps = min(arguments.steps, 6) if arguments.quick else arguments.steps
    runs = train_both(config, text, steps, arguments.seconds)
    apart = report(runs)
    try:
        plot(runs, apart, config, arguments.out)
    except ImportError:
        print("no picture, as matplotlib is missing: pip install matplotlib")
    if not apart <= TOLERANCE:
        sys.exit(f"the losses differ by {apart:.3g} nats")


if __name__ == "__main__":
    main()
