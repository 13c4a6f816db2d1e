"""What only the backward has: dlse, gradients that add up, rows and keys without partners."""

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, packed, problem, qkv
from flashsdk._testing import reference
from flashsdk._testing.problems import BandSpec

CAUSAL = BandSpec(None, 0, "bottom_right")


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256])
def test_head_dims(runner, head_dim):
    """Long enough for several tiles in both directions."""
    for dtype in runner.dtypes:
        runner.check(problem((150, 210), 1, head_dim, dtype=dtype))
        runner.check(problem((150, 210), 1, head_dim, dtype=dtype, mask=CAUSAL))


@pytest.mark.parametrize("mask", [None, CAUSAL, BandSpec(20, -3, "top_left")], ids=str)
def test_gradient_of_the_lse(runner, mask):
    for dtype in runner.dtypes:
        runner.check(problem((70, 90), (4, 2), 32, dtype=dtype, dlse=True, mask=mask))
        lengths = ((30, 40), (0, 5), (41, 20))
        runner.check(packed(lengths, (4, 2), 32, dtype=dtype, dlse=True, mask=mask))


def test_gradient_of_the_lse_alone():
    """With dout = 0 the gradient is that of sum(dlse·lse)."""
    q, k, v, dout = qkv((20, 30), (4, 2), 16)
    dlse = np.random.default_rng(1).standard_normal((2, 4, 20)).astype(np.float32)
    out, lse = fs.mha_fwd(q, k, v)
    dq, dk, dv = fs.mha_bwd(np.zeros_like(dout), q, k, v, out, lse, dlse=dlse)
    want = reference.backward(np.zeros_like(dout), q, k, v, dlse=dlse)
    assert np.abs(dq - want[0]).max() < 2e-6
    assert np.abs(dk - want[1]).max() < 2e-6
    assert not dv.any()


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_without_a_gradient_there_is_none(dtype):
    q, k, v, dout = qkv((70, 90), 2, 64, dtype=dtype)
    out, lse = fs.mha_fwd(q, k, v)
    for grad in fs.mha_bwd(np.zeros_like(dout), q, k, v, out, lse):
        assert not grad.astype(float).any()


def test_grouped_heads_add_their_gradients(runner):
    for dtype in runner.dtypes:
        runner.check(problem((65, 80), (12, 3), 40, dtype=dtype, mask=CAUSAL, dlse=True))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_new_arrays(dtype):
    q, k, v, dout = qkv((33, 47), (4, 2), (24, 40), dtype=dtype)
    out, lse = fs.mha_fwd(q, k, v)
    grads = fs.mha_bwd(dout, q, k, v, out, lse)
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
        assert grad.flags.c_contiguous
    for grad, want in zip(grads, reference.backward(dout, q, k, v), strict=True):
        bound = {"float32": 3e-6, "float16": 4e-3, "bfloat16": 4e-2}[dtype]
        assert np.abs(grad.astype(float) - want).max() < bound


def test_reads_the_given_out_and_lse():
    """delta comes from `out`, the probabilities from `lse`: another LSE scales them."""
    q, k, v, dout = qkv((20, 30), 2, 16)
    out, lse = fs.mha_fwd(q, k, v)
    dv = fs.mha_bwd(dout, q, k, v, out, lse)[2]
    half = fs.mha_bwd(dout, q, k, v, out, lse + np.float32(np.log(2)))[2]
    assert np.abs(half - dv / 2).max() < 1e-6
    dq, dk, dv_other = fs.mha_bwd(dout, q, k, v, np.zeros_like(out), lse)
    assert_same_bits([dv], [dv_other])
    delta = np.ascontiguousarray((dout * out).sum(axis=3).swapaxes(1, 2))
    again = fs.mha_bwd(dout, q, k, v, out, lse, dlse=delta)  # delta - dlse = 0 as well
    assert np.abs(again[0] - dq).max() < 1e-5
    assert np.abs(again[1] - dk).max() < 1e-5


@pytest.mark.parametrize("head_dim", [7, 64, 200])
def test_delta_is_the_dp_of_one_key(head_dim):
    """Summed in the same order, however many queries there are: dS, their difference, is 0."""
    for queries in (1, 2, 4, 5, 8, 9, 16, 17, 70):
        q, k, v, dout = qkv((queries, 1), 2, head_dim)
        _, lse = fs.mha_fwd(q, k, v)
        out = np.repeat(v, queries, axis=1)
        dq, dk, dv = fs.mha_bwd(dout, q, k, v, out, lse)
        assert not dq.any() and not dk.any() and dv.any()


def test_rows_and_keys_without_partners():
    """Exactly 0, also where the outputs held NaN."""
    q, k, v, dout = qkv((50, 20), 2, 16)
    mask = fs.SlidingWindow(3, 0)  # of 50 queries the first 30 see nothing
    out, lse = fs.mha_fwd(q, k, v, mask=mask, out=np.full_like(q, np.nan))
    assert not out[:, :30].any()
    assert np.isneginf(lse[:, :, :30]).all()
    assert np.isfinite(lse[:, :, 30:]).all()
    dq = fs.mha_bwd(dout, q, k, v, out, lse, mask=mask, dq=np.full_like(q, np.nan))[0]
    assert not dq[:, :30].any()
    assert dq[:, 31:].any(axis=-1).all()  # query 30 sees one key: its probability is 1

    mask = fs.Band(None, -1)  # causal without the diagonal: nobody sees the last key
    q, k, v, dout = qkv(40, 2, 16)
    out, lse = fs.mha_fwd(q, k, v, mask=mask)
    nan = np.full_like(k, np.nan)
    _, dk, dv = fs.mha_bwd(dout, q, k, v, out, lse, mask=mask, dk=nan, dv=nan.copy())
    for grad in (dk, dv):
        assert not grad[:, -1].any()
        assert grad[:, :-1].any(axis=-1).all()


def test_nobody_sees_anything():
    q, k, v, dout = qkv((50, 20), 2, 16)
    mask = fs.Band(-60, None)
    out, lse = fs.mha_fwd(q, k, v, mask=mask, out=np.full_like(q, np.nan))
    assert not out.any()
    assert np.isneginf(lse).all()
    nan = {f"d{name}": np.full_like(x, np.nan) for name, x in zip("qkv", (q, k, v), strict=True)}
    for grad in fs.mha_bwd(dout, q, k, v, out, lse, mask=mask, **nan):
        assert not grad.any()
