"""PyTorch's own function on DTensors of a CPU.

PyTorch knows how its flash attention is sharded on a GPU alone. ``prepare`` tells it the same of
the operator for a CPU: over batch and heads, and over the sequence by the ring of
torch.distributed.tensor.experimental.context_parallel. Whose kernels compute the parts does not
matter, so this stays when ours go.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .._errors import Unsupported
from .._torch_ops import trusted_lse
from .._torch_sharding import heads_stay_together

Named = dict[str, Any]

_SEQUENCE = 2  # of (batch, heads, seqlen, dim)
_prepared = False


def prepare(ours: Callable[[], bool]) -> None:
    """Once torch.distributed.tensor was imported; before that nothing happens.

    ``ours`` says whether it is our kernels that compute.
    """
    global _prepared
    if _prepared or "torch.distributed.tensor" not in sys.modules:
        return
    _prepared = True
    from torch.distributed.tensor.experimental import register_sharding

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for operator in (forward, backward):
        register_sharding(operator)(_shardings_of(operator))
    ring = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if ring is not None:
        # Handlers that context_parallel puts in place while it lasts.
        ring.custom_ops[forward] = lambda *call: _ring_forward(ring, *call)
        ring.custom_ops[backward] = lambda *call: _ring_backward(ring, ours, *call)


def _named(operator: Any, args: tuple[Any, ...], keywords: Named) -> Named:
    """The arguments in the order of the schema; of those that are left out None."""
    given = dict.fromkeys(argument.name for argument in operator._schema.arguments)
    return {**given, **dict(zip(given, args)), **keywords}


def _shardings_of(operator: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    def at(dim: int | None, name: str, x: Any) -> Any:
        """Where a tensor is sharded, of a call that is sharded over ``dim`` of query."""
        if name == "attn_mask" and dim is not None:
            dim += len(x.shape) - 4  # it broadcasts from the front
            dim = dim if dim >= 0 and x.shape[dim] != 1 else None
        return Replicate() if dim is None else Shard(dim)

    def shardings(*args: Any, **keywords: Any) -> list[tuple[list[Any], list[Any]]]:
        given = _named(operator, args, keywords)
        tensors = {name: x for name, x in given.items() if hasattr(x, "placements")}
        dims = [None, 0]
        if heads_stay_together(given["query"], given["key"], 1):
            dims.append(1)
        results = operator._schema.returns
        return [
            ([at(dim, "", x) for x in results], [at(dim, *item) for item in tensors.items()])
            for dim in dims
        ]

    return shardings


# ---- over the sequence


def _locals(operator: Any, args: tuple[Any, ...], keywords: Named) -> tuple[Any, Named]:
    """The mesh, and the arguments by name, of tensors the part of this process."""
    from torch.distributed.tensor import DTensor, Shard

    given = _named(operator, args, keywords)
    given["dropout_p"], given["is_causal"] = given["dropout_p"] or 0.0, bool(given["is_causal"])
    if given["attn_mask"] is not None:
        raise Unsupported("attn_mask: given; None under context_parallel")
    for name, x in given.items():
        if isinstance(x, DTensor):
            if tuple(x.placements) != (Shard(_SEQUENCE),):
                allowed = f"(Shard(dim={_SEQUENCE}),) under context_parallel"
                raise Unsupported(f"{name}: placements {x.placements}; {allowed}")
            given[name] = x.to_local()
    return args[0].device_mesh, given


def _sharded(mesh: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    from torch.distributed.tensor import DTensor, Shard

    return tuple(DTensor.from_local(x, mesh, [Shard(_SEQUENCE)], run_check=False) for x in parts)


@torch.no_grad()
def _ring_forward(ring: Any, operator: Any, args: tuple[Any, ...], keywords: Named) -> Any:
    mesh, given = _locals(operator, args, keywords)
    group = mesh.get_group()
    return _sharded(mesh, ring._templated_ring_attention(group, _SEQUENCE, operator, **given))


@torch.no_grad()
def _ring_backward(
    ring: Any, ours: Callable[[], bool], operator: Any, args: tuple[Any, ...], keywords: Named
) -> Any:
    mesh, given = _locals(operator, args, keywords)
    group = mesh.get_group()
    if ours():
        _check_lse(given["logsumexp"], trusted_lse(given["query"].dtype), group)
    parts = ring._templated_ring_attention_backward(
        group, _SEQUENCE, operator, grad_out_name="grad_out", **given
    )
    return _sharded(mesh, parts)


def _check_lse(lse: torch.Tensor, trusted: float, group: Any) -> None:
    """Raises on all processes where one has too large a row: alone, the others would wait."""
    # -inf is exact: such a row sees no key, and has no gradient.
    sizes = torch.where(lse.isnan() | (lse == -float("inf")), 0.0, lse.abs())
    largest = sizes.amax() if sizes.numel() else sizes.new_zeros(())
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    if largest > trusted:
        allowed = f"at most {trusted:g} under context_parallel, or flashsdk.torch.distributed's"
        raise Unsupported(f"logsumexp: up to {float(largest):g}; {allowed}")
