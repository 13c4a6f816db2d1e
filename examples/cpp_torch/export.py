"""A model that calls flashsdk, exported and compiled for programs without Python.

    python export.py attention.pt2

The program is run_exported.cpp: it has this file, PyTorch's C++ libraries and libflashsdk_torch.
"""

from __future__ import annotations

import sys

import flashsdk as fs
import torch
from flashsdk.torch import attention


class Doubled(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 2 * attention(q, k, v, mask=fs.Causal())


def main() -> None:
    inputs = tuple(torch.randn(2, 40, 4, 32) for _ in range(3))
    rows = {1: torch.export.Dim("seqlen", min=2, max=4096)}  # of any length
    exported = torch.export.export(Doubled(), inputs, dynamic_shapes=(rows, rows, rows))
    torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[1])


if __name__ == "__main__":
    main()
