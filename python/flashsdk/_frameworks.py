"""New arrays of the framework that a given array belongs to. Imports no framework: a caller has."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import numpy as np

from . import _bindings
from ._errors import Error

Shape = tuple[int, ...]


class Framework(Protocol):
    """How outputs are made and handed over."""

    writable: bool  # whether results can be written into an array of the caller's

    def empty(self, like: Any, shape: Shape) -> Any:
        """Uninitialised memory for results, of the dtype and on the device of ``like``."""

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        """The same, of float32."""

    def finish(self, result: Any) -> Any:
        """The framework's array of memory that now holds results."""


class _NumPy:
    writable = True

    def empty(self, like: Any, shape: Shape) -> Any:
        return np.empty(shape, like.dtype)

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        return np.empty(shape, np.float32)

    def finish(self, result: Any) -> Any:
        return result


class _Torch(_NumPy):
    def __init__(self) -> None:
        torch = sys.modules["torch"]
        self.new, self.float32 = torch.empty, torch.float32  # faster than Tensor.new_empty

    def empty(self, like: Any, shape: Shape) -> Any:
        return self.new(shape, dtype=like.dtype, device=like.device)

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        return self.new(shape, dtype=self.float32, device=like.device)


class _Jax(_NumPy):
    """JAX's arrays are immutable: kernels write to plain memory, which then becomes an array."""

    writable = False

    def empty(self, like: Any, shape: Shape) -> Any:
        return _bindings.empty(str(like.dtype), shape)

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        return _bindings.empty("float32", shape)

    def finish(self, result: Any) -> Any:
        import jax.dlpack  # here already, as somebody made the arrays

        return jax.dlpack.from_dlpack(result)


class _ArrayApi(_NumPy):
    """CuPy and whatever else follows the Python array API standard."""

    def empty(self, like: Any, shape: Shape) -> Any:
        return _namespace(like).empty(shape, dtype=like.dtype, device=like.device)

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        xp = _namespace(like)
        return xp.empty(shape, dtype=xp.float32, device=like.device)


class _Cupy(_NumPy):
    def empty(self, like: Any, shape: Shape) -> Any:
        with like.device:
            return sys.modules["cupy"].empty(shape, like.dtype)

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        with like.device:
            return sys.modules["cupy"].empty(shape, np.float32)


class _Unknown(_NumPy):
    """What is no array, or an array of a framework that tells no way to make another."""

    def empty(self, like: Any, shape: Shape) -> Any:
        raise Error(f"out: None; an array, as there is no way to make a {type(like).__name__}")

    empty_float32 = empty


def _namespace(array: Any) -> Any:
    return array.__array_namespace__()


_known: dict[type, Framework] = {np.ndarray: _NumPy()}


def of(array: Any) -> Framework:
    """The framework of an array."""
    framework = _known.get(type(array))
    if framework is None:
        framework = _known[type(array)] = _find(array)
    return framework


def _find(array: Any) -> Framework:
    if isinstance(array, np.ndarray):
        return _NumPy()
    packages = {base.__module__.partition(".")[0] for base in type(array).__mro__}
    if "torch" in packages:
        return _Torch()
    if packages & {"jax", "jaxlib"}:
        return _Jax()
    if "cupy" in packages:
        return _Cupy()
    if hasattr(array, "__array_namespace__"):
        return _ArrayApi()
    return _Unknown()


def own(name: str, array: Any) -> Any:
    """An array of the caller's to write into; raises Error if its framework forbids that."""
    if not of(array).writable:
        raise Error(f"{name}: a {type(array).__name__}, which is immutable; None for a new one")
    return array
