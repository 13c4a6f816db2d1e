"""The private names of PyTorch that this package uses, and what stands in for each.

Other modules ask here for what PyTorch says in no public way: who watches a call, what wraps a
tensor, what torch.compile is told. Where a release lacks a name, the public way takes its place:
slower, or knowing less, and right. Two names have none, and are asked for when the operators are
made: ``below_autograd``'s.

What is imported only where it is used stands there: torch.nested and torch.distributed, in
``integrations``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd import Function, forward_ad

from ._errors import Unsupported

F = TypeVar("F", bound=Callable[..., Any])


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_C: Any = getattr(torch, "_C", None)
_functorch: Any = getattr(_C, "_functorch", None)
_dispatch: Any = _module("torch.utils._python_dispatch")

# ---- who watches

_dispatch_modes: Any = getattr(_C, "_len_torch_dispatch_stack", None)
_function_modes: Any = getattr(_C, "_len_torch_function_stack", None)
_interpreter: Any = getattr(_functorch, "peek_interpreter_stack", None)
_tracing_state: Any = getattr(_C, "_get_tracing_state", None)
_profiler: Any = getattr(getattr(_C, "_autograd", None), "_profiler_enabled", None)
_included: Any = getattr(_C, "_dispatch_tls_is_dispatch_key_included", None)
# Of modes that look on before autograd, which the counts of modes leave out.
_before_autograd: Any = getattr(getattr(_C, "DispatchKey", None), "PreDispatch", None)
_CAN_ASK = None not in (
    *(_dispatch_modes, _function_modes, _interpreter, _tracing_state, _profiler),
    *(_included, _before_autograd),
)


def is_watched() -> bool:
    """Whether a mode, a transform, a tracer or a profiler wants to see operators.

    True where PyTorch cannot be asked: the way by the dispatcher is right for everybody.
    """
    return bool(
        not _CAN_ASK
        or _dispatch_modes()
        or _function_modes()
        or _interpreter() is not None
        or in_forward_mode()
        or _tracing_state() is not None
        or _profiler()
        or _included(_before_autograd)
    )


def in_forward_mode() -> bool:
    """Whether there may be dual tensors. Asking a tensor itself costs a microsecond."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def is_tracing() -> bool:
    """Of torch.jit.trace."""
    if _tracing_state is None:
        jit: Any = torch.jit
        return bool(jit.is_tracing())
    return _tracing_state() is not None


def is_exporting() -> bool:
    """By the flag itself: Dynamo of PyTorch 2.11 takes is_exporting() for true as it compiles."""
    compiler: Any = torch.compiler
    if hasattr(compiler, "_is_exporting_flag"):
        return bool(compiler._is_exporting_flag)
    # PyTorch 2.6 has one flag for both, which Dynamo sets neither to compile nor to export: there
    # what is exported strictly draws by our operator.
    if hasattr(compiler, "_is_compiling_flag"):
        return bool(compiler._is_compiling_flag)
    return bool(compiler.is_exporting())


# ---- tensors that wrap others


def _never(x: Any) -> bool:
    return False


# Of torch.func, whose wrappers have no memory: without it the address is what refuses them.
is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", _never)
_is_batched = getattr(_functorch, "is_batchedtensor", _never)
_get_unwrapped = getattr(_functorch, "get_unwrapped", None)


def without_batches(x: Any) -> Any:
    """The tensor inside those of vmap, which cannot unpack a dual one."""
    while _get_unwrapped is not None and _is_batched(x):
        x = _get_unwrapped(x)
    return x


def replicates_implicitly(dtensor: Any) -> bool:
    """Whether plain tensors beside a DTensor are taken for replicated ones."""
    dispatcher = getattr(dtensor, "_op_dispatcher", None)
    return bool(getattr(dispatcher, "_allow_implicit_replication", False))


# ---- operators


def has_schema(operator: Any, schema: str) -> bool:
    parse = getattr(_C, "parse_schema", None)
    return parse is None or operator._schema == parse(schema)


def below_autograd(operator: Any, keys: Any, inputs: tuple[Any, ...]) -> Any:
    """The operator's kernel behind autograd. There is no public way."""
    with _C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & _C._after_autograd_keyset, *inputs)


def remove_library(library: Any) -> None:
    """Its kernels go now; without the name with the last reference to it, which is the caller's."""
    destroy = getattr(library, "_destroy", None)
    if destroy is not None:
        destroy()


# Inside of an operator, in Python: neither a mode nor a subclass sees what it is made of. Without
# the name they do.
without_torch_function: Any = getattr(_C, "DisableTorchFunction", nullcontext)


def with_forward_mode() -> AbstractContextManager[Any]:
    """On again, which a Function turns off; torch.func may use it below."""
    turn: Any = getattr(forward_ad, "_set_fwd_grad_enabled", None)
    return nullcontext() if turn is None else turn(True)


_SingleLevel: Any = getattr(torch.autograd.function, "_SingleLevelFunction", Function)


class SingleLevelFunction(_SingleLevel):  # type: ignore[misc]
    """A Function that does not ask torch.func's levels one by one, as they come by themselves."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        """Compiled autograd asks each Function for it, and PyTorch's own of one level has none."""
        key: Any = Function._compiled_autograd_key
        return key(ctx)


_utils = _module("torch._functorch.utils")
# Around a call of it.
single_level = getattr(_utils, "enable_single_level_autograd_function", nullcontext)

# Sees the operators of what runs under it. Without it ``explain`` of a function refuses.
if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = getattr(_dispatch, "TorchDispatchMode", object)


# ---- the compiler

_config = _module("torch._functorch.config")


def not_compiled(function: F) -> F:
    """Nor what it calls: torch.compile looks into an operator in Python below its graph breaks."""
    frames: Any = getattr(getattr(_C, "_dynamo", None), "eval_frame", None)
    strategy = getattr(frames, "_FrameExecStrategy", None)
    if strategy is None:  # imports the compiler, which takes seconds
        return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, strategy(skip, skip))
    return function


def memory_budget() -> float:
    """Of torch.compile's partitioner: 1 saves what it likes, 0 saves nothing."""
    return float(getattr(_config, "activation_memory_budget", 1.0))


def indexing_by_tensors() -> AbstractContextManager[Any]:
    """Makes ``ids[q]`` of a tensor and a number an index of tensors, as FlexAttention does."""
    # Not before it is needed: it imports the compiler, which takes seconds.
    module = _module("torch._dynamo._trace_wrapped_higher_order_op")
    return getattr(module, "TransformGetItemToIndex", nullcontext)()


# ---- scaled_dot_product_attention


def when_cuda_starts(call: Callable[[], None]) -> None:
    """Now, where CUDA is in use; else when it comes to be, as nothing here is to start it."""
    later: Any = getattr(torch.cuda, "_lazy_call", None)
    if later is not None:
        later(call)


def sdp_order() -> list[int] | None:
    """In which order PyTorch asks its attention backends, by SDPBackend, if it tells."""
    order: Any = getattr(_C, "_get_sdp_priority_order", None)
    return None if order is None else list(order())


def set_sdp_order(order: list[int]) -> None:
    _C._set_sdp_priority_order(order)


def sdp_choice(*tensors: Any, scale: float | None, enable_gqa: bool) -> Any:
    """PyTorch's choice of a backend, as its function makes it. Raises Unsupported without it."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        raise Unsupported(f"torch: {torch.__version__}; one that says which backend it chooses")
    return choose(*tensors, scale=scale, enable_gqa=enable_gqa)
