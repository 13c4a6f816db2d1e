"""What gpu_bench.py times: attention of ours and of PyTorch's, all through one door.

A training call is PyTorch's autograd, on both sides: a forward of tensors that require gradients,
and torch.autograd.grad of what it returned. Both allocate what they return.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import flashsdk as fs
import flashsdk.torch
import torch
from flashsdk._commands.gpu_timing import Run, Runs
from flashsdk._errors import first_line
from torch.nn.attention import SDPBackend, sdpa_kernel

PACKAGE = Path(fs.__file__).parent
SDPA = {
    "fa2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
DEVICE = "cuda"
TOKENS, WIDTH = 16384, 2048  # of the dense cells: batch · seqlen, heads · head_dim
BASELINE = "baseline"  # what names of a second build of ours end with


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
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in (of_q, of_k, of_k, of_q)]


def ours(
    x: list[Any],
    backend: str,
    packed: tuple[Any, ...] = (),
    package: ModuleType = fs,
    **options: Any,
) -> Runs:
    """Forward and backward of one backend; nothing where it has no such kernel.

    packed: of packed sequences cu_seqlens and the longest, of queries and keys. package: of which
    build. Not flash_attn_func, which chooses the backend; it goes the way of these two functions.
    """
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    shown = {name: option for name, option in options.items() if name != "seed"}
    try:
        for op in ("fwd", "bwd"):
            if not package.explain(*x[:3], *packed, op=op, backend=backend, **shown).kernel:
                return {}
    except ValueError as e:  # an Error of either build
        print(f"{backend} {tuple(q.shape)}: left out: {first_line(e)}", flush=True)
        return {}
    call = package.torch.varlen_attention if packed else package.torch.attention

    def forward() -> Any:
        return call(q, k, v, *packed, backend=backend, **options)

    name = backend if package is fs else f"{backend} {BASELINE}"
    return with_gradients(name, forward, (q, k, v), x[3])


def peer(x: list[Any], name: str, causal: bool, dropout: float = 0.0, bias: Any = None) -> Runs:
    """PyTorch's scaled_dot_product_attention with one backend forced."""
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in x[:3])
    dout = x[3].transpose(1, 2)

    def forward() -> Any:
        return sdpa(name, q, k, v, dropout_p=dropout, is_causal=causal, attn_mask=bias)

    return with_gradients(name, forward, (q, k, v), dout)


def peer_packed(x: list[Any], ends: Any, longest: int, causal: bool) -> Runs:
    """PyTorch's varlen_attn, where it has one: FlashAttention-2."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return {}
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    window: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)}
    if "window_size" not in inspect.signature(varlen_attn).parameters:
        window = {"is_causal": causal}

    def forward() -> Any:
        return varlen_attn(q, k, v, ends, ends, longest, longest, **window)

    return with_gradients("fa2", forward, (q, k, v), x[3])


def sdpa(name: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Of tensors with heads before rows."""
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    with sdpa_kernel(SDPA[name]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def with_gradients(name: str, forward: Callable[[], Any], inputs: Any, dout: Any) -> Runs:
    """The door: a forward and a backward of anybody's, by (op, name).

    Nothing where the shape is not taken, and a line that says so: a peer that is missing from a
    table would else look like one that was never asked.
    """

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    try:
        out = forward()
        backward()
    except RuntimeError as e:
        print(f"{name} {tuple(inputs[0].shape)}: left out: {first_line(e)}", flush=True)
        return {}
    # With gradients on: the log-sum-exp is part of a training forward, and ours always writes it.
    return {("fwd", name): forward, ("bwd", name): backward}


def peer_forward(name: str, causal: bool, q: Any, k: Any, v: Any) -> Any:
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(q.shape[1], k.shape[1]) if causal else None
    return sdpa(name, *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias)


def extra_bytes(run: Run) -> int:
    """Of memory at the peak of a call, beyond what is there before it and what it returns.

    Of a backward of ours that is its workspace, in blocks of PyTorch's allocator.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak - kept


def second_build(path: Path) -> ModuleType:
    """Another build of ours beside this one, in one process, so that both meet the same clocks.

    path: its folder python/flashsdk, or its extension alone, beside a copy of this checkout's
    Python. The copy has another name, as have its torch operators: a process holds a name once.
    """
    name = f"flashsdk_{BASELINE}"
    sources = path if path.is_dir() else PACKAGE
    extension = next(iter(sorted(path.glob("_bindings*.so"))), None) if path.is_dir() else path
    if extension is None or not extension.exists():
        sys.exit(f"--baseline: no extension in {path}")
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for source in (*sources.rglob("*.py"), *sources.glob("*.txt")):
        copy = folder / name / source.relative_to(sources)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(re.sub(r"\bflashsdk\b", name, source.read_text("utf-8")), "utf-8")
    shutil.copy(extension, folder / name / "_bindings.so")
    sys.path.insert(0, str(folder))
    importlib.import_module(f"{name}.torch")
    return sys.modules[name]


def named(kind: str, runs: Runs) -> Runs:
    return {(kind, *key): run for key, run in runs.items()}
