"""What torch.utils.flop_counter counts for the operators, which it would take for free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def register(name: str, packed: int) -> None:
    """Tells the counter of torch.ops.flashsdk.<name>_fwd and <name>_bwd.

    As for PyTorch's own attention: the products of matrices, those that a causal mask or a window
    hides as well. Of a layout it is the share of the blocks that are visited.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
        return round(2 * _scores(q, k, rest, packed) * (q.shape[-1] + v.shape[-1]))

    def backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any
    ) -> int:
        scores = _scores(q, k, rest[2:], packed)  # behind out and lse
        return round(2 * scores * (3 * q.shape[-1] + 2 * v.shape[-1]))

    for suffix, formula in (("fwd", forward), ("bwd", backward)):
        operator = getattr(torch.ops.flashsdk, f"{name}_{suffix}")
        register_flop_formula(operator, get_raw=True)(formula)


def _scores(q: Tensor, k: Tensor, rest: Sequence[Any], packed: int) -> float:
    """Pairs of a query and a key in all heads; ``rest`` is lengths and ``Options`` of a call."""
    if packed:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = rest[:packed]
        try:
            lengths = zip(*(x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k)), strict=True)
            pairs = sum(math.prod(of) for of in lengths)
        except RuntimeError:  # on meta, or fake: no values
            pairs = (cu_seqlens_q.shape[0] - 1) * max_seqlen_q * max_seqlen_k
    else:
        pairs = q.shape[0] * q.shape[1] * k.shape[1]
    return float(pairs * q.shape[-2]) * _density(rest[packed + 4])


def _density(mask: Sequence[int]) -> float:
    """The share of visited blocks, of integers as ``encode_mask`` gives."""
    # Of each list: batch, num_heads, lines + 1, blocks; rows before columns, partial before full.
    sizes = [tuple(mask[begin : begin + 4]) for begin in range(7, len(mask), 4)]
    if not sizes:
        return 1.0
    rows, cols = sizes[0][2] - 1, sizes[2][2] - 1
    return sum(blocks / (batch * heads * rows * cols) for batch, heads, _, blocks in sizes[:2])
