"""Tests with other releases of PyTorch and JAX than .venv's, beside the build that is there.

    python scripts/test_versions.py [torch==2.11.0] [jax==0.8.3] [--tests torch_seeds jax]
                                    [-- options of pytest]

Each is tested in an environment of its own in build/versions, which pip fills. What goes with it
stands behind a comma: torch==2.6.0,numpy==1.26.4. There is a copy of the package by links, but for
the library that is compiled for that release: _torch_native (PyTorch 2.11 or newer) or
libflashsdk_jax. `make build` comes first. Without an argument: the oldest of each that is
supported, and ones between that and the newest.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sysconfig.get_path("scripts"))
# Of the oldest series, and of one between. JAX: from the series two before the newest on.
RELEASES = ("torch==2.6.0", "torch==2.11.0", "jax==0.8.3", "jax==0.9.2")
# Beside the framework; with it come NumPy and what its package asks for.
PACKAGES = {
    "torch": ("pytest", "ml_dtypes", "nanobind"),
    "jax": ("pytest", "ml_dtypes", "nanobind", "flax", "matplotlib"),
}
# What is about the framework itself: tracing, dispatch, seeds. Kernels are the same with all.
TESTS = {
    "torch": (
        *("torch", "torch_compile", "torch_eager", "torch_errors", "torch_flash_attn"),
        *("torch_native", "torch_seeds", "from_flex"),
    ),
    "jax": ("jax",),
}
LIBRARIES = {"torch": "_torch_native", "jax": "libflashsdk_jax"}


def run(*command: str | Path, **environment: str) -> None:
    parts = [str(part) for part in command]
    subprocess.run(parts, check=True, cwd=ROOT, env={**os.environ, **environment})


class MissingError(Exception):
    """A release of a framework that pip does not find here, or cannot install."""


class Release:
    """An environment with one release of a framework, and the package in it."""

    def __init__(self, spec: str) -> None:
        self.packages = spec.split(",")
        self.framework, _, self.version = self.packages[0].partition("==")
        if self.framework not in TESTS or not self.version:
            sys.exit(f"test_versions: {spec!r}; {' or '.join(f'{name}==…' for name in TESTS)}")
        self.folder = ROOT / "build" / "versions" / re.sub(r"[^\w.]+", "-", spec)
        self.python = self.folder / "bin" / "python"
        self.package = self.folder / "package" / "flashsdk"

    def make(self) -> None:
        self.link()
        if self.has_library():
            self.build()

    def install(self) -> None:
        if not self.python.exists():
            run(sys.executable, "-m", "venv", self.folder)
        pip = [self.python, "-m", "pip", "install", "-qq", "--no-compile"]
        pip += ["--disable-pip-version-check"]
        framework = self.packages[0]
        done = 1
        if self.framework == "torch":  # for CPUs, where pip knows an index that has it
            done = self.tried(*pip, cpu := f"{framework}+cpu")
            framework = framework if done else cpu
        if done and self.tried(*pip, framework, quiet=False):
            raise MissingError(framework)
        # Beside it: what else is there for this release.
        run(*pip, framework, *PACKAGES[self.framework], *self.packages[1:])

    @staticmethod
    def tried(*command: str | Path, quiet: bool = True) -> int:
        """The exit status of a command, whose errors may be of no interest."""
        errors = subprocess.DEVNULL if quiet else None
        return subprocess.run([str(c) for c in command], cwd=ROOT, stderr=errors).returncode

    def link(self) -> None:
        """The package, without what is compiled for another release."""
        self.package.mkdir(parents=True, exist_ok=True)
        for link in self.package.iterdir():
            if link.is_symlink():
                link.unlink()
        for file in (ROOT / "python" / "flashsdk").iterdir():
            if not file.name.startswith(("__pycache__", *LIBRARIES.values())):
                (self.package / file.name).symlink_to(file)

    def has_library(self) -> bool:
        text = (ROOT / "cmake" / "Torch.cmake").read_text()
        (oldest,) = re.findall(r"set\(FLASHSDK_OLDEST_TORCH ([\d.]+)\)", text)
        oldest, given = (tuple(map(int, x.split(".")[:2])) for x in (oldest, self.version))
        return self.framework != "torch" or given >= oldest

    def build(self) -> None:
        """The library of the framework, of which the core is no part."""
        options = {
            "CMAKE_MAKE_PROGRAM": TOOLS / "ninja",
            "CMAKE_BUILD_TYPE": "Release",
            "Python_EXECUTABLE": self.python,
            "FLASHSDK_BUILD_PYTHON": "ON",
            "FLASHSDK_CUDA": "OFF",
            "FLASHSDK_EXTENSION_DIR": self.package,
        }
        for framework in LIBRARIES:
            options[f"FLASHSDK_BUILD_{framework.upper()}"] = (
                "ON" if framework == self.framework else "OFF"
            )
        defined = [f"-D{name}={value}" for name, value in options.items()]
        folder = self.folder / "build"
        cmake, quiet = TOOLS / "cmake", "--log-level=WARNING"
        run(cmake, "-S", ".", "-B", folder, "-G", "Ninja", quiet, *defined)
        target = LIBRARIES[self.framework].removeprefix("lib")
        run(cmake, "--build", folder, "--target", target)

    def test(self, names: list[str], options: list[str]) -> bool:
        tests = [ROOT / "tests" / "python" / f"test_{name}.py" for name in names]
        command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *options]
        environment = {**os.environ, "PYTHONPATH": str(self.package.parent)}
        done = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment)
        return done.returncode == 0


def main() -> int:
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="torch==… | jax==…")
    known = sorted({name for names in TESTS.values() for name in names})
    parser.add_argument("--tests", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument(
        "--skip-missing",
        action="store_true",
        help="pass where pip cannot install some of them",
    )
    args = parser.parse_args(given[:end])
    failed, missing = [], []
    for spec in args.releases:
        began = time.monotonic()
        print(f"---- {spec}", flush=True)
        release = Release(spec)
        try:
            release.install()
        except MissingError:
            print(f"---- {spec}: NOT TESTED, as pip cannot install it here", flush=True)
            missing.append(spec)
            continue
        release.make()
        print(f"---- {spec}: set up in {time.monotonic() - began:.0f} s", flush=True)
        names = [name for name in TESTS[release.framework] if name in args.tests]
        if not names:
            sys.exit(f"test_versions: --tests has none of {release.framework}'s")
        if not release.test(names, given[end + 1 :]):
            failed.append(spec)
    if len(missing) == len(args.releases) or (missing and not args.skip_missing):
        failed += missing
    if failed:
        print(f"test_versions: failed with {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
