"""The Pythons of this machine that wheels are built for and tests run with."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SERIES = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.14t")
ASK = (
    "import sys, sysconfig as s; "
    "print('%d.%d' % sys.version_info[:2] + 't' * bool(s.get_config_var('Py_GIL_DISABLED')), "
    "sys.executable)"
)


@dataclass(frozen=True)
class Python:
    """An interpreter, and its series: 3.12, or 3.14t for the one without a lock."""

    series: str
    path: Path

    @property
    def number(self) -> tuple[int, int]:
        major, minor = self.series.rstrip("t").split(".")
        return int(major), int(minor)

    @property
    def is_free_threaded(self) -> bool:
        return self.series.endswith("t")


def ask(command: str | Path) -> Python | None:
    """The interpreter behind a name or a path; None where it does not start."""
    try:
        done = subprocess.run([str(command), "-c", ASK], capture_output=True, text=True)
    except OSError:
        return None
    if done.returncode:
        return None
    series, path = done.stdout.strip().split(" ", 1)
    return Python(series, Path(path))


def candidates(series: str) -> Iterator[Path]:
    """Where a Python may be: on the path, in pyenv's folder, in that of a manylinux image.

    In each folder of the path: one without a lock is python3.14 as well as python3.14t in its own.
    """
    for folder in os.get_exec_path():
        if found := shutil.which(f"python{series}", path=folder):
            yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{series.rstrip('t')}*/bin/python"), reverse=True)
    digits = series.replace(".", "")
    yield from Path("/opt/python").glob(f"cp{digits.rstrip('t')}-cp{digits}/bin/python")


def find(series: str) -> Python | None:
    """A Python of that series, if this machine has one."""
    found = (ask(path) for path in candidates(series))
    return next((python for python in found if python and python.series == series), None)


def find_all() -> list[Python]:
    """One of each series that this machine has, oldest first."""
    return [python for series in SERIES if (python := find(series))]
