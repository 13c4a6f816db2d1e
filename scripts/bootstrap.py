"""Sets up .venv with what one make target needs, and skips what is done.

    python3 scripts/bootstrap.py GROUP...     build  demo  test  coverage  lint  docs  wheels
                                              jax  transformers

The packages of a group are read from pyproject.toml, the only place that lists them. Runs on the
system's Python with nothing but the standard library. Missing Debian packages are installed when
this runs as root, and asked for by name otherwise.

Environment: TORCH_SPEC (default torch==2.13.0; empty = none), JAX_SPEC (default what pyproject.toml
says, such as jax==0.8.3 for an older one).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TORCH_SPEC = os.environ.get("TORCH_SPEC", "torch==2.13.0")
JAX_SPEC = os.environ.get("JAX_SPEC", "")
PROBE = "int main() { return 0; }\n"


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def debian_package(missing: str, package: str) -> None:
    """Installs a Debian package, or ends with a line that names it."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        sys.exit(f"[setup] {missing} is missing; install it: sudo apt-get install {package}")
    say(f"{missing} is missing: apt-get install {package}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
    log = subprocess.PIPE if os.environ.get("CI") is None else None
    if subprocess.run(install, env=env, stdout=log, stderr=log).returncode != 0:
        subprocess.run(["apt-get", "update", "-qq"], env=env, stdout=log, stderr=log)
        if subprocess.run(install, env=env, stdout=log).returncode != 0:
            sys.exit(f"[setup] apt-get could not install {package} ({missing} is missing)")


def compiles(source: str, *flags: str) -> bool:
    """Whether the C++ compiler accepts and links a small program."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler or not shutil.which(compiler.split()[0]):
        return False
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "probe.cpp")
        file.write_text(source)
        command = [*compiler.split(), str(file), "-o", str(Path(folder, "probe")), *flags]
        return subprocess.run(command, capture_output=True).returncode == 0


def check_system() -> None:
    """The compiler, the Python headers and the venv module."""
    if sys.version_info < (3, 10):  # noqa: UP036 (this runs before anything checks it)
        sys.exit(f"[setup] Python 3.10 or newer is needed; this is {sys.version.split()[0]}")
    if not compiles(PROBE):
        debian_package("a C++ compiler", "g++")
    minor = f"python3.{sys.version_info.minor}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        debian_package("Python.h", f"{minor}-dev")
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        debian_package("the venv module", f"{minor}-venv")


def check_googletest() -> None:
    """GoogleTest as a package of the system; CMake's download of it is the last resort."""
    header = "#include <gtest/gtest.h>\nint main() { return 0; }\n"
    if compiles(header, "-std=c++17", "-lgtest", "-pthread"):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        debian_package("GoogleTest", "libgtest-dev")
    else:
        say("GoogleTest is missing; install it: sudo apt-get install libgtest-dev")
        say("without it CMake downloads the GoogleTest release")


def has_module(python: str | Path, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{name}') is None)"
    try:
        return subprocess.run([str(python), "-c", code], capture_output=True).returncode == 0
    except OSError:  # no such Python
        return False


def gpu_present() -> bool:
    """Whether one of the files is there by which cmake/Cuda.cmake knows a GPU, too."""
    line = re.search(r"set\(FLASHSDK_GPU_FILES (.*)\)", (ROOT / "cmake/Cuda.cmake").read_text())
    return line is not None and any(Path(file).exists() for file in line[1].split())


def pip(*arguments: str, quiet_failure: bool = False) -> bool:
    """Runs pip in the venv. Bytecode is left to the first import: of most files there is none."""
    command = [str(PYTHON), "-m", "pip", "install", "-qq", "--no-compile", *arguments]
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    result = subprocess.run(command, env=env, stderr=subprocess.DEVNULL if quiet_failure else None)
    if result.returncode and not quiet_failure:
        sys.exit(f"[setup] pip could not install: {' '.join(arguments)}")
    return result.returncode == 0


def make_venv() -> None:
    """Creates .venv once; a torch that the base Python already has is reused."""
    if not (VENV / "pyvenv.cfg").exists() or not has_module(PYTHON, "pip"):  # or interrupted
        reuse = ["--system-site-packages"] if has_module(sys.executable, "torch") else []
        say(f"creating {VENV.name} with Python {sys.version.split()[0]}")
        subprocess.run([sys.executable, "-m", "venv", *reuse, str(VENV)], check=True)


def link_sources() -> None:
    """Editable the plain way: the build writes the extension into python/flashsdk."""
    site = next((VENV / "lib").glob("python3*/site-packages"))
    link, source = site / "flashsdk-source.pth", f"{ROOT / 'python'}\n"
    if not link.exists() or link.read_text() != source:
        link.write_text(source)


def install_torch(required: bool) -> None:
    """The CPU build where there is no GPU; several gigabytes of CUDA only when they are needed."""
    if not TORCH_SPEC or has_module(PYTHON, "torch"):
        return
    say(f"installing {TORCH_SPEC}")
    if not gpu_present() and pip(f"{TORCH_SPEC}+cpu", quiet_failure=True):
        return
    if not gpu_present():
        say("pip's indexes hold no CPU build of PyTorch; to get it, set PIP_EXTRA_INDEX_URL to the")
        say("CPU index that PyTorch's 'Get started' page names")
        if not required:
            say("going on without PyTorch: the demo then compares with NumPy")
            return
    pip(TORCH_SPEC)


def packages(group: str) -> list[str]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    with open(ROOT / "pyproject.toml", "rb") as file:
        settings = tomllib.load(file)
    project, tools = settings["project"], settings["build-system"]["requires"]
    extras, groups = project["optional-dependencies"], settings["dependency-groups"]
    return {
        "build": [*tools, *groups["build"], *project["dependencies"]],
        "demo": extras["plot"],
        "test": groups["test"],
        "coverage": groups["coverage"],
        "docs": groups["docs"],
        "wheels": groups["wheels"],
        "lint": groups["lint"],
        "jax": [*([JAX_SPEC] if JAX_SPEC else extras["jax"]), *groups["test-jax"]],
        "transformers": extras["transformers"],
    }[group]


def state(wanted: list[str]) -> str:
    """What a stamp holds where these packages are installed."""
    return hashlib.sha256(repr((wanted, TORCH_SPEC, sys.version)).encode()).hexdigest()


def install(group: str) -> None:
    """Installs one group, unless its stamp says that these very packages are there."""
    wanted = packages(group)
    stamp = VENV / f".flashsdk-{group}"
    if group == "build" and PYTHON.exists():
        link_sources()
    if stamp.exists() and stamp.read_text() == state(wanted):
        return
    if group == "build":
        check_system()
        make_venv()
        link_sources()
    if group == "test":
        check_googletest()
    say(f"installing {group}: {' '.join(wanted)}")
    pip(*wanted)
    if group in ("demo", "test"):
        install_torch(required=group == "test")
    stamp.write_text(state(wanted))


def main() -> None:
    for group in dict.fromkeys(["build", *sys.argv[1:]]):
        install(group)


if __name__ == "__main__":
    main()
