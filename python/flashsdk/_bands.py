"""Masks of which a rule says what a query sees: ``Dense`` and ``Band``, and the kinds of bands.

``flashsdk.masks`` has them for users.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

import numpy as np

from . import _block_lists as lists
from ._block_lists import INT32_MAX, Bools
from ._errors import Error, InvalidArgument, integer, shown
from ._untraced import untraced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Alignment: TypeAlias = Literal["bottom_right", "top_left"]


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

        None is unlimited. Raises Error where left + right < 0, as for flash-attn's (-1, -1): no key
        is seen then. ``Band`` takes these. ``isinstance(mask, SlidingWindow)`` is whether a mask is
        a band with a limit on both sides.
        """
        band = Band(left, right, alignment)
        if band.left is not None and band.right is not None and band.left + band.right < 0:
            raise InvalidArgument(
                f"left: {shown(left)}, beside right {shown(right)}; left + right >= 0, or None for "
                "no limit"
            )
        return band


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
    if hasattr(mask, "kv_num_blocks"):  # FlexAttention's
        allowed = "flashsdk.BlockMask.from_flex of it"
    elif isinstance(mask, _Kind) or (isinstance(mask, type) and issubclass(mask, (Dense, Band))):
        allowed = f"an instance, {getattr(mask, '__name__', '')}()"
    elif hasattr(mask, "shape"):
        allowed += "; an array is a bias, or attention's bool mask"
    return InvalidArgument(f"mask: {shown(mask)}; {allowed}")
