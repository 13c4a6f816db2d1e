"""The calls under ``flashsdk.jax``, attention, its gradients and what appends to a cache, as XLA
runs them.

Each is a custom call of ``libflashsdk_jax`` with what JAX asks of an operation: shapes, a rule for
jax.vmap (``_batched``) and one for arrays that are sharded (``_partitioned``). What is static is a
``Call``; all else is an operand, in the order of ``_ALWAYS`` and ``_OPTIONAL``, which the library
shares. In front of its own dimensions an operand has ``Call.outer`` dimensions of jax.vmap.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import _bindings

Arrays = tuple[Any, ...]

# Dimensions of the operands by name, as (batched, packed): b batch, h heads of queries, n heads of
# keys, all of which may be sharded; "_" is nobody else's.
_DIMS = {
    "q": ("b_h_", "_h_"),
    "k": ("b_n_", "_n_"),
    "v": ("b_n_", "_n_"),
    "out": ("b_h_", "_h_"),
    "lse": ("bh_", "h_"),
    "dout": ("b_h_", "_h_"),
    "dlse": ("bh_", "h_"),
    "bias": ("bh__", "_h__"),
    "alibi_slopes": ("bh", "_h"),
    "cu_seqlens_q": ("_", "_"),
    "cu_seqlens_k": ("_", "_"),
    "offsets": ("bh_", "_h_"),
    "indices": ("_", "_"),
    "seeds": ("b_", "_"),
    "sink": ("h", "h"),
    "seqused_q": ("b", ""),
    "seqused_k": ("b", ""),
    "block_table": ("b_", ""),
    "k_descale": ("bn", "_n"),
    "v_descale": ("bn", "_n"),
    "k_cache": ("b_n_", ""),
    "v_cache": ("b_n_", ""),
    "rotary_cos": ("__", ""),
    "rotary_sin": ("__", ""),
    "dq": ("b_h_", "_h_"),
    "dk": ("b_n_", "_n_"),
    "dv": ("b_n_", "_n_"),
    "dsink": ("h", "h"),
}
_ALWAYS = {
    "fwd": ("q", "k", "v"),
    "bwd": ("q", "k", "v", "out", "lse", "dout"),
    "append": ("k_cache", "v_cache", "k", "v", "seqused_k"),
}
_RESULTS = {"fwd": ("out", "lse"), "bwd": ("dq", "dk", "dv"), "append": ("k_cache", "v_cache")}
# Operands that jax.vmap may not leave as they are where only others are mapped: results lie in
# them, or the library wants them contiguous.
_WHOLE = ("k_cache", "v_cache", "seqused_q", "seqused_k")
# Bits of ``Call.given`` and the operands that they stand for.
DLSE, BIAS, ALIBI_SLOPES, LENGTHS, LAYOUT, SEED, SCALED, BAND = (1 << i for i in range(8))
SINK, USED_Q, USED_K, TABLE, QUERIES, ROTARY, K_DESCALE, V_DESCALE = (1 << i for i in range(8, 16))
_OPTIONAL = {
    DLSE: ("dlse",),
    BIAS: ("bias",),
    ALIBI_SLOPES: ("alibi_slopes",),
    LENGTHS: ("cu_seqlens_q", "cu_seqlens_k"),
    LAYOUT: ("offsets", "indices") * 4,
    SEED: ("seeds",),
    SINK: ("sink",),
    USED_Q: ("seqused_q",),
    USED_K: ("seqused_k",),
    TABLE: ("block_table",),
    QUERIES: ("q",),
    ROTARY: ("rotary_cos", "rotary_sin"),
    K_DESCALE: ("k_descale",),
    V_DESCALE: ("v_descale",),
}
# Of the operands that have heads of keys, which dimension these are.
_HEADS_OF_KEYS = {"k": -2, "v": -2, "k_descale": -1, "v_descale": -1}


class Call(NamedTuple):
    """What is static about a call: part of the program that XLA compiles."""

    given: int  # bits, of the operands that are there
    outer: int = 0  # dimensions of jax.vmap in front of every operand
    max_seqlen_q: int = 0  # of packed sequences
    max_seqlen_k: int = 0
    left: int = 0  # of a band
    right: int = 0
    top_left: bool = False
    block_q: int = 0  # of a layout
    block_k: int = 0
    seqlen_q: int = 0
    seqlen_k: int = 0
    deterministic: bool = False
    num_splits: int = 0
    rotary_interleaved: bool = False  # of what is appended
    q_advances: bool = False
    softmax_scale: float = 0.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    backend: str = ""

    @property
    def packed(self) -> bool:
        return bool(self.given & LENGTHS)

    def operands(self, op: str) -> tuple[str, ...]:
        """Their names."""
        optional = (names for bit, names in _OPTIONAL.items() if self.given & bit)
        return sum(optional, _ALWAYS[op])

    def results(self, op: str) -> tuple[str, ...]:
        """Theirs; those that are named as an operand have its shape."""
        more = {"bwd": (SINK, "dsink"), "append": (QUERIES, "q")}
        bit, name = more.get(op, (0, ""))
        return _RESULTS[op] + ((name,) if self.given & bit else ())

    def dims(self, op: str, name: str) -> str:
        """As ``_DIMS`` names them."""
        own = _DIMS[name][self.packed]
        # Pages belong to all sequences, and whoever writes to them has all.
        paged = self.given & TABLE and (op == "append" or name in ("k", "v"))
        return own.replace("b", "_") if paged else own

    def attributes(self) -> dict[str, Any]:
        """As the library reads them."""
        floats = (self.softmax_scale, self.softcap, self.dropout_p)
        integers = self[:15]
        return {
            "integers": np.array(integers, np.int64),
            "floats": np.array(floats, np.float32),
            "backend": self.backend,
        }


def forward(call: Call, *operands: Any) -> Arrays:
    """out, lse."""
    return _batched("fwd", call)(*operands)


def backward(call: Call, *operands: Any) -> Arrays:
    """dq, dk, dv, and dsink where there is a sink."""
    return _batched("bwd", call)(*operands)


def append(call: Call, *operands: Any) -> Arrays:
    """k_cache, v_cache, and q where it is given."""
    return _batched("append", call)(*operands)


# ---- XLA's custom calls


# Where the build put the extension: pip's editable one leaves it away from the sources.
_FILE = Path(_bindings.__file__).with_name("libflashsdk_jax.so")


def _register() -> None:
    """Loads the library, gives it the core and tells JAX of it."""
    if not _FILE.exists():
        raise ImportError(
            f"flashsdk.jax: this build has no {_FILE.name}; FLASHSDK_BUILD_JAX=ON makes one"
        )
    library = ctypes.CDLL(str(_FILE))
    # JAX would not say so before it has no backend any more.
    ours, theirs = library.flashsdk_jax_ffi_version(), _ffi_version()
    if ours > theirs:
        raise ImportError(
            f"flashsdk.jax: built with the headers of XLA's FFI 0.{ours}, and jaxlib "
            f"{jaxlib.version.__version__} has 0.{theirs}; build with those of the older jaxlib"
        )
    # Of its own: what is set on ctypes.pythonapi is set for the whole process.
    address = ctypes.PyDLL(None).PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    library.flashsdk_jax_use_core.argtypes = (ctypes.c_void_p,)
    if not library.flashsdk_jax_use_core(address(_bindings.core_api, b"flashsdk.core_api")):
        raise ImportError(f"flashsdk.jax: {_FILE.name} is of another build than flashsdk._bindings")
    for op in _RESULTS:
        for platform in ("cpu", "CUDA"):
            function = getattr(library, f"flashsdk_jax_{op}_{platform.lower()}")
            handler = jax.ffi.pycapsule(function)
            jax.ffi.register_ffi_target(f"flashsdk_{op}", handler, platform=platform)


def _ffi_version() -> int:
    """The minor version of the FFI of the XLA that is here."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    found = re.search(r"define XLA_FFI_API_MINOR (\d+)", header.read_text())
    return int(found[1]) if found else 0


_register()


def _call(op: str, call: Call, *operands: Any) -> Arrays:
    """On one device."""
    names = call.operands(op)
    given = dict(zip(names, operands))
    outer = tuple(
        max((x.shape[d] for x in operands if x.shape[d] != 1), default=1) for d in range(call.outer)
    )
    own = {name: x.shape[call.outer :] for name, x in given.items()}
    # Dimensions of jax.vmap may be sharded by their type.
    kinds = [jax.typeof(x) for x in operands]
    axes = [
        next((kind.sharding.spec[d] for kind in kinds if kind.sharding.spec[d]), None)
        for d in range(call.outer)
    ]
    float32, like = ("lse", "dsink"), given["k" if op == "append" else "q"]
    results = [
        jax.ShapeDtypeStruct(
            (*outer, *shape),
            jnp.float32 if name in float32 else given.get(name, like).dtype,
            **_type_of(given["k"], axes),
        )
        for name, shape in zip(call.results(op), _result_shapes(op, call, own))
    ]
    # Caches are written where they are: XLA copies those that somebody still wants to have.
    aliases = {0: 0, 1: 1} if op == "append" else None
    run = jax.ffi.ffi_call(f"flashsdk_{op}", results, input_output_aliases=aliases)
    return tuple(run(*operands, **call.attributes()))


def _result_shapes(op: str, call: Call, own: dict[str, Sequence[int]]) -> list[tuple[int, ...]]:
    """Without dimensions of jax.vmap, from the shapes of the operands."""
    shapes = dict(own)
    if op != "append":
        q, k, v = own["q"], own["k"], own["v"]
        lse = (q[1], q[0]) if call.packed else (q[0], q[2], q[1])
        shapes |= {"out": (*q[:-1], v[-1]), "lse": lse, "dq": q, "dk": k, "dv": v}
        shapes["dsink"] = own.get("sink", ())
    return [tuple(shapes[name]) for name in call.results(op)]


def varying(x: Any) -> frozenset[Any]:
    """The axes of jax.shard_map over which x differs."""
    kind = jax.typeof(x)
    return frozenset(
        kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
    )


def _type_of(x: Any, axes: Sequence[Any]) -> dict[str, Any]:
    """Of a result whose first dimensions are sharded so, for jax.ShapeDtypeStruct."""
    kind = jax.typeof(x)
    if not varying(x) and not any(axes):
        return {}
    result = {"sharding": NamedSharding(kind.sharding.mesh, PartitionSpec(*axes))}
    name = "manual_axis_type" if hasattr(kind, "manual_axis_type") else "vma"  # by JAX's release
    return result | {name: getattr(kind, name)}


# ---- sharded arrays


@functools.cache
def _partitioned(op: str, call: Call) -> Callable[..., Arrays]:
    """On the devices over which batch and heads are sharded, each with its own part."""
    run = custom_partitioning(functools.partial(_call, op, call))

    def shardings(mesh: Any, operands: Any, results: Any) -> _Shardings:
        return _shardings(op, call, mesh, operands, results)

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        given, made, shared, batch = shardings(mesh, operands, results)

        def on_shard(*operands: Any) -> Arrays:
            values = _call(op, call, *_with_own_head(op, call, mesh, shared, operands))
            if op != "bwd":
                return values
            dq, dk, dv, *dsink = values
            if batch:
                # Sequences that share the sink are on several devices.
                dsink = [jax.lax.psum(x, batch) for x in dsink]
            if shared:
                # So are queries of one key head.
                _, k, v, *_ = operands
                _, pull = jax.vjp(functools.partial(_own_head, mesh, shared), k, v)
                dk, dv = (jax.lax.psum(x, shared) for x in pull((dk, dv)))
            return dq, dk, dv, *dsink

        return mesh, on_shard, made, given

    def infer(mesh: Any, operands: Any, results: Any) -> Any:
        return shardings(mesh, operands, results).results

    def rule(mesh: Any, operands: Any, results: Any) -> Any:
        shapes = [x.shape for x in (*operands, *results)]
        return _sharding_rule(op, call, mesh, shapes, len(operands))

    run.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return run  # type: ignore[no-any-return]


class _Shardings(NamedTuple):
    operands: Arrays
    results: Arrays
    shared: tuple[str, ...]  # axes over which the queries of a key head are sharded
    batch: tuple[str, ...]  # and those of the batch


class _Sizes(NamedTuple):
    """Of a call's sharded dimensions."""

    outer: tuple[int, ...]
    b: int
    h: int
    n: int


def _sizes(call: Call, shapes: dict[str, Sequence[int]]) -> _Sizes:
    outer = tuple(
        max((shape[d] for shape in shapes.values() if shape[d] != 1), default=1)
        for d in range(call.outer)
    )
    k = shapes["k"][call.outer :]
    q = shapes["q"][call.outer :] if "q" in shapes else k
    return _Sizes(outer, 1 if call.packed else q[0], q[-2], k[-2])


def _dims(op: str, call: Call, shapes: Sequence[Sequence[int]]) -> tuple[_Sizes, list[list[str]]]:
    """For each operand and result what its dimensions are: "o0" and so on of jax.vmap, "b", "h",
    "n", or "" for those that are not sharded, such as those of size 1 that stand for all."""
    names = call.operands(op) + call.results(op)
    sizes = _sizes(call, dict(zip(names, shapes)))
    # What is dropped of a head depends on how many are before it.
    may = "b" if call.given & SEED else "bhn"
    dims = []
    for name, shape in zip(names, shapes):
        own = [d if d in may and n == getattr(sizes, d) else "" for d, n in
               zip(call.dims(op, name), shape[call.outer :])]  # fmt: skip
        outer = [f"o{d}" if n == sizes.outer[d] else "" for d, n in enumerate(shape[: call.outer])]
        dims.append(outer + own)
    return sizes, dims


def _sharding_rule(
    op: str, call: Call, mesh: Any, shapes: list[Sequence[int]], operands: int
) -> tuple[str, dict[str, Any]]:
    """For Shardy: which dimensions belong together, as einsum writes it."""
    sizes, dims = _dims(op, call, shapes)
    group = sizes.h // max(sizes.n, 1)
    # Query heads are key heads by groups, unless one of the two is all. Where an axis of the mesh
    # would be cut in two for that, which JAX cannot say, key heads stay in one piece.
    heads, factors = "h", {}
    if call.given & SEED:
        pass  # none of them is sharded
    elif group == 1:
        heads = "n"
    elif sizes.n > 1 and _whole_axes(mesh, sizes.n):
        heads, factors = "(n g)", {"g": group}
    whole: list[str] = []
    values = []
    for value in dims:
        words = []
        for d in value:
            if d == "" or (d == "n" and heads == "h"):
                whole.append(f"x{len(whole)}")
                words.append(whole[-1])
            else:
                words.append(heads if d == "h" else d)
        values.append(" ".join(words))
    rule = f"{', '.join(values[:operands])} -> {', '.join(values[operands:])}"
    return rule, {"need_replication_factors": tuple(whole), **factors}


def _whole_axes(mesh: Any, size: int) -> bool:
    """Whether the mesh's axes, in any order, divide `size` until it is used up."""
    for axes in itertools.permutations(n for n in mesh.shape.values() if n > 1):
        parts = 1
        for n in axes:
            if parts == size:
                break
            parts *= n
            if size % parts != 0:
                return False
    return True


def _shardings(op: str, call: Call, mesh: Any, operands: Any, results: Any) -> _Shardings:
    """Batch, heads and dimensions of jax.vmap as they are sharded, all else in one piece."""
    arrays = (*operands, *results)
    sizes, dims = _dims(op, call, [x.shape for x in arrays])
    found: dict[str, tuple[str, ...]] = {}  # axes of the mesh by dimension
    for x, value in zip(arrays, dims):
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else ()
        for d, axes in zip(value, spec):
            if d and axes:
                found.setdefault(d, axes if isinstance(axes, tuple) else (axes,))
    taken: set[str] = set()

    def usable(d: str, size: int) -> tuple[str, ...]:
        """The axes that cut `size` into equal parts."""
        axes: list[str] = []
        for axis in found.get(d, ()):
            if axis in taken or size % parts([*axes, axis]) != 0:
                break
            axes.append(axis)
        taken.update(axes)
        return tuple(axes)

    def parts(axes: Sequence[str]) -> int:
        return math.prod(mesh.shape[axis] for axis in axes)

    found.setdefault("h", found.get("n", ()))
    place = {f"o{i}": usable(f"o{i}", size) for i, size in enumerate(sizes.outer)}
    place["b"] = usable("b", sizes.b)
    found["n"] = found["h"]
    place["n"] = usable("n", sizes.n)
    shared: tuple[str, ...] = ()
    if parts(place["n"]) == sizes.n:
        # Heads of queries beyond: each device has one head of keys, that of its own.
        found["g"] = found["h"][len(place["n"]) :]
        shared = usable("g", sizes.h // max(sizes.n, 1))
    place["h"] = place["n"] + shared
    rest = found["h"][len(place["h"]) :]
    if rest and parts(found["h"]) % sizes.n == 0 and sizes.h % parts(found["h"]) == 0:
        # One axis for key heads and for their queries: each device takes its head from all.
        if not taken.intersection(rest):
            place["h"] = shared = found["h"]
            place["n"] = ()
    made = tuple(
        NamedSharding(mesh, PartitionSpec(*(place.get(d) or None for d in value))) for value in dims
    )
    return _Shardings(made[: len(operands)], made[len(operands) :], shared, place["b"])


def _with_own_head(
    op: str, call: Call, mesh: Any, shared: tuple[str, ...], operands: Arrays
) -> Arrays:
    """Those of a device: of k and v, where attention reads them, ``_own_head``."""
    if op == "append":
        return operands
    return tuple(
        _own_head(mesh, shared, x, axis=_HEADS_OF_KEYS[name])[0] if name in _HEADS_OF_KEYS else x
        for name, x in zip(call.operands(op), operands)
    )


def _own_head(mesh: Any, shared: tuple[str, ...], *kv: Any, axis: int = -2) -> Arrays:
    """Of all key heads the one that this device's queries have, if there are several."""
    heads = kv[0].shape[axis]
    if not shared or heads == 1:
        return kv
    devices = math.prod(mesh.shape[axis] for axis in shared)
    at = jax.lax.axis_index(shared) * heads // devices
    return tuple(jax.lax.dynamic_slice_in_dim(x, at, 1, axis=axis) for x in kv)


def by_types(op: str, run: Callable[..., Arrays], call: Call, *operands: Any) -> Arrays:
    """``run(*operands)``, where the arrays' types say how they are sharded on each device alone."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = {n for n, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}
    kinds = [jax.typeof(x) for x in operands]
    if not axes or not any(axis for kind in kinds for axis in kind.sharding.spec):
        return run(*operands)
    own = {name: kind.shape for name, kind in zip(call.operands(op), kinds)}
    shapes = _result_shapes(op, call, own)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    given, made, shared, _ = _shardings(op, call, mesh, kinds, results)

    def on_shard(*operands: Any) -> Arrays:
        return run(*_with_own_head(op, call, mesh, shared, operands))

    placed = [jax.sharding.reshard(x, to) for x, to in zip(operands, given)]
    specs = {"in_specs": tuple(x.spec for x in given), "out_specs": tuple(x.spec for x in made)}
    try:
        over = jax.shard_map(on_shard, axis_names=axes, **specs)
        return over(*placed)  # type: ignore[no-any-return]
    except ValueError:
        # Under a jax.vmap over an axis of the mesh, which is then none that shard_map knows.
        used = {axis for x in (*given, *made) for axis in _axes(x.spec)}
        if used == axes:
            raise
        over = jax.shard_map(on_shard, axis_names=used, **specs)
        return over(*placed)  # type: ignore[no-any-return]


def _axes(spec: Any) -> tuple[str, ...]:
    """All that a PartitionSpec names."""
    parts = (part if isinstance(part, tuple) else (part,) for part in spec if part)
    return tuple(itertools.chain.from_iterable(parts))


# ---- jax.vmap


@functools.cache
def _batched(op: str, call: Call) -> Callable[..., Arrays]:
    """With a rule for jax.vmap, which adds a dimension in front."""
    names, results = call.operands(op), len(call.results(op))

    def run(*operands: Any) -> Arrays:
        return _partitioned(op, call)(*operands)

    def rule(axis_size: int, in_batched: Sequence[bool], *operands: Any) -> Any:
        def widened(name: str, x: Any) -> Any:
            return jnp.broadcast_to(x, (axis_size if name in _WHOLE else 1, *x.shape))

        wide = [
            x if mapped else widened(name, x)
            for name, x, mapped in zip(names, operands, in_batched)
        ]
        return _batched(op, call._replace(outer=call.outer + 1))(*wide), (True,) * results

    batched = jax.custom_batching.custom_vmap(run)
    batched.def_vmap(rule)
    return batched  # type: ignore[no-any-return]
