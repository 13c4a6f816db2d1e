"""Asks the mask_mod of a FlexAttention BlockMask what it shows. Imports PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx.experimental.proxy_tensor import make_fx

from ._block_lists import Bools
from ._errors import Unsupported, first_line, type_name
from ._torch_private import indexing_by_tensors

# Of these operators' first argument only dtype and device matter. PyTorch's own and_masks begins
# with b.new_ones.
_READ_NO_VALUE = {"new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"}

Places = Sequence[NDArray[np.int64]]  # batch and head (blocks,), i (blocks, n), j (blocks, m)


class MaskMod:
    """A mask_mod, asked as FlexAttention does: for numbers under torch.vmap, on its device.

    So is what makes ``ids[q]`` of a tensor and a number an index of tensors, for older PyTorch.
    """

    def __init__(self, mask_mod: Any, device: Any) -> None:
        asked = mask_mod
        for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
            asked = torch.vmap(asked, in_dims=dims)
        self._asked, self._device = asked, device

    def shows(self, places: Places) -> Bools:
        """bool (blocks, n, m). Raises Unsupported where it cannot be asked so."""
        try:
            with torch.no_grad(), indexing_by_tensors():
                seen: Bools = self._asked(*self._tensors(places)).to(torch.bool).cpu().numpy()
        except Exception as e:  # of the caller's function
            given = f"{type_name(e)}, {first_line(e)}"
            raise Unsupported(f"mask_mod: {given}; one that torch.vmap can ask") from e
        return seen

    def reads(self, argument: int) -> bool:
        """Whether what it shows may depend on its ``argument``-th: on b for 0, on h for 1.

        False is certain, by the operators that it is made of. Asks for element (0, 0) only: behind
        what it reads there may be nothing.
        """
        first = [np.zeros(shape, np.int64) for shape in ((1,), (1,), (1, 1), (1, 1))]
        self.shows(first)  # raises what there is to say
        try:
            with torch.no_grad(), indexing_by_tensors():
                nodes = make_fx(self._asked)(*self._tensors(first)).graph.nodes
        except Exception:  # runs, and cannot be looked into: a compiled one, say
            return True
        depends = {[node for node in nodes if node.op == "placeholder"][argument]}
        for node in nodes:
            inputs = set(node.all_input_nodes)
            if getattr(node.target, "_opname", "") in _READ_NO_VALUE:
                inputs.discard(node.args[0])
            if inputs & depends:
                depends.add(node)
                schema = getattr(node.target, "_schema", None)
                if node.op == "output" or (schema is not None and schema.is_mutable):
                    return True
        return False

    def _tensors(self, places: Places) -> list[torch.Tensor]:
        return [torch.from_numpy(x).to(self._device) for x in places]
