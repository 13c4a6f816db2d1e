"""Bad input: one line that names the argument, what was given and what is allowed; nothing runs."""

import copy
import pickle
from types import SimpleNamespace

import flashsdk as fs
import numpy as np
import pytest
from cases import normal, numpy_dtype
from flashsdk import _frameworks
from numpy.lib.stride_tricks import as_strided


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def f16(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


def batched() -> dict:
    """A call of mha_fwd and mha_bwd that works: batch 2, 20 x 30, 4:2 heads, head_dim 16:24."""
    q, k, v, dout = normal((2, 20, 4, 16), (2, 30, 2, 16), (2, 30, 2, 24), (2, 20, 4, 24))
    lse = f32(2, 4, 20)
    out = np.zeros_like(dout)
    return {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}


def packed() -> dict:
    q, k, v, dout = normal((20, 4, 16), (30, 2, 16), (30, 2, 24), (20, 4, 24))
    lse, out = f32(4, 20), np.zeros_like(dout)
    cu = {
        "cu_seqlens_q": np.array([0, 5, 20], np.int32),
        "cu_seqlens_k": np.array([0, 30, 30], np.int32),
    }
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    return tensors | cu | {"max_seqlen_q": 15, "max_seqlen_k": 30}


def call(op: str, arguments: dict):
    """Calls `op` with arguments by name. Outputs that are not among them hold 7 and must keep it.

    `out` and `lse` of the backward are inputs; as outputs of the forward they are own_out, own_lse.
    """
    a = dict(arguments)
    if op.endswith("fwd"):
        like = {n: a.pop(n) for n in ("out", "lse")}
        del a["dout"]
        given = {n: a.pop(f"own_{n}") for n in like if f"own_{n}" in a}
        names = ("q", "k", "v")
    else:
        like = {f"d{n}": a[n] for n in "qkv"}
        given = {n: a.pop(n) for n in like if n in a}
        names = ("dout", "q", "k", "v", "out", "lse")
    if "varlen" in op:
        names += ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    made = {
        n: np.full_like(x, 7)
        for n, x in like.items()
        if isinstance(x, np.ndarray) and n not in given
    }
    positional = [a.pop(n) for n in names]
    try:
        return getattr(fs, op)(*positional, **made, **given, **a)
    finally:
        for n, x in made.items():
            assert (x.astype(np.float32) == 7).all(), f"{n} was written"


def refused(op: str, arguments: dict, argument: str, *words: str, code: str = "invalid_argument"):
    with pytest.raises(fs.Error) as caught:
        call(op, arguments)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{argument}: "), line
    given, _, allowed = line.partition(": ")[2].partition("; ")
    assert given and allowed, line
    for word in words:
        assert word in line, (word, line)
    assert caught.value.code == code, line
    return line


def test_the_calls_work_as_they_are():
    for op, make in (("mha", batched), ("mha_varlen", packed)):
        a = make()
        del a["out"], a["lse"], a["dout"]
        positional = [a.pop(n) for n in list(a)]
        assert getattr(fs, f"{op}_fwd")(*positional)
        with pytest.raises(AssertionError, match="was written"):
            call(f"{op}_bwd", make())


BATCHED = {
    # rank
    "q without batch": ({"q": f32(20, 4, 16)}, "q", "(20, 4, 16)", "batch"),
    "k of rank 5": ({"k": f32(2, 30, 2, 16, 1)}, "k", "(2, 30, 2, 16, 1)"),
    "v of rank 0": ({"v": np.float32(1).reshape(())}, "v", "()"),
    # shapes that do not belong together
    "k of another batch": ({"k": f32(3, 30, 2, 16)}, "k", "(3, 30, 2, 16)", "batch 2"),
    "k of another head_dim": ({"k": f32(2, 30, 2, 8)}, "k", "(2, 30, 2, 8)", "16"),
    "v of another seqlen": ({"v": f32(2, 31, 2, 24)}, "v", "(2, 31, 2, 24)", "30"),
    "v of another num_heads_kv": ({"v": f32(2, 30, 4, 24)}, "v", "(2, 30, 4, 24)", "2"),
    # heads
    "heads that do not divide": (
        {"k": f32(2, 30, 3, 16), "v": f32(2, 30, 3, 24)},
        "k", "num_heads_kv 3", "divisor", "4",
    ),
    # dtypes
    "q of float64": ({"q": np.zeros((2, 20, 4, 16))}, "q", "float64", "float32", "bfloat16"),
    "q of int32": ({"q": np.zeros((2, 20, 4, 16), np.int32)}, "q", "int32"),
    "k of another dtype": ({"k": f16(2, 30, 2, 16)}, "k", "float16", "float32"),
    "v of another dtype": (
        {"v": np.zeros((2, 30, 2, 24), numpy_dtype("bfloat16"))}, "v", "bfloat16", "float32"),
    # strides
    "q with a strided last dimension": (
        {"q": f32(2, 20, 4, 32)[..., ::2]}, "q", "2)", "contiguous"),
    "k reversed in the last dimension": (
        {"k": f32(2, 30, 2, 16)[..., ::-1]}, "k", "-1)", "contiguous"),
    "v transposed": (
        {"v": f32(2, 30, 24, 2).swapaxes(2, 3)}, "v", "contiguous"),
    # numbers
    "NaN scale": ({"softmax_scale": float("nan")}, "softmax_scale", "nan", "finite"),
    "scale beyond float32": ({"softmax_scale": 1e39}, "softmax_scale", "1e+39", "float32"),
    "softcap beyond float32": ({"softcap": 1e39}, "softcap", "1e+39", "float32"),
    "softcap below float32": ({"softcap": 1e-46}, "softcap", "1e-46", "0, or", "float32"),
    "infinite scale": ({"softmax_scale": float("inf")}, "softmax_scale", "inf", "finite"),
    "negative softcap": ({"softcap": -1.0}, "softcap", "-1", ">= 0"),
    "NaN softcap": ({"softcap": float("nan")}, "softcap", "nan"),
    "dropout of all": ({"dropout_p": 1.0}, "dropout_p", "1", "0 <= dropout_p < 1"),
    "negative dropout": ({"dropout_p": -0.1}, "dropout_p", "-0.1"),
    "NaN dropout": ({"dropout_p": float("nan")}, "dropout_p", "nan"),
    # backends
    "unknown backend": ({"backend": "tpu"}, "backend", "tpu", "cpu"),
    "GPU backend for arrays of the CPU": ({"backend": "sm90"}, "backend", "sm90", "cpu"),
    # masks
    "a string as mask": ({"mask": "causal"}, "mask", "causal"),
    "a boolean array as mask": ({"mask": np.ones((20, 30), bool)}, "mask", "is a bias"),
    # bias and slopes
    "bias of another shape": ({"bias": f32(2, 4, 20, 29)}, "bias", "(2, 4, 20, 29)", "30"),
    "bias of rank 2": ({"bias": f32(20, 30)}, "bias", "(20, 30)"),
    "bias of int32": ({"bias": np.zeros((1, 1, 1, 30), np.int32)}, "bias", "int32", "bool"),
    "bias with a strided last dimension": (
        {"bias": f32(1, 1, 20, 60)[..., ::2]}, "bias", "contiguous"),
    "slopes of float64": ({"alibi_slopes": np.zeros(4)}, "alibi_slopes", "float64", "float32"),
    "slopes for other heads": ({"alibi_slopes": f32(2)}, "alibi_slopes", "(2,)", "4"),
    "slopes for another batch": (
        {"alibi_slopes": f32(3, 4)}, "alibi_slopes", "(3, 4)", "batch 2"),
}  # fmt: skip


@pytest.mark.parametrize("op", ["mha_fwd", "mha_bwd"])
@pytest.mark.parametrize("case", BATCHED.values(), ids=BATCHED)
def test_batched(op, case):
    change, argument, *words = case
    refused(op, batched() | change, argument, *words)


@pytest.mark.parametrize("head_dim", [0, 577, 1024])
def test_head_dims(head_dim):
    code = "unsupported" if head_dim else "invalid_argument"
    q, k = f32(2, 20, 4, head_dim), f32(2, 30, 2, head_dim)
    refused("mha_fwd", batched() | {"q": q, "k": k}, "q", f"head_dim {head_dim}", "576", code=code)
    v = f32(2, 30, 2, head_dim)
    refused("mha_fwd", batched() | {"v": v}, "v", f"head_dim_v {head_dim}", "576", code=code)


GRADIENTS = {
    "dout of another shape": ({"dout": f32(2, 20, 4, 16)}, "dout", "(2, 20, 4, 16)", "24"),
    "dout of another dtype": ({"dout": f16(2, 20, 4, 24)}, "dout", "float16", "float32"),
    "out of another shape": ({"out": f32(2, 21, 4, 24)}, "out", "(2, 21, 4, 24)"),
    "lse of another shape": ({"lse": f32(2, 20, 4)}, "lse", "(2, 20, 4)", "num_heads 4"),
    "lse of float64": ({"lse": np.zeros((2, 4, 20))}, "lse", "float64", "float32"),
    "dlse of another shape": ({"dlse": f32(2, 4, 21)}, "dlse", "(2, 4, 21)"),
    "dlse of float16": ({"dlse": f16(2, 4, 20)}, "dlse", "float16", "float32"),
    "dq of another shape": ({"dq": f32(2, 20, 4, 15)}, "dq", "(2, 20, 4, 15)"),
    "dk of another dtype": ({"dk": f16(2, 30, 2, 16)}, "dk", "float16"),
    "dv strided in the last dimension": (
        {"dv": f32(2, 30, 2, 48)[..., ::2]}, "dv", "contiguous"),
    "dk with stride 0": (
        {"dk": as_strided(f32(16), (2, 30, 2, 16), (0, 0, 0, 4))}, "dk", "share memory"),
}  # fmt: skip


@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients(case):
    change, argument, *words = case
    refused("mha_bwd", batched() | change, argument, *words)


OUTPUTS = {
    "out of another shape": ({"own_out": f32(2, 20, 4, 16)}, "out", "(2, 20, 4, 16)", "24"),
    "out of another dtype": ({"own_out": f16(2, 20, 4, 24)}, "out", "float16", "float32"),
    "lse of float16": ({"own_lse": f16(2, 4, 20)}, "lse", "float16", "float32"),
    "lse of another shape": ({"own_lse": f32(8, 20)}, "lse", "(8, 20)"),
    "out strided in the last dimension": (
        {"own_out": f32(2, 20, 4, 48)[..., ::2]}, "out", "contiguous"),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs(case):
    change, argument, *words = case
    refused("mha_fwd", batched() | change, argument, *words)


def test_read_only_outputs():
    out = f32(2, 20, 4, 24)
    out.setflags(write=False)
    refused("mha_fwd", batched() | {"own_out": out}, "out", "read-only")
    refused("mha_bwd", batched() | {"dv": np.broadcast_to(np.float32(0), (2, 30, 2, 24))}, "dv")


def test_overlap():
    """An output shares memory with an input or with another output, whole or in part."""
    a = batched()
    q = a["q"]
    v = f32(2, 20, 4, 16)
    same = {"q": q, "k": v, "v": v}
    refused("mha_fwd", a | same | {"own_out": q}, "out", "overlaps q")
    buffer = f32(2 * q.size)
    first, second = buffer[: q.size].reshape(q.shape), buffer[q.size - 1 : -1].reshape(q.shape)
    refused("mha_fwd", a | same | {"k": first, "own_out": second}, "out", "overlaps k")
    out = f32(*q.shape)
    grads = a | same | {"out": out, "dout": out}
    refused("mha_bwd", grads | {"dq": out}, "dq", "overlaps")
    line = refused("mha_bwd", grads | {"dk": first, "dv": second}, "dk", "overlaps dv")
    assert "memory of its own" in line


def test_interleaved_arrays_do_not_overlap():
    q, k, v = (f32(2, 20, 3, 4, 16)[:, :, 0] for _ in range(3))
    wide = f32(2, 20, 3, 4, 16)
    q, k, out = (wide[:, :, n] for n in range(3))
    assert fs.mha_fwd(q, k, v, out=out)[0] is out


def _cu(*values, dtype=np.int32):
    return np.array(values, dtype)


PACKED = {
    "not ascending": ({"cu_seqlens_q": _cu(0, 15, 5)}, "cu_seqlens_q", "15", "5", "ascending"),
    "past the end": ({"cu_seqlens_k": _cu(0, 30, 31)}, "cu_seqlens_k", "31", "30"),
    "not from 0": ({"cu_seqlens_k": _cu(1, 30, 30)}, "cu_seqlens_k", "1", "0"),
    "negative": ({"cu_seqlens_q": _cu(0, -1, 20)}, "cu_seqlens_q", "-1", "ascending"),
    "of int64": ({"cu_seqlens_q": _cu(0, 5, 20, dtype=np.int64)}, "cu_seqlens_q", "int64", "int32"),
    "of another batch": ({"cu_seqlens_k": _cu(0, 10, 20, 30)}, "cu_seqlens_k", "(4,)", "3"),
    "of rank 2": ({"cu_seqlens_q": _cu([0, 5, 20])}, "cu_seqlens_q", "(1, 3)"),
    "empty": ({"cu_seqlens_q": _cu(), "cu_seqlens_k": _cu()}, "cu_seqlens_q", "0"),
    "max_seqlen_q too small": ({"max_seqlen_q": 14}, "max_seqlen_q", "14", "15"),
    "max_seqlen_k too small": ({"max_seqlen_k": 29}, "max_seqlen_k", "29", "30"),
    "negative max_seqlen": ({"max_seqlen_q": -1}, "max_seqlen_q", "-1"),
    "q of rank 4": ({"q": f32(1, 20, 4, 16)}, "q", "(1, 20, 4, 16)", "total_q"),
    "v of another total": ({"v": f32(29, 2, 24)}, "v", "(29, 2, 24)", "30"),
    "bias longer than max_seqlen": ({"bias": f32(2, 1, 20, 30)}, "bias", "15"),
}  # fmt: skip


@pytest.mark.parametrize("op", ["mha_varlen_fwd", "mha_varlen_bwd"])
@pytest.mark.parametrize("case", PACKED.values(), ids=PACKED)
def test_packed(op, case):
    change, argument, *words = case
    refused(op, packed() | change, argument, *words)


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_explain_takes_lengths_as_a_whole(op):
    """All of what makes sequences packed, as the call does, or nothing of it."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    a, lengths = batched(), {name: packed()[name] for name in names}
    tensors = [a[n] for n in "qkv"]
    assert fs.explain(*tensors, op=op).kernel
    for given, missing, allowed in (
        (names[2:], "cu_seqlens_q", "an array"),
        (names[3:], "cu_seqlens_q", "an array"),
        (names[:1], "cu_seqlens_k", "an array"),
        (names[:2], "max_seqlen_q", "an integer from 0 to 1073741824"),
        (names[:3], "max_seqlen_k", "an integer from 0 to 1073741824"),
    ):
        with pytest.raises(fs.Error) as caught:
            fs.explain(*tensors, **{name: lengths[name] for name in given}, op=op)
        assert str(caught.value) == f"{missing}: None; {allowed}"
    a = packed()
    assert fs.explain(*(a[n] for n in "qkv"), **lengths, op=op).kernel


@pytest.mark.parametrize("op", ["mha_fwd", "mha_bwd"])
@pytest.mark.parametrize(
    "blocks, seqlen",
    [
        ((2, 2), (20, 17)),
        ((1, 2), (16, 30)),
        ((3, 2), (40, 30)),
        ((3, 2, 2), (20, 30)),
        ((3, 1, 2, 2), (20, 30)),
    ],
)
def test_layouts_of_another_shape(op, blocks, seqlen):
    """For other lengths, heads or batches; (2, 2) blocks for 20 x 30 would fit."""
    mask = fs.BlockMask.from_dense(
        np.ones(blocks, bool), 16, seqlen_q=seqlen[0], seqlen_k=seqlen[1]
    )
    with pytest.raises(fs.Error) as caught:
        call(op, batched() | {"mask": mask})
    line = str(caught.value)
    assert line.startswith("mask")
    assert "\n" not in line
    assert "; " in line
    if len(blocks) == 2:
        assert any(str(n) in line for n in seqlen), line


def test_layout_for_packed_sequences():
    mask = fs.layouts.dense(15, 33, 16)
    with pytest.raises(fs.Error, match=r"^mask.*; "):
        call("mha_varlen_fwd", packed() | {"mask": mask})


@pytest.mark.parametrize("bad", [None, 3, "q", [[1.0]], object()])
def test_no_arrays(bad):
    for name in ("q", "k", "v"):
        refused("mha_fwd", batched() | {name: bad}, name)
    refused("mha_fwd", batched() | {"bias": bad if bad is not None else 1}, "bias")


class Unaskable:
    """Raises whatever it is asked for."""

    def __getattr__(self, name):
        raise RuntimeError(name)


class Shapeless:
    """An array but for its shape."""

    shape = None

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_odd_types(monkeypatch):
    """What a caller's type raises does not get through, nor what its name holds."""
    # torch.compile of PyTorch 2.6 would stumble over them where a later test compiles merge().
    monkeypatch.setattr(_frameworks, "_known", dict(_frameworks._known))
    q, k, v = (batched()[name] for name in "qkv")
    foreign = type("Foreign", (), {"__module__": 5})
    for bad in (Unaskable(), type("a\nb", (), {})(), foreign()):
        for name, call in {
            "q": lambda x: fs.mha_fwd(x, k, v),
            "k": lambda x: fs.mha_fwd(q, x, v),
            "out": lambda x: fs.mha_fwd(q, k, v, out=x),
            "lse": lambda x: fs.mha_fwd(q, k, v, lse=x),
        }.items():
            with pytest.raises(fs.Error, match=f"^{name}: .*; ") as caught:
                call(bad)
            assert str(caught.value).isprintable()
    named = type("a\nb", (Shapeless,), {"shape": (2, 20, 4, 24)})(q)
    with pytest.raises(fs.Error, match=r"^out: None; .*\.a b$"):
        fs.mha_fwd(named, k, v)
    with pytest.raises(fs.Error, match=r"^q: .*; an array with a shape"):
        fs.mha_fwd(Shapeless(q), k, v)
    with pytest.raises(fs.Error, match=r"^v: .*; an array with a shape"):
        fs.mha_fwd(q, k, Shapeless(v))


@pytest.mark.parametrize("bad", [-1e-50, -1e-300, -0.1])
def test_a_probability_below_zero(bad):
    """Also one that float32 makes 0 of."""
    refused("mha_fwd", batched() | {"dropout_p": bad}, "dropout_p", "0 <= dropout_p < 1")


@pytest.mark.parametrize("name", ["seed", "offset"])
@pytest.mark.parametrize("bad", [-1, 2**64, 1.5, "1", True, SimpleNamespace(shape=5)])
def test_seeds(name, bad):
    refused("mha_fwd", batched() | {name: bad, "dropout_p": 0.1}, name, str(bad))


TIMES = [np.timedelta64(5, "ns"), np.datetime64(7, "ns"), np.array(5, dtype=object)]


@pytest.mark.parametrize("bad", TIMES, ids=repr)
def test_numpy_times_and_objects_are_no_integers(bad):
    """item() of the first two is an int."""
    refused("mha_fwd", batched() | {"offset": bad, "dropout_p": 0.1}, "offset")
    with pytest.raises(fs.Error, match=r"^left: "):
        fs.Band(left=bad)


NO_NUMBERS = [
    *[True, False, np.True_, np.array(False), "1", b"1", 1e300, 10**400],
    *[np.ma.array(1.0, mask=True), np.timedelta64(1, "ns"), np.array(1, "m8[ns]")],
    *[np.array([1], "M8[ns]"), np.array(np.timedelta64(1, "ns"), dtype=object)],
]


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
@pytest.mark.parametrize("bad", NO_NUMBERS, ids=repr)
def test_numbers(name, bad):
    """A bool is a flag that slipped into another argument, not a factor of 1."""
    line = refused("mha_fwd", batched() | {name: bad}, name)
    allowed = "a number that float32 can hold"
    if name == "dropout_p":  # 1e300 is a number
        allowed = "0 <= dropout_p < 1" if bad == 1e300 else "a number, 0 <= dropout_p < 1"
    assert line.startswith(f"{name}: ") and line.endswith(f"; {allowed}")


@pytest.mark.parametrize("scale", [2, np.int64(2), np.float32(2), np.array(2.0)], ids=repr)
def test_numbers_of_other_types(scale):
    a = batched()
    out, _ = fs.mha_fwd(a["q"], a["k"], a["v"], softmax_scale=scale, softcap=scale)
    want, _ = fs.mha_fwd(a["q"], a["k"], a["v"], softmax_scale=2.0, softcap=2.0)
    assert (out == want).all()


MATRIX = np.zeros((40, 40))  # whose repr has many lines


@pytest.mark.parametrize(
    "change",
    [
        {"softmax_scale": MATRIX}, {"softmax_scale": 10**400}, {"softcap": "a"}, {"softcap": None},
        {"dropout_p": MATRIX}, {"seed": MATRIX}, {"offset": None}, {"deterministic": "no"},
        {"deterministic": MATRIX}, {"stream": MATRIX},
        {"backend": "x\ny"}, {"backend": "x" * 200}, {"backend": MATRIX}, {"backend": "\ud800"},
        {"backend": ""}, {"mask": MATRIX}, {"mask": "causal\n"},
    ],
    ids=str,
)  # fmt: skip
def test_what_was_given_is_shown_in_short(change):
    ((name, _),) = change.items()
    line = refused("mha_fwd", batched() | change, name)
    assert len(line) < 200


def test_numpys_booleans_are_booleans():
    a = batched()
    fs.mha_fwd(a["q"], a["k"], a["v"], deterministic=np.True_)


def test_extents_of_sums_are_clear():
    cu = {"cu_seqlens_q": _cu(0), "cu_seqlens_k": _cu(0, 30)}
    refused("mha_varlen_fwd", packed() | cu, "cu_seqlens_k", "(batch + 1 = 1)")


def test_columns_that_are_not_the_transpose_of_the_rows():
    """Of as many blocks, all in order."""
    good = fs.BlockMask.from_dense([[True, False], [True, True]], 16, seqlen_q=20, seqlen_k=30)
    parts = {n: getattr(good, n) for n in ("row_partial", "row_full", "col_partial", "col_full")}
    for offsets, indices in (
        ([0, 1, 3], [0, 0, 1]),  # of the other triangle
        ([0, 2, 3], [0, 1, 0]),
        ([0, 0, 2], [0, 1]),
    ):
        col_full = fs.masks.Csr(np.array([[offsets]], np.int32), np.array(indices, np.int32))
        mask = fs.BlockMask((16, 16), 20, 30, None, **parts | {"col_full": col_full})
        refused("mha_bwd", batched() | {"mask": mask}, "mask.col_full.indices")
    blocks = np.zeros((4, 2, 2), bool)
    blocks[[0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1]] = True
    heads, others = (
        fs.BlockMask.from_dense(x, 16, seqlen_q=20, seqlen_k=30) for x in (blocks, blocks[::-1])
    )
    parts = {n: getattr(heads, n) for n in parts} | {"col_full": others.col_full}
    mask = fs.BlockMask((16, 16), 20, 30, None, **parts)
    refused("mha_bwd", batched() | {"mask": mask}, "mask.col_full.indices")


@pytest.mark.parametrize("n", [None, 0, -1, 1.5, "two", True, 4097, 10**10, -(2**40), 10**30])
def test_number_of_threads(n):
    before = fs.get_num_threads()
    with pytest.raises(fs.Error) as caught:
        fs.set_num_threads(n)
    assert str(n) in str(caught.value)
    assert fs.get_num_threads() == before


def test_positional_and_unknown_keywords_are_type_errors():
    a = batched()
    with pytest.raises(TypeError):
        fs.mha_fwd(a["q"], a["k"], a["v"], 0.5)
    with pytest.raises(TypeError):
        fs.mha_fwd(a["q"], a["k"], a["v"], causal=True)


def test_error_is_a_value_error():
    assert issubclass(fs.Error, ValueError)
    with pytest.raises(ValueError, match="softcap"):
        call("mha_fwd", batched() | {"softcap": -1})


def test_the_first_bad_argument_is_named():
    """With several wrong, one line about one of them, not a list."""
    line = refused("mha_fwd", batched() | {"k": np.zeros((2, 30, 2, 16)), "softcap": -1}, "k")
    assert "softcap" not in line


@pytest.mark.parametrize(
    "batch, shape, what",
    [
        (2, (1, 3), "num_heads 3; num_heads 1 or 4"),
        (2, (3, 1), "batch 3; batch 1 or 2"),
        (1, (3, 1), "batch 3; batch 1"),
    ],
)
def test_a_layout_for_other_problems_is_told_as_a_whole(batch, shape, what):
    q, k, v = (np.zeros((batch, 32, 4, 8), np.float32) for _ in range(3))
    blocks = np.ones((*shape, 2, 2), bool)
    mask = fs.BlockMask.from_dense(blocks, (16, 16), seqlen_q=32, seqlen_k=32)
    with pytest.raises(fs.Error, match=rf"^mask: a layout of {what}$"):
        fs.mha_fwd(q, k, v, mask=mask)


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_explain_tells_the_tile(op):
    q = np.zeros((1, 8, 2, 16), np.float32)
    why = fs.explain(q, q, q, op=op)
    (kernel,) = [k for k in fs.kernels() if k["name"] == why.kernel]
    assert why.tile == (kernel["tile_m"], kernel["tile_n"])
    first = f"{why.kernel}, tiles of {why.tile[0]} queries x {why.tile[1]} keys"
    assert str(why).splitlines()[0] == first
    assert str(fs.Explanation("")) == "no kernel fits"


def test_explain_takes_the_calls_of_dropout():
    q = np.zeros((1, 8, 2, 16), np.float32)
    call = {"dropout_p": 0.5, "seed": 3, "offset": 2**40}
    assert "features" in fs.explain(q, q, q, **call).kernel
    with pytest.raises(fs.Error, match=r"^seed: -1; "):
        fs.explain(q, q, q, seed=-1)


CLASSES = {
    "invalid_argument": (fs.InvalidArgument, ValueError),
    "unsupported": (fs.Unsupported, NotImplementedError),
    "runtime": (fs.DeviceError, RuntimeError),
}


@pytest.mark.parametrize("code", CLASSES)
def test_each_code_is_a_class(code):
    kind, python_kind = CLASSES[code]
    # The extension, and the library of PyTorch's operators, have a message and a code.
    for error in (fs.Error("k: 3; 4 or 5", code), kind("k: 3; 4 or 5")):
        for one in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert type(one) is kind and isinstance(one, (python_kind,))
            assert isinstance(one, ValueError)  # for one minor version
            assert (one.code, str(one)) == (code, "k: 3; 4 or 5")
            assert (one.argument, one.given, one.allowed) == ("k", "3", "4 or 5")


def test_the_library_raises_the_class():
    q = f32(1, 2, 1, 600)
    with pytest.raises(NotImplementedError) as caught:
        fs.mha_fwd(q, q, q)
    assert type(caught.value) is fs.Unsupported
    assert caught.value.argument == "q"
    assert caught.value.given == "head_dim 600" and "576" in caught.value.allowed
    with pytest.raises(fs.InvalidArgument) as wrong:
        fs.mha_fwd(q.astype(np.float64), q, q)
    assert not isinstance(wrong.value, (NotImplementedError, RuntimeError))


def test_fields_of_a_text_that_holds_the_separator():
    with pytest.raises(fs.InvalidArgument) as caught:
        fs.Causal("a; b: 'c")
    e = caught.value
    assert (e.argument, e.given) == ("alignment", '"a; b: \'c"')
    assert e.allowed == '"bottom_right" or "top_left"'
    e = fs.Error("key: query's; 8, as query's; no more")  # a quote that nobody closes
    assert (e.argument, e.given, e.allowed) == ("key", "query's", "8, as query's; no more")
