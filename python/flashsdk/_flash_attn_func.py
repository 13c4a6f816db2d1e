"""flash_attn_func of flash-attn 2.8 (github.com/Dao-AILab/flash-attention), and its family.

Argument names, order, defaults and semantics are flash-attn's; docstrings say what differs.
``flashsdk.torch`` re-exports them, and what ``_flash_attn_kvcache`` has.
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
        paged = "flash_attn_with_kvcache and flashsdk.torch.attention (seqused_k, block_table)"
        given = shape_of(block_table) if isinstance(block_table, Tensor) else shown(block_table)
        raise Unsupported(f"block_table: {given}; None here, as {paged} take pages")
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
    mask = mask_of(window_size, causal)
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


def mask_of(window_size: Sequence[int], causal: bool) -> Band | None:
    """None where every query sees every key."""
    left, right = _window(window_size)
    mask = None if left is None and right is None else Band(left, right)
    if switch("causal", causal):
        return Causal() if left is None else Band(left, 0)
    return mask


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
