"""New keys behind the used ones, with rotary embedding, against its definition in NumPy."""

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, bits, normal, rotated
from flashsdk._testing.problems import numpy_dtype

BATCH, ROOM, HEADS, HEADS_KV, DIM, DIM_V = 3, 24, 4, 2, 20, 12
USED = np.array([0, 7, 19], np.int32)


def arrays(dtype="float32", added=5, queries=5, pairs=6, rotary_dtype="float32"):
    shapes = (
        *((BATCH, ROOM, HEADS_KV, DIM), (BATCH, ROOM, HEADS_KV, DIM_V)),
        *((BATCH, added, HEADS_KV, DIM), (BATCH, added, HEADS_KV, DIM_V)),
        (BATCH, queries, HEADS, DIM),
    )
    k_cache, v_cache, k, v, q = normal(*shapes, dtype=dtype)
    angles = np.arange(30)[:, None] / 3.0 ** np.arange(pairs)
    of = numpy_dtype(rotary_dtype)
    return k_cache, v_cache, k, v, q, np.cos(angles).astype(of), np.sin(angles).astype(of)


@pytest.mark.parametrize("advances", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [0, 6, 10])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_rows_behind_the_used_ones(dtype, pairs, interleaved, advances):
    for rotary_dtype in {"float32", dtype}:
        k_cache, v_cache, k, v, q, cos, sin = arrays(dtype, pairs=pairs, rotary_dtype=rotary_dtype)
        before = k_cache.copy(), v_cache.copy()
        turned = fs.kv_append(
            k_cache, v_cache, k, v, USED, q=q, rotary_cos=cos, rotary_sin=sin,
            rotary_interleaved=interleaved, q_advances=advances,
        )  # fmt: skip
        tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
        for b, used in enumerate(USED):
            new = slice(used, used + 5)
            want = rotated(k[b], cos, sin, used, interleaved)
            np.testing.assert_allclose(k_cache[b, new].astype(float), want, atol=tolerance)
            want = rotated(q[b], cos, sin, used, interleaved, advances)
            np.testing.assert_allclose(turned[b].astype(float), want, atol=tolerance)
            assert_same_bits([v_cache[b, new]], [v[b]])
            for cache, old in zip((k_cache, v_cache), before, strict=True):
                others = np.r_[0:used, used + 5 : ROOM]
                assert_same_bits([cache[b, others]], [old[b, others]])


@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_pages(page_size):
    k_cache, v_cache, k, v, _, cos, sin = arrays()
    most = ROOM // page_size
    table = np.random.default_rng(0).permutation(BATCH * most).astype(np.int32).reshape(BATCH, most)
    pages = [np.full((BATCH * most, page_size, *x.shape[2:]), np.nan, x.dtype) for x in (k, v)]
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    assert fs.kv_append(*pages, k, v, USED, block_table=table, **rotary) is None
    fs.kv_append(k_cache, v_cache, k, v, USED, **rotary)
    for paged, cache in zip(pages, (k_cache, v_cache), strict=True):
        whole = paged[table].reshape(BATCH, ROOM, *cache.shape[2:])
        for b, used in enumerate(USED):
            assert_same_bits([whole[b, used : used + 5]], [cache[b, used : used + 5]])
            assert np.isnan(np.delete(whole[b], np.s_[used : used + 5], 0)).all()


def test_a_prompt_and_then_tokens():
    """A cache that is filled step by step attends as all keys at once."""
    k, v, q = normal((2, 16, 2, 32), (2, 16, 2, 32), (2, 16, 4, 32))
    want, _ = fs.mha_fwd(q, k, v, mask=fs.Causal())
    k_cache, v_cache = (np.full((2, 40, 2, 32), np.nan, np.float32) for _ in "kv")
    used = np.zeros(2, np.int32)
    for rows in (slice(0, 9), *(slice(n, n + 1) for n in range(9, 16))):
        fs.kv_append(k_cache, v_cache, k[:, rows], v[:, rows], used)
        used += rows.stop - rows.start
        out, _ = fs.mha_fwd(q[:, rows], k_cache, v_cache, mask=fs.Causal(), seqused_k=used)
        np.testing.assert_allclose(out, want[:, rows], atol=1e-5)


def test_many_rows_on_several_threads():
    k, v = normal((2, 3000, 2, 32), (2, 3000, 2, 32))
    k_cache, v_cache = np.zeros_like(k), np.zeros_like(v)
    fs.kv_append(k_cache, v_cache, k, v, np.zeros(2, np.int32))
    assert np.array_equal(bits(k_cache), bits(k))
    assert np.array_equal(bits(v_cache), bits(v))


ERRORS = {
    "no room": (
        {"seqused_k": np.array([0, 20, 0], np.int32)},
        "seqused_k: 20 of sequence 1; 0 to 19, as the cache has room for 24 keys",
    ),
    "negative": (
        {"seqused_k": np.array([0, 0, -1], np.int32)},
        "seqused_k: -1 of sequence 2; 0 to 19, as the cache has room for 24 keys",
    ),
    "lengths": ({"seqused_k": np.zeros(2, np.int32)}, "seqused_k: shape (2,); (batch 3)"),
    "long": ({"seqused_k": np.zeros(3, np.int64)}, "seqused_k: dtype int64; int32"),
    "positions": (
        {"rotary_cos": np.zeros((23, 4), np.float32), "rotary_sin": np.zeros((23, 4), np.float32)},
        "rotary_cos: 23 positions; at least 24, as sequence 2 goes so far",
    ),
    "too wide": (
        {
            "rotary_cos": np.zeros((30, 11), np.float32),
            "rotary_sin": np.zeros((30, 11), np.float32),
        },
        "rotary_cos: shape (30, 11); "
        "(positions, rotary_dim / 2) of a rotary_dim up to head_dim, 20",
    ),
    "one of two": (
        {"rotary_cos": np.zeros((30, 4), np.float32)},
        "rotary_sin: not given; a tensor",
    ),
    "no descale": (
        {"k_descale": np.ones((1, 1), np.float32)},
        "k_descale: given; none, as k_cache is float32 and no float8_e4m3fn",
    ),
    "nor of values": (
        {"v_descale": np.ones((1, 1), np.float32)},
        "v_descale: given; none, as k_cache is float32 and no float8_e4m3fn",
    ),
    "dtype": (
        {"v": np.zeros((3, 5, 2, 12), np.float16)},
        "v: dtype float16; float32, the dtype of k",
    ),
    "heads": (
        {"q": np.zeros((3, 5, 4, 16), np.float32)},
        "q: shape (3, 5, 4, 16); (batch 3, seqlen_q, num_heads, head_dim 20)",
    ),
    "no array": ({"q": "q"}, "q: 'q'; an array with a shape"),
    "no pages": (
        {"block_table": np.zeros((3, 0), np.int32)},
        "k: seqlen_new 5; 0 to 0, the cache's keys",
    ),
    "page": (
        {"block_table": np.array([[0, 1], [2, 1], [0, 3]], np.int32)},
        "block_table: 3 at [2, 1]; a page of k_cache, of which there are 3",
    ),
}


ERRORS |= {
    f"{name} of None": ({name: None}, f"{name}: None; True or False")
    for name in ("q_advances", "rotary_interleaved")
}


@pytest.mark.parametrize(("changes", "line"), ERRORS.values(), ids=ERRORS)
def test_errors(changes, line):
    k_cache, v_cache, k, v, *_ = arrays()
    if "block_table" in changes:
        changes = {"seqused_k": np.array([0, 7, 22], np.int32)} | changes
    given = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "seqused_k": USED} | changes
    before = k_cache.copy()
    with pytest.raises(fs.InvalidArgument) as caught:
        fs.kv_append(**given)
    assert str(caught.value) == line
    assert_same_bits([k_cache], [before])


@pytest.mark.parametrize("name", ["k", "v", "q", "rotary_cos", "rotary_sin"])
def test_what_requires_a_gradient(name):
    torch = pytest.importorskip("torch")
    names = ("k_cache", "v_cache", "k", "v", "q", "rotary_cos", "rotary_sin")
    given = {n: torch.from_numpy(x) for n, x in zip(names, arrays())}
    given["seqused_k"] = torch.from_numpy(USED)
    before = given["k_cache"].clone()
    given[name].requires_grad_()
    line = f"^{name}: a tensor that requires a gradient; one without, or torch.no_grad"
    with pytest.raises(fs.Unsupported, match=line):
        fs.kv_append(**given)
    assert torch.equal(given["k_cache"], before)
    with torch.no_grad():
        fs.kv_append(**given)
    assert not torch.equal(given["k_cache"], before)


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_scales_that_require_a_gradient(name):
    torch = pytest.importorskip("torch")
    k_cache, v_cache, k, v, *_ = arrays()
    given = {name: torch.ones(BATCH, HEADS_KV, requires_grad=True)}
    with pytest.raises(fs.Unsupported, match=f"^{name}: a tensor that requires a gradient"):
        fs.kv_append(k_cache, v_cache, k, v, USED, **given)


def test_a_cache_must_be_writable_and_apart():
    k_cache, v_cache, k, v, *_ = arrays()
    with pytest.raises(fs.InvalidArgument, match=r"^k: shares memory with k_cache|^k_cache: "):
        fs.kv_append(k_cache, v_cache, k_cache[:, :5], v, USED)
    k_cache.flags.writeable = False
    with pytest.raises(fs.InvalidArgument, match=r"^k_cache: "):
        fs.kv_append(k_cache, v_cache, k, v, USED)
