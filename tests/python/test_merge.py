"""merge of NumPy's arrays, and what it refuses. PyTorch's are in test_torch_more.py."""

import warnings

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, qkv


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_parts_of_the_keys(dtype):
    q, k, v, _ = qkv((20, 90), (4, 2), dtype=dtype)
    whole = fs.mha_fwd(q, k, v)
    ends = ((0, 30), (30, 30), (30, 90))
    parts = [fs.mha_fwd(q, k[:, a:b], v[:, a:b]) for a, b in ends]
    out, lse = fs.merge(*zip(*parts, strict=True))
    assert out.dtype == q.dtype
    assert lse.dtype == np.float32
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(*(x.astype(np.float32) for x in (out, whole[0])), atol=tolerance)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-5)


def test_packed_and_blind_rows():
    q, k, v, _ = (x[0] for x in qkv((20, 30), batch=1))
    cu_q, cu_k = np.array([0, 7, 20], np.int32), np.array([0, 0, 30], np.int32)
    part = fs.mha_varlen_fwd(q, k, v, cu_q, cu_k, 20, 30)
    out, lse = fs.merge([part[0]] * 2, [part[1]] * 2)
    np.testing.assert_allclose(out, part[0], atol=1e-6)
    assert (lse[:, :7] == -np.inf).all()
    np.testing.assert_allclose(lse[:, 7:], part[1][:, 7:] + np.log(2), rtol=1e-6)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_counts_for_nothing_may_hold_anything(value):
    outs = np.ones((1, 2, 1, 4), np.float32), np.full((1, 2, 1, 4), value, np.float32)
    lses = np.zeros((1, 1, 2), np.float32), np.full((1, 1, 2), -np.inf, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = fs.merge(outs, lses)
    assert (out == 1).all() and (lse == 0).all()
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(x, requires_grad=True) for x in (*outs, *lses)]
    out, lse = fs.merge(tensors[:2], tensors[2:])
    (out.sum() + lse.sum()).backward()
    assert all(x.grad.isfinite().all() for x in tensors)


def test_jax():
    jnp = pytest.importorskip("jax.numpy")
    q, k, v, _ = qkv()
    out, lse = fs.mha_fwd(q, k, v)
    merged, merged_lse = fs.merge([jnp.asarray(out)] * 2, [jnp.asarray(lse)] * 2)
    np.testing.assert_allclose(merged, out, atol=1e-6)
    np.testing.assert_allclose(merged_lse, lse + np.log(2), rtol=1e-6)


ERRORS = {
    "none": (([], []), "lses: 0 of 0 outs; as many, at least one"),
    "count": ((["out"], []), "lses: 0 of 1 outs; as many, at least one"),
    "shapes": (
        (["out", "lse"], ["lse", "lse"]),
        "outs: (2, 2, 50) among them; arrays of one shape",
    ),
    "lse": ((["out"], ["out"]), "lses: shape (2, 50, 2, 32); (2, 2, 50), as outs have it"),
}


@pytest.mark.parametrize(("given", "line"), ERRORS.values(), ids=ERRORS)
def test_errors(given, line):
    q, k, v, _ = qkv()
    named = dict(zip(("out", "lse"), fs.mha_fwd(q, k, v), strict=True))
    with pytest.raises(fs.InvalidArgument) as caught:
        fs.merge(*([named[name] for name in names] for names in given))
    assert str(caught.value) == line


def test_errors_of_what_are_no_such_arrays():
    torch = pytest.importorskip("torch")
    q, k, v, _ = qkv()
    out, lse = fs.mha_fwd(q, k, v)
    tensor = torch.from_numpy(out)
    float32 = "float32 or float16 or bfloat16"
    for given, line in (
        ((None, None), "outs: None; a sequence of arrays"),
        (([out, "lse"], [lse, lse]), "outs: 'lse' among them; arrays"),
        (([out, tensor], [lse, lse]), "outs: a torch.Tensor among them; as outs[0], a numpy.ndarr"),
        (([tensor], [lse]), "lses: a numpy.ndarray among them; as outs[0], a torch.Tensor"),
        (
            ([out[0, 0]], [lse[0]]),
            "outs: shape (2, 32); ([batch,] seqlen_q, num_heads",
        ),
        (([out.astype(int)] * 2, [lse] * 2), f"outs: dtype int64 among them; {float32}"),
        (([out, out.astype(np.float16)], [lse] * 2), "outs: dtype float16 among them; float32"),
        (([out], [lse.astype(float)]), "lses: dtype float64 among them; float32"),
    ):
        with pytest.raises(fs.InvalidArgument) as caught:
            fs.merge(*given)
        assert str(caught.value).startswith(line)
