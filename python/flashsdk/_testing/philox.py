"""Dropout's random bytes for whole matrices, in PyTorch: ``reference`` has those of one row."""

from __future__ import annotations

from typing import Any

import torch

Tensor = Any
MASK32 = 0xFFFFFFFF


def random_bytes(seed: Any, offset: Any, heads: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The byte that decides over each element of P, (..., seqlen_q, seqlen_k).

    heads, int64 (..., 1, 1): what dropout counts as batch·num_heads + head. seed and offset are
    integers, or int64 tensors of that shape. One call of Philox (docs/semantics.md) holds the bytes
    of two rows and eight columns.
    """
    i, j = (torch.arange(n, device=heads.device) for n in (seqlen_q, seqlen_k))
    rows = torch.arange(-(-seqlen_q // 16) * 8, device=heads.device)[:, None]
    columns = torch.arange(-(-seqlen_k // 32) * 4, device=heads.device)
    zero = torch.zeros_like(heads + rows + columns)
    c = [zero + rows, zero + columns, zero + heads, zero + (offset & MASK32)]
    keys = [seed & MASK32, (seed >> 32 ^ offset >> 32) & MASK32]
    for _ in range(7):
        # The products wrap around 2^64, and what shifting their sign bit brings in is masked.
        products = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        (high0, low0), (high1, low1) = ((x >> 32 & MASK32, x & MASK32) for x in products)
        c = [high1 ^ c[1] ^ keys[0], low1, high0 ^ c[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B9) & MASK32, (keys[1] + 0xBB67AE85) & MASK32]
    words = torch.stack(c, -1).flatten(-2)[..., i // 16 * 8 + i % 8, :]
    words = words[..., (j // 32 * 4 + j % 8 // 2) * 4 + j % 32 // 8]
    return words >> 8 * ((i % 16 // 8)[:, None] + 2 * (j % 2)) & 0xFF
