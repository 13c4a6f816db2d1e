"""The tests of flashsdk.jax with a JAX of one's choice, beside the build that is there.

    python scripts/test_jax.py [jax==0.8.3]

Makes an environment in build/jax, which pip fills, and in it a copy of the package by links, with a
libflashsdk_jax that has the headers of that JAX. `make build` comes first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = "jax==0.8.3"  # of the series two before the newest


def run(*command: str | Path, **environment: str) -> None:
    subprocess.run(
        [str(x) for x in command], check=True, cwd=ROOT, env={**os.environ, **environment}
    )


def main() -> None:
    spec = sys.argv[1] if len(sys.argv) > 1 else OLDEST
    folder = ROOT / "build" / "jax" / re.sub(r"[^\w.]+", "-", spec)
    python, package = folder / "bin" / "python", folder / "package" / "flashsdk"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder)
    quiet = ("-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check")
    run(python, *quiet, spec, "flax", "pytest", "ml_dtypes", "matplotlib")

    package.mkdir(parents=True, exist_ok=True)
    for link in package.iterdir():
        if link.is_symlink():
            link.unlink()
    for file in (ROOT / "python" / "flashsdk").iterdir():
        if file.name not in ("libflashsdk_jax.so", "__pycache__"):
            (package / file.name).symlink_to(file)
    tools = Path(sysconfig.get_path("scripts"))
    site = next((folder / "lib").glob("python3*/site-packages"))
    options = {
        "CMAKE_MAKE_PROGRAM": tools / "ninja",
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "FLASHSDK_BUILD_PYTHON": "ON",
        "FLASHSDK_BUILD_TORCH": "OFF",
        "FLASHSDK_CUDA": "OFF",
        "FLASHSDK_BUILD_JAX": "ON",
        "FLASHSDK_XLA_INCLUDE_DIR": site / "jaxlib" / "include",
        "FLASHSDK_EXTENSION_DIR": package,
    }
    defined = [f"-D{name}={value}" for name, value in options.items()]
    build = folder / "build"
    run(tools / "cmake", "-S", ".", "-B", build, "-G", "Ninja", "--log-level=WARNING", *defined)
    run(tools / "cmake", "--build", build, "--target", "flashsdk_jax")
    run(python, "-c", "import jax; print('JAX', jax.__version__)")
    tests = ROOT / "tests" / "python" / "test_jax.py"
    run(
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        tests,
        PYTHONPATH=str(package.parent),
    )


if __name__ == "__main__":
    main()
