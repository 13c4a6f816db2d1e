"""README.md: its example works as it stands, and figures are those of the records."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

if not README.exists():
    pytest.skip("not a checkout", allow_module_level=True)


def test_its_example_runs():
    pytest.importorskip("torch")
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert names["out"].shape == names["q"].shape == names["q"].grad.shape


def test_it_is_short_and_names_what_a_newcomer_needs():
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 120
    first_screen = text.partition("\n## ")[0]
    for needed in ("pip install '.[torch]'", "```python", "![demo]", "**Not in it**"):
        assert needed in first_screen
    assert "\nmake test " in text and "\n.ci/run " in text


def test_figures_are_those_of_the_records():
    """docs/dev/benchmarks.md and the marked blocks of pages, as render.py would write them now."""
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
