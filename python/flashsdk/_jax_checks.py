"""What calls of ``flashsdk.jax`` check while they are traced: arrays of JAX have no memory then, so
the library is asked with arrays that merely look like them."""

from __future__ import annotations

import mmap
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _bindings, _log, ops
from ._errors import InvalidArgument, Unsupported, has, shown, type_name
from .masks import Band, BlockMask

if TYPE_CHECKING:
    from ._jax_attend import Options


def array(name: str, x: Any) -> Any:
    """As JAX's, or what traces one."""
    if isinstance(x, jax.Array):
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise InvalidArgument(f"{name}: dtype {x.dtype}; an array of numbers, which no key is")
        if not all(isinstance(n, int) for n in x.shape):  # of jax.export
            given = f"shape {tuple(x.shape)}, with a symbolic dimension"
            raise Unsupported(f"{name}: {given}; integers, which the program is made for")
        return x
    if not (has(x, "shape") and has(x, "dtype")):
        given = f"a {type_name(x)}" if isinstance(x, (list, tuple)) else shown(x)
        raise InvalidArgument(f"{name}: {given}; an array of JAX or NumPy")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name}: {shown(x)}; an array of JAX or NumPy") from None


def check(q: Any, k: Any, v: Any, lengths: tuple[Any, ...], o: Options) -> None:
    mask, backend = o.mask, o.backend
    if backend is not None and backend not in ("cpu", "sm80", "sm90"):
        raise InvalidArgument(f'backend: {shown(backend)}; "cpu", "sm80", "sm90" or None')
    layout: Any = mask
    if isinstance(mask, BlockMask):
        # Offsets of 0 are a layout without blocks, whatever the indices are.
        arrays = tuple(np.zeros(x.shape, x.dtype) for x in mask._arrays)
        band = mask.band or Band()
        layout = ops.PlacedLayout(mask.block_size, mask.seqlen_q, mask.seqlen_k, band, arrays)
    packed: Any = ()
    if lengths:
        packed = (*(np.zeros(x.shape, x.dtype) for x in lengths[:2]), *lengths[2:])
    options = (
        o.softmax_scale, ops._mask(layout, q), _like(o.bias), _like(o.alibi_slopes),
        o.softcap, o.dropout_p, 0, 0, o.deterministic, None,
        # What a GPU's kernels take is for them to say.
        None if backend in ("sm80", "sm90") else backend,
        # Lengths of 0, which have no pages.
        _like(o.seqused_q), _like(o.seqused_k), _like(o.sink), _like(o.block_table), o.num_splits,
        _like(o.k_descale), _like(o.v_descale),
    )  # fmt: skip
    if _log.ON:
        place = jax.default_backend()
        _log.call(
            "jax.varlen_attention" if lengths else "jax.attention",
            False,
            (_like(q), _like(k), _like(v)),
            packed,
            options,
            later="" if place == "cpu" else f"traced, {place} takes its kernel when it runs",
        )
    _bindings.explain(False, (_like(q), _like(k), _like(v)), packed, options)


def _like(x: Any) -> Any:
    """Of x's shape and dtype, with the memory of its last dimension."""
    if x is None:
        return None
    return np.broadcast_to(np.zeros(x.shape[-1:], x.dtype), x.shape)


def _untouched(x: Any) -> np.ndarray[Any, Any]:
    """Memory that nobody touches, nor need the system have it: a cache may be sharded."""
    dtype = np.dtype(x.dtype)
    size = prod(x.shape) * dtype.itemsize
    if size == 0:
        return np.empty(x.shape, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    room = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
    found: np.ndarray[Any, Any] = room.view(dtype).reshape(x.shape)
    return found


def check_append(arrays: dict[str, Any], interleaved: bool, advances: bool) -> None:
    """By the library, which is given lengths that no cache has: it looks at these last, and ends
    before it writes."""
    like = {name: _like(x) for name, x in arrays.items()}
    like["seqused_k"] = np.full(arrays["seqused_k"].shape, -1).astype(arrays["seqused_k"].dtype)
    for name, of in (("k_cache", "k_cache"), ("v_cache", "v_cache"), ("q_out", "q")):
        if of in arrays:
            like[name] = _untouched(arrays[of])
    names = (
        "k_cache", "v_cache", "k", "v", "seqused_k", "block_table", "q", "q_out", "rotary_cos",
        "rotary_sin", "k_descale", "v_descale",
    )  # fmt: skip
    try:
        _bindings.append(tuple(like.get(name) for name in names), interleaved, advances)
    except InvalidArgument as e:
        if not (e.argument == "seqused_k" and (e.given or "").startswith("-1 of sequence")):
            raise
