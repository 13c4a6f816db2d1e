"""examples/paper/traffic.py and tiles.py: counts, counters, and what a profiler says."""

import importlib
import json
import os
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytest_plugins = ["paper_programs"]


def test_counters_of_a_profile(paper):
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


def test_what_tiles_read_of_l2(paper):
    """By hand, of 256 queries and keys in tiles of 128: a tensor has 32768 bytes, lse 1024."""
    traffic, io = importlib.import_module("traffic"), importlib.import_module("flashsdk.io")
    problem = io.Problem(1, 256, 256, 1, 64)
    assert traffic.asked(io.tiled_forward(problem, (128, 128))) == 32768 + 2 * 65536
    # delta; K and V; Q, dO, lse and delta of both tiles; dQ's sum to round it.
    backward = traffic.asked(io.tiled_backward(problem, (128, 128)))
    assert backward == 65536 + 65536 + 2 * (65536 + 2048) + 65536


def test_a_build_without_a_kernel_is_one_line(paper, monkeypatch):
    traffic = importlib.import_module("traffic")
    none = traffic.fs.ops.Explanation("", [("sm80 d64", "head_dim: 128")])
    monkeypatch.setattr(traffic.fs, "explain", lambda *_, **__: none)
    with pytest.raises(SystemExit) as stopped:
        traffic.tile(traffic.PROBLEMS[1], "forward", "cpu")
    assert stopped.value.code == "short, forward: no kernel fits;  not sm80 d64: head_dim: 128"


def test_a_record_without_a_counter_is_measured_anew(program, paper, tmp_path, monkeypatch):
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
    reasons = importlib.import_module("reasons")
    assert reasons.why_traffic({"rows": rows}) == ""
    rows[1]["dram"] *= 2
    assert "15 % apart in 1 of 8 rows** (GPT-2 medium, standard, backward)" in reasons.why_traffic(
        {"rows": rows}
    )
    del rows[-1]["received"]
    assert traffic.summary(rows).endswith("at most 50 % apart")


def test_profiler_that_fails_leaves_the_counts(paper, tmp_path, clock):
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


def test_profiled_program_that_aborts_behind_its_last_case(paper, tmp_path, clock):
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


@pytest.fixture
def tiles(paper, monkeypatch, tmp_path):
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
    reason = importlib.import_module("reasons").why_tiles(record.data)
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
