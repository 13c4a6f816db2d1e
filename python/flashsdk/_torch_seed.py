"""Dropout's seed where a call has none.

torch.compile may compute again in the backward what the forward computed, with a memory budget even
random numbers. A seed that is drawn again would drop other elements than the forward did. So
``torch.ops.flashsdk.draw_seed`` says to torch.compile's partitioner what it may do with a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from ._torch_private import is_exporting, is_tracing, memory_budget

_END = 2**63 - 1
# PyTorch 2.6's, which asks all that may be computed again for the checkpoint that it is part of.
_OLD_PARTITIONER = torch.torch_version.TorchVersion(torch.__version__) < "2.7"

_library: Any = torch.library.Library("flashsdk", "FRAGMENT")  # type: ignore[no-untyped-call]


def draw_seed(like: Tensor) -> Tensor:
    """int64 (2,), seed and offset, by the generator of ``like``'s device and there.

    On a GPU nothing is waited for, and a CUDA graph that was captured draws anew.
    """
    return torch.randint(_END, (2,), dtype=torch.int64, device=like.device)


def draw_watched_seed(like: Tensor) -> Tensor:
    """The same, for calls that torch.compile and others look at."""
    # Programs that run without Python have PyTorch's operators, and not ours in Python.
    if is_exporting() or is_tracing():
        return draw_seed(like)
    seed: Tensor = torch.ops.flashsdk.draw_seed(device=like.device)
    return seed


def _draw(device: torch.device) -> Tensor:
    with _kept_for_the_backward():
        # The bits of randint, which Inductor would replace by numbers of its own.
        empty = torch.empty(2, dtype=torch.int64, device=device)
        seed: Tensor = torch.ops.aten.random.to(empty, _END)
        return seed


def _draw_under_vmap(device: torch.device) -> Tensor:
    """As ``randomness`` says, which PyTorch asks for randint, and not for random."""
    with _kept_for_the_backward():
        return torch.randint(_END, (2,), dtype=torch.int64, device=device)


@contextmanager
def _kept_for_the_backward() -> Iterator[None]:
    """Marks what is traced inside, unless it is part of a checkpoint, which says itself.

    With a budget of 0 the partitioner saves nothing at all. What is marked as a part of a
    checkpoint is computed again there with the state that the generator had.
    """
    with traceback.preserve_node_meta():  # which leaves the meta as it was
        meta = traceback.get_current_meta()
        saves = _budget(meta) > 0
        policy = CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE
        if meta.get("recompute") is None:
            meta["recompute"] = policy
        if _OLD_PARTITIONER:
            # Behind all: what goes into a later checkpoint would be saved, and with 0 is not.
            meta.setdefault("ac_graph_id", _END)
        yield


def _budget(meta: dict[str, Any]) -> float:
    """Of what is traced with this meta: that of its region, else that of all."""
    key = getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None)  # before PyTorch 2.13 none
    budget: float = (meta.get("custom") or {}).get(key, memory_budget())
    return budget


_library.define("draw_seed(*, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
# Made of PyTorch's operators: whatever traces it sees these.
_library.impl("draw_seed", _draw, "CompositeImplicitAutograd")
_library.impl("draw_seed", _draw_under_vmap, "FuncTorchVmapMode")
