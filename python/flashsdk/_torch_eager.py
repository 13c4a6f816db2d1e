"""The short way from ``flashsdk.torch`` to the library: calls that nothing but autograd watches.

torch.compile, functorch, tracers, modes, profilers and subclasses of Tensor have to see an
operator, and torch's dispatcher needs longer for one that is written in Python than the library
for a small call. Where none of them looks on, the operator's work is done without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from . import _contents, _log, _torch_sharding, ops
from ._torch_checks import no_gradient_of_fp8
from ._torch_private import is_watched
from ._torch_seed import draw_seed

Keywords = dict[str, Any]  # of the functions of flashsdk.ops, but dlse and outputs
Tensors = tuple[Tensor, ...]


class InPython:
    """What stands for ``_torch_native`` where it cannot be: it takes no call."""

    @staticmethod
    def attention(*_: Any) -> None: ...

    flash_attn = scaled_dot_product_attention = attention
    register_operators = skip_autograd = attention


def _native() -> Any:
    """``_torch_native`` where there is one for this PyTorch: a build's own, or one of a wheel's."""
    if os.environ.get("FLASHSDK_TORCH_NATIVE") == "0":
        return InPython
    try:
        from . import _torch_native  # type: ignore[attr-defined]

        return _torch_native
    except ImportError:
        return _native_of_wheel() or InPython


def _native_of_wheel() -> Any:
    """A wheel has a folder for each series of PyTorch that it knows, with a file for each Python.

    Whether that is for this very release the module says itself, by an ImportError.
    """
    name = f"{__package__}._torch_native"
    series = ".".join(torch.__version__.split(".")[:2])
    spec = PathFinder.find_spec(name, [str(Path(__file__).parent / "_torch" / series)])
    if spec is None or spec.loader is None:
        return None
    try:
        module = module_from_spec(spec)
    except ImportError:
        return None
    spec.loader.exec_module(module)
    sys.modules[name] = module
    vars(sys.modules[__package__])["_torch_native"] = module
    return module


built = _native()
# Which prints no line, and checks no values of a GPU.
native = InPython if _log.ON or _contents.ON else built

_ORDINARY = (Tensor, torch.nn.Parameter)
_BATCHED = ("q", "k", "v", "bias", "alibi_slopes", "seed")
_PACKED = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "bias", "alibi_slopes", "seed")
_LENDS_ANY = hasattr(Tensor, "__dlpack_c_exchange_api__")


@dataclass(frozen=True)
class Operation:
    """Attention of batches, or of packed sequences, the long way and the short one.

    Both take what ``lengths`` stands for, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    or nothing for batches.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]  # the operators, with ``encode``'s arguments
    backward: Callable[..., Tensors]
    run_forward: Callable[..., tuple[Tensor, Tensor]]  # of flashsdk.ops, with Keywords
    run_backward: Callable[..., Tensors]
    encode: Callable[[Keywords, Tensor], tuple[Any, ...]]  # Keywords, and a tensor they belong to
    beside: Callable[[Keywords, Tensor], tuple[Tensor | None, ...]]  # the tensors of ``encode``

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Any, ...], keywords: Keywords
    ) -> tuple[Tensor, Tensor]:
        """out, lse."""
        seed = keywords["seed"] if isinstance(keywords["seed"], Tensor) else None
        tensors = (q, k, v, *lengths[:2], keywords["bias"], keywords["alibi_slopes"], seed)
        if not unwatched(tensors):
            given = dict(zip(_PACKED if lengths else _BATCHED, tensors))
            _torch_sharding.prepare(given, keywords["dropout_p"])
            return self.forward(q, k, v, *lengths, *self.encode(keywords, q))
        if keywords["dropout_p"] == 0:
            keywords["seed"] = 0
        elif keywords["seed"] is None:
            # A call that is refused leaves the generator as it was.
            known = constant(keywords | {"seed": 0})
            ops.explain(detached(q), detached(k), detached(v), *lengths, **known)
            keywords["seed"] = draw_seed(q)
        if recorded((q, k, v)):
            no_gradient_of_fp8(k)
            out, lse = _Attention.apply(q, k, v, self, lengths, keywords)  # type: ignore[no-untyped-call]
            return out, lse
        q, k, v = map(detached, (q, k, v))
        return self.run_forward(q, k, v, *lengths, **constant(keywords))

    def gradients(
        self, dout: Tensor, dlse: Tensor | None, saved: Tensors, lengths: tuple[Any, ...],
        keywords: Keywords,
    ) -> Tensors:  # fmt: skip
        """dq, dk, dv. ``saved`` are q, k, v, out, lse."""
        tensors = (dout, dlse, *saved, *lengths[:2], keywords["bias"], keywords["alibi_slopes"])
        # A gradient that is recorded itself: the operator's own refuses.
        if not unwatched(tensors) or recorded((dout, *saved)):
            return self.backward(dout, dlse, *saved, *lengths, *self.encode(keywords, saved[0]))
        saved = tuple(map(detached, saved))
        dout = detached(last_contiguous(dout))
        dlse = None if dlse is None else detached(last_contiguous(dlse))
        return self.run_backward(dout, *saved, *lengths, dlse=dlse, **constant(keywords))


class _Attention(Function):
    """What autograd records of ``Operation.attend``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, operation: Operation, lengths: tuple[Any, ...],
        keywords: Keywords,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)  # no dlse for those who do not use lse
        out, lse = operation.run_forward(*map(detached, (q, k, v)), *lengths, **keywords)
        ctx.operation, ctx.bounds = operation, lengths[2:]
        # What the operators save, and in their order: activation checkpointing compares the lists,
        # and a profiler may look on at one of the two forwards alone.
        ctx.save_for_backward(q, k, v, out, lse, *lengths[:2], *operation.beside(keywords, q))
        seed = keywords["seed"]
        ctx.keywords = {
            **keywords, "bias": None, "alibi_slopes": None,
            "seed": None if isinstance(seed, Tensor) else seed,
        }  # fmt: skip
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *offsets, bias, alibi_slopes, seed, _ = ctx.saved_tensors
        if dout is None:  # only lse is used
            dout = torch.zeros_like(out)
        lengths = (*offsets, *ctx.bounds)
        keywords = {**ctx.keywords, "bias": bias, "alibi_slopes": alibi_slopes}
        if keywords["seed"] is None:
            keywords["seed"] = seed
        gradients = ctx.operation.gradients(dout, dlse, (q, k, v, out, lse), lengths, keywords)
        return *gradients, None, None, None


def unwatched(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nobody wants to see the operators that these tensors go through."""
    if torch.compiler.is_compiling() or is_watched():
        return False
    # all() of a generator takes twice as long. Where a tensor's memory does not show its values,
    # the dispatcher works them out: it negates views, and unwraps what is a Tensor by its type
    # alone. The address is 0 for meta tensors, zeros that nobody has written and the functional
    # tensors of C++ (without elements too, which is no loss); batches of gradients raise.
    try:
        for x in tensors:
            if x is not None and (type(x) not in _ORDINARY or not x.data_ptr() or x.is_neg()):
                return False
    except RuntimeError:
        return False
    return True


def recorded(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd wants to know what becomes of these tensors."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x.requires_grad:
                return True
    return False


def detached(x: Tensor) -> Tensor:
    """Without autograd, whose tensors DLPack refuses where PyTorch has no C interface to it yet.

    The library finds a way to them, too, but only after an exception.
    """
    return x.detach() if x.requires_grad and not _LENDS_ANY else x


def constant(keywords: Keywords) -> Keywords:
    """The same, of the tensors that have no gradient: a bias may be a Parameter under no_grad."""
    if _LENDS_ANY:
        return keywords
    given = {name: keywords[name] for name in ("bias", "alibi_slopes")}
    return keywords | {name: detached(x) for name, x in given.items() if x is not None}


def last_contiguous(x: Tensor) -> Tensor:
    """``x``, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
