"""``scaled_dot_product_attention``, with the arguments of torch.nn.functional's."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function

from .._errors import Error, InvalidArgument, has, renamed
from .._torch_checks import (
    check_constant,
    constant_when_compiled,
    flag,
    overridden,
    shape_of,
    tensor,
)
from .._torch_eager import last_contiguous, native
from .._torch_ops import attend
from ..masks import Band, Causal


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
