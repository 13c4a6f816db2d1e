"""Fixtures for the tests of examples/paper; the files of these name it in ``pytest_plugins``.

The programs run in this process, one after the other, so that transformers is imported once.
"""

import importlib
import runpy
import signal
import sys
import warnings
from pathlib import Path

import pytest

PAPER = Path(__file__).parents[2] / "examples" / "paper"


@pytest.fixture
def paper(monkeypatch):
    """The folder, whose modules the test can import."""
    if not PAPER.exists():
        pytest.skip("not a checkout")
    monkeypatch.syspath_prepend(str(PAPER))
    monkeypatch.syspath_prepend(str(PAPER / "lra"))
    return PAPER


@pytest.fixture
def signals():
    """Those that end a program's minutes are taken as before when the test is over."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def program(monkeypatch, paper, signals):
    """Runs one with arguments, as a command line would; settings stay as they were."""
    import torch

    precision = torch.get_float32_matmul_precision()

    def run(name, *arguments):
        path = paper / name
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        monkeypatch.syspath_prepend(str(path.parent))
        monkeypatch.syspath_prepend(str(paper))
        with warnings.catch_warnings():
            runpy.run_path(str(path), run_name="__main__")

    yield run
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def clock(paper, signals):
    """Clocks of so many minutes."""
    return importlib.import_module("common").Clock
