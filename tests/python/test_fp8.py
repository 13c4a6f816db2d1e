"""Keys and values in float8_e4m3fn beside a q of 16 bits, and what they are multiplied with."""

import flashsdk as fs
import numpy as np
import pytest
from cases import assert_invalid, assert_same_bits, into_pages, packed, problem, qkv
from flashsdk._testing import reference
from flashsdk._testing.problems import BandSpec, Blocks, generate, numpy_dtype

pytest.importorskip("ml_dtypes")

FP8 = numpy_dtype("float8_e4m3fn")
DTYPES = ("bfloat16", "float16")
CODES = np.arange(256, dtype=np.uint8).view(FP8)
CAUSAL = BandSpec(None, 0, "bottom_right")
BOTH = ((2, 2), (2, 2))  # shapes of k_descale and v_descale, of two sequences and two heads of keys


def fp8(*shapes, scale=4.0, seed=0):
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_normal(shape)).astype(FP8) for shape in shapes]


def descales(batch=2, heads=2, seed=3):
    rng = np.random.default_rng(seed)
    return [rng.uniform(0.05, 0.3, (batch, heads)).astype(np.float32) for _ in "kv"]


# ---- against the definition

SIZES = {
    "one query, one key": (1, 1),
    "one query": (1, 300),
    "few queries": (3, 150),
    "a few more": (7, 150),
    "square": (70, 70),
    "tiles": (130, 410),
    "more queries": (90, 20),
    "no keys": (4, 0),
    "no queries": (0, 20),
    "in parts": (1, 6500),
    "some in parts": (9, 4200),
}


@pytest.mark.parametrize("seqlen", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["dense", "causal"])
def test_sizes(runner, mask, seqlen):
    for dtype in DTYPES:
        runner.check(problem(seqlen, (4, 2), 32, batch=2, dtype=dtype, fp8=BOTH, mask=mask))


@pytest.mark.parametrize("head_dim", [1, 7, 16, 24, (40, 24), 64, 80, 128, (192, 128), 256])
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_head_dims(runner, seqlen_q, head_dim):
    for dtype in DTYPES:
        runner.check(problem((seqlen_q, 100), (4, 2), head_dim, batch=2, dtype=dtype, fp8=BOTH))


@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["dense", "causal"])
@pytest.mark.parametrize("head_dim", [7, 24])
@pytest.mark.parametrize("strides", [False, True], ids=["", "strides"])
def test_heads_of_a_group_whose_rows_are_not_made_of_vectors(runner, strides, head_dim, mask):
    """Few queries of many keys share a tile only where what joins them can write whole vectors."""
    for seqlen_q in (2, 9, 40):
        shape = (seqlen_q, 900), (4, 2), head_dim
        runner.check(
            problem(*shape, batch=2, dtype="bfloat16", fp8=BOTH, mask=mask, strides=strides)
        )


@pytest.mark.parametrize("head_dim", [320, (576, 512)])
@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_wide_heads(cpu, seqlen_q, head_dim):
    for dtype in DTYPES:
        cpu.check(
            problem((seqlen_q, 60), (4, 1), head_dim, batch=2, dtype=dtype, fp8=((2, 1), (2, 1)))
        )


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_groups_of_heads(runner, seqlen_q, heads):
    shape = (3, heads[1])
    for dtype in DTYPES:
        runner.check(
            problem(
                (seqlen_q, 90), heads, 32, batch=3, dtype=dtype, fp8=(shape, shape), mask=CAUSAL
            )
        )


SHAPES = {
    "none": (None, None),
    "one": ((1, 1), (1, 1)),
    "of sequences, of heads": ((2, 1), (1, 2)),
    "of heads, of sequences": ((1, 2), (2, 1)),
    "of keys": ((2, 2), None),
    "of values": (None, (2, 2)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_shapes_of_descales(runner, seqlen_q, shapes):
    for dtype in DTYPES:
        runner.check(problem((seqlen_q, 90), (4, 2), 32, batch=2, dtype=dtype, fp8=shapes))


FEATURES = {
    "window": {"mask": BandSpec(20, 5, "bottom_right")},
    "scale": {"softmax_scale": -0.3},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": ("float32", (2, 4, 40, 90))},
    "bias of keys": {"bias": ("bool", (2, 1, 1, 90))},
    "ALiBi": {"alibi": "batch", "mask": CAUSAL},
    "dropout": {"dropout_p": 0.3},
    "sink": {"sink": True, "mask": CAUSAL},
    "strides": {"strides": True},
    "huge": {"values": "huge"},
    "tiny": {"values": "tiny"},
    "all": {
        "softcap": 4.0,
        "bias": ("float16", (1, 4, 40, 90)),
        "alibi": "heads",
        "dropout_p": 0.1,
        "sink": True,
        "mask": CAUSAL,
    },
    "blocks": {
        "mask": Blocks(
            np.eye(2, 3, dtype=bool)[None, None],
            np.ones((2, 3), bool)[None, None] & ~np.eye(2, 3, dtype=bool),
            (32, 32),
            BandSpec(20, 5, "top_left"),
        )
    },
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features(runner, features):
    for dtype in DTYPES:
        runner.check(problem((40, 90), (4, 2), 32, batch=2, dtype=dtype, fp8=BOTH, **features))


def test_features_of_few_queries(runner):
    features = {"softcap": 4.0, "bias": ("float32", (2, 4, 2, 90)), "dropout_p": 0.2, "sink": True}
    for dtype in DTYPES:
        runner.check(
            problem((2, 90), (4, 2), 32, batch=2, dtype=dtype, fp8=BOTH, mask=CAUSAL, **features)
        )


def test_packed_sequences(runner):
    lengths = ((17, 30), (0, 4), (1, 90), (40, 3), (3, 0))
    for shapes in (((5, 2), (5, 2)), ((1, 2), (5, 1))):
        for dtype in DTYPES:
            runner.check(
                packed(lengths, (4, 2), 32, dtype=dtype, fp8=shapes, tail=(3, 4), mask=CAUSAL)
            )


def test_used_lengths(runner):
    """What lies behind is NaN."""
    for seqlen_q, used_q in ((1, ()), (40, (40, 7, 0))):
        for dtype in DTYPES:
            runner.check(
                problem((seqlen_q, 90), (4, 2), 32, batch=3, dtype=dtype, fp8=((3, 2), (3, 2)),
                        used_k=(90, 0, 33), used_q=used_q)
            )  # fmt: skip


def test_random_problems_have_them():
    assert sum(generate(seed).fp8 is not None for seed in range(60)) > 5


# ---- against itself


@pytest.mark.parametrize("seqlen_q", [1, 3, 50])
@pytest.mark.parametrize("mask", [None, fs.Causal(), fs.SlidingWindow(70, 3)])
def test_the_bits_are_those_of_the_same_values_in_16_bits(cpu, seqlen_q, mask):
    """Which hold them, and with them what they are multiplied with where that is a power of 2."""
    for dtype in DTYPES:
        for dim in (24, 40, 64, 128):
            q = qkv((seqlen_q, 1), (4, 2), dim, dtype=dtype)[0]
            k, v = fp8((2, 300, 2, dim), (2, 300, 2, dim))
            k_descale = np.array([[1, 0.25], [2, 0.125]], np.float32)
            v_descale = np.array([[4], [0.5]], np.float32)
            wide = [
                (x.astype(np.float32) * d[:, None, :, None]).astype(q.dtype)
                for x, d in ((k, k_descale), (v, v_descale))
            ]
            scaled = {"k_descale": k_descale, "v_descale": v_descale}
            got = cpu.call("mha_fwd", q, k, v, mask=mask, **scaled)
            assert_same_bits(got, cpu.call("mha_fwd", q, *wide, mask=mask))


@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 48, 200])
@pytest.mark.parametrize("seqlen_q", [1, 3, 50])
def test_pages_are_the_keys_in_one_piece(runner, seqlen_q, page_size):
    """Behind the lengths lies NaN. From 512 keys on a GPU has kernels of few rows."""
    used = np.array([530, 1, 0, 200], np.int32)
    k, v = fp8((4, 530, 2, 48), (4, 530, 2, 32))
    k_descale, v_descale = descales(batch=4)
    pages_k, pages_v, table = into_pages(k, v, used, page_size)
    room = table.shape[1] * page_size
    whole = [x[np.maximum(table, 0)].reshape(4, room, *x.shape[2:]) for x in (pages_k, pages_v)]
    given = {"seqused_k": used, "k_descale": k_descale, "v_descale": v_descale}
    for dtype in DTYPES:
        q = qkv((seqlen_q, 1), (4, 2), 48, batch=4, dtype=dtype)[0]
        got = runner.call("mha_fwd", q, pages_k, pages_v, block_table=table, **given)
        assert_same_bits(got, runner.call("mha_fwd", q, *whole, **given))
        want = reference.forward(q, k, v, **given)
        for ours, exact in zip(got, want, strict=True):
            np.testing.assert_allclose(ours.astype(float), exact, rtol=0, atol=2e-2)


# ---- every code


@pytest.mark.parametrize("seqlen_q", [1, 5, 70])
def test_every_code_of_a_value(runner, seqlen_q):
    """Of one key alone: out is its value."""
    for dtype in DTYPES:
        for v in (CODES, CODES[3:]):  # also in what is left of a vector
            q = np.zeros((1, seqlen_q, 1, 8), numpy_dtype(dtype))
            out, _ = runner.call("mha_fwd", q, np.zeros((1, 1, 1, 8), FP8), v[None, None, None])
            want = np.broadcast_to(v.astype(np.float32), (seqlen_q, len(v)))
            assert np.array_equal(out[0, :, 0].astype(np.float32), want, equal_nan=True)


@pytest.mark.parametrize("seqlen_q", [1, 5, 70])
def test_every_code_of_a_key(runner, seqlen_q):
    """Of sequences of one key, whose lse is its score."""
    for dtype in DTYPES:
        for dim, at in ((16, 3), (24, 23)):  # also in what is left of a vector
            q = np.zeros((256, seqlen_q, 1, dim), numpy_dtype(dtype))
            k = np.zeros((256, 1, 1, dim), FP8)
            q[..., at], k[..., at] = 1, CODES[:, None, None]
            _, lse = runner.call("mha_fwd", q, k, np.zeros_like(k), softmax_scale=1.0)
            want = np.broadcast_to(CODES.astype(np.float32)[:, None, None], lse.shape)
            np.testing.assert_allclose(lse, want, rtol=3e-6, atol=1e-6)


def test_a_nan_reaches_those_who_see_it(runner):
    for dtype in DTYPES:
        q = qkv((40, 1), (4, 2), 32, dtype=dtype)[0]
        k, v = fp8((2, 60, 2, 32), (2, 60, 2, 32))
        k[0, 59, 0, 3] = v[1, 59, 1, 5] = np.nan
        out, lse = runner.call("mha_fwd", q, k, v, mask=fs.Causal())
        seen = np.zeros(lse.shape, bool)
        seen[0, :2, 39] = True  # of two heads the last query, alone
        assert np.array_equal(np.isnan(lse), seen)
        assert np.isnan(out[1, 39, 2:, 5].astype(float)).all()
        assert not np.isnan(out[1, :, :2].astype(float)).any()


# ---- descales


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_descales_of_any_stride(runner, seqlen_q):
    """A slice, and broadcast ones."""
    q = qkv((seqlen_q, 1), (4, 2), 32, dtype="bfloat16")[0]
    k, v = fp8((2, 60, 2, 32), (2, 60, 2, 32))
    k_descale, v_descale = descales()
    wide = np.full((4, 6), np.nan, np.float32)
    wide[::2, ::3] = k_descale
    if runner.backend == "cpu":
        k_descale = wide[::2, ::3]
    of_heads = np.broadcast_to(v_descale[:1], (2, 2))
    got = runner.call("mha_fwd", q, k, v, k_descale=k_descale, v_descale=of_heads)
    want = runner.call(
        "mha_fwd", q, k, v, k_descale=np.ascontiguousarray(k_descale), v_descale=v_descale[:1]
    )
    assert_same_bits(got, want)


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_a_query_that_sees_no_key_has_0_whatever_the_descale(runner, seqlen_q):
    q = qkv((seqlen_q, 1), (4, 2), 32, dtype="float16")[0]
    k, v = fp8((2, 60, 2, 32), (2, 60, 2, 32))
    infinite = np.full((1, 1), np.inf, np.float32)
    used = np.array([0, 0], np.int32)
    out, lse = runner.call("mha_fwd", q, k, v, v_descale=infinite, seqused_k=used)
    assert not out.any()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("seqlen_q", [2, 40])
def test_a_factor_of_nan_reaches_no_query_without_keys(runner, seqlen_q):
    q = qkv((seqlen_q, 1), (2, 1), 32, dtype="float16")[0]
    k, v = fp8((2, 60, 1, 32), (2, 60, 1, 32))
    first_sees_none = fs.Band(None, -1, "top_left")
    given = {"k_descale": np.full((1, 1), np.nan, np.float32), "mask": first_sees_none}
    out, lse = runner.call("mha_fwd", q, k, v, **given)
    assert not out[:, 0].any()
    assert (lse[..., 0] == -np.inf).all()
    assert np.isnan(lse[..., 1:]).all()


def test_descales_of_0_and_below(runner):
    q = qkv((5, 1), (2, 2), 32, dtype="float16")[0]
    k, v = fp8((2, 60, 2, 32), (2, 60, 2, 32))
    given = {
        "k_descale": np.array([[0, -0.1], [0.1, 0]], np.float32),
        "v_descale": np.array([[-1, 0], [0.1, -0.5]], np.float32),
    }
    got = runner.call("mha_fwd", q, k, v, **given)
    for ours, exact in zip(got, reference.forward(q, k, v, **given), strict=True):
        np.testing.assert_allclose(ours.astype(float), exact, rtol=2e-3, atol=2e-3)


# ---- doors


def test_the_first_door_is_the_core():
    q = qkv((3, 1), (4, 2), 32, dtype="bfloat16")[0]
    k, v = fp8((2, 60, 2, 32), (2, 60, 2, 32))
    k_descale, v_descale = descales()
    given = {"k_descale": k_descale, "v_descale": v_descale}
    got = fs.attention(q, k, v, return_lse=True, **given)
    assert got[0].dtype == q.dtype
    assert_same_bits(got, fs.mha_fwd(q, k, v, **given))


def test_explain():
    q = qkv((1, 1), (4, 2), 32, dtype="bfloat16")[0]
    k, v = fp8((2, 60, 2, 32), (2, 60, 2, 32))
    told = fs.explain(q, k, v, k_descale=descales()[0])
    assert "_bf16_" in told.kernel
    assert told.packing


def given(**changes):
    q = qkv((5, 1), (4, 2), 32, dtype="bfloat16")[0]
    k, v = fp8((2, 16, 2, 32), (2, 16, 2, 32))
    k_descale, v_descale = descales()
    arguments = {"q": q, "k": k, "v": v, "k_descale": k_descale, "v_descale": v_descale}
    return arguments | {name: make(arguments) for name, make in changes.items()}


def wide(name, dtype):
    return lambda x: x[name].astype(numpy_dtype(dtype))


BESIDE_16_BITS = "float32, the dtype of q; beside float8_e4m3fn q is float16 or bfloat16"
ERRORS = {
    "q of 8 bits": (
        {"q": wide("q", "float8_e4m3fn")},
        "q: dtype float8_e4m3fn; float32, float16 or bfloat16",
    ),
    "q of 32 bits": ({"q": wide("q", "float32")}, f"k: dtype float8_e4m3fn; {BESIDE_16_BITS}"),
    "k alone": ({"v": wide("v", "bfloat16")}, "v: dtype bfloat16; float8_e4m3fn, the dtype of k"),
    "v alone": ({"k": wide("k", "bfloat16")}, "v: dtype float8_e4m3fn; bfloat16, the dtype of q"),
    "no k_descale": (
        {"k": wide("k", "bfloat16"), "v": wide("v", "bfloat16")},
        "k_descale: given; none, as k is bfloat16 and no float8_e4m3fn",
    ),
    "no v_descale": (
        {"k": wide("k", "bfloat16"), "v": wide("v", "bfloat16"), "k_descale": lambda _: None},
        "v_descale: given; none, as k is bfloat16 and no float8_e4m3fn",
    ),
    "dtype": ({"k_descale": wide("k_descale", "float64")}, "k_descale: dtype float64; float32"),
    "rank": (
        {"v_descale": lambda x: x["v_descale"][0]},
        "v_descale: shape (2,); (1 or batch 2, 1 or num_heads_kv 2)",
    ),
    "shape": (
        {"k_descale": lambda x: x["k_descale"].repeat(2, 1)},
        "k_descale: shape (2, 4); (1 or batch 2, 1 or num_heads_kv 2)",
    ),
    "bias": (
        {"bias": lambda x: x["k"][:1, :1, :1, :1]},
        "bias: dtype float8_e4m3fn; float32, float16, bfloat16 or bool",
    ),
    "another narrow dtype": (
        {"k": lambda x: x["k"].astype("float8_e5m2")},
        "k: dtype float8_e5m2; float32, float16, bfloat16 or float8_e4m3fn",
    ),
}


@pytest.mark.parametrize(("changes", "line"), ERRORS.values(), ids=ERRORS)
def test_errors(changes, line):
    assert_invalid(line, **given(**changes))


def test_an_output_is_of_the_dtype_of_q():
    q, k, v = (given()[name] for name in "qkv")
    with pytest.raises(fs.InvalidArgument, match=r"^out: dtype float8_e4m3fn; bfloat16, the dt"):
        fs.mha_fwd(q, k, v, out=np.zeros(q.shape, FP8))


def test_outputs_share_no_memory_with_descales():
    arguments = given()
    q, k, v, k_descale = (arguments[name] for name in ("q", "k", "v", "k_descale"))
    lse = np.zeros((2, 4, 5), np.float32)
    shared = lse.reshape(-1)[:4].reshape(k_descale.shape)
    with pytest.raises(fs.InvalidArgument, match=r"^lse: overlaps k_descale; memory of"):
        fs.mha_fwd(q, k, v, lse=lse, k_descale=shared)


def test_there_is_no_backward():
    q, k, v = (given()[name] for name in "qkv")
    out, lse = fs.mha_fwd(q, k, v)
    line = "dtype float8_e4m3fn; the dtype of q, as float8_e4m3fn has no backward"
    for keys, values, name in ((k, v, "k"), (k.astype(q.dtype), v, "v")):
        with pytest.raises(fs.Unsupported) as caught:
            fs.mha_bwd(out, q, keys, values, out, lse)
        assert str(caught.value) == f"{name}: {line}"
        with pytest.raises(fs.Unsupported, match=rf"^{name}: {line}$"):
            fs.explain(q, keys, values, op="bwd")
