"""examples/paper: every program runs, ends in a record, resumes, and takes bad input in one line.

Its page, Pathfinder, the counted bytes and the training steps have files of their own.
"""

import argparse
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

pytest_plugins = ["paper_programs"]
TEXT = ("transformers", "tokenizers")  # what programs with language models need
SMOKES = {
    "lra/pathfinder.py": (),
    "lra/pathfinder_cues.py": (),
    "attention.py": (),
    "gpt2.py speed": TEXT,
    "gpt2.py train": TEXT,
    "bert.py": TEXT,
    "traffic.py": (),
    "tiles.py": (),
    "lra/arena.py speed": (),
    "lra/arena.py train": (),
    "long_context.py gpt2": TEXT,
    "long_context.py documents": TEXT,
}


@pytest.mark.parametrize("command", SMOKES)
def test_smoke(paper, program, command, tmp_path):
    for package in SMOKES[command]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    name, *arguments = command.split()
    program(name, *arguments, "--smoke", "--device", "cpu", "--out", tmp_path)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["kind"] == "paper" and record["smoke"]
    assert record["program"] == name.removesuffix(".py")
    (run,) = record["runs"]
    assert run["seconds"] > 0 and f"examples/paper/{name}" in run["command"]
    assert record["rows"] and record["result"]
    # Nothing failed that a CPU can do.
    for row in record["rows"]:
        assert "error" not in row or row["method"] in ("SDPA flash", "SDPA efficient", "SDPA cuDNN")
    if command == "long_context.py documents":  # which length is best, other documents say
        best = max(record["rows"], key=lambda row: row["validation_f1"])["seqlen"]
        assert (
            f"at {best} tokens, chosen on {record['result']['validated']} other"
            in record["result"]["summary"]
        )
    check = [sys.executable, paper / "render.py", "--add", tmp_path / "record.json"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 1 and "of --smoke" in done.stderr  # no figure comes from it


def test_a_longer_context_is_compared_at_its_best(paper, tmp_path):
    """A short context that got worse again, and steps that not all lengths have done."""
    program, common = importlib.import_module("long_context"), importlib.import_module("common")
    record = common.Record(tmp_path / "r.json", "long_context", {}, smoke=True, device="cpu")
    found = {32: {1: 9.0, 2: 8.0, 3: 9.5, 4: 2.0}, 64: {1: 9.5, 2: 8.5, 3: 7.0}}
    for seqlen, of in found.items():
        for steps, value in of.items():
            record.row(seqlen=seqlen, steps=steps, perplexity=value, ns_a_token=float(seqlen))
    program.compare(record, argparse.Namespace(lengths=[32, 64], trunk=5))
    said = record.result["summary"]
    assert said.startswith("1.00 (12.5 %) less perplexity at 64 than at 32 (32: 8.00 after 2 steps")
    assert "64: 7.00 after 3 steps: the lowest of each). All continue from one model" in said
    assert "2.00× the time" in said


def test_listops(paper):
    """Read by a grammar of its own, the tokens have the value that they are labelled with."""
    arena = importlib.import_module("arena")
    functions = (min, max, lambda x: int(np.median(x)), lambda x: sum(x) % 10)
    expressions, values = arena.listops(40, 0, shortest=20, longest=300)
    for tokens, value in zip(expressions, values):
        stack = [[]]
        for token in tokens:
            if token <= 10:
                stack[-1].append(token - 1)
            elif token < 15:
                stack.append([token - 11])
            else:
                operation, *arguments = stack.pop()
                assert 2 <= len(arguments) <= 10
                stack[-1].append(functions[operation](arguments))
        assert stack == [[value]] and 20 <= len(tokens) <= 300


def test_listops_of_many_processes(paper, monkeypatch):
    """The same as of one, part by part, and no part is another's."""
    arena = importlib.import_module("arena")
    monkeypatch.setattr(arena, "PART", 3)
    given = {"shortest": 20, "longest": 300}
    tokens, values = arena.listops(7, 5, **given)
    parts = [arena._listops(5, 20, 300, part, size) for part, size in enumerate((3, 3, 1))]
    assert tokens == [x for part, _ in parts for x in part] and len(values) == 7
    assert values == [x for _, part in parts for x in part]
    assert len(set(map(tuple, tokens))) == 7


def test_sigterm_ends_the_minutes(clock):
    """What ``timeout`` sends lets a program save; a second one ends it."""
    minutes = clock(1)
    assert not minutes.over()
    os.kill(os.getpid(), signal.SIGTERM)
    assert minutes.over() and minutes.limit == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_fails_is_a_row(paper):
    """Memory by any of its names, what torch.compile wraps, and no row when the GPU is gone."""
    common = importlib.import_module("common")
    memory = {"error": "out of memory"}
    assert common.failure(torch.OutOfMemoryError("Tried to allocate")) == memory
    assert common.failure(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")) == memory
    wrapped = RuntimeError("while tracing")
    wrapped.__cause__ = RuntimeError("No available kernel.\nmore")
    assert common.failure(wrapped) == {"error": "No available kernel."}
    assert common.failure(KeyError()) == {"error": "KeyError"}
    if hasattr(torch, "AcceleratorError"):
        assert common.failure(torch.AcceleratorError("CUDA error: out of memory")) == memory
        with pytest.raises(torch.AcceleratorError):
            common.failure(torch.AcceleratorError("CUDA error: an illegal memory access"))


def test_attention_goes_on(program, tmp_path):
    """A run without minutes leaves a record, to which the next one adds every problem once."""
    given = ["attention.py", "--smoke", "--device", "cpu", "--out", tmp_path]
    program(*given, "--minutes", 0)
    assert json.loads((tmp_path / "record.json").read_text())["rows"] == []
    program(*given)
    program(*given)
    record = json.loads((tmp_path / "record.json").read_text())
    cells = [(row["name"], row["seqlen"], row["method"]) for row in record["rows"]]
    assert len(set(cells)) == len(cells) > 6 and {row["run"] for row in record["rows"]} == {0}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_training_that_is_ended_saves(number, program, paper, tmp_path, monkeypatch):
    """What ``timeout`` sends, and Ctrl-C, in the second step."""
    training = importlib.import_module("common").Training
    rate, steps = training.learning_rate, []

    def learning_rate(self, value):
        steps.append(value)
        if len(steps) == 2:
            os.kill(os.getpid(), number)
        rate(self, value)

    monkeypatch.setattr(training, "learning_rate", learning_rate)
    given = ["--size", 16, "--layers", 1, "--heads", 1, "--test", 0, "--device", "cpu"]
    program("lra/pathfinder.py", *given, "--batch", 16, "--out", tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["state"]
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["curve"][-1]["images"] == state["images"] == 32


def test_data_that_is_given_is_held_out_once(paper, tmp_path):
    """No file that is trained on is tested on."""
    arena = importlib.import_module("arena")
    for kind in arena.KINDS:
        (tmp_path / kind).mkdir()
        for n in range(20):
            (tmp_path / kind / f"{n}.txt").write_text(f"{kind} {n}")
    task = arena.Task(32, 257, 2, 4)
    parts = [
        arena.load("text", task, 100, seed, {"text": tmp_path}, held_out=seed == 2)
        for seed in (1, 2)
    ]
    trained, tested = ({tuple(row) for row in part.tokens.tolist()} for part in parts)
    assert len(trained) == 32 and len(tested) == 8 and not trained & tested
    with pytest.raises(SystemExit, match=r"^--text: 4 examples; 5 or more"):
        arena.chosen("--text", 4, 1, False)


SMOKE = ["--smoke", "--device", "cpu"]
EMPTY = {"runs": [], "curve": [], "rows": [], "result": {}}


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "no record of a program"),
        ("[]", "no record of a program"),
        ('{"runs": []}', "no record of a program"),
        (
            json.dumps({"kind": "paper", "program": "gpt2", **EMPTY}),
            "program is gpt2, not attention",
        ),
    ],
    ids=["empty", "list", "cut", "another's"],
)
def test_records_that_cannot_go_on(text, reason, program, tmp_path):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(SystemExit, match=rf"record.json: {reason}.*take another --out"):
        program("attention.py", *SMOKE, "--out", tmp_path)
    assert (tmp_path / "record.json").read_text() == text


@pytest.mark.parametrize(
    "command, line",
    [
        ("attention.py --smoke --out {file}", "^.*file: File exists"),
        ("attention.py --smoke --device foo", "argument --device: foo; "),
        ("attention.py --smoke --out /proc", "^/proc/.*: "),
        ("attention.py --smoke --minutes nan", "argument --minutes: nan; 0 or more"),
        ("lra/pathfinder.py --stage 6", "--stage: 6; below 6"),
        ("lra/pathfinder.py --test -1", "argument --test: -1; 0 or more"),
        ("lra/pathfinder_cues.py --images 3", "--images: 3; 4 or more"),
        ("lra/pathfinder.py --batch 64 --pool 32", "--pool: less than the 64 images of a step"),
        ("lra/pathfinder.py --heads 0", "--heads: 0; 1 or more"),
        ("lra/pathfinder.py --smoke --start {file} --out {out}", "file: no checkpoint of this mod"),
        ("lra/pathfinder.py --smoke --start {none} --out {out}", "none: no such file"),
        ("long_context.py gpt2 --lengths 48 64", "--lengths: 48 does not divide 64"),
        ("lra/arena.py train --smoke --task text --text {none} --out {out}", "none has no neg"),
        ("lra/arena.py train --smoke --task image --image {file} --out {out}", "file is no NumPy"),
        ("lra/arena.py train --smoke --task image --image {rgb} --out {out}", "16, 3. and"),
        (
            "lra/arena.py train --smoke --task image --image {kinds} --out {out}",
            "labels 1 to 10; 0",
        ),
        (
            "lra/arena.py train --smoke --task retrieval --retrieval {bytes} --out {out}",
            "bytes has",
        ),
        (
            "lra/arena.py train --smoke --task retrieval --retrieval {words} --out {out}",
            "words has",
        ),
    ],
)
def test_bad_input_is_one_line(command, line, program, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "bytes").write_bytes(b"1\t2\t3\t\xff\t5\n")
    (tmp_path / "words").write_text("yes\t2\t3\t4\t5\n")
    images, kinds = np.zeros((100, 16, 16), np.uint8), np.arange(100) % 10
    for given, shown, labels in (
        ("rgb", np.stack([images] * 3, -1), kinds),
        ("kinds", images, kinds + 1),
    ):
        with (tmp_path / given).open("wb") as file:
            np.savez(file, images=shown, labels=labels)
    names = ("file", "none", "out", "bytes", "words", "rgb", "kinds")
    paths = {name: tmp_path / name for name in names}
    name, *arguments = command.format(**paths).split()
    if "--device" not in arguments:
        arguments += ["--device", "cpu"]
    with pytest.raises(SystemExit) as caught:
        program(name, *arguments)
    assert re.search(line, f"{caught.value.code}\n{capsys.readouterr().err}", re.MULTILINE)


def test_a_checkpoint_without_its_record(program, tmp_path):
    """Of which settings it is, nobody could say."""
    given = ["--size", 16, "--layers", 1, "--heads", 1, "--batch", 16, "--images", 16, "--test", 0]
    program("lra/pathfinder.py", *given, "--device", "cpu", "--out", tmp_path)
    (tmp_path / "record.json").unlink()
    with pytest.raises(SystemExit, match=r"checkpoint.pt: its record.json is gone; take another"):
        program("lra/pathfinder.py", *given, "--device", "cpu", "--out", tmp_path)


def test_seconds_of_a_training(paper, tmp_path, monkeypatch, signals):
    """Steps of 8 s, saved every two minutes in 3 s: those of the steps count, and all of them."""
    common = importlib.import_module("common")
    now = [0.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    training = common.Training(tmp_path / "checkpoint.pt", model, optimizer, {})
    record = common.Record(tmp_path / "record.json", "a", {}, smoke=False, device="cpu")

    def step(state):
        now[0] += 8
        return {"loss": torch.zeros(())}

    def save():
        now[0] += 3

    monkeypatch.setattr(training, "save", save)
    training.run(
        step,
        record,
        common.Clock(1e9),
        until=lambda state: state["step"] == 99,
        show=lambda state, means: "",
        share=lambda state: 0.0,
    )
    assert training.state["seconds"] == 8 * 99 and now[0] > 8 * 99 + 15
    assert {point["steps_a_second"] for point in record.data["curve"]} == {0.125}


def test_text_is_made_once(paper, tmp_path, monkeypatch):
    """Programs that start together wait for the one that makes it; the parts are of one digest."""
    pytest.importorskip("tokenizers")
    text = importlib.import_module("text")
    given = {"characters": 20_000, "vocabulary": 300}
    command = [sys.executable, paper / "text.py", "--text", tmp_path]
    command += ["--characters", "20000", "--vocabularies", "300"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    shown = [program.communicate()[0].split(", ")[:3] for program in both]
    made = text.corpus(tmp_path, **given)
    assert shown[0] == shown[1] and shown[0][2] == f"digest {made.digest}"
    monkeypatch.setattr(text, "_make", None)  # it is there
    assert text.corpus(tmp_path, **given).digest == made.digest
    # What is read is what was written: tokens of whole documents, in order, split by hold-out.
    tokenizer = text.tokenizer_of(tmp_path, **given)
    train = [t for file, t in text.documents(20_000) if not file.held_out]
    assert tokenizer.decode(made.train[: made.lengths()[0] - 1].tolist()) == train[0]


def test_wilson(paper):
    common = importlib.import_module("common")
    low, high = common.wilson(5, 10)  # Newcombe 1998, the method's own figures
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)
    assert common.wilson(0, 20)[0] == 0 and common.wilson(5120, 5120)[1] == 1
