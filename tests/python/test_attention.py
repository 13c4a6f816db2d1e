"""flashsdk.attention: arrays by what they are, masks as everybody passes them."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import flashsdk as fs
import numpy as np
import pytest
from cases import normal
from flashsdk._testing import reference

LENGTHS = 20, 30
MASKS = {
    "none": None,
    "causal": fs.Causal(),
    "layout": fs.layouts.sliding_window(*LENGTHS, 16, left=9, right=0),
    "2-d": np.tri(*LENGTHS, 5, dtype=bool),
    "4-d": np.random.default_rng(0).random((2, 4, *LENGTHS)) < 0.5,
    "padding": (np.arange(30) < np.array([[12], [30]]))[:, None, None, :],
}


def numpy_arrays():
    """q (2, 20, 4, 16), k (2, 30, 2, 16), v (2, 30, 2, 24)"""
    return normal((2, 20, 4, 16), (2, 30, 2, 16), (2, 30, 2, 24))


def arrays_of(framework, *arrays):
    if framework == "numpy":
        return arrays
    if framework == "torch":
        return tuple(map(pytest.importorskip("torch").from_numpy, arrays))
    return tuple(map(pytest.importorskip("jax").numpy.asarray, arrays))


def dense(mask):
    if mask is None or isinstance(mask, np.ndarray):
        return mask
    return mask.to_dense(*LENGTHS)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", MASKS)
def test_each_framework_gets_its_own_arrays_and_the_definition(framework, name):
    q, k, v = numpy_arrays()
    mask = MASKS[name]
    want = reference.forward(
        q, k, v, mask=None if mask is None else np.broadcast_to(dense(mask), (2, 4, *LENGTHS))
    )
    given = arrays_of(framework, q, k, v)
    if isinstance(mask, np.ndarray):
        (mask,) = arrays_of(framework, mask)
    out, lse = fs.attention(*given, mask=mask, return_lse=True)
    assert type(out) is type(lse) is type(given[0])
    for got, exact in zip((out, lse), want, strict=True):
        got = np.asarray(got)
        hidden = np.isneginf(exact)
        assert (np.isneginf(got) == hidden).all()
        assert np.abs(np.where(hidden, 0, got) - np.where(hidden, 0, exact)).max() < 1e-5
    alone = fs.attention(*given, mask=mask)
    assert type(alone) is type(out) and (np.asarray(alone) == np.asarray(out)).all()


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_all_keywords_arrive(framework):
    q, k, v = numpy_arrays()
    bias, slopes = normal((1, 4, *LENGTHS), (4,))
    options = {"softmax_scale": 0.3, "softcap": 2.0, "backend": "cpu", "deterministic": True}
    want, _ = fs.mha_fwd(q, k, v, bias=bias, alibi_slopes=slopes, mask=fs.Causal(), **options)
    *given, bias, slopes = arrays_of(framework, q, k, v, bias, slopes)
    out = fs.attention(*given, bias=bias, alibi_slopes=slopes, mask=fs.Causal(), **options)
    assert np.abs(np.asarray(out) - want).max() < 1e-6


@pytest.mark.parametrize("mask", [MASKS["2-d"], MASKS["4-d"]], ids=["2-d", "4-d"])
def test_gradients_under_a_boolean_mask(mask):
    torch = pytest.importorskip("torch")
    adapter = importlib.import_module("flashsdk.torch")
    mask = torch.from_numpy(mask)
    q, k, v = (x.requires_grad_() for x in arrays_of("torch", *numpy_arrays()))
    bias = mask if mask.dim() == 4 else mask[None, None]
    want = torch.autograd.grad(adapter.attention(q, k, v, bias=bias).sum(), (q, k, v))
    for function in (
        fs.attention,
        adapter.attention,
        torch.compile(fs.attention, backend="eager", fullgraph=True),
    ):
        got = torch.autograd.grad(function(q, k, v, mask=mask).sum(), (q, k, v))
        assert all(map(torch.equal, got, want))


def test_a_boolean_mask_of_packed_sequences():
    torch = pytest.importorskip("torch")
    adapter = importlib.import_module("flashsdk.torch")
    q = torch.randn(30, 2, 16)
    lengths = torch.tensor([0, 12, 30], dtype=torch.int32)
    mask = torch.rand(18, 18) < 0.5
    packed = (q, q, q, lengths, lengths, 18, 18)
    want = adapter.varlen_attention(*packed, bias=mask[None, None])
    assert torch.equal(adapter.varlen_attention(*packed, mask=mask), want)
    assert not torch.equal(adapter.varlen_attention(*packed), want)


def test_jax_under_jit_and_grad():
    jax = pytest.importorskip("jax")
    q, k, v = arrays_of("jax", *numpy_arrays())
    mask = jax.numpy.asarray(MASKS["2-d"])

    def loss(q, mask):
        return fs.attention(q, k, v, mask=mask).sum()

    module = importlib.import_module("flashsdk.jax")
    want = jax.grad(lambda q: module.attention(q, k, v, bias=mask[None, None]).sum())(q)
    assert (jax.jit(jax.grad(loss))(q, mask) == want).all()
    key = jax.random.key(3)
    dropped = fs.attention(q, k, v, dropout_p=0.5, seed=key)
    assert (dropped == module.attention(q, k, v, dropout_p=0.5, dropout_key=key)).all()


def test_dropout_of_numpy_arrays_needs_a_seed():
    q, k, v = numpy_arrays()
    want, _ = fs.mha_fwd(q, k, v, dropout_p=0.5, seed=7)
    assert (fs.attention(q, k, v, dropout_p=0.5, seed=7) == want).all()
    with pytest.raises(
        fs.InvalidArgument, match=r"^seed: None; an integer from 0 to 2\^64 - 1, as"
    ):
        fs.attention(q, k, v, dropout_p=0.5)
    for wrong in (None, "a", np.zeros(2)):
        with pytest.raises(
            fs.InvalidArgument, match=r"^dropout_p: .*; a number, 0 <= dropout_p < 1"
        ):
            fs.attention(q, k, v, dropout_p=wrong)


WRONG = {
    "rank": (
        lambda m: m[None],
        None,
        r"^mask: shape \(1, 20, 30\); bool, \(seqlen_q, seqlen_k\) o",
    ),
    "dtype": (
        lambda m: m.astype(np.float32),
        None,
        r"^mask: an array of float32; bool, .*: numbers go to bias=, ",
    ),
    "size": (
        lambda m: m[:, :-1],
        None,
        r"^mask: shape \(20, 29\); \(1 or seqlen_q 20, 1 or seqlen_k 30\); of padding "
        r"\(batch, seqlen_k\) mask\[:, None, None, :\]$",
    ),
    "both": (lambda m: m, np.zeros((1, 1, 1, 30), np.float32), r"^bias: given beside a boolean m"),
}


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_mask_is_called_so(framework, name):
    change, bias, line = WRONG[name]
    mask = change(MASKS["2-d"])
    arrays = arrays_of(framework, *numpy_arrays(), np.ascontiguousarray(mask))
    bias = None if bias is None else arrays_of(framework, bias)[0]
    with pytest.raises(fs.InvalidArgument, match=line) as caught:
        fs.attention(*arrays[:3], mask=arrays[3], bias=bias)
    assert caught.value.argument == ("bias" if name == "both" else "mask")


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_what_is_wrong_in_common_ways_is_said_with_the_right_one(framework):
    q, k, v, bias = arrays_of(framework, *numpy_arrays(), np.zeros((20, 30), np.float32))
    with pytest.raises(fs.InvalidArgument, match=r"^bias: shape \(20, 30\); .* by \[None, None\]$"):
        fs.attention(q, k, v, bias=bias)
    for kind, name in ((fs.Causal, "Causal"), (fs.SlidingWindow, "SlidingWindow"), (fs.Band, "Ba")):
        with pytest.raises(fs.InvalidArgument, match=rf"^mask: .*; an instance, {name}\w*\(\)$"):
            fs.attention(q, k, v, mask=kind)
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    theirs = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 20, 30, device="cpu")
    with pytest.raises(fs.InvalidArgument, match=r"^mask: .*; flashsdk.BlockMask.from_flex of it$"):
        fs.attention(q, k, v, mask=theirs)


def test_what_is_no_array():
    with pytest.raises(fs.Error, match=r"^q: "):
        fs.attention([[1.0]], None, 3)
    q, k, v = numpy_arrays()
    with pytest.raises(fs.Error, match=r'^mask: "causal"|^mask: \'causal\'; Dense'):
        fs.attention(q, k, v, mask="causal")
    with pytest.raises(fs.Error, match=r"^return_lse: 2; "):
        fs.attention(q, k, v, return_lse=2)


def test_no_framework_is_imported_for_it():
    code = (
        "import sys, numpy as np, flashsdk as fs; q = np.zeros((1, 4, 1, 8), np.float32);"
        "fs.attention(q, q, q); print({'torch', 'jax', 'cupy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_page(capsys):
    page = Path(__file__).parents[2] / "docs" / "attention.md"
    if not page.exists():
        pytest.skip("not a checkout")
    pytest.importorskip("torch")
    names: dict = {}
    for example in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        if "init_device_mesh" not in example:  # of several processes: test_torch_dtensor.py's
            exec(example, names)
    assert "64" in capsys.readouterr().out
