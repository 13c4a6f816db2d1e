"""Keeps torch.compile out of what is computed with NumPy. Imports no PyTorch: a caller has."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, where torch.compile breaks its graph, or with fullgraph refuses.

    Its imitation of NumPy lacks much of it, and of the bits of integers it gets some wrong.
    """
    hidden: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        nonlocal hidden
        disable: Any = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        if disable is None:  # not imported, or not yet to its end, in another thread
            return function(*args, **keywords)
        if hidden is None:
            hidden = disable(function)
        return hidden(*args, **keywords)

    return call
