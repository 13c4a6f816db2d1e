"""Keys in pages: the same bits as in one piece, wherever the pages lie and whoever shares them."""

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_invalid, assert_same_bits, into_pages, normal, qkv
from flashsdk._testing import reference
from flashsdk._testing.problems import BandSpec, numpy_dtype

KEYS = 530  # from 512 on a GPU has kernels of few rows
MASKS = {
    "dense": {},
    "causal": {"mask": fs.Causal()},
    "window": {"mask": fs.SlidingWindow(70, 3)},
    "bias": {"bias": normal((4, 1, 1, KEYS))[0]},
    "features": {"mask": fs.Causal(), "softcap": 3.0, "dropout_p": 0.2, "seed": 5},
}
PAGE_SIZES = (1, 3, 16, 24, 48, 64, 1000)


def in_one_piece(pages, table, seqlen):
    """The keys of pages as a batch has them; behind the lengths of any page."""
    rows = pages[np.maximum(table, 0)].reshape(len(table), -1, *pages.shape[2:])
    return rows[:, :seqlen]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("features", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("seqlen_q", [1, 3, 90])
def test_pages_are_the_keys_in_one_piece(runner, seqlen_q, features, page_size):
    """In one piece that is as long as the table: that, too, decides how a GPU computes."""
    used = np.array([KEYS, 1, 0, 200], np.int32)
    for dtype in runner.dtypes:
        q, k, v, _ = qkv((seqlen_q, KEYS), (4, 2), (40, 24), batch=4, dtype=dtype)
        pages_k, pages_v, table = into_pages(k, v, used, page_size)
        room = table.shape[1] * page_size
        given = dict(features)
        if "bias" in features:  # its columns are those of the table
            given["bias"] = np.pad(features["bias"], [(0, 0)] * 3 + [(0, room - KEYS)])
        whole = tuple(in_one_piece(x, table, room) for x in (pages_k, pages_v))
        want = runner.call("mha_fwd", q, *whole, seqused_k=used, **given)
        got = runner.call(
            "mha_fwd", q, pages_k, pages_v, seqused_k=used, block_table=table, **given
        )
        assert_same_bits(got, want)


TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.mark.parametrize("page_size", [16, 100])
def test_the_definition(runner, page_size):
    used = np.array([130, 41], np.int32)
    band = BandSpec(None, 0, "bottom_right")
    for dtype in runner.dtypes:
        q, k, v, _ = qkv((30, 130), (4, 2), 32, batch=2, dtype=dtype)
        pages_k, pages_v, table = into_pages(k, v, used, page_size)
        out, lse = runner.call(
            "mha_fwd", q, pages_k, pages_v, seqused_k=used, block_table=table, mask=fs.Causal()
        )
        want = reference.forward(q, k, v, seqused_k=used, mask=band)
        for ours, exact in zip((out, lse), want, strict=True):
            np.testing.assert_allclose(ours.astype(float), exact, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("page_size", [7, 16, 48, 128])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_long_sequences_in_parts(runner, head_dim, page_size):
    """Also the room of the table is the same, as that decides how a GPU cuts them."""
    used = np.array([9024, 4200, 0, 1], np.int32)
    for dtype in runner.dtypes:
        q, k, v, _ = qkv((2, 9024), (2, 1), head_dim, batch=4, dtype=dtype)
        pages_k, pages_v, table = into_pages(k, v, used, page_size)
        room = table.shape[1] * page_size
        whole = tuple(in_one_piece(x, table, room) for x in (pages_k, pages_v))
        want = runner.call("mha_fwd", q, *whole, seqused_k=used)
        got = runner.call("mha_fwd", q, pages_k, pages_v, seqused_k=used, block_table=table)
        assert_same_bits(got, want)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_head_dims(dtype, head_dim):
    used = np.array([333], np.int32)
    q, k, v, _ = qkv((70, 333), (2, 1), head_dim, batch=1, dtype=dtype)
    pages_k, pages_v, table = into_pages(k, v, used, 32)
    got = fs.mha_fwd(q, pages_k, pages_v, seqused_k=used, block_table=table)
    assert_same_bits(got, fs.mha_fwd(q, k, v))


def test_sequences_may_share_pages():
    """A prefix that all have is there once."""
    k, v, q = normal((6, 16, 2, 32), (6, 16, 2, 32), (2, 5, 4, 32))
    table = np.array([[3, 0, 5], [3, 0, 1]], np.int32)
    used = np.array([40, 48], np.int32)
    got = fs.mha_fwd(q, k, v, seqused_k=used, block_table=table)
    whole = (x[table].reshape(2, 48, 2, 32) for x in (k, v))
    assert_same_bits(got, fs.mha_fwd(q, *whole, seqused_k=used))


def test_pages_in_any_layout():
    """As (num_pages, num_heads_kv, page_size, head_dim) in memory, as some caches lie."""
    used = np.array([100, 33], np.int32)
    q, k, v, _ = qkv((4, 100), (4, 2), 32)
    pages_k, pages_v, table = into_pages(k, v, used, 16)
    other = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (pages_k, pages_v))
    wide = np.concatenate([table, table], axis=1)[:, : table.shape[1]]  # rows with a gap
    got = fs.mha_fwd(q, *other, seqused_k=used, block_table=wide)
    assert_same_bits(got, fs.mha_fwd(q, k, v, seqused_k=used))


def given(**changes):
    k, v, q = normal((4, 16, 2, 32), (4, 16, 2, 32), (2, 5, 4, 32))
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "seqused_k": np.array([20, 48], np.int32),
        "block_table": np.array([[0, 1, 9], [3, 2, 1]], np.int32),
    }
    return arguments | changes


def test_indices_behind_a_length_are_not_read():
    out, _ = fs.mha_fwd(**given())
    assert np.isfinite(out).all()


ERRORS = {
    "outside": (
        {"block_table": np.array([[0, 4, 0], [3, 2, 1]], np.int32)},
        "block_table: 4 at [0, 1]; 0 to 3, the pages of k",
    ),
    "negative": (
        {"block_table": np.array([[0, 1, 0], [3, 2, -1]], np.int32)},
        "block_table: -1 at [1, 2]; 0 to 3, the pages of k",
    ),
    "too long": (
        {"seqused_k": np.array([20, 49], np.int32)},
        "seqused_k: 49 of sequence 1; 0 to seqlen_k, which is 48",
    ),
    "no lengths": (
        {"seqused_k": None},
        "block_table: given; none without seqused_k, the lengths",
    ),
    "dtype": ({"block_table": np.zeros((2, 3), np.int64)}, "block_table: dtype int64; int32"),
    "shape": (
        {"block_table": np.zeros((3, 3), np.int32)},
        "block_table: shape (3, 3); (batch 2, max_pages)",
    ),
    "v": (
        {"v": np.zeros((5, 16, 2, 32), np.float32)},
        "v: shape (5, 16, 2, 32); (num_pages 4, page_size 16, num_heads_kv 2, head_dim_v 32)",
    ),
}


@pytest.mark.parametrize(("changes", "line"), ERRORS.values(), ids=ERRORS)
def test_errors(changes, line):
    assert_invalid(line, **given(**changes))


def test_there_is_no_backward():
    arguments = given()
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(fs.Unsupported, match=r"^block_table: given; none, as pages have no back"):
        fs.explain(q, k, v, op="bwd", **arguments)


def test_packed_sequences_have_no_pages():
    arguments = given()
    q, k, v = (arguments.pop(name)[0] for name in "qkv")
    cu = np.array([0, 5], np.int32)
    with pytest.raises(fs.InvalidArgument, match=r"^block_table: given; none, as sequences are p"):
        fs.explain(q, k, v, cu, cu, 5, 5, **arguments)


def test_no_pages_at_all():
    q = normal((2, 5, 4, 32))[0]
    k = np.zeros((0, 16, 2, 32), numpy_dtype("float32"))
    table, used = np.zeros((2, 0), np.int32), np.zeros(2, np.int32)
    out, lse = fs.mha_fwd(q, k, k, seqused_k=used, block_table=table)
    assert not out.any()
    assert (lse == -np.inf).all()
