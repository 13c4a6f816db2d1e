"""torch.ops.flashsdk.attention_fwd and _bwd: calls with sinks, used lengths, pages, fp8 or splits.

They are ``_torch_ops`` for what few calls have. Without ``_torch_native`` calls that autograd does
not record, those of decoding, have a short way here; others go through the operators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _torch_flops, _torch_sharding, ops
from ._errors import Unsupported, integer
from ._torch_checks import check_constant, no_tangent, tensor
from ._torch_eager import constant, detached, last_contiguous, recorded, unwatched
from ._torch_ops import (
    Options,
    _check_devices,
    _encoded,
    _operator,
    _refuse,
    _save,
    _save_nothing,
    _saved,
)
from ._torch_threads import on_torch_threads


class More(NamedTuple):
    """What the operators take between q, k, v and the Options, in the order of their schema."""

    sink: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    num_splits: int = 0  # 0: as many as pays
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    @property
    def lengths(self) -> tuple[Any, ...]:
        return self[7:] if self.cu_seqlens_q is not None else ()

    def tensors(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in _TENSORS}

    def listed(self) -> list[Any]:
        """PyTorch 2.6 traces a part of a list, but neither that of a named tuple nor _replace."""
        return [*self]

    def with_both_lengths(self, q: Tensor, k: Tensor) -> More:
        """Of DTensors: PyTorch 2.11 takes a call with those of q alone for one with those of k."""
        seqused_q, seqused_k = self.seqused_q, self.seqused_k
        if seqused_q is None and seqused_k is not None:
            seqused_q = torch.full_like(seqused_k, q.shape[1])
        if seqused_k is None and seqused_q is not None:
            seqused_k = torch.full_like(seqused_q, k.shape[1])
        return More(self.sink, seqused_q, seqused_k, *self.listed()[3:])

    def keywords(self, *, forward: bool) -> dict[str, Any]:
        """Those of ``flashsdk.ops``, which takes as many as a call may have."""
        given: dict[str, Any] = {"sink": self.sink}
        if not self.lengths:
            given |= {"seqused_q": self.seqused_q, "seqused_k": self.seqused_k}
        if forward:
            given["num_splits"] = self.num_splits or None
            given |= {"k_descale": self.k_descale, "v_descale": self.v_descale}
            given |= {} if self.lengths else {"block_table": self.block_table}
        return given

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """out, lse. ``keywords`` are those of ``flashsdk.ops``, checked; ``lengths`` of packed."""
        more = More(*self.listed()[:7], *lengths)
        if more.block_table is not None and recorded((q, k, v)):
            allowed = "none, as pages have no backward and a tensor requires a gradient"
            raise Unsupported(f"block_table: given; {allowed}")
        seed = keywords["seed"] if isinstance(keywords["seed"], Tensor) else None
        beside = {"bias": keywords["bias"], "alibi_slopes": keywords["alibi_slopes"], "seed": seed}
        given = {"q": q, "k": k, "v": v, **more.tensors(), **beside}
        trained = (q, k, v) if more.sink is None else (q, k, v, more.sink)
        if keywords["dropout_p"] == 0 and not recorded(trained):
            if unwatched(tuple(given.values())):
                q, k, v = map(detached, (q, k, v))
                keywords = constant({**keywords, "seed": 0})
                return _run_forward(q, k, v, _without_gradient(more), keywords)
        if _torch_sharding.prepare(given, keywords["dropout_p"]):
            more = more.with_both_lengths(q, k)
        out, lse = _attention(q, k, v, *more, *_encoded(keywords, q))
        return out, lse


_COUNT = len(More._fields)
_GIVEN = ("sink", "seqused_q", "seqused_k", "block_table", "k_descale", "v_descale")
_TENSORS = (*_GIVEN, "cu_seqlens_q", "cu_seqlens_k")


@on_torch_threads
def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, more: More, keywords: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    run: Any = ops.mha_varlen_fwd if more.lengths else ops.mha_fwd
    out, lse = run(q, k, v, *more.lengths, **more.keywords(forward=True), **keywords)
    return out, lse


@on_torch_threads
def _run_backward(
    tensors: tuple[Any, ...], dlse: Tensor | None, more: More, keywords: dict[str, Any]
) -> tuple[Tensor, ...]:
    run: Any = ops.mha_varlen_bwd if more.lengths else ops.mha_bwd
    keywords = {**keywords, **more.keywords(forward=False), "dlse": dlse}
    return tuple(run(*tensors, *more.lengths, **keywords))


def _split(rest: tuple[Any, ...]) -> tuple[More, Options]:
    return More(*rest[:_COUNT]), Options(*rest[_COUNT:])


def _without_gradient(more: More) -> More:
    return more._replace(sink=None if more.sink is None else detached(more.sink))


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    more, options = _split(rest)
    q, k, v = map(detached, (q, k, v))
    with torch.no_grad():  # the operator is what autograd records
        return _run_forward(q, k, v, _without_gradient(more), options.keywords())


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    more, options = _split(rest)
    beside = {"bias": options.bias, "alibi_slopes": options.alibi_slopes}
    _check_devices(q, k=k, v=v, **beside, **more.tensors())
    *batch, seqlen, num_heads, _ = q.shape
    out = q.new_empty((*batch, seqlen, num_heads, v.shape[-1]))
    return out, q.new_empty((*batch, num_heads, seqlen), dtype=torch.float32)


def _backward(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    more, options = _split(rest[5:])
    if more.block_table is not None:
        raise Unsupported("block_table: given; none, as pages have no backward")
    dlse = None if dlse is None else last_contiguous(detached(dlse))
    tensors = tuple(map(detached, (last_contiguous(dout), *rest[:5])))
    gradients = _run_backward(tensors, dlse, _without_gradient(more), options.keywords())
    return gradients if more.sink is not None else (*gradients, rest[4].new_empty(0))


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    lse, sink = rest[1], rest[2]
    dsink = lse.new_empty(0 if sink is None else sink.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsink


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    arguments, rest = _saved(ctx, dout, dlse)
    dq, dk, dv, dsink = _gradients(*arguments, *rest)
    return dq, dk, dv, None if rest[0] is None else dsink, *([None] * (len(rest) - 1))


_gradients = _operator("attention_bwd", _backward, _fake_backward, _save_nothing, _refuse)
_attention = _operator("attention_fwd", _forward, _fake_forward, _save, _gradient)
_torch_flops.register("attention")
_torch_sharding.register()  # of all operators, of which these are the last


def more_of(
    sink: Tensor | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None,
) -> More | None:  # fmt: skip
    """Of a caller's arguments, or an Error of what the dispatcher would not take. None of none."""
    tensors = (sink, seqused_q, seqused_k, block_table, k_descale, v_descale)
    for name, x in zip(_GIVEN, tensors, strict=True):
        if x is not None:
            check = no_tangent if name == "sink" else check_constant
            check(name, tensor(name, x))
    if num_splits is None:
        return None if all(x is None for x in tensors) else More(*tensors)
    allowed = f"an integer from 1 to {2**30}, or None"
    return More(*tensors, integer("num_splits", num_splits, 1, 2**30, allowed=allowed))
