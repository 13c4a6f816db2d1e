"""When the record of the GPU tests speaks for the sources, and when it does not."""

import json

import pytest
from flashsdk._commands import gpu_record


@pytest.fixture
def checkout(tmp_path):
    for name in ("common", "cuda", "sm80", "sm90", "instantiate", "cpu"):
        folder = tmp_path / "cpp" / "kernels" / name
        folder.mkdir(parents=True)
        (folder / "code.h").write_text(name)
    return tmp_path


def write(root, **fields):
    path = root / gpu_record.TESTS
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"kernel_sources": gpu_record.sources_hash(root), "date": "2026-01-01"}
    path.write_text(json.dumps({**record, "ok": True, "complete": True, **fields}))


def test_no_record(checkout):
    assert "missing" in gpu_record.staleness(checkout)


def test_a_record_of_these_sources(checkout):
    write(checkout)
    assert gpu_record.staleness(checkout) is None


@pytest.mark.parametrize("folder", ["common", "cuda", "sm80", "sm90", "instantiate"])
def test_a_record_of_other_sources(checkout, folder):
    write(checkout)
    (checkout / "cpp" / "kernels" / folder / "code.h").write_text("changed")
    assert "make test-gpu" in gpu_record.staleness(checkout)


def test_kernels_of_the_cpu_do_not_matter(checkout):
    write(checkout)
    (checkout / "cpp" / "kernels" / "cpu" / "code.h").write_text("changed")
    assert gpu_record.staleness(checkout) is None


def test_a_run_that_failed_or_was_cut(checkout):
    write(checkout, ok=False)
    assert "failed" in gpu_record.staleness(checkout)
    write(checkout, complete=False)
    assert "incomplete" in gpu_record.staleness(checkout)
