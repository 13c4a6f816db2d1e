"""The definition in float64 and its error bounds, for all heads of a problem at once in PyTorch.

``reference`` walks over queries, which takes too long for problems by the hundred thousand. Here
S and P are whole matrices, (batch, num_heads, longest seqlen_q, longest seqlen_k), on any device,
by the formulas of ``naive``. The tests hold both against ``reference``.
Packed sequences are padded, with queries that see no key and keys that no query sees, as those
behind used lengths are. Sinks are left to ``reference``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import naive, philox, tolerance
from .problems import BandSpec, Problem
from .reference import Blocks, Features

Tensor = Any


class Padding:
    """Between packed rows and (batch, num_heads, longest, …); batched ones are there already.

    used: how many of the rows of each sequence are, if not all.
    """

    def __init__(
        self, lengths: tuple[int, ...], tail: int, packed: bool, device: str,
        used: tuple[int, ...] = (),
    ):  # fmt: skip
        self.lengths, self.tail, self.packed = lengths, tail, packed
        self.longest = max(lengths)
        if packed:
            ends = np.cumsum(lengths)
            first, longest = ends - lengths, np.arange(self.longest)
            inside = longest < np.asarray(lengths)[:, None]
            rows = np.where(inside, first[:, None] + longest, 0)
            self.rows = torch.from_numpy(rows).to(device)  # of padded places
            self.places = torch.from_numpy(np.flatnonzero(inside)).to(device)  # of rows
        self.length = torch.tensor(used or lengths, device=device)[:, None]
        self.unused = None  # rows, (batch, 1, longest)
        if used:
            self.unused = (torch.arange(self.longest, device=device) >= self.length)[:, None]

    def take(self, x: Tensor) -> Tensor:
        """(batch, num_heads, longest, width) in float64 of an array as calls take it."""
        return self._used((x[self.rows] if self.packed else x).transpose(1, 2).double())

    def _used(self, x: Tensor) -> Tensor:
        """0 in rows that are not used, whatever lies there."""
        return x if self.unused is None else x.masked_fill(self.unused[..., None], 0)

    def take_lse(self, x: Tensor) -> Tensor:
        x = (x[:, self.rows].transpose(0, 1) if self.packed else x).double()
        return x if self.unused is None else x.masked_fill(self.unused, 0)

    def give(self, x: Tensor) -> Tensor:
        """Back; rows behind the last sequence, and those that are not used, are 0."""
        x = self._used(x).transpose(1, 2)
        if not self.packed:
            return x
        rows = x.reshape(-1, *x.shape[2:])[self.places]
        return torch.cat([rows, rows.new_zeros(self.tail, *rows.shape[1:])])

    def give_lse(self, x: Tensor, unseen: float) -> Tensor:
        if not self.packed:
            return x if self.unused is None else x.masked_fill(self.unused, unseen)
        x = x.transpose(0, 1).flatten(1)[:, self.places]
        return torch.cat([x, x.new_full((len(x), self.tail), unseen)], 1)


def definition(p: Problem, x: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of out, lse, dq, dk and dv the float64 values, and how far kernels may be from them.

    ``x`` holds q, k, v, dout and, where there are any, dlse, bias and alibi_slopes.
    """
    assert p.bias is None or "bias" in x
    assert not p.sink and p.fp8 is None
    device = x["q"].device
    of_q = Padding(p.lengths_q, p.tail[0], p.packed, device, p.used_q)
    of_k = Padding(p.lengths_k, p.tail[1], p.packed, device, p.used_k)
    group = p.num_heads // p.num_heads_kv
    q, dout = of_q.take(x["q"]), of_q.take(x["dout"])
    k, v = (of_k.take(x[name]).repeat_interleave(group, 1) for name in "kv")
    dlse = of_q.take_lse(x["dlse"]) if "dlse" in x else q.new_zeros(q.shape[:-1])
    f = Features(
        p.softmax_scale, p.mask, softcap=p.softcap, dropout_p=p.dropout_p
    )  # fmt: skip
    visible = _visible(p, of_q, of_k)
    slopes: Any = 0.0
    added: Any = None
    if "bias" in x:
        bias = x["bias"][:, :, : of_q.longest, : of_k.longest]
        if bias.dtype == torch.bool:
            visible = visible & bias
        else:
            added = bias.double()
    if "alibi_slopes" in x:
        slopes = x["alibi_slopes"].double().expand(p.batch, p.num_heads)[..., None, None]
        added = (0 if added is None else added) - slopes * _distance(of_q, of_k)
    heads = naive.Heads(f, q, k, v, dout, dlse, f.scale(p.head_dim), slopes)
    drop = None
    if threshold := f.dropout_threshold():
        kept = random_bytes(*_seeds(p), q.new_empty(*q.shape[:-1], of_k.longest)) >= threshold
        drop = kept.double() * (256 / (256 - threshold))
    m: Any = naive.from_products(heads, q @ k.mT, added, visible, drop, xp=torch)

    out = (m.p * m.drop) @ v
    lse: Any = naive.log_sum_exp(m.score, torch)
    exact: dict[str, Tensor] = {"out": out, "lse": lse}
    exact |= naive.gradients(heads, m, out)
    bounds: Any = tolerance.bounds
    bound = bounds(heads, m, p.dtype, torch)
    unit, underflow = tolerance.UNIT_ROUNDOFF[p.dtype], tolerance.UNDERFLOW[p.dtype]
    for name in ("dk", "dv"):
        exact[name], bound[name] = (
            t[name].unflatten(1, (-1, group)).sum(2) for t in (exact, bound)
        )
        bound[name] += unit * exact[name].abs() + underflow
    bound = {name: t * (1 + 4 * unit) for name, t in bound.items()}
    given = [
        {name: (of_k if name in ("dk", "dv") else of_q).give(t) for name, t in of.items()
         if name != "lse"} | {"lse": of_q.give_lse(of["lse"], unseen)}
        for of, unseen in ((exact, -torch.inf), (bound, 0.0))
    ]  # fmt: skip
    return given[0], given[1]


def _places(of_q: Padding, of_k: Padding) -> tuple[Tensor, Tensor]:
    """Of queries (longest, 1) and of keys (longest,)."""
    device = of_q.length.device
    rows, columns = (torch.arange(of.longest, device=device) for of in (of_q, of_k))
    return rows[:, None], columns


def _distance(of_q: Padding, of_k: Padding) -> Tensor:
    """(batch, 1, longest, longest): of a query from a key, by the bottom-right diagonal."""
    i, j = _places(of_q, of_k)
    return (i + (of_k.length - of_q.length)[..., None, None] - j).abs().double()


def _visible(p: Problem, of_q: Padding, of_k: Padding) -> Tensor:
    """(batch | 1, num_heads | 1, longest, longest): which keys a query sees."""
    i, j = _places(of_q, of_k)
    seqlen_q, seqlen_k = (x.length[:, None, None] for x in (of_q, of_k))
    there = (i < seqlen_q) & (j < seqlen_k)
    if isinstance(p.mask, Blocks):
        full, partial = (
            torch.from_numpy(blocks).to(i.device)[:, :, i[:, 0] // p.mask.block_size[0]][
                ..., j // p.mask.block_size[1]
            ]
            for blocks in (p.mask.full, p.mask.partial)
        )
        return there & (full | (partial & _in_band(p.mask.band, j - i, seqlen_k - seqlen_q)))
    return there & _in_band(p.mask, j - i, seqlen_k - seqlen_q)


def _in_band(band: BandSpec | None, distance: Tensor, shift: Tensor) -> Tensor:
    if band is None:
        return torch.ones_like(distance, dtype=torch.bool)
    if band.alignment == "bottom_right":
        distance = distance - shift
    seen = torch.ones_like(distance, dtype=torch.bool)
    if band.left is not None:
        seen &= distance >= -band.left
    if band.right is not None:
        seen &= distance <= band.right
    return seen


def _seeds(p: Problem) -> tuple[Any, Any]:
    """Of all sequences a number each, or a list of each sequence's."""
    if not p.dropout_seeds:
        return p.dropout_seed, p.dropout_offset
    seeds: Any = p.dropout_seeds
    seed, offset = seeds if isinstance(seeds[0], int) else zip(*seeds, strict=True)
    return seed, offset


def random_bytes(seed: Any, offset: Any, like: Tensor) -> Tensor:
    """The byte that decides over each element of ``like`` (batch, num_heads, seqlen_q, seqlen_k).

    Where seed and offset are sequences' own, heads count from 0 in each.
    """
    batch, num_heads, seqlen_q, seqlen_k = like.shape
    heads = torch.arange(batch * num_heads, device=like.device).view(batch, num_heads, 1, 1)
    if not isinstance(seed, int):
        heads = heads % num_heads
        seed, offset = (
            torch.tensor(x, device=like.device)[:, None, None, None] for x in (seed, offset)
        )
    return philox.random_bytes(seed, offset, heads, seqlen_q, seqlen_k)


def share(ours: Tensor, other: Tensor, bound: Tensor) -> Tensor:
    """Of what is allowed, for each element; NaN where one is NaN."""
    error = torch.where(ours == other, 0, (ours - other).abs())  # -inf of an LSE is exact
    return error / bound.clamp(min=1e-300)
