"""One call of ``flashsdk.jax``, from its arguments to custom calls of XLA, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from . import _jax_call as xla
from . import ops
from ._bands import no_mask
from ._block_lists import INT32_MAX, boolean_mask, check_rank, of_mask
from ._errors import Error, InvalidArgument, Unsupported, has, integer, shown, truth
from ._jax_checks import array, check
from .masks import Band, BlockMask, Dense, Mask

Array: TypeAlias = jax.Array


class Options(NamedTuple):
    """What a call is given besides q, k, v and where packed sequences begin."""

    mask: Mask | Any | None
    bias: Any
    alibi_slopes: Any
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    dropout_key: Any
    deterministic: bool
    backend: ops.Backend | None
    sink: Any
    num_splits: int | None
    k_descale: Any
    v_descale: Any
    seqused_q: Any = None
    seqused_k: Any = None
    block_table: Any = None


# Those that are arrays, or None.
_ARRAYS = (
    "bias", "alibi_slopes", "sink", "seqused_q", "seqused_k", "block_table", "k_descale",
    "v_descale",
)  # fmt: skip
# Those that are numbers of Python.
_NUMBERS = ("softmax_scale", "softcap", "dropout_p", "num_splits")
_STATIC = "a number of Python, which the program is made for (static_argnames of jax.jit)"


def attend(
    qkv: tuple[Any, Any, Any], packed: tuple[Any, ...], options: Options
) -> tuple[Array, Array]:
    q, k, v = (array(name, x) for name, x in zip("qkv", qkv))
    boolean = boolean_mask(options.mask, options.bias)
    if boolean is not None:
        try:
            return attend((q, k, v), packed, options._replace(mask=None, bias=boolean))
        except Error as e:
            raise of_mask(e, options.mask) from None
    o, mask = _with_arrays(options), options.mask
    check_rank(o.bias)
    for name in _NUMBERS:
        if isinstance(getattr(o, name), jax.core.Tracer):
            other = ", or q multiplied by it" if name == "softmax_scale" else ""
            raise InvalidArgument(f"{name}: a traced array; {_STATIC}{other}")
    if not (mask is None or isinstance(mask, (Dense, Band, BlockMask))):
        raise no_mask(mask)
    lengths: tuple[Any, ...] = ()
    if packed:
        cu = (array("cu_seqlens_q", packed[0]), array("cu_seqlens_k", packed[1]))
        for name, n in zip(("max_seqlen_q", "max_seqlen_k"), packed[2:]):
            if isinstance(n, jax.core.Tracer):
                raise InvalidArgument(f"{name}: a traced array; {_STATIC}: any upper bound")
        most = (integer("max_seqlen_q", packed[2]), integer("max_seqlen_k", packed[3]))
        lengths = (*cu, *most)
    check(q, k, v, lengths, o)

    given, rest = 0, list[Any]()
    fields: dict[str, Any] = {}
    if o.bias is not None:
        given |= xla.BIAS
        rest.append(o.bias)
    if o.alibi_slopes is not None:
        given |= xla.ALIBI_SLOPES
        rest.append(o.alibi_slopes[None] if o.alibi_slopes.ndim == 1 else o.alibi_slopes)
    if packed:
        given |= xla.LENGTHS
        rest += lengths[:2]
        fields.update(max_seqlen_q=lengths[2], max_seqlen_k=lengths[3])
    band = mask.band if isinstance(mask, BlockMask) else mask
    if isinstance(band, Band):
        given |= xla.BAND
        fields.update(
            left=INT32_MAX if band.left is None else band.left,
            right=INT32_MAX if band.right is None else band.right,
            top_left=band.alignment == "top_left",
        )
    if isinstance(mask, BlockMask):
        given |= xla.LAYOUT
        # Indices that nobody reads for none at all, which XLA of JAX 0.11 dies of under shard_map.
        rest += [jnp.asarray(x if x.size else np.zeros(1, np.int32)) for x in mask._arrays]
        fields.update(
            block_q=mask.block_size[0],
            block_k=mask.block_size[1],
            seqlen_q=mask.seqlen_q,
            seqlen_k=mask.seqlen_k,
        )
    p = float(o.dropout_p)
    if p != 0:
        given |= xla.SEED
        rest.append(_seeds(o.dropout_key, None if packed else q.shape[0]))
    serving = {
        xla.SINK: o.sink,
        xla.USED_Q: o.seqused_q,
        xla.USED_K: o.seqused_k,
        xla.TABLE: o.block_table,
        xla.K_DESCALE: o.k_descale,
        xla.V_DESCALE: o.v_descale,
    }
    for bit, x in serving.items():
        if x is not None:
            given |= bit
            rest.append(x)
    if o.softmax_scale is not None:
        given |= xla.SCALED
        fields.update(softmax_scale=float(o.softmax_scale))
    call = xla.Call(
        given,
        deterministic=truth("deterministic", o.deterministic),
        num_splits=0 if o.num_splits is None else int(o.num_splits),
        softcap=float(o.softcap),
        # Just below 1 must not become it.
        dropout_p=min(float(np.float32(p)), float(np.nextafter(np.float32(1), np.float32(0)))),
        backend=o.backend or "",
        **fields,
    )

    def run(*operands: Any) -> tuple[Array, ...]:
        out, lse = _differentiable(call, *equally_varying(*operands))
        return out, lse

    out, lse = xla.by_types("fwd", run, call, q, k, v, *rest)
    return out, lse


def _with_arrays(options: Options) -> Options:
    """With arrays of JAX, or what traces them."""
    given = {name: getattr(options, name) for name in _ARRAYS}
    arrays: dict[str, Any] = {n: array(n, x) for n, x in given.items() if x is not None}
    return options._replace(**arrays)


def _seeds(key: Any, batch: int | None) -> Any:
    """uint32 (batch, 4), of each sequence seed and offset, low halves first; None: (4,), of all.

    The seed is from a key of jax.random, of either kind, the offset a sequence's place.
    """
    allowed = "a key of jax.random, as dropout_p is more than 0"
    if key is None:
        raise InvalidArgument(f"dropout_key: None; {allowed}")
    try:
        seed = jax.random.bits(key, (2,), jnp.uint32)
    except (TypeError, ValueError):
        given = f"shape {key.shape}" if has(key, "shape") else shown(key)
        raise InvalidArgument(f"dropout_key: {given}; {allowed}") from None
    places = jnp.arange(1 if batch is None else batch, dtype=jnp.uint32)
    seeds = jnp.stack([*jnp.broadcast_arrays(*seed, places), jnp.zeros_like(places)], -1)
    return seeds[0] if batch is None else seeds


def equally_varying(*arrays: Any) -> tuple[Any, ...]:
    """Under shard_map: all as varying as any of them, as a custom call has to have them."""
    varying = [xla.varying(x) for x in arrays]
    wanted = frozenset[Any]().union(*varying)
    return tuple(
        _cast(x, tuple(wanted - own)) if own != wanted else x for x, own in zip(arrays, varying)
    )


def _cast(x: Any, axes: tuple[Any, ...]) -> Any:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)


# ---- gradients


def _attention(call: xla.Call, *operands: Any) -> tuple[Array, ...]:
    return _forward(call, *operands)


def _record(call: xla.Call, *operands: Any) -> Any:
    if call.given & xla.TABLE and any(x.perturbed for x in operands):
        raise Unsupported(
            "block_table: given; None where a gradient is wanted, as pages have no backward"
        )
    if operands[1].value.dtype == jnp.float8_e4m3fn and any(x.perturbed for x in operands):
        allowed = "the dtype of q where a gradient is wanted, as float8_e4m3fn has no backward"
        raise Unsupported(f"k: dtype float8_e4m3fn; {allowed}")
    for name, x in zip(call.operands("fwd"), operands):
        if x.perturbed and name in ("bias", "alibi_slopes"):
            raise Unsupported(
                f"{name}: differentiated; jax.lax.stop_gradient of it, as attention has no "
                "gradient with respect to it"
            )
    values = tuple(x.value for x in operands)
    out, lse = _forward(call, *values)
    return (out, lse), (values, out, lse)


def _gradients(call: xla.Call, saved: Any, cotangents: Any) -> Any:
    (q, k, v, *rest), out, lse = saved
    dout, dlse = cotangents
    names = call.operands("fwd")[3:]
    unused = jax.custom_derivatives.SymbolicZero
    if isinstance(dout, unused) and isinstance(dlse, unused):
        return (None,) * (3 + len(rest))
    dout = jnp.zeros_like(out) if isinstance(dout, unused) else dout
    beside: tuple[Any, ...] = ()
    if not isinstance(dlse, unused):
        call, beside = call._replace(given=call.given | xla.DLSE), (dlse,)
    operands = equally_varying(q, k, v, out, lse, dout, *beside, *rest)
    dq, dk, dv, *dsink = _backward(call, *operands)
    return dq, dk, dv, *(dsink[0] if name == "sink" else None for name in names)


_differentiable = jax.custom_vjp(_attention, nondiff_argnums=(0,))
_differentiable.defvjp(_record, _gradients, symbolic_zeros=True)


def _compiled(
    run: Callable[..., tuple[Array, ...]], why_not: str
) -> Callable[..., tuple[Array, ...]]:
    """``run(call, *operands)`` under jit, so that it costs little where nothing else is, and with
    the line that says why it has no gradient."""

    def refuse(call: xla.Call, primals: Any, tangents: Any) -> Any:
        raise Unsupported(why_not)

    once = jax.custom_jvp(run, nondiff_argnums=(0,))
    once.defjvp(refuse)
    return jax.jit(once, static_argnums=0, inline=True)  # type: ignore[no-any-return]


_SECOND = "grad: of a gradient; the first one, as attention has no second derivative"
_forward, _backward = _compiled(xla.forward, _SECOND), _compiled(xla.backward, _SECOND)
append = _compiled(
    xla.append,
    "kv_append: differentiated; jax.lax.stop_gradient of its arrays, as it has no gradient",
)
