"""Builds and installs the package the way a machine without a network does, and calls it.

Each way goes into a fresh virtual environment that sees the build tools of .venv: a wheel,
`pip install .` and `pip install -e .`, all with --no-build-isolation --no-index. One instruction
set, dtype and head dimension are compiled: this checks the packaging.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OFFLINE = ["--no-build-isolation", "--no-index", "--no-deps", "--disable-pip-version-check", "-q"]
SMALL = [
    "--config-settings=cmake.define.FLASHSDK_CPU_ISAS=portable",
    "--config-settings=cmake.define.FLASHSDK_CPU_HEAD_DIMS=128",
    "--config-settings=cmake.define.FLASHSDK_CPU_DTYPES=fp32",
    "--config-settings=build-dir=build/package",
]
CALL = """
import numpy as np, flashsdk as fs
q = np.ones((1, 5, 2, 16), np.float32)
out, lse = fs.mha_fwd(q, q, q, mask=fs.Causal())
assert np.allclose(out, 1) and lse.shape == (1, 2, 5)
print(fs.__version__, fs.build_info()["cpu_isas"], fs._bindings.__file__)
"""


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "venv", folder / "env")
        python = folder / "env" / "bin" / "python"
        # The packages of this environment, but not its link to the source tree, a .pth file too.
        site = next((folder / "env" / "lib").glob("python3*/site-packages"))
        (site / "tools.pth").write_text(sysconfig.get_path("purelib") + "\n")

        run(sys.executable, "-m", "pip", "wheel", *OFFLINE, *SMALL, "-w", folder / "dist", ".")
        (wheel,) = (folder / "dist").glob("flashsdk-*.whl")
        for title, arguments in {
            f"pip install {wheel.name}": [wheel],
            "pip install .": [*SMALL, "."],
            "pip install -e .": [*SMALL, "-e", "."],
        }.items():
            print(title, flush=True)
            run(python, "-m", "pip", "install", *OFFLINE, *arguments)
            run(python, "-c", CALL, cwd=folder)
            run(python, "-m", "pip", "uninstall", "-y", "-q", "flashsdk")


if __name__ == "__main__":
    main()
