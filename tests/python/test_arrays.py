"""NumPy, PyTorch and JAX arrays, none of them copied."""

import os
import subprocess
import sys
import weakref

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, both, normal, qkv
from flashsdk import _bindings, _frameworks, ops
from flashsdk._testing import reference


def address(x) -> int:
    return x.__array_interface__["data"][0]


# ---- NumPy


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_numpy_is_read_where_it_is(dtype):
    """A call with outputs given makes no array: what is allocated is a fraction of an input."""
    import tracemalloc

    q, k, v, dout = qkv((600, 700), 4, 64, dtype=dtype)
    given = {"out": np.empty_like(dout), "lse": np.empty((2, 4, 600), np.float32)}
    grads = {"dq": np.empty_like(q), "dk": np.empty_like(k), "dv": np.empty_like(v)}

    def both_given():
        fs.mha_fwd(q, k, v, **given)
        fs.mha_bwd(dout, q, k, v, *given.values(), **grads)

    both_given()
    tracemalloc.start()
    both_given()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < q.nbytes / 4


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_read_only_numpy(dtype):
    x = qkv((37, 50), (4, 2), 24, dtype=dtype)
    bias = np.linspace(-1, 1, 50, dtype=np.float32)[None, None, None]
    want = both(*x, bias=bias)
    for a in (*x, bias):
        a.setflags(write=False)
    assert_same_bits(want, both(*x, bias=bias))


def test_outputs_are_the_given_arrays():
    q, k, v, dout = qkv()
    out, lse = np.full_like(dout, np.nan), np.full((2, 2, 50), np.nan, np.float32)
    got = fs.mha_fwd(q, k, v, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert np.isfinite(out).all()
    one = fs.mha_fwd(q, k, v, lse=lse)
    assert one[1] is lse
    assert one[0] is not out
    dk = np.full_like(k, np.nan)
    dq, got_dk, dv = fs.mha_bwd(dout, q, k, v, out, lse, dk=dk)
    assert got_dk is dk
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_numpy_scalars_and_integers_as_numbers():
    x = qkv()
    want = both(*x, softmax_scale=0.5, softcap=2.0, dropout_p=0.5, seed=3, offset=4)
    numbers = {"softmax_scale": np.float64(0.5), "softcap": 2, "dropout_p": np.float32(0.5)}
    assert_same_bits(want, both(*x, **numbers, seed=np.int64(3), offset=np.uint8(4)))


def test_subclasses_and_non_native_bytes():
    q, k, v, _ = qkv()
    with pytest.raises(fs.Error, match=r"^q: "):
        fs.mha_fwd(q.astype(q.dtype.newbyteorder()), k, v)


class Temporary:
    """An array that lends what nobody else holds: it lives as long as the capsule."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    @property
    def __array_struct__(self):
        return self.array.copy().__array_struct__


def test_what_an_array_lends_lives_until_the_end():
    q, k, v, dout = normal(*[(1, 2048, 2, 64)] * 4)  # so large that the system gets it back
    want = both(q, k, v, dout)
    out, lse = np.empty_like(q), np.empty((1, 2, 2048), np.float32)
    lent = [Temporary(x) for x in (q, k, v, dout)]
    fs.mha_fwd(*lent[:3], out=out, lse=lse)
    grads = {name: np.empty_like(q) for name in ("dq", "dk", "dv")}
    fs.mha_bwd(lent[3], *lent[:3], Temporary(out), Temporary(lse), **grads)
    assert_same_bits(want, (out, lse, *grads.values()))


def test_what_memory_does_not_show_is_refused():
    """Masks of numpy.ma, and signs that PyTorch has yet to apply."""
    q, k, v, _ = qkv()
    with pytest.raises(fs.Error, match=r"^k: a masked array; "):
        fs.mha_fwd(q, np.ma.masked_array(k, np.zeros_like(k)), v)
    with pytest.raises(fs.Error, match=r"^out: a masked array; "):
        fs.mha_fwd(q, k, v, out=np.ma.masked_array(np.empty_like(q)))
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, (q, k, v))
    for names, tensors in (("q", (torch._neg_view(q), k, v)), ("v", (q, k, torch._neg_view(v)))):
        with pytest.raises(fs.Error, match=rf"^{names}: a view with is_neg\(\); resolve_neg"):
            fs.mha_fwd(*tensors)
    with pytest.raises(fs.Error, match=r"^out: a view with is_neg"):
        fs.mha_fwd(q, k, v, out=torch._neg_view(torch.empty_like(q)))
    assert torch.equal(
        fs.mha_fwd(torch._neg_view(-q).resolve_neg(), k, v)[0], fs.mha_fwd(q, k, v)[0]
    )
    adapter = pytest.importorskip("flashsdk.torch")
    assert torch.equal(adapter.attention(torch._neg_view(-q), k, v), fs.mha_fwd(q, k, v)[0])


# ---- other frameworks


def of_framework(name, dtype):
    """numpy -> array, array -> float32 numpy."""
    if name == "torch":
        torch = pytest.importorskip("torch")
        of = getattr(torch, dtype)
        return lambda x: torch.from_numpy(x.astype(np.float32)).to(of), lambda x: x.float().numpy()
    jnp = pytest.importorskip("jax.numpy")
    return lambda x: jnp.asarray(x.astype(np.float32)).astype(dtype), lambda x: np.asarray(
        x.astype(np.float32)
    )


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_compute_what_numpy_does(framework, dtype):
    to, back = of_framework(framework, dtype)
    x = qkv((37, 50), (4, 2), 24, dtype=dtype)
    bias = np.random.default_rng(3).standard_normal((1, 4, 37, 50)).astype(np.float32)
    slopes = np.linspace(0, 1, 4, dtype=np.float32)
    keywords = {"mask": fs.Causal(), "softcap": 3.0, "dropout_p": 0.1, "seed": 5}
    want = both(*x, bias=bias, alibi_slopes=slopes, **keywords)
    to32, _ = of_framework(framework, "float32")
    got = both(*map(to, x), bias=to32(bias), alibi_slopes=to32(slopes), **keywords)
    for a, b, like in zip(got, want, (x[0], None, *x[:3]), strict=True):
        assert type(a).__module__.split(".")[0].startswith(framework)
        assert str(a.dtype).endswith("float32" if like is None else dtype)
        assert np.array_equal(back(a), b.astype(np.float32))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_packed(framework):
    to, back = of_framework(framework, "float32")
    q, k, v, dout = (a[0] for a in qkv((37, 50), (4, 2), 24, batch=1))
    cu = [np.array(c, np.int32) for c in ([0, 7, 37], [0, 30, 50])]
    want = fs.mha_varlen_fwd(q, k, v, *cu, 30, 30)
    want += fs.mha_varlen_bwd(dout, q, k, v, *want, *cu, 30, 30)
    q, k, v, dout = map(to, (q, k, v, dout))
    if framework == "torch":
        import torch

        cu = [torch.from_numpy(c) for c in cu]
    else:
        import jax.numpy

        cu = [jax.numpy.asarray(c) for c in cu]
    got = fs.mha_varlen_fwd(q, k, v, *cu, 30, 30)
    got += fs.mha_varlen_bwd(dout, q, k, v, *got, *cu, 30, 30)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(back(a), b)


def test_torch_outputs_are_written_in_place():
    torch = pytest.importorskip("torch")
    q, k, v, dout = map(torch.from_numpy, qkv())
    out, lse = torch.full_like(dout, torch.nan), torch.full((2, 2, 50), torch.nan)
    got = fs.mha_fwd(q, k, v, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    dq = torch.full_like(q, torch.nan)
    assert fs.mha_bwd(dout, q, k, v, out, lse, dq=dq)[0] is dq
    assert not (out.isnan().any() or dq.isnan().any())


def test_torch_tensors_that_record_gradients():
    """A result without a graph trained nothing, and nobody was told."""
    torch = pytest.importorskip("torch")
    x = qkv()[:3]
    want = fs.mha_fwd(*x)[0]
    for n, name in enumerate("qkv"):
        inputs = [torch.from_numpy(a.copy()) for a in x]
        inputs[n].requires_grad_()
        line = f"{name}: requires a gradient, which mha_fwd does not give; flashsdk.torch.attention"
        with pytest.raises(fs.Unsupported, match=f"^{line}, flashsdk.attention, or torch.no_grad"):
            fs.mha_fwd(*inputs)
        with torch.no_grad():
            assert np.array_equal(fs.mha_fwd(*inputs)[0].numpy(), want)
        assert fs.attention(*inputs).requires_grad
    with pytest.raises(fs.Unsupported, match=r"^k: requires a gradient"):
        fs.mha_fwd(x[0], torch.from_numpy(x[1]).requires_grad_(), x[2])
    given = {
        "bias": torch.zeros(1, 1, *(a.shape[1] for a in x[:2])),
        "alibi_slopes": torch.ones(x[0].shape[2]),
        "sink": torch.zeros(x[0].shape[2]),
    }
    for name, parameter in given.items():
        with pytest.raises(fs.Unsupported, match=rf"^{name}: requires a gradient, .*no_grad\(\)$"):
            fs.mha_fwd(*x, **{name: parameter.requires_grad_()})
        with torch.no_grad():
            fs.mha_fwd(*x, **{name: parameter})
    packed = [torch.from_numpy(a[0]) for a in x]
    cu = torch.tensor([0, packed[0].shape[0]], dtype=torch.int32)
    keys = torch.tensor([0, packed[1].shape[0]], dtype=torch.int32)
    packed[0].requires_grad_()
    with pytest.raises(fs.Error, match=r"which mha_varlen_fwd does .*torch\.varlen_attention, or"):
        fs.mha_varlen_fwd(*packed, cu, keys, 100, 100)
    with torch.inference_mode():
        fs.mha_fwd(*(torch.from_numpy(a) for a in x))


def test_torch_strides():
    torch = pytest.importorskip("torch")
    x = qkv((37, 50), 4, 24)
    want = both(*x)
    heads_first = [torch.from_numpy(a).transpose(1, 2).contiguous().transpose(1, 2) for a in x]
    for a, b in zip(both(*heads_first), want, strict=True):
        assert np.array_equal(a.numpy(), b)


def test_jax_arrays_are_not_written():
    jnp = pytest.importorskip("jax.numpy")
    q, k, v, dout = map(jnp.asarray, qkv())
    out, lse = fs.mha_fwd(q, k, v)
    for name, given in (("out", jnp.zeros_like(out)), ("lse", jnp.zeros_like(lse))):
        with pytest.raises(fs.Error, match=rf"^{name}: "):
            fs.mha_fwd(q, k, v, **{name: given})
    with pytest.raises(fs.Error, match=r"^dq: "):
        fs.mha_bwd(dout, q, k, v, out, lse, dq=jnp.zeros_like(q))


def test_jax_says_what_traces_an_array():
    jax = pytest.importorskip("jax")
    q, k, v, _ = map(jax.numpy.asarray, qkv())

    def function(q):
        return fs.mha_fwd(q, k, v)[0].sum()

    def sparse(q):
        return fs.mha_fwd(q, k, v, mask=fs.layouts.dense(q.shape[1], k.shape[1]))[0].sum()

    each = jax.vmap(lambda q: function(q[None]))
    for traced in (jax.jit(function), jax.grad(function), each, jax.jit(sparse)):
        with pytest.raises(
            fs.Error, match=r"^q: traced by jax\.jit, .*; an array, or the functions of "
        ) as e:
            traced(q)
        assert len(str(e.value)) < 120
    out = jax.jit(
        lambda q: jax.pure_callback(
            lambda q: fs.mha_fwd(q, k, v)[0], jax.ShapeDtypeStruct(q.shape, q.dtype), q
        )
    )(q)
    assert np.array_equal(out, fs.mha_fwd(q, k, v)[0])


def test_torch_sees_that_outputs_were_written():
    """A backward that has saved them must not go on with other values."""
    torch = pytest.importorskip("torch")
    q, k, v, dout = map(torch.from_numpy, qkv())
    out, lse = fs.mha_fwd(q, k, v)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    calls = (
        (lambda: fs.mha_fwd(q, k, v, out=out), [out]),
        (lambda: fs.mha_fwd(q, k, v, lse=lse), [lse]),
        (
            lambda: fs.mha_bwd(dout, q, k, v, out, lse, dq=grads[0], dk=grads[1], dv=grads[2]),
            grads,
        ),
    )
    for call, outputs in calls:
        for output in outputs:
            leaf = torch.ones_like(output, requires_grad=True)
            loss = (leaf * output).sum()
            call()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    version = out._version
    with pytest.raises(fs.Error, match=r"^v: shape "):
        fs.mha_fwd(q, k, v[:, 1:], out=out)
    assert out._version == version
    with torch.inference_mode():
        fs.mha_fwd(q, k, v, out=torch.empty_like(out))  # has no version


SHARDED = """
import jax, numpy as np, flashsdk as fs
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("x",))
x = jax.device_put(np.ones((2, 40, 1, 8), np.float32), NamedSharding(mesh, PartitionSpec("x")))
blocks = fs.layouts.causal(40, 40, 16)
for mask in (None, blocks):
    try:
        fs.mha_fwd(x, x, x, mask=mask)
    except fs.Error as e:
        print(e)

second = jax.device_put(np.ones((2, 40, 1, 8), np.float32), jax.devices()[1])
out, lse = fs.mha_fwd(second, second, second, mask=blocks)
for result in (out, lse, *fs.mha_bwd(out, second, second, second, out, lse, mask=blocks)):
    assert result.devices() == second.devices(), result.devices()
assert np.array_equal(out + second, 2 * np.ones(out.shape))
"""


def test_jax_arrays_on_several_devices():
    pytest.importorskip("jax")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run(
        [sys.executable, "-c", SHARDED], env={**os.environ, **flags}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("q: ") and " does not lend its memory (" in line for line in lines)


def test_what_belongs_to_a_framework_and_is_no_array():
    torch = pytest.importorskip("torch")
    q, k, v, _ = qkv()
    with pytest.raises(fs.Error, match=r"^out: torch.dtype; an array of NumPy, PyTorch, "):
        fs.mha_fwd(q, k, v, out=torch.float32)


def test_torch_outputs_that_record_gradients():
    torch = pytest.importorskip("torch")
    q, k, v, dout = map(torch.from_numpy, qkv())
    out, lse = fs.mha_fwd(q, k, v)
    kept = torch.zeros_like(out).requires_grad_()
    for call in (
        lambda: fs.mha_fwd(q, k, v, out=kept),
        lambda: fs.mha_bwd(dout, q, k, v, out, lse, dq=kept),
    ):
        with pytest.raises(fs.Error, match=r"^(out|dq): a tensor that requires a gradient; "):
            call()
    assert not kept.any()
    with torch.no_grad():
        assert torch.equal(fs.mha_fwd(q, k, v, out=kept)[0], out)


def test_torch_dtypes_of_8_bits_are_named():
    torch = pytest.importorskip("torch")
    q, k, v, _ = (torch.from_numpy(x).to(torch.float8_e4m3fn) for x in qkv())
    with pytest.raises(fs.Error, match=r"^q: dtype float8_e4m3fn; float32, float16 or bfloat16$"):
        fs.mha_fwd(q, k, v)
    other = k.view(torch.float8_e5m2)
    with pytest.raises(fs.Error, match=r"^k: dtype float8_e5m2; float32, float16, bfloat16 or fl"):
        fs.mha_fwd(q.to(torch.float16), other, v)


UNWILLING_TORCH = """
import torch
del torch.Tensor.__dlpack_c_exchange_api__  # as before it had one
lend = torch.Tensor.__dlpack__

def lend_like_2_6(self, stream=None):
    if self.requires_grad or (self.dtype.is_floating_point and self.dtype.itemsize == 1):
        raise RuntimeError("Can't export")
    return lend(self, stream=stream)

torch.Tensor.__dlpack__ = lend_like_2_6
"""
UNWILLING = """
import flashsdk as fs, torch

q, k, v = torch.randn(3, 1, 20, 2, 16).half().unbind()
try:
    fs.mha_fwd(q, k, v, sink=torch.nn.Parameter(torch.zeros(2)))
except fs.Unsupported as e:
    assert str(e).startswith("sink: requires a gradient"), e
    print("refused")
with torch.no_grad():
    want, _ = fs.mha_fwd(q, k, v)
    kept = torch.nn.Parameter(torch.zeros_like(q))
    out, _ = fs.mha_fwd(*map(torch.nn.Parameter, (q, k, v)), out=kept)
    assert out is kept
    assert torch.equal(out, want)
narrow = [x.to(torch.float8_e4m3fn).transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
want, _ = fs.mha_fwd(q, *(x.half() for x in narrow))
assert torch.equal(fs.mha_fwd(q, *narrow)[0], want)
fs.kv_append(*narrow, k[:, :4] + 1, v[:, :4] + 1, torch.tensor([7], dtype=torch.int32))
assert torch.equal(narrow[0][:, 7:11].half(), (k[:, :4] + 1).to(torch.float8_e4m3fn).half())
for dtype, line in (
    (torch.float8_e4m3fn, "q: dtype float8_e4m3fn; float32, float16 or bfloat16"),
    (torch.float8_e5m2, "q: dtype float8_e5m2; float32, float16 or bfloat16"),
):
    try:
        fs.mha_fwd(q.to(dtype), k, v)
    except fs.Error as e:
        assert str(e) == line, e
        print("refused")
"""


def test_torch_tensors_that_pytorch_2_6_does_not_lend():
    torch = pytest.importorskip("torch")
    by_itself = not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    code = UNWILLING if by_itself else UNWILLING_TORCH + UNWILLING
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["refused"] * 3, done.stderr


def test_frameworks_mixed():
    """Results are what q is; the other arrays may come from elsewhere on the same device."""
    torch = pytest.importorskip("torch")
    q, k, v, _ = qkv()
    want, _ = fs.mha_fwd(q, k, v)
    out, _ = fs.mha_fwd(torch.from_numpy(q), k, torch.from_numpy(v))
    assert isinstance(out, torch.Tensor)
    assert np.array_equal(out.numpy(), want)


def test_a_checked_layout_keeps_its_arrays():
    """Of PyTorch's tensors the importer keeps nothing itself: what they lend ends with them."""
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(x.copy()) for x in fs.layouts.causal(64, 64, 16)._arrays]
    kept = [weakref.ref(x) for x in arrays]
    layout = _bindings.check_layout((16, 16, 64, 64, (None, 0, False), *arrays))
    del arrays
    assert all(x() is not None for x in kept)
    del layout
    assert all(x() is None for x in kept)


def test_the_core_imports_no_framework():
    code = (
        "import numpy as np, sys, flashsdk as fs; x = np.ones((1, 3, 1, 8), np.float32);"
        "fs.mha_fwd(x, x, x, mask=fs.layouts.causal(3, 3, 16));"
        "print({'torch', 'jax', 'cupy', 'ml_dtypes', 'matplotlib'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_import_takes_less_than_50_ms_after_numpy():
    """Of the processor's time, which other processes add little to."""
    code = (
        "import numpy, time; start = time.process_time(); import flashsdk;"
        "print(time.process_time() - start)"
    )
    runs = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(5)
    )
    assert min(float(done.stdout) for done in runs) < 0.05


FOREIGN = """
import sys
import flashsdk as fs
import numpy as np

class Foreign:
    requires_grad = True  # as PyTorch has it, which nobody has imported

    def __init__(self, array):
        self.array = array

    def __getattr__(self, name):
        return getattr(self.array, name)

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

q = np.random.default_rng(0).standard_normal((1, 20, 2, 16), np.float32)
out = Foreign(np.empty_like(q))
assert fs.mha_fwd(q, q, q, out=out)[0] is out
assert "torch" not in sys.modules
print(np.array_equal(out.array, fs.mha_fwd(q, q, q)[0]))
"""


def test_outputs_of_a_framework_with_gradients_of_its_own():
    done = subprocess.run([sys.executable, "-c", FOREIGN], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


# ---- how long what is lent is held


def test_reference_counts_are_given_back():
    x = qkv((20, 30), 2, 16)
    bias = np.zeros((1, 1, 1, 30), np.float32)
    given = np.empty_like(x[3])
    objects = [*x, bias, given]
    before = [sys.getrefcount(o) for o in objects]
    for _ in range(20):
        fs.mha_fwd(*x[:3], bias=bias, out=given)
        with pytest.raises(fs.Error, match=r"^softcap: -1"):
            fs.mha_fwd(*x[:3], bias=bias, out=given, softcap=-1)
    del _
    assert [sys.getrefcount(o) for o in objects] == before


def test_results_outlive_their_inputs():
    q, k, v, dout = qkv((300, 300), 4, 64)
    exact, _ = reference.forward(q[:, :5], k, v)
    out, lse = fs.mha_fwd(q, k, v)
    grads = fs.mha_bwd(dout, q, k, v, out, lse)
    copies = [x.copy() for x in (out, lse, *grads)]
    del q, k, v, dout
    np.full((4, 300, 300, 64), np.nan)
    assert_same_bits((out, lse, *grads), copies)
    assert np.abs(out[:, :5] - exact).max() < 2e-6


class Placed(np.ndarray):
    """An array that claims to be on a GPU."""


def test_only_what_lasts_is_kept_of_a_layout_on_a_gpu(monkeypatch):
    """Copies that a transform or a fake made would spoil the mask for all later calls."""
    made = []

    class Framework(type(_frameworks.of(np.zeros(1)))):
        lasts = False

        def device(self, like):
            return 0

        def to_device(self, array, like):
            made.append(array)
            return array

        def lasting(self, array):
            return self.lasts

    monkeypatch.setitem(_frameworks._known, Placed, framework := Framework())
    q = np.zeros((1, 64, 1, 16), np.float32).view(Placed)
    mask = fs.layouts.causal(64, 64, 16)
    calls = [ops._mask(mask, q) for framework.lasts in (False, True, True)]
    assert calls[0] == calls[1] == calls[2]
    assert len(made) == 16, "copied by each call until the copies last"


def test_what_lasts_in_torch():
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    found = []

    def look(x):
        found.append(_frameworks.of(x).lasting(x))
        return x.sum()

    look(torch.zeros(2))
    for transform in (torch.func.grad, torch.func.vmap, torch.func.functionalize):
        transform(look)(torch.zeros(2))
    with FakeTensorMode() as mode:
        look(mode.from_tensor(torch.zeros(2)))
    assert found == [True, False, False, False, False]


def test_a_layout_that_jax_places_while_it_traces(monkeypatch):
    """Its lists are arrays, to be kept for later calls, and no part of what is traced."""
    jax = pytest.importorskip("jax")
    framework = _frameworks.of(jax.numpy.zeros(1))
    monkeypatch.setattr(type(framework), "device", lambda self, like: jax.devices("cpu")[0])
    q = jax.numpy.zeros((1, 64, 1, 16))
    mask = fs.layouts.causal(64, 64, 16)

    @jax.jit
    def traced(x):
        ops._mask(mask, q)
        return x

    traced(q)
    lists = ops._mask(mask, q)[5:]
    assert [np.asarray(x).tolist() for x in lists] == [x.tolist() for x in mask._arrays]
