"""What records of GPU runs have in common: the card, the software, and the sources they are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashsdk._commands.machine import hash_of, header_of, source_root

PEERS = (
    "torch", "transformers", "cupy-cuda13x", "cupy-cuda12x", "jax", "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12", "flashinfer-python",
)  # fmt: skip
DEVICE = "cuda"  # of PyTorch's tensors
TESTS = Path("benchmarks", "results", "gpu_tests.json")


def header(kind: str, device: str) -> dict[str, Any]:
    return header_of(kind, sources_hash(), {"device": device}, PEERS)


def sources_hash(root: Path | None = None) -> str | None:
    """One hash over everything that decides what the GPU kernels compute and how fast."""
    root = root or source_root()
    if root is None:
        return None
    kernels = root / "cpp" / "kernels"
    files = [p for name in ("common", "cuda", "sm80", "sm90") for p in (kernels / name).rglob("*")]
    no_kernel = ("check.h", "choose.h", "cpu.h", "native_isas.cpp")  # of the GPU's
    files += [p for p in (kernels / "table").iterdir() if p.name not in no_kernel]
    return hash_of(root, files)


def staleness(root: Path | None = None) -> str | None:
    """Why the record of the GPU tests does not speak for these sources; None if it does."""
    root = root or source_root()
    if root is None:
        return None
    path = root / TESTS
    if not path.exists():
        return f"{TESTS} is missing: the GPU kernels have no record of a test run"
    record = json.loads(path.read_text())
    now = sources_hash(root)
    if record["kernel_sources"] != now:
        return (
            f"{TESTS} is of {record['date']} and kernel sources {record['kernel_sources']}, these "
            f"are {now}: run `make test-gpu` on a machine with a GPU"
        )
    if not (record["ok"] and record["complete"]):
        return f"{TESTS} is of a run that {'is incomplete' if record['ok'] else 'failed'}"
    return None
