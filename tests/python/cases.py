"""Short ways to say a problem, and to make the arrays of one."""

from typing import Any

import flashsdk as fs
import numpy as np
import pytest
from flashsdk._testing.problems import Problem, numpy_dtype

CPU_DTYPES = ("float32", "bfloat16", "float16")


def problem(
    seqlen: int | tuple[int, int] = (50, 70),
    heads: int | tuple[int, int] = 2,
    head_dim: int | tuple[int, int] = 32,
    *,
    batch: int = 1,
    dtype: str = "float32",
    lengths: tuple[tuple[int, int], ...] = (),
    **changes: Any,
) -> Problem:
    """A contiguous problem without features. `lengths` (queries, keys) makes it a packed one."""
    seqlen_q, seqlen_k = _pair(seqlen)
    lengths = lengths or ((seqlen_q, seqlen_k),) * batch
    num_heads, num_heads_kv = _pair(heads)
    head_dim, head_dim_v = _pair(head_dim)
    fields = {
        "seed": 1,
        "dtype": dtype,
        "lengths_q": tuple(q for q, _ in lengths),
        "lengths_k": tuple(k for _, k in lengths),
        "num_heads": num_heads,
        "num_heads_kv": num_heads_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "packed": False,
        "strides": False,
    }
    return Problem(**fields | changes)


def packed(lengths: tuple[tuple[int, int], ...], *args: Any, **changes: Any) -> Problem:
    return problem((0, 0), *args, lengths=lengths, packed=True, **changes)


def _pair(x: int | tuple[int, int]) -> tuple[int, int]:
    return x if isinstance(x, tuple) else (x, x)


def normal(*shapes: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(numpy_dtype(dtype)) for shape in shapes]


def qkv(
    seqlen: int | tuple[int, int] = (50, 70),
    heads: int | tuple[int, int] = 2,
    head_dim: int | tuple[int, int] = 32,
    *,
    batch: int = 2,
    dtype: str = "float32",
    seed: int = 0,
) -> list[np.ndarray]:
    """q, k, v and dout."""
    (sq, sk), (h, hk), (d, dv) = _pair(seqlen), _pair(heads), _pair(head_dim)
    shapes = (batch, sq, h, d), (batch, sk, hk, d), (batch, sk, hk, dv), (batch, sq, h, dv)
    return normal(*shapes, dtype=dtype, seed=seed)


def into_pages(
    k: np.ndarray, v: np.ndarray, used: np.ndarray, page_size: int, *, spare: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """k, v, block_table: the used keys in pages in any order, and NaN wherever nobody may read."""
    batch, seqlen = k.shape[:2]
    rng = np.random.default_rng(seed)
    most = -(-seqlen // page_size)
    needed = -(-used // page_size)
    order = rng.permutation(int(needed.sum()) + spare).astype(np.int32)
    table = np.full((batch, most), -7, np.int32)  # behind a length: an index of nothing
    pages = [np.full((len(order), page_size, *x.shape[2:]), np.nan, x.dtype) for x in (k, v)]
    next_page = 0
    for b in range(batch):
        for n in range(needed[b]):
            page = table[b, n] = order[next_page]
            next_page += 1
            rows = slice(n * page_size, min((n + 1) * page_size, used[b]))
            for paged, x in zip(pages, (k, v), strict=True):
                paged[page, : rows.stop - rows.start] = x[b, rows]
    return *pages, table


def rotated(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, start: int, interleaved: bool,
    advances: bool = True, dtype: Any = np.float64,
) -> np.ndarray:  # fmt: skip
    """x (rows, heads, dim) of one sequence, each product and sum rounded to ``dtype``."""
    x = x.astype(dtype)
    positions = start + np.arange(len(x)) * advances
    cos, sin = (t.astype(dtype)[positions][:, None] for t in (cos, sin))
    pairs = cos.shape[-1]
    step = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    first, second = step if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    result = x.copy()
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def both(q: Any, k: Any, v: Any, dout: Any, **keywords: Any) -> tuple[Any, ...]:
    """out, lse, dq, dk, dv."""
    out, lse = fs.mha_fwd(q, k, v, **keywords)
    return (out, lse, *fs.mha_bwd(dout, q, k, v, out, lse, **keywords))


def bits(x: np.ndarray) -> np.ndarray:
    """For comparisons that must be exact, NaN and the sign of 0 included."""
    return np.ascontiguousarray(x).view(np.uint8)


def assert_same_bits(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape
        assert np.array_equal(bits(x), bits(y)), f"{int((x != y).sum())} of {x.size} differ"


def assert_invalid(line: str, q: Any, k: Any, v: Any, **arguments: Any) -> None:
    """That a forward refuses the call with this line, and that explain() does."""
    for call in (fs.mha_fwd, fs.explain):
        with pytest.raises(fs.InvalidArgument) as caught:
            call(q, k, v, **arguments)
        assert str(caught.value) == line
