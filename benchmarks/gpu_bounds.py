"""What bounds a dense cell: the clock and power it runs at, its share of the tensor cores' peak.

    python3 benchmarks/gpu_bounds.py [--out benchmarks/results/gpu_bounds.csv]
                                     [--cells fwd:128:none:4096 bwd:256:causal:512]

Of each cell ours and cuDNN's, in turns: TFLOP/s, the medians of nvidia-smi's clock and power while
it runs, and what nvidia-smi says lowers the clock, with its share of the time. Once on random
numbers and once on zeros, for which the instructions are the same and fewer bits switch: what is
faster on zeros is bound by what that costs, not by its instructions. `visited` is the part of the
scores in tiles of which the mask leaves something, `of_peak` what the products of these take of
what the tensor cores do at that clock (4096 operations a cycle and multiprocessor).

Of a backward also each of our kernels by itself, from PyTorch's profiler, with the bytes that a
pass has to move beside those of a copy in the same run.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import torch
from flashsdk._commands.gpu_timing import WINDOWS, measured, prepared, timed
from gpu_calls import TOKENS, WIDTH, backends, flops, fs, ours, peer, tensors
from gpu_card import REASONS, Meter, card, summary

STEP = 0.05  # seconds of a sample
PER_CYCLE = 4096  # operations of a Hopper multiprocessor's tensor cores, 16-bit
CELLS = ["fwd:128:none:4096", "fwd:128:none:16384", "bwd:128:none:16384", "bwd:256:causal:512"]
Row = dict[str, Any]


def sustained(run: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Milliseconds of a call, and the clocks and power, of the second half of so long a time."""
    samples, _ = prepared({"": run}, 1e3 * STEP)
    with Meter() as meter:
        ms = measured(samples, round(seconds / STEP))[""]
    (begin, end) = WINDOWS[-1]
    found = summary(meter.during([((begin + end) / 2, end)]))
    if found is None:
        sys.exit("gpu_bounds: nvidia-smi says nothing of clock and power")
    return {"ms": statistics.median(ms[len(ms) // 2 :]), **found}


def visited(tile: tuple[int, int], causal: bool, seqlen: int) -> float:
    """Share of the score matrix in tiles of which a causal mask leaves something."""
    if not causal:
        return 1.0
    rows, columns = tile
    corners = itertools.product(range(0, seqlen, rows), range(0, seqlen, columns))
    return sum(j < i + rows for i, j in corners) * rows * columns / seqlen**2


def bound(op: Any, dim: int, causal: bool, seqlen: int, seconds: float, rounds: int) -> list[Row]:
    """Both backends on random numbers and on zeros."""
    shape = (TOKENS // seqlen, seqlen, WIDTH // dim, dim)
    x = tensors(*shape, torch.bfloat16)
    mask = fs.Causal() if causal else None
    backend = backends()[-1]
    runs = {}
    for data, inputs in {"random": x, "zeros": [torch.zeros_like(t) for t in x]}.items():
        runs[backend, data] = ours(inputs, backend, mask=mask)[op, backend]
        runs["cudnn", data] = peer(inputs, "cudnn", causal)[op, "cudnn"]
    why = fs.explain(*x[:3], op=op, mask=mask, backend=backend)
    share = visited(why.tile, causal, seqlen)
    seen: dict[Any, list[dict[str, Any]]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            seen[key].append(sustained(run, seconds))
    products = TOKENS * seqlen * flops(op, WIDTH // dim, dim, causal=False)
    limit = card()["limit_watts"]
    cycles = torch.cuda.get_device_properties(0).multi_processor_count * PER_CYCLE * 1e6
    cell = {"op": op, "head_dim": dim, "mask": "causal" if causal else "none", "seqlen": seqlen}
    rows = []
    for (name, data), times in seen.items():
        ms, mhz, watts = (
            statistics.median(t[what] for t in times) for what in ("ms", "sm_mhz", "watts")
        )
        row = {**cell, "name": name, "data": data, "part": "call", "ms": round(ms, 4)}
        row |= {"tflops": round(products * (0.5 if causal else 1) / ms / 1e9, 1)}
        row |= {"mhz": mhz, "watts": round(watts, 1), "limit_watts": limit}
        shares = {
            reason: statistics.mean(t["lowered_by"].get(reason, 0.0) for t in times)
            for reason in REASONS.values()
        }
        lowered = [f"{reason} {share:.0%}" for reason, share in shares.items() if share]
        row |= {"lowered_by": ", ".join(lowered)}
        if name == backend:
            row |= {"kernel": why.kernel, "visited": round(share, 4)}
            row |= {"of_peak": round(products * share / ms * 1e3 / (cycles * mhz), 4)}
        rows.append(row)
        print(row, flush=True)
    if op == "bwd":
        for part, ms in parts(runs[backend, "random"]).items():
            row = {**cell, "name": backend, "data": "random", "part": part, "ms": round(ms, 4)}
            if part != "main":
                row |= {"gb_per_s": round(moved(part, dim) / ms / 1e6)}
            rows.append(row)
            print(row, flush=True)
        rows.append({**cell, "name": "copy", "part": "copy", "gb_per_s": round(copied())})
    return rows


def parts(run: Callable[[], object], calls: int = 20) -> dict[str, float]:
    """Milliseconds of a backward's three kernels, in the order in which they are launched."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    events = sorted(profiled.events(), key=lambda e: e.time_range.start)
    kernels = [e for e in events if "flashsdk" in e.name]
    if len(kernels) != 3 * calls:  # sm80 has other passes
        return {}
    names = ("first", "main", "last")
    return {
        name: statistics.median(e.time_range.elapsed_us() for e in kernels[i::3]) / 1e3
        for i, name in enumerate(names)
    }


def moved(part: str, dim: int) -> int:
    """Bytes: the first pass reads O and dO and, above 128, clears dq_accum; the last reads that."""
    elements = TOKENS * WIDTH
    if part == "first":
        return elements * (2 + 2 + (4 if dim > 128 else 0))
    return elements * (4 + 2)


def copied() -> float:
    """GB/s read and written by a copy of 256 MiB."""
    a = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / timed({"": lambda: b.copy_(a)})[""].ms / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default="benchmarks/results/gpu_bounds.csv")
    parser.add_argument("--cells", nargs="+", default=CELLS, help="op:head_dim:mask:seqlen")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    rows: list[Row] = []
    for cell in args.cells:
        rows += bound(*named(cell), args.seconds, args.rounds)
        write(Path(args.out), rows)
    return 0


def named(cell: str) -> tuple[str, int, bool, int]:
    """op, head_dim, whether it is causal, seqlen."""
    op, dim, mask, seqlen = cell.split(":")
    return op, int(dim), mask == "causal", int(seqlen)


def write(path: Path, rows: list[Row]) -> None:
    fields = list(dict.fromkeys(key for row in rows for key in row))
    device = torch.cuda.get_device_name()
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["device", *fields], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"device": device, **row} for row in rows)


if __name__ == "__main__":
    sys.exit(main())
