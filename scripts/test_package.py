"""Builds and installs the package the way a machine without a network does, and calls it.

Each way of pip goes into a fresh virtual environment that sees the build tools of .venv: a wheel,
`pip install .` and `pip install -e .`, all with --no-build-isolation --no-index. One instruction
set, dtype and head dimension are compiled: this checks the packaging. The C++ package is installed
as a static library, and used from CMake; ctest does the same with the shared one.
"""

from __future__ import annotations

import email
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
    "FLASHSDK_CPU_DTYPES": "fp32",
}
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


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def static_library(folder: Path) -> None:
    """Installs the C++ package with BUILD_SHARED_LIBS=OFF, then builds and runs an example."""
    print("cmake --install, BUILD_SHARED_LIBS=OFF", flush=True)
    tools = Path(sysconfig.get_path("scripts"))
    cmake, ninja = tools / "cmake", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    common = ["-G", "Ninja", ninja, "-DCMAKE_BUILD_TYPE=Release", "--log-level=WARNING"]
    kernels = {**FEW_KERNELS, "FLASHSDK_CPU_DTYPES": "fp32;bf16"}  # the example's
    few = [f"-D{name}={value}" for name, value in kernels.items()]
    build, prefix, example = (
        ROOT / "build" / "package-static",
        folder / "prefix",
        folder / "example",
    )
    run(
        cmake,
        "-S",
        ROOT,
        "-B",
        build,
        *common,
        *few,
        "-DBUILD_SHARED_LIBS=OFF",
        "-DFLASHSDK_CUDA=OFF",
    )
    run(cmake, "--build", build, "--target", "flashsdk")
    run(cmake, "--install", build, "--prefix", prefix, "--component", "development")
    assert not list(prefix.rglob("*.so*")), "a shared library was installed"
    source = ROOT / "examples" / "cpp_integration"
    run(cmake, "-S", source, "-B", example, *common, f"-DCMAKE_PREFIX_PATH={prefix}")
    run(cmake, "--build", example)
    run(example / "cpp_integration")


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
