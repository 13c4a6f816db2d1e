"""What torch.utils.flop_counter counts for the operators, which it would take for free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def register(name: str) -> None:
    """Tells the counter of torch.ops.flashsdk.<name>_fwd and <name>_bwd.

    As for PyTorch's own attention: the products of matrices, those that a causal mask or a window
    hides and those of unused rows as well. Of a layout it is the share of the blocks that are
    visited.
    """

    def forward(given: Mapping[str, Any]) -> int:
        head_dim, head_dim_v = _dims(given)
        return round(2 * _scores(given) * (head_dim + head_dim_v))

    def backward(given: Mapping[str, Any]) -> int:
        head_dim, head_dim_v = _dims(given)
        return round(2 * _scores(given) * (3 * head_dim + 2 * head_dim_v))

    for suffix, formula in (("fwd", forward), ("bwd", backward)):
        operator = getattr(torch.ops.flashsdk, f"{name}_{suffix}")
        register_flop_formula(operator, get_raw=True)(_named(operator.default, formula))


def _named(operator: Any, formula: Callable[[Mapping[str, Any]], int]) -> Callable[..., int]:
    """``formula`` of an operator's arguments by their names."""
    names = [argument.name for argument in operator._schema.arguments]

    def count(*args: Any, **keywords: Any) -> int:
        return formula(dict(zip(names, args, strict=False)) | keywords)

    return count


def _dims(given: Mapping[str, Any]) -> tuple[int, int]:
    return given["q"].shape[-1], given["v"].shape[-1]


def _scores(given: Mapping[str, Any]) -> float:
    """Pairs of a query and a key in all heads."""
    q: Tensor = given["q"]
    k: Tensor = given["k"]
    cu_seqlens_q, cu_seqlens_k = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        try:
            lengths = zip(*(x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k)), strict=True)
            pairs = sum(math.prod(of) for of in lengths)
        except RuntimeError:  # on meta, or fake: no values
            longest = given["max_seqlen_q"] * given["max_seqlen_k"]
            pairs = (cu_seqlens_q.shape[0] - 1) * longest
    else:
        table = given.get("block_table")
        keys = k.shape[1] if table is None else table.shape[1] * k.shape[1]
        pairs = q.shape[0] * q.shape[1] * keys
    return float(pairs * q.shape[-2]) * _density(given["mask"])


def _density(mask: Sequence[int]) -> float:
    """The share of visited blocks, of integers as ``encode_mask`` gives."""
    # Of each list: batch, num_heads, lines + 1, blocks; rows before columns, partial before full.
    sizes = [tuple(mask[begin : begin + 4]) for begin in range(7, len(mask), 4)]
    if not sizes:
        return 1.0
    rows, cols = sizes[0][2] - 1, sizes[2][2] - 1
    return sum(blocks / (batch * heads * rows * cols) for batch, heads, _, blocks in sizes[:2])
