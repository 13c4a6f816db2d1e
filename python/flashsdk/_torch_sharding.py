"""DTensors: how the operators under ``flashsdk.torch`` are sharded, over the batch and over heads.

A tensor that is sharded so stays where it is, in tensor parallel and under FSDP, and what belongs
to it (bias, slopes, lse, sink, lengths) is sharded alike. Of one that is sharded over the sequence
every device gets all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ._errors import InvalidArgument, Unsupported
from ._torch_checks import constant_when_compiled
from ._torch_private import replicates_implicitly

Specs = Mapping[str, Any]  # arguments by their names; of a tensor its shape and placements
Placed = dict[str, Any]  # where arguments and results are; those that are missing are replicated
Placements = list[Any]  # one for each tensor of the results, or one for each argument

_Q, _KV = ("q", "out", "dout", "dq"), ("k", "v", "dk", "dv")  # alike in all but what pages have
_LSE = ("lse", "dlse")
_DESCALES = ("k_descale", "v_descale")


_registered = False


def prepare(tensors: Mapping[str, Any], dropout_p: float) -> bool:
    """What a call of ``tensors`` needs; returns whether these are DTensors. q is the first.

    Raises Error for what has no sharding, and for DTensors beside other tensors.
    """
    if torch.compiler.is_compiling():
        register()
        return hasattr(tensors["q"], "placements")
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    given = {name: x for name, x in tensors.items() if x is not None}
    if dropout_p == 0:
        given.pop("seed", None)  # nobody reads it
    placed = {name: isinstance(x, module.DTensor) for name, x in given.items()}
    if not any(placed.values()):
        return False
    if placed["q"] and dropout_p != 0:
        allowed = "0, as a DTensor's dropout would be another on each device"
        raise Unsupported(f"dropout_p: {dropout_p}; {allowed}")
    # PyTorch replicates what holds one number, and with implicit_replication() everything.
    if not replicates_implicitly(module.DTensor):
        for name, x in given.items():
            if placed[name] != placed["q"] and (placed[name] or x.numel() != 1):
                kinds = ("a DTensor", "a plain tensor")
                what, allowed = kinds if placed[name] else reversed(kinds)
                raise InvalidArgument(f"{name}: {what}; {allowed}, as q is")
    register()
    return True


def replicated(x: torch.Tensor, like: Any) -> torch.Tensor:
    """What every device has, as a DTensor where ``like`` is one."""
    if not hasattr(like, "placements"):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def heads_stay_together(q: Any, k: Any, dim: int) -> bool:
    """Whether each device's query heads find their heads of keys on it."""
    parts = math.prod(q.mesh.size(i) for i, p in enumerate(q.placements) if p.is_shard(dim))
    return bool(parts > 1 and k.shape[dim] % parts == 0)


@constant_when_compiled
def register() -> bool:
    """Tells torch.distributed.tensor, where it was imported, of the operators.

    torch.compile calls it as it traces.
    """
    global _registered
    if _registered or "torch.distributed.tensor" not in sys.modules:
        return _registered
    from torch.distributed.tensor.experimental import register_sharding

    for name in ("mha", "mha_varlen", "attention"):
        for direction in ("fwd", "bwd"):
            operator = getattr(torch.ops.flashsdk, f"{name}_{direction}").default
            register_sharding(operator)(_shardings_of(operator))
    _registered = True  # last: threads that come meanwhile register the same once more
    return True


def _shardings_of(operator: Any) -> Callable[..., Sequence[tuple[Placements, Placements]]]:
    """What register_sharding asks for: every way to place results and arguments of a call."""
    from torch.distributed.tensor import Replicate

    arguments = [argument.name for argument in operator._schema.arguments]
    results = [result.name for result in operator._schema.returns]

    def shardings(*given: Any) -> Sequence[tuple[Placements, Placements]]:
        specs = dict(zip(arguments, given, strict=True))
        tensors = {name for name, spec in specs.items() if hasattr(spec, "placements")}
        packed = specs.get("cu_seqlens_q") is not None
        lists_of_sequences, lists_of_heads = _lists_differ(specs["mask"])
        ways: list[Placed] = [{}]
        if not packed and not lists_of_sequences:
            ways.append(_over_the_batch(specs))
        together = heads_stay_together(specs["q"], specs["k"], 1 if packed else 2)
        if together and not lists_of_heads:
            ways.append(_over_heads(specs, packed))
        return [
            (
                [way.get(name, Replicate()) for name in results],
                [way.get(name, Replicate()) if name in tensors else None for name in arguments],
            )
            for way in ways
        ]

    return shardings


def _lists_differ(mask: Sequence[int]) -> tuple[bool, bool]:
    """Whether a layout has lists of each sequence, and of each head, which are not dealt out."""
    lists = mask[7:]  # four integers each, the first two of them the shape: _torch_ops.encode_mask
    return any(n != 1 for n in lists[::4]), any(n != 1 for n in lists[1::4])


def _has(specs: Specs, name: str, dim: int) -> bool:
    """Whether a tensor is there and differs along a dimension."""
    return specs.get(name) is not None and specs[name].shape[dim] != 1


def _over_the_batch(specs: Specs) -> Placed:
    from torch.distributed.tensor import Partial, Shard

    bias, slopes = specs["bias"], specs["alibi_slopes"]
    names = [*_Q, *_LSE, "seqused_q", "seqused_k", "block_table"]
    if specs.get("block_table") is None:  # pages belong to no sequence: every device has all
        names += _KV
    if bias is not None and bias.shape[0] != 1:
        names.append("bias")
    if slopes is not None and len(slopes.shape) == 2:
        names.append("alibi_slopes")
    names += [name for name in _DESCALES if _has(specs, name, 0)]
    placed: Placed = dict.fromkeys(names, Shard(0))
    if specs.get("sink") is not None:
        placed["dsink"] = Partial()  # of each device's sequences
    return placed


def _over_heads(specs: Specs, packed: bool) -> Placed:
    from torch.distributed.tensor import Shard

    bias, slopes = specs["bias"], specs["alibi_slopes"]
    placed: Placed = dict.fromkeys((*_Q, *_KV), Shard(1 if packed else 2))
    placed |= dict.fromkeys(_LSE, Shard(0 if packed else 1))
    if bias is not None and bias.shape[1] != 1:
        placed["bias"] = Shard(1)
    if slopes is not None:
        placed["alibi_slopes"] = Shard(len(slopes.shape) - 1)
    placed |= {name: Shard(1) for name in _DESCALES if _has(specs, name, 1)}
    if specs.get("sink") is not None:
        placed |= dict.fromkeys(("sink", "dsink"), Shard(0))
    return placed
