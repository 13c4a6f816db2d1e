"""Bytes that attention moves between a GPU's memory and its chip: standard and tiled.

    from flashsdk import io
    problem = io.Problem(batch=64, seqlen_q=1024, seqlen_k=1024, num_heads=16, head_dim=64)
    standard = io.standard_forward(problem, mask=True, dropout=True)
    tiled = io.tiled_forward(problem, (128, 128), mask=fs.Causal())
    print(standard.total / tiled.total)
    print(tiled)                                   # step by step

The counts are those of FlashAttention (arXiv 2205.14135, section 3.2) without the O(): what each
step reads and writes, in bytes. docs/io.md of the sources derives them. They count an operand of a
matrix product once, as a product whose own tiles are large does nearly, and nothing that a cache
keeps from one step to the next. Of ``tiled_*`` the argument ``cache`` says what an on-chip cache
keeps inside a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ._bands import no_mask
from ._errors import InvalidArgument, Unsupported, integer, shown
from .masks import Band, BlockMask, Dense, Mask

__all__ = [
    "Cache",
    "Problem",
    "Step",
    "Traffic",
    "paper_tile",
    "standard_backward",
    "standard_forward",
    "tiled_backward",
    "tiled_forward",
]

_FLOAT = 4  # bytes of lse, delta and the sum of dQ


@dataclass(frozen=True)
class Problem:
    """The shapes of one attention, as in docs/semantics.md.

    num_heads_kv is num_heads and head_dim_v is head_dim unless given; element_bytes is that of q,
    k, v and out: 2 for bfloat16. Raises Error if a number is not a positive integer, or num_heads
    no multiple of num_heads_kv.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    head_dim: int
    num_heads_kv: int | None = None
    head_dim_v: int | None = None
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name, default in (("num_heads_kv", self.num_heads), ("head_dim_v", self.head_dim)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in self.__dataclass_fields__:
            integer(name, getattr(self, name), 1)
        if self.num_heads % self.kv:
            raise InvalidArgument(
                f"num_heads_kv: {self.kv}; a divisor of num_heads = {self.num_heads}"
            )

    @property
    def kv(self) -> int:
        return self.num_heads_kv or self.num_heads

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def q(self) -> int:
        """Bytes of q, and of dq."""
        return self.batch * self.num_heads * self.seqlen_q * self.head_dim * self.element_bytes

    @property
    def k(self) -> int:
        """Bytes of k, and of dk."""
        return self.batch * self.kv * self.seqlen_k * self.head_dim * self.element_bytes

    @property
    def v(self) -> int:
        """Bytes of v, and of dv."""
        return self.batch * self.kv * self.seqlen_k * self.dim_v * self.element_bytes

    @property
    def out(self) -> int:
        """Bytes of out, and of dout."""
        return self.batch * self.num_heads * self.seqlen_q * self.dim_v * self.element_bytes

    @property
    def lse(self) -> int:
        """Bytes of lse, and of delta = rowsum(dout * out)."""
        return self.batch * self.num_heads * self.seqlen_q * _FLOAT

    @property
    def scores(self) -> int:
        """Bytes of the matrix S of all heads, and of P, dP and dS."""
        rows = self.batch * self.num_heads * self.seqlen_q
        return rows * self.seqlen_k * self.element_bytes


class Step(NamedTuple):
    """What one step moves, in bytes."""

    name: str
    read: int
    written: int


@dataclass(frozen=True)
class Traffic:
    """Steps in their order, and their sums in bytes."""

    steps: tuple[Step, ...]

    @property
    def read(self) -> int:
        return sum(step.read for step in self.steps)

    @property
    def written(self) -> int:
        return sum(step.written for step in self.steps)

    @property
    def total(self) -> int:
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:
        """One after the other: a forward and its backward."""
        return Traffic(self.steps + other.steps)

    def __str__(self) -> str:
        lines = [*self.steps, Step("all", self.read, self.written)]
        width = max(len(line.name) for line in lines)
        head = f"{'MB':{width}}{'read':>12}{'written':>12}"
        return "\n".join(
            [head, *(f"{n:{width}}{r / 1e6:12.1f}{w / 1e6:12.1f}" for n, r, w in lines)]
        )


# ---- standard attention


def standard_forward(
    problem: Problem, *, mask: bool = False, dropout: bool = False, scale: bool = True
) -> Traffic:
    """Standard attention as a framework runs it, one operation after the other.

    mask
        A boolean (seqlen_q, seqlen_k) matrix is filled in, as causal masks are.
    dropout
        P is dropped, and which elements were is kept, one byte each.
    scale
        Scaling S is an operation of its own; False where it is done to q, or inside the product.

    Raises Error, "unsupported", for grouped heads, which standard attention has to repeat first.
    """
    s, flags = _standard(problem)
    steps = [Step("S = Q Kᵀ", problem.q + problem.k, s)]
    if scale:
        steps.append(Step("scale", s, s))
    if mask:
        steps.append(Step("mask", s + flags, s))
    steps.append(Step("P = softmax(S)", s, s))
    if dropout:
        steps.append(Step("dropout", s, s + _kept(problem)))
    steps.append(Step("O = P V", s + problem.v, problem.out))
    return Traffic(tuple(steps))


def standard_backward(
    problem: Problem, *, mask: bool = False, dropout: bool = False, scale: bool = True
) -> Traffic:
    """The backward of ``standard_forward``, with the same arguments."""
    s, flags = _standard(problem)
    steps = [
        Step("dV = Pᵀ dO", s + problem.out, problem.v),
        Step("dP = dO Vᵀ", problem.out + problem.v, s),
    ]
    if dropout:
        steps.append(Step("dropout", s + _kept(problem), s))
    steps.append(Step("dS = P (dP - rowsum(P dP))", 2 * s, s))
    if mask:
        steps.append(Step("mask", s + flags, s))
    if scale:
        steps.append(Step("scale", s, s))
    steps += [
        Step("dQ = dS K", s + problem.k, problem.q),
        Step("dK = dSᵀ Q", s + problem.q, problem.k),
    ]
    return Traffic(tuple(steps))


def _standard(problem: Problem) -> tuple[int, int]:
    """Bytes of the scores and of a boolean mask that all heads share."""
    if problem.kv != problem.num_heads:
        raise Unsupported(f"num_heads_kv: {problem.kv}; num_heads = {problem.num_heads}")
    return problem.scores, problem.seqlen_q * problem.seqlen_k


def _kept(problem: Problem) -> int:
    """Bytes of the matrix that says which elements of P dropout kept."""
    return problem.scores // problem.element_bytes


# ---- tiled attention


class Cache(NamedTuple):
    """A cache that all tiles share: an L2 of ``size`` bytes, beside ``tiles`` running at once.

    Tiles of one head walk the same rows at about the same time. While the rows of the heads that
    are worked on at once fit, each row comes from memory once; where they do not, once for every
    ``tiles`` tiles of the head.
    """

    size: int
    tiles: int

    def comes(self, tiles_a_head: int, head_bytes: float) -> int:
        """How often the rows of a head come from memory, of ``tiles_a_head`` walks over them."""
        heads_at_once = -(-self.tiles // tiles_a_head)
        if heads_at_once * head_bytes <= self.size:
            return 1
        return -(-tiles_a_head // self.tiles)


def _is_cache(cache: object) -> None:
    if not isinstance(cache, Cache):
        raise InvalidArgument(f"cache: {shown(cache)}; a Cache(size, tiles) or None")


def tiled_forward(
    problem: Problem,
    tile: tuple[int, int],
    *,
    mask: Mask | None = None,
    cache: Cache | None = None,
) -> Traffic:
    """One pass: a tile of queries stays on chip, and tiles of keys and values stream past it.

    tile
        Queries, keys of a tile. For a ``BlockMask``, its block_size.
    mask
        Tiles in which no query sees a key are not read.
    cache
        None counts what tiles ask for, which is what memory moves where nothing is cached.

    Raises Error for a tile of other than two positive integers, or another one than the layout's.
    """
    visited, _, keys = _visited(problem, tile, mask)
    streamed = visited @ keys  # keys that each tile of queries reads: (batch, heads, tiles)
    row = (problem.k + problem.v) // (problem.batch * problem.kv * problem.seqlen_k)
    asked = int(streamed.sum()) * row
    if cache is not None:
        _is_cache(cache)
        head = (problem.k + problem.v) / (problem.batch * problem.kv)
        group = problem.num_heads // problem.kv
        # Query heads that share keys walk the same rows.
        comes = cache.comes(visited.shape[2] * group, head)
        asked = min(asked, comes * _seen(problem, visited, keys) * row)
    return Traffic(
        (
            Step("Q", problem.q, 0),
            Step("K and V", asked, 0),
            Step("O and lse", 0, problem.out + problem.lse),
        )
    )


def tiled_backward(
    problem: Problem,
    tile: tuple[int, int],
    *,
    mask: Mask | None = None,
    cache: Cache | None = None,
) -> Traffic:
    """A tile of keys stays on chip, and tiles of queries stream past it.

    P is computed again from Q, K and lse. dQ is summed in float32 where the tiles of keys meet, and
    rounded at the end. An addition into the sum counts as a read and a write. Arguments and errors
    are those of ``tiled_forward``.
    """
    visited, queries, _ = _visited(problem, tile, mask)
    # Queries that each tile of keys reads: (batch, heads, tiles).
    streamed = int((visited.transpose(0, 1, 3, 2) @ queries).sum())
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    row = (problem.q + problem.out + 2 * problem.lse) // rows
    total = problem.head_dim * _FLOAT  # a row of dQ's sum
    asked, added = streamed * row, streamed * total
    if cache is not None:
        _is_cache(cache)
        head = (row + total) * problem.seqlen_q
        comes = cache.comes(visited.shape[3], head)
        seen = int((visited.any(3) @ queries).sum())
        asked = min(asked, comes * seen * row)
        added = min(added, comes * seen * total)
    return Traffic(
        (
            Step("delta = rowsum(dO O)", 2 * problem.out, problem.lse),
            Step("dQ's sum set to 0", 0, rows * total),
            Step("K and V", problem.k + problem.v, 0),
            Step("Q, dO, lse and delta", asked, 0),
            Step("dQ's sum", added, added),
            Step("dK and dV", 0, problem.k + problem.v),
            Step("dQ", rows * total, problem.q),
        )
    )


def paper_tile(on_chip: int, head_dim: int, element_bytes: int = 2) -> tuple[int, int]:
    """(queries, keys) of the paper's algorithm 1 for ``on_chip`` bytes.

    Keys: on_chip / 4d rows, so that a tile each of Q, K, V and O fits; queries: as many, at most d.
    """
    rows = integer("on_chip", on_chip, 1) // (4 * head_dim * element_bytes)
    if rows < 1:
        least = 4 * head_dim * element_bytes
        raise InvalidArgument(f"on_chip: {on_chip}; at least four rows, {least} bytes")
    return min(rows, head_dim), rows


# ---- which tiles are read

_Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def _pair(tile: object) -> tuple[int, int]:
    if not (isinstance(tile, Sequence) and len(tile) == 2):
        raise InvalidArgument(f"tile: {shown(tile)}; (queries, keys), two integers")
    return integer("tile", tile[0], 1), integer("tile", tile[1], 1)


def _visited(
    problem: Problem, tile: tuple[int, int], mask: Mask | None
) -> tuple[_Counts, _Counts, _Counts]:
    """0 or 1 for each tile (batch, heads, rows, columns); queries of a row; keys of a column."""
    tile_q, tile_k = _pair(tile)
    lengths = (problem.seqlen_q, problem.seqlen_k)
    shape = (problem.batch, problem.num_heads)
    if isinstance(mask, BlockMask):
        if mask.block_size != (tile_q, tile_k):
            raise InvalidArgument(f"tile: {tile}; the layout's block_size, {mask.block_size}")
        if (mask.seqlen_q, mask.seqlen_k) != lengths:
            raise InvalidArgument(f"mask: of lengths {mask.seqlen_q}, {mask.seqlen_k}; {lengths}")
        touched = mask.to_dense(block_level=True)
    elif mask is None or isinstance(mask, Dense | Band):
        band = mask if isinstance(mask, Band) else Band()
        touched = band.blocks(*lengths, (tile_q, tile_k))[0][None, None]
    else:
        raise no_mask(mask)
    visited = np.broadcast_to(touched, shape + touched.shape[2:]).astype(np.int64)
    queries, keys = (
        np.array(list(_pieces(length, size))) for length, size in zip(lengths, (tile_q, tile_k))
    )
    return visited, queries, keys


def _pieces(length: int, size: int) -> Iterator[int]:
    """Lengths of the tiles: all of ``size`` but the last."""
    for begin in range(0, length, size):
        yield min(size, length - begin)


def _seen(problem: Problem, visited: _Counts, keys: _Counts) -> int:
    """Keys of all heads of keys that any tile of queries visits."""
    group = problem.num_heads // problem.kv
    shape = (problem.batch, problem.kv, group, *visited.shape[2:])
    return int((visited.reshape(shape).any((2, 3)) @ keys).sum())
