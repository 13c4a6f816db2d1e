"""Bytes that attention moves: what flashsdk.io counts, beside what the hardware counted.

The claim (FlashAttention, arXiv 2205.14135, section 3.2 and figure 2): tiled attention is fast
because it moves fewer bytes between the GPU's memory and its chip.

    python examples/paper/traffic.py            # needs a GPU and Nsight Compute (ncu); --minutes N
    python examples/paper/traffic.py --smoke    # the counts alone: seconds, no GPU

For GPT-2 medium's attention and four other problems, standard attention and flashsdk, forward and
backward: bytes of ``flashsdk.io``, and of ncu's counters. "read" and "written" are of memory,
beside dram__bytes_read and dram__bytes_write. "asked_of_l2" is what flashsdk reads from L2, beside
what the multiprocessors "received" (l1tex__m_xbar2l1tex_read_bytes). "l2" is lts__t_bytes.
ncu empties the caches before every kernel, so that an operation finds nothing of the one before it:
just what the counts suppose. Tiles of other sizes: tiles.py.

Each problem is a run of ncu. One that fails, for want of the right to read counters or of time,
leaves the counts alone for its problem, and the next run of the program tries it again. What it
said is in ``ncu-*.log``.
"""

from __future__ import annotations

import argparse
import csv
import io as text_io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attention
import common
import flashsdk as fs
import torch
from attention import Bench, Problem
from common import Clock, Record, Row
from flashsdk import io

PROBLEMS = (
    attention.GPT2_MEDIUM,
    Problem("short", 128, 512, heads=16),
    Problem("head_dim 128", 8, 2048, heads=16, head_dim=128, causal=True),
    Problem("4K, causal", 4, 4096, heads=16, causal=True),
    Problem("16K", 1, 16384, heads=8),
)
METHODS = ("standard", "flashsdk")
PHASES = ("forward", "backward")
COUNTERS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "l1tex__m_xbar2l1tex_read_bytes.sum",
)
BETWEEN = "spin_kernel"  # what torch.cuda._sleep launches: it stands between two cases
DONE = "every case has run"  # a child's last line


CASES = [(method, phase) for method in METHODS for phase in PHASES]


# ---- counted


def shapes(problem: Problem) -> io.Problem:
    return io.Problem(
        problem.batch, problem.seqlen, problem.seqlen, problem.heads, problem.head_dim
    )


def tile(problem: Problem, phase: str, device: str) -> tuple[int, int]:
    """Of the kernel that the call takes."""
    kind = torch.bfloat16 if device != "cpu" else torch.float32
    # With the strides of the measured call, by which kernels are chosen too; never read.
    shape = (problem.batch, problem.seqlen, problem.heads, problem.head_dim)
    x = torch.empty(shape, dtype=kind, device=device)
    op = "fwd" if phase == "forward" else "bwd"
    mask = fs.Causal() if problem.causal else None
    found = fs.explain(x, x, x, op=op, mask=mask, dropout_p=problem.dropout)
    if not found.kernel:
        sys.exit(f"{problem.name}, {phase}: {found}".replace("\n", ";"))
    return found.tile


def cache(device: str) -> io.Cache:
    if torch.device(device).type != "cuda":
        return io.Cache(50 << 20, 132)  # an H100's
    found = torch.cuda.get_device_properties(device)
    return io.Cache(found.L2_cache_size, found.multi_processor_count)


def asked(tiled: io.Traffic) -> int:
    """What is read from L2. L2 itself adds to dQ's sum: nothing of that comes back."""
    return sum(step.read for step in tiled.steps if step.name != "dQ's sum")


def counted(problem: Problem, method: str, phase: str, device: str) -> Row:
    """What memory moves, and what flashsdk reads from L2."""
    given = shapes(problem)
    if method == "standard":
        count = io.standard_forward if phase == "forward" else io.standard_backward
        traffic = count(given, mask=problem.causal, dropout=problem.dropout > 0)
        return {"read": traffic.read, "written": traffic.written}
    mask = fs.Causal() if problem.causal else None
    size = tile(problem, phase, device)
    tiled = io.tiled_forward if phase == "forward" else io.tiled_backward
    traffic = tiled(given, size, mask=mask, cache=cache(device))
    found = {"read": traffic.read, "written": traffic.written}
    return {**found, "asked_of_l2": asked(tiled(given, size, mask=mask))}


# ---- measured


def child(problem: Problem) -> None:
    """Runs every case once behind a mark, under ncu, which counts where it is told to."""
    for method, phase in CASES:
        one(Bench(attention.METHODS[method], problem, "cuda"), phase)
        torch.cuda.empty_cache()
    print(DONE, flush=True)


def one(bench: Bench, phase: str) -> None:
    out = bench.forward()  # makes what is made once, such as the mask of standard attention
    if phase == "forward":
        marked(bench.forward)
    else:
        marked(lambda: torch.autograd.grad(out, bench.inputs, bench.dout))


def marked(call: Callable[[], object]) -> None:
    """A case behind its mark, the only part of a program that is counted."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profiler() -> str | None:
    """ncu, where it is found: it comes with CUDA, whose folder need not be on the PATH."""
    places = ("/usr/local/cuda/bin", *map(str, Path("/opt/nvidia/nsight-compute").glob("*")))
    return shutil.which("ncu") or shutil.which("ncu", path=os.pathsep.join(places))


def measured(ncu: str, program: list[str], cases: int, log: Path, clock: Clock) -> list[Row]:
    """The counters' sums of each case of a Python program, in their order; of none if ncu fails."""
    command = [ncu, "--profile-from-start", "off", "--metrics", ",".join(COUNTERS), "--csv"]
    command += ["--print-units", "base", "--clock-control", "none"]
    command += [sys.executable, *program]
    try:
        found = split(run(command, log, clock))
    except ValueError:  # a counter that has no number
        found = []
    if len(found) != cases or not all(case["kernels"] for case in found):
        print(f"no counters, see {log}", file=sys.stderr)
        return []
    return found


def run(command: list[str], log: Path, clock: Clock) -> str:
    """What a child printed, or "" where it did not come to its end, or the minutes are over.

    Not by its exit status: PyTorch may abort a process that ends while autograd's threads wait.
    """
    with log.open("w") as file:
        # A session of its own, as ncu does not end the program that it watches.
        started = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while started.poll() is None and not clock.over():
                time.sleep(0.05)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    text = log.read_text(errors="replace")
    return text if DONE in text.splitlines() else ""


def split(output: str) -> list[Row]:
    """ncu's CSV, whose kernels are in order, cut where the kernel between two cases is."""
    # Its messages stand between the lines of the table.
    lines = [line for line in output.splitlines() if line.startswith('"')]
    found: list[Row] = []
    last = None
    for line in csv.DictReader(text_io.StringIO("\n".join(lines))):
        if BETWEEN in line["Kernel Name"]:
            if line["ID"] != last:
                found.append(dict.fromkeys(COUNTERS, 0) | {"kernels": 0})
            last = line["ID"]
            continue
        if not found:
            raise ValueError(f"{line['Kernel Name']} before the first {BETWEEN}")
        case = found[-1]
        case["kernels"] += line["ID"] != last
        last = line["ID"]
        case[line["Metric Name"]] += round(float(line["Metric Value"].replace(",", "")))
    return found


def summary(rows: list[Row]) -> str:
    """How much less flashsdk moves on GPT-2 medium, and how far counts and counters are apart."""
    gpt2 = [row for row in rows if row.get("name") == "GPT-2 medium"]
    sums = {m: sum(r["read"] + r["written"] for r in gpt2 if r["method"] == m) for m in METHODS}
    text = f"GPT-2 medium: {sums['standard'] / sums['flashsdk']:.1f}× fewer by the counts"
    seen = {m: sum(r.get("dram") or 0 for r in gpt2 if r["method"] == m) for m in METHODS}
    if all(seen.values()):
        text += f", {seen['standard'] / seen['flashsdk']:.1f}× by the counters"
        apart = [abs((r["read"] + r["written"]) / r["dram"] - 1) for r in rows if r.get("dram")]
        text += f"; counts and counters of memory at most {100 * max(apart):.0f} % apart"
        ours = [row for row in rows if row["method"] == "flashsdk"]
        if all(row.get("received") for row in ours):
            apart = [abs(row["asked_of_l2"] / row["received"] - 1) for row in ours]
            text += f", of what flashsdk reads from L2 {100 * max(apart):.0f} %"
    return text


def seen_of(counters: Row) -> Row:
    """What of a case's counters a row has, nothing where there are none."""
    if not counters:
        return {}
    read, written, l2, received = (counters[name] for name in COUNTERS)
    dram = {"dram": read + written, "dram_read": read, "dram_written": written}
    return {**dram, "l2": l2, "received": received, "kernels": counters["kernels"]}


def rows_of(problem: Problem, counts: list[Row], seen: list[Row]) -> list[Row]:
    """The counts of a problem's cases, with the counters beside them where there are any."""
    rows = []
    for (method, phase), count, counters in zip(CASES, counts, seen or [{} for _ in CASES]):
        row: Row = {"name": problem.name, "method": method, "phase": phase}
        row |= count | seen_of(counters)
        rows.append(row)
        beside = f"; dram {row['dram'] / 1e6:10.1f}" if counters else ""
        print(
            f"{problem.name:14} {method:9} {phase:9} "
            f"counted, MB: {(row['read'] + row['written']) / 1e6:10.1f}{beside}"
        )
    return rows


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    problems = PROBLEMS[:2] if options.smoke else PROBLEMS
    if options.child:
        child(next(problem for problem in PROBLEMS if problem.name == options.child))
        return
    clock = Clock(options.minutes)
    out = common.folder(options.out, "traffic", options.smoke)
    settings = {"device": common.device_name(options.device)}
    record = Record.of(options, out, "traffic", settings)
    ncu = profiler() if torch.device(options.device).type == "cuda" else None
    if ncu is None:
        print("no GPU or no ncu here: the counts alone", file=sys.stderr)
    for problem in problems:
        if any(row["name"] == problem.name and row.get("received") for row in record.rows):
            continue
        counts = [counted(problem, *case, options.device) for case in CASES]
        seen: list[Row] = []
        if ncu and not clock.over(reserve=5):
            log = out / f"ncu-{problem.name.replace(' ', '-').replace(',', '')}.log"
            seen = measured(ncu, [__file__, "--child", problem.name], len(CASES), log, clock)
        record.rows[:] = [row for row in record.rows if row["name"] != problem.name]
        for row in rows_of(problem, counts, seen):
            record.row(**row)
        record.result["summary"] = summary(record.rows)
        record.save()
    print(record.result["summary"])
    record.save()


if __name__ == "__main__":
    common.entry(main)
