"""When the record of the GPU tests speaks for the sources, and what of the tools goes into it."""

import csv
import dataclasses
import functools
import importlib.util
import json
import operator
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from flashsdk._commands import bench_cpu, bench_cpu_tables, gpu_record


@pytest.fixture
def checkout(tmp_path):
    for name in ("common", "cuda", "sm80", "sm90", "table", "cpu"):
        folder = tmp_path / "cpp" / "kernels" / name
        folder.mkdir(parents=True)
        (folder / "code.h").write_text(name)
    return tmp_path


def write(root, **fields):
    path = root / gpu_record.TESTS
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"kernel_sources": gpu_record.sources_hash(root), "date": "2026-01-01"}
    path.write_text(json.dumps({**record, "ok": True, "complete": True, **fields}))


def test_no_record(checkout):
    assert "missing" in gpu_record.staleness(checkout)


def test_a_record_of_these_sources(checkout):
    write(checkout)
    assert gpu_record.staleness(checkout) is None


@pytest.mark.parametrize("folder", ["common", "cuda", "sm80", "sm90", "table"])
def test_a_record_of_other_sources(checkout, folder):
    write(checkout)
    (checkout / "cpp" / "kernels" / folder / "code.h").write_text("changed")
    assert "make test-gpu" in gpu_record.staleness(checkout)


def test_comments_do_not_matter(checkout):
    header = checkout / "cpp" / "kernels" / "sm90" / "code.h"
    table = checkout / "cpp" / "kernels" / "table" / "sm90.h"
    header.write_text("#include <a>\nint a = 1;  // one\n")
    table.write_text("constexpr int kA = 1;  // one\n")
    write(checkout)
    header.write_text("// What it is.\n#include <a>\nint a =\n    1;\n")
    table.write_text("// What it is.\nconstexpr int kA = 1;\n")
    assert gpu_record.staleness(checkout) is None
    header.write_text("#include <b>\nint a = 1;\n")
    assert gpu_record.staleness(checkout) is not None


def test_kernels_of_the_cpu_do_not_matter(checkout):
    write(checkout)
    (checkout / "cpp" / "kernels" / "cpu" / "code.h").write_text("changed")
    assert gpu_record.staleness(checkout) is None


def test_a_run_that_failed_or_was_cut(checkout):
    write(checkout, ok=False)
    assert "failed" in gpu_record.staleness(checkout)
    write(checkout, complete=False)
    assert "incomplete" in gpu_record.staleness(checkout)


# ---- scripts/test_gpu.py

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "test_gpu.py"
FAMILIES = "sm80_forward_d64\nsm90_backward_d128\n"
WATCHED = """family sm80_forward_d64
done sm80_forward_d64: 1.0 s
family sm90_backward_d128
done sm90_backward_d128: 1.0 s
touched 2 kernels
========= ERROR SUMMARY: 0 errors
"""


def loaded(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def gpu_script():
    return loaded(SCRIPT)


def sanitizer(folder, version=(0, "Version 2026.4.0"), families=(0, FAMILIES)):
    """The part of that step where the programs have these statuses and print this."""
    answers = {"sanitizer_version": version, "families": families}

    def run(name, command, *, limit, **env):
        return *answers.get(name, (0, WATCHED)), 1.0

    machine = SimpleNamespace(run=run, on_card=lambda process: {}, jobs=1)
    machine.sanitizer, machine.logs, machine.build = "compute-sanitizer", folder, folder
    return gpu_script().sanitizer(machine)


@pytest.mark.parametrize("words", ["", "UserWarning: a line that torch writes\n"])
def test_families_are_told_from_warnings(tmp_path, words):
    part = sanitizer(tmp_path, families=(0, words + FAMILIES))
    assert part["ok"] and part["version"] == "2026.4.0"
    assert part["memcheck"] == {"kernels": 2, "clean": True}


def test_families_that_did_not_finish(tmp_path):
    part = sanitizer(tmp_path, families=(0, FAMILIES + "sm90_forward_d64\n"))
    assert not part["ok"] and "did not finish: sm90_forward_d64" in part["why"]


@pytest.mark.parametrize("families", [(1, FAMILIES + "Traceback"), (0, "no harness there")])
def test_a_list_of_families_that_is_none(tmp_path, families):
    part = sanitizer(tmp_path, families=families)
    assert not part["ok"] and families[1] in part["why"]


@pytest.mark.parametrize("version", [(127, "not found"), (0, "no version")])
def test_a_sanitizer_that_does_not_tell_its_version(tmp_path, version):
    part = sanitizer(tmp_path, version=version)
    assert not part["ok"] and version[1] in part["why"]


def test_steps_beside_each_other_share_a_record(tmp_path):
    """Each knows what was there when it began; what others have written since stays."""
    script, out, passed = gpu_script(), tmp_path / "record.json", {"ok": True}
    m, record = SimpleNamespace(build=tmp_path), {"kernel_sources": "a"}
    old = {**record, "steps": {"soak": {"ok": False}, "overhead": passed}}
    out.write_text(json.dumps(old))
    first = script.write(m, out, record, {"build": passed}, "build")
    assert first == {"build": passed}
    script.write(m, out, record, {**first, "soak": {"ok": False}}, "soak")
    assert list(script.write(m, out, record, {**first, "verify": passed}, "verify")) == [
        "build",
        "verify",
        "soak",
    ]
    written = json.loads(out.read_text())
    assert not written["ok"] and not written["complete"]
    script.write(m, out, record, {**first, "soak": passed}, "soak")
    assert json.loads(out.read_text())["ok"]


# Of one process of the soak: what it prints last.
FOUND = {
    "first_seed": 5,
    "seconds": 2.0,
    "problems": 10,
    "launches": 22,
    "repeated": 2,
    "refused": 1,
    "shares": {"sm90 from sm80": {"out": 0.25, "dq": 0.5}},
    "failures": [],
}


def soak(*answers):
    """The part of that step where its processes end like this."""
    script, left = gpu_script(), list(answers)

    def run(name, command, *, limit, **env):
        return (0, "sm80 sm90", 0.0) if name == "backends" else (*left.pop(), 1.0)

    machine = SimpleNamespace(jobs=3, launches=40, soak_seconds=9, run=run, cards=["0"])
    machine.on_card = lambda process: {}
    part = script.soak(machine)
    assert not left
    return part


def test_processes_are_dealt_out_to_the_gpus():
    script, seen = gpu_script(), []

    def run(name, command, *, limit, **env):
        seen.append((name, env["CUDA_VISIBLE_DEVICES"]))
        return 0, "", 1.0

    machine = SimpleNamespace(run=run, cards=["2", "5"])
    machine.on_card = functools.partial(script.Machine.on_card, machine)
    script.side_by_side(machine, "verify", ["program"], 3, limit=1.0)
    assert sorted(seen) == [("verify_0", "2"), ("verify_1", "5"), ("verify_2", "2")]


def test_soak_adds_up_its_processes():
    other = {**FOUND, "first_seed": 9, "shares": {"sm90 from sm80": {"out": 0.125, "dq": 0.75}}}
    part = soak((0, "words\n" + json.dumps(FOUND)), (0, json.dumps(other)))
    assert part["ok"] and part["launches"] == 44 and part["repeated"] == 4
    assert part["shares"] == {"sm90 from sm80": {"out": 0.25, "dq": 0.75}}
    assert sorted(part["seeds"]) == [5, 9]


def test_soak_tells_how_to_repeat_a_failure():
    bad = {
        **FOUND,
        "failures": [{"seed": 7, "what": "dq of sm90 from sm80 is 3 of what is allowed"}],
    }
    part = soak((1, json.dumps(bad)), (0, json.dumps(FOUND)))
    assert not part["ok"] and part["failures"] == [7]
    assert "seed 7: dq" in part["why"] and "soak.py --seed 7" in part["why"]


@pytest.mark.parametrize("died", [(124, "so far"), (-11, ""), (1, "Traceback")])
def test_soak_whose_process_died(died):
    part = soak(died, (0, json.dumps(FOUND)))
    assert not part["ok"] and part["launches"] == 22 and f"soak.py, {died[0]}" in part["why"]


def test_soak_that_launched_nothing():
    part = soak(*[(0, json.dumps({**FOUND, "launches": 0}))] * 2)
    assert not part["ok"] and "nothing" in part["why"]


@pytest.fixture(scope="module")
def machine_code():
    return loaded(ROOT / "tests" / "cpp" / "gpu" / "machine_code.py")


def test_every_set_of_features_has_a_name(machine_code):
    """A set without one would be a KeyError after a build of an hour."""
    source = (ROOT / "cpp" / "kernels" / "common" / "features.h").read_text()
    body = re.search(r"enum class Features : unsigned \{(.*?)\};", source, re.S)[1]
    bits: dict[str, int] = {}
    for name, value in re.findall(r"(k\w+) = ([\w |]+)", body):
        words = [bits[w] if w in bits else int(w) for w in value.split(" | ")]
        bits[name] = functools.reduce(operator.or_, words)
    compiled = {bits[name] for name in bits if name != "kSoftcap"}  # never alone
    assert compiled == set(machine_code.FEATURES) and len(compiled) == 7


@pytest.mark.parametrize(
    "traits, told, more",
    [
        ("ForwardTraitsIN7cutlass6half_tELi64ELi64ELi128ELi96ELi3ELb1EE", "fp16 64", "3_1"),
        ("BackwardTraitsIN7cutlass10bfloat16_tELi192ELi128ELi128ELi96EE", "bf16 192x128", ""),
        ("Traits_sm90_forward_bfloat16_d128_None_128x96", "bf16 128", ""),
        ("Traits_sm90_forward_float16_d192x128_BiasDropout_128x96", "fp16 192x128", ""),
    ],
)
def test_a_kernels_name_tells_its_traits(machine_code, traits, told, more):
    op = "backward" if traits.startswith("B") else "forward"
    found = machine_code.described(
        f"_ZN8flashsdk4sm90{len(op) + 7}{op}_kernelI"
        f"NS_{len(traits)}{traits}ENS_4cuda13BuiltinPolicyELNS3_8FeaturesE0EEEvNS_13ForwardParamsE"
    )
    want = ("sm90", op, *told.split(), "all masks", "none", "128x96", more)
    assert tuple(found.values()) == want


@pytest.mark.parametrize(
    "types, dtype",
    [
        ("N7cutlass10bfloat16_tES4_", "bf16"), ("N7cutlass10bfloat16_tEh", "bf16 fp8kv"),
        ("N7cutlass6half_tES4_", "fp16"), ("N7cutlass6half_tEh", "fp16 fp8kv"),
    ],
)  # fmt: skip
def test_names_of_kernels_of_few_rows(machine_code, types, dtype):
    """Their tile is that of a warp in their name, and of all warps in the table."""
    found = machine_code.described(
        f"_ZN8flashsdk4sm8023few_rows_forward_kernelINS0_13FewRowsTraitsI{types}"
        "Li128ELi16ELi16ELi4ELi2ELi3EEENS_11DensePolicyELNS_4cuda8FeaturesE0EEE"
        "vNS_13ForwardParamsENS7_12TileScheduleENS0_8KeySplitE"
    )
    want = ("sm80", "split forward", dtype, "128", "dense", "none", "16x64", "4_2_3")
    assert tuple(found.values()) == want


# An outer loop of three blocks around an inner one. As ptxas does, the block that waits for a
# barrier stands last and jumps back into the inner loop, which does not make a loop of its own.
LISTING = """
        /*0000*/                   STL [R1], R0 ;                      /* 0x1 */
        /*0010*/                   MOV R2, RZ ;                        /* 0x2 */
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0030*/              @!P0 BRA 0x00c0 ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0050*/                   LDL R3, [R1] ;
        /*0060*/                   ISETP.GE.AND P1, PT, R2, R4, PT ;
        /*0070*/              @!P1 BRA 0x0020 ;
        /*0080*/                   LDL R5, [R1+0x4] ;
        /*0090*/                   HGMMA.64x128x16.F32.BF16 R24, R8, gdesc[UR8], R24 ;
        /*00a0*/               @P2 BRA 0x0010 ;
        /*00b0*/                   EXIT ;
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*00d0*/              @!P0 BRA 0x00c0 ;
        /*00e0*/                   BRA 0x0040 ;
        /*00f0*/                   BRA 0xf0;
"""


def test_instructions_are_counted_where_they_are(machine_code):
    code = machine_code.Code(machine_code.Instruction.all_of(LISTING))
    assert machine_code.counted(code) == {
        "instructions": 16, "hgmma": 2, "hmma": 0, "local": 3,
        "loop_instructions": 9, "loop_hgmma": 1, "loop_hmma": 0, "loop_local": 1,
    }  # fmt: skip


# Jumps of other kinds: the inner loop is closed behind a BSYNC, of whose BSSY the target is told,
# and a table of jumps leads to the last block, which nothing else reaches.
OTHER_JUMPS = """
        /*0000*/                   BSSY.RECONVERGENT B0, 0x60 ;
        /*0010*/                   HMMA.16816.F32.BF16 R24, R8, R4, R24 ;
        /*0020*/              @!P0 BRA 0x0040 ;
        /*0030*/                   STL [R1], R0 ;
        /*0040*/                   BRA.DIV UR4, 0x90 ;
        /*0050*/                   BSYNC.RECONVERGENT B0 ;
        /*0060*/                   BRA.U !UP0, 0x0000 ;
        /*0070*/               @P1 EXIT ;
        /*0080*/                   BRXU UR6 -0x90 ;
        /*0090*/                   LDL R3, [R1] ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   LDL R4, [R1] ;
        /*00c0*/                   BRA 0x10 ;
"""


def test_jumps_of_other_kinds(machine_code):
    read = machine_code.Instruction.all_of
    code = machine_code.Code(read(OTHER_JUMPS))
    found = machine_code.counted(code)
    assert found["loop_instructions"] == 7 and found["loop_hmma"] == 1
    assert found["local"] == 3 and found["loop_local"] == 1
    assert len(code.order) == len(code.blocks) - 1
    unread = OTHER_JUMPS.replace("LDL R4, [R1]", "HMMA.16816.F32 R24, R8, R4, R24")
    with pytest.raises(ValueError, match=r"^tensor cores at 0xb0, which no jump"):
        machine_code.counted(machine_code.Code(read(unread)))


def test_the_record_counts_the_kernels_of_its_table():
    record = json.loads((ROOT / gpu_record.TESTS).read_text())["steps"]["machine_code"]
    with (ROOT / "benchmarks" / "results" / "gpu_kernels.csv").open() as file:
        kernels = list(csv.DictReader(file))
    assert record["kernels"] == len(kernels)
    assert record["sm90"] == sum(k["backend"] == "sm90" for k in kernels)
    for backend, count in record["local_in_main_loops"].items():
        of = [k for k in kernels if k["backend"] == backend]
        assert count == sum(k["loop_local"] != "0" for k in of)


def test_what_ptxas_made_is_judged(tmp_path):
    """A plain sm90 kernel without wgmma, or with more than a few spills, in its main loop fails."""
    names = "backend op dtype head_dim mask features tile loop_instructions loop_hgmma loop_local"
    good = ["sm90", "forward", "bf16", "64", "all masks", "none", "192x128", "500", "12", "1"]
    spills, without = [*good[:-1], "30"], [*good[:-2], "0", "0"]
    sm80 = ["sm80", *spills[1:]]
    capped = [*spills[:5], "capped", *spills[6:]]
    for rows, ok in (
        ([good, sm80, capped], True), ([good, spills], False), ([without], False), ([sm80], False)
    ):  # fmt: skip
        text = "\n".join(",".join(row) for row in (names.split(), *rows)) + "\n"
        m = SimpleNamespace(
            jobs=2, build=tmp_path, kernels=tmp_path / "kernels.csv", arch="90a-real"
        )
        m.run = lambda *_, text=text, **__: (0, text, 1.0)
        part = gpu_script().machine_code(m)
        assert part["ok"] is ok and part["kernels"] == len(rows)
        assert m.kernels.read_text() == text
        why = "no kernels of sm90" if rows == [sm80] else "main loop: sm90 forward bf16 64"
        assert ok or why in part["why"]


def test_machine_code_that_cannot_be_read_fails(tmp_path):
    m = SimpleNamespace(jobs=1, build=tmp_path, run=lambda *_, **__: (1, "KeyError: 5", 0.0))
    assert gpu_script().machine_code(m) == {"ok": False, "why": "KeyError: 5"}


def test_nvcc_is_that_of_the_newest_configuration(tmp_path):
    assert gpu_script().nvcc_version(tmp_path) is None
    for age, version in ((0, "13.0.88"), (100, "12.8.61")):
        file = tmp_path / "CMakeFiles" / f"4.{age}" / "CMakeCUDACompiler.cmake"
        file.parent.mkdir(parents=True)
        file.write_text(f'set(CMAKE_CUDA_COMPILER_VERSION "{version}")\n')
        os.utime(file, (1e9 - age, 1e9 - age))
    assert gpu_script().nvcc_version(tmp_path) == "13.0"


def test_the_page_counts_the_tests_of_the_record():
    steps = json.loads((ROOT / gpu_record.TESTS).read_text())["steps"]
    page = (ROOT / "docs" / "dev" / "gpu.md").read_text()
    said = "It lacks pytest"
    if step := steps.get("pytest"):
        said = f"({step['passed']} passed, {step['skipped']} skipped by name)"
    assert said in page


def test_bench_has_every_row_of_the_goals(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    goals = importlib.import_module("cpu_goals")
    rows = [dataclasses.asdict(c) | {"share": 0.9} for c in bench_cpu.cases(quick=False)]
    record = {"rows": rows, "quick": False, "isa": "avx512_bf16", "cpu": "AMD EPYC"}
    found = [goals.goal(row, record) for row in rows if row["kind"] == "dense"]
    shares = len(goals.SHARE_4096) + len(goals.SHARE_1024)
    assert sum(g.share is not None for g in found) >= shares
    # Six at each of two head dimensions, and causal forward at 1K in three dtypes.
    ratios = 2 * len(goals.RATIO_4096) + 3
    assert sum(g.ratio is not None for g in found) == ratios
    measured = {**record, "rows": [row | {"ratio": 1.0} for row in rows if row["kind"] == "dense"]}
    assert bench_cpu_tables.left_out(measured, goals) == 0
    elsewhere = {**measured, "cpu": "Intel Xeon", "isa": "avx512"}
    assert bench_cpu_tables.left_out(elsewhere, goals) == ratios
    assert bench_cpu_tables.left_out({**elsewhere, "quick": True}, goals) == 0


def test_what_enabling_adds_to_a_call_is_measured_and_shown(monkeypatch):
    torch_sdpa = pytest.importorskip("flashsdk.integrations.torch_sdpa")
    if not torch_sdpa._REGISTRY:
        pytest.skip("torch_sdpa.enable() is for PyTorch 2.11 or newer")
    script = ROOT / "benchmarks" / "host_overhead.py"
    command = [sys.executable, script, "--device", "cpu", "--eager"]
    command += ["--rounds", "2", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    overhead = {"ok": True, **json.loads(done.stdout)}
    added = {"sdpa": 2.5, "sdpa_enabled": 6.0, "sdpa_train": 8.0, "sdpa_enabled_train": 13.5}
    assert added.keys() <= overhead["microseconds"].keys()
    overhead["microseconds"] |= added
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    record = json.loads((ROOT / gpu_record.TESTS).read_text())
    steps = {**record["steps"], "overhead": overhead}
    page = importlib.import_module("gpu_tables").tests_section({**record, "steps": steps})
    assert "| forward +3.5 (goal: at most 3, missed), with its backward +5.5 |" in page


def test_goals_are_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    goals = importlib.import_module("gpu_goals")
    # At 4K an H200's fastest peer has 1.19 of cuDNN and an H100's less, at 512 1.00 and 1.004.
    dense = [
        {"op": "fwd", "head_dim": dim, "causal": False, "seqlen": n, "name": name, "tflops": t}
        for dim, n, name, t in (
            (128, 4096, "sm90", 600), (128, 4096, "cudnn", 600),
            (128, 512, "sm90", 600), (128, 512, "cudnn", 500),
        )
    ]  # fmt: skip
    row, mean, *rest = goals.over_peers({"dense": dense})
    assert row[2:] == [
        "1 of 2",
        "0.840 (forward 128 no mask 4K) to 1.195 (forward 128 no mask 512)",
    ]
    assert mean[2:] == ["0 of 1", "1.002 (all 2)"]
    assert rest[0][2] == "–"  # nothing of the backward
    run = {"device": "GPU", "date": "2026-01-01", "versions": {"cuDNN": "9.19.0"}, "dense": dense}
    forward, _, backward, _ = goals.in_short(run).splitlines()[-4:]
    assert forward == "| forward, no mask | 1.10 (1.00–1.20) |"
    assert backward == "| backward, no mask | – |"
    (features,) = goals.features_off(
        {"features_off": [{"name": "sm80", "op": "bwd", "head_dim": 64, "compiled_in": "all",
                           "of_plain": 1.2}]}
    )  # fmt: skip
    assert features[2:] == ["0 of 1", "1.200 (all, backward 64)"]
    decode = {"batch": 1, "queries": 1, "keys": 1024, "heads": 32, "heads_kv": 8, "head_dim": 128}
    times = {"flashsdk": 8.0, "read": 7.0, "fp8": 5.0}
    one, read, fp8 = goals.few_queries(
        {"few_queries": [{**decode, "bytes": 1e8, "name": n, "us": t} for n, t in times.items()]}
    )
    assert one[2:] == ["0 of 1", "8.000 (1 × 1K, 32:8 × 128)"]
    assert read[2:] == ["0 of 1", "0.875 (1 × 1K, 32:8 × 128)"]
    assert fp8[2:] == ["0 of 1", "1.600 (1 × 1K, 32:8 × 128)"]
    times = {"alone": 9.0, "used": 10.0, "unequal": 12.0, "read": 9.5, "pages of 16": 10.2}
    rows = [{**decode, "bytes": 1e8, "name": name, "us": us} for name, us in times.items()]
    rows += [{**r, "queries": 512} for r in rows]
    read, pages, chunk = goals.caches({"caches": rows})  # one sequence has none to be unequal to
    assert [line[2] for line in (read, pages, chunk)] == ["1 of 1", "1 of 1", "0 of 1"]
    assert chunk[3] == "0.882 (1 × 512 × 1K, 32:8 × 128, pages of 16)"
    read, *_ = goals.caches({"caches": [{**r, "batch": 16} for r in rows]})
    assert read[2] == "1 of 2"
    gpt2 = {"name": "sm90", "dropout": 0.0, "fwd_ms": 0.4, "bwd_ms": 1.2}
    for device, rows in (("NVIDIA H200", 2), ("NVIDIA H100 80GB HBM3", 0)):  # ms are an H200's
        assert len(goals.gpt2({"device": device, "gpt2_medium": [gpt2]})) == rows


def test_every_goal_of_the_record_has_cells(monkeypatch):
    """A record that lacks a section is not to be committed: its goals would be of nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    goals = importlib.import_module("gpu_goals")
    record = json.loads((ROOT / "benchmarks" / "results" / "gpu_bench.json").read_text("utf-8"))

    def of_nothing(record):
        return [row[0] for rows in goals.GOALS for row in rows(record) if "–" in row]

    assert of_nothing(record) == []
    for section in ("dense", "windows", "packed", "few_queries", "features_off"):
        assert of_nothing(record | {section: []}), section


def test_every_row_of_a_table_has_a_cell_for_each_column():
    """What has no header is not shown."""
    text = (ROOT / "docs" / "dev" / "benchmarks.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert len(tables) > 10
    for table in tables:
        columns = [line.count("|") for line in table.splitlines()]
        assert len(set(columns)) == 1, table
