"""CPU calls on PyTorch's own threads, for the ways that are in Python (cpp/torch/torch_threads.h).

Two pools in one process fight: PyTorch's threads still spin when ours begin to work.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from . import _bindings

P = ParamSpec("P")
R = TypeVar("R")


def _parallel_for() -> int:
    """The address of libtorch's torch_parallel_for; 0 before PyTorch 2.10, which has none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.torch_parallel_for, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


_PARALLEL_FOR = _parallel_for()


def on_torch_threads(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose CPU calls follow torch.get_num_threads().

    They run on PyTorch's pool where it has a door for it, else on as many threads of our own.
    """

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        _bindings.use_threads(torch.get_num_threads(), _PARALLEL_FOR)
        try:
            return function(*args, **keywords)
        finally:
            _bindings.use_threads(0, 0)

    return call
