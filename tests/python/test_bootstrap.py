"""scripts/bootstrap.py picks up where an interrupted run left off."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bootstrap.py"


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    if not SCRIPT.exists():
        pytest.skip("not a checkout")
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / "env")
    monkeypatch.setattr(module, "PYTHON", tmp_path / "env" / "bin" / "python")
    # What the interpreter that starts it has is not to decide what is made here.
    monkeypatch.setattr(sys, "executable", str(Path(sys._base_executable)))
    return module


def test_an_interrupted_setup_is_finished(bootstrap):
    """A venv without pip, then one without the link to the sources: both are completed."""
    pytest.importorskip("ensurepip")
    venv = [sys.executable, "-m", "venv", "--without-pip", str(bootstrap.VENV)]
    subprocess.run(venv, check=True)
    bootstrap.make_venv()
    assert bootstrap.has_module(bootstrap.PYTHON, "pip")
    bootstrap.link_sources()
    assert bootstrap.has_module(bootstrap.PYTHON, "flashsdk")


def test_the_link_is_made_even_where_all_is_installed(bootstrap):
    """A stamp says that the packages are there, and nothing of a link that is gone or of old."""
    site = bootstrap.VENV / "lib" / "python3.0" / "site-packages"
    site.mkdir(parents=True)
    bootstrap.PYTHON.parent.mkdir()
    bootstrap.PYTHON.touch()
    (bootstrap.VENV / ".flashsdk-build").write_text(bootstrap.state(bootstrap.packages("build")))
    link = site / "flashsdk-source.pth"
    bootstrap.install("build")
    assert link.read_text() == f"{SCRIPT.parents[1] / 'python'}\n"
    link.write_text("/a/checkout/that/was/moved\n")
    bootstrap.install("build")
    assert link.read_text() == f"{SCRIPT.parents[1] / 'python'}\n"


def test_a_gpu_is_known_by_the_files_that_cmake_looks_for(bootstrap, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    (tmp_path / "cmake").mkdir()
    file = tmp_path / "driver"
    (tmp_path / "cmake" / "Cuda.cmake").write_text(f"set(FLASHSDK_GPU_FILES /nowhere {file})\n")
    assert not bootstrap.gpu_present()
    file.touch()
    assert bootstrap.gpu_present()
    text = SCRIPT.parents[1].joinpath("cmake", "Cuda.cmake").read_text()
    assert "set(FLASHSDK_GPU_FILES /dev/" in text


def test_packages_come_from_pyproject(bootstrap, monkeypatch):
    """Those of users from the extras, those of developers from groups that no index shows."""
    monkeypatch.setattr(bootstrap, "ROOT", SCRIPT.parents[1])
    for group, package in (
        ("build", "ninja"), ("demo", "matplotlib"), ("test", "pytest"), ("lint", "ruff"),
        ("jax", "flax"), ("transformers", "transformers"),
    ):  # fmt: skip
        assert any(x.startswith(package) for x in bootstrap.packages(group)), group
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text("utf-8"))
    users = set(settings["project"]["optional-dependencies"])
    assert not {"build", "lint", "test", "test-jax"} & users
