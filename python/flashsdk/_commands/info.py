"""``info``: what this installation is, and what it runs."""

from __future__ import annotations

import json
import os
from typing import Any

import flashsdk as fs
from flashsdk._commands import machine
from flashsdk._commands.table import text_table

Kernel = dict[str, Any]
FEATURES = ("softcap", "bias", "alibi", "dropout")


def run(*, every: bool, as_json: bool) -> int:
    kernels: list[Kernel] = list(fs.kernels())
    header = machine.record_header("info")
    build = dict(fs.build_info())
    if as_json:
        print(json.dumps({**header, "build": build, "kernels": kernels}, indent=1, default=str))
        return 0
    peers = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    backends = list(dict.fromkeys(kernel["backend"] for kernel in kernels))
    lines = [
        ("flashsdk", f"{fs.__version__}  ({fs.__file__})"),
        ("backends", ", ".join(backends) + ("" if build["cuda"] else "  (built without CUDA)")),
        ("processor", header["cpu"]),
        ("instruction sets", _isas(build["cpu_isas"], kernels, build["cpu_isa"])),
        ("threads", f"{fs.get_num_threads()}  (FLASHSDK_NUM_THREADS)"),
        ("python", f"{header['python']}, {peers}"),
        ("compiler", str(build.get("compiler", "?"))),
    ]
    print("\n".join(f"{name + ':':18}{value}" for name, value in lines))
    print()
    print(listing(kernels) if every else summary(kernels))
    if not every:
        print(f"\n{len(kernels)} kernels; --all lists each")
    return 0


def _isas(built: list[str], kernels: list[Kernel], used: str) -> str:
    runs = {k["arch"] for k in kernels if k["backend"] == "cpu" and k["available"]}
    names = [isa if isa in runs else f"({isa})" for isa in built]
    note = ""
    if len(runs) < len(built):
        note = "; in parentheses: not on this processor"
        note += ", or ruled out by the variable" if "FLASHSDK_CPU_ISA" in os.environ else ""
    return f"{used} in use; built: {', '.join(names)}{note}  (FLASHSDK_CPU_ISA)"


def summary(kernels: list[Kernel]) -> str:
    """A line for all that differ in dtype, head dimension, mask and features alone."""
    groups: dict[tuple[str, ...], dict[str, list[Kernel]]] = {}
    for k in kernels:
        # What one dtype has is compared as text, so that equal ones share a line.
        groups.setdefault((k["backend"], k["arch"], k["op"]), {}).setdefault(k["dtype"], []).append(
            k
        )
    rows: dict[tuple[str, ...], list[str]] = {}
    for key, dtypes in groups.items():
        for dtype, of in dtypes.items():
            rows.setdefault((*key, *_abilities(of)), []).append(dtype)
    header = ["backend", "arch", "op", "dtypes", "head_dim up to", "masks", "features"]
    cells = [[*key[:3], ", ".join(dtypes), *key[3:]] for key, dtypes in rows.items()]
    return text_table([[*header, "tile", "runs here"]], cells, left=9)


def _abilities(kernels: list[Kernel]) -> tuple[str, ...]:
    dims = ", ".join(map(str, sorted({k["head_dim"] for k in kernels})))
    masks = ", ".join(dict.fromkeys(k["mask"] for k in kernels))
    tiles = ", ".join(f"{m}×{n}" for m, n in sorted({(k["tile_m"], k["tile_n"]) for k in kernels}))
    features = [w for w in FEATURES if any(w in k["features"] for k in kernels)]
    available = "yes" if any(k["available"] for k in kernels) else "no"
    return dims, masks, ", ".join(features) or "none", tiles, available


def listing(kernels: list[Kernel]) -> str:
    rows = [
        [
            k["name"], str(k["head_dim"]), k["mask"], ", ".join(k["features"]) or "none",
            f"{k['tile_m']} × {k['tile_n']}", "yes" if k["available"] else "no",
        ]
        for k in kernels
    ]  # fmt: skip
    header = ["kernel", "head_dim up to", "mask", "features", "tile", "runs here"]
    return text_table([header], rows, left=len(header))
