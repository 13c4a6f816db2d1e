"""Standard attention, as models wrote it before FlashAttention.

Scores, masked scores and probabilities are matrices of seqlen_q × seqlen_k in memory. With PyTorch
where it is installed, else with NumPy.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Pair(Protocol):
    """A forward and the backward that follows it."""

    def forward(self) -> object: ...

    def backward(self, keep: bool = True) -> object:
        """Needs a forward before. May be called again after `keep`; else gives up its memory."""


def have_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def standard_attention(
    q: Array, k: Array, v: Array, dout: Array, hidden: NDArray[np.bool_] | None, threads: int
) -> Pair:
    """Lays the tensors out as suits the framework, before anything is timed. All float32.

    q, dout (batch, seqlen_q, heads, head_dim); k, v (batch, seqlen_k, heads_kv, head_dim);
    hidden (seqlen_q, seqlen_k): what is masked.
    """
    kind = TorchAttention if have_torch() else NumpyAttention
    return kind(q, k, v, dout, hidden, threads)


class TorchAttention:
    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        dout: Array,
        hidden: NDArray[np.bool_] | None,
        threads: int,
    ) -> None:
        import torch

        torch.set_num_threads(threads)
        self.torch = torch
        heads_first = [
            torch.from_numpy(x).transpose(1, 2).contiguous() for x in (q, k, v, dout)
        ]  # (batch, heads, seqlen, head_dim)
        self.inputs = [x.requires_grad_() for x in heads_first[:3]]
        self.dout = heads_first[3]
        self.hidden = None if hidden is None else torch.from_numpy(hidden)
        self.groups = q.shape[2] // k.shape[2]
        self.out: Any = None

    def forward(self) -> object:
        self.out = None
        q, k, v = self.inputs
        if self.groups > 1:
            k, v = (x.repeat_interleave(self.groups, dim=1) for x in (k, v))
        score = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.hidden is not None:
            score = score.masked_fill(self.hidden, float("-inf"))
        self.out = self.torch.softmax(score, dim=-1) @ v
        return self.out

    def backward(self, keep: bool = True) -> object:
        out = self.out
        if not keep:
            self.out = None
        return self.torch.autograd.grad(out, self.inputs, self.dout, retain_graph=keep)


class NumpyAttention:
    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        dout: Array,
        hidden: NDArray[np.bool_] | None,
        threads: int,
    ) -> None:
        del threads  # NumPy's matrix product takes what its BLAS was told
        self.groups = q.shape[2] // k.shape[2]
        self.q, self.k, self.v, self.dout = (
            np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, dout)
        )
        self.scale = np.float32(q.shape[-1] ** -0.5)
        self.hidden = hidden
        self.kept: tuple[Array, Array, Array] | None = None

    def forward(self) -> object:
        self.kept = None
        k, v = (
            np.repeat(x, self.groups, axis=1) if self.groups > 1 else x for x in (self.k, self.v)
        )
        score = self.q @ k.swapaxes(-1, -2) * self.scale
        if self.hidden is not None:
            score = np.where(self.hidden, np.float32(-np.inf), score)
        p = np.exp(score - score.max(axis=-1, keepdims=True))
        p = p / p.sum(axis=-1, keepdims=True)
        self.kept = (k, v, p)
        return p @ v

    def backward(self, keep: bool = True) -> object:
        if self.kept is None:
            raise RuntimeError("backward before forward")
        k, v, p = self.kept
        if not keep:
            self.kept = None
        dv = p.swapaxes(-1, -2) @ self.dout
        dp = self.dout @ v.swapaxes(-1, -2)
        ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) * self.scale
        dq = ds @ k
        dk = ds.swapaxes(-1, -2) @ self.q
        if self.groups > 1:
            shape = (self.k.shape[0], self.k.shape[1], self.groups, *self.k.shape[2:])
            dk, dv = (x.reshape(shape).sum(axis=2) for x in (dk, dv))
        return dq, dk, dv
