"""Standard attention, S and P as whole matrices: the yardstick for rounding errors.

``storage`` is the dtype every tensor is rounded to between operations, as a chain of framework
operators rounds; inside an operation the sums are float32. With storage float64 nothing is rounded:
a second opinion on _reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._reference import Array, Features, Head, heads, random_bytes, visible_keys

Round = Callable[[Array], Array]


def rounding(storage: Any) -> Round:
    """x to the nearest values of `storage`, held as float32 (float64 for float64)."""
    storage = np.dtype(storage)
    held = np.float64 if storage == np.float64 else np.float32

    def round_to(x: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(x, held).astype(storage).astype(held)

    return round_to


@dataclass(frozen=True)
class Matrices:
    """S, P and what the backward needs of them, for one head: each (seqlen_q, seqlen_k)."""

    score: Array
    p: Array
    drop: Array  # 0 or the scale of dropout
    slope: Array  # d(score) / d(softmax_scale·q·k)


def matrices(head: Head, round_to: Round) -> Matrices:
    f, q, k = head.f, round_to(head.q), round_to(head.k)
    seqlen_q, seqlen_k = len(q), len(k)
    one = round_to(np.ones(1))
    score = round_to(round_to(q @ k.T) * one.dtype.type(f.scale(q.shape[1])))
    slope = np.ones_like(score)
    if f.softcap > 0:
        cap = one.dtype.type(np.float32(f.softcap))
        tanh = round_to(np.tanh(round_to(score / cap)))
        score, slope = round_to(cap * tanh), round_to(1 - tanh**2)
    hidden = np.zeros(score.shape, bool)
    if f.mask is not None:
        rows = [
            visible_keys(f.mask, head.sequence, head.head, i, seqlen_q, seqlen_k)
            for i in range(seqlen_q)
        ]
        hidden = ~np.array(rows, bool).reshape(score.shape)
    if f.bias is not None:
        bias = _of_head(f.bias, head)
        bias = bias if bias.shape[0] == 1 else bias[:seqlen_q]
        bias = bias if bias.shape[1] == 1 else bias[:, :seqlen_k]
        if bias.dtype == bool:
            hidden = hidden | ~bias
        else:
            score = round_to(score + bias.astype(score.dtype))
    if f.alibi_slopes is not None:
        slopes = np.atleast_2d(f.alibi_slopes)
        slope_of_head = one.dtype.type(slopes[min(head.sequence, len(slopes) - 1), head.head])
        i, j = np.ogrid[:seqlen_q, :seqlen_k]
        score = round_to(
            score - slope_of_head * np.abs(i + seqlen_k - seqlen_q - j).astype(score.dtype)
        )
    score = np.where(hidden, -np.inf, score)

    top = score.max(axis=1, initial=-np.inf, keepdims=True)
    e = np.exp(score - np.where(np.isneginf(top), 0, top))
    p = round_to(e / np.maximum(e.sum(axis=1, keepdims=True), np.finfo(e.dtype).tiny))
    drop = np.ones_like(score)
    threshold = f.dropout_threshold()
    if threshold:
        index = head.sequence * head.num_heads + head.head
        random = [random_bytes(f.seed, f.offset, index, i, seqlen_k) for i in range(seqlen_q)]
        kept = np.array(random, np.uint64).reshape(score.shape) >= threshold
        drop = kept * one.dtype.type(256 / (256 - threshold))
    return Matrices(score, p, drop, slope)


def _of_head(x: Array, head: Head) -> Array:
    return np.asarray(x[min(head.sequence, x.shape[0] - 1), min(head.head, x.shape[1] - 1)])


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    storage: Any = None,
    sequence: int | None = None,
    **features: Any,
) -> Array:
    """out, with the rounding of `storage` (None: q's dtype). float32 or float64."""
    round_to = rounding(q.dtype if storage is None else storage)
    q, k, v = round_to(q), round_to(k), round_to(v)
    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    for b, h, h_kv, head in heads(q, k, Features(**features), sequence):
        m = matrices(head, round_to)
        out[b, :, h] = round_to(round_to(m.p * m.drop) @ v[b, :, h_kv])
    return out


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    storage: Any = None,
    sequence: int | None = None,
    **features: Any,
) -> tuple[Array, Array, Array]:
    """dq, dk, dv, with the rounding of ``storage``; heads that share k and v add in float32."""
    f = Features(**features)
    round_to = rounding(q.dtype if storage is None else storage)
    dout, q, k, v = round_to(dout), round_to(q), round_to(k), round_to(v)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = q.dtype.type(f.scale(q.shape[3]))
    for b, h, h_kv, head in heads(q, k, f, sequence):
        m = matrices(head, round_to)
        do = dout[b, :, h]
        dp = round_to(round_to(do @ v[b, :, h_kv].T) * m.drop)
        ds = m.p * (dp - (m.p * dp).sum(axis=1, keepdims=True))
        if dlse is not None:
            ds = ds + m.p * np.asarray(dlse[b, h], ds.dtype)[:, None]
        ds = round_to(round_to(round_to(ds) * m.slope) * scale)
        dq[b, :, h] = round_to(ds @ k[b, :, h_kv])
        dk[b, :, h_kv] += round_to(ds.T @ q[b, :, h])
        dv[b, :, h_kv] += round_to(round_to(m.p * m.drop).T @ do)
    return dq, round_to(dk), round_to(dv)


def backward_of_rounded(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    sequence: int | None = None,
    **features: Any,
) -> tuple[Array, Array, Array]:
    """dq, dk, dv in float64 from out in q's dtype, lse in float32, dP and delta as float32 sums.

    What any backward that is given out and lse must lose; standard attention keeps P instead and
    can be luckier.
    """
    f, storage = Features(**features), q.dtype
    dout, q, k, v = (np.asarray(x).astype(np.float64) for x in (dout, q, k, v))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, h, h_kv, head in heads(q, k, f, sequence):
        m = matrices(head, np.asarray)
        top = m.score.max(axis=1, initial=-np.inf, keepdims=True)
        top = np.where(np.isneginf(top), 0, top)
        total = np.exp(m.score - top).sum(axis=1, keepdims=True)
        lse = top + np.log(np.where(total > 0, total, 1))
        p = m.p * np.exp(lse - lse.astype(np.float32))
        out = ((m.p * m.drop) @ v[b, :, h_kv]).astype(storage).astype(np.float32)
        do = dout[b, :, h].astype(np.float32)
        dp = m.drop * (do @ v[b, :, h_kv].astype(np.float32).T)
        delta = (do * out).sum(axis=1)
        if dlse is not None:
            delta = delta - dlse[b, h]
        ds = f.scale(q.shape[3]) * p * m.slope * (dp - delta[:, None].astype(np.float64))
        dq[b, :, h] = ds @ k[b, :, h_kv]
        dk[b, :, h_kv] += ds.T @ q[b, :, h]
        dv[b, :, h_kv] += (p * m.drop).T @ dout[b, :, h]
    return dq, dk, dv
