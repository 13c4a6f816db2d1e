"""Which keys a query sees: ``Dense``, ``Band`` (causal, sliding window) and ``BlockMask``.

A mask is an immutable description, independent of any array or framework. Query i of ``seqlen_q``
and key j of ``seqlen_k`` are element (i, j). ``to_dense()`` is each mask's definition.

Block lists follow FlashAttention's block-sparse section (arXiv 2205.14135, section 3.3): blocks
that are not listed are skipped, so time and traffic fall with ``density``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from . import _block_lists as lists
from . import _flex
from ._bands import Band, Causal, Dense, SlidingWindow, band_or_all
from ._block_lists import LISTS, NO_BLOCK, BlockSize, Bools, Csr, Int32s
from ._errors import InvalidArgument, integer, shown, truth
from ._untraced import untraced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Band", "BlockMask", "Causal", "Csr", "Dense", "Mask", "SlidingWindow"]

# Where users have them from: pickles and error messages say so.
for _kind in (Band, Causal, Dense, SlidingWindow):
    _kind.__module__ = __name__


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """The scores in blocks of block_q x block_k, of which only the listed ones are visited.

    Block (r, c) holds queries [r * block_q, (r + 1) * block_q) and keys [c * block_k, (c + 1) *
    block_k), cut at the sequence ends. A full block is visible throughout, a partial one where
    ``band`` allows, any other nowhere. Rows list block columns and serve the forward and dq;
    columns, the transpose, list block rows and serve dk and dv. A block is in one list at most,
    and ``band`` is None exactly if no block is partial.

    Build one with ``from_dense``, ``from_csr``, ``from_flex`` or ``flashsdk.layouts``, which check
    their input; the constructor takes the finished lists as they are. Masks are immutable, equal
    if their fields are (columns follow from rows), hashable, and can be pickled. A function under
    torch.compile takes them as arguments or from around it; to make one inside breaks the graph.
    """

    block_size: tuple[int, int]  # queries, keys; multiples of 16
    seqlen_q: int
    seqlen_k: int
    band: Band | None
    row_partial: Csr
    row_full: Csr
    col_partial: Csr
    col_full: Csr
    _flat: Int32s = field(init=False)  # offsets and indices of the four lists, one after another
    _sizes: tuple[int, ...] = field(init=False)  # of each: batch, num_heads, lines + 1, blocks

    @untraced
    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", lists.check_block_size(self.block_size))
        for name in ("seqlen_q", "seqlen_k"):
            object.__setattr__(self, name, lists.length(name, getattr(self, name)))
        band_or_all(self.band)
        given = [array for name in LISTS for array in lists.as_csr(name, getattr(self, name))]
        # The lists are views of one array: to move a mask to a device is to move that. It stays
        # writable, as torch warns of what is not, and nobody has it but the adapter.
        flat = np.concatenate([array.reshape(-1) for array in given])
        object.__setattr__(self, "_flat", flat)
        views, begin = [], 0
        for array in given:
            view = flat[begin : begin + array.size].reshape(array.shape)
            view.setflags(write=False)
            views.append(view)
            begin += array.size
        for name, offsets, indices in zip(LISTS, views[::2], views[1::2], strict=True):
            object.__setattr__(self, name, Csr(offsets, indices))
        sizes = [n for array in given for n in array.shape]
        object.__setattr__(self, "_sizes", tuple(sizes))

    # ---- construction

    @classmethod
    @untraced
    def from_dense(
        cls,
        blocks: ArrayLike,
        block_size: BlockSize,
        *,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        band: Band | None = None,
        full: ArrayLike | None = None,
    ) -> BlockMask:
        """From a boolean matrix with one entry per block.

        blocks
            bool (rows, cols), (num_heads, rows, cols) or (batch, num_heads, rows, cols), batch and
            num_heads each 1 to share the layout: True where the block is visited.
        block_size
            Queries and keys of a block, (block_q, block_k) or one number; multiples of 16.
        seqlen_q, seqlen_k
            In tokens; default rows * block_q and cols * block_k. The last blocks may be cut.
        band
            What is visible inside the blocks. Blocks wholly inside it become full, blocks wholly
            outside are dropped, the rest are partial, as seqlen_q and seqlen_k tell: for packed
            sequences, of which some may have another seqlen_k - seqlen_q, take
            ``alignment="top_left"``. None: all blocks are full.
        full
            As ``blocks``: more blocks to visit, visible throughout whatever the band says (a
            prefix that all see under a causal band, say).

        Raises Error if an argument has the wrong type or shape.
        """
        block_q, block_k = lists.check_block_size(block_size)
        listed = lists.as_blocks("blocks", blocks)
        always = NO_BLOCK if full is None else lists.as_blocks("full", full)
        rows, cols = listed.shape[2:]
        if full is not None and not lists.fits(always.shape, listed.shape):
            raise InvalidArgument(
                f"full: shape {np.shape(full)}; that of blocks, {np.shape(blocks)}, "
                "up to a batch or num_heads of 1"
            )
        return cls._build(
            listed,
            always,
            (block_q, block_k),
            lists.check_length("seqlen_q", seqlen_q, rows, block_q),
            lists.check_length("seqlen_k", seqlen_k, cols, block_k),
            band,
        )

    @classmethod
    @untraced
    def from_csr(
        cls,
        offsets: ArrayLike,
        indices: ArrayLike,
        block_size: BlockSize,
        *,
        seqlen_k: int,
        seqlen_q: int | None = None,
        band: Band | None = None,
    ) -> BlockMask:
        """From the lists of the visited block columns of each block row.

        offsets
            int (rows + 1,), (num_heads, rows + 1) or (batch, num_heads, rows + 1), absolute in
            ``indices``: the first is 0, the last len(indices), and a head begins where the one
            before it ends.
        indices
            int (blocks,), in any order inside a row, each block once.
        seqlen_k, seqlen_q
            In tokens. seqlen_q defaults to rows * block_q.
        block_size, band
            As in ``from_dense``.

        Raises Error if an argument has the wrong type or shape, or a block does not exist.
        """
        block_q, block_k = lists.check_block_size(block_size)
        seqlen_k = lists.length("seqlen_k", seqlen_k)
        cols = -(-seqlen_k // block_k)
        blocks = lists.from_csr(lists.check_csr(offsets, indices, cols), cols)
        seqlen_q = lists.check_length("seqlen_q", seqlen_q, blocks.shape[2], block_q)
        return cls._build(blocks, NO_BLOCK, (block_q, block_k), seqlen_q, seqlen_k, band)

    @classmethod
    @untraced
    def from_flex(
        cls,
        block_mask: Any,
        *,
        band: Band | None = None,
        batch: int | None = None,
        num_heads: int | None = None,
    ) -> BlockMask:
        """From ``torch.nn.attention.flex_attention.BlockMask``, or what has the same fields.

        Reads BLOCK_SIZE, seq_lengths, kv_num_blocks, kv_indices and, where they are not None,
        full_kv_num_blocks and full_kv_indices. Full blocks stay full. Of partial blocks
        ``mask_mod`` is asked for every element: those that it shows as a whole become full, those
        that it hides are dropped, and what the others show must be one band, which is found.
        Costs time in proportion to the elements of partial blocks, and no matrix of all.

        band
            What mask_mod stands for, where you know it: an Error if it shows anything else.
            Where block_mask has no mask_mod, as its like may not, this is what partial blocks show.
        batch, num_heads
            Sequences and query heads of the calls to come. Needed where block_mask has one layout
            for all of them (its B or H is 1 or None) and mask_mod reads b or h. It is then asked
            for each, of all blocks, and the mask has a layout for each.

        Raises Unsupported if no band shows what mask_mod does, or if it tells sequences or heads
        apart where one layout says that a block is full or skipped for all. Raises Error if there
        are partial blocks with neither a band nor a mask_mod, if a field does not fit, or if batch
        or num_heads is needed or not that of block_mask.
        """
        counts = (
            None if batch is None else lists.amount("batch", batch, 1),
            None if num_heads is None else lists.amount("num_heads", num_heads, 1),
        )
        return cls._build(*_flex.read(block_mask, band, counts))

    @classmethod
    def _build(
        cls,
        listed: Bools,  # (batch | 1, num_heads | 1, rows, cols), visible where band allows
        full: Bools,  # the same or all ones, visible throughout
        block_size: tuple[int, int],
        seqlen_q: int,
        seqlen_k: int,
        band: Band | None,
    ) -> BlockMask:
        touched, inside = band_or_all(band).blocks(seqlen_q, seqlen_k, block_size)
        full = full | (listed & inside)
        partial = listed & touched & ~full
        return cls(
            block_size=block_size,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            band=band if partial.any() else None,
            row_partial=lists.to_csr(partial),
            row_full=lists.to_csr(full),
            col_partial=lists.to_csr(partial.swapaxes(2, 3)),
            col_full=lists.to_csr(full.swapaxes(2, 3)),
        )

    # ---- what it is

    @property
    def batch(self) -> int:
        """Layouts along the batch; 1 is shared by all."""
        return int(self.row_full.offsets.shape[0])

    @property
    def num_heads(self) -> int:
        """Layouts along the query heads; 1 is shared by all."""
        return int(self.row_full.offsets.shape[1])

    @cached_property
    def density(self) -> float:
        """Visited blocks / all blocks, the mean over batch and heads: what time falls with.

        Of elements ``visible_share`` tells, as of every mask.
        """
        rows, cols = self.row_full.offsets.shape[2] - 1, self.col_full.offsets.shape[2] - 1
        visited = self.row_full.indices.size + self.row_partial.indices.size
        return float(visited / (self.batch * self.num_heads * rows * cols))

    @untraced
    def visible_share(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> float:
        """Visible elements / all elements, the mean over batch and heads. Makes no element matrix.

        The lengths are those of the mask; they may be given, as to masks without any.
        """
        self._check_lengths(seqlen_q, seqlen_k)
        partial, full = self.block_matrices()
        seqlens = (self.seqlen_q, self.seqlen_k)
        (first_q, last_q), (first_k, last_k) = (
            lists.block_bounds(n, size) for n, size in zip(seqlens, self.block_size)
        )
        queries, keys = last_q - first_q + 1, last_k - first_k + 1
        visible = int((full * (queries[:, None] * keys)).sum())
        # A band shows the same of all blocks of one size that lie alike to its diagonal.
        _, _, row, col = np.nonzero(partial)
        at = first_k[col] - first_q[row]
        alike, times = np.unique(
            np.stack([at, queries[row], keys[col]]), axis=1, return_counts=True
        )
        low, high = band_or_all(self.band)._limits
        shift = band_or_all(self.band).shift(*seqlens)
        for (distance, rows, cols), count in zip(alike.T, times):
            # Key 0 of the block for each of its queries, from the diagonal.
            begin = distance - shift - np.arange(rows)
            shown = np.minimum(high - begin + 1, cols) - np.maximum(low - begin, 0)
            visible += int(np.maximum(shown, 0).sum()) * int(count)
        return visible / (self.batch * self.num_heads * self.seqlen_q * self.seqlen_k)

    @untraced
    def to_dense(
        self,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        *,
        block_level: bool = False,
    ) -> Bools:
        """The element matrix, bool (batch | 1, num_heads | 1, seqlen_q, seqlen_k).

        With ``block_level``, bool (batch | 1, num_heads | 1, rows, cols): True where a block is
        visited. The lengths are those of the mask; they may be given, as to masks without any.
        """
        self._check_lengths(seqlen_q, seqlen_k)
        partial, full = self.block_matrices()
        if truth("block_level", block_level):
            return partial | full
        row = np.arange(self.seqlen_q)[:, None] // self.block_size[0]
        col = np.arange(self.seqlen_k)[None, :] // self.block_size[1]
        visible = band_or_all(self.band).to_dense(self.seqlen_q, self.seqlen_k)
        dense: Bools = full[:, :, row, col] | (partial[:, :, row, col] & visible)
        return dense

    @untraced
    def block_matrices(self) -> tuple[Bools, Bools]:
        """(partial, full), both bool (batch | 1, num_heads | 1, rows, cols), from the row lists."""
        cols = self.col_full.offsets.shape[2] - 1
        return lists.from_csr(self.row_partial, cols), lists.from_csr(self.row_full, cols)

    def plot(
        self,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        ax: Axes | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        batch: int = 0,
        head: int | None = None,
    ) -> Figure:
        """Draws the layout: full, partial and skipped blocks, the axes in tokens.

        The lengths are those of the mask; they may be given, as to masks without any.
        A panel per head (the first 16), or ``head`` alone; on ``ax`` there is room for one head, 0
        unless told. ``path`` is where to save (.png, .svg, .pdf). Returns the figure. Raises
        Error if matplotlib is missing or there is no such batch or head.
        """
        from . import _plot

        self._check_lengths(seqlen_q, seqlen_k)
        if not 0 <= integer("batch", batch) < self.batch:
            raise InvalidArgument(f"batch: {shown(batch)}; 0 to {self.batch - 1}")
        if head is not None and not 0 <= integer("head", head) < self.num_heads:
            raise InvalidArgument(f"head: {shown(head)}; 0 to {self.num_heads - 1}")
        partial, full = self.block_matrices()
        if head is None:
            heads = range(1 if ax is not None else min(self.num_heads, 16))
        else:
            heads = range(head, head + 1)
        name = "head {}" if self.num_heads > 1 else ""
        panels = [_plot.Panel(name.format(h), partial[batch, h], full[batch, h]) for h in heads]
        return _plot.draw(panels, (self.seqlen_q, self.seqlen_k), self.block_size, ax, path)

    def _check_lengths(self, seqlen_q: int | None, seqlen_k: int | None) -> None:
        for name, given, own in (
            ("seqlen_q", seqlen_q, self.seqlen_q),
            ("seqlen_k", seqlen_k, self.seqlen_k),
        ):
            if given is not None and integer(name, given) != own:
                raise InvalidArgument(
                    f"{name}: {shown(given)}; {own}, which the mask was made for, or None"
                )

    # ---- identity

    @cached_property
    def _arrays(self) -> tuple[Int32s, ...]:
        """The eight arrays as the bindings take them, offsets then indices of row_partial,
        row_full, col_partial and col_full: contiguous int32, so that a call converts nothing."""
        return (*self.row_partial, *self.row_full, *self.col_partial, *self.col_full)

    @property
    def _shape(self) -> tuple[tuple[int, int], int, int, Band | None]:
        return self.block_size, self.seqlen_q, self.seqlen_k, self.band

    @cached_property
    def _hash(self) -> int:
        return hash((self._shape, *(array.tobytes() for array in self._arrays[:4])))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self is other:
            return True
        # The columns are the rows transposed: comparing rows is enough.
        return self._shape == other._shape and all(
            map(np.array_equal, self._arrays[:4], other._arrays[:4])
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, as NumPy forgets that an array was read-only.
        csrs = (self.row_partial, self.row_full, self.col_partial, self.col_full)
        return BlockMask, (*self._shape, *csrs)

    def __repr__(self) -> str:
        return (
            f"BlockMask(seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}, "
            f"block_size={self.block_size}, batch={self.batch}, num_heads={self.num_heads}, "
            f"density={self.density:.4g}, band={self.band})"
        )


Mask: TypeAlias = Dense | Band | BlockMask
