"""Numbers that are large, tiny or no numbers."""

from dataclasses import replace

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, packed, problem, qkv
from flashsdk._testing import naive, reference, verify
from flashsdk._testing.problems import BandSpec, inputs, numpy_dtype
from flashsdk._testing.tolerance import TRUSTED_LSE

# Of the yardstick: standard attention overflows where ours must not.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

CAUSAL = BandSpec(None, 0, "bottom_right")


@pytest.mark.parametrize("values", ["huge", "tiny", "zeros"])
def test_scales_of_the_input(runner, values):
    for dtype in runner.dtypes:
        for mask in (None, CAUSAL):
            runner.check(problem((70, 210), 2, 64, dtype=dtype, values=values, mask=mask))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("magnitude", [1, 10], ids=["hundreds", "tens of thousands"])
def test_logits_that_are_all_very_negative(runner, magnitude, head_dim):
    """Below all of a ragged tile's empty columns: 0 is no maximum, and no row becomes 0."""
    for dtype in runner.dtypes:
        of = {"dtype": dtype, "values": "negative", "magnitude": magnitude}
        for mask in (None, CAUSAL):
            runner.check(problem((70, 210), 2, head_dim, mask=mask, **of))
        runner.check(packed(((70, 210), (0, 30), (130, 5), (1, 77)), 2, head_dim, **of))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_scores_of_tens_of_thousands(dtype):
    """exp of no score overflows, and the greatest wins."""
    q, k, v, dout = qkv((30, 200), 1, 16, dtype=dtype)
    big = numpy_dtype(dtype).type(200)
    q, k = q * big, k * big
    out, lse = fs.mha_fwd(q, k, v)
    exact, exact_lse = reference.forward(q, k, v)
    assert np.abs(exact_lse).max() > 2e4
    assert np.abs(lse / exact_lse - 1).max() < 1e-6
    score = np.sort(np.einsum("bihd,bjhd->bihj", q.astype(float), k.astype(float)) / 4)
    clear = score[..., -1] - score[..., -2] > 20  # one key alone counts
    assert clear.mean() > 0.9
    assert np.abs(out.astype(float) - exact)[clear].max() < 1e-6
    for grad in fs.mha_bwd(dout, q, k, v, out, lse):
        assert np.isfinite(grad.astype(float)).all()


LOWEST = float(np.finfo(np.float32).min)


@pytest.mark.parametrize("magnitude", [30, 100, 1000, 3e4, 1e5])
@pytest.mark.parametrize("seqlen", [(32, 32), (70, 300)])
def test_logits_beyond_the_precision_of_the_lse(runner, magnitude, seqlen):
    """q and k of that size: logits up to 1e11, whose unit in float32 is 8192."""
    for dtype in runner.dtypes:
        if dtype == "float16" and magnitude > 1000:
            continue
        row = 1, 1, 1, seqlen[1]
        for features in (
            {}, {"mask": CAUSAL, "dlse": True}, {"alibi": "heads"}, {"bias": (dtype, row)},
            {"bias": ("bool", row)},
        ):  # fmt: skip
            runner.check(problem(seqlen, 2, 64, dtype=dtype, magnitude=magnitude, **features))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_large_logits_of_wide_heads(runner, head_dim):
    for dtype in runner.dtypes:
        runner.check(problem((150, 300), 2, head_dim, dtype=dtype, magnitude=1000, mask=CAUSAL))


GROWTH = {
    "steady": lambda at: 1 + 0 * at,
    "growing": lambda at: 8 * at,
    "falling": lambda at: 8 - 8 * at,
    "one large key": lambda at: np.where(np.arange(at.size) == at.size * 5 // 7, 40, 1),
}


@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_maxima_that_move_along_the_keys(runner, head_dim, growth):
    """Long enough for kernels that try the maximum of the keys so far, and have to notice."""
    for dtype in runner.dtypes:
        # Of P and of out in 16 bits; in float32 that of scores of up to 80, whose exponents differ.
        unit = {"float32": 2.0**-15, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
        q, k, v, _ = qkv((70, 4200), 1, head_dim, batch=1)
        k = np.abs(k) * GROWTH[growth](np.linspace(0, 1, 4200))[None, :, None, None]
        q, k, v = (x.astype(numpy_dtype(dtype)) for x in (np.abs(q), k, v))
        out, lse = runner.call("mha_fwd", q, k, v, mask=fs.Causal())
        exact, exact_lse = reference.forward(q, k, v, mask=CAUSAL)
        assert np.abs(out.astype(float) - exact).max() < unit * np.abs(exact).max()
        assert np.abs(lse / exact_lse - 1).max() < 2e-6


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_key_that_is_no_number_far_behind_the_first(runner, head_dim, bad):
    """Rows that see it are NaN, those before do not notice."""
    for dtype in runner.dtypes:
        q, k, v, _ = qkv((70, 4200), 1, head_dim, batch=1, dtype=dtype)
        q = np.abs(q)
        exact, exact_lse = reference.forward(q, k, v, mask=CAUSAL)
        k[:, 4160] = bad  # hidden from the first 30 queries
        out, lse = runner.call("mha_fwd", q, k, v, mask=fs.Causal())
        assert np.isnan(out[:, 30:].astype(float)).all()
        assert np.abs(out[:, :30].astype(float) - exact[:, :30]).max() < 2e-3
        assert np.abs(lse[..., :30] / exact_lse[..., :30] - 1).max() < 2e-6


@pytest.mark.parametrize("magnitude", [1, 30, 100, 1000, 3e4, 1e5, 1e9])
def test_errors_are_at_most_twice_those_of_standard_attention(cpu, magnitude):
    """Without verify.py's allowances. Where one key takes all of P, not even delta's."""
    yardsticks = [naive.standard] + [naive.flash_backward] * (magnitude <= 100)
    p = problem((150, 300), 2, 64, magnitude=magnitude)
    x = {name: placed.view for name, placed in inputs(p).items()}
    exact = dict(zip(verify.OUTPUTS, reference.forward_backward(x["dout"], x["q"], x["k"], x["v"])))
    worst = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    for order in range(3):  # of summation
        dims = np.random.default_rng(order).permutation(64)
        arrays = (x[name][..., dims] for name in ("q", "k", "v", "dout"))
        for head in reference.heads(reference.Features(), *arrays):
            at = {"out": head.at_q, "dq": head.at_q, "dk": head.at_k, "dv": head.at_k}
            for name, part in (x for f in yardsticks for x in f(head, np.float32).items()):
                error = np.abs(part - exact[name][at[name]][..., dims]).max()
                worst[name] = max(worst[name], error)
    ours = cpu.ask(("problem", p)).arrays
    for name, error in worst.items():
        assert np.abs(ours[name] - exact[name]).max() <= 2 * error + 1e-5, name
    assert np.abs(ours["lse"] / exact["lse"] - 1).max() < 1e-6


# With a bias the score itself is rounded, but for a power of two.
@pytest.mark.parametrize(
    "scale, with_bias",
    [(0.25, False), (0.25, True), (0.3, False), (-0.3, False), (96**-0.5, False)],
)
@pytest.mark.parametrize("level", [6, 18, 27, 37, 70, -27, -37, -70])
def test_what_the_rounding_of_the_lse_does_to_p(level, scale, with_bias):
    """One element in q, v and dout: scores without a rounding, and dv is P of the backward."""
    rng = np.random.default_rng(3)
    queries, keys = 256, 40
    scale = float(np.float32(scale))
    one = np.ones((queries, 1, 1, 1), np.float32)
    scores = rng.normal(level - 5.2, 2, (queries, keys, 1, 1))  # their lse is level, within 4
    k = (scores / scale).astype(np.float32)
    bias = np.zeros((1, 1, 1, keys), np.float32) if with_bias else None
    features = {"softmax_scale": scale, "bias": bias}
    out, lse = fs.mha_fwd(one, k, np.ones_like(k), **features)
    _, _, dv = fs.mha_bwd(one, one, k, np.ones_like(k), out, lse, **features)
    trusted = np.abs(lse) <= TRUSTED_LSE["float32"]
    assert trusted.all() if abs(level) < 32 else not trusted.any()
    p, score = dv[..., 0, 0].astype(float), k[..., 0, 0].astype(float) * scale
    exact = np.exp(score - np.logaddexp.reduce(score, axis=1, keepdims=True))
    # The lse's share is at most 9.5e-7 (docs/numerics.md). An exponent of x is rounded three times,
    # as the difference, in log2(e) and as the product: x * 1.8e-7. 2.5e-7: exp2, P and sums.
    exponents = 1.8e-7 * np.abs(np.log(exact))
    beyond = np.abs(p / exact - 1) - exponents
    assert beyond[exact > 1e-3].max() < 9.5e-7 + 2.5e-7
    assert (np.abs(p.sum(axis=1) - 1) - (exact * exponents).sum(axis=1)).max() < 9.5e-7 + 2.5e-7


@pytest.mark.parametrize("low", [-1e4, -1e9, -2.4e38, -3e38, LOWEST])
def test_a_finite_bias_does_not_hide(runner, low):
    """Where all keys of a row have it their average remains, with the gradients of an average."""
    for dtype in runner.dtypes:
        for shape, mask in (
            ((1, 1, 70, 210), None),
            ((1, 2, 1, 1), None),
            ((1, 1, 70, 210), CAUSAL),
        ):
            bias = ("float32", shape)
            p = problem((70, 210), 2, 64, dtype=dtype, bias=bias, low_bias=low, mask=mask)
            runner.check(p)


def test_the_average_of_a_row_of_lowest_biases(runner):
    for dtype in runner.dtypes:
        # Sums of 40 and 200 elements, rounded: about a unit of the results' last bit.
        close = {"float32": 1e-6, "bfloat16": 2.0**-9, "float16": 2.0**-12}[dtype]
        q, k, v, dout = qkv((40, 200), 2, 32, dtype=dtype)
        bias = np.full((1, 1, 1, 1), LOWEST, np.float32)
        out, lse = runner.call("mha_fwd", q, k, v, bias=bias)
        assert np.abs(out - v.astype(float).mean(axis=1, keepdims=True)).max() < close
        assert np.array_equal(lse, np.full_like(lse, LOWEST))
        dq, _, dv = runner.call("mha_bwd", dout, q, k, v, out, lse, bias=bias)
        assert np.abs(dv - dout.astype(float).sum(axis=1, keepdims=True) / 200).max() < close
        same = runner.call("mha_fwd", 0 * q, k, v)
        same = runner.call("mha_bwd", dout, 0 * q, k, v, *same)
        assert np.abs(dq.astype(float) - same[0]).max() < close


@pytest.mark.parametrize(
    "scale, magnitude",
    [
        *[(1e-45, 1), (1e-42, 1e18), (1e-38, 1e18), (2.3e38, 1e-19), (3e38, 1e-19), (-3e38, 1e-19)],
        *[(1.2e30, 1e-15), (1.3e30, 1e-15), (-1.3e30, 1e-15)],
    ],
)
def test_any_finite_softmax_scale(runner, scale, magnitude):
    for dtype in {"float32", "bfloat16"} & set(runner.dtypes):
        for features in ({}, {"bias": ("float32", (1, 1, 1, 210))}, {"alibi": "heads"}):
            p = problem((70, 210), 2, 64, dtype=dtype, magnitude=magnitude, **features)
            report = runner.report(replace(p, softmax_scale=scale))
            # Standard attention overflows where it multiplies dS by the scale: its largest error
            # is that of the rest. The bounds of the elements remain.
            assert not [x for x in report.failures if "largest error" not in x], report


@pytest.mark.parametrize("softcap", [1e-45, 1e-30, 1e-3, 1e30, 3e38])
def test_both_ends_of_softcap(runner, softcap):
    for dtype in runner.dtypes:
        runner.check(problem((70, 210), 2, 64, dtype=dtype, softcap=softcap))


@pytest.mark.parametrize(
    ("softcap", "shape"), [(1.5, (1, 190)), (1.5, (4, 1145)), (50.0, (1, 366))]
)
def test_derivatives_of_softcap_below_float16(runner, softcap, shape):
    """Where softcap is far exceeded its derivative, and P times it, are too small for 16 bits."""
    for head_dim in (96, 192, 256):
        for dtype in runner.dtypes:
            runner.check(problem(shape, 2, head_dim, dtype=dtype, softcap=softcap, values="huge"))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("hidden_by", ["bias", "boolean bias", "mask", "mask, softcap"])
@pytest.mark.parametrize("head_dim", [32, 160])
def test_rows_that_see_no_key_are_not_read(runner, hidden_by, head_dim, bad):
    """Whatever out, dout, dlse and q hold there: no gradient, neither theirs nor their keys'."""
    bias = np.zeros((1, 1, 90, 1), np.float32)
    bias[:, :, [3, 50, 77]] = -np.inf
    features, unseeing = {
        "bias": ({"bias": bias}, np.isneginf(bias[0, 0, :, 0])),
        "boolean bias": ({"bias": ~np.isneginf(bias)}, np.isneginf(bias[0, 0, :, 0])),
        "mask": ({"mask": fs.Causal()}, np.arange(90) < 20),  # queries before the first key
        "mask, softcap": ({"mask": fs.Causal(), "softcap": 2.0}, np.arange(90) < 20),
    }[hidden_by]
    features = features | {"deterministic": True}
    for dtype in runner.dtypes:
        q, k, v, dout = qkv((90, 70), 2, head_dim, dtype=dtype)
        dlse = np.ones((2, 2, 90), np.float32)
        out, lse = runner.call("mha_fwd", q, k, v, **features)
        assert np.array_equal(np.isneginf(lse).all(axis=(0, 1)), unseeing)
        want = runner.call("mha_bwd", dout, q, k, v, out, lse, dlse=dlse, **features)
        dirty = [x.copy() for x in (dout, q, out, dlse.transpose(0, 2, 1))]
        for x in dirty:
            x[:, unseeing] = bad
        dlse = np.ascontiguousarray(dirty[3].transpose(0, 2, 1))
        got = runner.call("mha_bwd", *dirty[:2], k, v, dirty[2], lse, dlse=dlse, **features)
        assert not got[0][:, unseeing].astype(float).any()
        assert_same_bits(got, want)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_of_queries_that_see_no_key_are_zeros(runner, head_dim, bad):
    """Whatever k and v hold: 700 queries come before the first key, tiles are of at most 192."""
    for dtype in runner.dtypes:
        q, k, v, _ = qkv((1000, 300), 2, head_dim, dtype=dtype)
        k[:], v[:] = bad, bad
        out, lse = runner.call("mha_fwd", q, k, v, mask=fs.Causal())
        assert np.array_equal(np.isneginf(lse).all(axis=(0, 1)), np.arange(1000) < 700)
        assert not out[:, : 700 - 192].astype(float).any()


@pytest.mark.parametrize("seqlen_q", [64, 70])
def test_a_bias_hides_a_key_whatever_its_score(runner, seqlen_q):
    q, k, v, dout = qkv((seqlen_q, 210), 2, 32, dtype=runner.dtypes[0])
    boolean = np.ones((1, 1, 1, 210), bool)
    boolean[..., [5, 200]] = False
    fixed = {"deterministic": True}
    for bias in (boolean, np.where(boolean, 0, -np.inf).astype(np.float32)):
        want = [*runner.call("mha_fwd", q, k, v, bias=bias)]
        want += runner.call("mha_bwd", dout, q, k, v, *want, bias=bias, **fixed)
        for bad in (1e38, -1e38, np.inf, np.nan):  # q·k overflows, or is NaN
            hidden = k.copy()
            with np.errstate(over="ignore"):
                hidden[:, [5, 200]] = bad
            got = [*runner.call("mha_fwd", q, hidden, v, bias=bias)]
            assert_same_bits(got, want[:2])
            if np.isfinite(hidden.astype(np.float32)).all():  # dq = dS·K, which is 0·bad
                got += runner.call("mha_bwd", dout, q, hidden, v, *got, bias=bias, **fixed)
                assert_same_bits(got, want)


def test_scores_that_are_all_very_negative():
    """A row maximum far below 0 shifts the scores as well: no row becomes 0."""
    q, k, v, _ = qkv((20, 70), 1, 16)
    bias = np.full((1, 1, 1, 1), -1e6, np.float32)
    out, lse = fs.mha_fwd(q, k, v, bias=bias)
    want, want_lse = fs.mha_fwd(q, k, v)
    assert np.abs(lse - (want_lse.astype(np.float64) - 1e6)).max() < 0.1
    assert np.abs(out - want).max() < 0.1
    assert out.any(axis=-1).all()


def test_the_first_keys_are_hidden():
    """The running maximum starts at -inf for a whole tile of keys, or for many of them."""
    q, k, v, dout = qkv((40, 1500), 1, 16, batch=1)
    for first in (10, 200, 1499):
        bias = np.where(np.arange(1500) < first, -np.inf, 0).astype(np.float32)[None, None, None]
        out, lse = fs.mha_fwd(q, k, v, bias=bias)
        rest = fs.mha_fwd(q, k[:, first:], v[:, first:])
        assert np.abs(out - rest[0]).max() < 2e-6
        assert np.abs(lse - rest[1]).max() < 4e-6
        grads = fs.mha_bwd(dout, q, k, v, out, lse, bias=bias)
        rest = fs.mha_bwd(dout, q, k[:, first:], v[:, first:], *rest)
        assert np.abs(grads[0] - rest[0]).max() < 4e-6
        assert not grads[1][:, :first].any()
        assert np.abs(grads[1][:, first:] - rest[1]).max() < 4e-6


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_rows_of_minus_infinity(dtype):
    """A bias that hides every key of a row: 0, -inf and no gradient."""
    q, k, v, dout = qkv((40, 70), 2, 16, dtype=dtype)
    bias = np.zeros((1, 1, 40, 1), np.float32)
    bias[:, :, 5:9] = -np.inf
    for given in (bias, np.isfinite(bias)):
        out, lse = fs.mha_fwd(q, k, v, bias=given)
        assert not out[:, 5:9].astype(float).any()
        assert np.array_equal(
            np.isneginf(lse), np.isneginf(np.broadcast_to(bias[..., 0], lse.shape))
        )
        dq, dk, dv = fs.mha_bwd(dout, q, k, v, out, lse, bias=given)
        assert not dq[:, 5:9].astype(float).any()
        assert all(np.isfinite(x.astype(float)).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_nan_in_a_query(dtype):
    """Its row is NaN, the others do not notice; all keys get NaN from it."""
    q, k, v, dout = qkv((70, 90), (2, 1), 32, dtype=dtype)
    want = fs.mha_fwd(q, k, v)
    q[1, 40, 1, 3] = np.nan
    out, lse = fs.mha_fwd(q, k, v)
    dirty = np.zeros((2, 70, 2), bool)
    dirty[1, 40, 1] = True
    assert np.array_equal(np.isnan(out.astype(float)), np.broadcast_to(dirty[..., None], out.shape))
    assert np.array_equal(np.isnan(lse), dirty.transpose(0, 2, 1))
    assert np.array_equal(out[~dirty], want[0][~dirty])
    dq, dk, dv = fs.mha_bwd(dout, q, k, v, out, lse)
    assert np.array_equal(np.isnan(dq.astype(float)).any(axis=-1), dirty)
    assert np.isnan(dk[1].astype(float)).all()
    assert np.isnan(dv[1].astype(float)).all()
    assert not np.isnan(dk[0].astype(float)).any()


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("seqlen_k", [90, 300])
def test_nan_in_a_key_reaches_those_who_see_it(dtype, seqlen_k):
    q, k, v, _ = qkv((seqlen_k, seqlen_k), 1, 32, batch=1, dtype=dtype)
    want = fs.mha_fwd(q, k, v, mask=fs.Causal())
    bad = seqlen_k - 20
    k[:, bad, 0, 0] = np.nan
    out, lse = fs.mha_fwd(q, k, v, mask=fs.Causal())
    assert np.isnan(lse[..., bad:]).all()
    assert np.isnan(out[:, bad:].astype(float)).all()
    assert np.array_equal(lse[..., :bad], want[1][..., :bad])
    assert np.array_equal(out[:, :bad], want[0][:, :bad])


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_nan_in_a_value_reaches_its_column(dtype):
    q, k, v, _ = qkv((70, 90), 1, 32, dtype=dtype)
    v[1, 33, 0, 5] = np.nan
    out, lse = fs.mha_fwd(q, k, v)
    where = np.zeros(out.shape, bool)
    where[1, ..., 5] = True
    assert np.array_equal(np.isnan(out.astype(float)), where)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_nan_beside_the_arrays(dtype):
    """What lies behind the last row, key and element is never used."""
    for seqlen, head_dim in (((5, 19), 7), ((66, 195), 33), ((1, 1), 1)):
        x = qkv(seqlen, 2, head_dim, dtype=dtype)
        want = fs.mha_fwd(*x[:3])
        want += fs.mha_bwd(x[3], *x[:3], *want)
        wide = []
        for a in x:
            buffer = np.full(
                [n + 70 if i in (1, 3) else n for i, n in enumerate(a.shape)], np.nan, a.dtype
            )
            view = buffer[:, : a.shape[1], :, : a.shape[3]]
            view[...] = a
            wide.append(view)
        got = fs.mha_fwd(*wide[:3])
        got += fs.mha_bwd(wide[3], *wide[:3], *got)
        for a, b in zip(got, want, strict=True):
            assert np.array_equal(a, b)


def test_subnormal_float16_counts():
    """Values below 2^-14, which flushing to zero would lose."""
    q, k, v, _ = qkv((20, 40), 1, 16, dtype="float16")
    v = (v.astype(np.float32) * 2.0**-18).astype(np.float16)
    assert (np.abs(v) < 2.0**-14).all()
    out, _ = fs.mha_fwd(q, k, v)
    exact, _ = reference.forward(q, k, v)
    assert np.abs(out.astype(float) - exact).max() <= 2.0**-24
    tiny = (q.astype(np.float32) * 2.0**-17).astype(np.float16)
    _, lse = fs.mha_fwd(tiny, k, v, softmax_scale=2.0**17)
    assert np.abs(lse - reference.forward(tiny, k, v, softmax_scale=2.0**17)[1]).max() < 2e-4


def test_overflow_of_float16_is_infinite():
    q, k, v, _ = qkv((30, 5), 1, 16, dtype="float16")
    v[...] = 60000
    dropout = {"dropout_p": 0.5, "seed": 1}
    out, _ = fs.mha_fwd(q, k, v, **dropout)
    over = reference.forward(q, k, v, **dropout)[0] > 65520
    assert 0 < over.sum() < over.size
    assert np.array_equal(np.isinf(out), over)


def test_lse_is_as_precise_as_float32():
    """Over many keys, where errors of exp and of the sum would add up."""
    q, k, v, _ = qkv((8, 5000), 1, 32, batch=1)
    _, lse = fs.mha_fwd(q, k, v)
    assert np.abs(lse - reference.forward(q, k, v)[1]).max() < 3e-6
