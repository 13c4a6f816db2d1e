"""``attention`` and ``varlen_attention``: all that the library does, for PyTorch's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function

from .._torch_checks import flag, overridden
from .._torch_eager import native
from .._torch_more import more_of
from .._torch_ops import attend
from ..masks import Mask
from ..ops import Backend

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    k_descale: Tensor | None
    v_descale: Tensor | None
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
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
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
    k_descale, v_descale
        float32 (batch | 1, num_heads_kv | 1): what k and v in float8_e4m3fn are multiplied with,
        beside a q of 16 bits, whose dtype out has. No gradient.
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
    scaled = k_descale is not None or v_descale is not None  # which the way in C++ does not take
    if not scaled and not is_dynamo_compiling():
        done = native.attention(
            *(q, k, v, mask, bias, alibi_slopes, softmax_scale, softcap, dropout_p, seed),
            *(return_lse, deterministic, backend),
            *more,
        )
        if done is not None:
            return done  # type: ignore[no-any-return]
    given: tuple[Any, ...] = (q, k, v, bias, alibi_slopes, *more[:4], k_descale, v_descale)
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
            k_descale=k_descale,
            v_descale=v_descale,
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
        more=more_of(*more, k_descale, v_descale),
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
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
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

    The rest as in ``attention``; descales have as many rows as there are sequences. Returns out
    (total_q, num_heads, head_dim_v), and lse float32 (num_heads, total_q) if asked for.
    """
    scaled = k_descale is not None or v_descale is not None
    if not scaled and not is_dynamo_compiling():
        done = native.attention(
            *(q, k, v, mask, bias, alibi_slopes, softmax_scale, softcap, dropout_p, seed),
            *(return_lse, deterministic, backend, sink, None, None, None, num_splits),
            *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        )
        if done is not None:
            return done  # type: ignore[no-any-return]
    given: tuple[Any, ...] = (q, k, v, cu_seqlens_q, cu_seqlens_k, bias, alibi_slopes, sink)
    given = (*given, k_descale, v_descale)
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
            k_descale=k_descale,
            v_descale=v_descale,
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
        more=more_of(sink, num_splits=num_splits, k_descale=k_descale, v_descale=v_descale),
    )
    return (out, lse) if wanted else out
