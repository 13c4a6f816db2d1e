"""The bench of the GPU kernels, on a card that is none: statistics, order, goals, and that every
section runs and its record renders, which would otherwise be found out on a card."""

import contextlib
import importlib
import json
import random
import re
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
from flashsdk._commands import bench_shape, gpu_record, gpu_timing, roof, shape_peers  # noqa: E402

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="not a checkout")


class Card:
    """As much of torch.cuda as the bench uses. Its events are a millisecond apart.

    slow: samples that the card reaches before the host has queued them. refuses: what cannot be
    captured.
    """

    def __init__(self, slow=0, refuses=()):
        self.now, self.slow, self.refuses = 0.0, slow, refuses
        self.held, self.captures = [], 0

    def api(self):
        card = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                card.now += 1.0
                self.at = card.now

            def query(self):
                card.slow -= 1
                return card.slow >= 0

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return other.at - self.at

        class CUDAGraph:
            def replay(self):
                pass

        @contextlib.contextmanager
        def graph(_, pool, stream):
            card.captures += 1
            if card.captures in card.refuses:
                raise RuntimeError("operation not permitted when stream is capturing")
            yield

        nothing = ("Stream", "current_stream", "graph_pool_handle", "synchronize",
                   "reset_peak_memory_stats")  # fmt: skip
        return {
            **dict.fromkeys(nothing, lambda: None), "set_stream": lambda _: None,
            "Event": Event, "CUDAGraph": CUDAGraph, "graph": graph, "_sleep": self.held.append,
            "memory_allocated": lambda: 0, "max_memory_allocated": lambda: 3 << 20,
            "get_device_name": lambda: "NVIDIA H100 80GB HBM3",
        }  # fmt: skip


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("calls", "card", "wanted", "dense", "masks", "decode", "features", "bench",
             "tables", "goals")  # fmt: skip
    found = {n: importlib.import_module(f"gpu_{n}") for n in names}
    return types.SimpleNamespace(timing=gpu_timing, **found)


@pytest.fixture
def put(monkeypatch):
    def put(card):
        for name, value in card.api().items():
            monkeypatch.setattr(torch.cuda, name, value)
        return card

    return put


def test_percentiles(modules):
    assert modules.timing.percentiles([float(x) for x in range(11)]) == (5.0, 1.0, 9.0)
    assert modules.timing.percentiles([2.0]) == (2.0, 2.0, 2.0)


def test_every_round_has_an_order_of_its_own(modules):
    rng = random.Random(0)
    orders = [tuple(modules.timing.drawn("abcd", rng)) for _ in range(200)]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len(set(orders)) == 24
    firsts = [order[0] for order in orders]
    assert all(30 < firsts.count(name) < 70 for name in "abcd")


def test_short_calls_share_a_sample(modules):
    calls_in = modules.timing.calls_in
    assert (calls_in(0.3, 1.0), calls_in(2.0, 1.0), calls_in(1e-4, 1.0)) == (4, 1, 100)


def test_all_are_captured_or_none(modules, put):
    runs = dict.fromkeys("ab", lambda: None)
    put(Card())
    assert {t.way for t in modules.timing.timed(runs).values()} == {"graph"}
    put(Card(refuses=(2,)))
    assert {t.way for t in modules.timing.timed(runs).values()} == {"queued"}


def test_rounds_that_the_host_lost_do_not_count(modules, put):
    card = put(Card(slow=2))
    called = []
    runs = {name: lambda name=name: called.append(name) for name in "ab"}
    samples = {name: modules.timing.Sample(run, 1, 1e-3) for name, run in runs.items()}
    times = modules.timing.measured(samples, 15)
    assert [len(t) for t in times.values()] == [15, 15]
    # Two rounds were lost, after each of which the card was held back for longer.
    assert len(called) == 2 * 17 and len(card.held) == 17
    assert card.held[:4] == [card.held[0] * n for n in (1, 2, 4, 4)]
    put(Card(slow=10**6))
    with pytest.raises(RuntimeError, match="ahead of the card in 0 of 15 rounds"):
        modules.timing.measured(samples, 15)


def test_clocks_are_those_of_what_is_timed(modules):
    card = modules.card
    assert card.parsed("1980, 2619, 412.5, 0x0000000000000004\n") == (1980.0, 2619.0, 412.5, 4)
    assert card.parsed("[N/A], 2619, 412.5, 0x4") is None
    meter = card.Meter()
    meter.readings = [(float(t), 1000.0 + t, 2619.0, 500.0, 4 * (t % 2)) for t in range(10)]
    found = card.summary(meter.during([(2, 4), (7, 8)]))
    assert found["sm_mhz"] == 1004 and found["readings"] == 5
    assert found["lowered_by"] == {"power limit": 0.4}
    assert card.summary([]) is None


def test_a_cells_goal_is_the_larger_of_the_cards(modules):
    goals = modules.goals
    found = goals.yardstick()
    of = {
        card: {
            (r["op"], int(r["head_dim"]), r["causal"] == "1", int(r["seqlen"])): r
            for r in goals.yardstick_of(card)
        }
        for card in goals.CARDS
    }
    assert len(found) == 72 and all(found.keys() == rows.keys() for rows in of.values())
    larger = {
        card: sum(float(r["over_cudnn"]) == found[cell] for cell, r in rows.items())
        for card, rows in of.items()
    }
    assert all(0 < n < 72 for n in larger.values()) and sum(larger.values()) >= 72
    assert all(r["peer"] for rows in of.values() for r in rows.values())


def test_a_part_does_not_replace_the_record(modules):
    bench = modules.bench
    assert bench.parsed([]).out == bench.RECORD
    for part in (["--only", "dense,gqa"], ["--quick"], ["--ops", "bwd"], ["--head-dims", "64"]):
        assert bench.parsed(part).out == bench.PART
    args = bench.parsed(["--only", "dense", "--seqlens", "512", "4096", "--libraries", "sm90"])
    wanted = bench.wanted_of(args)
    assert args.only == ["dense"] and wanted.seqlens([1], [2]) == (512, 4096)
    assert wanted.peers() == [] and wanted.peers(("cudnn", "efficient")) == ["efficient"]
    with pytest.raises(SystemExit):
        bench.parsed(["--only", "dens"])


def test_ops_pick_the_runs(modules):
    wanted = modules.wanted.Wanted(ops=("bwd",))
    runs = {("fwd", "sm90"): 0, ("bwd", "sm90"): 1, ("packed", "bwd", "fa2"): 2}
    assert list(wanted.of(runs).values()) == [1, 2]


def test_every_section_runs_and_renders(modules, put, monkeypatch, tmp_path):
    """Small, with the CPU's kernels for ours and PyTorch's plain attention for its fast ones."""
    from torch.nn.attention import SDPBackend

    put(Card())
    bench, calls = modules.bench, modules.calls
    small = {
        "DEVICE": "cpu",
        "TOKENS": 512,
        "WIDTH": 256,
        "backends": lambda: ["cpu"],
        "SDPA": dict.fromkeys(calls.SDPA, SDPBackend.MATH),
        "nvidia_smi": lambda query: ["no-such-program", query],
        "MANY_SHORT": ((30, 1), (5, 17)),
        "FEW": ((1, 1, 1024, 4, 2, 64), (1, 8, 64, 2, 2, 64)),
        "CACHES": ((1, 1, 128, 4, 2, 64), (3, 1, 128, 4, 2, 64), (1, 20, 256, 2, 2, 64)),
        "GPT2_MEDIUM": (1, 32, 2, 64),
        "BEYOND_CACHES": 1 << 16,
    }
    for module in vars(modules).values():
        for name in small.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, small[name])
    sections = {name: f for name, f in bench.SECTIONS.items() if name != "features_off"}
    sections["sparse"] = lambda wanted: modules.masks.sparse(wanted, block=16)
    monkeypatch.setattr(bench, "SECTIONS", sections)
    wanted = modules.wanted.Wanted(
        dims=(64, 128), lengths=(64, 128), libraries=("cpu", "cudnn", "fa2"), baseline=calls.fs
    )
    monkeypatch.setattr(bench, "wanted_of", lambda _: wanted)
    assert bench.main(["--out", str(tmp_path / "record")]) == 0

    text = (tmp_path / "record.json").read_text()
    record = json.loads(text.replace('"cpu"', '"sm90"'))
    rows = {name: record[name] for name in sections}
    assert all(rows.values()) and record["timing"]["rounds"] == 15
    for name, of_section in rows.items():  # a biased peer's dropout cannot be captured
        queued = [r for r in of_section if r["way"] == "queued"]
        assert queued == [r for r in of_section if name == "bias" and r["dropout"] > 0]
    assert {r["name"] for r in rows["dense"]} == {"sm90", "cudnn", "fa2"}
    assert all(r["ms_p10"] <= r["ms"] <= r["ms_p90"] for r in rows["dense"])
    assert all(r["extra_bytes"] == 3 << 20 for r in rows["many_short"])
    assert {r["kind"] for r in rows["many_short"]} == {"batched", "packed"}
    for section in ("few_queries", "caches"):
        assert "read" in {r["name"] for r in rows[section]}
    assert "fp8" in {r["name"] for r in rows["few_queries"]}

    page = modules.tables.bench_section("x", record, modules.goals.text(record))
    assert "captured in CUDA graphs" in page and "Not in this record: features_off." in page
    assert modules.tables.OF_AN_OLDER_BENCH not in page
    tables = re.findall(r"(?:^\|.*\n)+", page, re.M)
    assert len(tables) > len(sections)
    for table in tables:
        lines = table.splitlines()
        assert len({line.count("|") for line in lines}) == 1, table
    assert sum("widest spread" in table for table in tables) >= 8
    assert "captured in CUDA graphs" in modules.tables.headline(record)
    assert modules.goals.beside_peers(record).startswith("Our ratio to cuDNN over the fastest")
    assert "FA3" in modules.goals.beside_peers(record)


def test_the_page_says_what_an_older_record_lacks(modules):
    record = json.loads((BENCHMARKS / "results" / "gpu_bench.json").read_text())
    text = modules.tables.how(record) + modules.tables.clocks(record) + modules.goals.text(record)
    older = "timing" not in record
    assert (modules.tables.OF_AN_OLDER_BENCH in text) == older
    assert ("Timed alike on an H100" in text) == older


def test_reached_is_said_in_words(modules):
    told = modules.goals.reached({"fwd": [0.5, 2.0], "bwd": []})
    assert (
        told
        == "forward at least 1 in 1 of 2 cells, 1.000 in the geometric mean, 0.500 at the lowest"
    )
    assert "backward at least 1 in 11 of 36 cells, 0.941" in modules.goals.then()


def test_what_holds_counts_the_cells_of_each_direction(modules):
    cells = [("fwd", 512, "sm90", 9.0), ("fwd", 1024, "sm90", 20.0), ("bwd", 512, "sm90", 11.0)]
    cells += [
        ("fwd", 512, "cudnn", 10.0),
        ("fwd", 1024, "cudnn", 10.0),
        ("bwd", 512, "cudnn", 10.0),
    ]
    rows = [
        {"op": op, "head_dim": 64, "causal": False, "seqlen": n, "name": name, "tflops": rate}
        for op, n, name, rate in cells
    ]
    told = modules.goals.holds({"device": "H100", "date": "2026-01-01", "dense": rows})
    assert "1 of 2 cells of the forward (0.90 of its speed at the lowest)" in told
    assert "1 of 1 cells of the backward (1.10 of its speed at the lowest)" in told


def test_a_record_of_two_ways_says_so(modules):
    timing = {"rounds": 15, "ways": {"graph": 6, "queued": 2}}
    text = modules.tables.how({"timing": timing})
    assert "graphs or queued" in text and "(2 of 8 rows)" in text


def test_a_second_build_stands_beside_the_first(modules, monkeypatch):
    fs, name = modules.calls.fs, "flashsdk_baseline"
    other = modules.calls.second_build(Path(fs._bindings.__file__))
    assert other.__name__ == name and other._bindings.__file__ != fs._bindings.__file__
    x = [torch.randn(1, 8, 2, 16, requires_grad=i < 3) for i in range(4)]
    found = []
    for package in (fs, other):
        out = package.torch.attention(*x[:3], mask=package.Causal())
        found.append([out, *torch.autograd.grad(out, x[:3], x[3])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert modules.calls.ours(x, "cpu", package=other).keys() == {
        ("fwd", "cpu baseline"), ("bwd", "cpu baseline")
    }  # fmt: skip


def test_a_shape_on_a_gpu(put, monkeypatch, tmp_path, capsys):
    """``bench --shape``: the CPU's kernels for ours, and two of PyTorch's own for its fast ones."""
    put(Card())
    attention, explain = fs.torch.attention, fs.explain
    on_cpu = {"backend": "cpu"}
    monkeypatch.setattr(gpu_record, "DEVICE", "cpu")
    monkeypatch.setattr(bench_shape, "check_backend", lambda *_: None)
    monkeypatch.setattr(fs.torch, "attention", lambda *a, **k: attention(*a, **{**k, **on_cpu}))
    monkeypatch.setattr(fs, "explain", lambda *a, **k: explain(*a, **{**k, **on_cpu}))
    sdpa = {"cuDNN": "MATH", "flash": "FLASH_ATTENTION", "none": "CUDNN_ATTENTION"}
    monkeypatch.setattr(shape_peers, "GPU_SDPA", sdpa)
    monkeypatch.setattr(roof, "GPU_ROWS", 64)
    monkeypatch.setattr(roof, "GPU_COPIED", 1 << 16)
    done = bench_shape.run(
        (1, 32, 4, 2, 16), "causal", None, backend="sm90", quick=True, out=str(tmp_path)
    )
    assert done == 0
    record = json.loads((tmp_path / "sm90_shape.json").read_text())
    assert record["device"] == "NVIDIA H100 80GB HBM3" and record["dtype"] == "bf16"
    assert list(record["left_out"]) == ["PyTorch, none"]
    rows = {(r["name"], r["op"]): r for r in record["rows"]}
    names = ("flashsdk", "PyTorch, cuDNN", "PyTorch, flash")
    assert set(rows) == {(name, op) for name in names for op in ("fwd", "bwd")}
    # By this card's clock, which all calls share: a millisecond a call.
    assert all(r["samples"] == [1e-3] * bench_shape.QUICK[0] for r in rows.values())
    assert record["roof"]["fwd"] == {"flops": 2 * 64**3 / 1e-3, "bytes": 2 * (1 << 16) / 1e-3}
    assert "NVIDIA H100" in capsys.readouterr().out
