"""Attention for JAX: under jit, grad, vmap, scan, checkpoint and shard_map, on CPUs and GPUs.

    import flashsdk.jax as fsj
    out = fsj.attention(q, k, v, mask=fs.Causal())  # (batch, seqlen_q, num_heads, head_dim_v)

The kernels are custom calls of XLA (its FFI): on a GPU they run on XLA's stream, with XLA's memory,
and nothing is waited for. Arrays that are sharded over batch or heads stay so.

What a call computes is docs/semantics.md of the sources. Masks are pytrees: passed to a jitted
function as arguments, the lists of a ``BlockMask`` are operands of the program, and another
layout of as many blocks runs without compiling again.

Raises ``flashsdk.Error`` while a call is traced, one line "<argument>: <given>; <allowed>". What
only the device can tell is JAX's own error with such a line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np

from . import _bindings, _log, ops
from . import _jax_call as xla
from ._bands import no_mask
from ._block_lists import INT32_MAX, LISTS, Csr, boolean_mask, check_rank, of_mask
from ._errors import (
    Error,
    InvalidArgument,
    Unsupported,
    has,
    integer,
    shown,
    truth,
    type_name,
)
from .masks import Band, BlockMask, Dense, Mask

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "kv_append", "varlen_attention"]

Array: TypeAlias = jax.Array


class _PackedKeywords(ops.AttentionKeywords, total=False):
    dropout_key: Any
    sink: Any
    k_descale: Any
    v_descale: Any
    num_splits: int | None


class _Keywords(_PackedKeywords, total=False):
    seqused_q: Any
    seqused_k: Any
    block_table: Any


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[False] = False, **keywords: Unpack[_Keywords]
) -> Array: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **keywords: Unpack[_Keywords]
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool, **keywords: Unpack[_Keywords]
) -> Array | tuple[Array, Array]: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Mask | Any | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_key: Any = None,
    sink: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    block_table: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: ops.Backend | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of q over k and v, with gradients.

    q, k, v
        (batch, seqlen_q, num_heads, head_dim), (batch, seqlen_k, num_heads_kv, head_dim) and
        (batch, seqlen_k, num_heads_kv, head_dim_v): float32, bfloat16 or float16 on a CPU, the
        last two on a GPU; k and v also float8_e4m3fn, below. num_heads is a multiple of
        num_heads_kv.
    mask
        Dense(), Causal(), SlidingWindow(), a Band or a BlockMask; None is Dense(). Or a bool array,
        True = attend, (seqlen_q, seqlen_k) or of four dimensions as a bool bias.
    bias
        Added to the scores, or bool, True = attend: (batch, num_heads, seqlen_q, seqlen_k), each
        of them or 1. To differentiate with respect to it is an Error.
    alibi_slopes
        float32 (num_heads,) or (batch, num_heads). To differentiate is an Error as well.
    softmax_scale
        Factor of q·k; None is head_dim ** -0.5. It, softcap and dropout_p are Python's numbers.
    softcap
        > 0: scores s become softcap * tanh(s / softcap), before bias; 0 is off.
    dropout_p, dropout_key
        Probability to drop an element of softmax's result, 0 <= dropout_p < 1, rounded to the
        nearest 1/256, and the key of ``jax.random`` that says which. What is dropped is the
        same on one device and on many; heads that are sharded are gathered for it. The core
        drops the same of sequence b alone with ``seed``, the two words of
        ``jax.random.bits(key, 2, uint32)``, low one first, and ``offset`` b (packed: 0).
    sink
        float32 (num_heads,): a logit of each head that joins the softmax and has no value. It has
        a gradient.
    seqused_q, seqused_k
        int32 (batch,): how many queries and keys of each sequence are used. Masks count with them.
        What lies behind is not read; results and gradients there are 0, lse is -inf.
    block_table
        int32 (batch, max_pages), with seqused_k: k and v are pages (num_pages, page_size,
        num_heads_kv, ...), and key j of sequence b is row j % page_size of page
        block_table[b, j // page_size]. To differentiate such a call is an Error.
    k_descale, v_descale
        float32 (batch | 1, num_heads_kv | 1): what k and v in float8_e4m3fn are multiplied with,
        beside a q of 16 bits, whose dtype out has. To differentiate such a call is an Error.
    num_splits
        Into how many parts the keys of a query may be cut, Python's integer; 1 makes its bits
        depend on its own sequence alone. None chooses.
    return_lse
        Return (out, lse), lse float32 (batch, num_heads, seqlen_q); it has a gradient.
    deterministic
        True: the same bits from run to run, or an Error; on a CPU always. None is False, as JAX
        has no switch for all.
    backend
        "cpu", "sm80" or "sm90"; None is the fastest that fits.

    Returns out, (batch, seqlen_q, num_heads, head_dim_v). A query that sees no key has out = 0,
    lse = -inf and gradients 0. There is no second derivative and no forward mode.
    Source: FlashAttention, arXiv 2205.14135.
    """
    options = _Options(
        mask, bias, alibi_slopes, softmax_scale, softcap, dropout_p, dropout_key,
        False if deterministic is None else deterministic, backend, sink, num_splits, k_descale,
        v_descale, seqused_q, seqused_k, block_table,
    )  # fmt: skip
    out, lse = _attend((q, k, v), (), options)
    return (out, lse) if truth("return_lse", return_lse) else out


@overload
def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_PackedKeywords],
) -> Array: ...
@overload
def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_PackedKeywords],
) -> tuple[Array, Array]: ...
@overload
def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **keywords: Unpack[_PackedKeywords],
) -> Array | tuple[Array, Array]: ...
def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    mask: Mask | Any | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_key: Any = None,
    sink: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: ops.Backend | None = None,
) -> Array | tuple[Array, Array]:
    """``attention`` over sequences that lie packed behind one another, each on its own.

    q, k, v
        (total_q, num_heads, head_dim), (total_k, num_heads_kv, head_dim) and (total_k,
        num_heads_kv, head_dim_v): the sequences of the batch without padding.
    cu_seqlens_q, cu_seqlens_k
        int32 (batch + 1,): sequence b is rows [cu_seqlens[b], cu_seqlens[b + 1]). Operands, so
        that other lengths run without compiling again. Rows behind the last sequence get 0.
    max_seqlen_q, max_seqlen_k
        At least the longest sequence, Python's integers.
    bias
        (batch | 1, num_heads | 1, max_seqlen_q | 1, max_seqlen_k | 1), indexed from the first row
        of each sequence, as is a ``BlockMask`` (for its alignment see ``mha_varlen_fwd``).

    The rest as in ``attention``; descales have as many rows as there are sequences. Returns out
    (total_q, num_heads, head_dim_v), and lse float32 (num_heads, total_q) if asked for.
    """
    options = _Options(
        mask, bias, alibi_slopes, softmax_scale, softcap, dropout_p, dropout_key,
        False if deterministic is None else deterministic, backend, sink, num_splits, k_descale,
        v_descale,
    )  # fmt: skip
    packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = _attend((q, k, v), packed, options)
    return (out, lse) if truth("return_lse", return_lse) else out


def kv_append(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    seqused_k: Any,
    *,
    block_table: Any = None,
    q: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    q_advances: bool = True,
    k_descale: Any = None,
    v_descale: Any = None,
) -> tuple[Array, ...]:
    """New keys and values behind the used ones of a cache: (k_cache, v_cache), and q with q.

    Arrays of JAX do not change, so the caches come back as new ones. Where nobody else wants the
    old ones they are written in place: under ``jax.jit`` with ``donate_argnums`` of the caches, or
    where a loop carries them. Else they are copied.

    k_cache, v_cache
        (batch, seqlen_k, num_heads_kv, head_dim) and (..., head_dim_v), or with block_table pages,
        (num_pages, page_size, num_heads_kv, ...).
    k, v
        (batch, seqlen_new, num_heads_kv, head_dim) and (..., head_dim_v), of the cache's dtype, or
        bfloat16 or float16 for a cache in float8_e4m3fn.
    seqused_k
        int32 (batch,): new key j of sequence b becomes key seqused_k[b] + j. ``attention`` is then
        given seqused_k + seqlen_new.
    block_table
        int32 (batch, max_pages), as in ``attention``.
    q
        (batch, seqlen_q, num_heads, head_dim); query i is rotated to position seqused_k[b] + i, or
        with q_advances=False to seqused_k[b].
    rotary_cos, rotary_sin
        (positions, rotary_dim / 2), float32 or k's dtype, rotary_dim at most head_dim. Key j and
        q are turned by the row of their position, in float32; None turns nothing.
    rotary_interleaved
        Pairs are neighbours, (0, 1), (2, 3), ... (GPT-J); False: (0, rotary_dim / 2), ...
        (GPT-NeoX, Llama). It and q_advances are Python's.
    k_descale, v_descale
        float32 (batch | 1, num_heads_kv | 1), as in ``attention``: a cache in float8_e4m3fn gets
        k, once rotated, and v, divided by them in float32 and rounded once. What lies beyond
        448 becomes ±448.

    There is no gradient. Shapes and dtypes are checked while it is traced, on a CPU lengths, pages
    and positions when it runs. A cache of pages is sharded by heads alone.
    """
    arrays = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "seqused_k": seqused_k}
    arrays = {name: _array(name, x) for name, x in arrays.items()}
    rest = {"block_table": block_table, "q": q, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    rest |= {"k_descale": k_descale, "v_descale": v_descale}
    arrays |= {name: _array(name, x) for name, x in rest.items() if x is not None}
    interleaved = truth("rotary_interleaved", rotary_interleaved)
    advances = truth("q_advances", q_advances)
    _check_append(arrays, interleaved, advances)
    bits = {"block_table": xla.TABLE, "q": xla.QUERIES, "rotary_cos": xla.ROTARY}
    bits |= {"k_descale": xla.K_DESCALE, "v_descale": xla.V_DESCALE}
    given = sum(bit for name, bit in bits.items() if name in arrays)
    call = xla.Call(given, rotary_interleaved=interleaved, q_advances=advances)

    def run(*operands: Any) -> tuple[Array, ...]:
        return _append(call, *_equally_varying(*operands))

    operands = (arrays[name] for name in call.operands("append"))
    return xla.by_types("append", run, call, *operands)


# ---- masks as pytrees


def _flatten_layout(mask: BlockMask) -> tuple[tuple[Any, ...], Any]:
    return mask._arrays, (mask.block_size, mask.seqlen_q, mask.seqlen_k, mask.band)


def _unflatten_layout(static: Any, arrays: Any) -> BlockMask:
    lists = [Csr(*pair) for pair in zip(arrays[::2], arrays[1::2])]
    if all(isinstance(x, np.ndarray) for x in arrays):
        return BlockMask(*static, *lists)
    # Not by the constructor, which would read the arrays: they are traced, or no arrays at all.
    mask = object.__new__(BlockMask)
    names = ("block_size", "seqlen_q", "seqlen_k", "band", *LISTS)
    for name, value in zip(names, (*static, *lists)):
        object.__setattr__(mask, name, value)
    return mask


jax.tree_util.register_pytree_node(BlockMask, _flatten_layout, _unflatten_layout)
jax.tree_util.register_static(Band)
jax.tree_util.register_static(Dense)


# ---- one call


class _Options(NamedTuple):
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


def _attend(
    qkv: tuple[Any, Any, Any], packed: tuple[Any, ...], options: _Options
) -> tuple[Array, Array]:
    q, k, v = (_array(name, x) for name, x in zip("qkv", qkv))
    boolean = boolean_mask(options.mask, options.bias)
    if boolean is not None:
        try:
            return _attend((q, k, v), packed, options._replace(mask=None, bias=boolean))
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
        cu = (_array("cu_seqlens_q", packed[0]), _array("cu_seqlens_k", packed[1]))
        for name, n in zip(("max_seqlen_q", "max_seqlen_k"), packed[2:]):
            if isinstance(n, jax.core.Tracer):
                raise InvalidArgument(f"{name}: a traced array; {_STATIC}: any upper bound")
        most = (integer("max_seqlen_q", packed[2]), integer("max_seqlen_k", packed[3]))
        lengths = (*cu, *most)
    _check(q, k, v, lengths, o)

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
        out, lse = _differentiable(call, *_equally_varying(*operands))
        return out, lse

    out, lse = xla.by_types("fwd", run, call, q, k, v, *rest)
    return out, lse


def _with_arrays(options: _Options) -> _Options:
    """With arrays of JAX, or what traces them."""
    given = {name: getattr(options, name) for name in _ARRAYS}
    arrays: dict[str, Any] = {n: _array(n, x) for n, x in given.items() if x is not None}
    return options._replace(**arrays)


def _array(name: str, x: Any) -> Any:
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


def _equally_varying(*arrays: Any) -> tuple[Any, ...]:
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


# ---- checks, by the library on arrays that merely look like those of the call


def _check(q: Any, k: Any, v: Any, lengths: tuple[Any, ...], o: _Options) -> None:
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


def _check_append(arrays: dict[str, Any], interleaved: bool, advances: bool) -> None:
    """By the library, which is given lengths that no cache has: it looks at these last, and ends
    before it writes."""
    like = {name: _like(x) for name, x in arrays.items()}
    like["seqused_k"] = np.full(arrays["seqused_k"].shape, -1).astype(arrays["seqused_k"].dtype)
    for name, of in (("k_cache", "k_cache"), ("v_cache", "v_cache"), ("q_out", "q")):
        if of in arrays:  # memory of its own, which nobody touches
            like[name] = np.empty(arrays[of].shape, arrays[of].dtype)
    names = (
        "k_cache", "v_cache", "k", "v", "seqused_k", "block_table", "q", "q_out", "rotary_cos",
        "rotary_sin", "k_descale", "v_descale",
    )  # fmt: skip
    try:
        _bindings.append(tuple(like.get(name) for name in names), interleaved, advances)
    except InvalidArgument as e:
        if not (e.argument == "seqused_k" and (e.given or "").startswith("-1 of sequence")):
            raise


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
    operands = _equally_varying(q, k, v, out, lse, dout, *beside, *rest)
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
_append = _compiled(
    xla.append,
    "kv_append: differentiated; jax.lax.stop_gradient of its arrays, as it has no gradient",
)
