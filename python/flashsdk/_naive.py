"""Attention of one head as whole matrices, with the rounding of a dtype: the yardstick of errors.

``standard`` rounds like a chain of framework operators, ``flash_backward`` like FlashAttention.
With storage float64 nothing is rounded: a second opinion on _reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._reference import Array, Head

Round = Callable[[Array], Array]


def rounding(storage: Any) -> Round:
    """x to the nearest values of ``storage``, held as float32 (float64 for float64)."""
    storage = np.dtype(storage)
    held = np.float64 if storage == np.float64 else np.float32

    def round_to(x: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(x, held).astype(storage).astype(held)

    return round_to


@dataclass(frozen=True)
class Matrices:
    """S, P and what the backward needs of them: each (seqlen_q, seqlen_k)."""

    score: Array
    p: Array
    drop: Array  # 0 or the scale of dropout
    slope: Array  # d(score) / d(softmax_scale·q·k)


def matrices(head: Head, round_to: Round) -> Matrices:
    q, k = round_to(head.q), round_to(head.k)
    rows, of = range(len(q)), q.dtype.type
    shape = len(q), len(k)
    score = round_to(round_to(q @ k.T) * of(head.scale))
    slope = np.ones_like(score)
    if head.f.softcap > 0:
        softcap = of(np.float32(head.f.softcap))
        tanh = round_to(np.tanh(round_to(score / softcap)))
        score, slope = round_to(softcap * tanh), round_to(1 - tanh**2)
    if head.f.bias is not None or head.f.alibi_slopes is not None:
        bias = np.array([head.bias(i) for i in rows], score.dtype).reshape(shape)
        score = round_to(score + bias)
    if head.f.mask is not None or head.f.bias is not None:
        visible = np.array([head.visible(i) for i in rows], bool).reshape(shape)
        score = np.where(visible, score, -np.inf)
    top = finite_max(score)
    e = np.exp(score - top)
    p = round_to(e / np.maximum(e.sum(axis=1, keepdims=True), np.finfo(e.dtype).tiny))
    drop = np.ones_like(score)
    if head.f.dropout_threshold():
        drop = np.array([head.drop(i) for i in rows], score.dtype).reshape(shape)
    return Matrices(score, p, drop, slope)


def finite_max(score: Array) -> Array:
    """The largest score (seqlen_q, 1) of each row, 0 where it sees no key."""
    top = score.max(axis=1, initial=-np.inf, keepdims=True)
    return np.where(np.isneginf(top), 0, top).astype(score.dtype)


def standard(head: Head, storage: Any) -> dict[str, Array]:
    """out, dq, dk, dv by matrix products and softmax, every tensor rounded to ``storage``.

    Inside an operation sums are float32. dk and dv are this head's part alone.
    """
    assert head.dout is not None
    round_to = rounding(storage)
    m = matrices(head, round_to)
    q, k, v, dout = (round_to(x) for x in (head.q, head.k, head.v, head.dout))
    dropped = round_to(m.p * m.drop)
    dp = round_to(round_to(dout @ v.T) * m.drop)
    with np.errstate(invalid="ignore"):  # float16 may overflow
        ds = m.p * (dp - (m.p * dp).sum(axis=1, keepdims=True))
        ds = round_to(ds + m.p * head.dlse[:, None].astype(ds.dtype))
        ds = round_to(round_to(ds * m.slope) * ds.dtype.type(head.scale))
        return {
            "out": round_to(dropped @ v),
            "dq": round_to(ds @ k),
            "dk": round_to(ds.T @ q),
            "dv": round_to(dropped.T @ dout),
        }


def flash_backward(head: Head, storage: Any, lag: float = 0.0) -> dict[str, Array]:
    """dq, dk, dv as FlashAttention's backward has to: from a rounded out.

    Float32 throughout, but for P and dS in the products. Standard attention, which sums P∘dP, can
    be luckier. ``lag`` is how far (in log2) the running maximum lies below the final one while P is
    rounded for the forward's product: kernels differ in it, and so does out in its last bit.
    """
    assert head.dout is not None
    round_to, to32 = rounding(storage), rounding(np.float32)
    m = matrices(head, to32)
    q, k, v, dout = (to32(x) for x in (head.q, head.k, head.v, head.dout))
    e = np.exp(m.score - finite_max(m.score))
    total = e.sum(axis=1, keepdims=True)
    total = np.where(total > 0, total, np.float32(1))
    several = np.isfinite(m.score).sum(axis=1, keepdims=True) > 1  # a single key is its own maximum
    raised = np.where(several, np.float32(2**lag), np.float32(1))
    out = round_to(round_to(e * raised) * m.drop @ v / (total * raised))

    p = e / total
    dp = m.drop * (dout @ v.T)
    delta = (dout * out).sum(axis=1) - to32(head.dlse)
    ds = np.float32(head.scale) * round_to(p * m.slope * (dp - delta[:, None]))
    return {"dq": ds @ k, "dk": ds.T @ q, "dv": (round_to(p) * m.drop).T @ dout}
