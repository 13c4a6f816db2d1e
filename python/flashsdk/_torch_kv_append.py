"""``flashsdk.torch.kv_append``, and torch.ops.flashsdk.kv_append, through which others see it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _kv_append
from ._errors import InvalidArgument, Unsupported
from ._torch_checks import flag, no_tangent, overridable, tensor
from ._torch_eager import detached, unwatched
from ._torch_ops import _library, check_devices
from ._torch_threads import on_torch_threads

_library.define(
    "kv_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor seqused_k, "
    "Tensor? block_table, Tensor? q, Tensor? rotary_cos, Tensor? rotary_sin, "
    "bool rotary_interleaved, bool q_advances, Tensor? k_descale=None, Tensor? v_descale=None) "
    "-> Tensor"
)


@on_torch_threads
def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, seqused_k: Tensor,
    block_table: Tensor | None, q: Tensor | None, rotary_cos: Tensor | None,
    rotary_sin: Tensor | None, rotary_interleaved: bool, q_advances: bool,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """An operator returns a tensor: without q one of no size."""
    turned: Tensor | None = _kv_append.kv_append(
        *(k_cache, v_cache, detached(k), detached(v), seqused_k),
        block_table=block_table,
        q=None if q is None else detached(q),
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        q_advances=q_advances,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return k.new_empty(0) if turned is None else turned


def _fake_append(k_cache: Tensor, v_cache: Tensor, k: Tensor, *rest: Any) -> Tensor:
    q = rest[3]
    return k.new_empty(0 if q is None else q.shape)


_library.impl("kv_append", _append, "CompositeExplicitAutograd")
torch.library.register_fake(torch.ops.flashsdk.kv_append.default, _fake_append, lib=_library)


@overridable
def kv_append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    *,
    block_table: Tensor | None = None,
    q: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    q_advances: bool = True,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | None:
    """``flashsdk.kv_append`` on PyTorch's threads, seen by torch.compile: new keys into a cache.

    Writes k and v (batch, seqlen_new, num_heads_kv, ...) behind the first seqused_k keys of each
    sequence. All arguments are those of ``flashsdk.kv_append``, as tensors. What it wrote is read
    by ``attention``, given seqused_k + seqlen_new and the same block_table.

    Returns q rotated, a new tensor, or None without q. There is no gradient: a tensor that requires
    one is an Error unless torch.no_grad(). Raises ``Error``, one line, before anything is written.
    """
    needed = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "seqused_k": seqused_k}
    rotary = {"q": q, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    given: dict[str, Any] = {**needed, "block_table": block_table, **rotary}
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    for name, x in {**given, **descales}.items():  # PyTorch 2.6 traces no |
        if x is not None or name in needed:
            _check(name, x)
    how = (flag("rotary_interleaved", rotary_interleaved), flag("q_advances", q_advances))
    tensors, scales = tuple(given.values()), tuple(descales.values())
    run: Any = _append
    if not unwatched(tensors + scales):
        check_devices("k", k, {**given, **descales})
        for name in ("k_cache", "v_cache"):  # the operator would get a copy, and write that
            if not torch.compiler.is_compiling() and given[name].is_neg():
                raise InvalidArgument(f"{name}: a view with is_neg(); resolve_neg() of it")
        run = torch.ops.flashsdk.kv_append.default
    turned = run(*tensors, *how, *scales)
    return None if q is None else turned


def _check(name: str, x: object) -> None:
    given = tensor(name, x)
    if given.requires_grad and torch.is_grad_enabled():
        raise Unsupported(f"{name}: {_kv_append.NO_BACKWARD}")
    if hasattr(given, "placements"):
        raise Unsupported(f"{name}: a DTensor; the part of this process, its to_local()")
    if not torch.compiler.is_compiling():
        no_tangent(name, given)
