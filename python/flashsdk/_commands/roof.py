"""What no call on a machine can pass: its rate of products and its memory, measured there."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashsdk as fs
from flashsdk import _bindings
from flashsdk._commands import gpu_record
from flashsdk._commands.bench_cpu import DTYPES, PEAK_SECONDS, peak_kind
from flashsdk._commands.timing import Call

COPIED = 256 << 20  # bytes; more than caches hold
GPU_COPIED = 1 << 30
GPU_ROWS = 8192  # of square matrices, whose product takes a card's tensor cores to their limit

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Roof:
    """A roofline: a call of ``intensity`` FLOPs a byte does at most ``limit(intensity)`` a second.

    Williams, Waterman, Patterson, doi:10.1145/1498765.1498785.
    """

    flops: float  # a second
    bytes: float  # a second

    def limit(self, intensity: float) -> float:
        return min(self.flops, self.bytes * intensity)


@dataclass(frozen=True)
class Yardstick:
    """Calls to be timed in turns with what is measured, and what their seconds say."""

    calls: dict[str, Call]
    roof: Callable[[Samples], Roof]


def of_cpu(dtype: str) -> Yardstick:
    """Multiply-adds of the instruction set in use, and a copy, on as many threads as a call."""
    kind = peak_kind(dtype)
    peaks: list[float] = []

    def product() -> None:
        peaks.append(_bindings.measure_peak(kind, PEAK_SECONDS))

    threads = fs.get_num_threads()
    source, target = (np.array_split(np.ones(COPIED // 8), threads) for _ in range(2))

    def copy() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(np.copyto, target, source))

    return Yardstick(
        {"product": product, "copy": copy},
        lambda samples: Roof(
            1e9 * statistics.median(peaks), 2 * COPIED / statistics.median(samples["copy"])
        ),
    )


def of_gpu(dtype: str) -> Yardstick:
    """A product of matrices in this dtype by cuBLAS, and a copy."""
    import torch

    kind: Any = getattr(torch, DTYPES[dtype])
    a, b, c = (torch.randn(GPU_ROWS, GPU_ROWS, device=gpu_record.DEVICE).to(kind) for _ in range(3))
    source, target = (torch.ones(GPU_COPIED // 4, device=gpu_record.DEVICE) for _ in range(2))

    def roof(samples: Samples) -> Roof:
        product, copy = (statistics.median(samples[name]) for name in ("product", "copy"))
        return Roof(2 * GPU_ROWS**3 / product, 2 * GPU_COPIED / copy)

    return Yardstick(
        {"product": lambda: torch.mm(a, b, out=c), "copy": lambda: target.copy_(source)}, roof
    )
