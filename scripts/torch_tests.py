"""A test file of PyTorch's own, as it is and with ``torch_sdpa.enable()`` on.

    python scripts/torch_tests.py test/test_transformers.py --record out.json -k CPU

Prints how many tests pass each way, each test that enabling changes, those that pass neither way,
and those that one of the two runs has not collected. All other arguments are pytest's. The file is
of a checkout of PyTorch, of the version at hand if there is one; it may need expecttest and
hypothesis. Exits 1 if enabling breaks a test, or loses one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

_ENABLED = "FLASHSDK_TORCH_TESTS_ENABLED"
Outcomes = dict[str, tuple[str, str]]  # by test: passed, failed or skipped, and why


def pytest_configure() -> None:
    """This file is also the plugin that enables."""
    if os.environ.get(_ENABLED) == "1":
        from flashsdk.integrations import torch_sdpa

        torch_sdpa.enable()


def pytest_sessionfinish() -> None:
    """A test that turned it off would make all after it meaningless."""
    if os.environ.get(_ENABLED) == "1":
        from flashsdk.integrations import torch_sdpa

        assert torch_sdpa.enabled()


def outcomes(file: Path, options: list[str], enabled: bool) -> Outcomes:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            _ENABLED: str(int(enabled)),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", Path(__file__).stem]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", file.name, *options]
        done = subprocess.run(command, cwd=file.parent, env=environment, stdout=sys.stderr)
        if done.returncode not in (0, 1) or not report.exists():
            sys.exit(f"pytest ended with {done.returncode}")
        found: Outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            result, why = "passed", ""
            for child in case:
                if child.tag in ("failure", "error", "skipped"):
                    result = "skipped" if child.tag == "skipped" else "failed"
                    why = (child.get("message") or "").strip().partition("\n")[0]
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            found[name] = (result, why)
        return found


def count(found: Outcomes) -> dict[str, int]:
    results = [result for result, _ in found.values()]
    return {result: results.count(result) for result in ("passed", "failed", "skipped")}


def compared(without: Outcomes, enabled: Outcomes) -> dict[str, Any]:
    """What the record says of each test that is not alike in both runs, or fails in both."""
    both = [name for name in enabled if name in without]
    return {
        "changed": {
            name: f"{without[name][0]} without, {enabled[name][0]} with: {enabled[name][1]}"
            for name in both
            if enabled[name][0] != without[name][0]
        },
        "neither": {
            name: enabled[name][1]
            for name in both
            if enabled[name][0] == without[name][0] == "failed"
        },
        "only_without": [name for name in without if name not in enabled],
        "only_with": [name for name in enabled if name not in without],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--record", type=Path, help="where the outcome goes, as JSON")
    parser.add_argument("--note", default="", help="what the record has to say besides")
    given, options = parser.parse_known_args()
    file = given.file.resolve()
    without, enabled = (outcomes(file, options, on) for on in (False, True))
    found = compared(without, enabled)
    import torch

    version = file.parents[1] / "version.txt"  # of the checkout
    record = {
        "kind": "torch_tests",
        "torch": str(torch.__version__),
        "file": file.name,
        "file_version": version.read_text().strip() if version.exists() else "",
        "options": options,
        "note": given.note,
        "without": count(without),
        "with": count(enabled),
        **found,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    print(text)
    if given.record:
        given.record.write_text(text + "\n")
    broken = any(enabled[name][0] == "failed" for name in found["changed"])
    return int(broken or bool(found["only_without"]))


if __name__ == "__main__":
    sys.exit(main())
