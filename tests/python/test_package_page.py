"""docs/package.md, what a package index shows: scripts/test_package.py looks for it in a wheel."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "package.md"


@pytest.fixture
def page():
    if not PAGE.exists():
        pytest.skip("not a checkout")
    return PAGE.read_text("utf-8")


def test_links_lead_somewhere_without_the_sources(page):
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert targets
    assert all(target.startswith("https://") for target in targets)


def test_its_example_runs(page):
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert names["dq"].shape == names["q"].shape
