"""Attention alone: time and extra memory against the sequence length, and GPT-2's attention.

The claims (FlashAttention, arXiv 2205.14135, figures 1 and 3, appendix E): up to 3 times faster
than PyTorch's standard attention from 128 to 2K, block-sparse faster than all at every length, 7.6
times on GPT-2's attention, memory linear and up to 20 times less, lengths to 64K.

    python examples/paper/attention.py                     # on a GPU; --minutes N stops it
    python examples/paper/attention.py --smoke             # a check: seconds on a CPU

Each problem is given to all methods in turns, in one process, and the median counts: standard
attention (matrix product, mask, softmax, dropout, matrix product), each backend of PyTorch's
scaled_dot_product_attention, flashsdk, and flashsdk with the block-sparse butterfly layout. Lengths
from 128 to 64K have the same number of tokens, so that linear work is the same. A problem that is
in ``record.json`` is not measured again: a run that was stopped goes on where it was.

Memory is what forward and backward take at their peak beyond the inputs, the output and the
gradients. It is counted on a GPU alone.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import common
import flashsdk as fs
import torch
import torch.nn.functional as F
from common import Clock, Record, Row
from flashsdk import layouts
from flashsdk.torch import attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Problem:
    name: str
    batch: int
    seqlen: int
    heads: int = 8
    head_dim: int = 64
    causal: bool = False
    dropout: float = 0.0


GPT2_MEDIUM = Problem("GPT-2 medium", 64, 1024, heads=16, causal=True, dropout=0.1)
TOKENS = 65536  # of each problem of the lengths
VARIANTS = {  # as GPT-2 trains first, as the page's rows are of that
    "causal, dropout 0.1": {"causal": True, "dropout": 0.1},
    "plain": {},
    "causal": {"causal": True},
}
PHASES = ("forward", "backward", "both")
Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (batch, seqlen, heads, head_dim)


def problems(smoke: bool) -> list[Problem]:
    lengths = [64, 128] if smoke else [2**i for i in range(7, 17)]
    tokens = 256 if smoke else TOKENS
    gpt2 = Problem("GPT-2 medium", 1, 128, heads=2, causal=True, dropout=0.1)
    return [gpt2 if smoke else GPT2_MEDIUM] + [
        Problem(name, tokens // n, n, heads=2 if smoke else 8, **variant)
        for name, variant in VARIANTS.items()
        for n in lengths
    ]


# ---- methods


def standard(problem: Problem) -> Call:
    scale = problem.head_dim**-0.5
    hidden: list[Tensor] = []  # made once, as a model does

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT * scale
        if problem.causal:
            if not hidden:
                shape = (problem.seqlen, problem.seqlen)
                hidden.append(torch.ones(shape, dtype=torch.bool, device=q.device).triu(1))
            scores = scores.masked_fill(hidden[0], -torch.inf)
        p = scores.softmax(-1)
        if problem.dropout:
            p = F.dropout(p, problem.dropout)
        return (p @ v).transpose(1, 2)

    return call


def sdpa(backend: SDPBackend) -> Callable[[Problem], Call]:
    def method(problem: Problem) -> Call:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q, k, v, dropout_p=problem.dropout, is_causal=problem.causal
                )
            return out.transpose(1, 2)

        return call

    return method


def ours(problem: Problem) -> Call:
    mask = fs.Causal() if problem.causal else None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, dropout_p=problem.dropout)

    return call


def block_sparse(problem: Problem) -> Call:
    band = fs.Causal() if problem.causal else None
    mask = layouts.butterfly(problem.seqlen, problem.seqlen, 128, band=band)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, dropout_p=problem.dropout)

    return call


METHODS: dict[str, Callable[[Problem], Call]] = {
    "standard": standard,
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "flashsdk": ours,
    "flashsdk block-sparse": block_sparse,
}


# ---- measuring


class Bench:
    """One method on one problem."""

    def __init__(self, method: Callable[[Problem], Call], problem: Problem, device: str):
        self.call, self.problem, self.device = method(problem), problem, device
        self.cuda = torch.device(device).type == "cuda"
        shape = (problem.batch, problem.seqlen, problem.heads, problem.head_dim)
        kind = torch.bfloat16 if self.cuda else torch.float32
        generator = torch.Generator(device).manual_seed(0)
        self.inputs = [
            torch.randn(shape, generator=generator, device=device).to(kind).requires_grad_()
            for _ in range(3)
        ]
        self.dout = torch.randn(shape, generator=generator, device=device).to(kind)

    def forward(self) -> Tensor:
        return self.call(*self.inputs)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        # Without a graph that is kept, so that memory is that of a training step.
        return torch.autograd.grad(out, self.inputs, self.dout)

    def memory(self) -> int | None:
        """Bytes at the peak of forward and backward, beyond inputs, output and gradients."""
        if not self.cuda:
            return None
        # Once before, so that what libraries keep for themselves is there.
        self.backward(self.forward())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.backward(self.forward())
        torch.cuda.synchronize()
        results = 4 * self.dout.nbytes
        return max(0, torch.cuda.max_memory_allocated() - before - results)

    def time(self, seconds: float) -> dict[str, float]:
        """Median seconds of each phase."""
        calls: dict[str, tuple[Callable[..., object], Callable[[], tuple]]] = {
            "forward": (self.forward, tuple),
            "backward": (self.backward, lambda: (self.forward(),)),
            "both": (lambda: self.backward(self.forward()), tuple),
        }
        return {
            phase: statistics.median(
                common.measure(call, self.device, seconds=seconds, prepare=prepare)
            )
            for phase, (call, prepare) in calls.items()
        }


def attempt(method: str, problem: Problem, device: str, seconds: float, memory: bool) -> Row:
    """Times of a method, and its memory if asked for, or why there are none."""
    # PyTorch warns why a backend does not take a problem, and then raises.
    warnings.filterwarnings("ignore", module=__name__)
    try:
        bench = Bench(METHODS[method], problem, device)
        row: Row = {"memory": bench.memory()} if memory else {}
        return {**bench.time(seconds), **row}
    except Exception as error:  # one method's fault is not to end the others' turns
        return common.failure(error)
    finally:
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()


def measure(problem: Problem, device: str, *, rounds: int, seconds: float) -> dict[str, Row]:
    """All methods, ``rounds`` times in turns; of times the median, memory of the first turn."""
    found: dict[str, list[Row]] = {method: [] for method in METHODS}
    for turn in range(rounds):
        for method, rows in found.items():
            if not rows or "error" not in rows[-1]:
                rows.append(attempt(method, problem, device, seconds, memory=turn == 0))
    merged: dict[str, Row] = {}
    for method, rows in found.items():
        if "error" in rows[-1]:
            merged[method] = rows[-1]
        else:
            times = {phase: statistics.median(row[phase] for row in rows) for phase in PHASES}
            merged[method] = {**times, "memory": rows[0]["memory"]}
    return merged


# ---- what came out


def summary(rows: list[Row]) -> Row:
    """For each problem how many times faster and smaller flashsdk is than standard attention."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["name"], row["seqlen"]), {})[row["method"]] = row
    ratios = []
    for (name, seqlen), methods in found.items():
        standard, mine, sparse = (
            methods.get(method, {}) for method in ("standard", "flashsdk", "flashsdk block-sparse")
        )
        entry: Row = {"name": name, "seqlen": seqlen}
        for key, over in (("dense", mine), ("sparse", sparse)):
            if standard.get("both") and over.get("both"):
                entry[key] = round(standard["both"] / over["both"], 2)
        if standard.get("memory") and mine.get("memory"):
            entry["memory"] = round(standard["memory"] / mine["memory"], 1)
        ratios.append(entry)
    return {"ratios": ratios}


def pictures(rows: list[Row], out) -> None:
    for variant in VARIANTS:
        for key, what, unit in (("both", "time", 1e3), ("memory", "memory", 2**-20)):
            lines = {}
            for method in METHODS:
                points = [
                    (row["seqlen"], row[key] * unit)
                    for row in rows
                    if row["method"] == method and row["name"] == variant and row.get(key)
                ]
                if points:
                    lines[method] = tuple(zip(*points))
            if lines:
                stem = variant.replace(", ", "_").replace(" ", "_")
                y = "forward and backward, ms" if key == "both" else "extra memory, MiB"
                common.plot(
                    out / f"{what}_{stem}.png",
                    lines,
                    title=f"Attention, {variant}",
                    x="sequence length",
                    y=y,
                    log="xy",
                )


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--rounds", type=common.count, default=2, help="turns of all methods")
    parser.add_argument("--seconds", type=float, default=0.03, help="of one measurement")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.seconds = 1, 0.0
    clock = Clock(options.minutes)
    out = common.folder(options.out, "attention", options.smoke)
    # The device, as one picture shows lengths that two runs may have measured.
    settings = {"tokens": TOKENS, "dtype": "bfloat16" if options.device != "cpu" else "float32"}
    settings["device"] = common.device_name(options.device)
    record = Record.of(options, out, "attention", settings)
    todo = problems(options.smoke)
    done = {(row["name"], row["seqlen"]) for row in record.data["rows"]}
    for number, problem in enumerate(todo):
        if (problem.name, problem.seqlen) in done:
            continue
        if clock.over(reserve=3):
            print(f"stopped after {number} of {len(todo)} problems; run again to go on")
            break
        common.progress(number / len(todo), f"{problem.name}, {problem.seqlen}")
        found = measure(problem, options.device, rounds=options.rounds, seconds=options.seconds)
        for method, values in found.items():
            record.row(method=method, **asdict(problem), **values)
            shown = values.get("error") or "  ".join(
                f"{phase} {values[phase] * 1e3:8.3f} ms" for phase in PHASES
            )
            print(f"{problem.name:20} {problem.seqlen:6} {method:22} {shown}")
        record.result.update(summary(record.data["rows"]))
        record.save()
    record.save()
    pictures(record.data["rows"], out)


if __name__ == "__main__":
    common.entry(main)
