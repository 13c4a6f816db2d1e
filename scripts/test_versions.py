"""Tests with other releases of Python, PyTorch, JAX, transformers and NumPy than .venv's.

    python scripts/test_versions.py [torch==2.11.0] [jax==0.8.3] [transformers==5.6.0,torch==2.13.0]
                                    [--tests torch_seeds jax] [--record FILE]
                                    [-- options of pytest]
    python scripts/test_versions.py matrix          every cell of MATRIX
    python scripts/test_versions.py --list          prints these cells, as JSON

Each is tested in an environment of its own in build/versions, which pip fills. What goes with it
stands behind a comma: torch==2.6.0,numpy==1.26.4. A name without a version is the newest release.

With python==3.12 among them the environment is of that Python and has its wheel of dist/, which
`make wheels` leaves there. Else it is of this Python, and has the build of python/flashsdk by
links, but for the library that is compiled for that series: _torch_native (PyTorch 2.11 or newer)
or libflashsdk_jax. `make build` comes first. Without an argument: the oldest PyTorch, JAX and
transformers that are supported, and ones between these and the newest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pythons

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sysconfig.get_path("scripts"))
# Of the oldest series, and of one between. JAX: from the series two before the newest on.
# Of transformers the oldest, with a PyTorch that others are tested with.
RELEASES = (
    *("torch==2.6.0", "torch==2.11.0", "jax==0.8.3", "jax==0.9.2"),
    "transformers==5.6.0,torch==2.13.0",
)
# Pythons that wheels are tested with, and the oldest PyTorch and NumPy that have wheels for each.
OLDEST = {
    "3.10": ("torch==2.6.0", "numpy==1.23.5"),
    "3.12": ("torch==2.6.0", "numpy==1.26.4"),
    "3.14": ("torch==2.10.0", "numpy==2.3.2"),
    "3.14t": ("torch==2.10.0", "numpy==2.3.2"),
}
# Beside the framework; with it come NumPy and what its package asks for.
PACKAGES = {
    "numpy": ("pytest", "ml_dtypes"),
    "torch": ("pytest", "ml_dtypes", "nanobind"),
    "jax": ("pytest", "ml_dtypes", "nanobind", "flax", "matplotlib"),
    "transformers": ("pytest", "ml_dtypes", "nanobind", "torch"),
}
# What is about the framework itself: tracing, dispatch, seeds. Kernels are the same with all.
TESTS = {
    "numpy": (
        *("arrays", "attention", "block_lists", "dlpack", "equivalences", "errors"),
        *("layouts", "masks", "strides", "threads", "varlen"),
    ),
    "torch": (
        *("torch", "torch_compile", "torch_dtensor", "torch_eager", "torch_errors"),
        *("torch_flash_attn", "torch_fp8", "torch_kv_append", "torch_kvcache", "torch_more"),
        *("torch_native", "torch_operators", "torch_seeds", "torch_threads"),
        *("torch_sdpa", "torch_sdpa_distributed", "torch_sdpa_integration", "torch_sdpa_nested"),
        *("torch_sdpa_python", "torch_sdpa_traced", "flash_attn_module", "from_flex"),
    ),
    "jax": ("jax", "jax_serving"),
    "transformers": (
        *("transformers", "transformers_batching", "transformers_generate", "transformers_masks"),
    ),
}
LIBRARIES = {"torch": "_torch_native", "jax": "libflashsdk_jax"}


def matrix() -> list[str]:
    """Oldest and newest PyTorch by oldest and newest NumPy, without PyTorch, JAX, transformers."""
    cells = []
    for python, (oldest_torch, oldest_numpy) in OLDEST.items():
        cells.append(f"{oldest_numpy},python=={python}")
        for torch in (oldest_torch, "torch"):
            cells += [f"{torch},{numpy},python=={python}" for numpy in (oldest_numpy, "numpy")]
    for oldest in ("jax==0.8.3", "transformers==5.6.0"):
        cells += [f"{name},python==3.12" for name in (oldest, oldest.partition("==")[0])]
    return cells


def run(*command: str | Path, **environment: str) -> None:
    parts = [str(part) for part in command]
    subprocess.run(parts, check=True, cwd=ROOT, env={**os.environ, **environment})


class MissingError(Exception):
    """What this machine lacks for a release: its Python, its wheel, or that pip finds it."""


Counts = dict[str, int]


def counts(report: Path, status: int) -> Counts:
    """How many tests passed, failed and were skipped. A pytest that did not begin has failed."""
    found = {"passed": 0, "failed": 0, "skipped": 0}
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    for case in cases:
        tags = {child.tag for child in case}
        bad = "failed" if tags & {"failure", "error"} else "skipped"
        found[bad if tags & {"failure", "error", "skipped"} else "passed"] += 1
    if status and not found["failed"]:
        found["failed"] = 1
    return found


class Release:
    """An environment with one release of a framework, and the package in it."""

    def __init__(self, spec: str) -> None:
        self.packages = [p for p in spec.split(",") if not p.startswith("python==")]
        self.framework, _, self.version = self.packages[0].partition("==")
        # Of the wheel's Python; "" where the package is the one of this tree.
        self.series = next((p[8:] for p in spec.split(",") if p.startswith("python==")), "")
        if self.framework not in TESTS or not (self.version or self.series):
            sys.exit(f"test_versions: {spec!r}; {' or '.join(f'{name}==…' for name in TESTS)}")
        # What goes with it is exchanged there, as a framework is large.
        name = f"{self.packages[0]}-{self.series}" if self.series else spec
        self.folder = ROOT / "build" / "versions" / re.sub(r"[^\w.]+", "-", name)
        self.python = self.folder / "bin" / "python"
        self.package = self.folder / "package" / "flashsdk"

    def make(self) -> None:
        if self.series:
            self.install_wheel()
            return
        self.link()
        if self.has_library():
            self.build()

    def interpreter(self) -> Path:
        if not self.series:
            return Path(sys.executable)
        if found := pythons.find(self.series):
            return found.path
        raise MissingError(f"Python {self.series}")

    def install(self) -> None:
        if not self.python.exists():
            run(self.interpreter(), "-m", "venv", self.folder)
        framework = self.packages[0]
        done = 1
        if (
            self.framework == "torch" and self.version
        ):  # for CPUs, if pip knows an index that has it
            done = self.tried(*self.pip(), cpu := f"{framework}+cpu")
            framework = framework if done else cpu
        if done and self.tried(*self.pip(), framework, quiet=False):
            raise MissingError(framework)
        # Beside it: what else is there for this release.
        names = [p for p in self.packages[1:] if "==" not in p]
        upgrade = ["--upgrade", *names] if names else []
        run(*self.pip(), framework, *PACKAGES[self.framework], *self.packages[1:], *upgrade)

    def pip(self) -> list[str | Path]:
        quiet = ("-qq", "--no-compile", "--disable-pip-version-check")
        return [self.python, "-m", "pip", "install", *quiet]

    def install_wheel(self) -> None:
        found = ["--no-index", "--find-links", ROOT / "dist", "--no-deps", "--force-reinstall"]
        if self.tried(*self.pip(), *found, "flashsdk", quiet=False):
            raise MissingError(f"a wheel for Python {self.series} in dist")

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
        if self.framework != "torch":
            return self.framework in LIBRARIES
        text = (ROOT / "cmake" / "Torch.cmake").read_text()
        (oldest,) = re.findall(r"set\(FLASHSDK_OLDEST_TORCH ([\d.]+)\)", text)
        oldest, given = (tuple(map(int, x.split(".")[:2])) for x in (oldest, self.version))
        return given >= oldest

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

    def tests(self, wanted: list[str]) -> list[str]:
        """Of a wheel also what needs NumPy alone."""
        of = {self.framework, "numpy"} if self.series else {self.framework}
        return [
            name
            for framework in TESTS
            if framework in of
            for name in TESTS[framework]
            if name in wanted
        ]

    def test(self, names: list[str], options: list[str]) -> Counts:
        tests = [ROOT / "tests" / "python" / f"test_{name}.py" for name in names]
        environment = dict(os.environ)
        if not self.series:
            environment["PYTHONPATH"] = str(self.package.parent)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += [f"--junitxml={report}", *tests, *options]
            done = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment)
            return counts(report, done.returncode)

    def versions(self) -> dict[str, str]:
        """What is really there, by name."""
        code = (
            "import importlib.metadata as m, platform, sys, sysconfig\n"
            "t = 't' * bool(sysconfig.get_config_var('Py_GIL_DISABLED'))\n"
            "print('python', platform.python_version() + t)\n"
            "for name in sys.argv[1:]:\n"
            "    if list(m.distributions(name=name)): print(name, m.version(name))"
        )
        command = [self.python, "-c", code, *TESTS]
        words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        return dict(zip(words[::2], words[1::2], strict=True))


def try_release(spec: str, wanted: list[str], options: list[str]) -> dict[str, Any]:
    """What the record says of one release. Raises MissingError."""
    began = time.monotonic()
    print(f"---- {spec}", flush=True)
    release = Release(spec)
    names = release.tests(wanted)
    if not names:
        sys.exit(f"test_versions: --tests has none of {release.framework}'s")
    release.install()
    release.make()
    print(f"---- {spec}: set up in {time.monotonic() - began:.0f} s", flush=True)
    outcome = release.test(names, options)
    print(f"---- {spec}: {outcome}", flush=True)
    return {"spec": spec, "versions": release.versions(), "tests": names, **outcome}


def write_record(path: Path, cells: list[dict[str, Any]], options: list[str]) -> None:
    """Cells that were tried replace those of the same name in a record that is there."""
    before = json.loads(path.read_text())["cells"] if path.exists() else []
    found = {cell["spec"]: cell for cell in [*before, *cells]}
    order = {spec: i for i, spec in enumerate(matrix())}
    record = {
        "kind": "versions",
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "options": options,
        "cells": sorted(found.values(), key=lambda cell: order.get(cell["spec"], len(order))),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    options = given[end + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "releases", nargs="*", default=RELEASES, metavar="torch==… | jax==… | transformers==…"
    )
    known = sorted({name for names in TESTS.values() for name in names})
    parser.add_argument("--tests", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the cells of the matrix")
    parser.add_argument("--record", type=Path, help="where the outcome goes, as JSON")
    parser.add_argument(
        "--skip-missing",
        action="store_true",
        help="pass where pip cannot install some of them",
    )
    args = parser.parse_args(given[:end])
    if args.list:
        print(json.dumps(matrix()))
        return 0
    specs = matrix() if args.releases == ["matrix"] else args.releases
    cells: list[dict[str, Any]] = []
    missing = []
    for spec in specs:
        try:
            cells.append(try_release(spec, args.tests, options))
        except MissingError as e:
            print(f"---- {spec}: NOT TESTED, as there is no {e} here", flush=True)
            missing.append(spec)
            cells.append({"spec": spec, "missing": str(e)})
        if args.record:
            write_record(args.record, cells, options)
    failed = [cell["spec"] for cell in cells if cell.get("failed")]
    if len(missing) == len(specs) or (missing and not args.skip_missing):
        failed += missing
    if failed:
        print(f"test_versions: failed with {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
