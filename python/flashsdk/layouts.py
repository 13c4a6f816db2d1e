"""Block-sparse layouts of the literature, each a function that returns a ``BlockMask``.

Every layout takes ``(seqlen_q, seqlen_k, block_size=128)``: lengths in tokens, block_size one
number or (block_q, block_k), multiples of 16. Parameters that end in ``_blocks`` count key blocks;
``left`` and ``right`` count tokens. ``band`` limits what is visible inside the visited blocks
(``Causal()``, ``SlidingWindow(...)``) and None shows them whole; blocks that it hides are dropped.
``strided`` and ``fixed`` are causal unless told otherwise, as in their paper; ``butterfly``,
``bigbird`` and ``random`` see the future unless given ``band=Causal()``. A layout takes the memory
of its blocks, visited or not, and is a MemoryError where there is not as much.

The papers define their patterns for queries and keys of one sequence. Here a query stands at the
key that the band's alignment gives it (bottom-right without a band, that is, the last query at the
last key), and a block of queries follows the pattern of each key block that it stands in. So the
layout of the last queries of a sequence is the last rows of the whole sequence's layout (but for
``random``, which draws anew), and block_q != block_k works. Queries that stand before the first key
or after the last follow those.

For packed sequences a layout is made for both max_seqlens, and which blocks are full is decided
from these. If some sequences have another seqlen_k - seqlen_q, a band of it, or ``alignment``,
should be "top_left": "bottom_right" gives them a mask that is neither the layout's nor the band's.

Bad arguments raise ``flashsdk.Error``: one line with the argument, what was given, what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._bands import Alignment, band_or_all, lengths
from ._block_lists import (
    BlockSize,
    Bools,
    amount,
    as_blocks,
    block_bounds,
    check_block_size,
    length,
)
from ._errors import InvalidArgument, Unsupported, integer, real, shown
from ._untraced import untraced
from .masks import Band, BlockMask, Causal, SlidingWindow

__all__ = [
    "bigbird",
    "butterfly",
    "causal",
    "dense",
    "fixed",
    "from_matrix",
    "longformer",
    "random",
    "sliding_window",
    "stack_heads",
    "strided",
]

_CAUSAL = Causal()

# Key block where the query stands (n, 1), key block (n,) -> visited (n, n) or (num_heads, n, n).
Pattern = Callable[[NDArray[np.int64], NDArray[np.int64]], Bools]


@untraced
def dense(seqlen_q: int, seqlen_k: int, block_size: BlockSize = 128) -> BlockMask:
    """Every block, full."""
    return _everywhere(seqlen_q, seqlen_k, block_size, None)


@untraced
def causal(
    seqlen_q: int,
    seqlen_k: int,
    block_size: BlockSize = 128,
    *,
    alignment: Alignment = "bottom_right",
) -> BlockMask:
    """``Causal(alignment)`` as blocks: full below the diagonal, partial on it."""
    return _everywhere(seqlen_q, seqlen_k, block_size, Causal(alignment))


@untraced
def sliding_window(
    seqlen_q: int,
    seqlen_k: int,
    block_size: BlockSize = 128,
    *,
    left: int | None,
    right: int | None,
    alignment: Alignment = "bottom_right",
) -> BlockMask:
    """``SlidingWindow(left, right, alignment)`` as blocks; left and right in tokens.

    Raises what it raises, so also where left + right < 0.
    """
    return _everywhere(seqlen_q, seqlen_k, block_size, SlidingWindow(left, right, alignment))


@untraced
def strided(
    seqlen_q: int,
    seqlen_k: int,
    block_size: BlockSize = 128,
    *,
    stride_blocks: int,
    band: Band | None = _CAUSAL,
) -> BlockMask:
    """Sparse Transformers' strided attention (arXiv 1904.10509, section 4.3), both heads in one.

    A query block visits the nearest ``stride_blocks`` key blocks, its own among them, and every
    ``stride_blocks``-th one from there.
    """
    stride = amount("stride_blocks", stride_blocks, 1)

    def pattern(own: NDArray[np.int64], key: NDArray[np.int64]) -> Bools:
        distance = np.abs(own - key)
        visited: Bools = (distance < stride) | (distance % stride == 0)
        return visited

    return _along_diagonal(pattern, seqlen_q, seqlen_k, block_size, band)


@untraced
def fixed(
    seqlen_q: int,
    seqlen_k: int,
    block_size: BlockSize = 128,
    *,
    stride_blocks: int,
    summary_blocks: int = 1,
    band: Band | None = _CAUSAL,
) -> BlockMask:
    """Sparse Transformers' fixed attention (arXiv 1904.10509, section 4.3), both heads in one.

    The keys fall into groups of ``stride_blocks``. A query block visits its own group and the last
    ``summary_blocks`` (the paper's c) of every group.
    """
    stride = amount("stride_blocks", stride_blocks, 1)
    summary = integer("summary_blocks", summary_blocks)
    if not 1 <= summary <= stride:
        raise InvalidArgument(f"summary_blocks: {shown(summary)}; 1 to stride_blocks = {stride}")

    def pattern(own: NDArray[np.int64], key: NDArray[np.int64]) -> Bools:
        visited: Bools = own // stride == key // stride
        return visited | (key % stride >= stride - summary)

    return _along_diagonal(pattern, seqlen_q, seqlen_k, block_size, band)


@untraced
def butterfly(
    seqlen_q: int,
    seqlen_k: int,
    block_size: BlockSize = 128,
    *,
    max_stride_blocks: int | None = None,
    global_blocks: int = 0,
    band: Band | None = None,
) -> BlockMask:
    """Flat block butterfly (Pixelated Butterfly, arXiv 2112.00029, section 3.2).

    The fixed pattern of block-sparse FlashAttention (arXiv 2205.14135, section 3.3). A query block
    at key block b visits b and b with one bit flipped: the union of the butterfly factors of
    strides 2, 4, … ``max_stride_blocks`` (a power of two; None is all of them), at most
    1 + log2(max_stride_blocks) blocks. ``global_blocks`` is the paper's low-rank term: that many
    first blocks are visited by all and visit all.
    """
    if max_stride_blocks is None:
        stride = 1 << 62
    else:
        stride = integer("max_stride_blocks", max_stride_blocks)
        if stride < 1 or stride & (stride - 1):
            raise InvalidArgument(f"max_stride_blocks: {shown(stride)}; a power of two or None")
    whole = amount("global_blocks", global_blocks)

    def pattern(own: NDArray[np.int64], key: NDArray[np.int64]) -> Bools:
        flipped = own ^ key
        one_bit_at_most: Bools = flipped & (flipped - 1) == 0
        return (one_bit_at_most & (flipped < stride)) | _global(own, key, whole)

    return _along_diagonal(pattern, seqlen_q, seqlen_k, block_size, band)


@untraced
def longformer(
    seqlen_q: int,
    seqlen_k: int,
    block_size: BlockSize = 128,
    *,
    left: int,
    right: int,
    global_blocks: int = 1,
    alignment: Alignment = "bottom_right",
) -> BlockMask:
    """Longformer's window and global attention (arXiv 2004.05150, section 3.1).

    A query sees ``left`` keys before its place and ``right`` after (the paper's window w is w/2 and
    w/2), exactly. The first ``global_blocks`` are seen whole by all queries, and see all keys. With
    right <= 0, the autoregressive form, global blocks too end at the diagonal: those that it
    crosses keep the window alone.
    """
    right = integer("right", right)
    window = Band(integer("left", left), right, alignment)
    count = amount("global_blocks", global_blocks)

    def pattern(own: NDArray[np.int64], key: NDArray[np.int64]) -> Bools:
        return _global(own, key, count)

    # Only its layout is used: which blocks are global.
    anywhere = Band(alignment=alignment)
    whole = _along_diagonal(pattern, seqlen_q, seqlen_k, block_size, anywhere)
    full = whole.to_dense(block_level=True)
    if right <= 0:
        before = Band(None, right, alignment)
        full &= before.blocks(whole.seqlen_q, whole.seqlen_k, whole.block_size)[1]
    return BlockMask.from_dense(
        np.ones_like(full),
        whole.block_size,
        seqlen_q=whole.seqlen_q,
        seqlen_k=whole.seqlen_k,
        band=window,
        full=full,
    )


@untraced
def bigbird(
    seqlen_q: int,
    seqlen_k: int,
    block_size: BlockSize = 128,
    *,
    window_blocks: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    num_heads: int = 1,
    seed: int = 0,
    band: Band | None = None,
) -> BlockMask:
    """BigBird's window, global and random blocks (arXiv 2007.14062, section 2 and appendix D).

    A query block visits the ``window_blocks`` (odd) around its own, half on either side, the first
    ``global_blocks``, which in turn visit all, and ``random_blocks`` others, drawn for each of
    ``num_heads`` anew from those that the band shows. The defaults are the paper's. The same
    ``seed`` gives the same layout.
    """
    window = amount("window_blocks", window_blocks, 1)
    if window % 2 == 0:
        raise InvalidArgument(f"window_blocks: {window}; an odd number")
    count = amount("global_blocks", global_blocks)
    picked = amount("random_blocks", random_blocks)
    heads = range(amount("num_heads", num_heads, 1) if picked else 1)
    seed = integer("seed", seed, 0)
    keys, block_k = length("seqlen_k", seqlen_k), check_block_size(block_size)[1]

    def pattern(own: NDArray[np.int64], key: NDArray[np.int64]) -> Bools:
        chosen = (np.abs(own - key) <= window // 2) | _global(own, key, count)
        visible = band_or_all(band).blocks(keys, keys, (block_k, block_k))[0]
        picks = (_pick(visible & ~chosen, picked, (seed, head)) for head in heads)
        return np.stack([chosen | pick for pick in picks])

    return _along_diagonal(pattern, seqlen_q, seqlen_k, block_size, band)


@untraced
def random(
    seqlen_q: int,
    seqlen_k: int,
    block_size: BlockSize = 128,
    *,
    density: float,
    num_heads: int = 1,
    seed: int = 0,
    band: Band | None = None,
) -> BlockMask:
    """Blocks drawn at random, for each of ``num_heads`` anew; for tests and measurements.

    Visits the nearest whole number to ``density`` (0 to 1) times the blocks that the band shows
    (all of them without one). The blocks on the diagonal are among them and stay even if they are
    more, so that no query is left without keys.
    """
    allowed = "a number from 0 to 1"
    share = real("density", density, allowed=allowed)
    if not 0 <= share <= 1:
        raise InvalidArgument(f"density: {shown(density)}; {allowed}")
    heads = range(amount("num_heads", num_heads, 1))
    seed = integer("seed", seed, 0)

    diagonal = _along_diagonal(np.equal, seqlen_q, seqlen_k, block_size, band)
    kept = diagonal.to_dense(block_level=True)[0, 0]
    seqlen_q, seqlen_k = diagonal.seqlen_q, diagonal.seqlen_k
    visible = band_or_all(band).blocks(seqlen_q, seqlen_k, diagonal.block_size)[0]
    shows, keeps = int(np.count_nonzero(visible)), int(np.count_nonzero(kept))
    count = max(round(share * shows) - keeps, 0)
    candidates = (visible & ~kept).reshape(1, -1)
    picks = (_pick(candidates, count, (seed, head)) for head in heads)
    blocks = np.stack([kept | pick.reshape(kept.shape) for pick in picks])
    return BlockMask.from_dense(
        blocks, diagonal.block_size, seqlen_q=seqlen_q, seqlen_k=seqlen_k, band=band
    )


@untraced
def stack_heads(masks: Iterable[BlockMask]) -> BlockMask:
    """One mask whose heads are those of ``masks`` in turn: another layout for every head.

    All must have the same lengths and block size, a batch that is equal or 1, and, where they have
    partial blocks, the same band.
    """
    given = masks
    try:
        iter(masks)
    except TypeError:  # of an array without dimensions too, which has an __iter__
        masks = ()
    masks = tuple(masks)
    if not masks or not all(isinstance(mask, BlockMask) for mask in masks):
        raise InvalidArgument(f"masks: {shown(masks or given)}; one or more BlockMasks")
    first = masks[0]
    for mask in masks:
        for name in ("seqlen_q", "seqlen_k", "block_size"):
            if getattr(mask, name) != getattr(first, name):
                each = [getattr(mask, name) for mask in masks]
                raise InvalidArgument(f"masks: {name} {shown(each)}; one {name} for all")
    bands = {mask.band for mask in masks} - {None}
    if len(bands) > 1:
        each = sorted(map(str, bands))
        raise Unsupported(f"masks: {len(bands)} bands, {shown(each)}; one band for all heads")
    batches = sorted({mask.batch for mask in masks} - {1})
    if len(batches) > 1:
        raise InvalidArgument(f"masks: batch {shown(batches)}; one batch for all, or 1")
    batch = batches[0] if batches else 1

    matrices = [mask.block_matrices() for mask in masks]
    partial, full = (
        np.concatenate([np.broadcast_to(m, (batch, *m.shape[1:])) for m in kind], axis=1)
        for kind in zip(*matrices, strict=True)
    )
    return BlockMask.from_dense(
        partial,
        first.block_size,
        seqlen_q=first.seqlen_q,
        seqlen_k=first.seqlen_k,
        band=next(iter(bands), None),
        full=full,
    )


@untraced
def from_matrix(
    matrix: ArrayLike, block_size: BlockSize = 128, *, band: Band | None = None
) -> BlockMask:
    """From the matrix of single elements that are visible; ``to_dense()`` gives it back.

    ``matrix`` is bool (seqlen_q, seqlen_k), (num_heads, seqlen_q, seqlen_k) or (batch, num_heads,
    seqlen_q, seqlen_k). Each of its blocks must be all False (skipped), all True (full), or equal
    to the band there (partial). Raises Unsupported with the first block that is none of these.
    """
    block_q, block_k = check_block_size(block_size)
    band_or_all(band)  # raises for what is no band
    visible = as_blocks("matrix", matrix)
    seqlen_q, seqlen_k = visible.shape[2:]

    def over_blocks(reduce: np.ufunc, elements: Bools) -> Bools:
        by_row = reduce.reduceat(elements, np.arange(0, seqlen_q, block_q), axis=2)
        whole: Bools = reduce.reduceat(by_row, np.arange(0, seqlen_k, block_k), axis=3)
        return whole

    some = over_blocks(np.logical_or, visible)
    full = over_blocks(np.logical_and, visible)
    mixed = some & ~full
    if mixed.any():
        odd = mixed
        if band is not None:
            odd = mixed & over_blocks(np.logical_or, visible != band.to_dense(seqlen_q, seqlen_k))
        if odd.any():
            batch, head, row, col = (int(index[0]) for index in np.nonzero(odd))
            uniform = "one value throughout" + (f", or that of {band}" if band else "")
            uniform += ", or BlockMask.from_dense(blocks, block_size) with a bool bias"
            raise Unsupported(
                f"matrix: block ({row}, {col}) of batch {batch}, head {head} is mixed; {uniform}"
            )
    return BlockMask.from_dense(
        mixed, (block_q, block_k), seqlen_q=seqlen_q, seqlen_k=seqlen_k, band=band, full=full
    )


def _everywhere(
    seqlen_q: int, seqlen_k: int, block_size: BlockSize, band: Band | None
) -> BlockMask:
    (seqlen_q, seqlen_k), grid, size = _grid(seqlen_q, seqlen_k, block_size)
    blocks = np.ones(grid, bool)
    return BlockMask.from_dense(blocks, size, seqlen_q=seqlen_q, seqlen_k=seqlen_k, band=band)


def _along_diagonal(
    pattern: Pattern,
    seqlen_q: int,
    seqlen_k: int,
    block_size: BlockSize,
    band: Band | None,
) -> BlockMask:
    """The mask whose query blocks follow ``pattern`` at each key block that they stand in."""
    (seqlen_q, seqlen_k), (_, cols), (block_q, block_k) = _grid(seqlen_q, seqlen_k, block_size)
    blocks = np.arange(cols)
    square = pattern(blocks[:, None], blocks)
    at = band_or_all(band).shift(seqlen_q, seqlen_k)
    first, last = (
        np.clip((query + at) // block_k, 0, cols - 1) for query in block_bounds(seqlen_q, block_q)
    )
    listed = square[..., first, :]
    for step in range(1, int((last - first).max()) + 1):
        listed |= square[..., np.minimum(first + step, last), :]
    return BlockMask.from_dense(
        listed, (block_q, block_k), seqlen_q=seqlen_q, seqlen_k=seqlen_k, band=band
    )


def _grid(
    seqlen_q: int, seqlen_k: int, block_size: BlockSize
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(seqlen_q, seqlen_k), (block rows, block columns), (block_q, block_k)."""
    block_q, block_k = check_block_size(block_size)
    queries, keys = lengths(seqlen_q, seqlen_k, 1)
    return (queries, keys), (-(-queries // block_q), -(-keys // block_k)), (block_q, block_k)


def _global(own: NDArray[np.int64], key: NDArray[np.int64], count: int) -> Bools:
    """The first ``count`` blocks, as queries and as keys."""
    return (own < count) | (key < count)


def _pick(candidates: Bools, count: int, seed: tuple[int, int]) -> Bools:
    """``count`` random candidates (lines, n) in every line, all of them where there are fewer."""
    count = min(count, candidates.shape[1])
    picked = np.zeros(candidates.shape, bool)
    if count > 0:
        draw = np.random.default_rng(seed).random(candidates.shape, np.float32)
        draw[~candidates] = 1.0  # behind all candidates, which are below 1
        nearest = np.argpartition(draw, count - 1, axis=1)[:, :count]
        np.put_along_axis(picked, nearest, True, axis=1)
    return picked & candidates
