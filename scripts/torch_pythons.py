"""Environments with PyTorch, for `scripts/wheels.py --natives`.

    python scripts/torch_pythons.py FOLDER 2.13 2.14

One for each Python of this machine and each series of PyTorch that pip finds for it, as
FOLDER/3.12-2.14/bin/python. A PyTorch for CPUs is enough, and small: PIP_EXTRA_INDEX_URL may name
its index. A series that is found for no Python is an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pythons


def make(python: pythons.Python, series: str, folder: Path) -> bool:
    """Whether pip finds that series; else nothing is left."""
    subprocess.run([str(python.path), "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
    command = [*install, "--no-cache-dir", f"torch=={series}.*", "numpy"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return True
    # Any other failure, as of the network or the disk, would leave a wheel slower without a word.
    if "No matching distribution found for torch" not in done.stderr:
        sys.exit(f"torch_pythons: PyTorch {series}, Python {python.series}: {done.stderr}")
    shutil.rmtree(folder)
    print(f"PyTorch {series}: not to be had for Python {python.series}", flush=True)
    return False


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("torch_pythons: a folder, and series of PyTorch")
    folder = Path(sys.argv[1])
    for series in sys.argv[2:]:
        # A list, so that none is left out behind the first that is made.
        made = [make(p, series, folder / f"{p.series}-{series}") for p in pythons.find_all()]
        if not any(made):
            sys.exit(f"torch_pythons: PyTorch {series}: for no Python")


if __name__ == "__main__":
    main()
