"""Builds and installs the package the way a machine without a network does, and calls it.

The archive of sources is unpacked, and each way of pip goes from there into a fresh virtual
environment that sees the build tools of .venv: a wheel, `pip install .` and `pip install -e .`, all
with --no-build-isolation --no-index. The wheel is also called where NumPy is all there is, with an
empty PATH, as scripts/wheels.py does with those that are published. One instruction set, two dtypes
and a head dimension are compiled: this checks the packaging. Programs in C and C++ are built with
what the wheel holds, in a folder that it was moved to. The C++ package is installed as a static
library, and used from CMake, by a plugin too; ctest does the same with the shared one.
"""

from __future__ import annotations

import email
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import wheels

ROOT = Path(__file__).resolve().parent.parent
OFFLINE = ["--no-build-isolation", "--no-index", "--no-deps", "--disable-pip-version-check", "-q"]
FEW_KERNELS = {
    "FLASHSDK_CPU_ISAS": "portable",
    "FLASHSDK_CPU_HEAD_DIMS": "128",
    "FLASHSDK_CPU_DTYPES": "fp32;bf16",
}
TOOLS = Path(sysconfig.get_path("scripts"))
CMAKE = TOOLS / "cmake"
NINJA = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release"]
NINJA.append("--log-level=WARNING")
SMALL = [f"--config-settings=cmake.define.{name}={value}" for name, value in FEW_KERNELS.items()]
SMALL.append("--config-settings=build-dir=build/package")


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def output(*command: str | Path) -> str:
    parts = [str(part) for part in command]
    return subprocess.run(parts, check=True, capture_output=True, text=True).stdout


def static_library(folder: Path) -> None:
    """Installs the C++ package with BUILD_SHARED_LIBS=OFF, then uses it in programs."""
    print("cmake --install, BUILD_SHARED_LIBS=OFF", flush=True)
    few = [f"-D{name}={value}" for name, value in FEW_KERNELS.items()]
    build, prefix = ROOT / "build" / "package-static", folder / "prefix"
    options = ["-DBUILD_SHARED_LIBS=OFF", "-DFLASHSDK_CUDA=OFF"]
    run(CMAKE, "-S", ROOT, "-B", build, *NINJA, *few, *options)
    run(CMAKE, "--build", build, "--target", "flashsdk")
    run(CMAKE, "--install", build, "--prefix", prefix, "--component", "development")
    assert not list(prefix.rglob("*.so*")), "a shared library was installed"
    here = f"-DCMAKE_PREFIX_PATH={prefix}"
    project(ROOT / "examples" / "cpp_integration", folder / "static", here)
    project(ROOT / "tests" / "cpp" / "plugin", folder / "plugin", here)
    # By this flag, as GCC's libraries mostly stay where they are without it.
    header = output("readelf", "-d", folder / "plugin" / "flashsdk_plugin.so")
    assert "NODELETE" in header, "the plugin can be unmapped under the library's threads"
    compile_c(folder / "static_c", pkg_config(next(prefix.rglob("pkgconfig"))))


def project(source: Path, build: Path, where: str) -> None:
    """Builds and runs the program of a folder, which has its name."""
    run(CMAKE, "-S", source, "-B", build, *NINJA, where)
    run(CMAKE, "--build", build)
    run(build / source.name)


def compile_c(program: Path, flags: list[str] | None) -> None:
    """The example in C, without CMake."""
    if flags is None:
        return
    source = ROOT / "examples" / "c" / "main.c"
    run("cc", "-std=c99", "-pedantic", "-Werror", source, "-o", program, *flags, "-lm")
    run(program)


def pkg_config(folder: Path) -> list[str] | None:
    """Flags of the flashsdk.pc in the folder; None where the machine has no pkg-config."""
    if shutil.which("pkg-config") is None:
        print("not tried, as there is no pkg-config: flashsdk.pc", flush=True)
        return None
    done = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "flashsdk"],
        check=True,
        env={**os.environ, "PKG_CONFIG_PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    return shlex.split(done.stdout)


def programs(python: Path, wheel: Path, folder: Path) -> None:
    """Programs of the wheel's own files, in a folder that it was not installed to."""
    print("programs of the wheel", flush=True)
    first, site = folder / "first", folder / "second"
    run(python, "-m", "pip", "install", *OFFLINE, "--target", first, wheel)
    first.rename(site)

    def config(*options: str) -> list[str]:
        done = subprocess.run(
            [python, "-m", "flashsdk", "config", *options],
            check=True,
            env={**os.environ, "PYTHONPATH": str(site)},
            cwd=folder,
            capture_output=True,
            text=True,
        )
        return shlex.split(done.stdout)

    run("env", f"PYTHONPATH={site}", python, folder / "try_package.py", "--native", cwd=folder)
    (cmake,), (library,), (pkgconfig,) = map(config, ("--cmake", "--library", "--pkgconfig"))
    assert Path(library).is_relative_to(site), library
    for name in ("cpp_integration", "custom_mask", "c"):
        project(ROOT / "examples" / name, folder / name, f"-Dflashsdk_DIR={cmake}")
    compile_c(folder / "by_config", config("--cflags", "--libs"))
    compile_c(folder / "by_pkg_config", pkg_config(Path(pkgconfig)))
    languages = ROOT / "examples" / "other_languages"
    run(python, "-S", languages / "attention_ctypes.py", library)
    if list(site.glob("flashsdk/lib/libflashsdk_torch.so")):  # PyTorch was there when it was built
        run(python, "-c", wheels.TORCH_CALL, *config("--torch-library"), cwd=folder)
    # The kernels are there once: what Python imports is smaller than what programs link.
    (extension,) = site.glob("flashsdk/_bindings*.so")
    assert extension.stat().st_size < Path(library).stat().st_size / 2, extension


def check_description(wheel: Path) -> None:
    """What a package index shows of the wheel is docs/package.md."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        shown = email.message_from_bytes(files.read(name))
    page = (ROOT / "docs" / "package.md").read_text("utf-8")
    assert shown["Description-Content-Type"] == "text/markdown", shown["Description-Content-Type"]
    assert shown.get_payload(decode=True).decode("utf-8").strip() == page.strip(), "another page"


def build_wheel(sources: Path, dist: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", *OFFLINE, *SMALL, "-w", dist, sources)
    (wheel,) = dist.glob("flashsdk-*.whl")
    return wheel


def call_beside_numpy_alone(wheel: Path, folder: Path) -> None:
    """In an environment that sees nothing of this one but NumPy, without any variable."""
    run(sys.executable, "-m", "venv", folder / "empty")
    programs = folder / "empty" / "bin"
    run(programs / "python", "-m", "pip", "install", *OFFLINE, wheel)
    site = next((folder / "empty" / "lib").glob("python3*/site-packages"))
    for package in Path(sysconfig.get_path("purelib")).glob("numpy*"):
        (site / package.name).symlink_to(package)
    subprocess.run(
        ["python", str(folder / "try_package.py")],
        check=True,
        cwd=folder,
        env={"PATH": str(programs)},
        executable=programs / "python",
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        static_library(folder)
        shutil.copy(ROOT / "scripts" / "try_package.py", folder)
        run(sys.executable, "-m", "venv", folder / "env")
        python = folder / "env" / "bin" / "python"
        # The packages of this environment, but not its link to the source tree, a .pth file too.
        site = next((folder / "env" / "lib").glob("python3*/site-packages"))
        (site / "tools.pth").write_text(sysconfig.get_path("purelib") + "\n")

        # All are built there: the kernels are compiled once.
        sources = wheels.unpacked(wheels.source_archive(folder), folder / "sources")
        wheel = build_wheel(sources, folder / "dist")
        check_description(wheel)
        call_beside_numpy_alone(wheel, folder)
        programs(python, wheel, folder)
        for title, arguments in {
            f"pip install {wheel.name}": [wheel],
            "pip install .": [*SMALL, "."],
            "pip install -e .": [*SMALL, "-e", "."],
        }.items():
            print(title, flush=True)
            run(python, "-m", "pip", "install", *OFFLINE, *arguments, cwd=sources)
            run(python, folder / "try_package.py", "--native", cwd=folder)
            run(python.with_name("flashsdk"), "--version", cwd=folder)
            run(python, "-m", "pip", "uninstall", "-y", "-q", "flashsdk")


if __name__ == "__main__":
    main()
