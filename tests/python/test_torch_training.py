"""examples/train_char_gpt.py: it runs, and exact attention trains as standard attention does."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_char_gpt.py"


def test_losses_are_the_same(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "training.png"
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(picture)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("loss, step")]
    first, *_, last = [(float(line[-2]), float(line[-1])) for line in lines]
    assert first[0] == pytest.approx(first[1], abs=1e-3)  # the same weights and batch
    assert last[0] < first[0]  # it learns
    assert "largest difference of the losses" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
