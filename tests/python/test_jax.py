"""flashsdk.jax: values and gradients, under JAX's transformations, sharded, and what it refuses."""

import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import flashsdk as fs
import numpy as np
import pytest
from flashsdk._testing import naive
from flashsdk._testing.reference import Features

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
JAX = importlib.util.find_spec("jax") is not None
BUILT = Path(fs._bindings.__file__).with_name("libflashsdk_jax.so").exists()


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, cwd=HERE)


def test_flashsdk_imports_no_jax():
    code = "import sys, flashsdk; sys.exit(any(m.partition('.')[0] == 'jax' for m in sys.modules))"
    assert python("-c", code).returncode == 0


if not (JAX and BUILT):
    reason = "no JAX" if not JAX else "built without what is for JAX"
    pytest.skip(reason, allow_module_level=True)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jax_problems  # noqa: E402
from flashsdk import _jax_call  # noqa: E402
from flashsdk._commands import machine  # noqa: E402
from flashsdk.jax import attention, varlen_attention  # noqa: E402

CAUSAL = fs.Causal()
causal = functools.partial(attention, mask=CAUSAL)


def qkv(batch=2, seqlen=50, heads=4, heads_kv=2, dim=16, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = (heads, heads_kv, heads_kv)
    return [jax.random.normal(k, (batch, seqlen, n, dim), dtype) for k, n in zip(keys, sizes)]


def close(a, b, tolerance=3e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def gradients(function, *arrays):
    """Of a sum that treats no two elements alike."""
    return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), range(len(arrays)))(*arrays)


# ---- values and gradients


@pytest.mark.parametrize("name", jax_problems.PROBLEMS)
def test_agrees_with_the_reference(name):
    """Under jit, within the bounds of docs/numerics.md."""
    report = jax_problems.report(jax_problems.PROBLEMS[name])
    assert report.ok, report


def test_on_a_gpu(backend, record_property):
    """What a backend refuses has not passed: it is counted, and said in a warning."""
    done = python(
        "jax_problems.py", backend, JAX_PLATFORMS="", XLA_PYTHON_CLIENT_PREALLOCATE="false"
    )
    if "JAX has no GPU" in done.stderr:
        pytest.skip("JAX has no GPU")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == {}
    assert found["ran"], f"{backend} refuses all of it"
    record_property("refused", len(found["refused"]))
    if found["refused"]:
        names = ", ".join(found["refused"])
        warnings.warn(f"{backend} refuses {names}; {len(found['ran'])} ran", stacklevel=1)


def test_eager_is_the_core():
    """The same bits as without JAX, of arrays of NumPy as well."""
    q, k, v = map(np.asarray, qkv())
    out, lse = attention(q, k, v, mask=CAUSAL, return_lse=True)
    want_out, want_lse = fs.mha_fwd(q, k, v, mask=CAUSAL)
    assert np.array_equal(out, want_out) and np.array_equal(lse, want_lse)


def test_float64_is_what_jax_makes_of_it():
    """Float32, unless jax_enable_x64 is set: before we see it, as for JAX's own functions."""
    q, k, v = (np.asarray(x, np.float64) for x in qkv())
    want = attention(*(x.astype(np.float32) for x in (q, k, v)))
    for out in (attention(q, k, v), jax.jit(attention)(q, k, v)):
        assert out.dtype == jnp.float32 and np.array_equal(out, want)


def test_lse_alone_has_a_gradient():
    q, k, v = qkv()

    def lse(q, k):
        q, k = (jnp.swapaxes(x, 1, 2) for x in (q, jnp.repeat(k, 2, 2)))
        head = naive.Heads(Features(), q, k, k, None, None, scale=1 / 4)
        return naive.attention(head, xp=jnp)[1]

    got = gradients(lambda q, k: attention(q, k, v, return_lse=True)[1], q, k)
    close(got, gradients(lse, q, k), 1e-4)


def test_no_lse_no_dlse():
    """What nobody differentiates costs no pass over it."""
    q, k, v = qkv()
    text = jax.jit(jax.grad(lambda q: causal(q, k, v).sum())).lower(q).as_text()
    assert "flashsdk_bwd" in text
    call = next(line for line in text.splitlines() if "flashsdk_bwd" in line)
    assert call.partition("(")[2].partition(")")[0].count("%") == 6  # q, k, v, out, lse, dout


def test_dropout_follows_its_key():
    q, k, v = qkv()
    drop = jax.jit(lambda key: attention(q, k, v, dropout_p=0.3, dropout_key=key))
    first, second = drop(jax.random.key(1)), drop(jax.random.key(2))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, drop(jax.random.key(1)))
    assert np.array_equal(first, drop(jax.random.PRNGKey(1)))  # of either kind


def test_dropout_is_that_of_the_core():
    """Of each sequence by itself."""
    x = qkv(batch=3)
    key = jax.random.key(9)
    low, high = (int(word) for word in jax.random.bits(key, (2,), jnp.uint32))
    out = attention(*x, dropout_p=0.3, dropout_key=key, alibi_slopes=jnp.ones(4) / 8)
    for b in range(3):
        one = [np.asarray(a[b : b + 1]) for a in x]
        options = {"seed": low | high << 32, "offset": b, "alibi_slopes": np.ones(4, "f4") / 8}
        assert np.array_equal(out[b : b + 1], fs.mha_fwd(*one, dropout_p=0.3, **options)[0])


def test_dropout_drops_the_same_when_recomputed():
    q, k, v = qkv()

    def step(q, k, v):
        return attention(q, k, v, dropout_p=0.3, dropout_key=jax.random.key(1))

    close(gradients(jax.checkpoint(step), q, k, v), gradients(step, q, k, v), 0)


# ---- masks


def test_a_layout_is_an_argument():
    """Another layout of as many blocks does not compile again, and is no constant of it."""
    q, k, v = qkv(seqlen=64)
    traced = []

    @jax.jit
    def attend(q, k, v, mask):
        traced.append(mask)
        return attention(q, k, v, mask=mask)

    masks = [
        fs.BlockMask.from_dense(np.roll(np.eye(4, dtype=bool), n, 1), 16, seqlen_q=64, seqlen_k=64)
        for n in range(3)
    ]
    for mask in masks:
        want, _ = fs.mha_fwd(*map(np.asarray, (q, k, v)), mask=mask)
        assert np.array_equal(attend(q, k, v, mask), want)
    assert len(traced) == 1
    text = attend.lower(q, k, v, masks[0]).as_text()
    assert not re.search(r"stablehlo\.constant dense<[\[\"]", text)


@pytest.mark.parametrize("mask", [None, fs.Dense(), CAUSAL, fs.SlidingWindow(5, 2)], ids=str)
def test_every_mask_is_an_argument(mask):
    q, k, v = qkv()
    got = jax.jit(lambda q, k, v, mask: attention(q, k, v, mask=mask))(q, k, v, mask)
    want, _ = fs.mha_fwd(*map(np.asarray, (q, k, v)), mask=mask)
    assert np.array_equal(got, want)


def test_a_layout_comes_back_from_a_tree():
    mask = jax_problems.layout(64, 64, heads=2, band=CAUSAL)
    leaves, tree = jax.tree.flatten(mask)
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, fs.BlockMask) and again == mask and again.density == mask.density


# ---- transformations


def test_vmap_over_the_batch():
    q, k, v = qkv(batch=3)
    each = jax.vmap(lambda q, k, v: causal(q[None], k[None], v[None])[0])
    close(each(q, k, v), causal(q, k, v), 0)
    close(gradients(each, q, k, v), gradients(causal, q, k, v), 0)


def test_vmap_over_heads():
    q, k, v = qkv(heads_kv=4)

    def each(q, k, v):
        return causal(*(x[:, :, None] for x in (q, k, v)))[:, :, 0]

    over = jax.vmap(each, in_axes=2, out_axes=2)
    close(over(q, k, v), causal(q, k, v), 0)
    close(gradients(over, q, k, v), gradients(causal, q, k, v))


def test_vmap_over_queries_alone():
    """Keys that all share are read where they are; their gradients are summed."""
    q, k, v = qkv()
    many = jnp.stack([q, 2 * q, -q])
    each = jax.vmap(causal, in_axes=(0, None, None))
    close(each(many, k, v), jnp.stack([causal(x, k, v) for x in many]), 0)
    one_by_one = gradients(lambda q, k, v: jnp.stack([causal(x, k, v) for x in q]), many, k, v)
    close(gradients(each, many, k, v), one_by_one)
    text = jax.jit(each).lower(many, k, v).as_text()
    assert "tensor<1x2x50x2x16xf32>" in text and "tensor<3x2x50x2x16xf32>" not in text


def test_vmap_twice():
    q, k, v = qkv(batch=3)
    twice = jax.vmap(
        jax.vmap(lambda q, k, v: causal(q[None], k[None], v[None])[0]), (0, None, None)
    )
    many = jnp.stack([q, 2 * q])
    close(twice(many, k, v), jnp.stack([causal(x, k, v) for x in many]), 0)


def test_vmap_of_gradients():
    q, k, v = qkv(batch=3)

    def of_one(q, k, v):
        return gradients(lambda *x: causal(*(a[None] for a in x))[0], q, k, v)

    close(jax.vmap(of_one)(q, k, v), gradients(causal, q, k, v), 0)


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "mask", "all"])
@pytest.mark.parametrize("batch", [1, 2])
def test_vmap_of_what_belongs_to_scores(name, batch):
    """Mapped or shared, each element is the call that it is alone."""
    q, k, v = qkv(batch=3 * batch)
    q, k, v = (x.reshape(3, batch, *x.shape[1:]) for x in (q, k, v))
    bias = jax.random.normal(jax.random.key(3), (3, batch, 1, 50, 50))
    slopes = jnp.arange(12.0).reshape(3, 4) / 9
    layouts = [jax_problems.layout(50, 50, band=CAUSAL, seed=s) for s in (0, 0, 0)]
    mask = jax.tree.map(lambda *x: jnp.stack(x), *layouts)
    given = {"bias": bias, "alibi_slopes": slopes, "mask": mask}
    given = given if name == "all" else {name: given[name]}

    def each(q, k, v, given):
        return attention(q, k, v, **given)

    want = [each(q[i], k[i], v[i], jax.tree.map(lambda x, i=i: x[i], given)) for i in range(3)]
    close(jax.vmap(each)(q, k, v, given), jnp.stack(want), 0)
    shared = jax.tree.map(lambda x: x[1], given)
    want = [each(q[i], k[i], v[i], shared) for i in range(3)]
    close(jax.vmap(each, (0, 0, 0, None))(q, k, v, shared), jnp.stack(want), 0)


def test_vmap_of_dropout():
    """Each element drops what it would alone, with a key of its own or with one for all."""
    q, k, v = qkv(batch=3)
    keys = jax.random.split(jax.random.key(7), 3)

    def each(key, q, k, v):
        return attention(q[None], k[None], v[None], dropout_p=0.3, dropout_key=key)[0]

    want = [each(keys[i], q[i], k[i], v[i]) for i in range(3)]
    close(jax.vmap(each)(keys, q, k, v), jnp.stack(want), 0)
    want = [each(keys[0], q[i], k[i], v[i]) for i in range(3)]
    close(jax.vmap(each, (None, 0, 0, 0))(keys[0], q, k, v), jnp.stack(want), 0)


def test_vmap_of_packed_sequences():
    q, k, v = (x[0] for x in qkv())
    cu = jnp.array([[0, 20, 50], [0, 50, 50]], jnp.int32)

    def each(q, cu):
        return varlen_attention(q, k, v, cu, cu, 50, 50, mask=CAUSAL)

    many = jnp.stack([q, 2 * q])
    close(jax.vmap(each)(many, cu), jnp.stack([each(x, c) for x, c in zip(many, cu)]), 0)


def test_vmap_of_nothing():
    q, k, v = (x[:0] for x in qkv())
    assert jax.vmap(lambda q, k, v: causal(q[None], k[None], v[None]))(q, k, v).shape[:2] == (0, 1)


def test_scan_and_checkpoint():
    q, _, _ = qkv()

    def layer(x, _):
        return x + causal(x, x[:, :, :2], x[:, :, 2:]), None

    def net(body, x):
        return jax.lax.scan(body, x, None, length=3)[0]

    def loop(x):
        for _ in range(3):
            x, _ = layer(x, None)
        return x

    want = jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(loop(x)))))(q)
    for body in (layer, jax.checkpoint(layer)):
        got = jax.jit(jax.value_and_grad(lambda x, b=body: jnp.sum(jnp.sin(net(b, x)))))(q)
        close(got, want, 1e-4)


def test_sharded_arrays():
    """By jit, shard_map and sharding in types, on four devices, in a process that has them."""
    done = python("jax_sharding.py")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["checks"] >= 15 and not result["wrong"], "\n".join(
        f"{name}: {text}" for name, text in result["wrong"].items()
    )


# ---- what is refused, while it is traced

BAD_OPTIONS = {
    "softcap": (float("nan"), "softcap: nan; "),
    "softmax_scale": ("a", "softmax_scale: 'a'; "),
    "dropout_p": (1.0, "dropout_p: 1; "),
    "dropout_key": (3, "dropout_key: 3; "),
    "mask": ("causal", "mask: 'causal'; "),
    "backend": ("cuda", "backend: 'cuda'; "),
    "bias": (np.ones((3, 1, 50, 50), np.float32), "bias: shape (3, 1, 50, 50); "),
    "alibi_slopes": (np.ones(3, np.float32), "alibi_slopes: shape (3,); "),
    "deterministic": (2, "deterministic: 2; "),
    "return_lse": (1, "return_lse: 1; "),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_wrong_option_is_one_line(name):
    value, line = BAD_OPTIONS[name]
    options = {name: value} | ({"dropout_p": 0.5} if name == "dropout_key" else {})
    with pytest.raises(fs.Error) as raised:
        jax.eval_shape(lambda *x: attention(*x, **options), *qkv())
    assert str(raised.value).startswith(line)


q, k, v = qkv()
BAD_ARRAYS = {
    "q: shape (50, 4, 16); ": (q[0], k, v),
    "q: dtype int32; ": (q.astype(jnp.int32), k, v),
    "k: shape (2, 50, 2, 8); ": (q, k[..., :8], v),
    "k: dtype bfloat16; ": (q, k.astype(jnp.bfloat16), v),
    "k: num_heads_kv 2; ": (q[:, :, :3], k, v),
    "q: 1.0; an array": (1.0, k, v),
    "q: a list; an array": ([1.0], k, v),
    "q: dtype key<fry>; ": (jax.random.split(jax.random.key(0), (1, 4, 2, 16)), k, v),
    "q: head_dim 600; ": (jnp.ones((1, 4, 2, 600)),) * 3,
}


@pytest.mark.parametrize("line", BAD_ARRAYS)
def test_wrong_arrays_are_one_line(line):
    with pytest.raises(fs.Error) as raised:
        attention(*BAD_ARRAYS[line])
    assert str(raised.value).startswith(line)


def test_what_is_not_static_is_one_line():
    def refused(line, function, *args):
        with pytest.raises(fs.Error, match=line):
            function(*args)

    static = r"a number of Python, which the program is made for \(static_argnames of jax.jit\)"
    refused(
        f"^softmax_scale: a traced array; {static}, or q multiplied by it",
        jax.jit(lambda scale: attention(q, k, v, softmax_scale=scale)), 0.5,
    )  # fmt: skip
    refused(f"^softcap: .*; {static}", jax.jit(lambda x: attention(q, k, v, softcap=x)), 0.5)
    ends = np.array([0, 20, 50], np.int32)
    packed = [x[0] for x in (q, k, v)]
    longest = jax.jit(lambda n: varlen_attention(*packed, ends, ends, n, 50))
    refused(f"^max_seqlen_q: a traced array; {static}: any upper bound", longest, 50)
    export = pytest.importorskip("jax.export")
    (batch,) = export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (q, k, v)]
    line = r"^q: shape \(b, .*\), with a symbolic dimension; integers, "
    refused(line, export.export(jax.jit(attention)), *shapes)


def test_a_layout_of_other_lengths_is_one_line():
    with pytest.raises(fs.Error, match=r"^mask"):
        jax.jit(lambda mask: attention(q, k, v, mask=mask))(jax_problems.layout(64, 64))


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
def test_a_traced_number_is_one_line(name):
    with pytest.raises(fs.Error, match=f"{name}: a traced array; "):
        jax.jit(lambda x: attention(q, k, v, **{name: x}))(0.5)


@pytest.mark.parametrize("name", ["bias", "alibi_slopes"])
def test_no_gradient_of_constants(name):
    given = {"bias": jnp.ones((1, 1, 50, 50)), "alibi_slopes": jnp.ones(4)}[name]
    with pytest.raises(fs.Error, match=f"{name}: differentiated; ") as raised:
        jax.jit(jax.grad(lambda x: attention(q, k, v, **{name: x}).sum()))(given)
    assert raised.value.code == "unsupported"
    # Nobody asks for it, or it is cut off: none is needed.
    jax.grad(lambda q: attention(q, k, v, **{name: given}).sum())(q)
    cut = jax.grad(lambda x: attention(q, k, v, **{name: jax.lax.stop_gradient(x)}).sum())(given)
    assert not cut.any()


def test_no_second_derivative():
    with pytest.raises(fs.Error, match="grad: of a gradient; ") as raised:
        jax.grad(lambda q: jax.grad(lambda q: causal(q, k, v).sum())(q).sum())(q)
    assert raised.value.code == "unsupported"


def test_wrong_lengths_are_a_line_of_the_device():
    """They are operands, and read when the call runs."""
    cu = jnp.array([0, 30, 20, 50], jnp.int32)
    with pytest.raises(Exception, match="cu_seqlens_q: 30 before 20; ascending"):
        varlen_attention(q[0], k[0], v[0], cu, cu, 30, 30).block_until_ready()


def test_headers_of_a_newer_xla_are_an_import_error(monkeypatch):
    """Which JAX would only say when it has lost its backend."""
    monkeypatch.setattr(_jax_call, "_ffi_version", lambda: -1)
    with pytest.raises(ImportError, match="built with the headers of XLA's FFI"):
        _jax_call._register()


def test_without_the_library_it_is_an_import_error(monkeypatch, tmp_path):
    monkeypatch.setattr(_jax_call, "_FILE", tmp_path / "libflashsdk_jax.so")
    with pytest.raises(ImportError, match="FLASHSDK_BUILD_JAX=ON makes one"):
        _jax_call._register()


# ---- how it is reached


def test_it_is_found_lazily():
    code = "import sys, flashsdk as fs; assert 'jax' not in sys.modules; fs.jax.attention; fs.jax"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_page():
    """docs/jax.md works as it stands, its blocks one after another."""
    page = ROOT / "docs" / "jax.md"
    if not page.exists():
        pytest.skip("not a checkout")
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    want, _ = fs.mha_fwd(*(np.asarray(names[n][:1]) for n in "qkv"), mask=names["layout"])
    close(names["attend"](*(names[n][:1] for n in "qkv"), names["layout"]), jnp.asarray(want), 0)


def test_the_example_trains():
    """The same losses as with JAX's own attention, to its tolerance."""
    example = ROOT / "examples" / "train_flax.py"
    if not example.exists():
        pytest.skip("not a checkout")
    if importlib.util.find_spec("flax") is None:
        pytest.skip("flax is not installed")
    done = python(str(example), "--smoke")
    assert done.returncode == 0, done.stdout + done.stderr
    (seconds,) = re.findall(r"; (\d+\.\d) s$", done.stdout, re.MULTILINE)
    assert float(seconds) > 0


def test_the_benchmark_runs(tmp_path, monkeypatch):
    """A record of a CPU, and the table that the page makes of it."""
    benchmark = ROOT / "benchmarks" / "jax_bench.py"
    if not benchmark.exists():
        pytest.skip("not a checkout")
    done = python(str(benchmark), "--quick", "--out", str(tmp_path / "record.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["rows"]) == 8
    assert max(row["difference"] for row in record["rows"]) < 1e-3
    sources = record["kernel_sources"]
    assert sources == machine.kernel_sources_hash()  # None without the sources
    monkeypatch.syspath_prepend(str(benchmark.parent))
    tables = importlib.import_module("jax_tables")
    text = tables.block(record)
    assert (f", kernel sources {sources}. A quick run: " in text) == (sources is not None)
    reached = sum(row["ratio"] >= 3 for row in record["rows"])
    assert f"{reached} of 8 reach the goal of 3 ×" in text
    assert "| 1 × 512, 4 heads of 64 | causal |" in text
