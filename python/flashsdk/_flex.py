"""What the mask_mod of a FlexAttention BlockMask shows, block by block. Imports PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ._block_lists import Bools
from ._errors import Unsupported, first_line, type_name

ELEMENTS = 1 << 22  # that are looked at together
Blocks = NDArray[np.int64]  # (4, blocks): batch, head, block row, block column


def visible(
    mask_mod: Any,
    device: Any,
    blocks: Blocks,
    block_size: tuple[int, int],
    seqlens: tuple[int, int],
    shared: Sequence[int],
) -> Iterator[tuple[slice, Bools, Bools, Blocks]]:
    """Some of ``blocks`` at a time: which, what mask_mod shows, which elements exist, j - i.

    The three are (blocks, block_q, block_k). mask_mod is asked as FlexAttention does, for numbers
    under torch.vmap, and never for an element that does not exist. ``shared`` are 0 if one layout
    is for the whole batch and 1 if it is for all heads: what differs from one to the next is an
    Unsupported. On a GPU that is not looked at, as to read behind an array's end breaks it there.
    """
    asked = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        asked = torch.vmap(asked, in_dims=dims)
    at_once = max(ELEMENTS // (block_size[0] * block_size[1]), 1)
    for begin in range(0, blocks.shape[1], at_once):
        some = slice(begin, begin + at_once)
        b, h, row, col = blocks[:, some]
        i = row[:, None] * block_size[0] + np.arange(block_size[0])
        j = col[:, None] * block_size[1] + np.arange(block_size[1])
        exists = (i < seqlens[0])[:, :, None] & (j < seqlens[1])[:, None, :]
        places = (b, h, np.minimum(i, seqlens[0] - 1), np.minimum(j, seqlens[1] - 1))
        try:
            seen = _ask(asked, device, places) & exists
        except Exception as e:  # of the caller's function
            given = f"{type_name(e)}, {first_line(e)}"
            raise Unsupported(f"mask_mod: {given}; one that torch.vmap can ask") from e
        for axis in shared if torch.device(device).type == "cpu" else ():
            try:
                next_one = (x + 1 if n == axis else x for n, x in enumerate(places))
                other = _ask(asked, device, next_one) & exists
            except Exception:  # what it reads has one alone
                continue
            if not np.array_equal(seen, other):
                what = ("batch", "head")[axis]
                allowed = f"a BlockMask with a layout for each {what}"
                raise Unsupported(f"mask_mod: another mask for each {what}; {allowed}")
        yield some, seen, exists, j[:, None, :] - i[:, :, None]


def _ask(asked: Any, device: Any, places: Iterable[NDArray[np.int64]]) -> Bools:
    with torch.no_grad():
        shown = asked(*(torch.from_numpy(x).to(device) for x in places))
        seen: Bools = shown.to(torch.bool).cpu().numpy()
    return seen
