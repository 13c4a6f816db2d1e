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


def test_accuracy(paper):
    """A share with its interval, and what it was trained by: by runs, not by the last one alone."""
    render = importlib.import_module("render")
    found = {"accuracy": 0.75, "low": 0.7, "high": 0.79, "tested": 400}
    result = {**found, "stage": 5, "last_stage": 5, "images": 256}
    record = {"settings": {"attention": "dense"}, "result": result, "runs": [{"teach": 0.0}]}
    text = "75.0 % (70.0 % to 79.0 %, 300 of 400"
    assert render.accuracy(record) == f"{text} images); dense, from labels alone"
    record["runs"], result["teach"] = [{"teach": 0.0}], 1.0
    result["stage"] = 2
    assert render.accuracy(record) == (
        f"{text} images), at stage 2 of 5 of the training; "
        "dense, from labels and a loss for each pixel"
    )
    row = {**found, "at": 30}
    assert render.arena({"rows": [{"at": 1}, row]}) == f"{text} examples), after 30 steps"
    result["images"] = 0
    with pytest.raises(ValueError, match="no image"):  # so that --add refuses it
        render.accuracy(record)
    # What needs the data of others says so, and takes a record as the rest does.
    line = next(
        x for x in render.overview({}).splitlines() if x.startswith("| Long Range Arena, te")
    )
    assert line.split(" | ")[2].startswith("not run: its data") and "--text FOLDER" in line
    shown = {"rows": [{**row, "run": 0}], "curve": [], "runs": [{"device": "card", "seconds": 2.0}]}
    assert f"{text} examples)" in render.overview({"arena-text": shown})


def test_goals(paper):
    """A figure just below its goal is short of it; what was not run reaches nothing."""
    goals = importlib.import_module("goals")

    def cells(name, of):
        return next(line[1:] for line in goals.rows(of) if line[0] == name)

    def record(*ratios, rows=()):
        return {"result": {"ratios": list(ratios)}, "rows": list(rows)}

    packed = "BERT-large, packed, against the best SDPA"
    found = [
        {"kind": "documents", "compiled": compiled, "best_sdpa": value}
        for compiled, value in ((False, 1.15), (True, 1.149))
    ]
    bert = {"bert": record(*found)}
    assert cells(packed, bert) == ["1.15×", "uncompiled 1.150×; compiled 1.149×", "in part"]
    assert cells(packed, {}) == ["1.15×", "uncompiled –; compiled –", "–"]
    found[1]["best_sdpa"] = 1.2
    assert cells(packed, bert)[2] == "yes"
    found[0]["best_sdpa"] = found[1]["best_sdpa"] = 1.0
    assert cells(packed, bert)[2] == "no"
    assert cells("BERT-large, full sequences, against the best SDPA", bert)[2] == "–"

    of = {"size": "small", "seqlen": 4096, "compiled": False}
    eager = {**of, "method": "eager", "recomputed": True}
    speed = {"gpt2-speed": record({**of, "eager": 4.0}, rows=[eager])}
    text, verdict = cells("GPT-2 at 4K, against eager", speed)[1:]
    assert text.startswith("small, uncompiled, eager recomputing 4.000×; medium, uncompiled –; ")
    assert text.endswith("; medium, compiled –; medium, CUDA graphs –") and verdict == "in part"

    tasks = [
        {"flashsdk": 2.0, "flashsdk block-sparse": 3.0},
        {"flashsdk": 3.0, "flashsdk block-sparse": 4.0},
    ]
    arena = {"arena": record(*tasks)}
    mean = "Long Range Arena, mean of the tasks, against standard attention"
    assert cells(mean, arena) == ["2.4×", "2.500×", "yes"] and cells(mean, {})[1] == "–"
    assert cells("The same, block-sparse", arena)[1] == "3.500×"

    lengths = [
        {"name": name, "seqlen": seqlen, "dense": value}
        for name, seqlen, value in (
            ("plain", 128, 3.5),
            ("plain", 2048, 2.5),
            ("plain", 4096, 1.0),
            ("GPT-2 medium", 1024, 9.0),
        )
    ]
    attention = {"attention": record(*lengths)}
    least = "Attention, the least of 128 to 2K, against standard attention"
    assert cells(least, attention) == ["3×", "plain 2.500×", "no"] and cells(least, {})[1:] == [
        "–",
        "–",
    ]
    assert cells("Attention of GPT-2, against standard attention", attention)[1] == "9.000×"

    problem = {
        "name": "causal, dropout 0.1",
        "seqlen": 4096,
        "batch": 1,
        "heads": 1,
        "head_dim": 64,
    }
    tensors = 8 * 2 * 4096 * 64
    attention["attention"]["rows"] = [
        {**problem, "method": "standard", "memory": 49 * tensors},
        {**problem, "method": "flashsdk", "memory": tensors},
    ]
    assert cells("Memory of attention at 4K, against standard attention", attention)[1] == "25.000×"


def test_what_attention_without_time_would_give(paper):
    """By hand: of a step of 40 ms 12 layers take 16 sequences of 12 heads, each 2 us."""
    goals = importlib.import_module("goals")
    row = {"size": "small", "seqlen": 1024, "compiled": True, "batch": 16, "run": 0}
    speed = {
        "runs": [{"device": "card"}],
        "rows": [
            {**row, "method": "SDPA flash", "seconds": 0.04},
            {**row, "method": "SDPA", "seconds": 0.05},
            {**row, "method": "flashsdk", "seconds": 0.01},
        ],
    }
    call = {"name": "causal", "seqlen": 1024, "batch": 8, "heads": 4, "run": 0}
    alone = {
        "runs": [{"device": "card"}],
        "rows": [
            {**call, "method": "SDPA flash", "both": 64e-6},
            {**call, "method": "SDPA cuDNN", "both": 32e-6},
            {**call, "method": "flashsdk", "both": 1e-6},
        ],
    }
    both = {"gpt2-speed": speed, "attention": alone}
    calls = 12 * 16 * 12
    assert goals.ceiling(both, "small", 1024) == pytest.approx(0.04 / (0.04 - calls * 2e-6))
    # What PyTorch picks is none of the backends: the fastest of them stands for it.
    speed["rows"][1]["seconds"] = 0.03
    assert goals.ceiling(both, "small", 1024) == pytest.approx(0.03 / (0.03 - calls * 1e-6))
    assert goals.ceiling(both, "medium", 1024) is None
    speed["rows"][1]["seconds"] = 0.002  # less than attention alone
    assert goals.ceiling(both, "small", 1024) is None
    speed["rows"][1]["seconds"], alone["runs"][0]["device"] = 0.03, "another"
    assert goals.ceiling(both, "small", 1024) is None


def test_sizes_are_those_of_gpt2(paper):
    goals, gpt2 = importlib.import_module("goals"), importlib.import_module("gpt2")
    sizes = {size: (goals.LAYERS[size], goals.HEADS[size]) for size in goals.LAYERS}
    assert sizes == {size: of[:2] for size, of in gpt2.SIZES.items()}


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
    reason = importlib.import_module("reasons").why_graphs(record)
    assert "differ by at most 10.0 %." in reason
    assert "20.0 ms with flashsdk and 25.0 with the best SDPA backend at 1024" in reason
