"""Jagged nested tensors in PyTorch's own function, on a CPU.

PyTorch gives them to its flash attention for packed sequences on a GPU alone; on a CPU that
operator has no kernel. While ours stands there, what they are given to is chosen here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from .. import build_info
from .._torch_checks import shape_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _widest() -> int:
    head_dim: int = build_info()["cpu_head_dim"]
    return head_dim


class Choice:
    """Our answer to "can flash attention take it?" where PyTorch asks for nested tensors."""

    _name = "can_use_flash_attention"

    def __init__(self) -> None:
        self._names = vars(importlib.import_module("torch.nested._internal.sdpa"))
        self._before: Callable[..., bool] = self._names[self._name]
        self._names[self._name] = self._takes

    def remove(self) -> None:
        self._names[self._name] = self._before

    def _takes(self, params: Any, debug: bool = False) -> bool:
        if torch.compiler.is_compiling():  # what is compiled has PyTorch's choice
            return self._before(params, debug)
        given = params.query, params.key, params.value, params.attn_mask
        ours = not why_not(*given, params.dropout, params.is_causal)
        return ours or self._before(params, debug)


def why_not(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
) -> str:
    """Why nested tensors of a CPU are not given to our kernels; "" where they are."""
    named = (("query", query), ("key", key), ("value", value))
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return "flash attention is turned off here, as sdpa_kernel does"
    for name, x in named:
        if x.device.type != "cpu":
            return f"{name} is nested and on {x.device}: PyTorch asks for each device anew"
        if not x.is_nested or x.layout != torch.jagged:
            return f"{name} is {'strided' if x.is_nested else 'not nested'}; all three jagged"
        if x.dim() != 4 or x._ragged_idx != 2:
            return f"{name} has {shape_of(x)}, ragged in dimension {x._ragged_idx}; 4, in 2"
        if x.lengths() is not None:
            return f"{name} has holes between its sequences"
        if x.dtype not in _DTYPES or x.dtype != query.dtype:
            return f"{name} is {str(x.dtype).removeprefix('torch.')}"
        if x.size(1) != query.size(1):
            return f"{name} has {x.size(1)} heads, query {query.size(1)}; nested ones as many"
        if x.size(3) != query.size(3) or x.size(3) % 8 != 0 or x.size(3) > _widest():
            allowed = f"that of query, a multiple of 8 up to {_widest()}"
            return f"head_dim {x.size(3)} of {name}; {allowed}"
        if x._get_min_seqlen() == 0:
            return f"{name} has an empty sequence"
    if attn_mask is not None:
        return "there is an attn_mask"
    if dropout_p != 0:
        return f"dropout_p is {dropout_p}"
    if is_causal and not same_lengths(query, key):
        return "is_causal, with other lengths of key than of query"
    return "" if same_lengths(key, value) else "value has other lengths than key"


def same_lengths(one: Any, other: Any) -> bool:
    return one.offsets() is other.offsets() or torch.equal(one.offsets(), other.offsets())
