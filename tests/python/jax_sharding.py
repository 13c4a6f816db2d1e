"""flashsdk.jax on four devices: threads of this processor, or with "gpu" GPUs, for test_jax.py.

Prints, as JSON, what went wrong by name; each check has the values and gradients of one device, and
its compiled program moves no array between devices that does not say so.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cuda" if "gpu" in sys.argv else "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import flashsdk as fs
import jax
import jax.numpy as jnp
import numpy as np
from flashsdk.jax import attention, kv_append, varlen_attention
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_problems import layout

GATHERS = r"all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"
CHECKS: list[Callable[[], None]] = []
GPUS = "gpu" in sys.argv
DEVICES = np.array(jax.devices()[:4])
FOUR = Mesh(DEVICES, ("x",))
TWO = Mesh(DEVICES.reshape(2, 2), ("x", "y"))
# A GPU sums gradients in any order, and has no float32.
DTYPE, TOLERANCE = (jnp.bfloat16, 6e-2) if GPUS else (jnp.float32, 2e-5)


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def qkvd(heads: int = 4, heads_kv: int = 2) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (heads, heads_kv, heads_kv, heads)
    shapes = [(4, 48, n, 16) for n in sizes]
    return [jax.random.normal(key, n, DTYPE) for key, n in zip(keys, shapes, strict=True)]


def both(attend: Callable[..., Any]) -> Callable[..., Any]:
    """out, dq, dk and dv of (q, k, v, dout)."""

    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    return run


def close(a: Any, b: Any, tolerance: float = TOLERANCE) -> None:
    for x, y in zip(a, b, strict=True):
        assert np.abs(np.asarray(x, np.float32) - np.asarray(y, np.float32)).max() < tolerance


def moved(function: Callable[..., Any], *arrays: Any) -> list[str]:
    """What the compiled program does between devices."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    assert "flashsdk_" in text
    return re.findall(GATHERS, text)


def sharded(
    attend: Callable[..., Any], mesh: Mesh, *specs: P, heads_kv: int = 2, summed: bool = False
) -> None:
    """On arrays of these shardings, of q and dout, and of k and v, if they have another."""
    arrays = qkvd(heads_kv=heads_kv)
    want = both(attend)(*arrays)
    q, kv = specs if len(specs) == 2 else specs * 2
    shardings = [NamedSharding(mesh, spec) for spec in (q, kv, kv, q)]
    arrays = [jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)]
    assert moved(attend, *arrays[:3]) == []
    collectives = moved(both(attend), *arrays)
    assert set(collectives) == ({"all-reduce"} if summed else set()), collectives
    got = jax.jit(both(attend))(*arrays)
    close(got, want)
    for x, sharding in zip(got, (shardings[0], *shardings[:3]), strict=True):
        assert x.sharding.is_equivalent_to(sharding, 4), (x.sharding, sharding)


def causal(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, mask=fs.Causal())


@check
def batch() -> None:
    sharded(causal, FOUR, P("x"))


@check
def heads() -> None:
    sharded(causal, TWO, P(None, None, "y"))


@check
def batch_and_heads() -> None:
    sharded(causal, TWO, P("x", None, "y"))


@check
def queries_of_one_key_head() -> None:
    sharded(causal, FOUR, P(None, None, "x"), P(), heads_kv=1, summed=True)


@check
def more_devices_than_key_heads() -> None:
    sharded(causal, FOUR, P(None, None, "x"), P(), heads_kv=2, summed=True)


@check
def masks_bias_and_slopes() -> None:
    bias = jax.random.normal(jax.random.key(1), (4, 4, 48, 48))
    mask, slopes = layout(48, 48, heads=4, band=fs.Causal()), jnp.arange(4) / 8

    def attend(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, bias=bias, mask=mask, alibi_slopes=slopes)

    sharded(attend, TWO, P("x", None, "y"))


def of_one(q: Any, k: Any, v: Any) -> Any:
    return causal(q[None], k[None], v[None])[0]


over_batch = jax.vmap(of_one)


@check
def under_vmap() -> None:
    sharded(over_batch, TWO, P("x", None, "y"))


@check
def packed_heads() -> None:
    q, k, v, _ = (x[0] for x in qkvd())
    cu = jnp.array([0, 20, 48], jnp.int32)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return varlen_attention(q, k, v, cu, cu, 28, 28)

    over_heads = NamedSharding(TWO, P(None, "y"))
    arrays = [jax.device_put(x, over_heads) for x in (q, k, v)]
    assert moved(attend, *arrays) == []
    close([jax.jit(attend)(*arrays)], [attend(q, k, v)])


@check
def a_sharded_sequence_is_gathered() -> None:
    arrays = qkvd()[:3]
    over = [jax.device_put(x, NamedSharding(TWO, P("x", "y"))) for x in arrays]
    close([jax.jit(causal)(*over)], [causal(*arrays)])


@check
def dropout_is_that_of_one_device() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, dropout_p=0.5, dropout_key=jax.random.key(1))

    sharded(attend, FOUR, P("x"))
    # Of heads that are sharded as well, and where the gradient of out is sharded otherwise.
    arrays = qkvd()
    specs = (P("x", None, "y"), P("x", None, "y"), P(None, None, "y"), P("y"))
    over = [jax.device_put(x, NamedSharding(TWO, s)) for x, s in zip(arrays, specs, strict=True)]
    close(jax.jit(both(attend))(*over), both(attend)(*arrays))


@check
def shard_map() -> None:
    spec = P("x", None, "y")
    arrays = qkvd()
    attend = jax.shard_map(causal, mesh=TWO, in_specs=(spec,) * 3, out_specs=spec)
    close(jax.jit(both(attend))(*arrays), both(causal)(*arrays))
    over = [jax.device_put(x, NamedSharding(TWO, spec)) for x in arrays]
    assert moved(both(attend), *over) == []


@check
def shard_map_with_whole_keys() -> None:
    spec, whole = P("x", None, "y"), P("x")
    arrays = qkvd(heads_kv=1)
    attend = jax.shard_map(causal, mesh=TWO, in_specs=(spec, whole, whole), out_specs=spec)
    close(jax.jit(both(attend))(*arrays), both(causal)(*arrays))


@check
def shard_map_with_a_mask_and_a_key() -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any, key: Any) -> Any:
        key = jax.random.fold_in(key, jax.lax.axis_index("x"))
        bias = jnp.zeros((1, 1, 48, 48))
        return attention(q, k, v, mask=mask, bias=bias, dropout_p=0.1, dropout_key=key)

    over = jax.shard_map(attend, mesh=FOUR, in_specs=(P("x"),) * 3 + (P(), P()), out_specs=P("x"))
    mask, key = layout(48, 48, band=fs.Causal()), jax.random.key(0)

    def with_mask(q: Any, k: Any, v: Any) -> Any:
        return over(q, k, v, mask, key)

    got = jax.jit(both(with_mask))(*qkvd())
    assert all(np.isfinite(x).all() for x in got)


USED = jnp.array([48, 0, 7, 31], jnp.int32)
SINK = jnp.arange(4.0) - 1


def of_used(q: Any, k: Any, v: Any) -> Any:
    """Keys behind the used ones are NaN, and sharded with the batch are the lengths."""
    behind = jnp.arange(48)[:, None, None] >= USED[:, None, None, None]
    k, v = (jnp.where(behind, jnp.nan, x) for x in (k, v))
    return attention(q, k, v, mask=fs.Causal(), seqused_k=USED)


@check
def used_lengths() -> None:
    sharded(of_used, TWO, P("x", None, "y"))


def sink_gradient(mesh: Mesh, spec: P, kv: P, heads_kv: int) -> None:
    """Summed over all sequences, on whatever devices these are."""

    def gradient(q: Any, k: Any, v: Any, dout: Any, sink: Any, used: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, sink: Any) -> Any:
            return attention(q, k, v, sink=sink, seqused_q=used, seqused_k=used)

        out, pull = jax.vjp(attend, q, k, v, sink)
        return out, *pull(dout)

    arrays = qkvd(heads_kv=heads_kv)
    want = gradient(*arrays, SINK, USED)
    assert np.abs(want[-1]).min() > 1e-3
    specs = (spec, kv, kv, spec)
    over = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    close(jax.jit(gradient)(*over, SINK, USED), want)


@check
def sink_of_a_sharded_batch() -> None:
    sink_gradient(TWO, P("x", None, "y"), P("x", None, "y"), 2)


@check
def sink_of_sharded_heads() -> None:
    sink_gradient(FOUR, P(None, None, "x"), P(), 2)


@check
def sink_and_lengths_under_shard_map() -> None:
    spec = P("x", None, "y")

    def attend(q: Any, k: Any, v: Any, sink: Any, used: Any) -> Any:
        return attention(q, k, v, sink=sink, seqused_k=used)

    over = jax.shard_map(
        attend, mesh=TWO, in_specs=(spec, spec, spec, P("y"), P("x")), out_specs=spec
    )
    q, k, v, dout = qkvd()
    got, pull = jax.vjp(jax.jit(lambda *x: over(*x, USED)), q, k, v, SINK)
    want, pull_want = jax.vjp(lambda *x: attend(*x, USED), q, k, v, SINK)
    close((got, *pull(dout)), (want, *pull_want(dout)))


def paged(q: Any, k: Any, v: Any, used: Any, table: Any) -> Any:
    return attention(q, k, v, seqused_k=used, block_table=table)


def pages() -> list[jax.Array]:
    """q, k and v in as many pages as sequences, lengths and a table."""
    q, k, v, _ = qkvd()
    return [q, k, v, USED, jnp.array([[2], [0], [3], [1]], jnp.int32)]


@check
def pages_of_a_sharded_batch() -> None:
    arrays = pages()
    specs = (P("x", None, "y"), P(None, None, "y"), P(None, None, "y"), P("x"), P("x"))
    over = [jax.device_put(x, NamedSharding(TWO, s)) for x, s in zip(arrays, specs, strict=True)]
    assert moved(paged, *over) == []
    close([jax.jit(paged)(*over)], [paged(*arrays)], 1e-9)


def descaled(q: Any, k: Any, v: Any, k_descale: Any, v_descale: Any) -> Any:
    return attention(q, k, v, mask=fs.Causal(), k_descale=k_descale, v_descale=v_descale)


def of_8_bits(heads_kv: int = 2) -> list[jax.Array]:
    """q, k, v and descales, those of v the same for all sequences."""
    q, k, v, _ = qkvd(heads_kv=heads_kv)
    k, v = ((4 * x).astype(jnp.float8_e4m3fn) for x in (k, v))
    k_descale = jnp.arange(1.0, 4 * heads_kv + 1).reshape(4, heads_kv) / 32
    return [q.astype(jnp.bfloat16), k, v, k_descale, k_descale[:1]]


@check
def keys_of_8_bits() -> None:
    arrays = of_8_bits()
    for spec, of_k, of_v in (
        (P("x", None, "y"), P("x", "y"), P(None, "y")),
        (P("x"), P("x"), P()),
        (P(None, None, "y"), P(None, "y"), P(None, "y")),
    ):
        specs = (spec, spec, spec, of_k, of_v)
        over = [jax.device_put(x, NamedSharding(TWO, s)) for x, s in zip(arrays, specs)]
        assert moved(descaled, *over) == []
        close([jax.jit(descaled)(*over)], [descaled(*arrays)], 1e-9)


@check
def keys_of_8_bits_on_more_devices_than_key_heads() -> None:
    """Each device takes the descale of its head as well."""
    arrays = of_8_bits()
    over = [jax.device_put(arrays[0], NamedSharding(FOUR, P(None, None, "x")))]
    over += [jax.device_put(x, NamedSharding(FOUR, P())) for x in arrays[1:]]
    assert moved(descaled, *over) == []
    close([jax.jit(descaled)(*over)], [descaled(*arrays)], 1e-9)


def appended(
    arrays: list[jax.Array], specs: tuple[P, ...], table: Any = None, moves: str = ""
) -> None:
    """What one device would write, where it is, and nothing else moves.

    The last of the arrays, those behind q, are descales.
    """

    def append(k_cache: Any, v_cache: Any, k: Any, v: Any, used: Any, q: Any, *scales: Any) -> Any:
        scaled = dict(zip(("k_descale", "v_descale"), scales, strict=False))
        return kv_append(
            k_cache, v_cache, k, v, used, block_table=table, q=q, rotary_cos=COS, rotary_sin=SIN,
            **scaled,
        )  # fmt: skip

    want = append(*arrays)
    over = [jax.device_put(x, NamedSharding(TWO, s)) for x, s in zip(arrays, specs, strict=True)]
    assert {*moved(append, *over)} == {*moves.split()}
    before = {x.data.unsafe_buffer_pointer() for x in over[0].addressable_shards}
    got = jax.jit(append, donate_argnums=(0, 1))(*over)
    close(got, want, 1e-9)
    assert before == {x.data.unsafe_buffer_pointer() for x in got[0].addressable_shards}


ANGLES = np.arange(60)[:, None] / 10.0 ** np.arange(8)
COS, SIN = (jnp.asarray(f(ANGLES), jnp.float32) for f in (np.cos, np.sin))


@check
def append_to_a_sharded_cache() -> None:
    q, k, v, _ = qkvd()
    used, rows = jnp.array([0, 43, 20, 1], jnp.int32), slice(5)
    spec = P("x", None, "y")
    specs = (spec,) * 4 + (P("x"), spec)
    appended([k, v, -k[:, rows], -v[:, rows], used, q[:, rows]], specs)


@check
def append_8_bits_to_a_sharded_cache() -> None:
    q, *caches, k_descale, v_descale = of_8_bits()
    k, v = (-x[:, :5].astype(q.dtype) for x in qkvd()[1:3])
    arrays = [*caches, k, v, jnp.array([0, 43, 20, 1], jnp.int32), q[:, :5], k_descale, v_descale]
    spec = P("x", None, "y")
    appended(arrays, ((spec,) * 4) + (P("x"), spec, P("x", "y"), P(None, "y")))


@check
def append_to_pages_of_sharded_heads() -> None:
    q, k, v, used, table = pages()
    new_k, new_v, *_ = (x[:, :5] for x in qkvd()[1:])
    arrays = [k, v, new_k, new_v, jnp.minimum(used, 43), q[:, :5]]
    spec, batch = P(None, None, "y"), P("x", None, "y")
    appended(arrays, (spec,) * 4 + (P(), spec), table)
    # Each device writes the keys of all sequences, as it has all pages.
    appended(arrays, (spec, spec, batch, batch, P("x"), batch), table, "all-gather")


@check
def pages_of_each_device_under_shard_map() -> None:
    """A pool of each device, whose table counts from its own first page."""

    def step(k_pages: Any, v_pages: Any, k: Any, v: Any, q: Any, used: Any, table: Any) -> Any:
        k_pages, v_pages = kv_append(k_pages, v_pages, k, v, used, block_table=table)
        return k_pages, v_pages, paged(q, k_pages, v_pages, used + k.shape[1], table)

    q, k, v, _ = qkvd()
    used, spec = jnp.array([0, 43, 20, 1], jnp.int32), P("x", None, "y")
    new = [-k[:, :5], -v[:, :5], q[:, :5], used]
    over = jax.shard_map(
        step,
        mesh=TWO,
        in_specs=(*(spec,) * 5, P("x"), P("x")),
        out_specs=(spec,) * 3,
    )
    own = jnp.array([[1], [0], [1], [0]], jnp.int32)
    everywhere = jnp.array([[1], [0], [3], [2]], jnp.int32)
    close(jax.jit(over)(k, v, *new, own), step(k, v, *new, everywhere), 1e-9)


def explicit(
    mesh_shape: tuple[int, ...], names: str, spec: P, kv: P, attend: Callable[..., Any] = causal
) -> None:
    arrays = qkvd()
    want = both(attend)(*arrays)
    mesh = jax.make_mesh(mesh_shape, tuple(names), axis_types=(AxisType.Explicit,) * len(names))
    with jax.set_mesh(mesh):
        over = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (spec, kv, kv, spec))
        ]
        out = jax.jit(attend)(*over[:3])
        assert jax.typeof(out).sharding.spec == jax.typeof(over[0]).sharding.spec, jax.typeof(out)
        assert moved(attend, *over[:3]) == []
        close(jax.jit(both(attend))(*over), want)


@check
def sharding_in_types() -> None:
    explicit((2, 2), "xy", P("x", None, "y"), P("x", None, "y"))


@check
def sharding_in_types_of_few_key_heads() -> None:
    explicit((4,), "x", P(None, None, "x", None), P())


@check
def used_lengths_with_sharding_in_types() -> None:
    explicit((2, 2), "xy", P("x", None, "y"), P("x", None, "y"), of_used)


@check
def append_with_sharding_in_types() -> None:
    _, k, v, _ = qkvd()
    used = jnp.array([0, 43, 20, 1], jnp.int32)
    arrays = (k, v, -k[:, :5], -v[:, :5], used)
    want = kv_append(*arrays)
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=DEVICES, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        spec = P("x", None, "y")
        specs = (*(spec,) * 4, P("x"))
        over = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs)]
        got = jax.jit(kv_append)(*over)
        assert jax.typeof(got[0]).sharding.spec == jax.typeof(over[0]).sharding.spec
        close(got, want, 1e-9)


@check
def sharding_in_types_under_vmap() -> None:
    """Right, if not in place: the axis that is mapped is gathered."""
    arrays = qkvd()
    want = both(over_batch)(*arrays)
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=DEVICES, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("x", None, "y"))
        over = [jax.device_put(x, sharding) for x in arrays]
        close([jax.jit(over_batch)(*over[:3])], want[:1])
        gradients = jax.grad(lambda *x: (over_batch(*x) ** 2).sum(), (0, 1, 2))
        close(jax.jit(gradients)(*over[:3]), gradients(*arrays[:3]), 1e-4)


def main() -> None:
    wrong = {}
    for each in CHECKS:
        try:
            each()
        except Exception:
            wrong[each.__name__] = traceback.format_exc()
    print(json.dumps({"checks": len(CHECKS), "wrong": wrong}))


if __name__ == "__main__":
    main()
