"""flash-attn 2.8's functions (github.com/Dao-AILab/flash-attention), re-exported by flashsdk.torch.

Argument names, order, defaults and semantics are flash-attn's; docstrings say what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ._errors import PROBABILITY, Error, InvalidArgument, Unsupported, integer, renamed, shown
from ._torch_checks import number, overridable, shape_of, switch, tensor
from ._torch_eager import native
from ._torch_more import append, more_of
from ._torch_ops import attend
from .masks import Band, Causal

# What attend calls the arguments of each function, where that is not their name.
_OWN: Mapping[str, str] = {}
_KV = {"k": "kv", "v": "kv"}
_QKV = {"q": "qkv", "k": "qkv", "v": "qkv"}
_QKV |= {f"{name}_{x}": name for name in ("cu_seqlens", "max_seqlen") for x in "qk"}

WithProbs: TypeAlias = tuple[Tensor, Tensor, Tensor]  # out, softmax_lse, S_dmask
Outputs: TypeAlias = Tensor | WithProbs


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    *, return_attn_probs: Literal[True],
) -> WithProbs: ...  # fmt: skip


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: bool = ...,
) -> Outputs: ...  # fmt: skip


@overridable
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
) -> Outputs:
    """flash-attn's function of this name: names, order, defaults and semantics of 2.8.

    q, k, v
        (batch, seqlen_q, num_heads, head_dim) and twice (batch, seqlen_k, num_heads_kv, head_dim).
        Copied if the last dimension is not contiguous, as flash-attn does.
    dropout_p
        Probability in [0, 1), rounded to the nearest 1/256, at most 255/256; drawn by the generator
        of the tensors' device.
    softmax_scale
        head_dim ** -0.5 if None.
    causal
        Query i sees the keys up to i + seqlen_k - seqlen_q (bottom-right aligned).
    window_size
        (left, right): keys before and after that place; negative is unlimited. causal makes
        right 0.
    softcap
        Above 0, a score s becomes softcap * tanh(s / softcap); otherwise off.
    alibi_slopes
        float32 (num_heads,) or (batch, num_heads).
    deterministic
        Bit-identical gradients from run to run, or an Error. None, where flash-attn has False, does
        what torch.use_deterministic_algorithms says.
    return_attn_probs
        Return (out, softmax_lse, S_dmask) with softmax_lse float32 (batch, num_heads, seqlen_q).
        flash-attn fills S_dmask with P under dropout only, where this raises an Error, as P
        never exists; without dropout it is empty, here as there.

    Returns out (batch, seqlen_q, num_heads, head_dim). A row that sees no key has out 0.

    softmax_lse is not flash-attn's everywhere. For a row that sees no key it is -inf, there +inf.
    It is that of the final scores; flash-attn, when causal with alibi_slopes and no window, adds
    slope * j to a score in place of -slope * (i + seqlen_k - seqlen_q - j), so its softmax_lse of
    query i is larger by slope * (i + seqlen_k - seqlen_q). And here it can be differentiated.
    """
    return _flash_attn(
        (q, k, v),
        None,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    *, return_attn_probs: Literal[True],
) -> WithProbs: ...  # fmt: skip


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: bool = ...,
) -> Outputs: ...  # fmt: skip


@overridable
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
) -> Outputs:
    """``flash_attn_func`` on one tensor qkv (batch, seqlen, 3, num_heads, head_dim).

    softmax_lse differs from flash-attn's as there.
    """
    return _flash_attn(
        _unpacked("qkv", qkv, 3, 5),
        None,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        names=_QKV,
    )


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    *, return_attn_probs: Literal[True],
) -> WithProbs: ...  # fmt: skip


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: bool = ...,
) -> Outputs: ...  # fmt: skip


@overridable
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
) -> Outputs:
    """``flash_attn_func`` on q and one tensor kv (batch, seqlen_k, 2, num_heads_kv, head_dim).

    softmax_lse differs from flash-attn's as there.
    """
    return _flash_attn(
        (q, *_unpacked("kv", kv, 2, 5)),
        None,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        names=_KV,
    )


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] = ..., block_table: Tensor | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    *, return_attn_probs: Literal[True], block_table: Tensor | None = ...,
) -> WithProbs: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: bool = ..., block_table: Tensor | None = ...,
) -> Outputs: ...  # fmt: skip


@overridable
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Outputs:
    """``flash_attn_func`` over packed sequences, as flash-attn's function of this name.

    q, k, v
        (total_q, num_heads, head_dim) and twice (total_k, num_heads_kv, head_dim).
    cu_seqlens_q, cu_seqlens_k
        int32 (batch + 1,): sequence b is rows [cu_seqlens[b], cu_seqlens[b + 1]).
    max_seqlen_q, max_seqlen_k
        At least the longest sequence.
    block_table
        Of a paged cache: not supported, an Error unless None.

    Returns out (total_q, num_heads, head_dim); softmax_lse is (num_heads, total_q), and differs
    from flash-attn's as in ``flash_attn_func``.
    """
    if block_table is not None:
        allowed = "None, as paged K and V are not supported"
        raise Unsupported(f"block_table: {shown(block_table)}; {allowed}")
    return _flash_attn(
        (q, k, v),
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    *, return_attn_probs: Literal[True],
) -> WithProbs: ...  # fmt: skip


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: bool = ...,
) -> Outputs: ...  # fmt: skip


@overridable
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
) -> Outputs:
    """``flash_attn_varlen_func`` on one tensor qkv (total, 3, num_heads, head_dim).

    softmax_lse differs from flash-attn's as in ``flash_attn_func``.
    """
    return _flash_attn(
        _unpacked("qkv", qkv, 3, 4),
        (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        names=_QKV,
    )


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    *, return_attn_probs: Literal[True],
) -> WithProbs: ...  # fmt: skip


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: bool = ...,
) -> Outputs: ...  # fmt: skip


@overridable
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
) -> Outputs:
    """``flash_attn_varlen_func`` on q and one tensor kv (total_k, 2, num_heads_kv, head_dim).

    softmax_lse differs from flash-attn's as in ``flash_attn_func``.
    """
    return _flash_attn(
        (q, *_unpacked("kv", kv, 2, 4)),
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        names=_KV,
    )


_KV_CACHE = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens"}


@overridable
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash-attn's function of this name: names, order, defaults and semantics of 2.8.

    q
        (batch, seqlen_q, num_heads, head_dim).
    k_cache, v_cache
        (batch, seqlen_cache, num_heads_kv, head_dim); with block_table pages, (num_pages,
        page_size, num_heads_kv, head_dim), of any page_size.
    k, v
        (batch, seqlen_new, num_heads_kv, head_dim): written into the cache behind its used keys,
        and attended to.
    rotary_cos, rotary_sin
        (positions, rotary_dim / 2), with k: rotate k and q. Query i stands at cache_seqlens + i
        where causal or window_size is given, else at cache_seqlens.
    cache_seqlens
        int32 (batch,), or one integer: used keys of each sequence, without the new ones. None is
        the whole cache, where there is no block_table.
    cache_batch_idx
        int32 (batch,): which row of the cache a sequence has.
    cache_leftpad
        int32 (batch,): where a sequence begins in its row of the cache.
    block_table
        int32 (batch, max_pages): with neither of the two above.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in ``flash_attn_func``.
    rotary_interleaved
        Pairs are neighbours (GPT-J); False: halves (GPT-NeoX, Llama).
    num_splits
        0 is as many as pays; 1 makes the bits of a sequence independent of what shares the batch.
    return_softmax_lse
        Return (out, softmax_lse), float32 (batch, num_heads, seqlen_q).

    Returns out (batch, seqlen_q, num_heads, head_dim). There is no gradient: a q that requires one
    is an Error unless torch.no_grad().
    """
    _check_cache_call(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin)
    if block_table is not None:
        for name, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if x is not None:
                raise Unsupported(f"{name}: given with block_table; None, as pages have neither")
        if cache_seqlens is None:
            allowed = "None without cache_seqlens, the lengths"
            raise InvalidArgument(f"block_table: given; {allowed}")
    interleaved = switch("rotary_interleaved", rotary_interleaved)
    with_lse = switch("return_softmax_lse", return_softmax_lse)
    batch, seqlen_cache = q.shape[0], k_cache.shape[1]
    # A row of the cache is one page, as long as it is.
    where = _pages_of_rows(cache_batch_idx, block_table)
    used = _used(cache_seqlens, seqlen_cache, batch, q)
    left, right = _window(window_size)
    causal = switch("causal", causal)
    if k is not None and v is not None:
        advances = causal or left is not None or right is not None
        rotary = (rotary_cos, rotary_sin, interleaved, advances)
        given = q if rotary_cos is not None else None
        try:
            turned = append(k_cache, v_cache, k, v, used, where, given, *rotary)
        except Error as e:
            raise renamed(e, {"seqused_k": "cache_seqlens"}) from None
        q = q if given is None else turned
        used = used + k.shape[1]
    if cache_leftpad is not None:
        pad = (cache_leftpad, cache_batch_idx, batch)
        k_cache, v_cache, where = _from_the_pad(k_cache, v_cache, *pad)
        used = used - cache_leftpad
    mask = None if left is None and right is None else Band(left, right)
    if causal:
        mask = Causal() if left is None else Band(left, 0)
    splits = None if type(num_splits) is int and num_splits == 0 else num_splits
    softcap = max(number("softcap", softcap), 0.0)
    if not is_dynamo_compiling():
        done = native.attention(
            *(q, k_cache, v_cache, mask, None, alibi_slopes, softmax_scale, softcap, 0.0, None),
            *(with_lse, None, None, None, None, used, where, splits),
        )
        if done is not None:
            return done  # type: ignore[no-any-return]
    names = _KV_CACHE | ({"block_table": "cache_batch_idx"} if block_table is None else {})
    try:
        out, lse = attend(
            *(q, k_cache, v_cache),
            mask=mask,
            alibi_slopes=alibi_slopes,
            softmax_scale=softmax_scale,
            softcap=softcap,
            more=more_of(seqused_k=used, block_table=where, num_splits=splits),
        )
    except Error as e:
        raise renamed(e, names) from None
    return (out, lse) if with_lse else out


def _check_cache_call(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None,
    rotary_cos: Tensor | None, rotary_sin: Tensor | None,
) -> None:  # fmt: skip
    names = ("q", "k_cache", "v_cache", "k", "v")
    for name, x in zip(names, (q, k_cache, v_cache, k, v), strict=True):
        if x is None and name in ("k", "v"):
            continue
        if tensor(name, x).dim() != 4:
            raise InvalidArgument(f"{name}: {shape_of(x)}; (batch, seqlen, num_heads, head_dim)")
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            allowed = "one without, as attention to a cache has no backward"
            raise Unsupported(f"{name}: a tensor that requires a gradient; {allowed}")
    for name, x, other in (("k", k, v), ("v", v, k)):
        if x is not None and other is None:
            raise InvalidArgument(f"{name}: given alone; k and v, or neither")
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if x is not None and k is None:
            tensor(name, x)
            raise InvalidArgument(f"{name}: given without k; None, as no key is new")


def _used(given: int | Tensor | None, seqlen_cache: int, batch: int, like: Tensor) -> Tensor:
    """cache_seqlens as int32 (batch,)."""
    if isinstance(given, Tensor):
        return tensor("cache_seqlens", given)
    n = seqlen_cache if given is None else integer("cache_seqlens", given)
    return torch.full((batch,), n, dtype=torch.int32, device=like.device)


def _pages_of_rows(cache_batch_idx: Tensor | None, block_table: Tensor | None) -> Tensor | None:
    if cache_batch_idx is None:
        return block_table
    if tensor("cache_batch_idx", cache_batch_idx).dim() != 1:
        raise InvalidArgument(f"cache_batch_idx: {shape_of(cache_batch_idx)}; (batch,)")
    return cache_batch_idx.unsqueeze(1)


def _from_the_pad(
    k_cache: Tensor, v_cache: Tensor, leftpad: Tensor, rows: Tensor | None, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The cache in pages of one key, and the table of those from ``leftpad`` on."""
    if tensor("cache_leftpad", leftpad).shape != (batch,) or leftpad.dtype != torch.int32:
        given = f"{shape_of(leftpad)}, dtype {leftpad.dtype}"
        raise InvalidArgument(f"cache_leftpad: {given}; (batch {batch},), torch.int32")
    seqlen = k_cache.shape[1]
    if rows is None:
        rows = torch.arange(batch, device=leftpad.device)
    keys = torch.arange(seqlen, device=leftpad.device) + leftpad.unsqueeze(1)
    table = rows.unsqueeze(1) * seqlen + keys.clamp(max=seqlen - 1)
    k, v = (x.reshape(-1, 1, *x.shape[2:]) for x in (k_cache, v_cache))
    return k, v, table.to(torch.int32)


def _unpacked(name: str, packed: Tensor, count: int, rank: int) -> tuple[Tensor, ...]:
    """The ``count`` tensors along the last dimension but two; their gradients are stacked once."""
    if tensor(name, packed).dim() != rank or packed.shape[-3] != count:
        shape = ("batch, " if rank == 5 else "") + f"seqlen, {count}, num_heads, head_dim"
        raise InvalidArgument(f"{name}: {shape_of(packed)}; ({shape})")
    return packed.unbind(-3)


def _flash_attn(
    qkv: tuple[Tensor, ...],
    packed: tuple[Tensor, Tensor, int, int] | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool | None,
    return_attn_probs: bool,
    names: Mapping[str, str] = _OWN,
) -> Outputs:
    # To the short way False means what PyTorch's switch says.
    if not is_dynamo_compiling() and not (
        deterministic is False and torch.are_deterministic_algorithms_enabled()
    ):
        done = native.flash_attn(
            *(*qkv, packed, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
            *(False if deterministic is None else deterministic, return_attn_probs),
        )
        if done is not None:
            return done  # type: ignore[no-any-return]
    dropout_p = number("dropout_p", dropout_p, allowed=PROBABILITY)
    if switch("return_attn_probs", return_attn_probs) and dropout_p > 0:
        raise Unsupported(
            f"return_attn_probs: True with dropout_p = {dropout_p}; False, as P is never stored",
        )
    left, right = _window(window_size)
    mask = None if left is None and right is None else Band(left, right)
    if switch("causal", causal):
        mask = Causal() if left is None else Band(left, 0)
    q, k, v = qkv
    try:
        out, lse = attend(
            q,
            k,
            v,
            packed,
            mask=mask,
            alibi_slopes=alibi_slopes,
            softmax_scale=softmax_scale,
            softcap=max(number("softcap", softcap), 0.0),
            dropout_p=dropout_p,
            deterministic=(
                None if deterministic is None else switch("deterministic", deterministic)
            ),
            copy=True,
        )
    except Error as e:
        raise renamed(e, names) from None
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def _window(window_size: Sequence[int]) -> tuple[int | None, int | None]:
    """(left, right) of a band; negative is unlimited."""
    try:
        if isinstance(window_size, (Set, Mapping)):
            raise TypeError("neither element is the left one")
        # An int is taken as it is: torch.compile need not look into integer().
        left, right = (n if type(n) is int else integer("", n) for n in window_size)
    except (TypeError, ValueError):
        allowed = "(left, right), two integers"
        raise InvalidArgument(f"window_size: {shown(window_size)}; {allowed}") from None
    return None if left < 0 else left, None if right < 0 else right
