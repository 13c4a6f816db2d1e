"""Caches in float8_e4m3fn that kv_append writes, against their definition in NumPy: bit by bit."""

import flashsdk as fs
import numpy as np
import pytest
from cases import assert_same_bits, rotated
from flashsdk._testing.problems import numpy_dtype

pytest.importorskip("ml_dtypes")

FP8 = numpy_dtype("float8_e4m3fn")
DTYPES = ("bfloat16", "float16")
BATCH, ROOM, ADDED, HEADS, HEADS_KV, DIM, DIM_V = 3, 24, 5, 4, 2, 20, 12
USED = np.array([0, 7, 19], np.int32)
NUMBERS = np.arange(0x7F, dtype=np.uint8).view(FP8).astype(np.float32)  # from 0 up to 448


def stored(x, descale=1.0):
    """float32 divided and rounded once; what is too large is the largest, and NaN has one code."""
    with np.errstate(all="ignore"):
        quotient = np.float32(x) / np.float32(descale)
    codes = quotient.clip(-448, 448).astype(FP8).view(np.uint8)
    return np.where(np.isnan(quotient), np.uint8(0x7F), codes).view(FP8)


def append(values, dtype, descale=None):
    """What becomes of numbers of 16 bits, as keys and as values."""
    x = np.asarray(values, np.float32).reshape(1, -1, 1, 1).astype(numpy_dtype(dtype))
    assert np.array_equal(x.astype(np.float32).ravel(), values, equal_nan=True)
    caches = [np.zeros(x.shape, FP8) for _ in "kv"]
    scale = None if descale is None else np.full((1, 1), descale, np.float32)
    fs.kv_append(*caches, x, x, np.zeros(1, np.int32), k_descale=scale, v_descale=scale)
    return [cache.ravel() for cache in caches]


def new(dtype, seed=0, scale=3.0):
    """k, v and q, cosines and sines."""
    rng = np.random.default_rng(seed)
    shapes = ((HEADS_KV, DIM), (HEADS_KV, DIM_V), (HEADS, DIM))
    tensors = [
        (scale * rng.standard_normal((BATCH, ADDED, *shape))).astype(numpy_dtype(dtype))
        for shape in shapes
    ]
    angles = np.arange(30)[:, None] / 3.0 ** np.arange(6)
    return *tensors, *(f(angles).astype(np.float32) for f in (np.cos, np.sin))


def caches(seed=7):
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((BATCH, ROOM, HEADS_KV, d)).astype(np.float32).astype(FP8)
        for d in (DIM, DIM_V)
    ]


def descales(*shapes, seed=3):
    rng = np.random.default_rng(seed)
    return [None if s is None else rng.uniform(0.01, 0.3, s).astype(np.float32) for s in shapes]


def of_heads(descale):
    """(batch, 1, heads, 1)"""
    whole = np.ones((1, 1), np.float32) if descale is None else descale
    return np.broadcast_to(whole, (BATCH, HEADS_KV))[:, None, :, None]


# ---- one number


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_stays_itself(dtype):
    for sign, first in ((1, 0), (-1, 0x80)):
        for got in append(sign * NUMBERS, dtype):
            assert np.array_equal(got.view(np.uint8), first + np.arange(0x7F))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_between_goes_to_the_nearest(dtype):
    """In the middle to the even code, and just beside it to its side."""
    middle = (NUMBERS[:-1] + NUMBERS[1:]) / 2
    of = numpy_dtype(dtype)
    codes = middle.astype(of).view(np.uint16)
    below, above = ((codes + n).view(of).astype(np.float32) for n in (np.uint16(65535), 1))
    assert (below < middle).all() and (middle < above).all()
    lower = np.arange(0x7E)
    for sign, first in ((1, 0), (-1, 0x80)):
        for x, want in ((below, lower), (middle, lower + lower % 2), (above, lower + 1)):
            for got in append(sign * x, dtype):
                assert np.array_equal(got.view(np.uint8), first + want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_too_large_is_the_largest(dtype):
    large = np.float32([449, 464, 465, 480, 1e4, np.inf] if dtype == "float16" else
                       [450, 464, 466, 480, 2.0**100, np.inf])  # fmt: skip
    large = large.astype(numpy_dtype(dtype)).astype(np.float32)
    for got in append(np.concatenate([large, -large]), dtype):
        assert (got.astype(np.float32) == np.repeat([448, -448], len(large))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_that_are_no_usual_ones(dtype):
    x = np.float32([-np.inf, -2, -0.0, 0.0, 0.5, np.inf, np.nan, -np.nan])
    for descale in (0.0, -0.0, -3.0, 1e-40, 1e38, np.inf, np.nan):
        for got in append(x, dtype, descale):
            assert_same_bits([got], [stored(x, descale)])


def test_it_is_a_quotient():
    """A product with the inverse goes to the other side of a middle here and there."""
    middle = (NUMBERS[8:119] + NUMBERS[9:120]) / 2
    different = 0
    for descale in range(3, 64, 2):
        x = middle * descale
        want = stored(x, descale)
        for got in append(x, "float16", descale):
            assert_same_bits([got], [want])
        different += (stored(x * (np.float32(1) / np.float32(descale))) != want).sum()
    assert different > 0


# ---- rows of a cache

SHAPES = {
    "none": (None, None),
    "one": ((1, 1), (1, 1)),
    "of sequences, of heads": ((BATCH, 1), (1, HEADS_KV)),
    "of heads, of sequences": ((1, HEADS_KV), (BATCH, 1)),
    "all": ((BATCH, HEADS_KV), (BATCH, HEADS_KV)),
    "of keys": ((BATCH, HEADS_KV), None),
    "of values": (None, (BATCH, HEADS_KV)),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_behind_the_used_ones(dtype, shapes, interleaved):
    k, v, q, cos, sin = new(dtype)
    ours = caches()
    before = [x.copy() for x in ours]
    factors = descales(*shapes)
    for rotary_dtype in ("float32", dtype):
        rotary = [t.astype(numpy_dtype(rotary_dtype)) for t in (cos, sin)]
        given = {"rotary_interleaved": interleaved, "k_descale": factors[0]}
        given |= {"rotary_cos": rotary[0], "rotary_sin": rotary[1], "v_descale": factors[1]}
        q_turned = fs.kv_append(*ours, k, v, USED, q=q, **given)
        for b, used in enumerate(USED):
            keys = rotated(k[b], *rotary, used, interleaved, dtype=np.float32)
            whole = slice(used, used + ADDED)
            want = stored(keys, of_heads(factors[0])[b]), stored(v[b], of_heads(factors[1])[b])
            assert_same_bits([x[b, whole] for x in ours], want)
            others = np.r_[0:used, used + ADDED : ROOM]
            assert_same_bits([x[b, others] for x in ours], [x[b, others] for x in before])
            assert_same_bits(
                [q_turned[b]],
                [rotated(q[b], *rotary, used, interleaved, dtype=np.float32).astype(q.dtype)],
            )


def test_keys_are_rounded_once():
    """Those that became 16 bits before are others here and there."""
    different = 0
    for dtype in DTYPES:
        k, v, _, cos, sin = new(dtype)
        ours = caches()
        fs.kv_append(*ours, k, v, USED, rotary_cos=cos, rotary_sin=sin)
        for b, used in enumerate(USED):
            keys = rotated(k[b], cos, sin, used, False, dtype=np.float32)
            assert_same_bits([ours[0][b, used : used + ADDED]], [stored(keys)])
            different += (stored(keys.astype(k.dtype)) != stored(keys)).sum()
    assert different > 0


@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_pages(page_size):
    k, v, _, cos, sin = new("bfloat16")
    whole, most = caches(), ROOM // page_size
    table = np.random.default_rng(0).permutation(BATCH * most).astype(np.int32).reshape(BATCH, most)
    pages = [np.zeros((BATCH * most, page_size, *x.shape[2:]), FP8) for x in (k, v)]
    k_descale, v_descale = descales((BATCH, HEADS_KV), (BATCH, HEADS_KV))
    given = {"rotary_cos": cos, "rotary_sin": sin, "k_descale": k_descale, "v_descale": v_descale}
    assert fs.kv_append(*pages, k, v, USED, block_table=table, **given) is None
    fs.kv_append(*whole, k, v, USED, **given)
    for paged, cache in zip(pages, whole, strict=True):
        rows = paged[table].reshape(cache.shape)
        for b, used in enumerate(USED):
            new_rows = slice(used, used + ADDED)
            assert_same_bits([rows[b, new_rows]], [cache[b, new_rows]])
            assert not np.delete(rows[b], np.s_[new_rows], 0).astype(np.float32).any()


def test_strides():
    """Heads outside of rows, values within the rows of keys, a slice and broadcast factors."""
    k, v, _, cos, sin = new("float16")
    factors = descales((BATCH, HEADS_KV), (1, HEADS_KV))
    want = caches()
    given = {"rotary_cos": cos, "rotary_sin": sin}
    fs.kv_append(*want, k, v, USED, **given, k_descale=factors[0], v_descale=factors[1])
    memory = np.zeros((BATCH, HEADS_KV, ROOM, DIM + DIM_V + 3), FP8)
    rows = memory.transpose(0, 2, 1, 3)
    ours = [rows[..., 1 : 1 + DIM], rows[..., DIM + 2 : DIM + 2 + DIM_V]]
    for x, cache in zip(ours, caches(), strict=True):
        x[:] = cache
    wide = np.full((2 * BATCH, 3 * HEADS_KV), np.nan, np.float32)
    wide[::2, ::3] = factors[0]
    moved = [x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for x in (k, v)]
    same_for_all = np.broadcast_to(factors[1], (BATCH, HEADS_KV))
    fs.kv_append(*ours, *moved, USED, **given, k_descale=wide[::2, ::3], v_descale=same_for_all)
    assert_same_bits(ours, want)
    assert not memory[..., [0, DIM + 1, -1]].astype(np.float32).any()


def test_what_was_written_is_attended_to():
    """A prompt and then tokens: half a unit of four bits from the same in 16 bits."""
    rng = np.random.default_rng(0)
    shapes = ((2, 16, 4, 32), (2, 16, 2, 32), (2, 16, 2, 32))
    q, k, v = (rng.standard_normal(s).astype(numpy_dtype("bfloat16")) for s in shapes)
    factors = [np.abs(x.astype(np.float32)).max((1, 3)) / 448 for x in (k, v)]
    kept = dict(zip(("k_descale", "v_descale"), factors, strict=True))
    k_cache, v_cache = (np.full((2, 40, 2, 32), np.nan, np.float32).astype(FP8) for _ in "kv")
    want, _ = fs.mha_fwd(q, k, v, mask=fs.Causal())
    used = np.zeros(2, np.int32)
    for rows in (slice(0, 9), *(slice(n, n + 1) for n in range(9, 16))):
        fs.kv_append(k_cache, v_cache, k[:, rows], v[:, rows], used, **kept)
        used += rows.stop - rows.start
        out, _ = fs.mha_fwd(q[:, rows], k_cache, v_cache, mask=fs.Causal(), seqused_k=used, **kept)
        error = np.abs(out.astype(np.float32) - want[:, rows].astype(np.float32))
        assert error.max() < 0.15


# ---- what is refused


def wide(name, dtype):
    return lambda given: {name: given[name].astype(numpy_dtype(dtype))}


def of(**changes):
    return lambda _: changes


def all_of_32_bits(given):
    return {name: given[name].astype(np.float32) for name in "kvq"}


ERRORS = {
    "k of 32 bits": (
        all_of_32_bits,
        "k_cache: dtype float8_e4m3fn; "
        "float32, the dtype of k; in float8_e4m3fn k is float16 or bfloat16",
    ),
    "k of 8 bits": (wide("k", "float8_e4m3fn"), "k: dtype float8_e4m3fn; float32, float16 or bfl"),
    "k_cache of 16": (wide("k_cache", "float16"), "k_cache: dtype float16; bfloat16, the dtype of "
                      "k, or float8_e4m3fn"),
    "k_cache alone": (wide("v_cache", "bfloat16"),
                      "v_cache: dtype bfloat16; float8_e4m3fn, the dtype of k_cache"),
    "v_cache alone": (wide("k_cache", "bfloat16"),
                      "v_cache: dtype float8_e4m3fn; bfloat16, the dtype of k_cache"),
    "another narrow dtype": (wide("k_cache", "float8_e5m2"), "k_cache: dtype float8_e5m2; float32"),
    "q of 8 bits": (wide("q", "float8_e4m3fn"), "q: dtype float8_e4m3fn; bfloat16, the dtype of k"),
    "dtype": (of(k_descale=np.ones((3, 2))), "k_descale: dtype float64; float32"),
    "rank": (of(v_descale=np.ones(2, np.float32)),
             "v_descale: shape (2,); (1 or batch 3, 1 or num_heads_kv 2)"),
    "shape": (of(k_descale=np.ones((3, 4), np.float32)),
              "k_descale: shape (3, 4); (1 or batch 3, 1 or num_heads_kv 2)"),
    "no array": (of(v_descale=0.5), "v_descale: float; an array of "),
}  # fmt: skip


@pytest.mark.parametrize(("change", "line"), ERRORS.values(), ids=ERRORS)
def test_errors(change, line):
    k, v, q, *_ = new("bfloat16")
    k_cache, v_cache = caches()
    given = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "seqused_k": USED, "q": q}
    before = k_cache.copy(), v_cache.copy()
    with pytest.raises(fs.InvalidArgument) as caught:
        fs.kv_append(**given | change(given))
    assert str(caught.value).startswith(line)
    assert_same_bits((k_cache, v_cache), before)


def test_factors_share_no_memory_with_a_cache():
    k, v, *_ = new("bfloat16")
    k_cache, v_cache = caches()
    shared = k_cache.reshape(-1).view(np.float32)[:6].reshape(BATCH, HEADS_KV)
    with pytest.raises(fs.InvalidArgument, match=r"^k_cache: overlaps k_descale; memory of"):
        fs.kv_append(k_cache, v_cache, k, v, USED, k_descale=shared)
