"""examples/paper/render.py: docs/paper.md is that of the records."""

import importlib
import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

pytest_plugins = ["paper_programs"]


@pytest.mark.parametrize(
    "text, reason",
    [(None, "No such file or directory"), ("{", "no JSON"), ("[]", "no record of a program")],
)
def test_what_is_no_record_is_one_line(paper, text, reason, tmp_path):
    file = tmp_path / "record.json"
    if text is not None:
        file.write_text(text)
    command = [sys.executable, paper / "render.py", "--add", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{file}: ") and reason in line


def test_page_is_that_of_the_records(paper):
    done = subprocess.run(
        [sys.executable, paper / "render.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_page_says_what_was_compiled(paper):
    render = importlib.import_module("render")
    of = {"size": "small", "seqlen": 1024, "eager": 2}
    ratios = [
        {**of, "compiled": compiled, "eager_as_shipped": value}
        for compiled, value in ((False, 1.5), (True, 4.25))
    ]
    record = {"result": {"ratios": ratios}}
    for how, words in (("layers", "each layer compiled"), ("whole", "compiled")):
        text = render.gpt2_speed({**record, "settings": {"compile": how}})
        assert text.startswith(f"small: 1.50×, {words} 4.25× (2.00× with eager's, too); medium: –")


def test_a_record_that_lacks_something_changes_nothing(paper, tmp_path, monkeypatch):
    render = importlib.import_module("render")
    for name in ("RECORDS", "PAGE"):
        monkeypatch.setattr(render, name, tmp_path / name)
    (tmp_path / "RECORDS").mkdir()
    (tmp_path / "PAGE").write_text("as it was")
    given = tmp_path / "record.json"
    empty = {"runs": [], "curve": [], "rows": [], "result": {}}
    lacking = {"kind": "paper", "program": "attention", "smoke": False, "settings": {}}
    given.write_text(json.dumps({**lacking, **empty}))
    monkeypatch.setattr(sys, "argv", ["render.py", "--add", str(given)])
    with pytest.raises(SystemExit, match=r"record.json: not all is measured"):
        render.main()
    assert not list((tmp_path / "RECORDS").iterdir())
    assert (tmp_path / "PAGE").read_text() == "as it was"


def test_graphs_of_a_page(paper):
    """The row, its reason, and the record's name; without the fastest backends there is no row."""
    render = importlib.import_module("render")
    settings = {"what": "speed", "compile": "graphs"}
    times = {"flashsdk": 0.02, "SDPA": 0.03, "SDPA cuDNN": 0.025, "eager": 0.05}
    rows = [
        {"size": size, "seqlen": n, "compiled": compiled, "method": method}
        | {"seconds": (1 if compiled else 2) * s, "fastest": s, "slowest": 1.1 * s}
        for size in ("small", "medium")
        for n in (1024, 2048, 4096)
        for compiled in (False, True)
        for method, s in times.items()
    ]
    record = {"program": "gpt2", "settings": settings, "rows": rows}
    record["result"] = {"ratios": importlib.import_module("gpt2").ratios(rows)}
    assert render.name_of(record) == "gpt2-graphs"
    assert render.name_of({**record, "settings": {**settings, "compile": "layers"}}) == "gpt2-speed"
    alike = ", ".join(["1.25×"] * 3)
    assert render.graphs_sdpa(record) == f"small: {alike}; medium: {alike}"
    assert render.graphs_eager(record).endswith("Against eager as shipped at 1K: 5.00×, 5.00×")
    reason = render.why_graphs(record)
    assert "differ by at most 10.0 %." in reason
    assert "20.0 ms with flashsdk and 25.0 with the best SDPA backend at 1024" in reason
