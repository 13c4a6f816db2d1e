"""Attention by its definition, in float64: the oracle of the tests and of ``flashsdk verify``.

It walks over every (batch, head, query) and works on the keys that this query sees, as
docs/semantics.md defines them. It is slow, holds matrices of a head's scores, needs NumPy alone,
and shares no code with the kernels or with the rest of the package.

Shapes, batched: q (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_kv,
head_dim), v (batch, seqlen_k, num_heads_kv, head_dim_v); packed: the same without batch, with
cu_seqlens_q/k (batch + 1). Results are float64: out as q with head_dim_v, lse (batch, num_heads,
seqlen_q) or, packed, (num_heads, total_q).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
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
    seed: Any = 0  # or of both: (2,) of all sequences, (batch, 2) one of each
    offset: int = 0
    sink: Array | None = None  # (num_heads,)
    # Batched: (batch,), how many rows of each sequence are used; None: all. Others are not read.
    seqused_q: Array | None = None
    seqused_k: Array | None = None
    # What k and v are multiplied with: (batch | 1, num_heads_kv | 1)
    k_descale: Array | None = None
    v_descale: Array | None = None

    def __post_init__(self) -> None:
        if hasattr(self.mask, "row_full"):
            object.__setattr__(self, "mask", Blocks.of(self.mask))

    def scale(self, head_dim: int) -> float:
        # The kernels take a float32 scale.
        return float(
            np.float32(head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale)
        )

    def dropout_of(self, sequence: int, head: int, num_heads: int) -> tuple[int, int, int]:
        """Seed, offset and what counts as batch·num_heads + head."""
        if np.ndim(self.seed) == 2:
            seed, offset = self.seed[sequence]
            return int(seed), int(offset), head
        seed, offset = (self.seed, self.offset) if np.ndim(self.seed) == 0 else self.seed
        return int(seed), int(offset), sequence * num_heads + head

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


def random_bytes(seed: int, offset: int, batch_head: int, row: Any, seqlen_k: int) -> Array:
    """The byte (seqlen_k,) that decides over each element of a row of P; of rows (n, 1) of each."""
    col = np.arange(seqlen_k)
    key = (seed & 0xFFFFFFFF, (seed >> 32 ^ offset >> 32) & 0xFFFFFFFF)
    calls = np.arange(-(-seqlen_k // 32) * 4)  # of a row: one call is for eight columns
    counter = (row // 16 * 8 + row % 8, calls, batch_head, offset & 0xFFFFFFFF)
    words = np.stack(philox4x32(counter, key), -1)  # (calls, 4)
    word = words[..., col // 32 * 4 + col % 8 // 2, col % 32 // 8]
    byte = row % 16 // 8 + 2 * (col % 2)
    drawn: Array = word >> (8 * byte).astype(np.uint64) & np.uint64(0xFF)
    return drawn


def _in_band(band: Any, i: Any, seqlen_q: int, seqlen_k: int) -> Bool:
    shift = 0 if band.alignment == "top_left" else seqlen_k - seqlen_q
    distance = np.arange(seqlen_k) - (i + shift)
    visible = np.ones(distance.shape, bool)
    if band.left is not None:
        visible &= distance >= -band.left
    if band.right is not None:
        visible &= distance <= band.right
    return visible


def _broadcast(x: Array, *index: int) -> Any:
    """x[index], where a dimension of size 1 serves every index."""
    return x[tuple(0 if n == 1 else i for n, i in zip(x.shape, index, strict=False))]


def visible_keys(mask: Any, b: int, h: int, i: Any, seqlen_q: int, seqlen_k: int) -> Bool:
    """Which keys (seqlen_k,) query i of batch b and head h sees; of queries i (n, 1) each."""
    j = np.arange(seqlen_k)
    if mask is None or type(mask).__name__ == "Dense":
        return np.ones(np.broadcast(i, j).shape, bool)
    if isinstance(mask, np.ndarray):
        return np.asarray(_broadcast(mask, b, h)[i, j])
    if isinstance(mask, Blocks):
        block_q, block_k = mask.block_size
        full, partial = (
            _broadcast(x, b, h)[i // block_q, j // block_k] for x in (mask.full, mask.partial)
        )
        if mask.band is not None:
            partial = partial & _in_band(mask.band, i, seqlen_q, seqlen_k)
        return np.asarray(full | partial)
    return _in_band(mask, i, seqlen_q, seqlen_k)


@dataclass(frozen=True)
class Row:
    """One query of one head, over the keys it sees."""

    keys: Any  # which: their indices, or a slice where they follow each other
    p: Float64  # probabilities before dropout
    drop: Float64  # what dropout multiplies them with: 0 or 256 / (256 - threshold)
    slope: Float64  # d(score) / d(softmax_scale·q·k), 1 without softcap
    lse: float  # logarithm of the sum of exp(score), with the sink; -inf of nothing


@dataclass(frozen=True)
class Head:
    """One head of one sequence, in float64."""

    f: Features
    sequence: int  # batch index, or the number of the packed sequence
    head: int
    q: Float64  # (seqlen_q, head_dim)
    k: Float64  # (seqlen_k, head_dim)
    v: Float64  # (seqlen_k, head_dim_v)
    dout: Float64 | None  # (seqlen_q, head_dim_v)
    dlse: Float64  # (seqlen_q,)
    # Where it lies: in q, dout and out; in k and v; in lse
    at_q: Any
    at_k: Any
    at_lse: Any

    # (seqlen_q, seqlen_k): what the mask and a boolean bias show to each query
    visible: Bool
    added: Float64 | None  # bias and ALiBi; None: neither
    drop: Float64  # what dropout multiplies P with: 0 or its scale

    @cached_property
    def scale(self) -> float:
        return self.f.scale(self.q.shape[1])

    @property
    def alibi_slope(self) -> float:
        return _alibi_slope(self.f, self.sequence, self.head)

    @cached_property
    def sink(self) -> float:
        """-inf where there is none: it then counts for nothing."""
        return -np.inf if self.f.sink is None else float(self.f.sink[self.head])

    def row(self, i: int) -> Row:
        keys = _slice(np.flatnonzero(self.visible[i]))
        score = self.scale * (self.k[keys] @ self.q[i])
        slope = np.ones(len(score))
        if self.f.softcap > 0:
            softcap = float(np.float32(self.f.softcap))
            tanh = np.tanh(score / softcap)
            score, slope = softcap * tanh, 1 - tanh**2
        if self.added is not None:
            score = score + self.added[i, keys]

        shown = score != -np.inf  # a bias of -inf hides a key as well
        if not shown.all():
            keys = _slice(np.arange(len(self.k))[keys][shown])
            score, slope = score[shown], slope[shown]
        drop = self.drop[i, keys]
        if len(score) == 0:
            return Row(keys, score, drop, slope, self.sink)
        top = max(score.max(), self.sink)
        e = np.exp(score - top)
        total = e.sum() + np.exp(self.sink - top)
        return Row(keys, e / total, drop, slope, float(top + np.log(total)))


def _slice(keys: NDArray[np.intp]) -> Any:
    """The same keys, as a slice where they follow each other: it copies nothing."""
    if len(keys) == 0:
        return slice(0)
    first, end = int(keys[0]), int(keys[-1]) + 1
    return slice(first, end) if end - first == len(keys) else keys


def _alibi_slope(f: Features, sequence: int, head: int) -> float:
    if f.alibi_slopes is None:
        return 0.0
    return float(_broadcast(np.atleast_2d(f.alibi_slopes), sequence, head))


def _of_scores(
    f: Features, sequence: int, head: int, num_heads: int, seqlen_q: int, seqlen_k: int
) -> tuple[Bool, Float64 | None, Float64]:
    """A Head's visible, added and drop, each (seqlen_q, seqlen_k)."""
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
    visible = visible_keys(f.mask, sequence, head, i, seqlen_q, seqlen_k)
    added: Any = None
    if f.bias is not None or f.alibi_slopes is not None:
        added = -_alibi_slope(f, sequence, head) * np.abs(i + seqlen_k - seqlen_q - j)
    if f.bias is not None:
        bias = _broadcast(f.bias, sequence, head)[:seqlen_q, :seqlen_k]
        if bias.dtype == bool:
            visible = visible & bias
        else:
            added = added + bias.astype(np.float64)
    drop: Any = np.broadcast_to(1.0, visible.shape)
    if threshold := f.dropout_threshold():
        byte = random_bytes(*f.dropout_of(sequence, head, num_heads), i, seqlen_k)
        drop = np.where(byte >= threshold, 256 / (256 - threshold), 0.0)
    return visible, added, drop


CuSeqlens = tuple[Array, Array] | None  # cu_seqlens_q and cu_seqlens_k of a packed problem


def _descaled(x: Array, descale: Array | None, *index: int) -> Float64:
    values: Float64 = x.astype(np.float64)
    return values if descale is None else values * float(_broadcast(descale, *index))


def heads(
    f: Features,
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None = None,
    dlse: Array | None = None,
    cu_seqlens: CuSeqlens = None,
) -> Iterator[Head]:
    """Every head of a batched or, with ``cu_seqlens``, packed problem, over the rows it uses."""
    num_heads, num_heads_kv = q.shape[-2], k.shape[-2]
    batch = len(q) if cu_seqlens is None else len(cu_seqlens[0]) - 1
    for b, h in np.ndindex(batch, num_heads):
        h_kv = h // (num_heads // num_heads_kv)
        rows, rows_k = (
            slice(None if used is None else int(used[b])) for used in (f.seqused_q, f.seqused_k)
        )
        at_q, at_k, at_lse = (b, rows, h), (b, rows_k, h_kv), (b, h, rows)
        if cu_seqlens is not None:
            rows, rows_k = (slice(int(cu[b]), int(cu[b + 1])) for cu in cu_seqlens)
            at_q, at_k, at_lse = (rows, h), (rows_k, h_kv), (h, rows)  # type: ignore[assignment]
        seqlen_q, seqlen_k = len(q[at_q]), len(k[at_k])
        yield Head(
            f,
            b,
            h,
            q[at_q].astype(np.float64),
            _descaled(k[at_k], f.k_descale, b, h_kv),
            _descaled(v[at_k], f.v_descale, b, h_kv),
            None if dout is None else dout[at_q].astype(np.float64),
            np.zeros(seqlen_q) if dlse is None else dlse[at_lse].astype(np.float64),
            at_q,
            at_k,
            at_lse,
            *_of_scores(f, b, h, num_heads, seqlen_q, seqlen_k),
        )


def forward(
    q: Array, k: Array, v: Array, *, cu_seqlens: CuSeqlens = None, **features: Any
) -> tuple[Float64, Float64]:
    """out, lse."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(_lse_shape(q), -np.inf)
    for head in heads(Features(**features), q, k, v, cu_seqlens=cu_seqlens):
        for i in range(len(head.q)):
            row = head.row(i)
            out[head.at_q][i] = (row.p * row.drop) @ head.v[row.keys]
            lse[head.at_lse][i] = row.lse
    return out, lse


def forward_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    cu_seqlens: CuSeqlens = None,
    **features: Any,
) -> tuple[Float64, ...]:
    """out, lse, and dq, dk, dv of sum(dout·out) + sum(dlse·lse); with a sink dsink too."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(_lse_shape(q), -np.inf)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dsink = np.zeros(q.shape[-2])
    for head in heads(Features(**features), q, k, v, dout, dlse, cu_seqlens):
        assert head.dout is not None
        ds, dropped = np.zeros(head.visible.shape), np.zeros(head.visible.shape)
        for i in range(len(head.q)):
            row = head.row(i)
            v_seen, p = head.v[row.keys], row.p * row.drop
            out_i = p @ v_seen
            dp = row.drop * (v_seen @ head.dout[i])
            delta = head.dout[i] @ out_i - head.dlse[i]
            ds_i = head.scale * row.slope * row.p * (dp - delta)
            if head.sink != -np.inf:
                dsink[head.head] -= np.exp(head.sink - row.lse) * delta
            out[head.at_q][i], lse[head.at_lse][i] = out_i, row.lse
            dq[head.at_q][i] = ds_i @ head.k[row.keys]
            ds[i, row.keys], dropped[i, row.keys] = ds_i, p
        # A query that is not finite reaches the keys that it sees: by 0 * nan it would reach all.
        whole = np.isfinite(head.q).all(1) & np.isfinite(head.dout).all(1)
        dk[head.at_k] += ds[whole].T @ head.q[whole]
        dv[head.at_k] += dropped[whole].T @ head.dout[whole]
        for n in np.flatnonzero(~whole):
            seen = head.row(int(n)).keys
            dk[head.at_k][seen] += np.outer(ds[n, seen], head.q[n])
            dv[head.at_k][seen] += np.outer(dropped[n, seen], head.dout[n])
    of_sink = (dsink,) if features.get("sink") is not None else ()
    return out, lse, dq, dk, dv, *of_sink


def backward(dout: Array, q: Array, k: Array, v: Array, **keywords: Any) -> tuple[Float64, ...]:
    """dq, dk, dv of forward_backward, and dsink where it has one."""
    return forward_backward(dout, q, k, v, **keywords)[2:]


def _lse_shape(q: Array) -> tuple[int, ...]:
    """(batch, num_heads, seqlen_q), packed (num_heads, total_q)."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


def varlen_forward(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, **features: Any
) -> tuple[Float64, Float64]:
    """out, lse of packed sequences."""
    return forward(q, k, v, cu_seqlens=(cu_seqlens_q, cu_seqlens_k), **features)


def varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    **features: Any,
) -> tuple[Float64, ...]:
    """dq, dk, dv of packed sequences."""
    return backward(dout, q, k, v, cu_seqlens=(cu_seqlens_q, cu_seqlens_k), **features)


__all__ = [
    "Blocks",
    "Features",
    "Head",
    "Row",
    "backward",
    "forward",
    "forward_backward",
    "heads",
    "philox4x32",
    "random_bytes",
    "varlen_backward",
    "varlen_forward",
    "visible_keys",
]
