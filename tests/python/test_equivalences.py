"""Different ways to say the same attention, and the same way on different machines."""

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, both, problem, qkv
from flashsdk._testing.problems import BandSpec, generate, inputs


def assert_close(a, b, dtype) -> None:
    """Up to the order of sums, and where that shows, one rounding of the output."""
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(np.isneginf(x), np.isneginf(y))
        # Doubles first: NumPy before 1.24 knows no common type of 0 and a bfloat16.
        x, y = (np.where(np.isneginf(z), 0, z.astype(float)) for z in (x, y))
        unit = {"float32": 2**-19, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
        assert np.abs(x - y).max() <= unit * max(1, np.abs(y).max())


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("block_size", [16, 64, (128, 32)])
def test_a_layout_of_all_blocks_is_dense(dtype, block_size):
    x = qkv((150, 203), (4, 2), 40, dtype=dtype)
    assert_close(both(*x, mask=fs.layouts.dense(150, 203, block_size)), both(*x), dtype)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("seqlen", [(150, 150), (100, 203), (203, 100)])
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_block_sparse_causal_is_causal(dtype, seqlen, block_size):
    x = qkv(seqlen, (4, 2), 40, dtype=dtype)
    assert_close(
        both(*x, mask=fs.layouts.causal(*seqlen, block_size)), both(*x, mask=fs.Causal()), dtype
    )


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_block_sparse_window_is_window(dtype):
    x = qkv((190, 190), 2, 40, dtype=dtype)
    mask = fs.layouts.sliding_window(190, 190, 32, left=60, right=5)
    assert_close(both(*x, mask=mask), both(*x, mask=fs.SlidingWindow(60, 5)), dtype)


def test_an_unlimited_band_is_dense():
    x = qkv((70, 90), 2, 40)
    assert_close(both(*x, mask=fs.SlidingWindow(None, None)), both(*x), "float32")
    assert_close(both(*x, mask=fs.SlidingWindow(10**6, 10**6)), both(*x), "float32")
    assert_close(both(*x, mask=fs.SlidingWindow(None, 0)), both(*x, mask=fs.Causal()), "float32")


def test_alignments_agree_on_squares():
    x = qkv((90, 90), 2, 40)
    for left, right in ((None, 0), (20, 5), (-2, 30)):
        masks = [fs.SlidingWindow(left, right, alignment=a) for a in ("bottom_right", "top_left")]
        assert_same_bits(both(*x, mask=masks[0]), both(*x, mask=masks[1]))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
def test_grouped_heads_are_repeated_heads(dtype, heads):
    q, k, v, dout = qkv((70, 90), heads, 40, dtype=dtype)
    group = heads[0] // heads[1]
    grouped = both(q, k, v, dout, mask=fs.Causal())
    out, lse, dq, dk, dv = both(
        q, *(np.repeat(x, group, axis=2) for x in (k, v)), dout, mask=fs.Causal()
    )
    dk, dv = (
        x.astype(np.float32).reshape(*x.shape[:2], heads[1], group, -1).sum(axis=3).astype(x.dtype)
        for x in (dk, dv)
    )
    assert_same_bits(grouped[:3], (out, lse, dq))
    assert_close(grouped[3:], (dk, dv), {"float32": "float32"}.get(dtype, "bfloat16"))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("mask", [None, fs.Causal(), fs.SlidingWindow(30, 4, alignment="top_left")])
def test_packed_is_batched(dtype, mask):
    batch, sq, sk = 3, 70, 90
    q, k, v, dout = qkv((sq, sk), (4, 2), 40, batch=batch, dtype=dtype)
    want = both(q, k, v, dout, mask=mask)
    q, k, v, dout = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, dout))
    cu = [np.arange(batch + 1, dtype=np.int32) * n for n in (sq, sk)]
    out, lse = fs.mha_varlen_fwd(q, k, v, *cu, sq, sk, mask=mask)
    grads = fs.mha_varlen_bwd(dout, q, k, v, out, lse, *cu, sq, sk, mask=mask)
    lse = lse.reshape(4, batch, sq).transpose(1, 0, 2)
    got = [x if x is lse else x.reshape(batch, -1, *x.shape[1:]) for x in (out, lse, *grads)]
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_batches_and_heads_are_independent(dtype):
    """One head alone computes what it computes among others."""
    q, k, v, dout = qkv((70, 90), (4, 2), 40, batch=3, dtype=dtype)
    out, lse, dq, _, _ = both(q, k, v, dout, mask=fs.Causal())
    for b, h in ((0, 0), (2, 3), (1, 2)):
        of_q, of_k = np.s_[b : b + 1, :, h : h + 1], np.s_[b : b + 1, :, h // 2 : h // 2 + 1]
        one = both(q[of_q], k[of_k], v[of_k], dout[of_q], mask=fs.Causal())
        assert_same_bits(one[:3], (out[of_q], lse[b : b + 1, h : h + 1], dq[of_q]))


@pytest.mark.parametrize("seed", range(100, 140))
def test_threads_do_not_change_a_bit(seed):
    """Nor does another run: the same bits from 1, 2, 3 and 8 threads."""
    p = generate(seed)
    from flashsdk._testing.verify import run

    results = []
    for threads in (1, 2, 3, 8, 2):
        fs.set_num_threads(threads)
        results.append(run(p, inputs(p), "cpu").arrays.values())
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize(
    "mask", [None, fs.Causal(), fs.layouts.bigbird(400, 400, 32)], ids=lambda m: type(m).__name__
)
def test_one_long_head_on_many_threads(dtype, mask):
    """Work is split inside a head then, in both directions."""
    x = qkv(400, 1, 64, batch=1, dtype=dtype)
    results = []
    for threads in (1, 2, 5):
        fs.set_num_threads(threads)
        results.append(both(*x, mask=mask))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("window", [(150, 0), (37, 5)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_windows_do_not_depend_on_how_work_is_cut(dtype, window, head_dim):
    """Where a tile of keys begins in a job may not move what is summed in one step."""
    q, k, v, _ = qkv(2048, 1, head_dim, batch=1, dtype=dtype)
    results = []
    for threads in (1, 2, 4, 16):
        fs.set_num_threads(threads)
        results.append(fs.mha_fwd(q, k, v, mask=fs.SlidingWindow(*window)))
    for other in results[1:]:
        assert_same_bits(results[0], other)


def test_deterministic_is_accepted_and_changes_nothing():
    x = qkv((150, 203), (4, 2), 40)
    assert_same_bits(both(*x, deterministic=True), both(*x))


def test_instruction_sets_agree(runner):
    """Each is within the bounds of the same problem, with many features at once."""
    band = BandSpec(70, 10, "bottom_right")
    for dtype in runner.dtypes:
        features = {"mask": band, "softcap": 8.0, "alibi": "heads", "dropout_p": 0.2, "dlse": True}
        runner.check(problem((130, 170), (4, 2), 72, dtype=dtype, **features))
