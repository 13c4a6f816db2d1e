"""Attention by its definition, in float64: the oracle of the tests and of ``flashsdk verify``.

It walks over every (batch, head, query) and works on the keys that this query sees, as
docs/semantics.md defines them. It is slow, needs NumPy alone, and shares no code with the kernels
or with the rest of the package.

Shapes, batched: q (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_kv,
head_dim), v (batch, seqlen_k, num_heads_kv, head_dim_v); packed: the same without batch, with
cu_seqlens_q/k (batch + 1). Results are float64: out as q with head_dim_v, lse (batch, num_heads,
seqlen_q) or, packed, (num_heads, total_q).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True)
class Blocks:
    """Listed blocks: ``full`` are visible throughout, ``partial`` where ``band`` allows."""

    partial: Bool  # (batch | 1, num_heads | 1, block rows, block columns)
    full: Bool  # the same
    block_size: tuple[int, int]  # queries, keys
    band: Any = None  # has left, right, alignment; None: visible throughout

    @staticmethod
    def of(mask: Any) -> Blocks:
        """The lists of a flashsdk.BlockMask, read from its rows."""
        block_q, block_k = mask.block_size
        rows, cols = -(-mask.seqlen_q // block_q), -(-mask.seqlen_k // block_k)
        return Blocks(
            _listed(mask.row_partial, rows, cols),
            _listed(mask.row_full, rows, cols),
            (block_q, block_k),
            mask.band,
        )


def _listed(lists: tuple[Array, Array], rows: int, cols: int) -> Bool:
    offsets, indices = (np.asarray(x) for x in lists)
    listed = np.zeros((*offsets.shape[:2], rows, cols), bool)
    for b, h, r in np.ndindex(listed.shape[:3]):
        listed[b, h, r, indices[offsets[b, h, r] : offsets[b, h, r + 1]]] = True
    return listed


@dataclass(frozen=True)
class Features:
    """What a call may ask for beyond q, k and v; the keywords of forward and backward."""

    softmax_scale: float | None = None  # head_dim ** -0.5
    # None or flashsdk.Dense: all; a band; Blocks or a flashsdk.BlockMask; or a boolean matrix
    # (batch | 1, num_heads | 1, seqlen_q, seqlen_k), True = visible
    mask: Any = None
    bias: Array | None = (
        None  # (batch | 1, num_heads | 1, seqlen_q | 1, seqlen_k | 1); bool: True = attend
    )
    alibi_slopes: Array | None = None  # (num_heads,) or (batch, num_heads)
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        if hasattr(self.mask, "row_full"):
            object.__setattr__(self, "mask", Blocks.of(self.mask))

    def scale(self, head_dim: int) -> float:
        # The kernels take a float32 scale.
        return float(
            np.float32(head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale)
        )

    def dropout_threshold(self) -> int:
        return min(round(self.dropout_p * 256), 255)


def philox4x32(
    counter: tuple[Any, Any, Any, Any], key: tuple[int, int], rounds: int = 7
) -> list[Array]:
    """Four words of Philox4x32 (Salmon et al., SC'11) for every counter; their words broadcast."""
    mask32 = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, np.uint64) for c in counter))
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & mask32,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & mask32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


@lru_cache(maxsize=4096)
def random_bytes(seed: int, offset: int, batch_head: int, row: int, seqlen_k: int) -> Array:
    """The byte (seqlen_k,) that decides over each element of one row of P."""
    col = np.arange(seqlen_k)
    key = (seed & 0xFFFFFFFF, (seed >> 32 ^ offset >> 32) & 0xFFFFFFFF)
    counter = (
        row // 16 * 8 + row % 8,
        col // 32 * 4 + col % 8 // 2,
        batch_head,
        offset & 0xFFFFFFFF,
    )
    words = np.stack(philox4x32(counter, key))  # (4, seqlen_k)
    word = words[col % 32 // 8, col]
    byte = row % 16 // 8 + 2 * (col % 2)
    drawn: Array = word >> (8 * byte).astype(np.uint64) & np.uint64(0xFF)
    return drawn


def _in_band(band: Any, i: int, seqlen_q: int, seqlen_k: int) -> Bool:
    shift = 0 if band.alignment == "top_left" else seqlen_k - seqlen_q
    distance = np.arange(seqlen_k) - (i + shift)
    visible = np.ones(seqlen_k, bool)
    if band.left is not None:
        visible &= distance >= -band.left
    if band.right is not None:
        visible &= distance <= band.right
    return visible


def _broadcast(x: Array, *index: int) -> Any:
    """x[index], where a dimension of size 1 serves every index."""
    return x[tuple(0 if n == 1 else i for n, i in zip(x.shape, index, strict=False))]


def visible_keys(mask: Any, b: int, h: int, i: int, seqlen_q: int, seqlen_k: int) -> Bool:
    """Which keys (seqlen_k,) query i of batch b and head h sees."""
    if mask is None or type(mask).__name__ == "Dense":
        return np.ones(seqlen_k, bool)
    if isinstance(mask, np.ndarray):
        return np.asarray(_broadcast(mask[:, :, i, :seqlen_k], b, h))
    if isinstance(mask, Blocks):
        block_q, block_k = mask.block_size
        full, partial = (
            np.repeat(_broadcast(x, b, h)[i // block_q], block_k)[:seqlen_k]
            for x in (mask.full, mask.partial)
        )
        if mask.band is not None:
            partial = partial & _in_band(mask.band, i, seqlen_q, seqlen_k)
        return np.asarray(full | partial)
    return _in_band(mask, i, seqlen_q, seqlen_k)


@dataclass(frozen=True)
class Row:
    """One query of one head, over the keys it sees."""

    keys: NDArray[np.intp]  # which
    p: Float64  # probabilities before dropout
    drop: Float64  # what dropout multiplies them with: 0 or 256 / (256 - threshold)
    slope: Float64  # d(score) / d(softmax_scale·q·k), 1 without softcap
    lse: float  # logarithm of the sum of exp(score); -inf when no key is seen


class Head:
    """The rows of one (batch, head). ``sequence`` is the batch index, or the packed sequence."""

    def __init__(
        self, q: Float64, k: Float64, f: Features, sequence: int, head: int, num_heads: int
    ):
        self.q, self.k, self.f = q, k, f  # (seqlen_q, head_dim), (seqlen_k, head_dim)
        self.sequence, self.head, self.num_heads = sequence, head, num_heads

    def row(self, i: int) -> Row:
        f, (seqlen_q, seqlen_k) = self.f, (len(self.q), len(self.k))
        seen = visible_keys(f.mask, self.sequence, self.head, i, seqlen_q, seqlen_k)
        bias = None
        if f.bias is not None:
            bias = _broadcast(f.bias, self.sequence, self.head, i)
            bias = np.broadcast_to(bias if len(bias) == 1 else bias[:seqlen_k], seqlen_k)
            if bias.dtype == bool:
                seen, bias = seen & bias, None
        keys = np.flatnonzero(seen)

        score = f.scale(self.q.shape[1]) * (self.k[keys] @ self.q[i])
        slope = np.ones(len(keys))
        if f.softcap > 0:
            tanh = np.tanh(score / float(np.float32(f.softcap)))
            score, slope = float(np.float32(f.softcap)) * tanh, 1 - tanh**2
        if bias is not None:
            score = score + bias[keys].astype(np.float64)
        if f.alibi_slopes is not None:
            alibi = _broadcast(np.atleast_2d(f.alibi_slopes), self.sequence, self.head)
            score = score - float(alibi) * np.abs(i + seqlen_k - seqlen_q - keys)

        # A bias of -inf hides a key as well.
        shown = score != -np.inf
        keys, score, slope = keys[shown], score[shown], slope[shown]
        drop = np.ones(len(keys))
        threshold = f.dropout_threshold()
        if threshold:
            index = self.sequence * self.num_heads + self.head
            kept = random_bytes(f.seed, f.offset, index, i, seqlen_k)[keys] >= threshold
            drop = kept * (256 / (256 - threshold))
        if len(keys) == 0:
            return Row(keys, score, drop, slope, -np.inf)
        e = np.exp(score - score.max())
        return Row(keys, e / e.sum(), drop, slope, float(score.max() + np.log(e.sum())))


def heads(
    q: Float64, k: Float64, f: Features, sequence: int | None = None
) -> Iterator[tuple[int, int, int, Head]]:
    """(batch, head, head of k and v, Head) of all; ``sequence`` replaces the batch index."""
    batch, _, num_heads, _ = q.shape
    for b, h in np.ndindex(batch, num_heads):
        h_kv = h // (num_heads // k.shape[2])
        yield (
            b,
            h,
            h_kv,
            Head(q[b, :, h], k[b, :, h_kv], f, b if sequence is None else sequence, h, num_heads),
        )


def _double(*arrays: Array) -> Iterator[Float64]:
    return (np.asarray(a).astype(np.float64) for a in arrays)


def forward(
    q: Array, k: Array, v: Array, *, sequence: int | None = None, **features: Any
) -> tuple[Float64, Float64]:
    """out, lse."""
    q, k, v = _double(q, k, v)
    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for b, h, h_kv, head in heads(q, k, Features(**features), sequence):
        for i in range(q.shape[1]):
            row = head.row(i)
            out[b, i, h] = (row.p * row.drop) @ v[b, row.keys, h_kv]
            lse[b, h, i] = row.lse
    return out, lse


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    sequence: int | None = None,
    **features: Any,
) -> tuple[Float64, Float64, Float64]:
    """dq, dk, dv of sum(dout·out) + sum(dlse·lse)."""
    f = Features(**features)
    dout, q, k, v = _double(dout, q, k, v)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = f.scale(q.shape[3])
    for b, h, h_kv, head in heads(q, k, f, sequence):
        for i in range(q.shape[1]):
            row = head.row(i)
            dropped = row.p * row.drop
            dp = row.drop * (v[b, row.keys, h_kv] @ dout[b, i, h])
            delta = dout[b, i, h] @ (dropped @ v[b, row.keys, h_kv])
            if dlse is not None:
                delta -= float(dlse[b, h, i])
            ds = scale * row.slope * row.p * (dp - delta)
            dq[b, i, h] = ds @ k[b, row.keys, h_kv]
            dk[b, row.keys, h_kv] += np.outer(ds, q[b, i, h])
            dv[b, row.keys, h_kv] += np.outer(dropped, dout[b, i, h])
    return dq, dk, dv


def sequences(cu_seqlens_q: Array, cu_seqlens_k: Array) -> Iterator[tuple[int, slice, slice]]:
    """(sequence, its rows of q, its rows of k and v) of a packed problem."""
    for s in range(len(cu_seqlens_q) - 1):
        yield (
            s,
            slice(int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])),
            slice(int(cu_seqlens_k[s]), int(cu_seqlens_k[s + 1])),
        )


def varlen_forward(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, **features: Any
) -> tuple[Float64, Float64]:
    """out (total_q, num_heads, head_dim_v), lse (num_heads, total_q); every sequence on its own."""
    out = np.zeros((*q.shape[:2], v.shape[2]))
    lse = np.full((q.shape[1], q.shape[0]), -np.inf)
    for s, rows_q, rows_k in sequences(cu_seqlens_q, cu_seqlens_k):
        o, m = forward(q[None, rows_q], k[None, rows_k], v[None, rows_k], sequence=s, **features)
        out[rows_q], lse[:, rows_q] = o[0], m[0]
    return out, lse


def varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    dlse: Array | None = None,
    **features: Any,
) -> tuple[Float64, Float64, Float64]:
    """dq, dk, dv of a packed problem; dlse (num_heads, total_q)."""
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for s, rows_q, rows_k in sequences(cu_seqlens_q, cu_seqlens_k):
        of_one = (dout[None, rows_q], q[None, rows_q], k[None, rows_k], v[None, rows_k])
        g = backward(
            *of_one, dlse=None if dlse is None else dlse[None, :, rows_q], sequence=s, **features
        )
        dq[rows_q], dk[rows_k], dv[rows_k] = (x[0] for x in g)
    return dq, dk, dv


__all__ = [
    "Blocks",
    "Features",
    "Head",
    "Row",
    "backward",
    "forward",
    "heads",
    "philox4x32",
    "random_bytes",
    "sequences",
    "varlen_backward",
    "varlen_forward",
    "visible_keys",
]
