"""New arrays of the framework that a given array belongs to. Imports no framework: a caller has."""

from __future__ import annotations

import sys
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from . import _bindings
from ._errors import InvalidArgument, has, type_name

Shape = tuple[int, ...]


class Framework(Protocol):
    """How outputs are made and handed over."""

    writable: bool  # whether results can be written into an array of the caller's
    waits: bool  # whether a call on a GPU must have ended before it returns

    def empty(self, like: Any, shape: Shape) -> Any:
        """Uninitialised memory for results, of the dtype and on the device of ``like``."""

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        """The same, of float32."""

    def empty_like(self, like: Any, other: Any) -> Any:
        """``empty`` of the shape of another array, which may be of another framework."""

    def new_out(self, q: Any, v: Any) -> Any:
        """``empty`` for the out of a forward, batched or packed."""

    def finish(self, result: Any) -> Any:
        """The framework's array of memory that now holds results."""

    def recorded(self, array: Any) -> bool:
        """Whether automatic differentiation goes by what is done with an array."""

    def first_recorded(self, q: Any, k: Any, v: Any) -> str:
        """The name of the first of a forward's inputs that is ``recorded``, else ""."""

    def written(self, array: Any) -> Any:
        """An array of the caller's that now holds results, known to the framework as changed."""

    def lendable(self, array: Any) -> tuple[Any, str] | None:
        """What lends the memory of one that does not, and which float8 its bytes are, or ""."""

    def device(self, like: Any) -> Any:
        """The GPU that ``like`` is on, hashable; None for memory of the host."""

    def to_device(self, array: Any, like: Any) -> Any:
        """A NumPy array copied to the GPU of ``like``."""

    def lasting(self, array: Any) -> bool:
        """Whether what ``to_device`` gave may be kept for later calls."""

    def stream(self, like: Any) -> int:
        """Address of the current CUDA stream on the GPU of ``like``."""

    def deterministic(self) -> bool:
        """Whether the framework is told to give the same bits from run to run."""

    def scratch(self, like: Any, size: int, stream: int | None) -> Any:
        """At least ``size`` bytes beside ``like``, reused only after what runs on ``stream``, or
        on the current one."""


class _NumPy:
    writable = True
    waits = False

    def empty(self, like: Any, shape: Shape) -> Any:
        return np.empty(shape, like.dtype)

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        return np.empty(shape, np.float32)

    def empty_like(self, like: Any, other: Any) -> Any:
        return self.empty(like, tuple(other.shape))

    def new_out(self, q: Any, v: Any) -> Any:
        return self.empty(q, (*q.shape[:-1], v.shape[-1]))

    def finish(self, result: Any) -> Any:
        return result

    def recorded(self, array: Any) -> bool:
        return False

    def first_recorded(self, q: Any, k: Any, v: Any) -> str:
        if type(q) is type(k) is type(v):
            return ""
        return next((name for name, x in (("k", k), ("v", v)) if of(x).recorded(x)), "")

    def written(self, array: Any) -> Any:
        return array

    def lendable(self, array: Any) -> tuple[Any, str] | None:
        return None

    def device(self, like: Any) -> Any:
        return None

    def to_device(self, array: Any, like: Any) -> Any:
        return array

    def lasting(self, array: Any) -> bool:
        return True

    def stream(self, like: Any) -> int:
        return 0  # the default one

    def deterministic(self) -> bool:
        return False

    def scratch(self, like: Any, size: int, stream: int | None) -> Any:
        return self.empty_float32(like, (-(-size // 4),))


class _Torch(_NumPy):
    """What a call on a GPU takes on the host is mostly the making of tensors: two each forward."""

    def __init__(self) -> None:
        from ._torch_private import is_wrapped  # PyTorch is there

        torch = sys.modules["torch"]
        self.cuda, self.from_numpy = torch.cuda, torch.from_numpy
        self.new, self.float32 = torch.empty, torch.float32  # faster than Tensor.new_empty
        self.uint8 = torch.uint8
        self.new_like, self.row_major = torch.empty_like, torch.contiguous_format
        self.tensor, self.is_grad_enabled = torch.Tensor, torch.is_grad_enabled
        self.increment_version = torch.autograd.graph.increment_version
        self.is_deterministic = torch.are_deterministic_algorithms_enabled
        self.is_wrapped = is_wrapped

    def empty(self, like: Any, shape: Shape) -> Any:
        return self.new(shape, dtype=like.dtype, device=like.device)

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        return self.new(shape, dtype=self.float32, device=like.device)

    def empty_like(self, like: Any, other: Any) -> Any:
        if isinstance(other, self.tensor):
            return self.new_like(other, memory_format=self.row_major)
        return self.empty(like, tuple(other.shape))

    def new_out(self, q: Any, v: Any) -> Any:
        shape, head_dim_v = q.shape, v.shape[-1]
        if head_dim_v == shape[-1]:
            return self.new_like(q, memory_format=self.row_major)
        return self.empty(q, (*shape[:-1], head_dim_v))

    def recorded(self, array: Any) -> bool:
        return bool(array.requires_grad) and self.is_grad_enabled()

    def first_recorded(self, q: Any, k: Any, v: Any) -> str:
        if not self.is_grad_enabled():
            return ""
        try:  # each call pays for what is asked here
            return "q" if q.requires_grad else "k" if k.requires_grad else "v" * v.requires_grad
        except AttributeError:  # of another framework
            return super().first_recorded(q, k, v)

    def written(self, array: Any) -> Any:
        # So that a backward which has saved it sees that it is another, as after torch's own out=.
        if not array.is_inference():
            self.increment_version(array)
        return array

    def lendable(self, array: Any) -> tuple[Any, str] | None:
        # Older releases refuse what requires a gradient, and all of float8: 2.6 does.
        dtype = array.dtype
        if dtype.is_floating_point and dtype.itemsize == 1:
            return array.detach().view(self.uint8), str(dtype).removeprefix("torch.")
        return (array.detach(), "") if array.requires_grad else None

    def device(self, like: Any) -> Any:
        return like.device if like.is_cuda else None

    def to_device(self, array: Any, like: Any) -> Any:
        return self.from_numpy(array.copy()).to(like.device)

    def lasting(self, array: Any) -> bool:
        # Neither a fake one nor one of a transform of torch.func, which ends with it.
        return type(array) is self.tensor and not self.is_wrapped(array)

    def stream(self, like: Any) -> int:
        return int(self.cuda.current_stream(like.device).cuda_stream)

    def deterministic(self) -> bool:
        return bool(self.is_deterministic())

    def scratch(self, like: Any, size: int, stream: int | None) -> Any:
        if stream is None or stream == self.stream(like):
            return super().scratch(like, size, stream)
        with self.cuda.stream(self.cuda.ExternalStream(stream, like.device)):
            return super().scratch(like, size, stream)


class _Jax(_NumPy):
    """JAX's arrays are immutable: kernels write to memory that becomes an array with the result.

    On a GPU that is an array nobody else has seen yet, and as XLA cannot be told to wait for our
    stream, nor when it may reuse memory that the stream still reads, calls wait for their end.
    """

    writable = False
    waits = True

    def empty(self, like: Any, shape: Shape) -> Any:
        return self._new(like, shape, str(like.dtype))

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        return self._new(like, shape, "float32")

    def _new(self, like: Any, shape: Shape, dtype: str) -> Any:
        device = self.device(like)
        if device is None:
            memory = _bindings.empty(dtype, shape)
            (host,) = like.devices()
            return memory if host.id == 0 else _JaxHostMemory(memory, host)
        array = sys.modules["jax"].numpy.empty(shape, dtype, device=device)
        return _JaxMemory(array.block_until_ready())

    def finish(self, result: Any) -> Any:
        if isinstance(result, _JaxMemory):
            return result.array
        import jax.dlpack  # here already, as somebody made the arrays

        if isinstance(result, _JaxHostMemory):
            return jax.device_put(jax.dlpack.from_dlpack(result.memory), result.device)
        return jax.dlpack.from_dlpack(result)

    def device(self, like: Any) -> Any:
        try:
            (device,) = like.devices()
        except (TypeError, ValueError):  # traced, or on several: the library says so
            return None
        return device if device.platform == "gpu" else None

    def to_device(self, array: Any, like: Any) -> Any:
        jax = sys.modules["jax"]
        with jax.ensure_compile_time_eval():  # not traced, as under jax.jit: it is kept
            return jax.device_put(array, self.device(like))

    def stream(self, like: Any) -> int:
        device = self.device(like)
        # Of an array on the host, beside another on a GPU: which is for the library to refuse.
        return 0 if device is None else int(device.get_stream_for_external_ready_events())


class _JaxMemory:
    """A new JAX array on a GPU as memory to write into, which JAX itself lends only to readers."""

    def __init__(self, array: Any):
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.array.__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, stream: int | None = None, **_: Any) -> Any:
        return _bindings.gpu_view(
            str(self.array.dtype),
            self.array.shape,
            self.array.unsafe_buffer_pointer(),
            self.__dlpack_device__()[1],
        ).__dlpack__()


class _JaxHostMemory:
    """Memory for an array on a CPU device of JAX that is not the first, where DLPack puts all."""

    def __init__(self, memory: Any, device: Any):
        self.memory, self.device = memory, device

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.memory.__dlpack__(**keywords)


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

    def device(self, like: Any) -> Any:
        return int(like.device.id)

    def to_device(self, array: Any, like: Any) -> Any:
        with like.device:
            return sys.modules["cupy"].asarray(array)

    def stream(self, like: Any) -> int:
        with like.device:
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)

    def scratch(self, like: Any, size: int, stream: int | None) -> Any:
        if stream is None:
            return super().scratch(like, size, stream)
        with like.device, sys.modules["cupy"].cuda.ExternalStream(stream):
            return super().scratch(like, size, stream)


class _Unknown(_NumPy):
    """What is no array, or an array of a framework that tells no way to make another."""

    def empty(self, like: Any, shape: Shape) -> Any:
        raise InvalidArgument(
            f"out: None; an array, as there is no way to make a {type_name(like)}"
        )

    empty_float32 = empty


def _namespace(array: Any) -> Any:
    return array.__array_namespace__()


_known: dict[type, Framework] = {np.ndarray: _NumPy()}
# Of classes that are not a framework's own, which may come and go.
_others: WeakKeyDictionary[type, Framework] = WeakKeyDictionary()


def of(array: Any) -> Framework:
    """The framework of an array."""
    kind = type(array)
    framework = _known.get(kind)
    if framework is None:
        framework = _others.get(kind)
    if framework is None:
        framework = _find(array)
        (_known if _package(kind) in _PACKAGES else _others)[kind] = framework
    return framework


_PACKAGES = {"numpy", "torch", "jax", "jaxlib", "cupy"}


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _find(array: Any) -> Framework:
    if isinstance(array, np.ndarray):
        return _NumPy()
    packages = {_package(base) for base in type(array).__mro__}
    if "torch" in packages and isinstance(array, sys.modules["torch"].Tensor):
        return _Torch()
    if packages & {"jax", "jaxlib"}:
        return _Jax()
    if "cupy" in packages:
        return _Cupy()
    if has(array, "__array_namespace__"):
        return _ArrayApi()
    return _Unknown()


def name(arrays: tuple[Any, ...]) -> str:
    """ "torch" or "jax" if an adapter is for these arrays, else ""."""
    frameworks = [of(x) for x in arrays]
    for kind, adapter in ((_Torch, "torch"), (_Jax, "jax")):
        if any(isinstance(framework, kind) for framework in frameworks):
            return adapter
    return ""


def own(name: str, array: Any) -> Any:
    """An array of the caller's to write into; raises Error if its framework forbids that."""
    framework = of(array)
    if not framework.writable:
        raise InvalidArgument(f"{name}: an immutable {type_name(array)}; None for a new array")
    # Autograd would go on with what was there before; torch's own out= refuses as well.
    if framework.recorded(array):
        raise InvalidArgument(
            f"{name}: a tensor that requires a gradient; one without, or torch.no_grad()"
        )
    return array


def written(array: Any) -> Any:
    """The array that ``own`` gave, after results were written into it."""
    return of(array).written(array)


def lendable(array: Any) -> tuple[Any, str] | None:
    """What the bindings ask of an array whose __dlpack__ raised."""
    return of(array).lendable(array)


# ---- what the bindings ask on a GPU


def gpu_stream(q: Any) -> int:
    return of(q).stream(q)


def gpu_scratch(q: Any, size: int, stream: int | None) -> Any:
    return of(q).scratch(q, size, stream)


def gpu_must_wait(q: Any) -> bool:
    return of(q).waits
