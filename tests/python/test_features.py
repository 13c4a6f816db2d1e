"""Bias, ALiBi, softcap and dropout."""

import itertools

import flashsdk as fs
import numpy as np
import pytest
from cases import assert_same_bits, both, packed, problem, qkv
from flashsdk._testing import reference
from flashsdk._testing.problems import BandSpec, numpy_dtype

CAUSAL = BandSpec(None, 0, "bottom_right")


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "bool"])
def test_bias(runner, kind):
    """Every broadcast, with entries of -inf and rows that are -inf throughout."""
    for i, which in enumerate(itertools.product((False, True), repeat=4)):
        shape = tuple(n if on else 1 for n, on in zip((2, 2, 20, 40), which, strict=True))
        dtype, mask = runner.dtypes[i % len(runner.dtypes)], CAUSAL if i % 3 == 0 else None
        bias = (kind, shape)
        runner.check(problem((20, 40), (2, 1), 16, batch=2, dtype=dtype, bias=bias, mask=mask))
    runner.check(problem((70, 210), 1, 64, dtype=runner.dtypes[0], bias=(kind, (1, 1, 70, 210))))


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "bool"])
def test_bias_in_rows_of_whole_vectors(runner, kind, head_dim):
    """GPU kernels copy such a bias by 16 bytes, the end of a row by what is left of it."""
    dtype = kind if kind in runner.dtypes else runner.dtypes[-1]
    heads = 4

    def check(lengths, shape, mask=None, of=problem, **changes):
        bias = {"bias": (kind, shape), "mask": mask}
        runner.check(of(lengths, (heads, heads // 2), head_dim, dtype=dtype, **bias, **changes))

    check((130, 208), (2, heads, 130, 208), batch=2)
    if runner.backend == "cpu":
        heads = 2  # the first has shown whose bias it is
    check((130, 208), (2, heads, 130, 208), batch=2, softcap=5.0)
    check((130, 208), (1, 1, 130, 208), CAUSAL, alibi="heads")
    check((70, 203), (1, heads, 70, 203), CAUSAL, strides=True, aligned=True, seed=3)
    check((70, 208), (2, 1, 1, 208), BandSpec(30, 50, "top_left"), batch=2, dropout_p=0.2)
    lengths = ((70, 90), (0, 30), (33, 141))
    check(lengths, (3, 1, 70, 144), of=packed, slack=(0, 3))


@pytest.mark.parametrize("kind", ["bool", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("queries", [1, 4, 20, 100])
@pytest.mark.parametrize("shown", [(0, 400), (2300, 2600), (800, 1900), (0, 0)], ids=str)
def test_a_cpu_does_not_read_what_a_bias_hides_from_all(kind, queries, shown):
    """Whole tiles at either end: NaN there reaches nobody, and gradients there are 0."""
    q, k, v, dout = qkv((queries, 2600), (4, 2), 40)
    seen = np.s_[:, slice(*shown)]
    bias = np.zeros((1, 1, 1, 2600), bool)
    bias[..., slice(*shown)] = True
    if kind != "bool":
        bias = np.where(bias, 0.0, -np.inf).astype(numpy_dtype(kind))
    want = [x.astype(np.float64) for x in both(q, k[seen], v[seen], dout)]
    near = np.s_[:, max(0, shown[0] - 400) : shown[1] + 400 if shown[1] else 0]
    for x in (k, v):
        hidden = np.full_like(x, np.nan)
        hidden[near] = x[near]
        x[...] = hidden
    got = both(q, k, v, dout, bias=bias)
    for x, y in zip((*got[:3], got[3][seen], got[4][seen]), want, strict=True):
        assert np.array_equal(np.isneginf(x), np.isneginf(y))
        x, y = (np.where(np.isneginf(z), 0, z) for z in (x, y))
        assert np.abs(x - y).max(initial=0) < 2e-5
    for grad in got[3:]:
        grad[seen] = 0
        assert (grad == 0).all()


def test_rows_of_a_bias_lie_anywhere():
    """In any order in memory: the same as the array in its own order."""
    for seqlen in ((3, 50), (37, 50), (70, 50)):
        q, k, v, dout = qkv(seqlen, 2, 16)
        for kind in (np.float32, np.float16, bool):
            bias = np.random.default_rng(1).random((2, 2, *seqlen)) < 0.7
            bias = bias.astype(kind)
            results = []
            for order in ((0, 1, 2, 3), (2, 1, 0, 3), (1, 2, 0, 3)):
                back = np.argsort(order)
                same = np.ascontiguousarray(bias.transpose(order)).transpose(back)
                out, lse = fs.mha_fwd(q, k, v, bias=same)
                results.append((out, lse, *fs.mha_bwd(dout, q, k, v, out, lse, bias=same)))
            for other in results[1:]:
                assert_same_bits(results[0], other)


def test_bias_broadcast_by_stride():
    """Stride 0 in any dimension: the same as the array written out."""
    q, k, v, dout = qkv((20, 30), 2, 16)
    full = (2, 2, 20, 30)
    for which in itertools.product((False, True), repeat=4):
        shape = [n if on else 1 for n, on in zip(full, which, strict=True)]
        small = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        wide = np.broadcast_to(small, full)
        results = []
        for bias in (wide.copy(), wide, small):
            out, lse = fs.mha_fwd(q, k, v, bias=bias)
            results.append((out, lse, *fs.mha_bwd(dout, q, k, v, out, lse, bias=bias)))
        assert_same_bits(results[0], results[1])
        assert_same_bits(results[0], results[2])


def test_boolean_bias_is_a_mask():
    """True = attend: what a mask gives, and what a bias of 0 and -inf gives."""
    q, k, v, dout = qkv((50, 70), 2, 32)
    visible = fs.SlidingWindow(11, 2).to_dense(50, 70)[None, None]
    biases = [visible, np.where(visible, 0, -np.inf).astype(np.float32)]
    out, lse = fs.mha_fwd(q, k, v, mask=fs.SlidingWindow(11, 2))
    want = (out, lse, *fs.mha_bwd(dout, q, k, v, out, lse, mask=fs.SlidingWindow(11, 2)))
    for bias in biases:
        out, lse = fs.mha_fwd(q, k, v, bias=bias)
        got = (out, lse, *fs.mha_bwd(dout, q, k, v, out, lse, bias=bias))
        assert np.array_equal(np.isneginf(lse), np.isneginf(want[1]))
        for a, b in zip(got, want, strict=True):
            seen = np.isfinite(b)
            assert np.abs(a - b, where=seen, out=np.zeros_like(a)).max() < 3e-6


@pytest.mark.parametrize("kind", ["heads", "batch"])
def test_alibi(runner, kind):
    band = BandSpec(20, 20, "top_left")
    for dtype in runner.dtypes:
        for seqlen, mask in (((20, 40), CAUSAL), ((40, 20), None), ((33, 90), band)):
            runner.check(problem(seqlen, 2, 16, batch=2, dtype=dtype, alibi=kind, mask=mask))


def test_alibi_is_a_bias():
    q, k, v, _ = qkv((40, 60), 2, 16)
    slopes = np.array([0.25, 0.5], np.float32)
    distance = np.abs(np.arange(40)[:, None] + 20 - np.arange(60))
    bias = -(slopes[:, None, None] * distance)[None].astype(np.float32)
    ours = fs.mha_fwd(q, k, v, alibi_slopes=slopes)
    for a, b in zip(ours, fs.mha_fwd(q, k, v, bias=bias), strict=True):
        assert np.abs(a - b).max() < 3e-6


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap(runner, softcap):
    for dtype in runner.dtypes:
        for values in ("normal", "huge"):
            runner.check(
                problem((50, 70), 2, 32, dtype=dtype, softcap=softcap, values=values, mask=CAUSAL)
            )


def test_softcap_bounds_the_scores():
    q, k, v, _ = qkv((20, 30), 1, 16)
    _, lse = fs.mha_fwd(100 * q, 100 * k, v, softcap=2.0)
    assert np.abs(lse - np.log(30)).max() < 2


def test_bias_and_alibi_come_after_softcap(runner):
    for dtype in runner.dtypes:
        p = problem(
            (50, 70),
            2,
            32,
            dtype=dtype,
            softcap=1.5,
            bias=("float32", (1, 2, 50, 70)),
            alibi="heads",
        )
        runner.check(p)


# ---- dropout


def threshold(p: float) -> int:
    return min(round(p * 256), 255)


def kept(seed, offset, shape, p, **keywords) -> np.ndarray:
    """Which elements of P (batch, heads, seqlen_q, seqlen_k) the forward keeps.

    Read off its output: with q = 0 every probability is 1 / seqlen_k, and v passes one element of P
    to each output.
    """
    batch, heads, seqlen_q, seqlen_k = shape
    q = np.zeros((batch, seqlen_q, heads, 16), np.float32)
    k = np.zeros((batch, seqlen_k, heads, 16), np.float32)
    found = np.zeros(shape, bool)
    scale = 256 / (256 - threshold(p))
    for first in range(0, seqlen_k, 256):
        width = min(256, seqlen_k - first)
        v = np.zeros((batch, seqlen_k, heads, width), np.float32)
        v[:, np.arange(first, first + width), :, np.arange(width)] = 1
        out, lse = fs.mha_fwd(q, k, v, dropout_p=p, seed=seed, offset=offset, **keywords)
        assert np.abs(lse - np.log(seqlen_k)).max() < 1e-5  # of P before dropout
        part = out.transpose(0, 2, 1, 3) * seqlen_k / scale
        assert np.abs(part - part.round()).max() < 1e-5
        found[..., first : first + width] = part.round().astype(bool)
    return found


def expected_kept(seed, offset, shape, p) -> np.ndarray:
    batch, heads, seqlen_q, seqlen_k = shape
    rows = [
        reference.random_bytes(seed, offset, b * heads + h, i, seqlen_k) >= threshold(p)
        for b, h, i in itertools.product(range(batch), range(heads), range(seqlen_q))
    ]
    return np.reshape(rows, shape)


@pytest.mark.parametrize(
    "seed, offset",
    [(0, 0), (1, 0), (2**32, 5), (2**63 - 1, 2**63 - 1), (0xDEADBEEF, 1 << 32), (7, (1 << 40) + 9)],
)
def test_dropout_pattern(seed, offset):
    shape = (2, 3, 70, 300)
    want = expected_kept(seed, offset, shape, 0.3)
    assert np.array_equal(kept(seed, offset, shape, 0.3), want)
    assert abs(want.mean() - 179 / 256) < 0.01


@pytest.mark.parametrize("p", [1 / 256, 0.1, 0.5, 0.75, 0.99, 0.999])
def test_dropout_probability(p):
    shape = (1, 1, 64, 256)
    found = kept(11, 12, shape, p)
    assert np.array_equal(found, expected_kept(11, 12, shape, p))
    mean = 1 - threshold(p) / 256
    assert abs(found.mean() - mean) < 5 * np.sqrt(mean * (1 - mean) / found.size) + 1e-9


def test_dropout_too_small_to_drop():
    q, k, v, _ = qkv()
    for a, b in zip(fs.mha_fwd(q, k, v, dropout_p=0.001), fs.mha_fwd(q, k, v), strict=True):
        assert np.array_equal(a, b)


def test_the_backward_drops_the_same():
    """dv = (P∘Z)ᵀ·dout: with dout passing one row each, dv shows the pattern."""
    seqlen_q, seqlen_k = 100, 70
    q, k = (np.zeros((1, n, 2, 16), np.float32) for n in (seqlen_q, seqlen_k))
    v = np.random.default_rng(0).standard_normal((1, seqlen_k, 2, seqlen_q)).astype(np.float32)
    dout = np.zeros((1, seqlen_q, 2, seqlen_q), np.float32)
    dout[:, np.arange(seqlen_q), :, np.arange(seqlen_q)] = 1
    dropout = {"dropout_p": 0.5, "seed": 3, "offset": 4}
    out, lse = fs.mha_fwd(q, k, v, **dropout)
    dv = fs.mha_bwd(dout, q, k, v, out, lse, **dropout)[2]
    pattern = dv.transpose(0, 2, 3, 1) * seqlen_k / 2
    assert np.abs(pattern - expected_kept(3, 4, (1, 2, seqlen_q, seqlen_k), 0.5)).max() < 1e-5


def test_the_pattern_depends_on_nothing_else():
    """Not on the mask, the layout, the threads, or the dtype: a fixed function of the place."""
    shape = (1, 2, 90, 200)
    want = expected_kept(5, 6, shape, 0.4)
    for threads in (1, 2, 3):
        fs.set_num_threads(threads)
        assert np.array_equal(kept(5, 6, shape, 0.4), want)
    assert np.array_equal(kept(5, 6, shape, 0.4, mask=fs.layouts.dense(90, 200, 16)), want)
    assert np.array_equal(kept(5, 6, shape, 0.4, bias=np.zeros((1, 1, 1, 200), np.float32)), want)
    want = expected_kept(5, 6, (1, 1, 20, 30), 0.4)
    for name in ("bfloat16", "float16"):
        dtype = numpy_dtype(name)
        q, k = (np.zeros((1, n, 1, 16), dtype) for n in (20, 30))
        v = np.eye(30, dtype=dtype)[None, :, None]
        out, _ = fs.mha_fwd(q, k, v, dropout_p=0.4, seed=5, offset=6)
        assert np.array_equal(out[:, :, 0] != 0, want[:, 0])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout(runner, p):
    for dtype in runner.dtypes:
        changes = {"dropout_p": p, "dropout_seed": 2**62 + 5, "dropout_offset": 2**34 + 1}
        runner.check(problem((90, 110), (4, 2), 32, dtype=dtype, mask=CAUSAL, **changes))
        runner.check(problem((50, 70), 2, 64, dtype=dtype, dlse=True, **changes))
