"""Attention at full model sizes in a precision of NumPy: float64 as the truth, float32 to compare.

One key head and the query heads that share it, by the textbook formulas, a block of rows at a time
so that the scores of a long sequence fit. Keys that no row of a block sees are left out of the
products, which changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashsdk.masks import Band, BlockMask, Causal, Dense

Array = NDArray[Any]
ROWS = 512


@dataclass(frozen=True)
class Visibility:
    """The keys a query sees: all, those up to the bottom-right diagonal, those of listed blocks."""

    causal: bool = False
    blocks: NDArray[np.bool_] | None = None  # (block rows, block columns)
    block_size: tuple[int, int] = (128, 128)

    @staticmethod
    def of(mask: Dense | Band | BlockMask) -> Visibility:
        """Of Dense(), Causal(), or a BlockMask that all heads share, its band None or Causal()."""
        if isinstance(mask, BlockMask):
            blocks = mask.to_dense(block_level=True)[0, 0]
            return Visibility(mask.band is not None, blocks, mask.block_size)
        return Visibility(causal=mask == Causal())

    def rows(self, start: int, stop: int, seqlen_q: int, seqlen_k: int) -> tuple[Array, Array]:
        """The keys that any of these queries sees (n,), and which each does (stop - start, n)."""
        i, j = np.arange(start, stop), np.arange(seqlen_k)
        visible = np.ones((stop - start, seqlen_k), bool)
        if self.causal:
            visible = j <= (i + seqlen_k - seqlen_q)[:, None]
        if self.blocks is not None:
            block_q, block_k = self.block_size
            visible &= self.blocks[i // block_q][:, j // block_k]
        keys = np.flatnonzero(visible.any(axis=0))
        return keys, visible[:, keys]

    def dense(
        self, start: int, stop: int, seqlen_q: int, seqlen_k: int
    ) -> NDArray[np.bool_] | None:
        """(stop - start, seqlen_k), or None when everything is visible."""
        if not self.causal and self.blocks is None:
            return None
        keys, seen = self.rows(start, stop, seqlen_q, seqlen_k)
        visible = np.zeros((stop - start, seqlen_k), bool)
        visible[:, keys] = seen
        return visible


@dataclass(frozen=True)
class Gradients:
    out: Array  # (seqlen_q, heads, head_dim)
    dq: Array
    dk: Array  # (seqlen_k, head_dim)
    dv: Array


def attention(
    q: Array, k: Array, v: Array, dout: Array, visibility: Visibility, dtype: Any
) -> Gradients:
    """q and dout (seqlen_q, heads, head_dim), k and v (seqlen_k, head_dim)."""
    seqlen_q, heads, head_dim = q.shape
    seqlen_k = k.shape[0]
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    scale = k.dtype.type(head_dim**-0.5)
    g = Gradients(np.zeros_like(dout), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v))
    for start in range(0, seqlen_q, ROWS):
        rows = slice(start, min(start + ROWS, seqlen_q))
        keys, seen = visibility.rows(rows.start, rows.stop, seqlen_q, seqlen_k)
        if not len(keys):
            continue
        hidden = None if seen.all() else ~seen
        some: Any = slice(None) if len(keys) == seqlen_k else keys
        kb, vb = k[some], v[some]
        for h in range(heads):
            p = q[rows, h] @ kb.T  # (rows, keys): scores, then probabilities
            p *= scale
            if hidden is not None:
                np.copyto(p, -np.inf, where=hidden)
            top = p.max(axis=1, keepdims=True)
            p -= np.where(np.isneginf(top), 0, top)
            np.exp(p, out=p)
            total = p.sum(axis=1, keepdims=True)
            p /= np.where(total == 0, 1, total)
            g.out[rows, h] = p @ vb
            g.dv[some] += p.T @ dout[rows, h]
            ds = dout[rows, h] @ vb.T
            ds -= (dout[rows, h] * g.out[rows, h]).sum(axis=1, keepdims=True)
            ds *= p
            ds *= scale
            g.dq[rows, h] = ds @ kb
            g.dk[some] += ds.T @ q[rows, h]
    return g
