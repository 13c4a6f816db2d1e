"""examples/paper/steps.py, gpt2.py and bert.py: training steps of many methods in turns."""

import argparse
import functools
import importlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

pytest_plugins = ["paper_programs"]


def test_methods_without_a_turn_come_in_the_next_run(paper, clock):
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


def test_gpt2_train_resumes_to_the_bit(program, paper, tmp_path, monkeypatch):
    """Ended in the second of its methods, with dropout."""
    for package in ("transformers", "tokenizers"):
        pytest.importorskip(package)
    given = ["gpt2.py", "train", "--smoke", "--dropout", 0.1, "--device", "cpu"]
    program(*given, "--out", tmp_path / "whole")
    steps = importlib.import_module("steps")
    take, taken = steps.train_step, []

    def train_step(*of):
        taken.append(of)
        if len(taken) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(*of)

    monkeypatch.setattr(steps, "train_step", train_step)
    for _ in range(2):
        program(*given, "--out", tmp_path / "parts")
    whole, parts = (
        {(row["method"], row["step"]): row["loss"] for row in json.loads(file.read_text())["rows"]}
        for file in (tmp_path / name / "record.json" for name in ("whole", "parts"))
    )
    assert len(taken) == 12 and whole == parts
    files = sorted((tmp_path / "whole").glob("*.pt"))
    assert len(files) == 3
    for file in files:
        ours, theirs = (
            torch.load(path, weights_only=True)["model"]
            for path in (file, tmp_path / "parts" / file.name)
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_layers_share_a_program(paper):
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


def test_a_mask_made_before_is_that_of_eager_attention(paper):
    pytest.importorskip("transformers")
    gpt2, steps = (importlib.import_module(name) for name in ("gpt2", "steps"))
    model = small_gpt2(gpt2, "cpu")
    batches = [
        dict.fromkeys(("input_ids", "labels"), torch.arange(n, n + 32).view(2, 16)) for n in (0, 9)
    ]
    for inputs, with_mask in zip(batches, gpt2.masked(batches)):
        assert with_mask["attention_mask"].shape == (1, 1, 16, 16)
        assert torch.equal(steps.loss_of(model, with_mask), steps.loss_of(model, inputs))


def test_turns_with_graphs(paper, clock, monkeypatch):
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


def test_eager_alone_is_given_a_mask(paper, clock, tmp_path, monkeypatch):
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


def test_graphs_need_a_gpu(paper):
    command = [sys.executable, paper / "gpt2.py", "speed", "--compile", "graphs"]
    command += ["--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "--compile graphs: needs a GPU, --device is cpu\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("method", ["exact_tiled", "eager", "sdpa_pick"])
def test_captured_steps_train_as_others(paper, method):
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


def test_packed_batches_hold_the_same_sequences(paper):
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
