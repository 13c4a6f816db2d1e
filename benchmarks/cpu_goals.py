"""What the CPU kernels must reach: shares of the peak, ratios to PyTorch's flash attention.

The ratios are stated for AMD processors with AVX-512. On others PyTorch's matrix products leave
less of the machine unused: with AVX2 alone, or on Intel, whose AMX it uses for bf16. There bf16 has
a ratio of its own, as both run on the same tile registers, and so has fp16, which runs there, too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from flashsdk._commands import bench_cpu_tables

_THIS = sys.modules[__name__]

CAUSAL_POINTS = 0.04  # causal may lie this far below the same without mask
FP16_OF_FP32 = 0.85  # fp16's rate, of fp32's
SPARSE_SLOPE, SPARSE_OFFSET = 1.15, 0.01  # time of density rho, of dense time
LATENCY = {
    "numpy": 20e-6,
    "torch": 15e-6,
}  # seconds of a forward call that computes next to nothing

# (dtype, op, head_dim) at seqlen 4096 without mask
SHARE_4096 = {
    ("fp32", "fwd", 128): 0.85,
    ("fp32", "fwd", 64): 0.83,
    ("fp32", "bwd", 128): 0.77,
    ("fp32", "bwd", 64): 0.77,
    ("bf16", "fwd", 128): 0.83,
    ("bf16", "fwd", 64): 0.77,
    ("bf16", "bwd", 128): 0.74,
    ("bf16", "bwd", 64): 0.74,
}
SHARE_1024 = {"fp32": 0.75, "bf16": 0.65}  # forward without mask
RATIO_4096 = {
    ("fp32", "fwd"): 2.3,
    ("fp32", "bwd"): 2.3,
    ("bf16", "fwd"): 4.2,
    ("bf16", "bwd"): 2.5,
    ("fp16", "fwd"): 3.0,
    ("fp16", "bwd"): 20.0,
}
RATIO_1024_CAUSAL = 3.0  # forward
RATIO_4096_TILES = {"bf16": 1.3, "fp16": 2.0}  # with AMX, forward and backward, any mask


@dataclass(frozen=True)
class Goal:
    share: float | None = None
    ratio: float | None = None
    left_out: bool = False  # a ratio is stated, for other processors


def goal(row: dict[str, Any], record: dict[str, Any]) -> Goal:
    """The goal of one dense row; some depend on other rows of the same record."""
    if record["quick"]:
        return Goal()  # sizes too small
    rows = [r for r in record["rows"] if r["kind"] == "dense"]
    isa = record["isa"]
    dtype, op, dim, seqlen, mask = (row[k] for k in ("dtype", "op", "head_dim", "seqlen", "mask"))
    share = ratio = None
    if seqlen == 4096 and mask == "none":
        share = SHARE_4096.get((dtype, op, dim))
        ratio = RATIO_4096.get((dtype, op))
        if dtype == "fp16" and (fp32 := _find(rows, row, dtype="fp32")) is not None:
            share = FP16_OF_FP32 * fp32["share"]
    elif seqlen == 4096 and (full := _find(rows, row, mask="none")) is not None:
        share = full["share"] - CAUSAL_POINTS
    elif seqlen == 1024 and op == "fwd":
        if mask == "none":
            share = SHARE_1024.get(dtype)
        else:
            ratio = RATIO_1024_CAUSAL
    if isa == "avx512_amx" and dtype in RATIO_4096_TILES:
        return Goal(None, RATIO_4096_TILES[dtype] if seqlen == 4096 else None)
    if dtype == "bf16" and isa != "avx512_bf16" and mask == "none":
        share = None  # stated for the dot-product instruction
    comparable = isa.startswith("avx512") and "AMD" in record["cpu"]
    return Goal(share, ratio if comparable else None, left_out=not comparable and ratio is not None)


def limit(row: dict[str, Any]) -> float | None:
    """Most that a block-sparse row may take of the dense one's time, or a small call of seconds."""
    if row["kind"] == "sparse":
        return sparse_limit(row["density"])
    return LATENCY[row["framework"]] if row["op"] == "fwd" else None


def notes(record: dict[str, Any]) -> list[str]:
    """How many of the goals a record reaches."""
    missed, of = bench_cpu_tables.missed(record, _THIS)
    lines = []
    if of:
        lines.append(f"goals in parentheses: {of - missed} of {of} reached, ✗ marks the others")
    if left_out := bench_cpu_tables.left_out(record, _THIS):
        lines.append(f"goals beside PyTorch, for AMD's AVX-512 alone, not applied here: {left_out}")
    return lines


def sparse_limit(density: float) -> float:
    """Most that a block-sparse call may take, of the dense one's time."""
    return SPARSE_SLOPE * density + SPARSE_OFFSET


def _find(
    rows: list[dict[str, Any]], like: dict[str, Any], **changed: str
) -> dict[str, Any] | None:
    wanted = {k: like[k] for k in ("dtype", "op", "head_dim", "seqlen", "mask", "heads")} | changed
    return next((r for r in rows if all(r[k] == v for k, v in wanted.items())), None)
