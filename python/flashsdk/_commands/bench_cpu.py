"""The CPU part of ``bench``: what is measured, and how.

Every row times, in turns, the machine's peak, ours and PyTorch's scaled_dot_product_attention with
the flash backend forced, and keeps all samples. Ours writes into given outputs; PyTorch has no such
way.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import flashsdk as fs
from flashsdk import _bindings
from flashsdk._commands.standard import have_torch
from flashsdk._commands.timing import Interleaved, median

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OPS = ("fwd", "bwd")
BLOCK = 128
PEAK_SECONDS = 0.1
# What is measured against the bf16 dot product. fp16 takes three or four of them.
DOT_PRODUCTS = {
    "avx512_bf16": ("bf16",),
    "avx512_amx": ("bf16", "fp16"),
    "neon_bf16": ("bf16",),
}


@dataclass(frozen=True)
class Effort:
    """How long a row is measured. All rows of a full run take some minutes on two cores."""

    rounds: int = 9
    seconds: float = 6.0
    slice: float = 0.12


QUICK = Effort(rounds=2, seconds=0.5, slice=0.02)


@dataclass(frozen=True)
class Case:
    kind: str  # "dense", "sparse", "latency"
    dtype: str
    op: str
    heads: int
    seqlen: int
    head_dim: int
    mask: str = "none"  # "none", "causal", "random blocks"
    framework: str = ""  # of a latency's arrays

    @property
    def name(self) -> str:
        parts = [self.kind, self.dtype, self.op, f"d{self.head_dim}", str(self.seqlen), self.mask]
        return " ".join([*parts, self.framework]).strip()

    @property
    def flops(self) -> float:
        """Of the products that a dense or causal call needs; a backward counts 2.5 forwards."""
        forward = 4.0 * self.heads * self.seqlen**2 * self.head_dim
        return (
            forward * (0.5 if self.mask == "causal" else 1.0) * (2.5 if self.op == "bwd" else 1.0)
        )


SPARSE_DENSITIES = (0.5, 0.25, 0.125, 0.0625)


def cases(quick: bool) -> list[Case]:
    sizes = (
        [(4, 256, 64), (2, 256, 128)] if quick else [(16, 1024, 64), (8, 4096, 64), (8, 4096, 128)]
    )
    dense = [
        Case("dense", dtype, op, heads, seqlen, dim, mask)
        for dtype in DTYPES
        for op in OPS
        for heads, seqlen, dim in sizes
        for mask in ("none", "causal")
    ]
    sparse = [
        Case("sparse", dtype, op, 1 if quick else 4, 2048 if quick else 8192, dim, "random blocks")
        for dtype, dims in (("fp32", (64, 128)), ("bf16", (64,)))
        for op in OPS
        for dim in dims
    ]
    latency = [
        Case("latency", "fp32", op, 1, 16, 64, framework=framework)
        for framework in ("numpy", "torch")
        for op in OPS
    ]
    return dense + sparse + latency


def runnable(case: Case) -> str | None:
    """Why this machine cannot run a case; None when it can."""
    if case.framework == "torch" and not have_torch():
        return "torch is not installed"
    if case.dtype == "bf16" and not have_torch() and _ml_dtypes() is None:
        return "neither torch nor ml_dtypes is installed"
    return None


def measure(case: Case, effort: Effort) -> list[dict[str, Any]]:
    """The rows of one case, as they stand in a record."""
    kinds = {"dense": _dense, "sparse": _sparse, "latency": _latency}
    return [{**asdict(case), **row} for row in kinds[case.kind](case, effort)]


class Problem:
    """Arrays of one case, batch 1, random normal, and the calls on them."""

    def __init__(self, case: Case, framework: str = "") -> None:
        rng = np.random.default_rng(0)
        shape = (1, case.seqlen, case.heads, case.head_dim)
        values = [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]
        self.case = case
        self.torch = framework == "torch" or (not framework and have_torch())
        self.q, self.k, self.v, self.dout = (self._array(x) for x in values)

    def _array(self, x: Any) -> Any:
        name = DTYPES[self.case.dtype]
        if self.torch:
            import torch

            return torch.from_numpy(x).to(getattr(torch, name))
        return x.astype(_ml_dtypes().bfloat16 if name == "bfloat16" else name)

    def ours(self, mask: fs.Dense | fs.Band | fs.BlockMask) -> Callable[[], object]:
        q, k, v, dout = self.q, self.k, self.v, self.dout
        out, lse = fs.mha_fwd(q, k, v, mask=mask, backend="cpu")
        if self.case.op == "fwd":
            return lambda: fs.mha_fwd(q, k, v, mask=mask, backend="cpu", out=out, lse=lse)
        dq, dk, dv = fs.mha_bwd(dout, q, k, v, out, lse, mask=mask, backend="cpu")
        return lambda: fs.mha_bwd(
            dout, q, k, v, out, lse, mask=mask, backend="cpu", dq=dq, dk=dk, dv=dv
        )

    def plain(self) -> Callable[[], object]:
        """The call as most people write it: results are allocated."""
        q, k, v, dout = self.q, self.k, self.v, self.dout
        if self.case.op == "fwd":
            return lambda: fs.mha_fwd(q, k, v)
        out, lse = fs.mha_fwd(q, k, v)
        return lambda: fs.mha_bwd(dout, q, k, v, out, lse)

    def peer(self) -> Callable[[], object]:
        """PyTorch on the same tensors, flash backend forced."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        causal = self.case.mask == "causal"
        q, k, v, dout = (x.transpose(1, 2) for x in (self.q, self.k, self.v, self.dout))

        def forward() -> Any:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        if self.case.op == "fwd":
            return forward
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = forward()
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def peak_kind(dtype: str) -> str:
    """Of measure_peak: a dot product of pairs or tiles where kernels of this dtype compute with
    one, else multiply-adds."""
    return "bf16_dot" if dtype in DOT_PRODUCTS.get(fs.build_info()["cpu_isa"], ()) else "fp32"


def _dense(case: Case, effort: Effort) -> Iterator[dict[str, Any]]:
    problem = Problem(case)
    kind = peak_kind(case.dtype)
    peaks: list[float] = []

    def peak() -> None:
        peaks.append(_bindings.measure_peak(kind, PEAK_SECONDS))

    calls: dict[str, Callable[[], object]] = {
        "peak": peak,
        "ours": problem.ours(fs.Causal() if case.mask == "causal" else fs.Dense()),
    }
    if problem.torch:
        calls["torch"] = problem.peer()
    samples = Interleaved(calls, slice=effort.slice).run(effort.rounds, effort.seconds)
    del samples["peak"], peaks[0]  # the first was the warm-up
    seconds = {name: median(s) for name, s in samples.items()}
    rate = case.flops / seconds["ours"] / 1e9
    row = {
        "samples": samples,
        "peaks": peaks,
        "peak_kind": "bf16 dot product" if kind == "bf16_dot" else "fp32 FMA",
        "seconds": seconds["ours"],
        "gflops": rate,
        "peak": median(peaks),
        # Of the peak measured next to it, round by round.
        "share": statistics.median(
            case.flops / s / 1e9 / p for s, p in zip(samples["ours"], peaks, strict=False)
        ),
    }
    if "torch" in seconds:
        row["torch_gflops"] = case.flops / seconds["torch"] / 1e9
        row["ratio"] = seconds["torch"] / seconds["ours"]
    yield row


def _sparse(case: Case, effort: Effort) -> Iterator[dict[str, Any]]:
    problem = Problem(case)
    n = case.seqlen
    masks = {f"{d:g}": fs.layouts.random(n, n, BLOCK, density=d, seed=0) for d in SPARSE_DENSITIES}
    calls = {"dense": problem.ours(fs.Dense())} | {d: problem.ours(m) for d, m in masks.items()}
    samples = Interleaved(calls, slice=effort.slice).run(effort.rounds, 2 * effort.seconds)
    for d, mask in masks.items():
        of_dense = [s / t for s, t in zip(samples[d], samples["dense"], strict=False)]
        yield {
            "density": mask.density,
            "samples": {"ours": samples[d], "dense": samples["dense"]},
            "seconds": median(samples[d]),
            "dense_seconds": median(samples["dense"]),
            "of_dense": median(of_dense),
        }


def _latency(case: Case, effort: Effort) -> Iterator[dict[str, Any]]:
    problem = Problem(case, case.framework)
    calls = {"ours": problem.plain()}
    if case.framework == "torch":
        calls["torch"] = problem.peer()
    samples = Interleaved(calls, slice=0.02).run(effort.rounds, effort.seconds)
    row = {"samples": samples, "seconds": median(samples["ours"])}
    if "torch" in samples:
        row["torch_seconds"] = median(samples["torch"])
    yield row


def _ml_dtypes() -> Any:
    try:
        import ml_dtypes
    except ImportError:
        return None
    return ml_dtypes
