"""Builds for this machine's GPU, tests every kernel family there, and writes the record of it.

    python3 scripts/test_gpu.py [--out benchmarks/results/gpu_tests.json] [-- CMake options]

`make test-gpu` calls it. Needs no network: a python3 with PyTorch, cmake, ninja, nanobind and
pytest, nvcc, and CUTLASS as third_party/cutlass finds it (FLASHSDK_CUTLASS_DIR). pytest-xdist is
used where it is. GoogleTest too (-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=...): without it the C++
tests are left out, and the record says so.

Steps: build, machine_code (registers, and what main loops hold, of every kernel: gpu_kernels.csv
beside the record), ctest, pytest, verify, soak (10^5 forwards and as many backwards of the fastest
backend, every output held against float64 and against sm80), sanitizer (compute-sanitizer's
memcheck, racecheck, synccheck), overhead. --steps picks some; the record then lacks the others and
counts as incomplete, until --resume adds them: it keeps what the record has of the same kernels. On
a machine of several GPUs the processes of a step are dealt out to all that CUDA_VISIBLE_DEVICES
names. Steps can run side by side, each with --resume, the same --out and --logs of its own.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# compute-sanitizer's, and the share of the processes that each needs to end with the others.
TOOLS = {"memcheck": 0.25, "racecheck": 0.5, "synccheck": 0.25}
SANITIZER_LIMIT = 420.0  # seconds, of one process
Part = dict[str, Any]


class Machine:
    """Where everything runs, and with what."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        if not torch.cuda.is_available():
            sys.exit("test_gpu: PyTorch sees no GPU")
        major, minor = torch.cuda.get_device_capability()
        self.arch = f"{major}{minor}a-real" if (major, minor) == (9, 0) else f"{major}{minor}-real"
        self.device, self.gpus = torch.cuda.get_device_name(), torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.cards = visible.split(",") if visible else [str(i) for i in range(self.gpus)]
        self.build = ROOT / args.build_dir
        self.build.mkdir(parents=True, exist_ok=True)  # of what is carried here, too: for write()
        self.logs = Path(args.logs).resolve() if args.logs else self.build / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        out = Path(args.out)
        self.kernels = out.with_name(f"{out.stem.removesuffix('_tests')}_kernels.csv")
        self.jobs = args.jobs
        self.problems, self.cmake_args = args.problems, args.cmake_args
        self.launches, self.soak_seconds = args.launches, args.soak_seconds
        self.sanitizer = args.sanitizer or shutil.which("compute-sanitizer")
        self.env = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}"}

    def on_card(self, process: int) -> dict[str, str]:
        """For one of many processes: they are dealt out to the GPUs."""
        return {"CUDA_VISIBLE_DEVICES": self.cards[process % len(self.cards)]}

    def run(
        self, name: str, command: list[str], *, limit: float, **env: str
    ) -> tuple[int, str, float]:
        """Exit status (124: too long), output, seconds; the output is kept as a log as well."""
        start = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env={**self.env, **env}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            text, _ = process.communicate(timeout=limit)
            status = process.returncode
        except BaseException as e:
            os.killpg(process.pid, signal.SIGKILL)  # what it started holds the pipe as well
            text, _ = process.communicate()
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            status = 124
        (self.logs / f"{name}.log").write_text(text)
        return status, text, time.monotonic() - start


def build(m: Machine) -> Part:
    """The whole library, the extension and, with GoogleTest, the C++ tests.

    Its seconds are told of a build that found nothing built.
    """
    anew = not (m.build / ".ninja_log").exists()
    configure = [
        "cmake", "-S", ".", "-B", str(m.build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        "-DFLASHSDK_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={m.arch}", "-DFLASHSDK_CPU_ISAS=native",
        "-DFLASHSDK_BUILD_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}",
        "-DFETCHCONTENT_FULLY_DISCONNECTED=ON", *m.cmake_args,
    ]  # fmt: skip
    for tests in ("ON", "OFF"):
        flag = f"-DFLASHSDK_BUILD_TESTS={tests}"
        status, text, _ = m.run("configure", [*configure, flag], limit=300)
        if status == 0:
            break
    if status != 0:
        return {"ok": False, "why": text[-2000:]}
    targets = [
        "_bindings",
        "flashsdk_gpu_harness",
        *(["flashsdk_device_tests"] if tests == "ON" else []),
    ]
    command = ["cmake", "--build", str(m.build), "-v", "-j", str(m.jobs), "--target", *targets]
    status, text, seconds = m.run("build", command, limit=3600)
    part: Part = {"ok": status == 0}
    if anew:
        part |= {"seconds": round(seconds), "jobs": m.jobs}
    cache = (m.build / "CMakeCache.txt").read_text()
    part["arch"] = re.findall(r"^CMAKE_CUDA_ARCHITECTURES:\w+=(.*)$", cache, re.M)[0]
    part["gtest"] = tests == "ON"
    if status != 0:
        errors = [line for line in text.splitlines() if "error" in line.lower()]
        return {**part, "why": "\n".join(errors[:8]) or text[-2000:]}
    return part


def machine_code(m: Machine) -> Part:
    """What ptxas made of all kernels, beside the record: registers, and what is in main loops.

    Main loops of sm90 are wgmma's, and what a plain kernel spills stays out of them, but for one
    instruction in a hundred.
    """
    script = ROOT / "tests" / "cpp" / "gpu" / "machine_code.py"
    library = m.build / "libflashsdk_gpu_harness.so"
    command = [sys.executable, str(script), str(library), "--jobs", str(m.jobs)]
    status, text, seconds = m.run("machine_code", command, limit=600)
    if status != 0:
        return {"ok": False, "why": text[-2000:]}
    m.kernels.write_text(text)
    kernels = list(csv.DictReader(text.splitlines()))
    sm90 = [k for k in kernels if k["backend"] == "sm90"]
    without = [called(k) for k in sm90 if k["loop_hgmma"] == "0"]
    spilling = [
        called(k)
        for k in sm90
        if k["features"].startswith("none")
        and int(k["loop_local"]) > 0.01 * int(k["loop_instructions"])
    ]
    wrong = ["no kernels of sm90"] if m.arch == "90a-real" and not sm90 else []
    wrong += [f"no wgmma in the main loop: {name}" for name in without]
    wrong += [f"spills in the main loop: {name}" for name in spilling]
    part: Part = {"ok": not wrong, "seconds": round(seconds)}
    part |= {"kernels": len(kernels), "sm90": len(sm90), "sm90_without_wgmma": len(without)}
    part["local_in_main_loops"] = {
        name: sum(k["loop_local"] != "0" for k in kernels if k["backend"] == name)
        for name in ("sm80", "sm90")
    }
    return part | ({"why": "\n".join(wrong)} if wrong else {})


def called(kernel: dict[str, str]) -> str:
    names = ("backend", "op", "dtype", "head_dim", "mask", "features", "tile")
    return " ".join(kernel[name] for name in names)


def ctest(m: Machine) -> Part:
    """The device contract in C++. The rest of ctest needs no GPU: `make test` runs it."""
    if not (m.build / "tests" / "cpp").exists():
        return {"ok": True, "skipped": "no GoogleTest"}
    report = m.logs / "ctest.xml"
    command = ["ctest", "--test-dir", str(m.build), "-R", "^Device\\.", "--timeout", "120"]
    command += ["--output-on-failure", "--output-junit", str(report)]
    status, _, seconds = m.run("ctest", command, limit=600)
    return {"ok": status == 0, "seconds": round(seconds), **junit(report)}


def pytest(m: Machine) -> Part:
    """Everything that runs on a GPU. What is timed against a sleeping stream runs by itself."""
    parts = []
    # So many processes share a GPU's memory; tests/python/conftest.py deals them out.
    workers = max(2, min(m.jobs, 16 * len(m.cards)) - 2)
    parallel = ["-n", str(workers), "--dist", "worksteal"] if has_module("xdist") else []
    words = " or ".join(backends(m))
    shared = {}  # for many processes; one alone sees all GPUs
    if parallel:
        threads = max(1, m.jobs // workers)
        shared = {"OMP_NUM_THREADS": str(threads), "FLASHSDK_TEST_GPUS": ",".join(m.cards)}
    for name, arguments, env in (
        (
            "pytest",
            ["tests/python", "--ignore=tests/python/test_gpu.py", "-k", words, *parallel],
            shared,
        ),
        ("pytest_gpu", ["tests/python/test_gpu.py", "-k", words], {}),
    ):
        report = m.logs / f"{name}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *arguments]
        status, text, seconds = m.run(name, command, limit=1800, **env)
        skips = [line for line in text.splitlines() if line.startswith("SKIPPED")]
        part = {"ok": status == 0, "seconds": round(seconds), **junit(report), "skips": skips}
        part["files"] = passed_of_files(report)
        if status != 0:
            part["why"] = "\n".join(x for x in text.splitlines() if x.startswith(("FAILED", "E  ")))
        parts.append(part)
    total = {key: sum(p.get(key, 0) for p in parts) for key in ("seconds", *COUNTS)}
    reasons = [skip for p in parts for skip in p["skips"]]
    why = "\n".join(p["why"] for p in parts if "why" in p)
    files = {name: n for p in parts for name, n in p["files"].items()}
    part = {"ok": all(p["ok"] for p in parts), **total, "files": files, "skips": reasons}
    return part | ({"why": why[:4000]} if why else {})


COUNTS = ("passed", "failed", "skipped")


def junit(path: Path) -> Part:
    if not path.exists():
        return dict.fromkeys(COUNTS, 0)
    tests = failed = skipped = 0
    root = ElementTree.parse(path).getroot()
    for suite in [root] if root.tag == "testsuite" else list(root):
        tests += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0)) + int(suite.get("disabled", 0))
    return {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped}


def passed_of_files(report: Path) -> dict[str, int]:
    """How many tests of each file passed: which interfaces have run on a GPU."""
    if not report.exists():
        return {}
    passed: dict[str, int] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is None and case.find("error") is None:
            module = re.match(r"tests\.python\.(\w+)", case.get("classname", ""))
            if module and case.find("skipped") is None:
                passed[module[1]] = passed.get(module[1], 0) + 1
    return dict(sorted(passed.items()))


def side_by_side(
    m: Machine, name: str, command: list[str], workers: int, *, limit: float
) -> list[tuple[int, str, float]]:
    """What came of the same command in so many processes, which draw seeds of their own."""
    with ThreadPoolExecutor(workers) as pool:
        jobs = [
            pool.submit(
                m.run, f"{name}_{i}", command, limit=limit, OMP_NUM_THREADS="1", **m.on_card(i)
            )
            for i in range(workers)
        ]
        return [job.result() for job in jobs]


def verify(m: Machine) -> Part:
    """Random problems against float64, in as many processes as there are cores."""
    workers = max(1, m.jobs - 2)
    part: Part = {"ok": True, "seconds": 0.0, "problems": {}, "refused": {}, "seeds": {}}
    for backend in backends(m):
        each = -(-m.problems // workers)
        command = [sys.executable, "-m", "flashsdk", "verify", "--count", str(each)]
        command += ["--backend", backend]
        done = side_by_side(m, f"verify_{backend}", command, workers, limit=1800)
        texts = [text for _, text, _ in done]
        part["problems"][backend] = sum(count(r"^(\d+) problems? in", text) for text in texts)
        part["refused"][backend] = sum(count(r"^(\d+) not run: ", text) for text in texts)
        part["seeds"][backend] = [count(r"from seed (\d+) on", text) for text in texts]
        part["seconds"] += max(seconds for _, _, seconds in done)
        failures = [text[text.find("FAILED") :] for status, text, _ in done if status != 0]
        if failures:
            part["ok"], part["why"] = False, "\n".join(failures)[:4000]
    part["seconds"] = round(part["seconds"])
    return part


def soak(m: Machine) -> Part:
    """Launches by the hundred thousand, in a few processes: they are other load to each other."""
    if "sm90" not in backends(m):
        return {"ok": True, "skipped": "no sm90 kernels to hold against those of sm80"}
    workers = max(1, min(m.jobs - 1, SOAKERS * len(m.cards)))
    script = ROOT / "scripts" / "soak.py"
    command = [sys.executable, str(script), "--launches", str(-(-m.launches // workers))]
    command += ["--seconds", str(m.soak_seconds)]
    done = side_by_side(m, "soak", command, workers, limit=m.soak_seconds + 120)
    part: Part = {"ok": True, "asked": m.launches, "seconds": 0, "workers": workers}
    part |= dict.fromkeys(("launches", "problems", "repeated", "refused"), 0)
    part |= {"shares": {}, "failures": [], "seeds": []}
    for status, text, _ in done:
        if status not in (0, 1) or not text.rstrip().endswith("}"):
            part["ok"] = False
            part["why"] = f"{part.get('why', '')}soak.py, {status}: {text[-1500:]}\n"
            continue
        found = json.loads(text.splitlines()[-1])
        part["seeds"].append(found["first_seed"])
        part["seconds"] = max(part["seconds"], round(found["seconds"]))
        for key in ("launches", "problems", "repeated", "refused"):
            part[key] += found[key]
        for pair, shares in found["shares"].items():
            largest = part["shares"].setdefault(pair, dict.fromkeys(shares, 0.0))
            for name, share in shares.items():
                largest[name] = max(largest[name], round(share, 3))
        part["failures"] += found["failures"]
    if part["failures"]:
        few = [f"seed {f['seed']}: {f['what']}" for f in part["failures"][:10]]
        few.append(f"repeat: python3 scripts/soak.py --seed {part['failures'][0]['seed']}")
        part["ok"], part["why"] = False, part.get("why", "") + "\n".join(few)
    part["failures"] = [f["seed"] for f in part["failures"]]
    if part["ok"] and part["launches"] == 0:
        part["ok"], part["why"] = False, "soak: nothing was launched"
    return part


UNSHOWN = ("why", "seeds", "failures")  # while the steps run
# Processes a GPU, which take turns: most of a problem's time is the host's. 9 GB each, at most
SOAKERS = 6


def count(pattern: str, text: str) -> int:
    return sum(int(n) for n in re.findall(pattern, text, re.M))


def sanitizer(m: Machine) -> Part:
    """Every kernel family of the harness on a small problem, under each tool."""
    if m.sanitizer is None:
        return {"ok": True, "skipped": "no compute-sanitizer"}
    status, text, _ = m.run("sanitizer_version", [m.sanitizer, "--version"], limit=60)
    found = re.search(r"^Version (\d+\.\d[\d.]*)", text, re.M)
    if status != 0 or found is None:
        return {"ok": False, "why": f"compute-sanitizer --version, {status}: {text[-2000:]}"}
    version = found[1]
    status, text, _ = m.run("families", [*touch_kernels(m), "--list"], limit=120)
    families = set(re.findall(r"^sm\d+_\S+$", text, re.M))  # there may be warnings among them
    if status != 0 or not families:
        return {"ok": False, "why": f"touch_kernels.py --list, {status}: {text[-2000:]}"}
    start = time.monotonic()
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        done = dict(zip(TOOLS, pool.map(lambda tool: watch(m, tool, version), TOOLS), strict=True))
    part: Part = {"ok": True, "seconds": round(time.monotonic() - start), "version": version}
    for tool, results in done.items():
        texts = [text for _, text, _ in results]
        finished = {name for text in texts for name in re.findall(r"^done (\S+):", text, re.M)}
        left_out = {name for name in families if not re.search(checked(tool, version), name)}
        reports = [line for text in texts for line in reported(text)]
        missing = sorted(families - left_out - finished)
        part[tool] = {
            "kernels": sum(count(r"^touched (\d+) kernels", text) for text in texts),
            "clean": not missing
            and all(status == 0 and clean(text) for status, text, _ in results),
        }
        if left_out:
            oldest = ".".join(map(str, RACECHECK_OF_SM90))
            part[tool]["left_out"] = f"{len(left_out)} families of sm90, which need {oldest}"
        if not part[tool]["clean"]:
            part["ok"] = False
            lines = [*reports[:20], *(f"did not finish: {name}" for name in missing)]
            part["why"] = "\n".join([*part.get("why", "").splitlines(), f"{tool}:", *lines])
    return part


# Before it, racecheck does not see all that orders the warps of these kernels: docs/dev/gpu.md.
RACECHECK_OF_SM90 = (2026, 4)


def checked(tool: str, version: str) -> str:
    """Regular expression of the families that a tool can judge."""
    known = tuple(int(n) for n in version.split(".")[:2]) >= RACECHECK_OF_SM90
    return "" if tool != "racecheck" or known else "^(?!sm90)"


def watch(m: Machine, tool: str, version: str) -> list[tuple[int, str, float]]:
    """What came of the processes that share the list; after one that failed another goes on."""
    claims = m.logs / f"claims_{tool}"
    shutil.rmtree(claims, ignore_errors=True)
    claims.mkdir()
    command = [str(m.sanitizer), "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    command += [*touch_kernels(m), "--claims", str(claims), "--only", checked(tool, version)]

    def one(shard: int) -> list[tuple[int, str, float]]:
        results: list[tuple[int, str, float]] = []
        while not results or (results[-1][0] not in (0, 124) and "\nfamily " in results[-1][1]):
            name = f"{tool}_{shard}_{len(results)}"
            results.append(m.run(name, command, limit=SANITIZER_LIMIT, **m.on_card(shard)))
        return results

    shards = max(1, int(m.jobs * TOOLS[tool]))
    with ThreadPoolExecutor(shards) as pool:
        return [result for results in pool.map(one, range(shards)) for result in results]


def touch_kernels(m: Machine) -> list[str]:
    script = ROOT / "tests" / "cpp" / "gpu" / "touch_kernels.py"
    return [sys.executable, str(script), str(m.build / "libflashsdk_gpu_harness.so")]


def clean(text: str) -> bool:
    """What a tool says that watched: one that could not attach is silent."""
    return re.search(r"(ERROR SUMMARY: 0 errors|SUMMARY: 0 hazards)", text) is not None


def short(line: str) -> str:
    """Without the kernel's name, which the family says, but with the place in its code."""
    return re.sub(r" at (?:void )?flashsdk::.*(\+0x)", r" at \1", line)


def reported(text: str) -> list[str]:
    """The first lines of a tool's reports, each after the family that it is of."""
    lines, family = [], ""
    for line in text.splitlines():
        family = line if line.startswith("family ") else family
        if re.match(r"========= .*(rror|Race|nvalid|azard)", line) and "SUMMARY" not in line:
            lines.append(f"{family}: {short(line)}")
    return list(dict.fromkeys(lines))


def overhead(m: Machine) -> Part:
    """Host time of one call of the Python API with torch tensors."""
    script = ROOT / "benchmarks" / "host_overhead.py"
    status, text, _ = m.run("overhead", [sys.executable, str(script)], limit=300)
    if status != 0:
        return {"ok": False, "why": text[-2000:]}
    return {"ok": True, **json.loads(text.splitlines()[-1])}


STEPS: dict[str, Callable[[Machine], Part]] = {
    "build": build,
    "machine_code": machine_code,
    "ctest": ctest,
    "pytest": pytest,
    "verify": verify,
    "soak": soak,
    "sanitizer": sanitizer,
    "overhead": overhead,
}


def backends(m: Machine) -> list[str]:
    """The GPU backends that this build has kernels of."""
    code = "import flashsdk as fs; print(*sorted({k['backend'] for k in fs.kernels()} - {'cpu'}))"
    _, text, _ = m.run("backends", [sys.executable, "-c", code], limit=60)
    return text.split()


def has_module(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def records() -> ModuleType:
    """Only where the extension is built."""
    sys.path.insert(0, str(ROOT / "python"))
    from flashsdk._commands import gpu_record

    return gpu_record


def header(m: Machine) -> Part:
    """Written before the steps: the kernels as they are now."""
    return {
        **records().header("gpu_tests", m.device),
        "gpus": m.gpus,
        "nvcc": nvcc_version(m.build),
        "built": built(m),
    }


def nvcc_version(build: Path) -> str | None:
    """Of the compiler that CMake took, which need not be that of the path."""
    files = build.glob("CMakeFiles/*/CMakeCUDACompiler.cmake")  # one of each CMake that was here
    for file in sorted(files, key=lambda file: -file.stat().st_mtime):
        found = re.search(r'^set\(CMAKE_CUDA_COMPILER_VERSION "(\d+\.\d+)', file.read_text(), re.M)
        if found:
            return found[1]
    return None


def resumed(out: Path) -> Part:
    """The record there, if it is of the kernels as they are now; its build is still in place."""
    record: Part = json.loads(out.read_text())
    if record["kernel_sources"] != records().sources_hash():
        sys.exit(f"test_gpu: {out} is of other kernels than these; run the build step again")
    return record


def built(m: Machine) -> Part:
    """Of each GPU backend the dtypes and head dimensions of this build."""
    code = """
import json
import flashsdk as fs
found = {}
for k in fs.kernels():
    if k["backend"] != "cpu":
        of = found.setdefault(k["backend"], {"kernels": 0, "dtypes": [], "head_dims": []})
        of["kernels"] += 1
        for name, value in (("dtypes", k["dtype"]), ("head_dims", k["head_dim"])):
            of[name] = sorted({*of[name], value})
print(json.dumps(found))
"""
    _, text, _ = m.run("built", [sys.executable, "-c", code], limit=60)
    found: Part = json.loads(text.splitlines()[-1])
    return found


def write(m: Machine, out: Path, record: Part, parts: dict[str, Part], name: str) -> Part:
    """One more step into the record, and all steps: also those that others have written since."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(m.build / "record.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if name != "build" and out.exists():
            now = json.loads(out.read_text())
            if now["kernel_sources"] == record["kernel_sources"]:
                parts = {**parts, **now["steps"], name: parts[name]}
        steps = {key: parts[key] for key in STEPS if key in parts}
        ok = all(p["ok"] for p in steps.values())
        whole = {**record, "ok": ok, "complete": set(steps) == set(STEPS), "steps": steps}
        new = out.with_suffix(".new")
        new.write_text(json.dumps(whole, indent=1) + "\n")
        new.replace(out)
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default="benchmarks/results/gpu_tests.json", help="the record")
    parser.add_argument("--logs", help="folder (default: inside the build folder)")
    parser.add_argument("--build-dir", default="build/gpu")
    parser.add_argument("--problems", type=int, default=2000, help="of verify, for each backend")
    parser.add_argument("--launches", type=int, default=200_000, help="of soak")
    parser.add_argument("--soak-seconds", type=float, default=600, help="most that soak may take")
    parser.add_argument("--sanitizer", help="compute-sanitizer (default: the one in PATH)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--resume", action="store_true", help="add to the record of these kernels")
    parser.add_argument("cmake_args", nargs="*", help="CMake options, after --")
    args = parser.parse_args()
    m = Machine(args)
    record = resumed(Path(args.out)) if args.resume else {}
    parts: dict[str, Part] = record.get("steps", {})
    for name, step in STEPS.items():
        if name not in args.steps:
            continue
        print(f"== {name}", flush=True)
        start = time.monotonic()
        before = parts.get(name, {}) if name == "build" else {}  # its seconds, of the same kernels
        try:
            parts[name] = {**before, **step(m)}
        except Exception as e:
            parts[name] = {"ok": False, "why": f"{type(e).__name__}: {e}"}
        part = parts[name]
        shown = {k: v for k, v in part.items() if k not in UNSHOWN}
        print(f"   {shown}  ({time.monotonic() - start:.0f} s)", flush=True)
        if "why" in part:
            print(part["why"], flush=True)
        if name == "build":
            if not part["ok"]:
                return 1
            record = header(m)
        if record:
            parts = write(m, Path(args.out), record, parts, name)
    ok = all(p["ok"] for p in parts.values())
    print(f"{'passed' if ok else 'FAILED'}: {args.out}" if record else "no record without a build")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
