"""The files of GitHub Actions call what there is. Their form is checked by `make lint`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"

if not WORKFLOWS.exists():
    pytest.skip("not a checkout", allow_module_level=True)


def commands() -> list[str]:
    """What their steps run, one line each."""
    found = []
    for file in sorted(WORKFLOWS.glob("*.yml")):
        found += re.findall(r"(?:run: |^ {10})(\S.*)$", file.read_text("utf-8"), re.MULTILINE)
    assert len(found) > 15
    return found


def test_targets_and_scripts_exist():
    text = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([\w-]+):", text, re.MULTILINE))
    named = [t for c in commands() for t in re.findall(r"\bmake ([\w-]+)", c)]
    assert len(named) > 8
    assert not set(named) - targets
    assert {"coverage-python", "coverage-cpp"} <= set(named)
    scripts = {s for c in commands() for s in re.findall(r"scripts/\w+\.py", c)}
    assert scripts and all((ROOT / script).exists() for script in scripts)


@pytest.fixture
def script(monkeypatch):
    """A program of scripts/ as a module; they import each other by name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return lambda name: __import__(name)


def test_wheels_understands_its_options(script, monkeypatch):
    wheels = script("wheels")
    given = [re.search(r'WHEEL_ARGS=(?:"(.*?)"|(\S+))', c) for c in commands()]
    given = [found[1] or found[2] for found in given if found]
    assert len(given) > 2
    for options in given:
        monkeypatch.setattr(sys, "argv", ["wheels.py", "--out", "there", *options.split()])
        args = wheels.arguments()
        assert args.options["FLASHSDK_CUDA"] == ("ON" if "--cuda" in options else "OFF")


def test_cells_are_pythons_by_frameworks(script):
    """Each Python that wheels are for and CI has, with the oldest and newest of all else."""
    command = [sys.executable, "scripts/test_versions.py", "--list"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    cells = [dict(p.partition("==")[::2] for p in cell.split(",")) for cell in json.loads(printed)]
    pythons = {cell["python"] for cell in cells}
    assert pythons <= set(script("pythons").SERIES)
    assert {"3.10", "3.14t"} <= pythons
    for python in pythons:
        own = [c for c in cells if c["python"] == python and "torch" in c]
        assert len({(bool(c["torch"]), bool(c["numpy"])) for c in own}) == 4, python
    assert any("torch" not in c for c in cells) and any("jax" in c for c in cells)


def test_one_wheel_serves_the_stable_abi(script):
    """One for each Python below 3.12 and each without a lock, and one for all others."""
    wheels, pythons = script("wheels"), script("pythons")
    built: list = []
    for series in pythons.SERIES:
        python = pythons.Python(series, Path("python"))
        if not wheels.is_built_for(python, built):
            built.append(python)
    assert [python.series for python in built] == ["3.10", "3.11", "3.12", "3.14t"]


def test_a_version_may_get_a_local_part(script, tmp_path):
    """Of pyproject.toml in a copy of the sources; CMake reads the numbers before it."""
    wheels = script("wheels")
    (tmp_path / "in" / "flashsdk").mkdir(parents=True)
    settings = tmp_path / "in" / "flashsdk" / "pyproject.toml"
    settings.write_text('version = "1.2.3"\nminimum-version = "0.11"\n')
    archive = tmp_path / "sources.tar.gz"
    subprocess.run(["tar", "czf", archive, "-C", tmp_path / "in", "flashsdk"], check=True)
    sources = wheels.unpacked(archive, tmp_path / "out", "cu130")
    text = (sources / "pyproject.toml").read_text()
    assert text == 'version = "1.2.3+cu130"\nminimum-version = "0.11"\n'
