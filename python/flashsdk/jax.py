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

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import jax
import numpy as np

from . import _jax_call as xla
from . import ops
from ._block_lists import LISTS, Csr
from ._errors import truth
from ._jax_attend import Options, append, attend, equally_varying
from ._jax_checks import array, check_append
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
    options = Options(
        mask, bias, alibi_slopes, softmax_scale, softcap, dropout_p, dropout_key,
        False if deterministic is None else deterministic, backend, sink, num_splits, k_descale,
        v_descale, seqused_q, seqused_k, block_table,
    )  # fmt: skip
    out, lse = attend((q, k, v), (), options)
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
    options = Options(
        mask, bias, alibi_slopes, softmax_scale, softcap, dropout_p, dropout_key,
        False if deterministic is None else deterministic, backend, sink, num_splits, k_descale,
        v_descale,
    )  # fmt: skip
    packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = attend((q, k, v), packed, options)
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
    arrays = {name: array(name, x) for name, x in arrays.items()}
    rest = {"block_table": block_table, "q": q, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    rest |= {"k_descale": k_descale, "v_descale": v_descale}
    arrays |= {name: array(name, x) for name, x in rest.items() if x is not None}
    interleaved = truth("rotary_interleaved", rotary_interleaved)
    advances = truth("q_advances", q_advances)
    check_append(arrays, interleaved, advances)
    bits = {"block_table": xla.TABLE, "q": xla.QUERIES, "rotary_cos": xla.ROTARY}
    bits |= {"k_descale": xla.K_DESCALE, "v_descale": xla.V_DESCALE}
    given = sum(bit for name, bit in bits.items() if name in arrays)
    call = xla.Call(given, rotary_interleaved=interleaved, q_advances=advances)

    def run(*operands: Any) -> tuple[Array, ...]:
        return append(call, *equally_varying(*operands))

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
