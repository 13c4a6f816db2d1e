"""Who ``bench --shape`` times: a problem of the user's own, ours and what else is here for it.

Each computes the same numbers. A peer whose output is another is not timed: it would be another
problem.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashsdk as fs
from flashsdk._commands import gpu_record
from flashsdk._commands.bench_cpu import DTYPES
from flashsdk._commands.standard import have_torch
from flashsdk._commands.table import size
from flashsdk._commands.timing import Call
from flashsdk._errors import DeviceError, InvalidArgument, first_line, type_name

MOST_SCORES = 1 << 30  # bytes; several such matrices are there at once, and a minute goes by
# Largest difference of two outputs of one problem, of the largest element: both round their own.
ALIKE = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 5e-3}


@dataclass(frozen=True)
class Shape:
    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int


def read_mask(text: str) -> fs.Dense | fs.Band:
    """Of none, causal, window:L or window:L,R, as the command line checked it."""
    if text in ("none", "causal"):
        return fs.Causal() if text == "causal" else fs.Dense()
    left, right = (*map(int, text.partition(":")[2].split(",")), 0)[:2]
    return fs.SlidingWindow(left, right)


@dataclass(frozen=True)
class Problem:
    shape: Shape
    mask: fs.Dense | fs.Band
    dtype: str
    backend: fs.Backend
    arrays: tuple[Any, Any, Any, Any]  # q, k, v, dout

    @property
    def on_gpu(self) -> bool:
        return self.backend != "cpu"

    @property
    def scores(self) -> int:
        """Bytes of all scores in float32, for who makes a matrix of them."""
        s = self.shape
        return 4 * s.batch * s.heads * s.seqlen**2

    @property
    def elements(self) -> Any:
        """bool (seqlen, seqlen), None where all are visible."""
        n = self.shape.seqlen
        return None if isinstance(self.mask, fs.Dense) else self.mask.to_dense(n, n)

    def flops(self, op: str) -> float:
        """Of the products with visible elements; a backward counts 2.5 forwards."""
        s = self.shape
        visible = s.seqlen**2 * self.mask.visible_share(s.seqlen, s.seqlen)
        return 4.0 * s.batch * s.heads * s.head_dim * visible * (2.5 if op == "bwd" else 1.0)

    def bytes(self, op: str) -> int:
        """That no call can do without: each input read and each output written, once."""
        s, element = self.shape, 4 if self.dtype == "fp32" else 2
        row, lse = s.head_dim * element, 4 * s.heads  # of a head and a token; of a token
        # q, out and k, v; of a backward also dout and dq, dk and dv.
        tensors = 2 * s.heads + 2 * s.heads_kv if op == "fwd" else 4 * (s.heads + s.heads_kv)
        return s.batch * s.seqlen * (tensors * row + lse)


def make(
    shape: Shape, mask: fs.Dense | fs.Band, dtype: str, backend: fs.Backend = "cpu"
) -> Problem:
    """Random normal numbers, as PyTorch's tensors where it is installed, which a GPU needs."""
    rng = np.random.default_rng(0)
    of_q = (shape.batch, shape.seqlen, shape.heads, shape.head_dim)
    of_kv = (shape.batch, shape.seqlen, shape.heads_kv, shape.head_dim)
    try:
        values = [rng.standard_normal(x, dtype=np.float32) for x in (of_q, of_kv, of_kv, of_q)]
    except (MemoryError, ValueError):  # the latter beyond 2^63 bytes
        raise DeviceError(f"--shape: q of shape {of_q}; one that memory has room for") from None
    if have_torch():
        import torch

        device = "cpu" if backend == "cpu" else gpu_record.DEVICE
        kind: Any = getattr(torch, DTYPES[dtype])
        arrays: list[Any] = [torch.from_numpy(x).to(device, kind) for x in values]
    elif backend != "cpu":
        raise InvalidArgument(f"--backend: {backend}; cpu, or install PyTorch with CUDA")
    else:
        kind = DTYPES[dtype]
        if dtype == "bf16":
            try:
                import ml_dtypes
            except ImportError:
                raise InvalidArgument("--dtype: bf16; fp32 or fp16, or install ml_dtypes") from None
            kind = ml_dtypes.bfloat16
        arrays = [x.astype(kind) for x in values]
    q, k, v, dout = arrays
    return Problem(shape, mask, dtype, backend, (q, k, v, dout))


# ---- who is timed: each gives its forward, its backward, and its output as float32


@dataclass(frozen=True)
class Runner:
    forward: Call
    backward: Call
    out: Any


def ours(problem: Problem) -> Runner:
    q, k, v, dout = problem.arrays
    mask, backend = problem.mask, problem.backend
    if problem.on_gpu:
        from flashsdk.torch import attention

        return by_autograd(
            lambda q, k, v: attention(q, k, v, mask=mask, backend=backend), (q, k, v), dout
        )
    out, lse = fs.mha_fwd(q, k, v, mask=mask, backend=backend)
    return Runner(
        lambda: fs.mha_fwd(q, k, v, mask=mask, backend=backend),
        lambda: fs.mha_bwd(dout, q, k, v, out, lse, mask=mask, backend=backend),
        _float32(out),
    )


def by_autograd(
    attend: Callable[[Any, Any, Any], Any],
    qkv: tuple[Any, ...],
    dout: Any,
    heads_first: bool = False,
) -> Runner:
    """A training call: PyTorch's autograd, which allocates what it returns."""
    import torch

    inputs = [x.detach().requires_grad_() for x in qkv]
    out = attend(*inputs)
    rows = out.detach().transpose(1, 2) if heads_first else out.detach()
    return Runner(
        lambda: attend(*inputs),
        lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True),
        _float32(rows),
    )


def pytorch(problem: Problem, backend: str) -> Runner:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, dout = (x.transpose(1, 2) for x in problem.arrays)
    causal = isinstance(problem.mask, fs.Causal)
    elements = None if causal else problem.elements
    mask = None if elements is None else torch.from_numpy(elements).to(q.device)
    gqa = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    which = getattr(SDPBackend, backend)

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(which):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, **gqa
            )

    return by_autograd(attend, (q, k, v), dout, heads_first=True)


def jax_nn(problem: Problem) -> Runner:
    import jax
    import jax.numpy as jnp

    kind = jnp.bfloat16 if problem.dtype == "bf16" else DTYPES[problem.dtype]
    host = jax.devices("cpu")[0]
    q, k, v, dout = (
        jax.device_put(jnp.asarray(_float32(x)).astype(kind), host) for x in problem.arrays
    )
    causal = isinstance(problem.mask, fs.Causal)
    elements = None if causal else problem.elements
    mask = None if elements is None else jnp.asarray(elements)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, mask=None if mask is None else mask[None, None], is_causal=causal
        )

    forward = jax.jit(attend)
    # Its own forward is among it: XLA keeps nothing from one program to the next.
    both = jax.jit(lambda q, k, v, dout: jax.vjp(attend, q, k, v)[1](dout))
    return Runner(
        lambda: forward(q, k, v).block_until_ready(),
        lambda: jax.block_until_ready(both(q, k, v, dout)),
        _float32(forward(q, k, v)),
    )


CPU_SDPA = {"flash": "FLASH_ATTENTION", "math": "MATH"}
GPU_SDPA = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "math": "MATH"}


def _peers(problem: Problem) -> Iterator[tuple[str, bool, Callable[[Problem], Runner]]]:
    """Name, whether all scores are a matrix there, and what makes its Runner."""
    if have_torch():
        for name, backend in (GPU_SDPA if problem.on_gpu else CPU_SDPA).items():
            yield f"PyTorch, {name}", name == "math", functools.partial(pytorch, backend=backend)
    if not problem.on_gpu and importlib.util.find_spec("jax") is not None:
        yield "JAX, XLA (backward with forward)", True, jax_nn


def runners(problem: Problem) -> tuple[dict[str, Runner], dict[str, str]]:
    """Those that compute the problem, ours first; and why others of this machine do not."""
    found, left_out = {"flashsdk": ours(problem)}, dict[str, str]()
    want = found["flashsdk"].out
    largest = float(np.abs(want).max())
    for name, whole, make_runner in _peers(problem):
        if whole and problem.scores > MOST_SCORES:
            left_out[name] = f"its scores take {size(problem.scores)}; {size(MOST_SCORES)} at most"
            continue
        try:
            runner = make_runner(problem)
            runner.backward()  # PyTorch's first takes seconds
        except Exception as e:  # whatever a peer says to what it does not take
            left_out[name] = f"{type_name(e)}: {first_line(e)}"
            continue
        difference = float(np.abs(runner.out - want).max()) / largest
        if difference <= ALIKE[problem.dtype]:
            found[name] = runner
        else:
            left_out[name] = f"its output differs by {difference:.2g} of the largest element"
    return found, left_out


def _float32(x: Any) -> Any:
    return np.asarray(x.float().cpu().numpy() if hasattr(x, "float") else x, np.float32)
