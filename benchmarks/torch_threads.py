"""A causal forward alone and right after a matrix product of PyTorch, in milliseconds: CSV.

    python benchmarks/torch_threads.py [--shape BATCH SEQLEN HEADS HEAD_DIM] [--realtime]

In a model attention always follows a matrix product, whose threads still spin when it begins.
flashsdk.torch runs on the same threads; the functions for NumPy have threads of their own, and
show what two pools in a process cost. All go in turns, so that each meets the same machine. Given
are the least, the 10th percentile and the median of all rounds. Where others use the machine,
--realtime keeps them off its processors meanwhile: a few seconds, as root.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import flashsdk as fs
import torch
from flashsdk.torch import flash_attn_func
from torch.nn.functional import scaled_dot_product_attention

Call = Callable[[], object]


def calls_of(shape: tuple[int, ...]) -> dict[str, Call]:
    q, k, v = (torch.randn(shape) for _ in range(3))
    arrays = [x.numpy() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    causal = fs.Causal()
    return {
        "flashsdk.torch.flash_attn_func": lambda: flash_attn_func(q, k, v, causal=True),
        "flashsdk.mha_fwd": lambda: fs.mha_fwd(*arrays, mask=causal),
        "torch scaled_dot_product_attention": lambda: scaled_dot_product_attention(
            *heads_first, is_causal=True
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", type=int, nargs=4, default=[1, 512, 12, 64])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--realtime", action="store_true")
    args = parser.parse_args()
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
    batch, rows, heads, dim = args.shape
    x, w = torch.randn(batch * rows, heads * dim), torch.randn(heads * dim, heads * dim)
    calls = calls_of(tuple(args.shape))
    times: dict[tuple[str, str], list[float]] = {}
    for n in range(args.rounds + 1):
        for name, call in calls.items():
            for after in ("", "x @ w"):
                call()  # the threads of the one before go to sleep
                for _ in range(args.repeats):
                    if after:
                        x @ w
                    start = time.perf_counter()
                    call()
                    elapsed = (time.perf_counter() - start) * 1e3
                    if n > 0:  # the first round warms up
                        times.setdefault((name, after), []).append(elapsed)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["call", "after", "shape", "threads", "min_ms", "p10_ms", "median_ms"])
    shape = "x".join(map(str, args.shape))
    for (name, after), ms in times.items():
        threads = fs.get_num_threads() if name.endswith("mha_fwd") else torch.get_num_threads()
        tenths = statistics.quantiles(ms, n=10)
        numbers = [f"{x:.3f}" for x in (min(ms), tenths[0], statistics.median(ms))]
        writer.writerow([name, after or "nothing", shape, threads, *numbers])


if __name__ == "__main__":
    main()
