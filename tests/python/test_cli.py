"""The command line: what it prints, what it writes, and how it ends."""

import dataclasses
import importlib.util
import json
import mmap
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import flashsdk as fs
import numpy as np
import pytest
from command_line import PNG, has_matplotlib, run, start
from flashsdk import _bindings, cli
from flashsdk._commands import (
    bench_cpu,
    bench_cpu_tables,
    config,
    machine,
    memory,
    roof,
    shape_peers,
    table,
)
from flashsdk._commands.timing import Interleaved

# Of JAX, which other tests have imported: the child starts another program at once.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called")

# ---- all


def test_the_console_script():
    """An installed flashsdk is this module."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    if not pyproject.exists():
        pytest.skip("not a checkout")
    (entry,) = re.findall(r'^flashsdk = "(.*)"$', pyproject.read_text("utf-8"), re.MULTILINE)
    module, _, function = entry.partition(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("flashsdk ")
    usage = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert usage.returncode == 2 and usage.stderr.startswith("flashsdk: ")


def test_version():
    assert run("--version") == f"flashsdk {fs.__version__}\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    process = start("info", "--all")
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""


# ---- info


def test_info_names_what_is_in_use():
    out = run("info")
    assert fs.__version__ in out
    assert f"{fs.build_info()['cpu_isa']} in use" in out
    assert "float32, bfloat16, float16" in out


def test_info_lists_every_kernel():
    out = run("info", "--all")
    assert all(kernel["name"] in out for kernel in fs.kernels())


def test_info_json():
    info = json.loads(run("info", "--json"))
    assert info["flashsdk"] == fs.__version__
    assert len(info["kernels"]) == len(fs.kernels())
    assert info["threads"] >= 1


def test_threads_and_isa_are_taken():
    slowest = fs.build_info()["cpu_isas"][0]
    info = json.loads(run("info", "--json", "--threads", "3", "--isa", slowest))
    assert info["threads"] == 3
    assert info["build"]["cpu_isa"] == slowest


def test_as_many_threads_as_the_library_takes():
    with pytest.raises(fs.Error) as caught:
        fs.set_num_threads(_bindings.MAX_THREADS + 1)
    allowed = f"1 to {_bindings.MAX_THREADS}"
    assert str(caught.value).endswith(f"; {allowed}")
    assert f"; {allowed}; " in run("info", "--threads", str(_bindings.MAX_THREADS + 1), code=2)
    fs.set_num_threads(_bindings.MAX_THREADS)
    assert cli.threads(str(_bindings.MAX_THREADS)) == fs.get_num_threads()


# ---- errors: one line that names the argument, exit code 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nonsense"], "nonsense"),
        (["info", "--isa", "mmx"], "flashsdk info: --isa: mmx; portable, "),
        (["info", "--isa", ""], "info: --isa: ''; a name"),
        (["info", "--threads", "0"], "--threads: '0'"),
        (["verify", "--seconds", "-1"], "--seconds"),
        (["verify", "--seed", "1.5"], "--seed: '1.5'"),
        (["verify", "--backend", "tpu"], "tpu"),
        (["verify", "--backend", "sm90", "--framework", "numpy"], "--framework: numpy; "),
        (["verify", "--seed", "5", "--count", "3"], "--count: 3; "),
        (["verify", "--seed", "5", "--seconds", "3"], "--seconds: 3.0; "),
        (["verify", "--seed", "5", "--first-seed", "3"], "--first-seed: 3; "),
        (["bench", "--filter", "fp64"], "--filter: 'fp64'"),
        (["bench", "--out", "/proc/nowhere"], "--out: '/proc/nowhere'"),
        (["demo", "--out", "/proc/nowhere/demo.png"], "--out: '/proc/nowhere'"),
        (["config"], "config: no option; one or more of --cmake, --include"),
        (["config", "--nonsense"], "--nonsense"),
        (["demo", "--out", "demo.exe"], "--out: 'demo.exe'; a path that ends in .png, .svg, .pdf"),
    ],
)
def test_errors_are_one_line(args, says, capsys):
    if "--isa" in args:  # which takes a process of its own
        err = run(*args, code=2)
    else:
        try:
            assert cli.main(args) == 2
        except SystemExit as e:  # of argparse
            assert e.code == 2
        err = capsys.readouterr().err
    assert says in err
    assert len(err.strip().splitlines()) == 1


# ---- config


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As a wheel lies in a folder with a space in its name."""
    folder = tmp_path / "site packages"
    for file in ("include/flashsdk/c_api.h", f"lib/{config.LIBRARY}", "lib/cmake/flashsdk/x.cmake"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    monkeypatch.setattr(config, "FOLDER", folder)
    return folder


def test_config_prints_paths_and_flags(installed, capsys):
    assert cli.main(["config", "--cmake"]) == 0
    assert capsys.readouterr().out == f"{installed}/lib/cmake/flashsdk\n"
    assert cli.main(["config", "--library"]) == 0
    assert capsys.readouterr().out == f"{installed}/lib/{config.LIBRARY}\n"
    assert cli.main(["config", "--libs", "--cflags"]) == 0
    lib = f"{installed}/lib"
    words = [f"-L{lib}", f"-Wl,-rpath,{lib}", f"-l:{config.LIBRARY}", f"-I{installed}/include"]
    assert shlex.split(capsys.readouterr().out) == words


def test_config_says_what_is_not_there(installed, capsys):
    assert cli.main(["config", "--cmake", "--torch-library"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    missing = installed / "lib" / "libflashsdk_torch.so"
    what = f"--torch-library: this flashsdk has no {missing}; a build with PyTorch"
    assert said.err == f"flashsdk config: {what}\n"


# ---- bench


@has_matplotlib
def test_bench_writes_table_record_and_picture(tmp_path):
    isa, shares = fs.build_info()["cpu_isa"], []
    for _ in range(3):  # a neighbour that takes a processor while the peak is measured makes it low
        out = run("bench", "--quick", "--filter", "dense", "fp32", "d64", "--out", str(tmp_path))
        record = json.loads((tmp_path / f"cpu_{isa}.json").read_text())
        shares = [row["share"] for row in record["rows"]]
        if max(shares) < 1.2:
            break
    assert all(0 < share < 1.2 for share in shares), shares
    assert "of peak" in out
    assert (tmp_path / f"cpu_{isa}.png").read_bytes().startswith(PNG)
    assert {row["op"] for row in record["rows"]} == {"fwd", "bwd"}
    for row in record["rows"]:
        assert len(row["peaks"]) == len(row["samples"]["ours"])


def test_bench_counts_flops_as_stated():
    case = bench_cpu.Case("dense", "fp32", "fwd", heads=16, seqlen=1024, head_dim=64)
    assert case.flops == 4 * 16 * 1024**2 * 64
    assert dataclasses.replace(case, mask="causal").flops == case.flops / 2
    assert dataclasses.replace(case, op="bwd").flops == case.flops * 2.5


def test_bench_knows_no_goals():
    rows = [
        {"kind": "sparse", "dtype": "fp32", "op": "fwd", "heads": 4, "head_dim": 64, "seqlen": 8192}
        | {"density": 0.5, "seconds": 1.0, "dense_seconds": 2.0, "of_dense": 0.9, "limit": 0.6}
    ]
    (sparse,) = bench_cpu_tables.tables({"rows": rows, "quick": False})
    assert sparse.rows[0][-1] == "90.0 %"


def test_interleaved_times_in_turns():
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    samples = Interleaved(calls, slice=0).run(rounds=3, seconds=10)
    assert order == list("ab" * 4)  # the first is the warm-up
    assert {name: len(s) for name, s in samples.items()} == {"a": 3, "b": 3}


def test_slow_calls_run_once():
    samples = Interleaved({"a": lambda: time.sleep(0.02)}, slow=0.01).run(rounds=3, seconds=10)
    assert len(samples["a"]) == 1


def test_extra_bytes_sees_what_a_call_takes():
    taken = 64 << 20
    # Other threads may give memory back meanwhile: the largest of three.
    extra = max(memory.extra_bytes(lambda: np.ones(taken // 8)) for _ in range(3))
    assert taken * 0.95 < extra < taken * 1.2
    assert 0 < memory.extra_bytes(lambda: None) < 4 << 20


def test_extra_bytes_makes_up_for_files_taken_back(tmp_path):
    size = 32 << 20
    path = tmp_path / "mapped"
    path.write_bytes(b"x" * size)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:

        def call():
            mapped.madvise(mmap.MADV_DONTNEED, 0, size // 4)
            return np.ones(size // 2 // 8)

        def extra():
            assert sum(mapped[:: mmap.PAGESIZE]) > 0  # every page is resident
            return memory.extra_bytes(call)

        assert size * 0.45 < max(extra() for _ in range(3)) < size * 0.6


# ---- tables


def test_quantities():
    assert [table.seconds(x) for x in (1.234, 0.0123, 2e-6)] == ["1.23 s", "12.3 ms", "2.00 µs"]
    assert [table.size(x) for x in (3 << 30, 100 << 20, 512)] == ["3.00 GiB", "100 MiB", "0.50 KiB"]
    assert [table.length(n) for n in (512, 1024, 16384, 1025)] == ["512", "1K", "16K", "1025"]


def test_table_aligns_columns_under_titles():
    text = table.text_table([["", "time", ""], ["name", "a", "b"]], [["x", "1", "22"]], left=1)
    assert text.splitlines() == ["       time", "name  a   b", "────  ─  ──", "x     1  22"]


# ---- bench --shape


def test_bench_of_a_shape(tmp_path):
    text = run(
        *("bench", "--shape", "2,64,4:2,16", "--mask", "window:9", "--quick"),
        *("--out", str(tmp_path), "--threads", "1"),
    )
    (path,) = tmp_path.glob("cpu_*_shape.json")
    record = json.loads(path.read_text())
    assert record["shape"] == dict(batch=2, seqlen=64, heads=4, heads_kv=2, head_dim=16)
    q, k = np.zeros((2, 64, 4, 16), np.float32), np.zeros((2, 64, 2, 16), np.float32)
    rows = {(row["name"], row["op"]): row for row in record["rows"]}
    for op in ("fwd", "bwd"):
        why = fs.explain(q, k, k, op=op, mask=fs.SlidingWindow(9))
        assert record["kernel"][op] == why.kernel and f"{op}: {why.kernel}" in text
        row = rows["flashsdk", op]
        low, high = row["quartiles"]
        assert 0 < low <= row["seconds"] <= high and len(row["samples"]) >= 2
        visible = fs.SlidingWindow(9).to_dense(64, 64).sum()
        flops = 4 * 2 * 4 * 16 * visible * (2.5 if op == "bwd" else 1)
        assert row["gflops"] == pytest.approx(flops / row["seconds"] / 1e9)
        read = [q, k, k] if op == "fwd" else [q, k, k, q, q]  # a backward's out and dout, too
        written = [q] if op == "fwd" else [q, k, k]
        moved = sum(x.nbytes for x in read + written) + 4 * 2 * 4 * 64  # and lse
        assert row["intensity"] == pytest.approx(flops / moved)
        limits = record["roof"][op]
        most = min(limits["flops"], limits["bytes"] * flops / moved)
        assert row["of_roof"] == pytest.approx(1e9 * row["gflops"] / most)
        assert row["of_ours"] == 1
    assert "quartiles" in text and "goal" not in text
    if machine.version("matplotlib") is not None:
        (picture,) = tmp_path.glob("cpu_*_shape.png")
        assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_bench_of_a_shape_on_a_gpu(backend, tmp_path):
    args = ("bench", "--shape", "1,512,4:2,64", "--mask", "causal", "--quick")
    args += ("--backend", backend, "--out", str(tmp_path))
    if not any(kernel["available"] for kernel in fs.kernels() if kernel["backend"] == backend):
        assert run(*args, code=2).startswith(f"flashsdk bench: --backend: {backend}; cpu, as ")
        return
    text = run(*args)
    record = json.loads((tmp_path / f"{backend}_shape.json").read_text())
    assert record["dtype"] == "bf16" and record["device"] in text
    assert {(row["name"], row["op"]) for row in record["rows"]} >= {
        (name, op) for name in ("flashsdk", "PyTorch, flash") for op in ("fwd", "bwd")
    }
    assert "--dtype: fp32; bf16 or fp16" in run(*args, "--dtype", "fp32", code=2)


def test_a_roof_is_the_lower_of_its_two_sides():
    limits = roof.Roof(flops=100.0, bytes=10.0)
    assert [limits.limit(x) for x in (1.0, 10.0, 50.0)] == [10.0, 100.0, 100.0]
    yardstick = roof.of_cpu("fp32")
    for call in yardstick.calls.values():
        call()
    found = yardstick.roof({"product": [1.0], "copy": [0.5, 1.0, 2.0]})
    assert found.flops > 1e8 and found.bytes == 2 * roof.COPIED


def test_bench_of_a_shape_finds_the_peers():
    found, left_out = shape_peers.runners(
        shape_peers.make(shape_peers.Shape(1, 64, 2, 2, 16), fs.Causal(), "fp32")
    )
    want = {"torch": "PyTorch, flash", "jax": "JAX, XLA (backward with forward)"}
    for package, name in want.items():
        if importlib.util.find_spec(package) is not None:
            assert name in found, left_out
    for runner in found.values():
        assert np.abs(runner.out - found["flashsdk"].out).max() < 1e-5
        runner.forward(), runner.backward()


def test_bench_of_a_shape_leaves_out_what_is_another_problem(monkeypatch):
    def other(problem):
        mine = shape_peers.ours(problem)
        return dataclasses.replace(mine, out=mine.out + 1)

    def fails(problem):
        raise RuntimeError("takes no such\nthing")

    peers = [("other", True, other), ("fails", False, fails), ("large", True, fails)]
    monkeypatch.setattr(shape_peers, "_peers", lambda problem: iter(peers))
    problem = shape_peers.make(shape_peers.Shape(1, 32, 2, 1, 16), fs.Dense(), "fp32")
    found, left_out = shape_peers.runners(problem)
    assert list(found) == ["flashsdk"]
    assert left_out["other"].startswith("its output differs by ")
    assert left_out["fails"] == left_out["large"] == "RuntimeError: takes no such"
    monkeypatch.setattr(shape_peers, "MOST_SCORES", 4 * 2 * 32 * 32 - 1)
    _, left_out = shape_peers.runners(problem)
    assert left_out["large"] == left_out["other"] == "its scores take 8.00 KiB; 8.00 KiB at most"
    assert left_out["fails"] == "RuntimeError: takes no such"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--shape", "1,2,3"], "--shape: '1,2,3'; B,S,H,D or B,S,H:Hkv,D"),
        (["--shape", "1,64,4:3,16"], "--shape: '1,64,4:3,16'; "),
        (["--shape", "1,64,0,16"], "--shape: '1,64,0,16'; "),
        (["--shape", f"1,{2**62},1,16"], f"--shape: q of shape (1, {2**62}, 1, 16); one that"),
        (["--shape", "1,64,2,16", "--mask", "window:-3"], "--mask: 'window:-3'; none, causal, wi"),
        (["--shape", "1,64,2,16", "--filter", "fwd"], "--filter: fwd; none with --shape"),
        (["--mask", "causal"], "--mask: causal; none without --shape"),
        (["--dtype", "bf16"], "--dtype: bf16; none without --shape"),
        (["--backend", "sm90"], "--backend: sm90; cpu without --shape"),
        (["--shape", "1,64,2,600"], "q: head_dim 600; "),
    ],
)
def test_wrong_shapes_are_one_line(args, says, capsys, tmp_path):
    try:
        assert cli.main(["bench", *args, "--out", str(tmp_path)]) == 2
    except SystemExit as e:
        assert e.code == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
