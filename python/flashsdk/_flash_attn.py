"""flash-attn 2.8's functions (github.com/Dao-AILab/flash-attention), re-exported by flashsdk.torch.

Argument names, order, defaults and semantics are flash-attn's; docstrings say what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from ._errors import Error
from ._torch_ops import attend, last_contiguous
from .masks import Band

# out, or with return_attn_probs (out, softmax_lse, S_dmask).
Outputs: TypeAlias = Tensor | tuple[Tensor, Tensor, Tensor]


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
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Outputs:
    """flash-attn's function of this name: names, order, defaults and semantics of 2.8.

    q, k, v
        (batch, seqlen_q, num_heads, head_dim) and twice (batch, seqlen_k, num_heads_kv, head_dim).
        Copied if the last dimension is not contiguous, as flash-attn does.
    dropout_p
        Probability in [0, 1), rounded to the nearest 1/256, drawn from torch's CPU generator.
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
        Bit-identical gradients from run to run, or an Error.
    return_attn_probs
        Return (out, softmax_lse, S_dmask) with softmax_lse float32 (batch, num_heads, seqlen_q).
        flash-attn fills S_dmask with P under dropout only, where this raises an Error, as P
        never exists; without dropout it is empty, here as there.

    Returns out (batch, seqlen_q, num_heads, head_dim). A row that sees no key has out 0. Unlike
    flash-attn's, softmax_lse can be differentiated.
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


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Outputs:
    """``flash_attn_func`` on one tensor qkv (batch, seqlen, 3, num_heads, head_dim)."""
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
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Outputs:
    """``flash_attn_func`` on q and one tensor kv (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
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
    )


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
    deterministic: bool = False,
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

    Returns out (total_q, num_heads, head_dim); softmax_lse is (num_heads, total_q).
    """
    if block_table is not None:
        raise Error(
            "block_table: a tensor; None, as paged K and V are not supported", "unsupported"
        )
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
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Outputs:
    """``flash_attn_varlen_func`` on one tensor qkv (total, 3, num_heads, head_dim)."""
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
    )


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
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Outputs:
    """``flash_attn_varlen_func`` on q and one tensor kv (total_k, 2, num_heads_kv, head_dim)."""
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
    )


def _unpacked(name: str, packed: Tensor, count: int, rank: int) -> tuple[Tensor, ...]:
    """The ``count`` tensors along the last dimension but two; their gradients are stacked once."""
    if packed.dim() != rank or packed.shape[-3] != count:
        shape = ("batch, " if rank == 5 else "") + f"seqlen, {count}, num_heads, head_dim"
        raise Error(f"{name}: shape {tuple(packed.shape)}; ({shape})")
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
    deterministic: bool,
    return_attn_probs: bool,
) -> Outputs:
    if return_attn_probs and dropout_p > 0:
        raise Error(
            f"return_attn_probs: True with dropout_p = {dropout_p}; False, as P is never stored",
            "unsupported",
        )
    if not isinstance(window_size, Sequence) or len(window_size) != 2:
        raise Error(f"window_size: {window_size!r}; (left, right)")
    left, right = (None if n < 0 else n for n in window_size)
    if causal:
        right = 0
    q, k, v = map(last_contiguous, qkv)
    out, lse = attend(
        q,
        k,
        v,
        packed,
        mask=None if left is None and right is None else Band(left, right),
        alibi_slopes=alibi_slopes,
        softmax_scale=softmax_scale,
        softcap=max(softcap, 0.0),
        dropout_p=dropout_p,
        deterministic=deterministic or None,
    )
    return (out, lse, out.new_empty(0)) if return_attn_probs else out
