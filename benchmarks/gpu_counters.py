"""What the hardware counts while a dense cell of ours runs: Nsight Compute's, kernel by kernel.

    python3 benchmarks/gpu_counters.py [--out benchmarks/results/gpu_counters.csv]
                                       [--cells fwd:128:none:4096 bwd:256:causal:512]

Each call runs once behind a mark, on random numbers; of a backward all of its kernels. Percent are
of what the unit can do in the kernel's cycles: the busiest of a multiprocessor's pipes, the
schedulers' issue slots, L1 with shared memory, L2, memory. ncu holds the clock and empties the
caches before each kernel: for times see gpu_bounds.py, whose cells these are.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import torch
from gpu_bounds import CELLS, named, write
from gpu_calls import TOKENS, WIDTH, backends, fs, ours, tensors

OF_PEAK = "avg.pct_of_peak_sustained"
COUNTERS = {
    "gpu__time_duration.sum": "microseconds",
    f"sm__throughput.{OF_PEAK}_elapsed": "busiest_pipe_percent",
    f"smsp__issue_active.{OF_PEAK}_elapsed": "issue_slots_percent",
    f"l1tex__throughput.{OF_PEAK}_elapsed": "l1_percent",
    f"lts__throughput.{OF_PEAK}_elapsed": "l2_percent",
    f"dram__throughput.{OF_PEAK}_elapsed": "memory_percent",
    "lts__t_bytes.sum": "l2_mb",
    "dram__bytes_read.sum": "memory_read_mb",
    "dram__bytes_write.sum": "memory_written_mb",
}
SCALE = {"microseconds": 1e-3} | {
    f"{name}_mb": 1e-6 for name in ("l2", "memory_read", "memory_written")
}
MARK = "spin_kernel"  # what torch.cuda._sleep launches
Row = dict[str, Any]


def child(cells: list[str]) -> None:
    for cell in cells:
        op, dim, causal, seqlen = named(cell)
        x = tensors(TOKENS // seqlen, seqlen, WIDTH // dim, dim, torch.bfloat16)
        backend = backends()[-1]
        run = ours(x, backend, mask=fs.Causal() if causal else None)[op, backend]
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def profiler() -> str:
    folders = sorted(Path("/opt/nvidia/nsight-compute").glob("*"))
    path = ":".join(["/usr/local/cuda/bin", *map(str, folders)])
    found = shutil.which("ncu") or shutil.which("ncu", path=path)
    if found is None:
        sys.exit("gpu_counters: no Nsight Compute (ncu) in PATH")
    return found


def counted(ncu: str, cells: list[str]) -> list[Row]:
    command = [ncu, "--profile-from-start", "off", "--metrics", ",".join(COUNTERS), "--csv"]
    command += ["--print-units", "base", sys.executable, __file__, "--child", "--cells", *cells]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode != 0 or not lines:
        sys.exit(f"gpu_counters: ncu, {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    rows: list[Row] = []
    seen, last, left = False, None, iter(cells)
    for line in csv.DictReader(io.StringIO("\n".join(lines))):
        if MARK in line["Kernel Name"]:
            if line["ID"] != last:
                op, dim, causal, seqlen = named(next(left))
                cell = {"op": op, "head_dim": dim, "mask": "causal" if causal else "none"}
                cell["seqlen"] = seqlen
            seen, last = True, line["ID"]
            continue
        if not seen:
            continue
        if line["ID"] != last:
            kernel = line["Kernel Name"].partition("<")[0].rpartition("::")[2]
            rows.append({**cell, "kernel": kernel.partition("(")[0]})
        last = line["ID"]
        column = COUNTERS[line["Metric Name"]]
        value = float(line["Metric Value"].replace(",", "")) * SCALE.get(column, 1)
        rows[-1][column] = round(value, 1)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_counters.csv"))
    parser.add_argument("--cells", nargs="+", default=CELLS, help="op:head_dim:mask:seqlen")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.cells)
        return 0
    rows = counted(profiler(), args.cells)
    for row in rows:
        print(row)
    write(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
