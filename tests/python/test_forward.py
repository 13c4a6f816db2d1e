"""Attention without features, forward and backward, over shapes; and the forward's own duties."""

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, problem, qkv
from flashsdk._testing import reference
from flashsdk._testing.problems import BandSpec, numpy_dtype

# Around the tile sizes that kernels like, and below one vector.
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 191, 193, 257, 385)


@pytest.mark.parametrize("seqlen_k", LENGTHS)
def test_key_lengths(runner, seqlen_k):
    for dtype in runner.dtypes:
        runner.check(problem((33, seqlen_k), 1, 64, dtype=dtype))
        runner.check(
            problem((33, seqlen_k), 1, 64, dtype=dtype, mask=BandSpec(None, 0, "bottom_right"))
        )


@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_query_lengths(runner, seqlen_q):
    for dtype in runner.dtypes:
        runner.check(problem((seqlen_q, 45), 1, 64, dtype=dtype))
        runner.check(
            problem((seqlen_q, 45), 1, 64, dtype=dtype, mask=BandSpec(None, 0, "top_left"))
        )


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("first", range(1, 257, 32))
def test_every_head_dim(runner, dtype, first):
    if dtype not in runner.dtypes:
        pytest.skip("this backend has no float32")
    for head_dim in range(first, first + 32):
        if runner.backend == "cpu" or head_dim % 8 == 0:
            runner.check(problem((5, 19), 1, head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim", [(64, 128), (128, 64), (192, 128), (7, 256), (256, 1), (1, 1)])
@pytest.mark.parametrize("dtype", CPU_DTYPES[1:])
def test_values_of_another_head_dim(runner, dtype, head_dim):
    if runner.backend != "cpu" and any(n % 8 for n in head_dim):
        pytest.skip("odd head dims are the CPU's")
    runner.check(problem((40, 53), 1, head_dim, dtype=dtype))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 2), (8, 1), (3, 3)])
def test_grouped_heads(runner, heads):
    for dtype in runner.dtypes:
        runner.check(problem((37, 41), heads, 24, batch=2, dtype=dtype))


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.25, 3.0])
def test_scale(runner, scale):
    for dtype in runner.dtypes:
        runner.check(problem((37, 41), 1, 64, dtype=dtype, softmax_scale=scale))


BANDS = [
    (None, None), (None, 0), (0, None), (0, 0), (5, 3), (64, 0), (None, -1), (-3, None), (-2, 9),
    (9, -2), (-5, 4), (1000, 1000), (-1000, None), (3, -4),
]  # fmt: skip


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("left, right", BANDS)
def test_bands(runner, left, right, alignment):
    """All shapes of the parallelogram, rows and keys without partners among them."""
    dtype = runner.dtypes[0]
    for seqlen in ((70, 70), (20, 150), (150, 20)):
        runner.check(problem(seqlen, 1, 16, dtype=dtype, mask=BandSpec(left, right, alignment)))


def test_one_long_sequence(runner):
    dtype = runner.dtypes[0]
    runner.check(problem((1, 3000), 1, 64, dtype=dtype))
    runner.check(problem((1500, 1100), 1, 16, dtype=dtype, mask=BandSpec(200, 0, "bottom_right")))


# ---- what the Python functions promise, on the CPU


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_new_arrays(dtype):
    q, k, v, _ = qkv((33, 47), (4, 2), (24, 40), dtype=dtype)
    out, lse = fs.mha_fwd(q, k, v)
    assert (out.shape, out.dtype) == ((2, 33, 4, 40), q.dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 33), np.float32)
    assert out.flags.c_contiguous
    assert lse.flags.c_contiguous
    exact, exact_lse = reference.forward(q, k, v)
    assert np.abs(lse - exact_lse).max() < 1e-4
    assert (
        np.abs(out.astype(float) - exact).max()
        < {"float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    )


def test_one_key_returns_its_value():
    q, k, v, _ = qkv((5, 1), 1, (16, 8))
    out, lse = fs.mha_fwd(q, k, v)
    assert np.abs(out / v - 1).max() < 2e-7  # two roundings
    score = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float64) / 4
    assert np.abs(lse - score[..., 0]).max() < 1e-6


def test_equal_keys_give_the_mean():
    q, k, v, _ = qkv((9, 64), 1, (16, 8))
    out, lse = fs.mha_fwd(q, np.zeros_like(k), v)
    assert np.abs(out - v.mean(axis=1, keepdims=True, dtype=np.float64)).max() < 1e-6
    assert np.abs(lse - np.log(64)).max() < 1e-6


def test_dense_is_no_mask():
    q, k, v, _ = qkv()
    for a, b in zip(fs.mha_fwd(q, k, v), fs.mha_fwd(q, k, v, mask=fs.Dense()), strict=True):
        assert np.array_equal(a, b)


def test_scale_defaults_to_the_root_of_head_dim():
    q, k, v, _ = qkv(head_dim=20)
    for a, b in zip(fs.mha_fwd(q, k, v), fs.mha_fwd(q, k, v, softmax_scale=20**-0.5), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_no_keys(dtype):
    q, k, v, dout = qkv((5, 0), 2, 16, dtype=dtype)
    out, lse = fs.mha_fwd(q, k, v)
    assert not out.astype(float).any()
    assert np.isneginf(lse).all()
    dq, dk, dv = fs.mha_bwd(dout, q, k, v, out, lse)
    assert not dq.astype(float).any()
    assert dk.shape == k.shape
    assert dv.shape == v.shape


def test_no_queries():
    q, k, v, dout = qkv((0, 7), (4, 2), 16)
    out, lse = fs.mha_fwd(q, k, v)
    assert out.shape == q.shape
    assert lse.shape == (2, 4, 0)
    dq, dk, dv = fs.mha_bwd(
        dout, q, k, v, out, lse, dk=np.full_like(k, np.nan), dv=np.full_like(v, np.nan)
    )
    assert dq.shape == q.shape
    assert not dk.any()
    assert not dv.any()


def test_no_batch():
    q, k, v, dout = qkv((3, 7), 2, 16, batch=0)
    out, lse = fs.mha_fwd(q, k, v)
    assert [x.shape for x in fs.mha_bwd(dout, q, k, v, out, lse)] == [q.shape, k.shape, v.shape]


def test_many_heads_and_batches():
    q, k, v, _ = qkv((3, 5), (64, 8), 8, batch=9, dtype="bfloat16")
    out, _ = fs.mha_fwd(q, k, v)
    exact, _ = reference.forward(q, k, v)
    assert np.abs(out.astype(float) - exact).max() < 3e-2
    assert numpy_dtype("bfloat16") == out.dtype
