"""Attention for PyTorch, with gradients and torch.compile.

``attention`` and ``varlen_attention`` give all that the library does, and ``kv_append`` fills a
cache for them. ``flash_attn_*`` take the arguments of flash-attn 2.8
(github.com/Dao-AILab/flash-attention), and ``scaled_dot_product_attention`` those of
torch.nn.functional, so that either can be swapped by changing an import. Semantics are those of
docs/semantics.md of the sources, unless a docstring says otherwise.

What all share:

- Gradients reach q, k, v and a sink, through the output and through the log-sum-exp. Saved for
  backward are the arguments, out and lse: memory is linear in the sequence length. There is no
  second derivative, no forward-mode one, and none with respect to bias or alibi_slopes: all are
  errors. Only where a tensor with a tangent enters a function that torch.compile's inductor
  compiled is the tangent lost, as in inductor's own kernels.
- float32, float16 and bfloat16. Under torch.autocast q, k and v become the autocast dtype.
- With dropout and no seed, each call draws one by the generator of the tensors' device, as
  PyTorch's own dropout does: torch.manual_seed repeats it, and each replay of a CUDA graph draws
  anew. Activation checkpointing and torch.compile's memory budget drop in the backward what the
  forward dropped.
- CPU calls run on PyTorch's own threads, torch.get_num_threads() of them, unless
  ``flashsdk.set_num_threads`` or FLASHSDK_NUM_THREADS says how many: up to PyTorch's number of
  these run on its threads, more on the library's own, as all do with PyTorch before 2.10.
- DTensors stay sharded over the batch and over heads, with what belongs to them; over the sequence
  they are gathered, and pages are over the batch. Dropout and a ``BlockMask`` of theirs are an
  Error, and so are DTensors given to ``kv_append``.
- torch.utils.flop_counter counts them as it counts scaled_dot_product_attention: bands in full, of
  a ``BlockMask`` the share that is visited.
- Bad input raises ``flashsdk.Error``, a ValueError, before anything runs; what torch.compile meets
  while it traces with ``fullgraph=True`` is torch's error with our line in it. Of tensors without
  data only ranks and devices are checked: of torch.export's, the rest when the program runs.
- Masks and bands may be made inside a compiled function. ``flashsdk.layouts`` and ``BlockMask``
  compute with NumPy: there they break the graph, which ``fullgraph=True`` refuses.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function

from ._errors import Error, InvalidArgument, has, renamed
from ._flash_attn_func import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._flash_attn_kvcache import flash_attn_with_kvcache
from ._torch_checks import (
    check_constant,
    constant_when_compiled,
    flag,
    overridden,
    shape_of,
    tensor,
)
from ._torch_eager import last_contiguous, native
from ._torch_explain import explain
from ._torch_kv_append import kv_append
from ._torch_more import more_of
from ._torch_ops import attend
from .masks import Band, Causal, Mask
from .ops import Backend

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "attention",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "kv_append",
    "scaled_dot_product_attention",
    "varlen_attention",
]


class _Shared(TypedDict, total=False):
    """Those of ``attention`` and ``varlen_attention`` but return_lse, for type checkers."""

    mask: Mask | Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    seed: int | Tensor | None
    sink: Tensor | None
    num_splits: int | None
    deterministic: bool | None
    backend: Backend | None


class _Keywords(_Shared, total=False):
    """Those of ``attention`` alone besides."""

    seqused_q: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **keywords: Unpack[_Keywords],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **keywords: Unpack[_Keywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **keywords: Unpack[_Keywords]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, differentiable in q, k and v (FlashAttention, arXiv 2205.14135).

    q
        (batch, seqlen_q, num_heads, head_dim). Any strides, but the last dimension contiguous.
    k, v
        (batch, seqlen_k, num_heads_kv, head_dim) and (batch, seqlen_k, num_heads_kv, head_dim_v);
        num_heads_kv divides num_heads, and consecutive query heads share one.
    mask
        Which keys a query sees: ``flashsdk.Causal()``, ``SlidingWindow``, a ``BlockMask``, None. Or
        a bool tensor, True = attend, (seqlen_q, seqlen_k) or of four dimensions as a bool bias.
    bias
        (batch | 1, num_heads | 1, seqlen_q | 1, seqlen_k | 1), added to the scores, or bool,
        True = attend. Must not require a gradient.
    alibi_slopes
        float32 (num_heads,) or (batch, num_heads): adds -slope * |i + seqlen_k - seqlen_q - j|.
    softmax_scale
        Multiplies q·k; head_dim ** -0.5 if None.
    softcap
        Above 0, a score s becomes softcap * tanh(s / softcap).
    dropout_p
        Probability in [0, 1) to drop an element of P, rounded to the nearest 1/256, at most
        255/256.
    seed
        Of dropout, 0 to 2^64 - 1; or int64 {seed, offset} where q is, (2,), or (batch, 2), one for
        each sequence. None draws one from the generator of q's device.
    sink
        float32 (num_heads,): a logit of each head that joins its softmax and has no value. Gets a
        gradient.
    seqused_q, seqused_k
        int32 (batch,), where q is: how many rows of each sequence are used. Masks and positions
        count with them. Keys behind are not read, queries behind have out 0 and lse -inf.
    block_table
        int32 (batch, max_pages), with seqused_k: k and v are pages (num_pages, page_size,
        num_heads_kv, head_dim), and key j of sequence b is row j % page_size of page
        block_table[b, j // page_size]. No gradient.
    num_splits
        Into how many parts the keys of a query may be cut; 1 makes its bits independent of what
        shares the batch. None is as many as pays.
    return_lse
        Also return the logarithm of the sum of exp(scores).
    deterministic
        Bit-identical gradients from run to run, or an Error. None does what
        torch.use_deterministic_algorithms says.
    backend
        "cpu", "sm80", "sm90" or None, the best that fits.

    Returns out (batch, seqlen_q, num_heads, head_dim_v), and lse float32 (batch, num_heads,
    seqlen_q) if asked for. A row that sees no key has out 0, lse -inf and no gradient.
    """
    more = (sink, seqused_q, seqused_k, block_table, num_splits)
    if not is_dynamo_compiling():
        done = native.attention(
            *(q, k, v, mask, bias, alibi_slopes, softmax_scale, softcap, dropout_p, seed),
            *(return_lse, deterministic, backend),
            *more,
        )
        if done is not None:
            return done  # type: ignore[no-any-return]
    given: tuple[Any, ...] = (q, k, v, bias, alibi_slopes, *more[:4])
    if isinstance(mask, Tensor):
        given = (*given, mask)
    if has_torch_function(given):
        return overridden(  # type: ignore[no-any-return]
            *(attention, given, q, k, v),
            mask=mask,
            bias=bias,
            alibi_slopes=alibi_slopes,
            softmax_scale=softmax_scale,
            softcap=softcap,
            dropout_p=dropout_p,
            seed=seed,
            sink=sink,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            block_table=block_table,
            num_splits=num_splits,
            return_lse=return_lse,
            deterministic=deterministic,
            backend=backend,
        )
    wanted = flag("return_lse", return_lse)
    out, lse = attend(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        alibi_slopes=alibi_slopes,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        seed=seed,
        deterministic=deterministic,
        backend=backend,
        more=more_of(*more),
    )
    return (out, lse) if wanted else out


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    **keywords: Unpack[_Shared],
) -> Tensor: ...
@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_Shared],
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **keywords: Unpack[_Shared],
) -> Tensor | tuple[Tensor, Tensor]: ...
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    sink: Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` over sequences that lie packed behind one another, each on its own.

    q, k, v
        (total_q, num_heads, head_dim), (total_k, num_heads_kv, head_dim) and (total_k,
        num_heads_kv, head_dim_v): the sequences of the batch without padding.
    cu_seqlens_q, cu_seqlens_k
        int32 (batch + 1,): sequence b is rows [cu_seqlens[b], cu_seqlens[b + 1]).
    max_seqlen_q, max_seqlen_k
        At least the longest sequence.
    bias
        (batch | 1, num_heads | 1, max_seqlen_q | 1, max_seqlen_k | 1), indexed from the first row
        of each sequence, as is a ``BlockMask`` (for its alignment see ``mha_varlen_fwd``).

    The rest as in ``attention``. Returns out (total_q, num_heads, head_dim_v), and lse float32
    (num_heads, total_q) if asked for.
    """
    if not is_dynamo_compiling():
        done = native.attention(
            *(q, k, v, mask, bias, alibi_slopes, softmax_scale, softcap, dropout_p, seed),
            *(return_lse, deterministic, backend, sink, None, None, None, num_splits),
            *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        )
        if done is not None:
            return done  # type: ignore[no-any-return]
    given: tuple[Any, ...] = (q, k, v, cu_seqlens_q, cu_seqlens_k, bias, alibi_slopes, sink)
    if isinstance(mask, Tensor):
        given = (*given, mask)
    if has_torch_function(given):
        return overridden(  # type: ignore[no-any-return]
            *(varlen_attention, given, q, k, v, cu_seqlens_q, cu_seqlens_k),
            *(max_seqlen_q, max_seqlen_k),
            mask=mask,
            bias=bias,
            alibi_slopes=alibi_slopes,
            softmax_scale=softmax_scale,
            softcap=softcap,
            dropout_p=dropout_p,
            seed=seed,
            sink=sink,
            num_splits=num_splits,
            return_lse=return_lse,
            deterministic=deterministic,
            backend=backend,
        )
    wanted = flag("return_lse", return_lse)
    out, lse = attend(
        q,
        k,
        v,
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        mask=mask,
        bias=bias,
        alibi_slopes=alibi_slopes,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        seed=seed,
        deterministic=deterministic,
        backend=backend,
        more=more_of(sink, num_splits=num_splits),
    )
    return (out, lse) if wanted else out


# ---- torch.nn.functional


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional's function of this name: names, order, defaults and semantics.

    query
        (..., num_heads, seqlen_q, head_dim); any leading dimensions, none at all as well.
    key, value
        (..., num_heads, seqlen_k, head_dim) and (..., num_heads, seqlen_k, head_dim_v). Leading
        dimensions broadcast, and so do heads where there is one.
    attn_mask
        Broadcast to (..., num_heads, seqlen_q, seqlen_k): added to the scores, or bool, True =
        attend. torch.nn.attention.bias.causal_lower_right and causal_upper_left are recognised.
        A gradient with respect to it is not supported: an Error if it requires one.
    dropout_p
        Probability in [0, 1), rounded to the nearest 1/256, at most 255/256; drawn by the generator
        of the tensors' device.
        As in torch it applies in evaluation as well: pass 0 there.
    is_causal
        Query i sees the keys up to i (top-left aligned). An Error together with attn_mask.
    scale
        head_dim ** -0.5 if None.
    enable_gqa
        Allow key and value to have fewer heads than query; their number divides query's.

    Under torch.nn.attention.sdpa_kernel(SDPBackend.MATH) the call is torch's own, with its second
    derivative. torch.compile asks for that when it traces, and what it has traced stays so.

    Returns (..., num_heads, seqlen_q, head_dim_v), in memory (..., seqlen_q, num_heads,
    head_dim_v), so that the heads of a token join without a copy; torch's follows query's strides,
    and where its result has a view that this one lacks, reshape does. Tensors whose last dimension
    is not contiguous are copied, an attn_mask never to more than its own size. A query that sees
    no key gets 0 and no gradient, where releases of PyTorch before 2.5 gave NaN.
    """
    if not is_dynamo_compiling():
        out = native.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        if out is not None:
            return out  # type: ignore[no-any-return]
    given = (query, key, value, None if has(attn_mask, "variant") else attn_mask)
    if has_torch_function(given):
        return overridden(  # type: ignore[no-any-return]
            scaled_dot_product_attention,
            *(given, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
        )
    if _math_alone():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    heads = _heads(query, key, value, gqa=flag("enable_gqa", enable_gqa))
    batch = _batch(query, key, value)
    scores = (heads[0], query.shape[-2], key.shape[-2])
    mask, bias = None, None
    if attn_mask is not None:
        if flag("is_causal", is_causal):
            raise InvalidArgument("is_causal: True with an attn_mask; False, or no attn_mask")
        # CausalBias of torch.nn.attention.bias, by its fields: to import it takes seconds.
        if has(attn_mask, "variant"):
            mask = _causal_bias(attn_mask, scores)
        else:
            bias = _bias(tensor("attn_mask", attn_mask), batch, scores)
            apart = _broadcast_apart(bias, batch)
            if apart:
                rest = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
                return _one_by_one(query, key, value, bias, batch, apart, **rest)
            bias = _merged(bias, batch)
    elif flag("is_causal", is_causal):
        mask = Causal("top_left")
    q, k, v = (_rows_first(x, batch, n) for x, n in zip((query, key, value), heads, strict=True))
    # Of 3-d tensors heads are torch's batch, of which it takes an empty one; kernels no heads. As a
    # batch of none of one head the other arguments are looked at like any.
    if heads == (0, 0, 0):
        q, k, v = (x.reshape(0, x.shape[1], 1, x.shape[3]) for x in (q, k, v))
        bias = None if bias is None else bias[:0].reshape(0, 1, *bias.shape[2:])
    try:
        out, _ = attend(q, k, v, mask=mask, bias=bias, softmax_scale=scale, dropout_p=dropout_p)
    except Error as e:
        raise renamed(e, _NAMES) from None
    out = out.transpose(1, 2)  # (prod(batch), num_heads, seqlen_q, head_dim_v)
    if heads[0] == 0:
        out = out.reshape(math.prod(batch), 0, *out.shape[2:])
    if len(batch) == 1:
        return out
    headless = max(query.dim(), key.dim(), value.dim()) == 2
    return out.reshape(*batch, *out.shape[2 if headless else 1 :])  # a view


@constant_when_compiled
def _math_alone() -> bool:
    """Whether sdpa_kernel(SDPBackend.MATH) asks for torch's own."""
    backends = torch.backends.cuda  # of a CPU as well
    return not (
        backends.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        or backends.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        or backends.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    )


def _heads(query: Tensor, key: Tensor, value: Tensor, *, gqa: bool) -> tuple[int, int, int]:
    """How many heads each is to have; raises Error for shapes that do not belong together."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if tensor(name, x).dim() < 2:
            raise InvalidArgument(f"{name}: {shape_of(x)}; (..., num_heads, seqlen, head_dim)")
    if key.shape[-1] != query.shape[-1]:
        raise InvalidArgument(
            f"key: {shape_of(key)}; (..., head_dim {query.shape[-1]}), as query has"
        )
    if value.shape[-2] != key.shape[-2]:
        allowed = f"(..., seqlen_k {key.shape[-2]}, head_dim_v), as key has"
        raise InvalidArgument(f"value: {shape_of(value)}; {allowed}")
    of_query, of_key, of_value = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value))
    of_kv = max(of_key, of_value) if 0 not in (of_key, of_value) else 0
    for name, n in (("key", of_key), ("value", of_value)):
        if not _broadcasts(n, of_kv):
            raise InvalidArgument(f"{name}: {n} heads; {of_kv}, or 1")
    if of_query == of_kv or of_kv == 1:
        return of_query, of_kv, of_kv
    if of_query == 1:
        return of_kv, of_kv, of_kv
    if not gqa:
        raise InvalidArgument(f"key: {of_kv} heads; query's {of_query}, or enable_gqa=True")
    if of_kv == 0 or of_query % of_kv != 0:
        raise InvalidArgument(f"key: {of_kv} heads; a divisor of query's {of_query}")
    return of_query, of_kv, of_kv


def _batch(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """The leading dimensions, broadcast."""
    batch = query.shape[:-3]
    if batch == key.shape[:-3] == value.shape[:-3]:
        return batch
    for name, x in (("key", key), ("value", value)):
        given = x.shape[:-3]
        rank = max(len(batch), len(given))
        one, other = ((1,) * (rank - len(sizes)) + tuple(sizes) for sizes in (batch, given))
        if not all(_broadcasts(m, n) or n == 1 for m, n in zip(one, other, strict=True)):
            allowed = f"leading dimensions that broadcast with {tuple(batch)}"
            raise InvalidArgument(f"{name}: {shape_of(x)}; {allowed}")
        batch = torch.Size(n if m == 1 else m for m, n in zip(one, other, strict=True))
    return batch


def _broadcasts(size: int, to: int) -> bool:
    # Not "size in (1, to)": torch.compile finds no number in a tuple of symbols, equal as they are.
    # Equal first: of a symbol whose number is data that is known, and whether it is 1 is not.
    return size == to or size == 1


def _rows_first(x: Tensor, batch: torch.Size, heads: int) -> Tensor:
    """(..., num_heads, seqlen, head_dim) to (prod(batch), seqlen, num_heads, head_dim)."""
    if x.dim() != 4 or x.shape[:1] != batch or x.shape[1] != heads:
        x = x if x.dim() > 2 else x.unsqueeze(0)
        x = x.expand(*batch, heads, *x.shape[-2:]).reshape(math.prod(batch), heads, *x.shape[-2:])
    return last_contiguous(x.transpose(1, 2))


# What attend calls the arguments of torch's function.
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "softmax_scale": "scale"}


def _bias(attn_mask: Tensor, batch: torch.Size, scores: tuple[int, int, int]) -> Tensor:
    """attn_mask with all dimensions, of size 1 wherever it was expanded."""
    check_constant("attn_mask", attn_mask)
    rank = len(batch) + 3
    shape = (1,) * (rank - attn_mask.dim()) + tuple(attn_mask.shape)
    allowed = (*batch, *scores)
    if len(shape) != rank or not all(map(_broadcasts, shape, allowed)):
        raise InvalidArgument(f"attn_mask: {shape_of(attn_mask)}; one that broadcasts to {allowed}")
    bias = attn_mask
    while bias.dim() < rank:
        bias = bias.unsqueeze(0)
    for d, stride in enumerate(bias.stride()):
        if stride == 0:
            bias = bias.narrow(d, 0, 1) if shape[d] != 0 else bias
    return bias


def _broadcast_apart(bias: Tensor, batch: torch.Size) -> list[int]:
    """Leading dimensions to take one by one, so that those left are all given or all broadcast.

    One stride over the batch cannot say that bias repeats along some of its dimensions, and a copy
    would be as large as the scores. Of the two kinds the one with fewer calls; none in most cases.
    """
    if len(batch) < 2 or bias.shape[:-3] == batch:
        return []
    repeats = [d for d, n in enumerate(batch) if bias.shape[d] == 1 and n != 1]
    given = [d for d in range(len(batch)) if bias.shape[d] != 1]
    calls = [math.prod(batch[d] for d in dims) for dims in (repeats, given)]
    if not repeats or not given or 0 in calls:
        return []
    return repeats if calls[0] < calls[1] else given


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, batch: torch.Size, apart: list[int],
    **rest: Any,
) -> Tensor:  # fmt: skip
    """A call for each place along the dimensions ``apart`` of the batch."""
    query, key, value = (x if x.dim() > 2 else x.unsqueeze(0) for x in (query, key, value))
    query, key, value = (x.expand(*batch, *x.shape[-3:]) for x in (query, key, value))

    def at(x: Tensor, place: tuple[int, ...]) -> Tensor:
        for d, i in reversed(list(zip(apart, place, strict=True))):
            x = x.select(d, i if x.shape[d] != 1 else 0)
        return x

    places = list(itertools.product(*(range(batch[d]) for d in apart)))
    outs = []
    for place in places:
        q, k, v, b = (at(x, place) for x in (query, key, value, bias))
        outs.append(scaled_dot_product_attention(q, k, v, b, **rest))
    out = torch.stack(outs)
    out = out.reshape(*(batch[d] for d in apart), *out.shape[1:])
    return out.movedim(tuple(range(len(apart))), tuple(apart))


def _merged(bias: Tensor, batch: torch.Size) -> Tensor:
    """(..., num_heads | 1, seqlen_q | 1, seqlen_k | 1) with the leading dimensions as one."""
    shape = bias.shape[-3:]
    if bias.shape[:-3] == batch:
        bias = bias.reshape(math.prod(batch), *shape)
    elif 0 in batch:
        bias = bias.expand(*batch, *shape).reshape(0, *shape)
    else:
        bias = bias.reshape(math.prod(bias.shape[:-3]), *shape)
    return last_contiguous(bias)


def _causal_bias(attn_mask: Any, scores: tuple[int, int, int]) -> Band:
    shape = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
    # Of the upper left one torch does not ask the shape: one made for the longest sequence does.
    if attn_mask.variant.name == "UPPER_LEFT":
        return Causal("top_left")
    if shape != scores[1:]:
        raise InvalidArgument(f"attn_mask: shape {shape}; {scores[1:]}")
    return Causal("bottom_right")
