"""What a run of gpu_bench.py is asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

from flashsdk._commands.gpu_timing import Runs
from gpu_calls import backends
from gpu_tables import OURS, PEERS

KERNELS = Path(__file__).resolve().parent.parent / "build" / "gpu" / "libflashsdk_gpu_harness.so"
OPS = ("fwd", "bwd")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What of the bench is asked for; None is everything."""

    quick: bool = False
    dims: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    ops: tuple[str, ...] = OPS
    libraries: tuple[str, ...] = (*PEERS, *OURS)
    baseline: ModuleType | None = None
    kernels: Path = KERNELS

    def head_dims(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        return usual if self.dims is None else self.dims

    def seqlens(self, usual: list[int], quick: list[int]) -> tuple[int, ...]:
        return tuple(quick if self.quick else usual) if self.lengths is None else self.lengths

    def backends(self) -> list[str]:
        return [name for name in backends() if name in self.libraries]

    def peers(self, names: tuple[str, ...] = PEERS) -> list[str]:
        return [name for name in names if name in self.libraries or name not in PEERS]

    def of(self, runs: Runs) -> Runs:
        """Those of the directions asked for; a key ends with (op, name)."""
        return {key: run for key, run in runs.items() if key[-2] in self.ops}
