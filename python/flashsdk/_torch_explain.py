"""``flashsdk.torch.explain``: the kernel of a call of one of the adapter's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from . import ops
from ._errors import InvalidArgument, shown
from ._torch_more import More
from ._torch_ops import Options
from ._torch_private import TorchDispatchMode

_FORWARDS = ("flashsdk::mha_fwd", "flashsdk::mha_varlen_fwd", "flashsdk::attention_fwd")


class _Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the operators of the forward out of what runs under it, and keeps what they ask for."""

    def __init__(self, op: Literal["fwd", "bwd"]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = op
        self.found: list[ops.Explanation] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        q, k, v, *rest = args if function.name() in _FORWARDS else (None, None, None)
        if q is None:
            return function(*args, **(kwargs or {}))
        if function.name() == "flashsdk::attention_fwd":
            more = More(*rest[: len(More._fields)])
            packed, rest = more.lengths, rest[len(More._fields) :]
            keywords = more.keywords(forward=True)
        else:
            lengths = 0 if function.name() == "flashsdk::mha_fwd" else 4
            packed, rest, keywords = tuple(rest[:lengths]), rest[lengths:], {}
        keywords |= Options(*rest).keywords()
        self.found.append(ops.explain(q, k, v, *packed, op=self.op, **keywords))
        *batch, rows, heads, _ = q.shape
        out = q.new_empty((*batch, rows, heads, v.shape[-1]))
        return out, q.new_empty((*batch, heads, rows), dtype=torch.float32)


def explain(
    function: Callable[..., Any], *args: Any, op: Literal["fwd", "bwd"] = "fwd", **keywords: Any
) -> ops.Explanation:
    """The kernel that a call of ``function`` with these arguments takes, and why not others.

    function
        Of ``flashsdk.torch``, or any that calls one of them, as a module: the first call counts.
    op
        "fwd", or "bwd" for the gradient of that call.

    Computes no attention, leaves random generators as they were, and raises Error like the call.
    Where ``function`` calls none of ours, the explanation says so and names no kernel.
    """
    if not isinstance(op, str) or op not in ("fwd", "bwd"):
        raise InvalidArgument(f'op: {shown(op)}; "fwd" or "bwd"')
    if not callable(function):
        raise InvalidArgument(f"function: {shown(function)}; a function, such as attention")
    asked = _Asked(op)
    cuda: Any = torch.cuda
    gpus = range(cuda.device_count()) if cuda.is_initialized() else ()
    with torch.random.fork_rng(gpus), asked:
        function(*args, **keywords)
    if asked.found:
        return asked.found[0]
    return ops.Explanation("", [("flashsdk", "the call takes none of its operators")])
