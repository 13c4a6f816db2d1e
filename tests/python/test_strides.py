"""Any stride but the last dimension's, for every array, never copied."""

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, bits, qkv
from flashsdk._testing.problems import place

NAMES = ("q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv", "dlse")


def results(x, y):
    """Forward and backward on the arrays x, into the arrays y."""
    out, lse = fs.mha_fwd(x["q"], x["k"], x["v"], mask=fs.Causal(), out=y["out"], lse=y["lse"])
    grads = fs.mha_bwd(
        x["dout"], x["q"], x["k"], x["v"], out, lse, dlse=x["dlse"], mask=fs.Causal(),
        dq=y["dq"], dk=y["dk"], dv=y["dv"],
    )  # fmt: skip
    assert all(a is y[name] for a, name in zip((out, lse, *grads), y, strict=True))
    return [a.copy() for a in y.values()]


def arrays(dtype):
    q, k, v, dout = qkv((37, 50), (4, 2), (24, 40), batch=3, dtype=dtype)
    dlse = np.random.default_rng(1).standard_normal((3, 4, 37)).astype(np.float32)
    x = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse}
    y = {"out": dout, "lse": dlse, "dq": q, "dk": k, "dv": v}
    return x, {name: np.full_like(a, np.nan) for name, a in y.items()}


def reversed_rows(a):
    return np.ascontiguousarray(a[:, ::-1])[:, ::-1] if a.ndim == 4 else a


def reversed_all(a):
    flip = (slice(None, None, -1),) * (a.ndim - 1)
    return np.ascontiguousarray(a[flip])[flip]


def heads_first(a):
    return np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) if a.ndim == 4 else a


def rows_first(a):
    order = [1, 0, *range(2, a.ndim)]
    return np.ascontiguousarray(a.transpose(order)).transpose(order) if a.ndim == 4 else a


def every_other(a):
    wide = np.full([*(2 * n for n in a.shape[:-1]), a.shape[-1] + 5], np.nan, a.dtype)
    view = wide[(*(slice(1, None, 2),) * (a.ndim - 1), slice(3, 3 + a.shape[-1]))]
    view[...] = a
    return view


def unaligned(a):
    """Aligned to the element, to nothing more."""
    buffer = np.empty(a.size + 1, a.dtype)
    view = buffer[1:].reshape(a.shape)
    view[...] = a
    return view


FORMS = [reversed_rows, reversed_all, heads_first, rows_first, every_other, unaligned]


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_one_array_at_a_time(form, dtype):
    """Bit for bit what contiguous arrays give."""
    x, y = arrays(dtype)
    want = results(x, y)
    for name in (*x, *y):
        a, b = ({n: form(z) if n == name else z for n, z in arrays_.items()} for arrays_ in (x, y))
        for z in b.values():
            z[...] = np.nan
        assert_same_bits(want, results(a, b))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_all_at_once(form, dtype):
    x, y = arrays(dtype)
    want = results(x, y)
    a, b = ({n: form(z) for n, z in arrays_.items()} for arrays_ in (x, y))
    for z in b.values():
        z[...] = np.nan
    assert_same_bits(want, results(a, b))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_stride_zero(axis, dtype):
    """Inputs that repeat along batch, sequence or heads."""
    x, y = arrays(dtype)
    wide = {n: np.broadcast_to(a.take([0], axis), a.shape) for n, a in x.items() if a.ndim == 4}
    assert all(a.strides[axis] == 0 for a in wide.values())
    got = results({**x, **wide}, y)
    written = {n: a.copy() for n, a in wide.items()}
    assert_same_bits(got, results({**x, **written}, y))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_one_tensor_of_q_k_and_v(dtype):
    """The packed projection (batch, seqlen, 3, num_heads, head_dim) and its gradient."""
    qkv_, dout = qkv((40, 40), 6, 32, dtype=dtype)[::3]
    qkv_, dout = qkv_.reshape(2, 40, 3, 2, 32), dout[:, :, :2]
    q, k, v = (qkv_[:, :, n] for n in range(3))
    out, lse = fs.mha_fwd(q, k, v)
    grad = np.full_like(qkv_, np.nan)
    parts = {name: grad[:, :, n] for n, name in enumerate(("dq", "dk", "dv"))}
    fs.mha_bwd(dout, q, k, v, out, lse, **parts)
    q, k, v = (np.ascontiguousarray(x) for x in (q, k, v))
    assert_same_bits(fs.mha_fwd(q, k, v), (out, lse))
    want = fs.mha_bwd(np.ascontiguousarray(dout), q, k, v, out, lse)
    assert_same_bits(parts.values(), want)


@pytest.mark.parametrize("seed", range(6))
def test_outputs_write_nothing_beside_themselves(seed):
    rng = np.random.default_rng(seed)
    x, y = arrays(CPU_DTYPES[seed % 3])
    placed = {name: place(a, rng) for name, a in y.items()}
    results(x, {name: p.view for name, p in placed.items()})
    for name, p in placed.items():
        assert not np.isnan(p.view.astype(np.float32)).any(), name
        p.view[...] = np.nan
        assert np.isnan(p.buffer.astype(np.float32)).all(), name


def test_inputs_are_not_written():
    x, y = arrays("float32")
    before = {name: a.copy() for name, a in x.items()}
    results(x, y)
    for name, a in before.items():
        assert np.array_equal(bits(a), bits(x[name])), name


def test_bias_and_slopes_in_any_stride():
    q, k, v, _ = qkv((37, 50), (4, 2), 24, batch=3)
    rng = np.random.default_rng(2)
    bias = rng.standard_normal((3, 4, 37, 50)).astype(np.float32)
    slopes = rng.random((3, 4)).astype(np.float32)
    want = fs.mha_fwd(q, k, v, bias=bias, alibi_slopes=slopes)
    for form in (reversed_all, every_other, unaligned):
        got = fs.mha_fwd(q, k, v, bias=form(bias), alibi_slopes=form(slopes))
        assert_same_bits(want, got)
    heads_last = np.ascontiguousarray(bias.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    assert_same_bits(want, fs.mha_fwd(q, k, v, bias=heads_last, alibi_slopes=slopes))


def test_a_long_way_between_rows():
    """Offsets beyond 2^31 elements, in memory that is never touched."""
    stride = 2**30
    try:
        buffer = np.zeros(3 * stride + 64, np.float16)  # 6 GiB of address space
    except MemoryError:
        pytest.skip("no such address space")
    q, k, v, _ = qkv((4, 4), 1, 16, batch=1, dtype="float16")
    far = np.lib.stride_tricks.as_strided(buffer, k.shape, (2 * stride * 4, 2 * stride, 32, 2))
    far[...] = k
    assert_same_bits(fs.mha_fwd(q, far, v), fs.mha_fwd(q, k, v))
