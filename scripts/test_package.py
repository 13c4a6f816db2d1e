"""Builds and installs the package the way a machine without a network does, and calls it.

Each way of pip goes into a fresh virtual environment that sees the build tools of .venv: a wheel of
the archive of sources, `pip install .` and `pip install -e .`, all with --no-build-isolation
--no-index. The wheel is also called where NumPy is all there is, with an empty PATH, as
scripts/wheels.py does with those that are published. One instruction set, dtype and head dimension
are compiled: this checks the packaging. The C++ package is installed as a static library, and used
from CMake, by a plugin too; ctest does the same with the shared one.
"""

from __future__ import annotations

import email
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
    "FLASHSDK_CPU_DTYPES": "fp32",
}
SMALL = [f"--config-settings=cmake.define.{name}={value}" for name, value in FEW_KERNELS.items()]
SMALL.append("--config-settings=build-dir=build/package")


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def output(*command: str | Path) -> str:
    parts = [str(part) for part in command]
    return subprocess.run(parts, check=True, capture_output=True, text=True).stdout


def static_library(folder: Path) -> None:
    """Installs the C++ package with BUILD_SHARED_LIBS=OFF, then uses it from CMake."""
    print("cmake --install, BUILD_SHARED_LIBS=OFF", flush=True)
    tools = Path(sysconfig.get_path("scripts"))
    cmake, ninja = tools / "cmake", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    common = ["-G", "Ninja", ninja, "-DCMAKE_BUILD_TYPE=Release", "--log-level=WARNING"]
    kernels = {**FEW_KERNELS, "FLASHSDK_CPU_DTYPES": "fp32;bf16"}  # the example's
    few = [f"-D{name}={value}" for name, value in kernels.items()]
    few += ["-DBUILD_SHARED_LIBS=OFF", "-DFLASHSDK_CUDA=OFF"]
    build, prefix = ROOT / "build" / "package-static", folder / "prefix"
    run(cmake, "-S", ROOT, "-B", build, *common, *few)
    run(cmake, "--build", build, "--target", "flashsdk")
    run(cmake, "--install", build, "--prefix", prefix, "--component", "development")
    assert not list(prefix.rglob("*.so*")), "a shared library was installed"
    for source in (ROOT / "examples" / "cpp_integration", ROOT / "tests" / "cpp" / "plugin"):
        binary = folder / source.name
        run(cmake, "-S", source, "-B", binary, *common, f"-DCMAKE_PREFIX_PATH={prefix}")
        run(cmake, "--build", binary)
        run(binary / source.name)
    # By this flag, as GCC's libraries mostly stay where they are without it.
    header = output("readelf", "-d", folder / "plugin" / "flashsdk_plugin.so")
    assert "NODELETE" in header, "the plugin can be unmapped under the library's threads"


def check_description(wheel: Path) -> None:
    """What a package index shows of the wheel is docs/package.md."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        shown = email.message_from_bytes(files.read(name))
    page = (ROOT / "docs" / "package.md").read_text("utf-8")
    assert shown["Description-Content-Type"] == "text/markdown", shown["Description-Content-Type"]
    assert shown.get_payload(decode=True).decode("utf-8").strip() == page.strip(), "another page"


def build_wheel(folder: Path) -> Path:
    """Of what the archive of sources holds."""
    sources = wheels.unpacked(wheels.source_archive(folder), folder / "sources")
    run(sys.executable, "-m", "pip", "wheel", *OFFLINE, *SMALL, "-w", folder / "dist", sources)
    (wheel,) = (folder / "dist").glob("flashsdk-*.whl")
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

        wheel = build_wheel(folder)
        check_description(wheel)
        call_beside_numpy_alone(wheel, folder)
        for title, arguments in {
            f"pip install {wheel.name}": [wheel],
            "pip install .": [*SMALL, "."],
            "pip install -e .": [*SMALL, "-e", "."],
        }.items():
            print(title, flush=True)
            run(python, "-m", "pip", "install", *OFFLINE, *arguments)
            run(python, folder / "try_package.py", "--native", cwd=folder)
            run(python.with_name("flashsdk"), "--version", cwd=folder)
            run(python, "-m", "pip", "uninstall", "-y", "-q", "flashsdk")


if __name__ == "__main__":
    main()
