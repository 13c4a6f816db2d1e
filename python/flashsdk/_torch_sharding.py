"""DTensors: how the operators under ``flashsdk.torch`` are sharded, over the batch and over heads.

A tensor that is sharded so stays where it is, in tensor parallel and under FSDP, and what belongs
to it (bias, slopes, lse) is sharded alike. Of one that is sharded over the sequence every device
gets all.
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

Placements = list[Any]  # one for each tensor of the results, or one for each argument
# Where batch and heads are in q, and in lse.
_BATCHED, _PACKED = ((0, 2), (0, 1)), ((None, 1), (None, 0))


_registered = False


def prepare(tensors: Mapping[str, Any], dropout_p: float, blocks: bool) -> None:
    """What a call of ``tensors`` needs, of which some may be DTensors. q is the first.

    Raises Error for what has no sharding, and for DTensors beside other tensors.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return
    given = {name: x for name, x in tensors.items() if x is not None}
    placed = {name: isinstance(x, module.DTensor) for name, x in given.items()}
    if not any(placed.values()):
        return
    if placed["q"] and dropout_p != 0:
        allowed = "0, as a DTensor's dropout would be another on each device"
        raise Unsupported(f"dropout_p: {dropout_p}; {allowed}")
    if placed["q"] and blocks:
        raise Unsupported("mask: a BlockMask, of DTensors; a band or None")
    # PyTorch replicates what holds one number, and with implicit_replication() everything.
    if not replicates_implicitly(module.DTensor):
        for name, x in given.items():
            if placed[name] != placed["q"] and (placed[name] or x.numel() != 1):
                kinds = ("a DTensor", "a plain tensor")
                what, allowed = kinds if placed[name] else reversed(kinds)
                raise InvalidArgument(f"{name}: {what}; {allowed}, as q is")
    register()


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
    _registered = True
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def sharded(
        name: str, places: tuple[tuple[int | None, int], tuple[int | None, int]]
    ) -> Callable[..., Sequence[tuple[Placements, Placements]]]:
        schema = getattr(torch.ops.flashsdk, name).default._schema
        arguments = [argument.name for argument in schema.arguments]
        results = [result.name for result in schema.returns]
        (batch, heads), (lse_batch, lse_heads) = places

        def choices(*given: Any) -> Sequence[tuple[Placements, Placements]]:
            specs = dict(zip(arguments, given, strict=True))

            def placed(rows: int | None, lse: int | None, beside: dict[str, Any]) -> Any:
                """Shards q's kind along ``rows`` and lse along ``lse``; None replicates."""

                def of(argument: str) -> Any:
                    dim = rows
                    if argument in ("lse", "dlse"):
                        dim = lse
                    elif argument in ("bias", "alibi_slopes"):
                        dim = beside.get(argument)
                    elif argument.startswith("cu_seqlens"):
                        dim = None
                    return Replicate() if dim is None else Shard(dim)

                tensors = {name for name, spec in specs.items() if hasattr(spec, "placements")}
                inputs = [of(name) if name in tensors else None for name in arguments]
                return [of(name) for name in results], inputs

            found = [placed(None, None, {})]
            bias, slopes = specs["bias"], specs["alibi_slopes"]
            if batch is not None:
                beside = {}
                if bias is not None and bias.shape[0] != 1:
                    beside["bias"] = 0
                if slopes is not None and len(slopes.shape) == 2:
                    beside["alibi_slopes"] = 0
                found.append(placed(batch, lse_batch, beside))
            if heads_stay_together(specs["q"], specs["k"], heads):
                beside = {}
                if bias is not None and bias.shape[1] != 1:
                    beside["bias"] = 1
                if slopes is not None:
                    beside["alibi_slopes"] = len(slopes.shape) - 1
                found.append(placed(heads, lse_heads, beside))
            return found

        return choices

    for name, places in (("mha", _BATCHED), ("mha_varlen", _PACKED)):
        for direction in ("fwd", "bwd"):
            operator = getattr(torch.ops.flashsdk, f"{name}_{direction}").default
            register_sharding(operator)(sharded(f"{name}_{direction}", places))
    return True
