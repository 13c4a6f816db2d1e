"""What gpu_bench.py times: calls of ours and of PyTorch's attention, and how they are timed."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import flashsdk as fs
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PEERS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
WITH_BIAS = {"cudnn": PEERS["cudnn"], "efficient": SDPBackend.EFFICIENT_ATTENTION}
Runs = dict[Any, Callable[[], object]]
TOKENS, WIDTH = 16384, 2048  # of the dense cells: batch · seqlen, heads · head_dim


def median_ms(runs: Runs, budget_ms: float = 25.0, rounds: int = 5) -> dict[Any, float]:
    """Median milliseconds of each, all of them in turn in every round."""

    def elapsed(run: Callable[[], object], count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    counts, times = {}, {name: [] for name in runs}
    for name, run in runs.items():
        run()
        once = max(elapsed(run, 1), 1e-3)
        counts[name] = max(1, min(50, int(budget_ms / rounds / once)))
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(elapsed(run, counts[name]))
    return {name: statistics.median(t) for name, t in times.items()}


def flops(op: str, heads: int, dim: int, causal: bool) -> float:
    """Of a sequence, for each of its queries and keys: times seqlen²."""
    return 4 * heads * dim * (0.5 if causal else 1) * (2.5 if op == "bwd" else 1)


def backends() -> list[str]:
    return sorted({k["backend"] for k in fs.kernels() if k["available"]} - {"cpu"})


def tensors(
    batch: int, seqlen: int, heads: int, dim: int, dtype: torch.dtype, heads_kv: int | None = None
) -> list[Any]:
    """q, k, v and dout."""
    of_q, of_k = ((batch, seqlen, n, dim) for n in (heads, heads_kv or heads))
    return [torch.randn(shape, device="cuda").to(dtype) for shape in (of_q, of_k, of_k, of_q)]


def ours(x: list[Any], backend: str, packed: tuple[Any, ...] = (), **options: Any) -> Runs:
    """Forward and backward, each into given outputs; nothing where there is no such kernel.

    packed: of packed sequences cu_seqlens and the longest, of queries and keys.
    """
    q, k, v, dout = x
    try:
        for op in ("fwd", "bwd"):
            if not fs.explain(q, k, v, *packed, op=op, backend=backend, **_shown(options)).kernel:
                return {}
    except fs.Error:
        return {}
    forward: Any = fs.mha_varlen_fwd if packed else fs.mha_fwd
    backward: Any = fs.mha_varlen_bwd if packed else fs.mha_bwd
    options["backend"] = backend
    out, lse = forward(q, k, v, *packed, **options)
    grads = {f"d{name}": torch.empty_like(t) for name, t in zip("qkv", (q, k, v), strict=True)}
    return {
        ("fwd", backend): lambda: forward(q, k, v, *packed, out=out, lse=lse, **options),
        ("bwd", backend): lambda: backward(dout, q, k, v, out, lse, *packed, **grads, **options),
    }


def _shown(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name != "seed"}


def peer(x: list[Any], name: str, causal: bool, dropout: float = 0.0, bias: Any = None) -> Runs:
    """PyTorch's scaled_dot_product_attention with one backend forced."""
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in x[:3])
    dout = x[3].transpose(1, 2)

    def forward() -> Any:
        return sdpa(name, q, k, v, dropout_p=dropout, is_causal=causal, attn_mask=bias)

    return with_gradients(name, forward, (q, k, v), dout)


def sdpa(name: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Of tensors with heads before rows."""
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    with sdpa_kernel((PEERS | WITH_BIAS)[name]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def with_gradients(name: str, forward: Callable[[], Any], inputs: Any, dout: Any) -> Runs:
    """A peer's forward and backward; nothing where it does not take the shape."""

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    try:
        out = forward()
        backward()
    except RuntimeError:
        return {}
    # With gradients on: the log-sum-exp is part of a training forward, and ours always writes it.
    return {("fwd", name): forward, ("bwd", name): backward}


def peer_forward(name: str, causal: bool, q: Any, k: Any, v: Any) -> Any:
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(q.shape[1], k.shape[1]) if causal else None
    return sdpa(name, *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias)


def graphed(call: Callable[..., Any], inputs: list[Any]) -> Any:
    """A CUDA graph of the calls; None where there is no such kernel."""
    try:
        call(*inputs[0])
    except (fs.Error, RuntimeError):
        return None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs:
            call(*x)
    return graph
