"""flash_attn_with_kvcache of flash-attn 2.8, re-exported by flashsdk.torch, and its checks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _contents, ops
from ._block_lists import MOST_ROWS
from ._contents import can_check, first_of, raise_first
from ._errors import Error, InvalidArgument, Unsupported, dtype_name, integer, renamed
from ._flash_attn_func import mask_of
from ._torch_checks import number, overridable, shape_of, switch, tensor
from ._torch_eager import constant, detached, last_contiguous, native, unwatched
from ._torch_kv_append import kv_append
from ._torch_more import More, more_of
from ._torch_ops import _autocast, _checked, attend, check_devices
from .masks import Band, Causal

_OF_FP8 = (torch.bfloat16, torch.float16)  # of q, beside keys in 8 bits
_EVERY_KERNEL, _WIDEST = 256, 576  # head_dims that all kernels of a forward take, and some
_FLOAT32 = torch.finfo(torch.float32).max
# What attend calls the arguments, where that is not their name.
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
    *,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash-attn's function of this name: names, order, defaults and semantics of 2.8.

    And of flash-attn 3 the caches in float8_e4m3fn.

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
        int32 (batch,): where a sequence begins in its row of the cache, 0 to cache_seqlens. The
        cache is not copied: its batch stride is a multiple of its seqlen stride.
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
    k_descale, v_descale
        float32 (batch | 1, num_heads_kv | 1): what caches in float8_e4m3fn are multiplied with, and
        k, once rotated, and v are divided by as they are written. q, k and v are of 16 bits.

    Returns out (batch, seqlen_q, num_heads, head_dim). There is no gradient: a q that requires one
    is an Error unless torch.no_grad().
    """
    _check_cache_call(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin)
    # flash-attn copies these where their last dimension is not contiguous. Caches are not copied:
    # they are written in place.
    q = last_contiguous(q)
    if k is not None and v is not None:
        k, v = last_contiguous(k), last_contiguous(v)
    if block_table is not None and tensor("block_table", block_table).dim() == 2:
        block_table = last_contiguous(block_table)
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
    where = _pages_of_rows(cache_batch_idx, block_table, batch)
    keys, values, table = k_cache, v_cache, where  # as attention gets them
    used = _used(cache_seqlens, seqlen_cache, batch, q)
    if cache_leftpad is not None:  # before anything is written
        pad = (cache_leftpad, cache_batch_idx, used)
        _check_pad(q, k_cache, v_cache, *pad, appends=k is not None)
        keys, values, apart = _pages_of_keys(k_cache, v_cache)
        table = _from_the_pad(cache_leftpad, cache_batch_idx, k_cache, apart)
        if k is not None and cache_leftpad.is_cpu and not unwatched(pad):
            # What a tracer hid from _check_pad() the library refuses before it writes.
            used = used.where((cache_leftpad >= 0) & (cache_leftpad <= used), -1)
    mask = mask_of(window_size, causal)
    splits = _splits(num_splits)
    softcap = max(number("softcap", softcap), 0.0)

    def named(error: Error) -> Error:
        """What attention says, by the names of this function."""
        if cache_leftpad is not None:
            error = renamed(error, {"block_table": "cache_leftpad"})
        elif block_table is None:
            error = _of_rows(error, k_cache.shape[0])
        return renamed(error, _KV_CACHE)

    if k is not None and v is not None:
        # Refused now, while nothing is written. What is usual is not asked about.
        if not is_dynamo_compiling() and not (
            alibi_slopes is None and _is_usual(q, keys, values, k.shape[0], softmax_scale, softcap)
        ):
            try:
                seen = used if cache_leftpad is None else used - cache_leftpad
                more = more_of(None, None, seen, table, splits, k_descale, v_descale)
                _check_attention(q, keys, values, mask, alibi_slopes, softmax_scale, softcap, more)
            except Error as e:
                raise named(e) from None
        try:
            turned = kv_append(
                *(k_cache, v_cache, k, v, used),
                block_table=where,
                q=q if rotary_cos is not None else None,
                rotary_cos=rotary_cos,
                rotary_sin=rotary_sin,
                rotary_interleaved=interleaved,
                q_advances=mask is not None,
                k_descale=k_descale,
                v_descale=v_descale,
            )
        except Error as e:
            if block_table is None:
                e = _of_rows(e, k_cache.shape[0])
            raise renamed(e, {"seqused_k": "cache_seqlens"}) from None
        q = q if turned is None else turned
        used = used + k.shape[1]
    if cache_leftpad is not None:
        used = used - cache_leftpad
    scaled = k_descale is not None or v_descale is not None  # which the way in C++ does not take
    if not scaled and not is_dynamo_compiling():
        done = native.attention(
            *(q, keys, values, mask, None, alibi_slopes, softmax_scale, softcap, 0.0, None),
            *(with_lse, None, None, None, None, used, table, splits),
        )
        if done is not None:
            return done  # type: ignore[no-any-return]
    try:
        out, lse = attend(
            *(q, keys, values),
            mask=mask,
            alibi_slopes=alibi_slopes,
            softmax_scale=softmax_scale,
            softcap=softcap,
            more=more_of(None, None, used, table, splits, k_descale, v_descale),
        )
    except Error as e:
        raise named(e) from None
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


def _is_usual(
    q: Tensor, k: Tensor, v: Tensor, batch: int, softmax_scale: float | None, softcap: float
) -> bool:
    """Whether attention, without ALiBi, takes these behind an append that has taken k and v."""
    of_q, _, heads, dim = q.shape  # each .shape is an object made anew
    *_, heads_kv, dim_k = k.shape
    return (
        (q.dtype is k.dtype or (k.dtype is torch.float8_e4m3fn and q.dtype in _OF_FP8))
        and q.device == k.device
        and of_q == batch
        and dim == dim_k
        and dim <= _EVERY_KERNEL
        and 0 < v.shape[3] <= _EVERY_KERNEL
        and heads > 0
        and heads_kv > 0
        and heads % heads_kv == 0
        and (softmax_scale is None or type(softmax_scale) is float)
        and (softmax_scale is None or abs(softmax_scale) <= _FLOAT32)
        and softcap <= _FLOAT32
    )


def _check_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Band | Causal | None, alibi_slopes: Tensor | None,
    softmax_scale: float | None, softcap: float, more: More | None,
) -> None:  # fmt: skip
    """Refuses what attention would."""
    if alibi_slopes is not None:
        tensor("alibi_slopes", alibi_slopes)
    check_devices("q", q, {"k_cache": k, "v_cache": v, "alibi_slopes": alibi_slopes})
    # No element, so that nothing below would look.
    if q.shape[2] == 0:
        raise InvalidArgument(f"q: num_heads 0; 1 to {MOST_ROWS}")
    if v.shape[3] == 0:
        raise InvalidArgument(f"v: head_dim_v 0; 1 to {_WIDEST}")
    options = _checked(mask, None, alibi_slopes, softmax_scale, softcap, 0.0, 0, None, None)
    given = () if more is None else tuple(more.tensors().values())
    if unwatched((q, k, v, alibi_slopes, *given)):
        asked: dict[str, Any] = {} if more is None else more.keywords(forward=True)
        ask: Any = ops.explain
        ask(*map(detached, _autocast(q, k, v)), **constant(options), **asked)


def _splits(given: int | None) -> int | None:
    if given is None or (type(given) is int and given == 0):
        return None
    allowed = f"an integer, 0 (as many as pays) to {MOST_ROWS}"
    return integer("num_splits", given, 0, MOST_ROWS, allowed=allowed) or None


def _used(given: int | Tensor | None, seqlen_cache: int, batch: int, like: Tensor) -> Tensor:
    """cache_seqlens as int32 (batch,)."""
    if isinstance(given, Tensor):
        return tensor("cache_seqlens", given)
    n = seqlen_cache
    if given is not None:
        allowed = "int32 (batch,) or an integer, 0 to the keys that the cache has room for"
        n = integer("cache_seqlens", given, -(2**31), 2**31 - 1, allowed=allowed)
    return torch.full((batch,), n, dtype=torch.int32, device=like.device)


def _pages_of_rows(
    cache_batch_idx: Tensor | None, block_table: Tensor | None, batch: int
) -> Tensor | None:
    if cache_batch_idx is None:
        return block_table
    if tensor("cache_batch_idx", cache_batch_idx).shape != (batch,):
        raise InvalidArgument(f"cache_batch_idx: {shape_of(cache_batch_idx)}; (batch {batch})")
    return cache_batch_idx.unsqueeze(1)


def _rows_of(cached: int) -> str:
    return f"0 to {cached - 1}, the rows of k_cache" if cached else "no row, as k_cache has none"


def _of_rows(error: Error, cached: int) -> Error:
    """Of the table with a page for each sequence that cache_batch_idx stands for."""
    if entry := re.match(r"block_table: (-?\d+) at \[(\d+), 0\]", str(error)):
        number, b = entry.groups()
        return InvalidArgument(f"cache_batch_idx: {number} at [{b}]; {_rows_of(cached)}")
    return renamed(error, {"block_table": "cache_batch_idx"})


def _check_pad(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, leftpad: Tensor, rows: Tensor | None,
    used: Tensor, *, appends: bool,
) -> None:  # fmt: skip
    """Refuses what the library would not see in pages and a table, or see by other names."""
    batch, (cached, seqlen, heads) = q.shape[0], k_cache.shape[:3]
    if (rows is None and cached != batch) or k_cache.shape[3] != q.shape[3]:
        wrong, cache, last = "k_cache", k_cache, f"head_dim {q.shape[3]}"
    elif v_cache.shape[:3] != k_cache.shape[:3]:
        wrong, cache, last = "v_cache", v_cache, f"head_dim_v {v_cache.shape[3]}"
    else:
        wrong = ""
    if wrong:
        first = f"batch {batch}" if rows is None else f"rows {cached}"
        allowed = f"({first}, seqlen_k {seqlen}, num_heads_kv {heads}, {last})"
        raise InvalidArgument(f"{wrong}: {shape_of(cache)}; {allowed}")
    given = {"cache_leftpad": leftpad, "cache_batch_idx": rows, "cache_seqlens": used}
    for name, x in given.items():
        if x is None:
            continue
        if tensor(name, x).dtype != torch.int32:
            raise InvalidArgument(f"{name}: dtype {dtype_name(x)}; int32")
        if x.shape != (batch,):
            raise InvalidArgument(f"{name}: {shape_of(x)}; (batch {batch})")
        if x.device != q.device:
            raise InvalidArgument(f"{name}: on {x.device}; {q.device}, where q is")
    if not unwatched((leftpad, rows, used)):
        return
    if leftpad.is_cpu or (_contents.ON and can_check(leftpad)):
        # kv_append has its own words for lengths.
        room = None if appends else seqlen
        raise_first(_contents_of_pad(leftpad, rows, used, cached, room))


def _contents_of_pad(
    leftpad: Tensor, rows: Tensor | None, used: Tensor, cached: int, seqlen: int | None
) -> Iterator[_contents.Finding]:
    if rows is not None:
        allowed = _rows_of(cached)
        yield from first_of(
            (rows < 0) | (rows >= cached),
            rows,
            lambda b, n, _: f"cache_batch_idx: {n} at [{b}]; {allowed}",
        )
    if seqlen is not None:  # before the pad, which is measured by them
        yield from _contents.used_lengths("cache_seqlens", used, "seqlen_k", seqlen)
    yield from first_of(
        (leftpad < 0) | (leftpad > used.clamp(min=0)),
        leftpad,
        lambda b, n, _: f"cache_leftpad: {n} at [{b}]; 0 to cache_seqlens",
    )


def _pages_of_keys(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, int]:
    """Both in pages of one key, and how many pages lie from a sequence to the next.

    Never a copy, which would be one of the whole cache. In a part of a larger cache the pages
    count what lies between the sequences, too.
    """
    apart = [_apart("k_cache", k_cache), _apart("v_cache", v_cache)]
    if apart[0] != apart[1]:
        row = v_cache.stride(1)
        allowed = f"{apart[0] * row}, {apart[0]} times the seqlen stride {row}, as k_cache's"
        raise InvalidArgument(f"v_cache: batch stride {v_cache.stride(0)}; {allowed}")
    batch, seqlen = k_cache.shape[:2]
    pages = seqlen + (batch - 1) * apart[0] if batch else 0
    if pages >= 2**31:
        allowed = "less than 2^31 with cache_leftpad, as int32 counts them"
        raise InvalidArgument(f"k_cache: {pages} keys from its first to its last; {allowed}")
    k, v = (_paged(x, pages) for x in (k_cache, v_cache))
    return k, v, apart[0]


def _apart(name: str, cache: Tensor) -> int:
    """The batch stride in rows of ``cache``."""
    batch, seqlen = cache.shape[:2]
    if batch <= 1 or seqlen <= 1:  # strides of what is alone say nothing
        return seqlen
    to_next, row = cache.stride()[:2]
    if row == 0 or to_next % row != 0:
        allowed = f"a multiple of the seqlen stride {row} with cache_leftpad"
        raise InvalidArgument(f"{name}: batch stride {to_next}; {allowed}")
    return to_next // row


def _paged(cache: Tensor, pages: int) -> Tensor:
    batch, seqlen, *rest = cache.shape
    if pages == batch * seqlen:  # what everything that traces understands
        return cache.view(pages, 1, *rest)
    row = cache.stride(1)
    return cache.as_strided((pages, 1, *rest), (row, row, *cache.stride()[2:]))


def _from_the_pad(leftpad: Tensor, rows: Tensor | None, k_cache: Tensor, apart: int) -> Tensor:
    """The table of the keys from ``leftpad`` on, in pages of one key."""
    cached, seqlen = k_cache.shape[:2]
    if rows is None:
        rows = torch.arange(leftpad.shape[0], device=leftpad.device)
    rows = rows.unsqueeze(1).to(torch.int64)  # as a row that is not there could become one that is
    keys = torch.arange(seqlen, device=leftpad.device) + leftpad.unsqueeze(1)
    table = rows * apart + keys.clamp(max=seqlen - 1)
    if leftpad.is_cpu:  # what a tracer hid from the checks the library refuses as it runs
        there = (rows >= 0) & (rows < cached) & (keys >= 0) & (keys < seqlen)
        table = table.where(there, -1)
    return table.to(torch.int32)
