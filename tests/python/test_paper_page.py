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
    assert done.stderr == ""  # every record has what its reason takes


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


def test_goals_are_rounded_down(paper):
    """A figure just below its goal is short of it; what was not run reaches nothing."""
    goals = importlib.import_module("goals")
    ratios = [
        {"kind": "documents", "compiled": compiled, "best_sdpa": value}
        for compiled, value in ((False, 1.15), (True, 1.1499))
    ]
    lines = {line[0]: line[1:] for line in goals.rows({"bert": {"result": {"ratios": ratios}}})}
    packed = lines["BERT-large, packed, against the best SDPA"]
    assert packed == ["1.15×", "uncompiled 1.15×; compiled 1.14×", "in part"]
    assert lines["BERT-large, full sequences, against the best SDPA"][1:] == [
        "uncompiled –; compiled –",
        "–",
    ]
    assert lines["Memory of attention at 4K"] == ["20×", "–", "–"]
    ratios[1]["best_sdpa"] = 1.2
    assert next(goals.Goal("", 1.15, goals.bert("documents")).figures({})) == ("uncompiled", None)
    again = goals.rows({"bert": {"result": {"ratios": ratios}}})
    assert ["BERT-large, packed, against the best SDPA", "1.15×"] in [line[:2] for line in again]
    assert [line[3] for line in again if line[0].startswith("BERT-large, packed")] == ["yes"]


def test_what_attention_without_time_would_give(paper):
    """By hand: of a step of 40 ms 12 layers take 16 sequences of 12 heads, each 1 us."""
    goals = importlib.import_module("goals")
    row = {"size": "small", "seqlen": 1024, "compiled": True, "batch": 16}
    speed = {
        "runs": [{"device": "card"}],
        "rows": [
            {**row, "method": "SDPA", "seconds": 0.05},
            {**row, "method": "SDPA cuDNN", "seconds": 0.04},
            {**row, "method": "flashsdk", "seconds": 0.01},
        ],
    }
    call = {"name": "causal", "seqlen": 1024, "batch": 8, "heads": 4}
    alone = {
        "runs": [{"device": "card"}],
        "rows": [
            {**call, "method": "SDPA cuDNN", "both": 32e-6},
            {**call, "method": "flashsdk", "both": 1e-6},
        ],
    }
    both = {"gpt2-speed": speed, "attention": alone}
    assert goals.ceiling(both, "small", 1024) == pytest.approx(0.04 / (0.04 - 12 * 16 * 12 * 1e-6))
    assert goals.ceiling(both, "medium", 1024) is None
    alone["runs"][0]["device"] = "another"
    assert goals.ceiling(both, "small", 1024) is None


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
