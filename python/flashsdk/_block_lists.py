"""Block layouts in their two forms, boolean matrices and lists, and the checks on both."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._errors import Error, InvalidArgument, Unsupported, dtype_name, has, integer, renamed, shown

BlockSize: TypeAlias = int | tuple[int, int]
Bools: TypeAlias = NDArray[np.bool_]
Int32s: TypeAlias = NDArray[np.int32]

LISTS = ("row_partial", "row_full", "col_partial", "col_full")  # of a BlockMask, in their order
INT32_MAX = 2**31 - 1  # longer than any sequence, so than any distance between a query and a key
INT64_MAX = 2**63 - 1
MOST_ROWS = 2**30  # the library's limit of a length
_LARGEST_BLOCK = 2**24  # and of a block
NO_BLOCK = np.zeros((1, 1, 1, 1), bool)  # of a matrix of any layout


class Csr(NamedTuple):
    """Lists of blocks in compressed sparse row form.

    Line r of batch b, head h holds ``indices[offsets[b, h, r] : offsets[b, h, r + 1]]``, ascending.
    Offsets are absolute in the one indices array. Both are int32, contiguous and read-only.
    """

    offsets: Int32s  # (batch | 1, num_heads | 1, lines + 1)
    indices: Int32s  # (blocks,)


def length(name: str, value: object, minimum: int = 1) -> int:
    """``value`` if it is a number of queries or keys that a call may have."""
    return integer(name, value, minimum, MOST_ROWS)


def amount(name: str, value: object, minimum: int = 0) -> int:
    """``value`` if it is a number of blocks or heads, which NumPy can compute with."""
    return integer(name, value, minimum, INT32_MAX)


def check_block_size(
    block_size: BlockSize | tuple[int, ...], multiple: int = 16
) -> tuple[int, int]:
    """(block_q, block_k) from a pair or from one number; both must be multiples of ``multiple``."""
    pair = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    try:
        if len(pair) == 2:
            block_q, block_k = (integer("block_size", n, 1, _LARGEST_BLOCK) for n in pair)
            if block_q % multiple == 0 and block_k % multiple == 0:
                return block_q, block_k
    except Error:
        pass
    allowed = f"one or two positive multiples of {multiple}, at most {_LARGEST_BLOCK}"
    if multiple == 1:
        allowed = f"one or two integers from 1 to {_LARGEST_BLOCK}"
    raise InvalidArgument(f"block_size: {shown(block_size)}; {allowed}")


def block_bounds(seqlen: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last token of each block of a sequence, cut at its end."""
    first = np.arange(0, seqlen, block)
    return first, np.minimum(first + block, seqlen) - 1


def check_length(name: str, seqlen: int | None, blocks: int, block: int) -> int:
    given = length(name, blocks * block if seqlen is None else seqlen)
    if -(-given // block) != blocks:
        raise InvalidArgument(
            f"{name}: {given}; {(blocks - 1) * block + 1} to {blocks * block}, "
            f"which {blocks} blocks of {block} hold"
        )
    return given


def as_array(name: str, values: ArrayLike) -> NDArray[Any]:
    if isinstance(values, np.ma.MaskedArray):
        raise InvalidArgument(f"{name}: a masked array; one without a mask, which would be lost")
    try:
        array = np.asarray(values)
        if array.dtype == object and isinstance(values, (list, tuple)):
            raise ValueError("of unequal lengths")  # which NumPy itself says from 1.24 on
    except Exception as e:  # ragged lists, arrays of a GPU
        raise InvalidArgument(
            f"{name}: {shown(values)}; an array, or lists of equal lengths"
        ) from e
    return array


def as_blocks(name: str, blocks: ArrayLike) -> Bools:
    array = as_array(name, blocks)
    if array.dtype != np.bool_:
        raise InvalidArgument(f"{name}: dtype {array.dtype}; bool")
    if not 2 <= array.ndim <= 4 or array.size == 0:
        raise InvalidArgument(
            f"{name}: shape {array.shape}; (rows, cols), (num_heads, rows, cols) or "
            "(batch, num_heads, rows, cols), none of them 0"
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def as_integers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    array = as_array(name, values)
    if array.dtype.kind not in "iu" and array.size:  # an empty list is float64
        raise InvalidArgument(f"{name}: dtype {array.dtype}; integers")
    if array.size and array.max() > INT64_MAX:
        raise InvalidArgument(f"{name}: {array.max()}; integers up to {INT64_MAX}")
    return array.astype(np.int64)


def as_int32(name: str, values: ArrayLike) -> Int32s:
    """One of the arrays of a ``Csr``; what does not fit is an Error and not wrapped round."""
    if type(values) is np.ndarray and values.dtype == np.int32:
        return values
    array = as_integers(name, values)
    if array.size and not 0 <= array.min() <= array.max() <= INT32_MAX:
        raise InvalidArgument(f"{name}: {array.min()} to {array.max()}; 0 to {INT32_MAX}")
    return array.astype(np.int32)


def as_csr(name: str, csr: object) -> Csr:
    """One of a ``BlockMask``'s finished lists, of the right dtype and rank; values are not read."""
    if not isinstance(csr, tuple) or len(csr) != 2:
        raise InvalidArgument(f"{name}: {shown(csr)}; a tuple of offsets and indices")
    offsets, indices = (as_int32(name, array) for array in csr)
    if offsets.ndim != 3:
        raise InvalidArgument(
            f"{name}.offsets: shape {offsets.shape}; (batch, num_heads, lines + 1)"
        )
    if indices.ndim != 1:
        raise InvalidArgument(f"{name}.indices: shape {indices.shape}; (blocks,)")
    return Csr(offsets, indices)


def fits(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Same rows and cols; batch and num_heads equal or 1."""
    heads = zip(shape[:2], other[:2], strict=True)
    return shape[2:] == other[2:] and all(a == b or 1 in (a, b) for a, b in heads)


def check_csr(offsets: ArrayLike, indices: ArrayLike, cols: int) -> Csr:
    """A user's lists as int64, offsets (batch | 1, num_heads | 1, rows + 1), with nothing amiss."""
    ends, listed = as_integers("offsets", offsets), as_integers("indices", indices)
    if not 1 <= ends.ndim <= 3 or ends.size == 0 or ends.shape[-1] < 2:
        raise InvalidArgument(
            f"offsets: shape {ends.shape}; (rows + 1), (num_heads, rows + 1) or "
            "(batch, num_heads, rows + 1)"
        )
    if listed.ndim != 1:
        raise InvalidArgument(f"indices: shape {listed.shape}; (blocks,)")
    lines = ends.reshape(-1, ends.shape[-1])  # (batch * num_heads, rows + 1)
    ascending = (np.diff(lines) >= 0).all() and (lines[1:, 0] == lines[:-1, -1]).all()
    if lines[0, 0] != 0 or lines[-1, -1] != listed.size or not ascending:
        given = np.array2string(ends.ravel(), threshold=8, edgeitems=3, max_line_width=1000)
        raise InvalidArgument(
            f"offsets: {given}; 0 first, ascending, each head from where the one before it ends, "
            f"len(indices) = {listed.size} last"
        )
    outside = (listed < 0) | (listed >= cols)
    if outside.any():
        raise InvalidArgument(f"indices: {listed[outside][0]}; block columns 0 to {cols - 1}")
    line = np.repeat(np.arange(lines[:, 1:].size), np.diff(lines).ravel())
    blocks, times = np.unique(line * cols + listed, return_counts=True)
    if (times > 1).any():
        row, col = divmod(int(blocks[times > 1][0]), cols)
        row %= lines.shape[1] - 1
        raise InvalidArgument(f"indices: block ({row}, {col}) is listed twice; each block once")
    return Csr(ends.reshape((1,) * (3 - ends.ndim) + ends.shape), listed)  # type: ignore[arg-type]


def to_csr(blocks: Bools) -> Csr:
    """The lists of a matrix: bool (batch, num_heads, lines, others) to the True others per line."""
    batch, heads, lines, others = blocks.shape
    blocks = np.ascontiguousarray(blocks)  # columns come as a transposed view
    per_line = np.count_nonzero(blocks, axis=3)
    ends = np.zeros(per_line.size + 1, np.int64)
    np.cumsum(per_line, out=ends[1:])
    if ends[-1] > INT32_MAX:
        raise Unsupported(f"blocks: {ends[-1]} visited; at most {INT32_MAX}")
    # A head's last end is the next head's first: lines + 1 offsets from each lines-th entry on.
    first = np.arange(batch * heads)[:, None] * lines
    offsets = ends[first + np.arange(lines + 1)].reshape(batch, heads, lines + 1)
    numbers = np.broadcast_to(np.arange(others, dtype=np.int32), blocks.shape)
    return Csr(offsets.astype(np.int32), numbers[blocks])


def from_csr(lists: Csr, others: int) -> Bools:
    """The matrix of lists: bool (batch, num_heads, lines, others). The inverse of ``to_csr``."""
    batch, heads, ends = lists.offsets.shape
    blocks = np.zeros((batch, heads, ends - 1, others), bool)
    per_line = np.diff(lists.offsets).ravel()
    line = np.repeat(np.arange(per_line.size), per_line)
    blocks.reshape(-1, others)[line, lists.indices] = True
    return blocks


def boolean_mask(mask: Any, bias: object) -> Any:
    """A call's ``mask`` as the boolean bias that it is, of rank 4; None if it is no array.

    Of any framework: everybody passes what hides elements as ``mask``.
    """
    dtype = dtype_name(mask)
    if not dtype:
        return None
    allowed = "bool, (seqlen_q, seqlen_k) or (batch, num_heads, seqlen_q, seqlen_k)"
    if dtype != "bool":
        numbers = "numbers go to bias=, of four dimensions"
        raise InvalidArgument(f"mask: an array of {dtype}; {allowed}: {numbers}")
    if bias is not None:
        raise InvalidArgument("bias: given beside a boolean mask; one of the two")
    rank = len(mask.shape)
    if rank not in (2, 4):
        raise InvalidArgument(f"mask: shape {tuple(mask.shape)}; {allowed}")
    return mask if rank == 4 else mask[None, None]


def of_mask(error: Error, mask: Any) -> Error:
    """``error`` about the bias that ``boolean_mask`` has made, in words of the mask."""
    error = renamed(error, {"bias": "mask"})
    sizes = re.search(r"1 or \w*seqlen_q .*(?=\)$)", error.allowed)
    if error.argument != "mask" or len(mask.shape) != 2 or sizes is None:
        return error
    padding = "" if "max_" in sizes[0] else "; of padding (batch, seqlen_k) mask[:, None, None, :]"
    return type(error)(f"mask: shape {tuple(mask.shape)}; ({sizes[0]}){padding}")


def check_rank(bias: Any) -> None:
    """Of a call's ``bias``: the commonest other one, in words of its own."""
    if has(bias, "shape") and len(bias.shape) == 2:
        allowed = "(batch, num_heads, seqlen_q, seqlen_k), each of them or 1, as by [None, None]"
        raise InvalidArgument(f"bias: shape {tuple(bias.shape)}; {allowed}")
