"""Rows of padded tensors, packed and put back: what flash-attn calls unpadding and padding.

Gradients go the same ways, without sums: no row is taken twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .. import _bindings

Places = tuple[Tensor, ...]  # int64 indices of a tensor's first one or two dimensions


def _range(name: str) -> AbstractContextManager[None]:
    """What a profiler shows; torch.compile would have to break its graph for it."""
    return nullcontext() if torch.compiler.is_compiling() else _shown(name)


@contextmanager
def _shown(name: str) -> Iterator[None]:
    _bindings.begin_range(name)
    try:
        yield
    finally:
        _bindings.end_range()


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *places: Tensor) -> Tensor:
        ctx.save_for_backward(*places)
        ctx.shape = x.shape[: len(places)]
        with _range("pack"):
            return x[places]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        places = ctx.saved_tensors
        return put(gradient, places, ctx.shape), *([None] * len(places))


class _Put(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, shape: tuple[int, ...], *places: Tensor) -> Tensor:
        ctx.save_for_backward(*places)
        with _range("unpack"):
            padded = rows.new_zeros((*shape, *rows.shape[1:]))
            padded[places] = rows
            return padded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        places = ctx.saved_tensors
        return take(gradient, places), None, *([None] * len(places))


def take(x: Tensor, places: Places) -> Tensor:
    """``x[places]``, (rows, ...): each place at most once."""
    return _Take.apply(x, *places)  # type: ignore[no-any-return, no-untyped-call]


def put(rows: Tensor, places: Places, shape: tuple[int, ...]) -> Tensor:
    """(*shape, ...) with ``rows`` at ``places`` and zeros elsewhere; the inverse of ``take``."""
    return _Put.apply(rows, tuple(shape), *places)  # type: ignore[no-any-return, no-untyped-call]


def offsets(lengths: Tensor) -> Tensor:
    """cu_seqlens, int32 (batch + 1,), of lengths (batch,)."""
    ends = lengths.cumsum(0, dtype=torch.int32)
    return torch.cat((ends.new_zeros(1), ends))
