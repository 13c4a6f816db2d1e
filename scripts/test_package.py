"""Builds and installs the package the way a machine without a network does, and calls it.

Each way of pip goes into a fresh virtual environment that sees the build tools of .venv: a wheel,
`pip install .` and `pip install -e .`, all with --no-build-isolation --no-index. One instruction
set, two dtypes and a head dimension are compiled: this checks the packaging. Programs in C and C++
are built with what the wheel holds, in a folder that it was moved to. The C++ package is also
installed as a static library, and used from CMake; ctest does the same with the shared one.
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
CALL = """
import numpy as np, flashsdk as fs
q = np.ones((1, 5, 2, 16), np.float32)
out, lse = fs.mha_fwd(q, q, q, mask=fs.Causal())
assert np.allclose(out, 1) and lse.shape == (1, 2, 5)
print(fs.__version__, fs.build_info()["cpu_isas"], fs._bindings.__file__)

import importlib.util
if importlib.util.find_spec("torch"):  # of the build tools' environment, so it was built with it
    import torch, flashsdk.torch
    from flashsdk import _torch_native
    x = torch.ones(1, 5, 2, 16, requires_grad=True)
    assert flashsdk.torch.attention(x, x, x).grad_fn.name() == "FlashsdkAttentionBackward"
    print(_torch_native.__file__)
if importlib.util.find_spec("jax"):
    import jax, flashsdk.jax
    gradient = jax.jit(jax.grad(lambda q: flashsdk.jax.attention(q, q, q).sum()))(q)
    assert gradient.shape == q.shape
"""

# A process that has PyTorch, and of flashsdk only that library.
TORCH_CALL = """
import sys, torch
torch.ops.load_library(sys.argv[1])
assert not any(name.startswith("flashsdk") for name in sys.modules)
x = torch.ones(1, 5, 2, 16)
nothing = (None,) * 4  # bias, alibi_slopes, seed, blocks
out, lse = torch.ops.flashsdk.mha_fwd(x, x, x, *nothing, [], None, 0.0, 0.0, False, "")
assert torch.equal(out, x)
"""


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def static_library(folder: Path) -> None:
    """Installs the C++ package with BUILD_SHARED_LIBS=OFF, then builds and runs an example."""
    print("cmake --install, BUILD_SHARED_LIBS=OFF", flush=True)
    few = [f"-D{name}={value}" for name, value in FEW_KERNELS.items()]
    build, prefix = ROOT / "build" / "package-static", folder / "prefix"
    options = ["-DBUILD_SHARED_LIBS=OFF", "-DFLASHSDK_CUDA=OFF"]
    run(CMAKE, "-S", ROOT, "-B", build, *NINJA, *few, *options)
    run(CMAKE, "--build", build, "--target", "flashsdk")
    run(CMAKE, "--install", build, "--prefix", prefix, "--component", "development")
    assert not list(prefix.rglob("*.so*")), "a shared library was installed"
    example("cpp_integration", folder / "static", f"-DCMAKE_PREFIX_PATH={prefix}")
    flags = pkg_config(next(prefix.rglob("pkgconfig")))
    compile_c(folder / "static_c", flags)


def example(name: str, build: Path, where: str) -> None:
    """Builds and runs one of examples/, as a project of its own."""
    run(CMAKE, "-S", ROOT / "examples" / name, "-B", build, *NINJA, where)
    run(CMAKE, "--build", build)
    run(build / name)


def compile_c(program: Path, flags: list[str]) -> None:
    """… the one in C, without CMake."""
    source = ROOT / "examples" / "c" / "main.c"
    run("cc", "-std=c99", "-pedantic", "-Werror", source, "-o", program, *flags, "-lm")
    run(program)


def pkg_config(folder: Path) -> list[str]:
    """Flags of the flashsdk.pc in the folder."""
    if shutil.which("pkg-config") is None:
        raise SystemExit("test_package: no pkg-config (Debian: apt-get install pkg-config)")
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

    run("env", f"PYTHONPATH={site}", python, "-c", CALL, cwd=folder)
    (cmake,), (library,), (pkgconfig,) = map(config, ("--cmake", "--library", "--pkgconfig"))
    assert Path(library).is_relative_to(site), library
    for name in ("cpp_integration", "custom_mask", "c"):
        example(name, folder / name, f"-Dflashsdk_DIR={cmake}")
    compile_c(folder / "by_config", config("--cflags", "--libs"))
    compile_c(folder / "by_pkg_config", pkg_config(Path(pkgconfig)))
    languages = ROOT / "examples" / "other_languages"
    run(python, "-S", languages / "attention_ctypes.py", library)
    if list(site.glob("flashsdk/lib/libflashsdk_torch.so")):  # PyTorch was there when it was built
        run(python, "-c", TORCH_CALL, *config("--torch-library"), cwd=folder)
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


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        static_library(folder)
        run(sys.executable, "-m", "venv", folder / "env")
        python = folder / "env" / "bin" / "python"
        # The packages of this environment, but not its link to the source tree, a .pth file too.
        site = next((folder / "env" / "lib").glob("python3*/site-packages"))
        (site / "tools.pth").write_text(sysconfig.get_path("purelib") + "\n")

        run(sys.executable, "-m", "pip", "wheel", *OFFLINE, *SMALL, "-w", folder / "dist", ".")
        (wheel,) = (folder / "dist").glob("flashsdk-*.whl")
        check_description(wheel)
        programs(python, wheel, folder)
        for title, arguments in {
            f"pip install {wheel.name}": [wheel],
            "pip install .": [*SMALL, "."],
            "pip install -e .": [*SMALL, "-e", "."],
        }.items():
            print(title, flush=True)
            run(python, "-m", "pip", "install", *OFFLINE, *arguments)
            run(python, "-c", CALL, cwd=folder)
            run(python.with_name("flashsdk"), "--version", cwd=folder)
            run(python, "-m", "pip", "uninstall", "-y", "-q", "flashsdk")


if __name__ == "__main__":
    main()
