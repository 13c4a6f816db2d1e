"""Reads a BlockMask of FlexAttention: its lists, and what its mask_mod shows of partial blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import _block_lists as lists
from ._bands import Band, band_or_all
from ._block_lists import NO_BLOCK, Bools
from ._errors import InvalidArgument, Unsupported, shown

if TYPE_CHECKING:
    from ._mask_mod import MaskMod

Counts: TypeAlias = tuple[int | None, int | None]  # sequences, query heads
Pair: TypeAlias = tuple[int, int]
Blocks: TypeAlias = NDArray[np.int64]  # (4, blocks): batch, head, block row, block column

ELEMENTS = 1 << 22  # that are looked at together
# What a layout and a band cannot say.
BESIDE = "BlockMask.from_dense(blocks, block_size) with a bool bias"


def read(
    block_mask: Any, band: Band | None, counts: Counts
) -> tuple[Bools, Bools, Pair, int, int, Band | None]:
    """What ``BlockMask.from_flex`` is to be built of: the arguments of ``BlockMask._build``."""
    band_or_all(band)
    block_size = lists.check_block_size(_field(block_mask, "BLOCK_SIZE"))
    seqlens = _seqlens(block_mask)
    partial, full = _matrices(block_mask, -(-seqlens[1] // block_size[1]))
    lists.check_length("seq_lengths[0]", seqlens[0], partial.shape[2], block_size[0])
    for axis, name in enumerate(("batch", "num_heads")):
        if counts[axis] is not None and partial.shape[axis] not in (1, counts[axis]):
            allowed = f"{partial.shape[axis]}, as many layouts block_mask has, or None"
            raise InvalidArgument(f"{name}: {counts[axis]}; {allowed}")
    mask_mod = getattr(block_mask, "mask_mod", None)
    if mask_mod is None:
        if band is None and partial.any():
            raise InvalidArgument(
                f"band: None; the Band that mask_mod stands for, as "
                f"{np.count_nonzero(partial)} blocks of block_mask are partial"
            )
    else:
        from ._mask_mod import MaskMod

        mod = MaskMod(mask_mod, getattr(block_mask.kv_indices, "device", "cpu"))
        partial = _for_each(mod, partial, block_size, seqlens, counts)
        try:
            partial, always, band = _visible(mod, partial, block_size, seqlens, band)
        except Unsupported:
            if two := _two_bands(mod, partial, block_size, seqlens):
                allowed = f"one band for all, or {BESIDE}"
                raise Unsupported(f"mask_mod: {two} need different bands; {allowed}") from None
            raise
        full = full | always
    return partial, full, block_size, *seqlens, band


# ---- the lists


def _field(block_mask: Any, name: str) -> Any:
    try:
        return getattr(block_mask, name)
    except Exception:  # of the caller's type
        allowed = f"a BlockMask of FlexAttention, with {name}"
        raise InvalidArgument(f"block_mask: {shown(block_mask)}; {allowed}") from None


def _seqlens(block_mask: Any) -> Pair:
    lengths = _field(block_mask, "seq_lengths")
    try:
        seqlen_q, seqlen_k = lengths
    except (TypeError, ValueError):
        raise InvalidArgument(f"seq_lengths: {shown(lengths)}; (seqlen_q, seqlen_k)") from None
    return lists.length("seq_lengths", seqlen_q), lists.length("seq_lengths", seqlen_k)


def _matrices(block_mask: Any, cols: int) -> tuple[Bools, Bools]:
    """(partial, full), both bool (batch | 1, num_heads | 1, rows, cols); full may be all ones."""
    partial = _matrix(block_mask, "kv", cols)
    if _field(block_mask, "full_kv_num_blocks") is None:
        return partial, NO_BLOCK
    full = _matrix(block_mask, "full_kv", cols)
    if not lists.fits(full.shape, partial.shape):
        raise InvalidArgument(
            f"full_kv_num_blocks: shape {full.shape[:3]}; that of kv_num_blocks, "
            f"{partial.shape[:3]}, up to a batch or num_heads of 1"
        )
    if (partial & full).any():
        raise InvalidArgument(
            "full_kv_indices: a block that kv_indices lists as well; each block once"
        )
    return partial, full


def _matrix(block_mask: Any, kind: str, cols: int) -> Bools:
    """FlexAttention's padded lists to a matrix: the first num_blocks indices of a row count."""
    count = _listed(block_mask, f"{kind}_num_blocks")  # (batch, num_heads, rows)
    indices = _listed(block_mask, f"{kind}_indices")  # (batch, num_heads, rows, width)
    if count.ndim != 3 or indices.shape[:-1] != count.shape:
        raise InvalidArgument(
            f"{kind}_indices: shape {indices.shape}; that of {kind}_num_blocks, {count.shape} "
            "(batch, num_heads, rows), and one dimension more"
        )
    width = indices.shape[3]
    if 0 in count.shape:
        allowed = "(batch, num_heads, rows), none of them 0"
        raise InvalidArgument(f"{kind}_num_blocks: shape {count.shape}; {allowed}")
    if not 0 <= count.min() <= count.max() <= width:
        allowed = f"0 to {width}, the width of {kind}_indices"
        raise InvalidArgument(f"{kind}_num_blocks: {count.min()} to {count.max()}; {allowed}")
    line = np.nonzero(np.arange(width) < count[..., None])
    listed = indices[line]
    if listed.size and not 0 <= listed.min() <= listed.max() < cols:
        raise InvalidArgument(f"{kind}_indices: {listed.min()} to {listed.max()}; 0 to {cols - 1}")
    blocks = np.zeros((*count.shape, cols), bool)
    batch, head, row, _ = line
    blocks[batch, head, row, listed] = True
    if np.count_nonzero(blocks) < listed.size:
        raise InvalidArgument(f"{kind}_indices: a block is listed twice; each block once")
    return blocks


def _listed(block_mask: Any, name: str) -> NDArray[np.int64]:
    value = _field(block_mask, name)
    return lists.as_integers(name, value.cpu() if hasattr(value, "cpu") else value)


# ---- what mask_mod shows


def _for_each(
    mod: MaskMod, partial: Bools, block_size: Pair, seqlens: Pair, counts: Counts
) -> Bools:
    """``partial`` with a layout for each sequence or head that mask_mod may tell apart.

    FlexAttention asks for each in partial blocks alone where it is compiled, and in all blocks
    where it is not. So what mask_mod shows of the other blocks must be the same for all.
    """
    told_apart = [False, False]
    for axis, name in enumerate(("batch", "num_heads")):
        count = counts[axis]
        if partial.shape[axis] != 1 or count == 1 or not mod.reads(axis):
            continue
        if count is None:
            allowed = f"how many there are, as mask_mod reads {'bh'[axis]}"
            raise InvalidArgument(f"{name}: None with one layout for all; {allowed}")
        partial = partial.repeat(count, axis)
        told_apart[axis] = True
    if not any(told_apart):
        return partial
    for look in _looks(mod, ~partial, block_size, seqlens):
        first = look.blocks * ~np.array([*told_apart, False, False])[:, None]
        of_first = _look(mod, first, block_size, seqlens)
        if at := _first(look.seen != of_first.seen):
            raise Unsupported(
                f"mask_mod: not the same for all at {look.name(at, block_size)}, of a block that "
                "is full or skipped for all; a BlockMask with a layout for each"
            )
    return partial


class _Look(NamedTuple):
    """Some blocks and their elements, each (blocks, block_q, block_k)."""

    blocks: Blocks
    seen: Bools  # by mask_mod
    exists: Bools  # and are not cut off at a sequence's end
    distance: NDArray[np.int64]  # key j - query i

    def name(self, at: tuple[int, int, int], block_size: Pair) -> str:
        """Element (block, row, column) in words, as a place in the whole matrix."""
        n, i, j = at
        batch, head, row, col = (int(x) for x in self.blocks[:, n])
        text = f"query {row * block_size[0] + i}, key {col * block_size[1] + j}"
        return text + (f" of batch {batch}, head {head}" if batch or head else "")


def _first(wrong: Bools) -> tuple[int, int, int] | None:
    """The place of the first True of (blocks, block_q, block_k)."""
    found = np.unravel_index(wrong.argmax(), wrong.shape)
    return tuple(map(int, found)) if wrong[found] else None  # type: ignore[return-value]


def _looks(mod: MaskMod, wanted: Bools, block_size: Pair, seqlens: Pair) -> Iterator[_Look]:
    """All ``wanted`` blocks (batch, heads, rows, cols), few enough at a time to bound memory."""
    blocks = np.array(np.nonzero(wanted))
    at_once = max(ELEMENTS // (block_size[0] * block_size[1]), 1)
    for begin in range(0, blocks.shape[1], at_once):
        yield _look(mod, blocks[:, begin : begin + at_once], block_size, seqlens)


def _look(mod: MaskMod, blocks: Blocks, block_size: Pair, seqlens: Pair) -> _Look:
    """mask_mod is never asked for an element that does not exist: what it reads may end there."""
    batch, head, row, col = blocks
    i = row[:, None] * block_size[0] + np.arange(block_size[0])
    j = col[:, None] * block_size[1] + np.arange(block_size[1])
    exists = (i < seqlens[0])[:, :, None] & (j < seqlens[1])[:, None, :]
    places = (batch, head, np.minimum(i, seqlens[0] - 1), np.minimum(j, seqlens[1] - 1))
    return _Look(blocks, mod.shows(places) & exists, exists, j[:, None, :] - i[:, :, None])


def _visible(
    mod: MaskMod, partial: Bools, block_size: Pair, seqlens: Pair, band: Band | None
) -> tuple[Bools, Bools, Band | None]:
    """(partial, full, band): what mask_mod shows of partial blocks, as blocks and a band."""
    look_at: Callable[[Bools], Iterable[_Look]] = functools.partial(
        _looks, mod, block_size=block_size, seqlens=seqlens
    )
    mixed, always = np.zeros_like(partial), np.zeros_like(partial)
    visible: list[int] = []  # the least and greatest distances of mixed blocks
    all_: list[int] = []
    for look in look_at(partial):
        whole = (look.seen | ~look.exists).all((1, 2))
        is_mixed = look.seen.any((1, 2)) & ~whole
        always[tuple(look.blocks)], mixed[tuple(look.blocks)] = whole, is_mixed
        if is_mixed.any():
            distance = look.distance[is_mixed]
            visible += _ends(distance[look.seen[is_mixed]])
            all_ += _ends(distance[look.exists[is_mixed]])
    if not mixed.any():
        return mixed, always, None
    # If any band shows this, so does the one from the least to the greatest visible distance.
    low, high = min(visible), max(visible)
    found = Band(-low if min(all_) < low else None, high if max(all_) > high else None, "top_left")
    for look in look_at(mixed):
        _check_band(look, found if band is None else band, block_size, seqlens, band is not None)
    return mixed, always, found if band is None else band


def _two_bands(mod: MaskMod, partial: Bools, block_size: Pair, seqlens: Pair) -> str:
    """Two layouts in words that have a band each and none together, or "": then one has none."""

    def has_band(*places: Pair) -> bool:
        some = np.zeros_like(partial)
        for place in places:
            some[place] = partial[place]
        try:
            _visible(mod, some, block_size, seqlens, None)
        except Unsupported:
            return False
        return True

    first, *others = np.ndindex(partial.shape[:2])
    if not others or not all(map(has_band, (first, *others))):
        return ""
    for other in others:
        if not has_band(first, other):
            if other[0] == 0:
                return f"heads 0 and {other[1]}"
            return f"sequences 0 and {other[0]}"
    return ""


def _ends(distance: NDArray[np.int64]) -> tuple[int, int]:
    return int(distance.min()), int(distance.max())


def _check_band(look: _Look, band: Band, block_size: Pair, seqlens: Pair, given: bool) -> None:
    """Raises Error unless ``band``, found or ``given``, shows what mask_mod does."""
    first, last = (limit + band.shift(*seqlens) for limit in band._limits)
    wrong = ((first <= look.distance) & (look.distance <= last) & look.exists) != look.seen
    at = _first(wrong)
    if at is None:
        return
    sees = f"{'shows' if look.seen[at] else 'hides'} {look.name(at, block_size)}"
    if given:
        raise InvalidArgument(f"band: {band}; what mask_mod shows: it {sees}")
    allowed = f"one that is a band inside of each partial block, or {BESIDE}"
    raise Unsupported(f"mask_mod: it {sees}, which no band does; {allowed}")
