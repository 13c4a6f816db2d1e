"""flashsdk.jax on a cache: sinks, used lengths, pages, splits, and new keys behind the used ones.

Values and gradients of sinks and lengths are held to the definition by test_jax.py, and sharded
caches by jax_sharding.py.
"""

import functools
import importlib.util
import re
from pathlib import Path

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, into_pages, normal, qkv
from flashsdk._testing import reference

if importlib.util.find_spec("jax") is None:
    pytest.skip("no JAX", allow_module_level=True)
if not Path(fs._bindings.__file__).with_name("libflashsdk_jax.so").exists():
    pytest.skip("built without what is for JAX", allow_module_level=True)

import jax
import jax.numpy as jnp
from flashsdk.jax import attention, kv_append, varlen_attention

CAUSAL = fs.Causal()
LENGTHS = np.array([50, 0, 17], np.int32)
USED = np.array([0, 7, 19], np.int32)  # of caches with room for 24 keys


def poisoned(lengths=LENGTHS, **changes):
    """q, k, v and dout, NaN behind the lengths of k and v."""
    q, k, v, dout = qkv((50, 50), (4, 2), batch=3, **changes)
    for x in (k, v):
        for rows, used in zip(x, lengths, strict=True):
            rows[used:] = np.nan
    return q, k, v, dout


def appending(dtype="float32"):
    """Two caches, what is written to them, queries, and the cosines and sines of positions."""
    shapes = ((3, 24, 2, 20), (3, 24, 2, 12), (3, 5, 2, 20), (3, 5, 2, 12), (3, 5, 4, 20))
    angles = np.arange(30)[:, None] / 3.0 ** np.arange(6)
    return *normal(*shapes, dtype=dtype), *(f(angles).astype(np.float32) for f in (np.cos, np.sin))


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_bits([np.asarray(a)], [np.asarray(b)])


# ---- attention


def test_everything_at_once_is_the_core():
    """Bit by bit, eagerly and through flashsdk.attention, with the gradient of each."""
    q, k, v, dout = poisoned()
    sink = np.linspace(-1, 1, 4, dtype=np.float32)
    used_q = np.array([3, 50, 9], np.int32)
    given = {"sink": sink, "seqused_q": used_q, "seqused_k": LENGTHS}
    out, lse = fs.mha_fwd(q, k, v, mask=CAUSAL, **given)
    want = fs.mha_bwd(dout, q, k, v, out, lse, mask=CAUSAL, **given)
    for attend in (attention, fs.attention):
        q_, k_, v_, s_ = map(jnp.asarray, (q, k, v, sink))

        def f(q, k, v, sink, attend=attend):
            more = given | {"sink": sink}
            return attend(q, k, v, mask=CAUSAL, num_splits=1, return_lse=True, **more)

        got, pull = jax.vjp(f, q_, k_, v_, s_)
        same(got, (out, lse))
        same(pull((jnp.asarray(dout), jnp.zeros_like(lse))), want)


def test_other_lengths_do_not_compile_again():
    q, k, v, _ = poisoned(np.zeros(3, int))
    k[:, :], v[:, :] = normal(k.shape, v.shape)
    traced = []

    @jax.jit
    def attend(q, k, v, used):
        traced.append(used)
        return attention(q, k, v, seqused_k=used, mask=CAUSAL)

    for used in ([0, 1, 50], [50, 50, 50], [7, 0, 0]):
        used = np.array(used, np.int32)
        same(attend(q, k, v, used), fs.mha_fwd(q, k, v, seqused_k=used, mask=CAUSAL)[0])
    assert len(traced) == 1


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages(page_size, dtype):
    """Whatever order they lie in: the bits of the same keys in one piece, and the definition's."""
    q, k, v, _ = qkv((3, 90), (4, 2), batch=3, dtype=dtype)
    used = np.array([90, 0, 33], np.int32)
    pages_k, pages_v, table = into_pages(k, v, used, page_size)
    attend = jax.jit(
        lambda q, k, v, used, table: attention(
            q, k, v, seqused_k=used, block_table=table, mask=CAUSAL, return_lse=True
        )
    )
    got = attend(q, pages_k, pages_v, used, table)
    same(got, fs.mha_fwd(q, k, v, seqused_k=used, mask=CAUSAL))
    if dtype == "float32":
        want = reference.forward(q, k, v, seqused_k=used, mask=CAUSAL)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    spare = np.setdiff1d(np.arange(len(pages_k)), table)
    pages_k[spare], pages_v[spare] = 0, 0
    same(attend(q, pages_k, pages_v, used, np.where(table < 0, 0, table)), got)


def test_a_sink_of_packed_sequences():
    q, k, v, dout = (x[0] for x in qkv((50, 50), (4, 2), batch=1))
    sink, cu = np.linspace(-1, 1, 4, dtype=np.float32), np.array([0, 20, 50], np.int32)
    attend = lambda sink: varlen_attention(q, k, v, cu, cu, 30, 30, sink=sink)  # noqa: E731
    out, lse = fs.mha_varlen_fwd(q, k, v, cu, cu, 30, 30, sink=sink)
    *_, dsink = fs.mha_varlen_bwd(dout, q, k, v, out, lse, cu, cu, 30, 30, sink=sink)
    got, pull = jax.vjp(jax.jit(attend), jnp.asarray(sink))
    same((got, *pull(jnp.asarray(dout))), (out, dsink))


def of_8_bits(dtype="bfloat16"):
    """q, k, v and descales."""
    q, k, v, _ = qkv((5, 50), (4, 2), batch=3, dtype=dtype)
    k, v = ((4 * x.astype(np.float32)).astype("float8_e4m3fn") for x in (k, v))
    rng = np.random.default_rng(1)
    return q, k, v, *(rng.uniform(0.1, 0.4, (3, 2)).astype(np.float32) for _ in "kv")


def descaled(q, k, v, k_descale, v_descale):
    return attention(q, k, v, k_descale=k_descale, v_descale=v_descale, return_lse=True)


def test_keys_of_8_bits_are_the_core():
    """Bit by bit, eagerly, under jit, and through flashsdk.attention and the core's own door."""
    for dtype in ("bfloat16", "float16"):
        q, k, v, *scales = of_8_bits(dtype)
        given = dict(zip(("k_descale", "v_descale"), scales, strict=True))
        want = fs.mha_fwd(q, k, v, **given)
        arrays = [jnp.asarray(x) for x in (q, k, v, *scales)]
        same(descaled(*arrays), want)
        same(jax.jit(descaled)(*arrays), want)
        same(fs.attention(*arrays[:3], return_lse=True, **given), want)


def test_keys_of_8_bits_have_no_gradient():
    q, k, v, *scales = map(jnp.asarray, of_8_bits())
    line = "k: dtype float8_e4m3fn; the dtype of q where a gradient is wanted, as float8_e4m3fn"
    for at in (0, 3):  # of q, of a descale
        with pytest.raises(fs.Unsupported, match=f"^{re.escape(line)}"):
            jax.grad(lambda *x: descaled(*x)[0].astype(jnp.float32).sum(), at)(q, k, v, *scales)
    with pytest.raises(fs.InvalidArgument, match=r"^k_descale: given; none, as k is float32 and"):
        attention(*(x.astype(jnp.float32) for x in (q, k, v)), k_descale=scales[0])


@pytest.mark.parametrize(
    "axes",
    [(0, 0, 0, 0, 0), (0, None, None, None, None), (None, 0, 0, None, 0), (0, 0, 0, 1, None)],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_vmap_of_keys_of_8_bits(axes, batch):
    """Of descales that all sequences share, too."""
    q, k, v, k_descale, v_descale = map(jnp.asarray, of_8_bits())
    q, k, v = (jnp.stack([x[:batch], x[1 : 1 + batch], -x[:batch]]) for x in (q, k, v))
    k_descale, v_descale = (jnp.stack([x[:batch], x[1 : 1 + batch], 2 * x[:batch]])
                            for x in (k_descale, v_descale[:, :1]))  # fmt: skip
    given = []
    for x, axis in zip((q, k, v, k_descale, v_descale), axes, strict=True):
        given.append(x[0] if axis is None else jnp.moveaxis(x, 0, axis))
    got = jax.vmap(descaled, axes)(*given)
    one = [
        [x if axis is None else jnp.take(x, n, axis) for x, axis in zip(given, axes, strict=True)]
        for n in range(3)
    ]
    same(got, [jnp.stack(x) for x in zip(*(descaled(*x) for x in one), strict=True)])
    # Of one row, that all share.
    given[3] = given[3][:, :1] if axes[3] == 0 else given[3][:1]
    got = jax.vmap(descaled, axes)(*given)
    one = [
        [x if axis is None else jnp.take(x, n, axis) for x, axis in zip(given, axes, strict=True)]
        for n in range(3)
    ]
    same(got, [jnp.stack(x) for x in zip(*(descaled(*x) for x in one), strict=True)])


# ---- under jax.vmap, where each element is the call that it is alone


def mapped(function, axes, *given):
    """Values and gradients of all that is float, of `function` over the first dimension."""
    size = next(len(x) for x, axis in zip(given, axes, strict=True) if axis == 0)
    floats = [n for n, x in enumerate(given) if x.dtype == np.float32]

    def with_gradients(*given):
        def of_floats(*x):
            rest = list(given)
            for n, value in zip(floats, x, strict=True):
                rest[n] = value
            return function(*rest)

        out, pull = jax.vjp(of_floats, *(given[n] for n in floats))
        return out, *pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    given = [jnp.asarray(x) for x in given]
    got = jax.vmap(with_gradients, axes)(*given)
    for n in range(size):
        each = [x if axis is None else x[n] for x, axis in zip(given, axes, strict=True)]
        for a, b in zip(got, with_gradients(*each), strict=True):
            np.testing.assert_array_equal(a[n], b)


def with_lengths(q, k, v, sink, used_q, used_k):
    return attention(q, k, v, sink=sink, seqused_q=used_q, seqused_k=used_k, mask=CAUSAL)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("axes", [(0, 0, 0, None, 0, 0), (0, None, None, 0, None, 0),
                                  (None, 0, 0, None, 0, None)], ids=str)  # fmt: skip
def test_vmap_of_lengths_and_sinks(axes, batch):
    rng = np.random.default_rng(0)
    shapes = ((batch, 20, 4, 8), (batch, 30, 2, 8), (batch, 30, 2, 8), (4,))
    q, k, v, sink = normal(*((2, *shape) if axis == 0 else shape
                             for shape, axis in zip(shapes, axes, strict=False)))  # fmt: skip
    used = [
        rng.integers(0, most, (2, batch) if axis == 0 else (batch,)).astype(np.int32)
        for most, axis in ((21, axes[4]), (31, axes[5]))
    ]
    mapped(with_lengths, axes, q, k, v, sink, *used)


def test_vmap_over_each_sequence_is_one_call():
    """What is joined with the batch again: the bits of the batch, lengths and all."""
    q, k, v, dout = poisoned()
    sink = np.linspace(-1, 1, 4, dtype=np.float32)

    def of_one(q, k, v, used, sink=sink):
        return attention(q[None], k[None], v[None], seqused_k=used[None], sink=sink)[0]

    want, lse = fs.mha_fwd(q, k, v, seqused_k=LENGTHS, sink=sink)
    got, pull = jax.vjp(lambda s: jax.vmap(of_one, (0, 0, 0, 0, None))(q, k, v, LENGTHS, s), sink)
    same(got, want)
    *_, dsink = fs.mha_bwd(dout, q, k, v, want, lse, seqused_k=LENGTHS, sink=sink)
    np.testing.assert_allclose(pull(jnp.asarray(dout))[0], dsink, rtol=1e-5)
    twice = jax.vmap(jax.vmap(of_one), (None, None, None, 0))
    many = np.stack([LENGTHS, LENGTHS // 2])
    other, _ = fs.mha_fwd(q, k, v, seqused_k=many[1], sink=sink)
    same(twice(q, k, v, many), np.stack([want, other]))


def test_vmap_of_pages():
    """Of one pool that all share, and of a pool of each."""
    q, k, v, _ = qkv((3, 90), (4, 2), batch=4)
    used = np.array([90, 1, 0, 33], np.int32)
    pages_k, pages_v, table = into_pages(k, v, used, 16)

    def attend(q, k, v, used, table):
        return attention(q, k, v, seqused_k=used, block_table=table)

    want = attend(q, pages_k, pages_v, used, table)
    q, used, table = (x.reshape(2, 2, *x.shape[1:]) for x in (q, used, table))
    got = jax.vmap(attend, (0, None, None, 0, 0))(q, pages_k, pages_v, used, table)
    same(got, want.reshape(2, 2, *want.shape[1:]))
    pages_k, pages_v = (np.stack([x, x[::-1]]) for x in (pages_k, pages_v))
    table[1] = np.where(table[1] < 0, table[1], pages_k.shape[1] - 1 - table[1])
    same(jax.vmap(attend)(q, pages_k, pages_v, used, table), got)


# ---- kv_append


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("options", [{}, {"rotary_interleaved": True, "q_advances": False}],
                         ids=["halves", "neighbours"])  # fmt: skip
def test_append_is_the_core(options, dtype):
    k_cache, v_cache, k, v, q, cos, sin = appending(dtype)
    append = jax.jit(functools.partial(kv_append, **options))
    got = append(k_cache, v_cache, k, v, USED, q=q, rotary_cos=cos, rotary_sin=sin)
    turned = fs.kv_append(k_cache, v_cache, k, v, USED, q=q, rotary_cos=cos, rotary_sin=sin,
                          **options)  # fmt: skip
    same(got, (k_cache, v_cache, turned))


EIGHT = jnp.float8_e4m3fn


def cache_of_8_bits(dtype="bfloat16"):
    """As appending(), the caches in 8 bits, and what they are divided by."""
    k_cache, v_cache, *rest = appending(dtype)
    factors = np.random.default_rng(1).uniform(0.01, 0.3, (3, 2)).astype(np.float32)
    scaled = {"k_descale": factors, "v_descale": factors[:1]}
    return *(x.astype(EIGHT) for x in (k_cache, v_cache)), *rest, scaled


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("given", ["both", "k_descale", "v_descale", ""])
def test_append_of_8_bits_is_the_core(given, dtype):
    k_cache, v_cache, k, v, q, cos, sin, scaled = cache_of_8_bits(dtype)
    scaled = {name: x for name, x in scaled.items() if given in ("both", name)}
    got = jax.jit(kv_append)(
        k_cache, v_cache, k, v, USED, q=q, rotary_cos=cos, rotary_sin=sin, **scaled
    )
    before = k_cache.copy()
    turned = fs.kv_append(
        k_cache, v_cache, k, v, USED, q=q, rotary_cos=cos, rotary_sin=sin, **scaled
    )
    assert [x.dtype for x in got] == [EIGHT, EIGHT, k.dtype]
    same(got, (k_cache, v_cache, turned))
    assert not np.array_equal(before.view(np.uint8), k_cache.view(np.uint8))


def test_pages_of_8_bits_are_donated():
    _, _, k, v, *_, scaled = cache_of_8_bits()
    table = np.random.default_rng(0).permutation(9).astype(np.int32).reshape(3, 3)
    pages = [np.zeros((9, 8, *x.shape[2:]), EIGHT) for x in (k, v)]
    over = [jnp.array(x) for x in pages]
    places = [x.unsafe_buffer_pointer() for x in over]
    append = functools.partial(kv_append, block_table=table, **scaled)
    got = jax.jit(append, donate_argnums=(0, 1))(*over, k, v, USED)
    fs.kv_append(*pages, k, v, USED, block_table=table, **scaled)
    same(got, pages)
    assert [x.unsafe_buffer_pointer() for x in got] == places


@pytest.mark.parametrize("axes", [(0, 0, 0), (None, 0, None), (0, None, 0)], ids=str)
def test_vmap_of_8_bits(axes):
    k_cache, v_cache, k, v, *_, scaled = cache_of_8_bits()

    def append(k_cache, k, k_descale):
        more = {"k_descale": k_descale, "v_descale": scaled["v_descale"]}
        return kv_append(k_cache, v_cache, k, v, USED, **more)

    given = [
        x if axis is None else np.stack([x, y])
        for x, y, axis in zip(
            (k_cache, k, scaled["k_descale"]), (-k_cache, -k, 2 * scaled["k_descale"]), axes
        )
    ]
    got = jax.vmap(append, axes)(*given)
    for n in range(2):
        want = append(*(x if axis is None else x[n] for x, axis in zip(given, axes)))
        same([x[n] for x in got], want)


def test_append_to_pages():
    _, _, k, v, *_ = appending()
    table = np.random.default_rng(0).permutation(9).astype(np.int32).reshape(3, 3)
    pages = [np.full((9, 8, *x.shape[2:]), np.nan, x.dtype) for x in (k, v)]
    got = jax.jit(kv_append)(*pages, k, v, USED, block_table=table)
    fs.kv_append(*pages, k, v, USED, block_table=table)
    same(got, pages)


def test_what_is_donated_is_written_in_place():
    """And what is not stays as it was."""
    k_cache, v_cache, k, v, *_ = appending()
    kept = jnp.asarray(k_cache)
    new_k, _ = kv_append(kept, v_cache, k, v, USED)
    same(kept, k_cache)
    assert not np.array_equal(new_k, k_cache)
    given = [jnp.array(k_cache), jnp.array(v_cache)]
    places = [x.unsafe_buffer_pointer() for x in given]
    got = jax.jit(kv_append, donate_argnums=(0, 1))(*given, k, v, USED)
    assert [x.unsafe_buffer_pointer() for x in got] == places
    same(got[0], new_k)


def test_a_scan_carries_the_cache():
    """Token by token under one jit: as all keys at once, and nothing is copied a step."""
    k, v, q = normal((2, 16, 2, 32), (2, 16, 2, 32), (2, 16, 4, 32))
    want, _ = fs.mha_fwd(q, k, v, mask=CAUSAL)

    def step(carry, token):
        k_cache, v_cache, used = carry
        q, k, v = (x[:, None] for x in token)
        k_cache, v_cache = kv_append(k_cache, v_cache, k, v, used)
        used = used + 1
        out = attention(q, k_cache, v_cache, seqused_k=used, num_splits=1)
        return (k_cache, v_cache, used), out[:, 0]

    caches = [jnp.full((2, 40, 2, 32), jnp.nan, jnp.float32) for _ in "kv"]
    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v)]

    def generate(k_cache, v_cache, tokens):
        return jax.lax.scan(step, (k_cache, v_cache, jnp.zeros(2, jnp.int32)), tokens)

    def copied(compiled):
        return re.findall(r"= f32\[2,40,2,32\]\S* copy\(", compiled.as_text())

    compiled = jax.jit(generate, donate_argnums=(0, 1)).lower(*caches, tokens).compile()
    assert copied(compiled) == []
    # The first step of it would have to, were they not given away.
    assert len(copied(jax.jit(generate).lower(*caches, tokens).compile())) == 2
    (_, _, used), out = compiled(*caches, tokens)
    np.testing.assert_allclose(np.moveaxis(out, 0, 1), want, atol=1e-5)
    same(used, np.full(2, 16, np.int32))


@pytest.mark.parametrize("axes", [(0, 0, 0, 0, 0, 0), (None, None, 0, 0, None, None),
                                  (0, 0, None, None, 0, 0)], ids=str)  # fmt: skip
@pytest.mark.parametrize("paged", [False, True])
def test_vmap_of_append(paged, axes):
    k_cache, v_cache, k, v, q, cos, sin = appending()
    table = np.array([[0, 1, 2], [5, 4, 3], [6, 8, 7]], np.int32)
    if paged:
        k_cache, v_cache = (x.reshape(9, 8, *x.shape[2:]) for x in (k_cache, v_cache))

    def append(k_cache, v_cache, k, v, used, q):
        pages = {"block_table": table} if paged else {}
        return kv_append(k_cache, v_cache, k, v, used, q=q, rotary_cos=cos, rotary_sin=sin, **pages)

    plain = (k_cache, v_cache, k, v, USED, q)
    other = (-k_cache, -v_cache, -k, -v, USED[::-1], -q)
    given = [
        x if axis is None else np.stack([x, y]) for x, y, axis in zip(plain, other, axes)
    ]  # fmt: skip
    got = jax.vmap(append, axes)(*given)
    for n in range(2):
        want = append(*(x if axis is None else x[n] for x, axis in zip(given, axes)))
        same([x[n] for x in got], want)


# ---- what is refused


def test_pages_have_no_gradient():
    q, k, v, _ = map(jnp.asarray, qkv((3, 48), (4, 2), batch=1))
    pages = (x.reshape(3, 16, 2, 32) for x in (k, v))
    table, used = jnp.arange(3, dtype=jnp.int32)[None], jnp.array([40], jnp.int32)
    attend = functools.partial(attention, seqused_k=used, block_table=table)
    k, v = pages
    line = "block_table: given; None where a gradient is wanted, as pages have no backward"
    with pytest.raises(fs.Unsupported, match=line):
        jax.jit(jax.grad(lambda q: attend(q, k, v).sum()))(q)
    # Nobody asks for it, or it is cut off: none is needed.
    cut = jax.grad(lambda q: (attend(jax.lax.stop_gradient(q), k, v) * q).sum())(q)
    same(cut, attend(q, k, v))


def test_appending_has_no_gradient():
    k_cache, v_cache, k, v, *_ = appending()
    with pytest.raises(fs.Unsupported, match=r"^kv_append: differentiated; jax.lax.stop_gradient"):
        jax.jit(jax.grad(lambda k: kv_append(k_cache, v_cache, k, v, USED)[0].sum()))(k)
    jax.grad(lambda x: kv_append(k_cache, v_cache, jax.lax.stop_gradient(x), v, USED)[0].sum())(k)


WRONG = {
    "sink: shape (3,); (num_heads 4)": {"sink": np.zeros(3, np.float32)},
    "sink: dtype int32; float32": {"sink": np.zeros(4, np.int32)},
    "sink: 'a'; an array of JAX or NumPy": {"sink": "a"},
    "seqused_q: shape (2,); (batch 3)": {"seqused_q": LENGTHS[:2]},
    "seqused_k: dtype float32; int32": {"seqused_k": LENGTHS.astype(np.float32)},
    "block_table: given; none without seqused_k": {"block_table": np.zeros((3, 2), np.int32)},
    "block_table: shape (2, 2); (batch 3": {
        "block_table": np.zeros((2, 2), np.int32), "seqused_k": LENGTHS
    },
    "num_splits: 0; an integer from 1 to": {"num_splits": 0},
    "num_splits: 1.5; an integer from 1 to": {"num_splits": 1.5},
}  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_argument_is_one_line_while_traced(line):
    with pytest.raises(fs.InvalidArgument) as caught:
        jax.eval_shape(lambda *x: attention(*x, **WRONG[line]), *poisoned()[:3])
    assert str(caught.value).startswith(line)


def test_splits_are_a_number_of_the_program():
    with pytest.raises(fs.InvalidArgument, match=r"^num_splits: a traced array; a number"):
        jax.jit(lambda n: attention(*poisoned()[:3], num_splits=n))(1)


def test_wrong_values_are_a_line_of_the_device():
    """They are operands, and read when the call runs."""
    q, k, v, _ = poisoned()
    with pytest.raises(Exception, match="seqused_k: 51 of sequence 1; 0 to seqlen_k, which is 50"):
        jax.block_until_ready(attention(q, k, v, seqused_k=np.array([0, 51, 0], np.int32)))
    table = np.array([[0, 1], [3, 0], [0, 0]], np.int32)
    with pytest.raises(Exception, match=r"block_table: 3 at \[1, 0\]; 0 to 2, the pages of k"):
        jax.block_until_ready(attention(q, k, v, seqused_k=LENGTHS + 1, block_table=table))


APPENDED = {
    "k_cache: None; an array": {"k_cache": None},
    "v: shape (3, 5, 2); (batch 3": {"v": np.zeros((3, 5, 2), np.float32)},
    "v: dtype float16; float32": {"v": np.zeros((3, 5, 2, 12), np.float16)},
    "k: seqlen_new 25; 0 to 24": {
        "k": np.zeros((3, 25, 2, 20), np.float32), "v": np.zeros((3, 25, 2, 12), np.float32)
    },
    "seqused_k: shape (2,); (batch 3)": {"seqused_k": USED[:2]},
    "seqused_k: dtype uint32; int32": {"seqused_k": USED.astype(np.uint32)},
    "q: shape (3, 5, 4, 16); (batch 3": {"q": np.zeros((3, 5, 4, 16), np.float32)},
    "rotary_sin: not given; a tensor": {"rotary_cos": np.zeros((30, 4), np.float32)},
    "rotary_cos: not given; a tensor": {"rotary_sin": np.zeros((30, 4), np.float32)},
    "rotary_interleaved: 2; ": {"rotary_interleaved": 2},
    "k_descale: given; none, as k_cache is float32": {"k_descale": np.ones((1, 1), np.float32)},
    "k_cache: dtype float8_e4m3fn; float32, the dtype of k; in": {
        "k_cache": np.zeros((3, 24, 2, 20), EIGHT), "v_cache": np.zeros((3, 24, 2, 12), EIGHT)
    },
}  # fmt: skip


@pytest.mark.parametrize("line", APPENDED)
def test_what_cannot_be_appended_is_one_line_while_traced(line):
    k_cache, v_cache, k, v, *_ = appending()
    given = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "seqused_k": USED}
    with pytest.raises(fs.InvalidArgument) as caught:
        jax.eval_shape(lambda: kv_append(**given | APPENDED[line]))
    assert str(caught.value).startswith(line)


def test_a_cache_larger_than_memory_is_traced():
    """As of one that is sharded, of which a process has a part."""
    like = jax.ShapeDtypeStruct
    cache, new = like((1 << 17, 1024, 8, 64), np.float32), like((1 << 17, 1, 8, 64), np.float32)
    made = jax.eval_shape(kv_append, cache, cache, new, new, like((1 << 17,), np.int32))
    assert [x.shape for x in made[:2]] == [cache.shape] * 2


def test_no_room_is_a_line_of_the_device():
    k_cache, v_cache, k, v, *_ = appending()
    with pytest.raises(Exception, match="seqused_k: 20 of sequence 2; 0 to 19, as the cache has"):
        jax.block_until_ready(kv_append(k_cache, v_cache, k, v, USED + np.int32(1)))


def test_arrays_of_jax_are_not_written():
    k_cache, v_cache, k, v, *_ = appending()
    line = r"^k_cache: an immutable array of JAX; flashsdk.jax.kv_append, which returns new ones$"
    with pytest.raises(fs.InvalidArgument, match=line):
        fs.kv_append(jnp.asarray(k_cache), v_cache, k, v, USED)
