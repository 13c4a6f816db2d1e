"""One query a sequence and grouped heads: the heads of a group are computed as rows of one head."""

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, packed, problem, qkv
from flashsdk._testing import reference
from flashsdk._testing.problems import BandSpec, Blocks

PACKED = "query heads packed: 4 rows a head of keys"
GROUPS = [(2, 1), (8, 2), (16, 2), (32, 1)]
MASKS = [
    None, BandSpec(None, 0, "bottom_right"), BandSpec(63, 0, "bottom_right"),
    BandSpec(100, -20, "bottom_right"), BandSpec(5, 77, "top_left"), BandSpec(-3, 2, "top_left"),
]  # fmt: skip


def packing(*arrays, **keywords):
    return fs.explain(*arrays, **keywords).packing


@pytest.mark.parametrize("heads", GROUPS, ids=lambda h: f"{h[0]}:{h[1]}")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_groups(runner, heads, mask):
    for dtype in runner.dtypes:
        runner.check(problem((1, 110), heads, 64, batch=2, dtype=dtype, mask=mask, dlse=True))


@pytest.mark.parametrize("seed", range(8))
def test_strides(runner, seed):
    """Arrays scattered in memory, lse and dlse among them."""
    dtype = runner.dtypes[seed % len(runner.dtypes)]
    features = {"softcap": 4.0 if seed % 2 else 0.0, "mask": MASKS[seed % 4], "dlse": True}
    where = {"strides": True, "negative_strides": runner.backend == "cpu"}
    runner.check(
        problem((1, 90), (8, 2), (40, 24), batch=3, dtype=dtype, seed=seed, **features, **where)
    )


@pytest.mark.parametrize("per_head", [1, 8])
@pytest.mark.parametrize("kind", ["float32", "float16", "bool"])
def test_bias(runner, kind, per_head):
    """A bias has a row for each head, or one for all."""
    bias = (kind, (1, per_head, 1, 90))
    for mask in (None, BandSpec(40, 0, "bottom_right")):
        runner.check(
            problem((1, 90), (8, 2), 64, dtype=runner.dtypes[0], bias=bias, mask=mask, batch=2)
        )


def test_what_belongs_to_a_head_stays_with_it(runner):
    """Slopes and dropout's pattern, of each head its own."""
    for features in ({"alibi": "heads"}, {"dropout_p": 0.4}):
        runner.check(problem((1, 90), (8, 2), 64, dtype=runner.dtypes[0], batch=2, **features))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("mask", [None, fs.Causal(), fs.SlidingWindow(60, 0)])
def test_grouped_heads_are_repeated_heads(dtype, mask):
    q, k, v, _ = qkv((1, 90), (8, 2), 40, dtype=dtype)
    out, lse = fs.mha_fwd(q, k, v, mask=mask)
    wide, wide_lse = fs.mha_fwd(q, *(np.repeat(x, 4, axis=2) for x in (k, v)), mask=mask)
    unit = {"float32": 2**-20, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    assert np.abs(out.astype(float) - wide.astype(float)).max() <= unit * np.abs(wide).max()
    assert np.abs(lse - wide_lse).max() <= 1e-5


def dims_of(runner):
    """On a GPU of all kernels that split keys."""
    wide = [512] if runner.backend == "sm80" else []
    return [40] if runner.backend == "cpu" else [40, (128, 72), 256, *wide]


LONG = [
    ((1, 2500), (4, 1), {}),
    ((1, 2499), (3, 3), {"mask": BandSpec(2200, 0, "bottom_right")}),
    ((5, 2100), (4, 2), {"mask": BandSpec(None, 0, "bottom_right"), "dlse": True}),
    ((70, 1800), 1, {"mask": BandSpec(1750, -7, "bottom_right")}),
    ((9, 3000), 1, {"mask": BandSpec(None, 1900, "top_left")}),
    ((2, 2000), (2, 1), {"softcap": 6.0, "alibi": "heads"}),
    ((3, 2000), 2, {"bias": ("float32", (1, 1, 3, 2000)), "dropout_p": 0.3}),
    ((1, 2000), (4, 2), {"bias": ("bool", (2, 1, 1, 2000)), "batch": 2}),
    ((1, 2000), 2, {"values": "huge"}),
]


@pytest.mark.parametrize("seqlen, heads, features", LONG, ids=str)
def test_many_keys(runner, seqlen, heads, features):
    """So many that a GPU splits them among thread blocks, in kernels of several head dimensions."""
    for i, dim in enumerate(dims_of(runner)):
        dtype = runner.dtypes[i % len(runner.dtypes)]
        runner.check(problem(seqlen, heads, dim, dtype=dtype, **features))


FEW = {
    "causal": {"mask": BandSpec(None, 0, "bottom_right")},
    "window": {"mask": BandSpec(300, -1, "bottom_right"), "dlse": True},
    "top left": {"mask": BandSpec(3, 400, "top_left")},
    "sink and softcap": {"sink": True, "softcap": 5.0},
    "strides": {"strides": True, "mask": BandSpec(None, 0, "bottom_right")},
    "used": {"used_q": (2, 0), "used_k": (1700, 33), "mask": BandSpec(None, 0, "bottom_right")},
    "bias": {"bias": ("bool", (1, 1, 2, 2100))},
    "slopes": {"alibi": "heads"},
}


@pytest.mark.parametrize("features", FEW.values(), ids=FEW)
@pytest.mark.parametrize(
    "queries, heads", [(2, (4, 2)), (2, (12, 4)), (3, (8, 1)), (16, (16, 2)), (43, (6, 2))], ids=str
)
def test_few_queries_of_grouped_heads(runner, queries, heads, features):
    """On a GPU the queries of a group share a tile, up to 128 of them."""
    if "bias" in features:
        features = features | {"bias": ("bool", (1, 1, queries, 2100))}
    for i, dim in enumerate(dims_of(runner)):
        dtype = runner.dtypes[i % len(runner.dtypes)]
        runner.check(problem((queries, 2100), heads, dim, batch=2, dtype=dtype, **features))


UNEQUAL = {
    "plain": {},
    "causal": {"mask": BandSpec(None, 0, "bottom_right")},
    "window": {"mask": BandSpec(1500, -1, "bottom_right"), "dlse": True},
    "sink and softcap": {"sink": True, "softcap": 5.0},
    "strides": {"strides": True},
    "bias": {"bias": ("bool", (5, 1, 1, 2600))},
    "slopes": {"alibi": "heads"},
    "huge": {"values": "huge"},
}


@pytest.mark.parametrize("features", UNEQUAL.values(), ids=UNEQUAL)
@pytest.mark.parametrize("queries, heads", [(1, (8, 2)), (1, (3, 3)), (4, (8, 2))], ids=str)
def test_unequal_lengths(runner, queries, heads, features):
    """On a GPU each thread block plans how the keys of all sequences are shared out."""
    used = {"used_k": (2600, 0, 1, 700, 1100)}
    if queries > 1:
        used["used_q"] = (queries, 1, queries, 0, queries)
    for i, dim in enumerate(dims_of(runner)):
        dtype = runner.dtypes[i % len(runner.dtypes)]
        runner.check(problem((queries, 2600), heads, dim, batch=5, dtype=dtype, **used, **features))


@pytest.mark.parametrize("batch, queries", [(2, 0), (0, 4), (0, 0)])
def test_no_queries_of_many_keys(runner, batch, queries):
    """Grouped heads, whose queries would share a tile."""
    dtype = runner.dtypes[-1]
    q, k, v, _ = qkv((queries, 700), (8, 2), 64, batch=batch, dtype=dtype)
    out, lse = runner.call("mha_fwd", q, k, v)
    assert (out.shape, lse.shape) == (q.shape, (batch, 8, queries))


def test_many_unequal_lengths(runner):
    """More sequences than the kernel that plans has threads."""
    used = tuple((37 * b * b) % 1200 for b in range(300))
    runner.check(problem((1, 1200), 1, 16, batch=300, dtype=runner.dtypes[0], used_k=used))


def test_few_queries_of_packed_sequences_and_grouped_heads(runner):
    lengths = ((2, 1500), (0, 70), (5, 0), (3, 90), (1, 700), (5, 513))
    for mask in MASKS[:3]:
        runner.check(packed(lengths, (8, 2), 64, dtype=runner.dtypes[0], mask=mask, tail=(3, 4)))


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("head_dim", [64, (96, 48), (16, 256), (256, 16)], ids=str)
def test_few_queries(runner, queries, head_dim):
    """On a CPU they read K and V where they lie: as many as are few, one less and one more."""
    masks = [None, BandSpec(None, 0, "bottom_right"), BandSpec(150, -3, "bottom_right")]
    rows = -(-queries // 16)
    partial, full = np.random.default_rng(0).random((2, 1, 4, rows, 26)) < 0.3
    masks += [BandSpec(7, 201, "top_left"), Blocks(partial & ~full, full, (16, 16), masks[1])]
    for i, mask in enumerate(masks):
        dtype = runner.dtypes[(i + queries) % len(runner.dtypes)]
        values = {"values": "huge"} if i == 0 else {"negative_strides": runner.backend == "cpu"}
        runner.check(problem((queries, 407), (4, 2), head_dim, dtype=dtype, mask=mask, **values))


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("head_dim", [16, (64, 40), 96], ids=str)
def test_heads_that_interleave(runner, head_dim, queries):
    """On a CPU they take turns in a job: more than it has room for, and of unequal lengths."""
    masks = [None, BandSpec(None, 0, "bottom_right"), BandSpec(900, 0, "bottom_right")]
    for i, mask in enumerate(masks):
        dtype = runner.dtypes[(i + queries) % len(runner.dtypes)]
        features = {"mask": mask, "dtype": dtype, "forward_only": True}
        if i < 2:
            features["used_k"] = (4100, 70)  # of two parts, and of one
        runner.check(problem((queries, 4100), 15, head_dim, batch=2, **features))


@pytest.mark.parametrize("head_dim", [40, 64, 128, 200, 257, 512])
def test_scores_of_few_queries_are_those_of_many(runner, head_dim):
    """To the last bit in float32, as the backward takes P from scores of its own and this lse."""
    if "float32" not in runner.dtypes:
        pytest.skip("no float32 on a GPU")
    q, k, v, _ = qkv((40, 1), 2, head_dim, dtype="float32")
    many = runner.call("mha_fwd", q, k, v)[1]
    for queries in (1, 2, 4, 7, 9):
        few = runner.call("mha_fwd", q[:, :queries], k, v)[1]
        assert np.array_equal(few, many[..., :queries])


@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_many_keys_of_packed_sequences(runner, mask):
    """One of them long, others short or without keys, and rows behind the last."""
    lengths = ((1, 2500), (0, 70), (3, 0), (2, 90), (66, 300), (1, 1))
    runner.check(packed(lengths, (4, 2), 40, dtype=runner.dtypes[0], mask=mask, tail=(3, 4)))


def test_explain_tells():
    q, k, v, _ = qkv((1, 90), (8, 2), 40)
    assert packing(q, k, v) == PACKED
    assert packing(q, k, v, op="bwd") == PACKED
    assert str(fs.explain(q, k, v)).splitlines()[1] == f"  {PACKED}"
    assert packing(q, k, v, mask=fs.SlidingWindow(20, 0)) == PACKED
    assert packing(q, k[:, :, :1], v[:, :, :1]) == PACKED.replace("4", "8")


@pytest.mark.parametrize(
    "why, keywords",
    [
        ("slopes", {"alibi_slopes": np.ones(8, np.float32)}),
        ("dropout", {"dropout_p": 0.1}),
        ("blocks", {"mask": fs.layouts.dense(1, 90, 16)}),
        ("no key", {"mask": fs.Band(-3, 2)}),
        ("gradients of hidden keys", {"mask": fs.SlidingWindow(20, 0), "op": "bwd"}),
    ],
)
def test_explain_tells_of_no_packing(why, keywords):
    q, k, v, _ = qkv((1, 90), (8, 2), 40)
    assert packing(q, k, v, **keywords) == "", why


def test_no_packing_without_groups_or_with_more_queries():
    assert packing(*qkv((1, 90), 8, 40)[:3]) == ""
    assert packing(*qkv((2, 90), (8, 2), 40)[:3]) == ""
    q, k, v, _ = qkv((1, 90), (8, 2), 40)
    cu = [np.arange(3, dtype=np.int32) * n for n in (1, 90)]
    assert packing(*(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)), *cu, 1, 90) == ""


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_outputs_of_the_callers_own(dtype):
    """In any stride, with nothing written beside them; q may be read-only."""
    q, k, v, dout = qkv((1, 90), (8, 2), (40, 24), batch=3, dtype=dtype)
    want = fs.mha_fwd(q, k, v)
    q.flags.writeable = False
    wide_out = np.full((3, 2, 16, 40), np.nan, q.dtype)
    wide_lse = np.full((8, 3, 5), np.nan, np.float32)
    out, lse = wide_out[::-1, 1:, 14::-2, 7:31], wide_lse.transpose(1, 0, 2)[..., 2:3]
    assert_same_bits(fs.mha_fwd(q, k, v, out=out, lse=lse), want)
    grads = fs.mha_bwd(dout, q, k, v, out, lse)
    assert_same_bits(grads, fs.mha_bwd(dout, q, k, v, *want))
    out[...] = lse[...] = np.nan
    assert np.isnan(wide_out.astype(np.float32)).all()
    assert np.isnan(wide_lse).all()


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_heads_of_one_array(dtype):
    """q broadcast over heads: all rows of a group are the same."""
    q, k, v, _ = qkv((1, 90), (8, 2), 40, dtype=dtype)
    wide = np.broadcast_to(q[:, :, :1], q.shape)
    assert packing(wide, k, v) == PACKED
    assert_same_bits(fs.mha_fwd(wide, k, v), fs.mha_fwd(wide.copy(), k, v))


def test_no_keys():
    q, k, v, dout = qkv((1, 0), (8, 2), 40)
    out, lse = fs.mha_fwd(q, k, v)
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    dq, dk, dv = fs.mha_bwd(dout, q, k, v, out, lse)
    assert (dq == 0).all()
    assert dk.size == dv.size == 0


def test_no_batch():
    q, k, v, dout = qkv((1, 90), (8, 2), 40, batch=0)
    for mask in (fs.SlidingWindow(20, 0), None):
        out, lse = fs.mha_fwd(q, k, v, mask=mask)
        assert (out.shape, lse.shape) == ((0, 1, 8, 40), (0, 8, 1))
    assert [x.shape for x in fs.mha_bwd(dout, q, k, v, out, lse)] == [q.shape, k.shape, v.shape]


def test_a_window_hides_what_it_leaves_out():
    """NaN outside of it reaches nothing."""
    q, k, v, _ = qkv((1, 90), (8, 2), 40)
    mask = fs.SlidingWindow(30, -5)
    seen = np.s_[:, 90 - 31 : 90 - 5]
    want, want_lse = reference.forward(q, k[seen], v[seen])
    for x in (k, v):
        hidden = np.full_like(x, np.nan)
        hidden[seen] = x[seen]
        x[...] = hidden
    out, lse = fs.mha_fwd(q, k, v, mask=mask)
    assert np.abs(out - want).max() < 2e-6
    assert np.abs(lse - want_lse).max() < 1e-5


def test_errors_name_what_was_given():
    q, k, v, _ = qkv((1, 90), (8, 2), 40)
    with pytest.raises(fs.Error, match=r"^out: shape \(2, 4, 2, 40\); \(batch 2, seqlen_q 1, num"):
        fs.mha_fwd(q, k, v, out=np.empty((2, 4, 2, 40), np.float32))
    with pytest.raises(fs.Error, match=r"^lse: shape \(2, 2, 4\); \(batch 2, num_heads 8, seqlen"):
        fs.mha_fwd(q, k, v, lse=np.empty((2, 2, 4), np.float32))
    with pytest.raises(fs.Error, match=r"^out: overlaps q; memory of its own"):
        fs.mha_fwd(q, k, v, out=q)
    shared = np.lib.stride_tricks.as_strided(np.empty(1000, np.float32), q.shape, (320, 320, 0, 4))
    with pytest.raises(fs.Error, match=r"^out: .* an output whose elements do not share memory"):
        fs.mha_fwd(q, k, v, out=shared)
