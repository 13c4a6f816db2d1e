"""Attention sinks: a logit of each head that joins the softmax and has no value."""

import flashsdk as fs
import numpy as np
import pytest
from cases import assert_same_bits, both, packed, problem, qkv
from flashsdk._testing import reference
from flashsdk._testing.problems import BandSpec, generate

SHAPES = {
    "square": ((60, 60), {}),
    "more keys": ((33, 250), {"mask": BandSpec(None, 0, "bottom_right"), "dlse": True}),
    "blind rows": ((70, 20), {"mask": BandSpec(5, 0, "bottom_right"), "dlse": True}),
    "few queries": ((3, 150), {"mask": BandSpec(20, 0, "bottom_right")}),
    "decoding": ((1, 150), {}),
    "in parts": ((2, 6500), {}),
    "features": ((40, 50), {"dropout_p": 0.2, "softcap": 4.0, "alibi": "heads", "dlse": True}),
    "used": ((40, 50), {"used_q": (11, 40), "used_k": (50, 0), "dlse": True}),
    "no keys": ((4, 0), {"dlse": True}),
    "scale 0": ((40, 20), {"mask": BandSpec(5, 0, "bottom_right"), "softmax_scale": 0.0}),
    "scale 0, no keys": ((4, 0), {"softmax_scale": 0.0, "dlse": True}),
}


@pytest.mark.parametrize(("seqlen", "features"), SHAPES.values(), ids=SHAPES)
def test_sinks(runner, seqlen, features):
    for dtype in runner.dtypes:
        runner.check(problem(seqlen, (4, 2), 32, batch=2, dtype=dtype, sink=True, **features))


def test_packed_sequences(runner):
    lengths = ((17, 30), (0, 4), (5, 0), (40, 3))
    runner.check(
        packed(lengths, (4, 2), 32, dtype=runner.dtypes[-1], sink=True, tail=(3, 2), dlse=True)
    )


@pytest.mark.parametrize("magnitude", [30, 1e4])
def test_logits_whose_row_sums_are_taken_anew(runner, magnitude):
    """Beyond what float32 says of an lse the backward adds up the row again, and its sink."""
    for dtype in runner.dtypes:
        runner.check(
            problem((40, 60), 2, 16, dtype=dtype, magnitude=magnitude, sink=True, dlse=True)
        )


@pytest.mark.parametrize("seqlen_k", [60, 1])
@pytest.mark.parametrize("dropout_p", [0.0, 0.9])
def test_keys_that_weigh_less_than_a_rounding_of_the_sink(runner, seqlen_k, dropout_p):
    """The lse of every third row, or of all, is the sink's, as where no key is seen.

    Where the one key is dropped out is zeros as well, but lse has a gradient: one that bfloat16
    has digits for.
    """
    for dtype in runner.dtypes:
        bias = (dtype, (1, 2, 40, seqlen_k))
        runner.check(
            problem((40, seqlen_k), 2, 64, dtype=dtype, bias=bias, low_bias=-30.0, sink=True,
                    dropout_p=dropout_p, dlse=True)
        )  # fmt: skip


def test_random_problems_have_sinks():
    assert sum(generate(seed).sink for seed in range(60)) > 5


@pytest.mark.parametrize("sink", [-np.inf, -1e30, 0.0, 700.0, 1e6, 1e30])
def test_a_sink_of_any_size(sink):
    """From one that counts for nothing to one that takes all of P."""
    q, k, v, dout = qkv((20, 30), 1, 16, batch=1)
    sinks = np.array([sink], np.float32)
    out, lse, dq, dk, dv, dsink = both(q, k, v, dout, sink=sinks)
    want = reference.forward_backward(dout, q, k, v, sink=sinks)
    for ours, exact in zip((out, lse, dq, dk, dv, dsink), want, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)
    if sink == -np.inf:
        assert dsink == 0


@pytest.mark.parametrize("sink", [-33.0, 33.0, 90.0, 2000.0, 1e30])
def test_rows_that_see_no_key_beside_a_large_sink(runner, sink):
    """Their lse is the sink, and so are they all that it has a gradient from."""
    band = BandSpec(None, 0, "bottom_right")
    sinks = np.array([sink, -sink], np.float32)
    for dtype in runner.dtypes:
        q, k, v, dout = qkv((6, 4), 2, 16, batch=1, dtype=dtype)
        dlse = np.linspace(0.5, 2, 12, dtype=np.float32).reshape(1, 2, 6)
        given = {"mask": fs.Causal(), "sink": sinks}
        out, lse = runner.call("mha_fwd", q, k, v, **given)
        *_, dsink = runner.call("mha_bwd", dout, q, k, v, out, lse, dlse=dlse, **given)
        want = reference.forward_backward(dout, q, k, v, mask=band, sink=sinks, dlse=dlse)[-1]
        np.testing.assert_allclose(dsink, want, rtol=2e-2, atol=2e-2)


def test_rows_that_see_no_key_or_are_not_used():
    q, k, v, _ = qkv((5, 4), 2, 16, batch=1)
    sink = np.array([0.5, -2.0], np.float32)
    out, lse = fs.mha_fwd(q, k, v, sink=sink, mask=fs.Causal(), seqused_q=np.array([4], np.int32),
                          seqused_k=np.array([2], np.int32))  # fmt: skip
    assert not out[0, :2].any()
    assert not out[0, 4:].any()
    assert np.array_equal(lse[0, :, :2], sink[:, None].repeat(2, 1))
    assert (lse[0, :, 4] == -np.inf).all()


def test_where_the_gradient_is_written():
    q, k, v, dout = qkv()
    sink = np.zeros(2, np.float32)
    out, lse = fs.mha_fwd(q, k, v, sink=sink)
    mine = np.full(4, np.nan, np.float32)
    *_, dsink = fs.mha_bwd(dout, q, k, v, out, lse, sink=sink, dsink=mine[1:3])
    assert np.isnan(mine[[0, 3]]).all()
    assert_same_bits([dsink], [fs.mha_bwd(dout, q, k, v, out, lse, sink=sink)[3]])


def test_threads_change_no_bit():
    q, k, v, dout = qkv((300, 300), 4, 32)
    sink = np.linspace(-1, 1, 4, dtype=np.float32)
    before = fs.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            fs.set_num_threads(threads)
            results.append(both(q, k, v, dout, sink=sink))
    finally:
        fs.set_num_threads(before)
    assert_same_bits(*results)


ERRORS = {
    "dtype": ({"sink": np.zeros(2)}, "sink: dtype float64; float32"),
    "shape": ({"sink": np.zeros(3, np.float32)}, "sink: shape (3,); (num_heads 2)"),
}


@pytest.mark.parametrize(("given", "line"), ERRORS.values(), ids=ERRORS)
def test_errors(given, line):
    q, k, v, dout = qkv()
    out, lse = fs.mha_fwd(q, k, v)
    for call in (
        lambda: fs.mha_fwd(q, k, v, **given),
        lambda: fs.mha_bwd(dout, q, k, v, out, lse, **given),
    ):
        with pytest.raises(fs.InvalidArgument) as caught:
            call()
        assert str(caught.value) == line


def test_a_gradient_of_no_sink():
    q, k, v, dout = qkv()
    out, lse = fs.mha_fwd(q, k, v)
    with pytest.raises(fs.InvalidArgument, match=r"^dsink: given; none, as there is no sink$"):
        fs.mha_bwd(dout, q, k, v, out, lse, dsink=np.zeros(2, np.float32))
