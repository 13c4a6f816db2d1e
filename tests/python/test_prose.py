"""scripts/prose.py: the sentences of the pages are short."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

if not (ROOT / "scripts" / "prose.py").exists():
    pytest.skip("not a checkout", allow_module_level=True)


def test_sentences_are_short():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "prose.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "docs/masks.md" in done.stdout


@pytest.mark.parametrize(
    "text, counts",
    [
        ("One two. Three `four five` six!", (2, 2.5)),
        ("# No\n\n| a | table here |\n\n```\nno prose\n```\nOne [two three](four.md).", (1, 3)),
        ("- one two\n- three\n  four 1.5 of it. Five\n", (3, 8 / 3)),
        ("word " * 30, (1, 30)),
    ],
)
def test_sentences_are_counted(text, counts, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import prose

    found, mean, _ = prose.measure(text)
    assert (found, mean) == pytest.approx(counts)
