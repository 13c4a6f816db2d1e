"""Which _torch_native is taken: a build's own, or that of a wheel for this series of PyTorch."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
from flashsdk import _torch_eager  # noqa: E402

built = _torch_eager.native is not _torch_eager.InPython
needs_native = pytest.mark.skipif(not built, reason="flashsdk._torch_native is not built")


WHICH = """
import os, torch
{}
from flashsdk import _torch_eager
from flashsdk.torch import attention
q = torch.ones(1, 4, 2, 8, requires_grad=True)
attention(q, q, q).sum().backward()
print(_torch_eager.native.__name__, bool(q.grad.abs().sum()))
"""


def which(change="", **environment):
    done = subprocess.run(
        [sys.executable, "-c", WHICH.format(change)],
        capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


SERIES = ".".join(torch.__version__.split(".")[:2])
IS_RELEASE = re.fullmatch(r"\d+\.\d+\.\d+(\+.*)?", torch.__version__) is not None
needs_release = pytest.mark.skipif(not IS_RELEASE, reason=f"PyTorch {torch.__version__}")
NIGHTLY = f"{SERIES}.0.dev20260401+cpu"
# Of another series, or what comes before a release.
OTHERS = ("2.10.0", f"{SERIES}9.0", NIGHTLY, f"{SERIES}.0a0", f"{SERIES}.1rc2")


def refusals(*changes):
    """What the module says to each of these changes before it is loaded."""
    script = (
        "import importlib.util as u, sys, torch\n"
        "for change in sys.argv[2:]:\n"
        "    exec(change)\n"
        "    spec = u.spec_from_file_location('flashsdk._torch_native', sys.argv[1])\n"
        "    try: u.module_from_spec(spec)\n"
        "    except ImportError as e: print(e)\n"
        "    else: print('loaded')\n"
    )
    command = [sys.executable, "-c", script, _torch_eager.built.__file__, *changes]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


@needs_native
def test_is_for_one_pytorch_and_can_be_turned_off():
    assert which() == ["flashsdk._torch_native", "True"]
    assert which(FLASHSDK_TORCH_NATIVE="0") == ["InPython", "True"]
    assert which("torch.__version__ = '2.10.0'") == ["InPython", "True"]


@pytest.fixture
def wheel(tmp_path):
    """This package as a wheel has it: `_torch_native` for one series, in a folder of its own."""
    package = tmp_path / "flashsdk"
    folder = package / "_torch" / SERIES
    folder.mkdir(parents=True)
    for file in Path(fs.__file__).parent.iterdir():
        if not file.name.startswith(("_torch_native", "__pycache__")) and file.name != "_torch":
            (package / file.name).symlink_to(file)
    shutil.copy(_torch_eager.built.__file__, folder)
    return tmp_path


def which_file(wheel, change=""):
    """The module's file and name there, and whether both ways of an import lead to it."""
    line = (
        f"import sys, torch; {change}\n"
        "from flashsdk import _torch_eager\n"
        "native = _torch_eager.native\n"
        "if native is not _torch_eager.InPython:\n"
        "    import flashsdk._torch_native\n"
        "    assert flashsdk._torch_native is native\n"
        "    from flashsdk import _torch_native\n"
        "    assert _torch_native is native is sys.modules['flashsdk._torch_native']\n"
        "print(getattr(native, '__file__', None), native.__name__)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@needs_native
@needs_release
def test_a_wheel_has_one_for_each_series(wheel):
    (file,) = (wheel / "flashsdk" / "_torch" / SERIES).iterdir()
    for version in (torch.__version__, f"{SERIES}.0", f"{SERIES}.12", f"{SERIES}.1+cu130"):
        found = which_file(wheel, f"torch.__version__ = {str(version)!r}")
        assert found == [str(file), "flashsdk._torch_native"], version
    environment = {"PYTHONPATH": str(wheel)}
    assert which(**environment) == ["flashsdk._torch_native", "True"]
    assert which(FLASHSDK_TORCH_NATIVE="0", **environment) == ["InPython", "True"]


@needs_native
@needs_release
def test_leaves_other_pytorches_alone(wheel):
    folder = wheel / "flashsdk" / "_torch"
    for version in ("2.10.0", NIGHTLY):
        assert which_file(wheel, f"torch.__version__ = {version!r}") == ["None", "InPython"]
    # In the folder of another series, too.
    (folder / SERIES).rename(folder / "2.10")
    assert which_file(wheel, "torch.__version__ = '2.10.0'") == ["None", "InPython"]
    changes = [f"torch.__version__ = {version!r}" for version in OTHERS]
    said = f"flashsdk._torch_native is for PyTorch {SERIES}; here is "
    assert refusals(*changes) == [said + version for version in OTHERS]


@needs_native
@pytest.mark.parametrize(
    "change", ["del _bindings.core_api", "_bindings.core_api = 3", "_bindings.core_api = foreign"]
)
def test_is_not_there_without_the_core(change):
    """Such as beside an extension of another build: the way in Python is taken."""
    other = "from datetime import datetime_CAPI as foreign; from flashsdk import _bindings; "
    assert which(other + change) == ["InPython", "True"]
    assert refusals(other + change) == ["flashsdk._torch_native finds not what it needs"]
