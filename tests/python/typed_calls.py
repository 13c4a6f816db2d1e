"""What a type checker must know of the adapter. mypy reads this (`make lint`), nobody runs it."""

import flashsdk as fs
import torch
from flashsdk.torch import (
    attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    kv_append,
    varlen_attention,
)
from flashsdk.torch.distributed import context_parallel, positions, shard_sequence
from torch import Tensor
from typing_extensions import assert_type

Three = tuple[Tensor, Tensor, Tensor]


def kinds(mask: fs.Mask) -> fs.SlidingWindow | fs.Band | None:
    if isinstance(mask, fs.Causal):
        assert_type(mask, fs.Causal)
    return mask if isinstance(mask, fs.SlidingWindow) else fs.SlidingWindow(128)


def calls(q: Tensor, offsets: Tensor, wanted: bool) -> None:
    lengths = (offsets, offsets, 5, 5)
    assert_type(attention(q, q, q), Tensor)
    assert_type(attention(q, q, q, mask=fs.Causal(), return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention(q, q, q, return_lse=wanted), Tensor | tuple[Tensor, Tensor])
    assert_type(attention(q, q, q, seqused_k=offsets, block_table=q, num_splits=1), Tensor)
    assert_type(attention(q, q, q, k_descale=q, v_descale=None), Tensor)
    assert_type(varlen_attention(q, q, q, *lengths, softcap=2.0, sink=q), Tensor)
    assert_type(varlen_attention(q, q, q, *lengths, v_descale=q), Tensor)
    assert_type(varlen_attention(q, q, q, *lengths, return_lse=True), tuple[Tensor, Tensor])
    assert_type(kv_append(q, q, q, q, offsets, q=q, k_descale=q, v_descale=None), Tensor | None)
    assert_type(context_parallel(q, q, q, mask=fs.Causal(), deterministic=True), Tensor)
    assert_type(context_parallel(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(shard_sequence(positions(8)), Tensor)
    assert_type(flash_attn_func(q, q, q, 0.0, None, True), Tensor)
    assert_type(flash_attn_func(q, q, q, causal=True, return_attn_probs=True), Three)
    assert_type(flash_attn_func(q, q, q, return_attn_probs=wanted), Tensor | Three)
    assert_type(flash_attn_qkvpacked_func(q), Tensor)
    assert_type(flash_attn_kvpacked_func(q, q, return_attn_probs=True), Three)
    assert_type(flash_attn_varlen_func(q, q, q, *lengths, block_table=None), Tensor)
    assert_type(flash_attn_varlen_qkvpacked_func(q, offsets, 5), Tensor)
    assert_type(flash_attn_varlen_kvpacked_func(q, q, *lengths, return_attn_probs=True), Three)
    attention(q, q, q, softcap="2")  # type: ignore[call-overload]
    attention(q, q, q, backend="cuda")  # type: ignore[call-overload]
    fs.mha_fwd(q, q, q, backend="cuda")  # type: ignore[arg-type]
    fs.mha_fwd(q, q, q, backend="sm90", deterministic=None)
    assert_type(attention(q, q, q).sum() + torch.zeros(()), Tensor)
