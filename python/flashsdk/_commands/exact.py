"""Attention at full model sizes in a precision of NumPy: float64 as the truth, float32 to compare.

One key head and the query heads that share it, by the formulas of ``_testing.naive``, a block of
rows at a time so that the scores of a long sequence fit. Keys that no row of a block sees are left
out of the products, which changes no result. The tests hold it against ``_testing.reference``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashsdk._testing import naive
from flashsdk._testing.reference import Features
from flashsdk.masks import Band, BlockMask, Causal, Dense

Array = NDArray[Any]
ROWS = 128


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

    def rows(
        self, start: int, stop: int, seqlen_q: int, seqlen_k: int
    ) -> tuple[Array, NDArray[np.bool_] | None]:
        """The keys that any of these queries sees, and which each does not (stop - start, keys).

        None: all of them see all those keys.
        """
        i, j = np.arange(start, stop), np.arange(seqlen_k)
        if not self.causal and self.blocks is None:
            return j, None
        visible = np.ones((stop - start, seqlen_k), bool)
        if self.causal:
            visible = j <= (i + seqlen_k - seqlen_q)[:, None]
        if self.blocks is not None:
            block_q, block_k = self.block_size
            visible &= self.blocks[i // block_q][:, j // block_k]
        keys = np.flatnonzero(visible.any(axis=0))
        hidden = ~visible[:, keys]
        return keys, hidden if hidden.any() else None

    def hidden(
        self, start: int, stop: int, seqlen_q: int, seqlen_k: int
    ) -> NDArray[np.bool_] | None:
        """What these queries do not see (stop - start, seqlen_k), or None when they see all."""
        keys, hidden = self.rows(start, stop, seqlen_q, seqlen_k)
        if len(keys) == seqlen_k and hidden is None:
            return None
        every = np.ones((stop - start, seqlen_k), bool)
        every[:, keys] = False if hidden is None else hidden
        return every


@dataclass(frozen=True)
class Gradients:
    """NaN where nothing was computed."""

    out: Array  # (seqlen_q, heads, head_dim)
    dq: Array
    dk: Array  # (seqlen_k, head_dim)
    dv: Array


def attention(
    q: Array, k: Array, v: Array, dout: Array, visibility: Visibility, dtype: Any, every: int = 1
) -> Gradients:
    """q and dout (seqlen_q, heads, head_dim), k and v (seqlen_k, head_dim).

    Gradients of every so-manieth block of 128 rows, from the first on; out of all.
    """
    seqlen_q, heads, head_dim = q.shape
    seqlen_k = k.shape[0]
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    wanted = np.arange(seqlen_k) // ROWS % every == 0
    g = Gradients(*(np.full_like(x, np.nan) for x in (dout, q, k, v)))
    g.dk[wanted] = g.dv[wanted] = 0
    for start in range(0, seqlen_q, ROWS):
        rows = slice(start, min(start + ROWS, seqlen_q))
        keys, hidden = visibility.rows(rows.start, rows.stop, seqlen_q, seqlen_k)
        visible = None if hidden is None else ~hidden
        chosen = wanted[keys]
        into = keys[chosen]
        kb, vb = k[keys], v[keys]
        for h in range(heads):
            head = naive.Heads(Features(), q[rows, h], kb, vb, dout[rows, h], 0.0, head_dim**-0.5)
            m = naive.from_products(head, head.q @ kb.T, None, visible, None)
            out = g.out[rows, h] = m.p @ vb
            if start // ROWS % every == 0:
                of = naive.gradients(head, m, out)
                g.dq[rows, h] = of["dq"]
                g.dk[into] += of["dk"][chosen]
                g.dv[into] += of["dv"][chosen]
            else:  # most of the work saved
                of = naive.gradients(*_of_keys(head, m, chosen), out)
                g.dk[into] += of["dk"]
                g.dv[into] += of["dv"]
    return g


def _of_keys(
    head: naive.Heads, m: naive.Matrices, keys: NDArray[np.bool_]
) -> tuple[naive.Heads, naive.Matrices]:
    """What the gradients of some keys alone are made of; there is no dropout and no softcap."""
    return replace(head, k=head.k[keys], v=head.v[keys]), replace(m, p=m.p[:, keys])
