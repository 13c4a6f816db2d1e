"""Which keys a query sees: ``Dense``, ``Band`` (causal, sliding window) and ``BlockMask``.

A mask is an immutable description, independent of any array or framework. Query i of ``seqlen_q``
and key j of ``seqlen_k`` are element (i, j). ``to_dense()`` is each mask's definition.

Block lists follow FlashAttention's block-sparse section (arXiv 2205.14135, section 3.3): blocks
that are not listed are skipped, so time and traffic fall with ``density``.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

import numpy as np
from numpy.typing import ArrayLike

from . import _block_lists as lists
from ._block_lists import INT32_MAX, LISTS, BlockSize, Bools, Csr, Int32s
from ._errors import Error, InvalidArgument, Unsupported, integer, shown, truth
from ._untraced import untraced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Band", "BlockMask", "Causal", "Csr", "Dense", "Mask", "SlidingWindow"]

Alignment: TypeAlias = Literal["bottom_right", "top_left"]

_NONE = np.zeros((1, 1, 1, 1), bool)  # no block, of any layout


@dataclass(frozen=True, slots=True)
class Dense:
    """Every query sees every key."""

    def to_dense(self, seqlen_q: int, seqlen_k: int) -> Bools:
        """The element matrix, bool (seqlen_q, seqlen_k), all True."""
        return Band().to_dense(seqlen_q, seqlen_k)

    def visible_share(self, seqlen_q: int, seqlen_k: int) -> float:
        """Visible elements / all elements: 1.0, or 0.0 where there are none."""
        return Band().visible_share(seqlen_q, seqlen_k)

    def density(self, seqlen_q: int, seqlen_k: int) -> float:
        """The old name of ``visible_share``, until 0.3."""
        _density_warning()
        return self.visible_share(seqlen_q, seqlen_k)

    def plot(
        self,
        seqlen_q: int,
        seqlen_k: int,
        ax: Axes | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Figure:
        """Draws the mask; as ``Band.plot``."""
        return Band().plot(seqlen_q, seqlen_k, ax, path)


@dataclass(frozen=True, slots=True)
class Band:
    """Query i sees key j iff ``-left <= j - (i + shift) <= right``.

    left, right
        Keys before and after the diagonal, in tokens; None is unlimited, and -1 is not. Any integer
        is allowed, negative ones too: ``Band(left=None, right=-1)`` is causal without the diagonal.
    alignment
        Where the diagonal lies when seqlen_q != seqlen_k: "bottom_right" (shift = seqlen_k -
        seqlen_q, the last query stands at the last key) or "top_left" (shift = 0).

    A limit of 2^31 - 1 or more is the same as None and becomes it; fields always fit an int32.
    Raises Error for anything but None and integers, and for another alignment.
    """

    left: int | None = None
    right: int | None = None
    alignment: Alignment = "bottom_right"

    def __post_init__(self) -> None:
        for name, given in (("left", self.left), ("right", self.right)):
            # Most calls make a mask anew, so the common case stops here.
            if given is None or (type(given) is int and abs(given) < INT32_MAX):
                continue
            limit = max(integer(name, given, allowed="None or an integer"), -INT32_MAX)
            object.__setattr__(self, name, limit if limit < INT32_MAX else None)
        if not isinstance(self.alignment, str) or self.alignment not in (
            "bottom_right",
            "top_left",
        ):
            raise InvalidArgument(
                f'alignment: {shown(self.alignment)}; "bottom_right" or "top_left"'
            )

    def shift(self, seqlen_q: int, seqlen_k: int) -> int:
        """The key at which query 0 stands. Lengths may be the compiler's: they are not checked."""
        return seqlen_k - seqlen_q if self.alignment == "bottom_right" else 0

    @untraced
    def to_dense(self, seqlen_q: int, seqlen_k: int) -> Bools:
        """The element matrix, bool (seqlen_q, seqlen_k): True where query i sees key j."""
        seqlen_q, seqlen_k = lengths(seqlen_q, seqlen_k, 0)
        query, key = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
        distance = key - (query + self.shift(seqlen_q, seqlen_k))
        visible = np.ones(distance.shape, bool)
        if self.left is not None:
            visible &= -self.left <= distance
        if self.right is not None:
            visible &= distance <= self.right
        return visible

    @untraced
    def visible_share(self, seqlen_q: int, seqlen_k: int) -> float:
        """Visible elements / all elements; 0.0 where there are none. Costs O(seqlen_q)."""
        seqlen_q, seqlen_k = lengths(seqlen_q, seqlen_k, 0)
        low, high = self._limits
        at = np.arange(seqlen_q) + self.shift(seqlen_q, seqlen_k)
        begin = np.clip(at + low, 0, seqlen_k)
        end = np.clip(at + high + 1, 0, seqlen_k)
        return float(np.maximum(end - begin, 0).sum()) / max(seqlen_q * seqlen_k, 1)

    def density(self, seqlen_q: int, seqlen_k: int) -> float:
        """The old name of ``visible_share``, until 0.3."""
        _density_warning()
        return self.visible_share(seqlen_q, seqlen_k)

    @untraced
    def blocks(
        self, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int]
    ) -> tuple[Bools, Bools]:
        """(touched, inside), both bool (block rows, block columns).

        A block is touched if the band shows any of its elements and inside if it shows all of
        them. Blocks at the ends count the elements that exist. Makes no element matrix. Block sizes
        are any integers from 1 to 2^24.
        """
        seqlen_q, seqlen_k = lengths(seqlen_q, seqlen_k, 0)
        block_size = lists.check_block_size(block_size, 1)
        first_query, last_query = lists.block_bounds(seqlen_q, block_size[0])
        first_key, last_key = lists.block_bounds(seqlen_k, block_size[1])
        at = self.shift(seqlen_q, seqlen_k)
        low, high = self._limits
        # A block holds every distance j - (i + shift) from that of its bottom-left element to that
        # of its top-right one, so the two corners tell.
        top, bottom = (query[:, None] + at for query in (first_query, last_query))
        touched = (last_key >= top + low) & (first_key <= bottom + high) & (low <= high)
        inside = (first_key >= bottom + low) & (last_key <= top + high)
        return touched, inside

    def plot(
        self,
        seqlen_q: int,
        seqlen_k: int,
        ax: Axes | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Figure:
        """Draws the mask in cells of up to 256 x 256, on ``ax`` or a new figure, and saves it.

        ``path`` is where to save (.png, .svg, .pdf). Raises Error if matplotlib is missing.
        """
        from . import _plot

        seqlen_q, seqlen_k = lengths(seqlen_q, seqlen_k, 1)
        cell = -(-max(seqlen_q, seqlen_k) // 256)
        touched, inside = self.blocks(seqlen_q, seqlen_k, (cell, cell))
        panel = _plot.Panel("", touched & ~inside, inside)
        return _plot.draw([panel], (seqlen_q, seqlen_k), (cell, cell), ax, path)

    @property
    def _limits(self) -> tuple[int, int]:
        """The least and greatest visible j - (i + shift)."""
        low = -INT32_MAX if self.left is None else -self.left
        return low, INT32_MAX if self.right is None else self.right


class _Kind:
    """Of bands: called it makes one, and ``isinstance(mask, kind)`` is whether a mask is one.

    What it makes are plain ``Band``s, so that equal masks are one to every kernel, cache and
    pickle. No class: on what the ``__new__`` of one gives, Dynamo of PyTorch 2.11 calls Band's own
    ``__init__`` without arguments, and a Causal() that was shared became Dense().
    """

    def __init__(self, make: Callable[..., Band], has: Callable[[Band], bool]) -> None:
        functools.update_wrapper(self, make)
        self._make, self._has = make, has

    def __call__(self, *args: Any, **keywords: Any) -> Band:
        return self._make(*args, **keywords)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Band) and self._has(value)

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007

    def __repr__(self) -> str:
        return f"{self.__module__}.{self.__name__}"  # type: ignore[attr-defined]

    def __reduce__(self) -> str:
        return self.__name__  # type: ignore[attr-defined,no-any-return]


_CAUSAL = Band(None, 0)

if TYPE_CHECKING:

    class Causal(Band):
        def __init__(self, alignment: Alignment = "bottom_right") -> None: ...

    class SlidingWindow(Band):
        def __init__(
            self, left: int | None, right: int | None = 0, alignment: Alignment = "bottom_right"
        ) -> None: ...

else:

    @functools.partial(_Kind, has=lambda band: band.left is None and band.right == 0)
    def Causal(alignment: Alignment = "bottom_right") -> Band:
        """Query i sees the keys up to its own place: ``Band(None, 0, alignment)``.

        FlexAttention's ``q_idx >= kv_idx`` and torch's ``is_causal`` are ``Causal("top_left")``.
        ``isinstance(mask, Causal)`` is whether a mask is a band of these limits.
        """
        # Most calls ask for it anew, and to make and check one costs a tenth of a small call.
        if isinstance(alignment, str) and alignment == "bottom_right":
            return _CAUSAL
        return Band(None, 0, alignment)

    @functools.partial(_Kind, has=lambda band: band.left is not None and band.right is not None)
    def SlidingWindow(
        left: int | None, right: int | None = 0, alignment: Alignment = "bottom_right"
    ) -> Band:
        """Query i sees ``left`` keys before its place, its own, and ``right`` after: a ``Band``.

        ``isinstance(mask, SlidingWindow)`` is whether a mask is a band with a limit on both sides.
        """
        return Band(left, right, alignment)


def _density_warning() -> None:
    old, new = "density of a mask without blocks", "visible_share"
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)


def band_or_all(band: Band | None) -> Band:
    """``band``, and for None the one that hides nothing. Raises Error for anything else."""
    if isinstance(band, Band):
        return band
    if band is None:
        return Band()
    raise InvalidArgument(f"band: {shown(band)}; a Band, Causal(), SlidingWindow() or None")


def lengths(seqlen_q: object, seqlen_k: object, minimum: int) -> tuple[int, int]:
    """Both as ints: NumPy cannot compute with all that counts as one, such as PyTorch's tensors."""
    return lists.length("seqlen_q", seqlen_q, minimum), lists.length("seqlen_k", seqlen_k, minimum)


def no_mask(mask: object) -> Error:
    """What is raised where a call's ``mask`` is none."""
    allowed = "Dense(), Causal(), SlidingWindow(), a Band, a BlockMask or None"
    if hasattr(mask, "shape"):
        allowed += "; an array is a bias, or attention's bool mask"
    return InvalidArgument(f"mask: {shown(mask)}; {allowed}")


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
        always = _NONE if full is None else lists.as_blocks("full", full)
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
        return cls._build(blocks, _NONE, (block_q, block_k), seqlen_q, seqlen_k, band)

    @classmethod
    @untraced
    def from_flex(cls, block_mask: Any, *, band: Band | None = None) -> BlockMask:
        """From ``torch.nn.attention.flex_attention.BlockMask``, or what has the same fields.

        Reads BLOCK_SIZE, seq_lengths, kv_num_blocks, kv_indices and, where they are not None,
        full_kv_num_blocks and full_kv_indices. Full blocks stay full. Of partial blocks
        ``mask_mod`` is asked for every element: those that it shows as a whole become full, those
        that it hides are dropped, and what the others show must be one band, which is found.
        Costs time in proportion to the elements of partial blocks, and no matrix of all.

        One layout may be for the whole batch, or for all heads. On a CPU mask_mod is then asked of
        sequence 1, or head 1, as well, and is Unsupported if it shows something else there. Of
        later ones, and on a GPU, it is not asked: it must show the same of all.

        band
            What mask_mod stands for, where you know it: an Error if it shows anything else.
            Where block_mask has no mask_mod, as its like may not, this is what partial blocks show.

        Raises Unsupported if no band shows what mask_mod does, and Error if there are partial
        blocks with neither a band nor a mask_mod, or if a field does not fit.
        """
        block_q, block_k = lists.check_block_size(lists.flex_field(block_mask, "BLOCK_SIZE"))
        lengths = lists.flex_field(block_mask, "seq_lengths")
        try:
            seqlen_q, seqlen_k = lengths
        except (TypeError, ValueError):
            raise InvalidArgument(f"seq_lengths: {shown(lengths)}; (seqlen_q, seqlen_k)") from None
        seqlen_q, seqlen_k = (lists.length("seq_lengths", n) for n in (seqlen_q, seqlen_k))
        cols = -(-seqlen_k // block_k)
        partial = lists.from_flex(block_mask, "kv", cols)
        has_full = lists.flex_field(block_mask, "full_kv_num_blocks") is not None
        full = lists.from_flex(block_mask, "full_kv", cols) if has_full else _NONE
        if has_full and not lists.fits(full.shape, partial.shape):
            raise InvalidArgument(
                f"full_kv_num_blocks: shape {full.shape[:3]}; that of kv_num_blocks, "
                f"{partial.shape[:3]}, up to a batch or num_heads of 1"
            )
        if (partial & full).any():
            raise InvalidArgument(
                "full_kv_indices: a block that kv_indices lists as well; each block once"
            )
        seqlen_q = lists.check_length("seq_lengths[0]", seqlen_q, partial.shape[2], block_q)
        mask_mod = getattr(block_mask, "mask_mod", None)
        if mask_mod is not None:
            band_or_all(band)
            device = getattr(block_mask.kv_indices, "device", "cpu")
            asked = mask_mod, device
            partial, always, band = _asked(
                *(asked, partial, (block_q, block_k), (seqlen_q, seqlen_k), band)
            )
            full = full | always
        elif band is None and partial.any():
            raise InvalidArgument(
                f"band: None; the Band that mask_mod stands for, as "
                f"{np.count_nonzero(partial)} blocks of block_mask are partial"
            )
        return cls._build(partial, full, (block_q, block_k), seqlen_q, seqlen_k, band)

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


def _asked(
    asked: tuple[Any, Any],  # FlexAttention's mask_mod, and the device to ask it on
    partial: Bools,  # (batch | 1, num_heads | 1, rows, cols)
    block_size: tuple[int, int],
    seqlens: tuple[int, int],
    band: Band | None,
) -> tuple[Bools, Bools, Band | None]:
    """(partial, full, band): what mask_mod shows of partial blocks, as blocks and a band."""
    from . import _flex

    blocks = np.array(np.nonzero(partial))
    shared = [axis for axis in (0, 1) if partial.shape[axis] == 1]
    mixed, always = np.zeros_like(partial), np.zeros_like(partial)

    def looks() -> Iterator[tuple[Any, Bools, Any, Bools, Any]]:
        found = _flex.visible(*asked, blocks, block_size, seqlens, shared)
        for some, seen, exists, distance in found:
            some_seen, all_seen = seen.any((1, 2)), (seen | ~exists).all((1, 2))
            is_mixed = some_seen & ~all_seen
            mixed[tuple(blocks[:, some])], always[tuple(blocks[:, some])] = is_mixed, all_seen
            yield is_mixed, seen, distance, exists, some

    # If any band shows this, so does the one from the least to the greatest visible distance.
    low, high, least, greatest = INT32_MAX, -INT32_MAX, INT32_MAX, -INT32_MAX
    for is_mixed, seen, distance, exists, _ in looks():
        if not is_mixed.any():
            continue
        shown, there = distance[is_mixed][seen[is_mixed]], distance[is_mixed][exists[is_mixed]]
        low, high = min(low, int(shown.min())), max(high, int(shown.max()))
        least, greatest = min(least, int(there.min())), max(greatest, int(there.max()))
    if not mixed.any():
        return mixed, always, None
    found = Band(-low if least < low else None, high if greatest > high else None, "top_left")
    wanted = found if band is None else band
    shift = wanted.shift(*seqlens)
    first, last = (limit + shift for limit in wanted._limits)
    for is_mixed, seen, distance, exists, some in looks():
        wrong = (((first <= distance) & (distance <= last)) & exists) != seen
        wrong &= is_mixed[:, None, None]
        if wrong.any():
            n, i, j = (int(x[0]) for x in np.nonzero(wrong))
            _, _, row, col = (int(x) for x in blocks[:, some][:, n])
            at = f"query {row * block_size[0] + i}, key {col * block_size[1] + j}"
            sees = "shows" if seen[n, i, j] else "hides"
            if band is not None:
                raise InvalidArgument(f"band: {band}; what mask_mod shows: it {sees} {at}")
            allowed = "one that is a band inside of each partial block; a bias for the others"
            raise Unsupported(f"mask_mod: it {sees} {at}, which no band does; {allowed}")
    return mixed, always, wanted


Mask: TypeAlias = Dense | Band | BlockMask
