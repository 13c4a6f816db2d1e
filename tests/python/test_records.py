"""When the record of the GPU tests speaks for the sources, and what of the tools goes into it."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

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


# ---- scripts/test_gpu.py

SCRIPT = Path(__file__).parents[2] / "scripts" / "test_gpu.py"
FAMILIES = "sm80_forward_d64\nsm90_backward_d128\n"
WATCHED = """family sm80_forward_d64
done sm80_forward_d64: 1.0 s
family sm90_backward_d128
done sm90_backward_d128: 1.0 s
touched 2 kernels
========= ERROR SUMMARY: 0 errors
"""


def sanitizer(folder, version=(0, "Version 2026.4.0"), families=(0, FAMILIES)):
    """The part of that step where the programs have these statuses and print this."""
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    answers = {"sanitizer_version": version, "families": families}

    def run(name, command, *, limit):
        return *answers.get(name, (0, WATCHED)), 1.0

    return script.sanitizer(
        SimpleNamespace(sanitizer="compute-sanitizer", run=run, logs=folder, build=folder, jobs=1)
    )


@pytest.mark.parametrize("words", ["", "UserWarning: a line that torch writes\n"])
def test_families_are_told_from_warnings(tmp_path, words):
    part = sanitizer(tmp_path, families=(0, words + FAMILIES))
    assert part["ok"] and part["version"] == "2026.4.0"
    assert part["memcheck"] == {"kernels": 2, "clean": True}


def test_families_that_did_not_finish(tmp_path):
    part = sanitizer(tmp_path, families=(0, FAMILIES + "sm90_forward_d64\n"))
    assert not part["ok"] and "did not finish: sm90_forward_d64" in part["why"]


@pytest.mark.parametrize("families", [(1, FAMILIES + "Traceback"), (0, "no harness there")])
def test_a_list_of_families_that_is_none(tmp_path, families):
    part = sanitizer(tmp_path, families=families)
    assert not part["ok"] and families[1] in part["why"]


@pytest.mark.parametrize("version", [(127, "not found"), (0, "no version")])
def test_a_sanitizer_that_does_not_tell_its_version(tmp_path, version):
    part = sanitizer(tmp_path, version=version)
    assert not part["ok"] and version[1] in part["why"]
