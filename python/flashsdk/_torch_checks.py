"""Checks of arguments before torch's dispatcher sees them.

What the dispatcher refuses is a TypeError or a RuntimeError about its schema, of many lines, and
what it takes it may read without its gradient. Tensors themselves are the library's to check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from . import _errors
from ._block_lists import MOST_ROWS
from ._errors import REAL, InvalidArgument, Unsupported, has, integer, real, shown, truth, type_name
from ._torch_private import in_forward_mode, without_batches

F = TypeVar("F", bound=Callable[..., Any])
_errors.tracing = torch.compiler.is_compiling
flag = truth
SEED = "an integer from 0 to 2^64 - 1, or int64 {seed, offset} where q is, (2,) or (batch, 2)"
ONCE_IN_REVERSE = "as attention has no second derivative, and no forward-mode one"


def overridden(function: Any, given: Any, *args: Any, **keywords: Any) -> Any:
    """handle_torch_function, for type checkers, which take it for one of ``function``'s type."""
    return handle_torch_function(function, given, *args, **keywords)


def overridable(function: F) -> F:
    """``function``, seen by modes and by its arguments' __torch_function__, as torch's own are."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        given = (*args, *keywords.values())
        if has_torch_function(given):
            return handle_torch_function(call, given, *args, **keywords)
        return function(*args, **keywords)

    return call  # type: ignore[return-value]


def constant_when_compiled(function: F) -> F:
    """torch.compiler.assume_constant_result, which would import the compiler: seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def switch(name: str, value: object) -> bool:
    """``flag`` where the field takes 0 and 1 as well."""
    if type(value) is int and value in (0, 1):
        return bool(value)
    return truth(name, value, allowed="True, False, 0 or 1")


def tensor(name: str, x: object) -> Tensor:
    """``x`` if it is a tensor with strides."""
    if not isinstance(x, Tensor):
        given = f"a {type_name(x)}" if has(x, "shape") else shown(x)  # another's repr is data
        raise InvalidArgument(f"{name}: {given}; a tensor")
    if x.is_nested:
        raise Unsupported(f"{name}: a nested tensor; a dense one, or varlen_attention")
    if x.layout is not torch.strided:
        raise Unsupported(f"{name}: a tensor of layout {x.layout}; a dense one")
    return x


_DIMS = {
    "q": ("q", "num_heads", "head_dim"),
    "k": ("k", "num_heads_kv", "head_dim"),
    "v": ("k", "num_heads_kv", "head_dim_v"),
}


def check_rows(name: str, x: object, *, packed: bool) -> None:
    """Refuses what is not q, k or v: a tensor of the right rank."""
    if tensor(name, x).dim() != (3 if packed else 4):
        shape = ("total_" if packed else "batch, seqlen_") + ", ".join(_DIMS[name])
        raise InvalidArgument(f"{name}: {shape_of(x)}; ({shape})")


def checked_seed(x: Tensor) -> Tensor:
    """``x``, of uint64 the same bits as int64; refuses what operators would take for a number."""
    if tensor("seed", x).numel() == 1:
        raise InvalidArgument(f"seed: {shape_of(x)}; {SEED}")
    return x.view(torch.int64) if x.dtype is torch.uint64 else x


def shape_of(x: Any) -> str:
    return f"shape {tuple(x.shape)}"


def number(name: str, value: Any, *, allowed: str = REAL) -> Any:
    """``value`` if it is a number, of the compiler's too; that of a tensor that holds one."""
    # A tuple, here and below: the compiler of PyTorch 2.6 cannot trace A | B.
    if type(value) in (float, int) or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if isinstance(value, Tensor):
        check_constant(name, value)
    return real(name, value, allowed=allowed)


def length(name: str, value: Any) -> Any:
    """``value`` if it is an integer, of the compiler's too; how long is the library's to check."""
    if torch.compiler.is_compiling() and isinstance(value, (int, torch.SymInt)):
        if not isinstance(value, bool):
            return value  # to compare it would fix it
    return integer(name, value, -(2**63), 2**63 - 1, allowed=f"an integer from 0 to {MOST_ROWS}")


def check_constant(name: str, x: Tensor) -> None:
    """Refuses a tensor whose gradient would be lost."""
    if x.requires_grad and torch.is_grad_enabled():
        allowed = "one without, as attention has no gradient with respect to it"
        raise Unsupported(f"{name}: a tensor that requires a gradient; {allowed}")
    if not torch.compiler.is_compiling():
        no_tangent(name, x)


def no_gradient_of_fp8(k: Tensor) -> None:
    """Refuses keys of a call that autograd records, where they are of 8 bits."""
    if k.dtype is torch.float8_e4m3fn:
        allowed = (
            "the dtype of q, as float8_e4m3fn has no backward and a tensor requires a gradient"
        )
        raise Unsupported(f"k: dtype float8_e4m3fn; {allowed}")


def no_tangent(name: str, x: object) -> None:
    """Refuses a dual tensor of forward-mode differentiation, whose tangent would be lost."""
    if not in_forward_mode() or not isinstance(x, Tensor):
        return
    dual = forward_ad.unpack_dual(without_batches(x))  # type: ignore[no-untyped-call]
    if dual.tangent is not None:
        allowed = f"one without, {ONCE_IN_REVERSE}"
        raise Unsupported(f"{name}: a tensor with a tangent; {allowed}")
