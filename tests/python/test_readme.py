"""README.md: its examples work as they stand, and its figures are those of the records."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
# What the C++ example takes for granted.
AROUND = """
#include <flashsdk/attention.h>
void example(void* q, void* buffer, int batch, int seqlen, int heads, int head_dim) {
%s
}
"""


def examples(language: str) -> list[str]:
    page = ROOT / "README.md"
    if not page.exists():
        pytest.skip("not a checkout")
    found = re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert found
    return found


def test_python(tmp_path, monkeypatch):
    for package in ("matplotlib", "torch"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    for example in examples("python"):
        exec(example, {})
    assert (tmp_path / "layout.png").exists()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_cpp(tmp_path):
    """In the C++17 that the public headers promise. The version's header is the build's."""
    (example,) = examples("cpp")
    program = tmp_path / "example.cpp"
    program.write_text(AROUND % example.replace("#include <flashsdk/flashsdk.h>\n", ""))
    command = [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    done = subprocess.run(
        [*command, f"-I{ROOT / 'cpp' / 'include'}", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_figures_are_those_of_the_records():
    """docs/benchmarks.md and the README's tables, as render.py would write them now."""
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
