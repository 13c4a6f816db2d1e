"""examples/paper: every program runs, ends in a record, and resumes; Pathfinder's images are right.

The programs run in this process, one after the other, so that transformers is imported once.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "paper"
TEXT = ("transformers", "tokenizers")  # what programs with language models need

SMOKES = {
    "lra/pathfinder.py": (),
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

if not PROGRAMS.exists():
    pytest.skip("not a checkout", allow_module_level=True)


@pytest.fixture
def signals():
    """Those that end a program's minutes are taken as before when the test is over."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def program(monkeypatch, signals):
    """Runs one with arguments, as a command line would; settings stay as they were."""
    precision = torch.get_float32_matmul_precision()

    def run(name, *arguments):
        path = PROGRAMS / name
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        monkeypatch.syspath_prepend(str(path.parent))
        monkeypatch.syspath_prepend(str(PROGRAMS))
        with warnings.catch_warnings():
            runpy.run_path(str(path), run_name="__main__")

    yield run
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def data(monkeypatch):
    """The modules of the folder; this one is that of Pathfinder's images."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.syspath_prepend(str(PROGRAMS / "lra"))
    return importlib.import_module("pathfinder_data")


@pytest.fixture
def clock(data, signals):
    """Clocks of so many minutes."""
    return importlib.import_module("common").Clock


@pytest.mark.parametrize("command", SMOKES)
def test_smoke(program, command, tmp_path):
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
    check = [sys.executable, PROGRAMS / "render.py", "--add", tmp_path / "record.json"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 1 and "of --smoke" in done.stderr  # no figure comes from it


@pytest.mark.parametrize(
    "text, reason",
    [(None, "No such file or directory"), ("{", "no JSON"), ("[]", "no record of a program")],
)
def test_what_is_no_record_is_one_line(text, reason, tmp_path):
    file = tmp_path / "record.json"
    if text is not None:
        file.write_text(text)
    command = [sys.executable, PROGRAMS / "render.py", "--add", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{file}: ") and reason in line


def test_page_is_that_of_the_records():
    done = subprocess.run(
        [sys.executable, PROGRAMS / "render.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_page_says_what_was_compiled(data):
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


def test_a_longer_context_is_compared_at_its_best(data, tmp_path):
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


def test_pathfinder_resumes_to_the_bit(program, tmp_path):
    """Two runs of half the images end where one of all does."""

    def train(out, *more):
        small = [
            "--size",
            16,
            "--layers",
            1,
            "--heads",
            1,
            "--batch",
            16,
            "--pool",
            64,
            "--test",
            0,
        ]
        program("lra/pathfinder.py", *small, "--device", "cpu", "--out", out, *more)
        return torch.load(out / "checkpoint.pt", weights_only=True)

    whole = train(tmp_path / "whole", "--images", 96)
    train(tmp_path / "parts", "--images", 96, "--minutes", 0.0)  # stops before the first step
    # A stop in the middle of a pool, as the minutes would do.
    train(tmp_path / "parts", "--images", 48)
    parts = train(tmp_path / "parts", "--images", 96)
    for name, value in whole["model"].items():
        assert torch.equal(value, parts["model"][name]), name
    assert {**whole["state"], "seconds": 0} == {**parts["state"], "seconds": 0}
    record = json.loads((tmp_path / "parts" / "record.json").read_text())
    # The one without a step is no run.
    assert len(record["runs"]) == 2 and [p["run"] for p in record["curve"]] == [0, 1]


def test_pathfinder_goes_on_with_larger_images(program, tmp_path):
    """--start takes the weights of a model of smaller images, and the record says so."""
    small = ["--layers", 1, "--heads", 1, "--test", 0, "--device", "cpu", "--batch", 16]
    program("lra/pathfinder.py", *small, "--size", 16, "--images", 16, "--out", tmp_path / "a")
    start = tmp_path / "a" / "checkpoint.pt"
    more = ["--size", 24, "--images", 0, "--start", start, "--out", tmp_path / "b"]
    program("lra/pathfinder.py", *small, *more)
    one, two = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"] for name in "ab"
    )
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    record = json.loads((tmp_path / "b" / "record.json").read_text())
    assert record["result"]["started_from"]["images"] == 16


@pytest.mark.parametrize("size", [32, 64, 128])
def test_labels_are_those_of_the_contours(data, size):
    """Walks from dash to dash, over gaps, from one dot; and the label's other end is met or not."""
    task = data.TASKS[size]
    images = data.generate(task, 24, seed=1)
    assert set(images.labels.tolist()) == {0, 1}
    for paddles, markers, label in zip(images.paddles, images.markers, images.labels):
        there = paddles[paddles[:, 0, 0] < data.FAR / 2]
        tips = there.numpy()  # (paddles, 2, 2)
        ends = tips.reshape(-1, 2)
        apart = np.linalg.norm(ends[:, None] - ends[None], axis=-1)
        gap = paddles[1, 0] - paddles[0, 1]  # shorter than the gap where the contour turns
        gap = min(g for g in task.gaps if g * 1.01 > gap.norm())
        joined = (apart < gap * 1.01).reshape(len(tips), 2, len(tips), 2).any((1, 3))
        at = [np.linalg.norm(tips - m.numpy(), axis=-1).min(1).argmin() for m in markers]
        reached = np.zeros(len(tips), bool)
        reached[at[0]] = True
        for _ in range(len(tips)):
            reached = joined[reached].any(0)
        assert reached[at[1]] == bool(label)
        assert reached.sum() == task.paddles  # contours do not touch


@pytest.mark.parametrize("size", [64, 128])
def test_images_show_what_is_labelled(data, size):
    """Ink on each dash's middle and on the dots; none in the middle of gaps, but under a dot."""
    images = data.generate(data.TASKS[size], 20, seed=2)
    rows = torch.arange(len(images))[:, None]

    def at(points):
        y, x = points.floor().long().unbind(-1)
        return images.pixels[rows, y, x].float()

    assert (at(images.markers) == 255).all()
    long = images.paddles[:, :28]
    assert (at(long.mean(2)) > 70).all()
    gaps = ((long[:, 1:, 0] + long[:, :-1, 1]) / 2)[:, [i for i in range(27) if i != 13]]
    free = torch.cdist(gaps, images.markers).amin(-1) > data.TASKS[size].radius + 2
    assert at(gaps)[free].mean() < at(long.mean(2)).mean() / 2


def test_no_shortcut_tells_the_label(data):
    """Ink, and each dot alone, where it is and what is around: the same under both labels.

    Means of a dot's place would be those of the middle whatever it is, so the distance from there
    is compared. Around a dot are the dashes, but not the other dot: two dots tell more than one.
    """
    images = data.generate(data.TASKS[16], 4000, seed=3)
    features = {"ink": images.pixels.float().mean((1, 2))}
    features["dashes"] = (images.paddles[:, :, 0, 0] < data.FAR / 2).float().sum(1)
    for i in (0, 1):
        dot = images.markers[:, i]
        features[f"{i} from the middle"] = (dot - 8).norm(dim=1)
        features[f"{i} from the border"] = torch.minimum(dot, 16 - dot).amin(1)
        near = (images.paddles - dot[:, None, None]).norm(dim=-1).amin(-1).sort(1).values
        features[f"{i} to the next dash"], features[f"{i} to the third"] = near[:, 1], near[:, 2]
        features[f"{i} dashes around"] = (near < 4).float().sum(1)
    yes = images.labels == 1
    for name, feature in features.items():
        order = feature.unique()  # Kolmogorov-Smirnov: all of the distribution, not its mean alone
        one, other = (
            torch.searchsorted(feature[rows].sort().values, order, right=True) / rows.sum()
            for rows in (yes, ~yes)
        )
        critical = 2.2 * math.sqrt(len(yes) / (yes.sum() * (~yes).sum()))  # 1 in 8000
        assert (one - other).abs().max() < critical, name
    assert abs(yes.float().mean() - 0.5) < 0.04


def test_contours_are_as_near_as_their_dashes(data):
    """What joins two dashes is their direction: a gap is as wide as other contours are near."""
    task = data.TASKS[32]
    images = data.generate(task, 60, seed=4)
    gaps = (images.paddles[:, 1:14, 0] - images.paddles[:, :13, 1]).norm(dim=-1)
    assert gaps.max() <= 2 * 1.001 and gaps.mean() > 1.8  # two margins of 1
    ends = images.paddles[:, :28].flatten(1, 2)
    between = (ends[:, :28, None] - ends[:, None, 28:]).norm(dim=-1).amin((1, 2))
    assert between.min() >= (2 + task.thickness) * 0.999 and between.min() < 3


def test_images_follow_from_the_seed(data):
    one, two, other, far = (data.generate(data.TASKS[16], 50, s) for s in (5, 5, 6, 5 + (1 << 40)))
    assert torch.equal(one.pixels, two.pixels) and torch.equal(one.labels, two.labels)
    assert not torch.equal(one.pixels, other.pixels)
    assert not torch.equal(one.pixels, far.pixels)  # the high bits count: tests are told by them


def test_dots_of_pixels(data):
    """What training is taught: two dots or none under a label of 1, one or none under 0."""
    images = data.generate(data.TASKS[32], 40, seed=7)
    for dots, label, pixels in zip(images.dots, images.labels, images.pixels):
        assert set(dots.unique().tolist()) == ({-1, 0, 2} if label else {-1, 0, 1})
        assert (pixels[dots >= 0] >= 60).all() and (pixels[dots < 0] < 70).all()


def test_listops(data):
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


def test_counters_of_a_profile(data):
    """The profiler's table is cut where the kernel that stands between two cases is."""
    traffic = importlib.import_module("traffic")
    lines = ["==PROF== Connected", '"ID","Kernel Name","Metric Name","Metric Value"']
    for number, (kernel, read) in enumerate(
        [("spin_kernel(long)", 5), ("gemm<1, 2>", "1,024"), ("softmax", 8), ("spin_kernel", 5)]
    ):
        lines += [
            f'"{number}","{kernel}","{counter}","{read}"'
            for counter in ("dram__bytes_read.sum", "lts__t_bytes.sum")
        ]
    first, second = traffic.split("\n".join(lines))
    assert first["dram__bytes_read.sum"] == first["lts__t_bytes.sum"] == 1032
    assert first["dram__bytes_write.sum"] == 0 and first["kernels"] == 2
    assert second["kernels"] == 0
    lines.insert(5, "==WARNING== of a kernel")
    assert traffic.split("\n".join(lines)) == [first, second]
    assert traffic.split("==ERROR== ERR_NVGPUCTRPERM") == []


def test_what_tiles_read_of_l2(data):
    """By hand, of 256 queries and keys in tiles of 128: a tensor has 32768 bytes, lse 1024."""
    traffic, io = importlib.import_module("traffic"), importlib.import_module("flashsdk.io")
    problem = io.Problem(1, 256, 256, 1, 64)
    assert traffic.asked(io.tiled_forward(problem, (128, 128))) == 32768 + 2 * 65536
    # delta; K and V; Q, dO, lse and delta of both tiles; dQ's sum to round it.
    backward = traffic.asked(io.tiled_backward(problem, (128, 128)))
    assert backward == 65536 + 65536 + 2 * (65536 + 2048) + 65536


def test_a_build_without_a_kernel_is_one_line(data, monkeypatch):
    traffic = importlib.import_module("traffic")
    none = traffic.fs.ops.Explanation("", [("sm80 d64", "head_dim: 128")])
    monkeypatch.setattr(traffic.fs, "explain", lambda *_, **__: none)
    with pytest.raises(SystemExit) as stopped:
        traffic.tile(traffic.PROBLEMS[1], "forward", "cpu")
    assert stopped.value.code == "short, forward: no kernel fits;  not sm80 d64: head_dim: 128"


def test_a_record_without_a_counter_is_measured_anew(program, data, tmp_path, monkeypatch):
    """Counters that an older traffic.py did not have, of a problem that it has measured."""
    traffic = importlib.import_module("traffic")
    given = ["traffic.py", "--smoke", "--device", "cpu", "--out", tmp_path]
    program(*given)
    path = tmp_path / "record.json"
    record = json.loads(path.read_text())
    for row in record["rows"]:
        row["dram"] = 1
    path.write_text(json.dumps(record))
    program(*given)
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == len(record["rows"]) and not any("dram" in row for row in rows)
    for row in rows:
        row |= {"dram": row["read"] + row["written"], "received": 1}
        if row["method"] == "flashsdk":
            row["received"] = row["asked_of_l2"] * 2
    assert traffic.summary(rows).endswith("at most 0 % apart, of what flashsdk reads from L2 50 %")
    render = importlib.import_module("render")
    assert render.why_traffic({"rows": rows}) == ""
    rows[1]["dram"] *= 2
    assert "15 % apart in 1 of 8 rows** (GPT-2 medium, standard, backward)" in render.why_traffic(
        {"rows": rows}
    )
    del rows[-1]["received"]
    assert traffic.summary(rows).endswith("at most 50 % apart")


def test_profiler_that_fails_leaves_the_counts(data, tmp_path, clock):
    """No right to read counters, a counter without a number, and one that takes too long."""
    traffic = importlib.import_module("traffic")
    problem = traffic.PROBLEMS[1]
    table = '"ID","Kernel Name","Metric Name","Metric Value"'
    mark = '"0","spin_kernel","lts__t_bytes.sum","5"'
    scripts = {
        "refused": "echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1",
        "no number": f'echo \'{table}\n{mark}\n"1","gemm","lts__t_bytes.sum","n/a"\''
        f"; echo {traffic.DONE}",
        "cut short": f"printf '{table}\n{mark}'",
        "endless": "sleep 100 & echo $! >&2; wait",
    }
    for name, script in scripts.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        log = tmp_path / f"{name}.log"
        minutes = clock(0.01 if name == "endless" else 1)
        assert traffic.measured(str(program), [], 4, log, minutes) == [], name
    sleeper = int((tmp_path / "endless.log").read_text())
    wait = time.monotonic() + 30
    while running(sleeper) and time.monotonic() < wait:  # a signal takes its time
        time.sleep(0.05)
    assert not running(sleeper)  # what it started ends with it
    counts = [traffic.counted(problem, *case, "cpu") for case in traffic.CASES]
    rows = traffic.rows_of(problem, counts, [])
    assert len(rows) == 4 and not any("dram" in row for row in rows)


def test_profiled_program_that_aborts_behind_its_last_case(data, tmp_path, clock):
    traffic = importlib.import_module("traffic")
    lines = ['"ID","Kernel Name","Metric Name","Metric Value"']
    for case in range(len(traffic.CASES)):
        lines += [
            f'"{2 * case + i}","{kernel}","lts__t_bytes.sum","1,00{case}"'
            for i, kernel in enumerate((traffic.BETWEEN, "gemm"))
        ]
    program = tmp_path / "aborts"
    table = "\n".join(lines)
    program.write_text(f"#!/bin/sh\necho {traffic.DONE}\necho '{table}'\nkill -ABRT $$\n")
    program.chmod(0o755)
    found = traffic.measured(str(program), [], 4, tmp_path / "log", clock(1))
    assert [case["lts__t_bytes.sum"] for case in found] == [1000, 1001, 1002, 1003]


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_sigterm_ends_the_minutes(clock):
    """What ``timeout`` sends lets a program save; a second one ends it."""
    minutes = clock(1)
    assert not minutes.over()
    os.kill(os.getpid(), signal.SIGTERM)
    assert minutes.over() and minutes.limit == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_fails_is_a_row(data):
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
def test_a_training_that_is_ended_saves(number, program, data, tmp_path, monkeypatch):
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


@pytest.fixture
def tiles(data, monkeypatch, tmp_path):
    """tiles.py with a GPU's answers, and counters that the test may take away."""
    module, io = importlib.import_module("tiles"), importlib.import_module("flashsdk.io")

    class Tiles:
        def __init__(self, path, problem):
            pass

        def error(self, size):
            return 0.001 if size != self.wrong else float("inf")

        def forward(self, size):
            return size

        wrong = None

    seconds = dict(zip(module.SIZES, (5e-3, 3e-3, 2e-3, 1e-3, 1.5e-3)))
    monkeypatch.setattr(module, "Tiles", Tiles)
    monkeypatch.setattr(module.common, "measure", lambda call, *_, **__: [seconds[call()]])
    monkeypatch.setattr(module.traffic, "cache", lambda _: io.Cache(50 << 20, 132))
    monkeypatch.setattr(module.traffic, "profiler", lambda: "ncu")
    names = (*module.traffic.COUNTERS, "kernels")
    found = [dict(zip(names, (3, 2, 1000 // size, 900 // size, 1))) for size in module.SIZES]
    monkeypatch.setattr(module.traffic, "measured", lambda *_: found)
    return module


def test_tiles(tiles, clock, tmp_path, monkeypatch):
    record = tiles.Record(tmp_path / "r.json", "tiles", {}, smoke=False, device="cpu")
    tiles.measure(record, tmp_path / "x.so", clock(1), tmp_path)
    assert [row["queries"] for row in record.rows] == list(tiles.SIZES)
    row = record.rows[0]
    assert (row["dram"], row["l2"], row["received"]) == (5, 62, 56)
    assert tiles.summary(record.rows) == (
        "tiles of 256 in place of 16 queries read 14.3× fewer bytes from L2 by the counts, "
        "18.7× by the counter; 3.33× as fast, and 5.00× with 128, the fastest"
    )
    # A profiler that fails takes nothing from the record.
    monkeypatch.setattr(tiles.traffic, "measured", lambda *_: [])
    tiles.measure(record, tmp_path / "x.so", clock(1), tmp_path)
    assert record.rows[0]["received"] == 56
    reason = importlib.import_module("render").why_tiles(record.data)
    assert "up to 128 queries.** Tiles of 256 read 2.33× fewer bytes from L2" in reason
    assert "take 1.50× their time" in reason
    monkeypatch.setattr(tiles.Tiles, "wrong", 64)
    with pytest.raises(SystemExit, match=r"^64 queries: out is inf from the definition"):
        tiles.measure(record, tmp_path / "x.so", clock(1), tmp_path)


def test_tiles_are_compiled_once_for_each_flashsdk(tiles, tmp_path, monkeypatch):
    """nvcc refuses the name that pip gives the library, and its reason is the line shown."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        """#!/bin/sh
for x in "$@"; do case "$x" in *.so.[0-9]*) [ "${x#-X}" = "$x" ] && { echo "nvcc fatal : what" >&2
exit 1; };; esac; out=$x; done
echo made >> "$out"
"""
    )
    nvcc.chmod(0o755)
    shared = tmp_path / "libflashsdk.so.0.1"
    shared.write_bytes(b"one")
    (tmp_path / "cutlass" / "include" / "cutlass").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tiles, "installed", lambda _: (tmp_path, shared))
    first = tiles.library(None, tmp_path / "cutlass", tmp_path)
    assert tiles.library(None, tmp_path / "cutlass", tmp_path) == first
    assert first.read_text() == "made\n"
    shared.write_bytes(b"two")
    assert tiles.library(None, tmp_path / "cutlass", tmp_path) != first
    with pytest.raises(SystemExit, match=r"^CUTLASS: no include/cutlass in .*; --cutlass"):
        tiles.library(None, tmp_path, tmp_path)
    nvcc.write_text("#!/bin/sh\necho 'nvcc fatal : Unsupported gpu architecture' >&2; exit 1\n")
    shared.write_bytes(b"three")
    with pytest.raises(SystemExit, match="Unsupported gpu architecture"):
        tiles.library(None, tmp_path / "cutlass", tmp_path)


def test_data_that_is_given_is_held_out_once(data, tmp_path):
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
        ("lra/pathfinder.py --batch 64 --pool 32", "--pool: less than the 64 images of a step"),
        ("lra/pathfinder.py --heads 0", "--heads: 0; 1 or more"),
        ("lra/pathfinder.py --smoke --start {file} --out {out}", "file: no checkpoint of this mod"),
        ("lra/pathfinder.py --smoke --start {none} --out {out}", "none: no such file"),
        ("long_context.py gpt2 --lengths 48 64", "--lengths: 48 does not divide 64"),
        ("lra/arena.py train --smoke --task text --text {none} --out {out}", "none has no neg"),
        ("lra/arena.py train --smoke --task image --image {file} --out {out}", "file is no NumPy"),
    ],
)
def test_bad_input_is_one_line(command, line, program, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    paths = {name: tmp_path / name for name in ("file", "none", "out")}
    name, *arguments = command.format(**paths).split()
    if "--device" not in arguments:
        arguments += ["--device", "cpu"]
    with pytest.raises(SystemExit) as caught:
        program(name, *arguments)
    assert re.search(line, f"{caught.value.code}\n{capsys.readouterr().err}", re.MULTILINE)


def test_a_record_that_lacks_something_changes_nothing(data, tmp_path, monkeypatch):
    render = importlib.import_module("render")
    for name in ("RECORDS", "PAGE"):
        monkeypatch.setattr(render, name, tmp_path / name)
    (tmp_path / "RECORDS").mkdir()
    (tmp_path / "PAGE").write_text("as it was")
    given = tmp_path / "record.json"
    lacking = {"kind": "paper", "program": "attention", "smoke": False, "settings": {}}
    given.write_text(json.dumps({**lacking, **EMPTY}))
    monkeypatch.setattr(sys, "argv", ["render.py", "--add", str(given)])
    with pytest.raises(SystemExit, match=r"record.json: not all is measured"):
        render.main()
    assert not list((tmp_path / "RECORDS").iterdir())
    assert (tmp_path / "PAGE").read_text() == "as it was"


def test_methods_without_a_turn_come_in_the_next_run(data, clock):
    """Minutes that are over in a turn leave out methods; faults of one leave the others."""
    steps = importlib.import_module("steps")
    model = torch.nn.Linear(2, 2)
    methods = ("faulty", "right", "ended", "late")
    turns = steps.Turns(model, {method: [] for method in methods}, compiled=None)
    minutes = clock(1)

    def steps_of(method):
        if method == "faulty":
            raise KeyError("cu_seq_lens_q")
        if method == "ended":
            minutes.limit = 0
            raise RuntimeError("a compiling process is gone")
        return {"seconds": 2.0, "memory": None, "loss": 1.0}

    turns._steps = steps_of
    rows = turns.run(3, minutes)
    assert list(rows) == ["faulty", "right"]
    assert rows["faulty"]["error"] == "'cu_seq_lens_q'" and rows["right"]["turns"] == 1


def test_layers_share_a_program(data):
    """A compiled layer serves all layers, and the loss is that of the model as it is."""
    pytest.importorskip("transformers")
    gpt2, steps = (importlib.import_module(name) for name in ("gpt2", "steps"))
    counters = importlib.import_module("torch._dynamo.utils").counters
    model = small_gpt2(gpt2, "cpu")
    model.config._attn_implementation = gpt2.OURS
    ids = torch.arange(32).view(2, 16)
    inputs = {"input_ids": ids, "labels": ids}
    plain = steps.loss_of(model, inputs)
    torch._dynamo.reset()
    counters.clear()
    steps.compile_layers(model, backend="aot_eager")
    torch.testing.assert_close(steps.loss_of(model, inputs), plain)
    assert counters["stats"]["unique_graphs"] == 2  # of two layers, and of the loss
    assert not counters["graph_break"]
    torch._dynamo.reset()


def small_gpt2(gpt2, device):
    options = gpt2.argparse.Namespace(smoke=True, vocabulary=64, dropout=0.0, device=device)
    gpt2.register()
    return gpt2.build(options, "small", 16)


def test_a_mask_made_before_is_that_of_eager_attention(data):
    pytest.importorskip("transformers")
    gpt2, steps = (importlib.import_module(name) for name in ("gpt2", "steps"))
    model = small_gpt2(gpt2, "cpu")
    batches = [
        dict.fromkeys(("input_ids", "labels"), torch.arange(n, n + 32).view(2, 16)) for n in (0, 9)
    ]
    for inputs, with_mask in zip(batches, gpt2.masked(batches)):
        assert with_mask["attention_mask"].shape == (1, 1, 16, 16)
        assert torch.equal(steps.loss_of(model, with_mask), steps.loss_of(model, inputs))


def test_turns_with_graphs(data, clock, monkeypatch):
    """Each turn captures its method's step anew, and takes all timed steps by the graph."""
    steps = importlib.import_module("steps")
    model = torch.nn.Linear(2, 2)
    model.config, model.loss_function = argparse.Namespace(), None
    monkeypatch.setattr(steps.torch, "compile", lambda function, **_: function)
    taken, replayed = [], []

    def capture(step, inputs):
        def replay(batch):
            replayed.append((model.config._attn_implementation, batch["labels"].item()))
            return torch.tensor(1.0)

        return replay

    monkeypatch.setattr(steps, "capture", capture)
    monkeypatch.setattr(
        steps, "train_step", lambda *of: taken.append(of[-1]["labels"].item()) or torch.tensor(2.0)
    )
    batches = [{"labels": torch.tensor(n)} for n in (10, 20, 30)]
    turns = steps.Turns(model, {"a": batches, "b": batches}, compiled="graphs", warm=1, timed=3)
    assert turns.optimizer.defaults["capturable"]
    rows = turns.run(1, clock(1))
    assert taken == [10, 10]
    assert replayed == [(method, n) for method in "ab" for n in (20, 30, 10)]
    assert [row["loss"] for row in rows.values()] == [1.0, 1.0]
    # No recomputing: the state of random numbers cannot be asked for in a capture.
    turns._attempt = lambda _: {"error": "out of memory"}
    assert turns._turn("eager") == {"error": "out of memory"} and not turns.recomputed


def test_eager_alone_is_given_a_mask(data, clock, tmp_path, monkeypatch):
    """Where steps are captured, and nowhere else."""
    gpt2, common = importlib.import_module("gpt2"), importlib.import_module("common")
    found = []

    class Turns:
        def __init__(self, model, batches, *, compiled):
            found.append(
                (compiled, {m: ["attention_mask" in x for x in batches[m]] for m in batches})
            )

        def run(self, rounds, clock):
            return {}

    monkeypatch.setattr(gpt2, "Turns", Turns)
    monkeypatch.setattr(gpt2, "build", lambda *_: None)
    text = argparse.Namespace(batch=lambda n, seqlen, seed: torch.full((n, seqlen), seed))
    record = common.Record(tmp_path / "r.json", "gpt2", {}, smoke=False, device="cpu")
    options = argparse.Namespace(
        sizes=["small"],
        lengths=[8],
        methods=["eager", gpt2.OURS],
        device="cpu",
        rounds=1,
        smoke=False,
    )
    for how in ("layers", "graphs"):
        options.compile = how
        gpt2.speed(options, clock(9), record, text)
    none = {"eager": [False] * 4, gpt2.OURS: [False] * 4}
    captured = ("graphs", none | {"eager": [True] * 4})
    assert found == [(None, none), ("layers", none), (None, none), captured]


def test_graphs_of_a_page(data):
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


def test_graphs_need_a_gpu(data):
    command = [sys.executable, PROGRAMS / "gpt2.py", "speed", "--compile", "graphs"]
    command += ["--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "--compile graphs: needs a GPU, --device is cpu\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("method", ["exact_tiled", "eager", "sdpa_pick"])
def test_captured_steps_train_as_others(data, method):
    """Each replay reads its own batch and moves the weights, as the steps of a loop do."""
    pytest.importorskip("transformers")
    gpt2, steps = (importlib.import_module(name) for name in ("gpt2", "steps"))
    batches = []
    for seed in range(4):
        ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed)).cuda()
        batches.append({"input_ids": ids, "labels": ids})
    if method == "eager":
        batches = gpt2.masked(batches)
    losses, weights = [], []
    for captured in (False, True):
        model = small_gpt2(gpt2, "cuda")
        model.config._attn_implementation = method
        before = model.lm_head.weight.detach().clone()
        steps.compile_layers(model, backend="aot_eager")
        optimizer = steps.optimizer(model, 1e-2, captured=captured)
        step = functools.partial(steps.train_step, model, model, optimizer)
        step(batches[0])
        if captured:
            step = steps.capture(step, batches[0])  # takes one more of it
        else:
            step(batches[0])
        losses.append(torch.stack([step(batch).clone() for batch in batches]).tolist())
        weights.append((model.lm_head.weight - before).detach())
    assert losses[1] == pytest.approx(losses[0], rel=3e-3)
    # Each of six steps moves a weight by some 0.01.
    apart = (weights[1] - weights[0]).abs().mean() / weights[0].abs().mean()
    assert weights[0].abs().mean() > 0.02 and apart < 0.1


def test_text_is_made_once(data, tmp_path, monkeypatch):
    """Programs that start together wait for the one that makes it; the parts are of one digest."""
    pytest.importorskip("tokenizers")
    text = importlib.import_module("text")
    given = {"characters": 20_000, "vocabulary": 300}
    command = [sys.executable, PROGRAMS / "text.py", "--text", tmp_path]
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


def test_packed_batches_hold_the_same_sequences(data):
    """BERT's packed batch: all room filled, positions anew for each sequence, ends in order."""
    bert = importlib.import_module("bert")
    found = [np.arange(2, 2 + n, dtype=np.uint16) for n in (5, 9, 3, 7, 8, 4, 16)]
    inputs, count = bert.packed(list(found), 3, 8, 0)
    ends = inputs["cu_seq_lens_q"].tolist()
    assert count == 24 and ends[-1] == 24 and len(ends) == 1 + 8 * 3
    lengths = np.diff(ends)
    assert lengths[lengths > 0].tolist() == [16, 4, 4]  # from the end of the list, the last cut
    ids = torch.where(inputs["labels"] == -100, inputs["input_ids"], inputs["labels"])
    assert (ids == inputs["position_ids"] + 2).all()
    other, _ = bert.packed([np.arange(2, 2 + 6, dtype=np.uint16)] * 4, 3, 8, 0)
    bert.shorten([inputs, other])  # of one size, as a compiled program wants it
    assert inputs["cu_seq_lens_q"].tolist() == [0, 16, 20, 24, 24]
    assert other["cu_seq_lens_q"].tolist() == [0, 6, 12, 18, 24]


def test_wilson(program, data):
    common = importlib.import_module("common")
    low, high = common.wilson(5, 10)  # Newcombe 1998, the method's own figures
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)
    assert common.wilson(0, 20)[0] == pytest.approx(0, abs=1e-12)


def test_tiles_and_layout(data):
    pathfinder = importlib.import_module("pathfinder")
    for size in (16, 24, 32, 128, 256, 64):
        order = pathfinder.tiled(size)
        assert torch.equal(order.sort().values, torch.arange(size * size))
    block = order[:128]  # a piece of 8 × 16 pixels
    assert (block // 64).max() == 7 and (block % 64).max() == 15
    mask = pathfinder.near_and_butterfly(64, radius=8)
    assert mask.to_dense(block_level=True)[0, 0].diagonal().all()
