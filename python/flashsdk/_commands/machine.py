"""Where the figures of a record come from: the machine, the library and its sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import flashsdk as fs

PEERS = ("numpy", "torch")


def record_header(kind: str, peers: Sequence[str] = PEERS) -> dict[str, Any]:
    """`kind` is the command that makes the record, `peers` are packages whose versions it tells."""
    where = {
        "cpu": cpu_name(),
        "isa": fs.build_info()["cpu_isa"],
        "threads": fs.get_num_threads(),
    }
    return header_of(kind, kernel_sources_hash(), where, peers)


def header_of(
    kind: str, sources: str | None, where: dict[str, Any], peers: Sequence[str]
) -> dict[str, Any]:
    """What every record begins with, of a CPU or a GPU."""
    return {
        "kind": kind,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "flashsdk": fs.__version__,
        "commit": commit(),
        "kernel_sources": sources,
        **where,
        "python": platform.python_version(),
        "versions": {name: v for name in peers if (v := version(name)) is not None},
    }


def cpu_name() -> str:
    """As the kernel names it, with the family and model that tell one EPYC from another."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields and "model" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def source_root() -> Path | None:
    """The checkout this package runs from, if it does."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "cpp" / "kernels").is_dir() else None


def kernel_sources_hash() -> str | None:
    """One hash over all of cpp/, which decides what the kernels compute; compilers and flags are
    not in it."""
    root = source_root()
    return None if root is None else hash_of(root, (root / "cpp").rglob("*"))


def hash_of(root: Path, paths: Iterable[Path]) -> str:
    """One hash over the names of source files below ``root`` and over their code."""
    digest = hashlib.sha256()
    for path in sorted(p for p in paths if p.is_file()):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(code_of(path).encode())
    return digest.hexdigest()[:16]


def code_of(path: Path) -> str:
    """A source file without what no compiler sees: comments, and how its words are spaced."""
    comment = "#" if path.suffix == ".cmake" or path.name == "CMakeLists.txt" else "//"
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(word for line in lines for word in line.partition(comment)[0].split())


def commit() -> str | None:
    """The checkout's commit; "+" marks changes that are not committed."""
    root = source_root()
    if root is None:
        return None
    git = ["git", "-C", os.fspath(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "cpp", "python"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")
