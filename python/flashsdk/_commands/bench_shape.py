"""``bench --shape``: a problem of the user's own, beside what else is here for it.

Ours and each peer are timed in turns, forward and backward, and so is what the machine can do at
most: the roof of a picture.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import flashsdk as fs
from flashsdk._commands import INTERRUPTED, figures, gpu_record, machine, roof
from flashsdk._commands.files import writable_folder
from flashsdk._commands.shape_peers import Problem, Runner, Shape, make, read_mask, runners
from flashsdk._commands.standard import have_torch
from flashsdk._commands.table import percent, seconds, text_table, times
from flashsdk._commands.timing import Call, Interleaved
from flashsdk._commands.verify import check_backend
from flashsdk._errors import InvalidArgument

Record = dict[str, Any]
ROUNDS, SECONDS, SLICE = 15, 8.0, 0.1
QUICK = 5, 0.6, 0.02


def run(
    shape: tuple[int, ...],
    mask: str,
    dtype: str | None,
    *,
    backend: fs.Backend,
    quick: bool,
    out: str,
) -> int:
    """Measures, prints a table, and writes a record and a picture into the folder ``out``."""
    check_backend(backend, None)
    on_gpu = backend != "cpu"
    if on_gpu and dtype == "fp32":
        raise InvalidArgument("--dtype: fp32; bf16 or fp16 on a GPU")
    folder = writable_folder("--out", Path(out))
    if have_torch():
        _prepare(on_gpu)
    problem = make(Shape(*shape), read_mask(mask), dtype or ("bf16" if on_gpu else "fp32"), backend)
    found, left_out = runners(problem)
    record: Record = {
        **_header(on_gpu),
        **{
            "backend": backend,
            "quick": quick,
            "shape": asdict(problem.shape),
            "mask": mask,
            "dtype": problem.dtype,
        },
        "kernel": _kernels(problem),
        "left_out": left_out,
        "roof": {},
        "rows": [],
    }
    try:
        for op in ("fwd", "bwd"):
            limits, rows = measure(problem, found, op, quick)
            record["roof"][op] = asdict(limits)
            record["rows"] += rows
    except KeyboardInterrupt:
        print("stopped by Ctrl-C: no record")
        return INTERRUPTED
    print(describe(record))
    stem = f"{backend}_shape" if on_gpu else f"cpu_{record['isa']}_shape"
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {path}")
    print(figures.save(figures.roofline, record, folder / f"{stem}.png"))
    return 0


def _prepare(on_gpu: bool) -> None:
    """PyTorch: before it makes a tensor, as the stream is another for all that follows."""
    import torch

    if on_gpu:
        stream: Any = torch.cuda.Stream
        torch.cuda.set_stream(stream())  # the default one cannot be captured
    else:
        torch.set_num_threads(fs.get_num_threads())  # of JAX there is no such way


def _header(on_gpu: bool) -> Record:
    if not on_gpu:
        return machine.record_header("bench_shape")
    import torch

    return gpu_record.header("bench_shape", torch.cuda.get_device_name())


def _kernels(problem: Problem) -> dict[str, str | None]:
    q, k, v, _ = problem.arrays
    how: Any = {"mask": problem.mask, "backend": problem.backend}
    return {
        "fwd": fs.explain(q, k, v, op="fwd", **how).kernel,
        "bwd": fs.explain(q, k, v, op="bwd", **how).kernel,
    }


def measure(
    problem: Problem, found: dict[str, Runner], op: str, quick: bool
) -> tuple[roof.Roof, list[Record]]:
    """What the machine can do at most, and a row for each who computes the problem."""
    yardstick = (roof.of_gpu if problem.on_gpu else roof.of_cpu)(problem.dtype)
    calls: dict[str, Call] = {
        **yardstick.calls,
        **{name: r.forward if op == "fwd" else r.backward for name, r in found.items()},
    }
    samples = (gpu_samples if problem.on_gpu else cpu_samples)(calls, quick)
    limits = yardstick.roof(samples)
    intensity = problem.flops(op) / problem.bytes(op)
    mine = statistics.median(samples["flashsdk"])
    rows = []
    for name in found:
        low, middle, high = quartiles(samples[name])
        rate = problem.flops(op) / middle
        rows.append(
            {"op": op, "name": name, "samples": samples[name], "seconds": middle}
            | {"quartiles": [low, high], "gflops": rate / 1e9, "intensity": intensity}
            | {"of_roof": rate / limits.limit(intensity), "of_ours": middle / mine}
        )
    return limits, rows


def cpu_samples(calls: dict[str, Call], quick: bool) -> dict[str, list[float]]:
    """Seconds of a call, in slices."""
    rounds, budget, piece = QUICK if quick else (ROUNDS, SECONDS, SLICE)
    return Interleaved(calls, slice=piece).run(rounds, budget * len(calls) / 2)


def gpu_samples(calls: dict[str, Call], quick: bool) -> dict[str, list[float]]:
    """Seconds of a call by CUDA's events, the host's not among them."""
    from flashsdk._commands import gpu_timing

    prepared, _ = gpu_timing.prepared(calls, gpu_timing.SAMPLE_MS)
    found = gpu_timing.measured(prepared, QUICK[0] if quick else ROUNDS)
    return {name: [ms / 1e3 for ms in samples] for name, samples in found.items()}


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def describe(record: Record) -> str:
    header = ["", "op", "median", "quartiles", "samples", "GFLOP/s", "of roof", "time / ours"]
    rows = [
        [
            row["name"],
            row["op"],
            seconds(row["seconds"]),
            " to ".join(map(seconds, row["quartiles"])),
            str(len(row["samples"])),
            f"{row['gflops']:.0f}",
            percent(row["of_roof"]),
            times(row["of_ours"]),
        ]
        for row in record["rows"]
    ]
    lines = [
        f"flashsdk {record['flashsdk']} on {figures.where(record)}",
        figures.problem(record),
        *(f"{op}: {kernel}" for op, kernel in record["kernel"].items()),
        "",
        text_table([header], rows, 2),
        *(f"roof: {op}: {_roof(record, op)}" for op in record["roof"]),
    ]
    lines += [f"not timed: {name}: {why}" for name, why in record["left_out"].items()]
    return "\n".join(lines)


def _roof(record: Record, op: str) -> str:
    """In words, with what bounds a call of such an intensity."""
    limits = roof.Roof(**record["roof"][op])
    intensity = next(row["intensity"] for row in record["rows"] if row["op"] == op)
    bound = "products" if limits.limit(intensity) == limits.flops else "memory"
    return (
        f"{limits.flops / 1e9:.0f} GFLOP/s of products, {limits.bytes / 1e9:.0f} GB/s of memory; "
        f"{intensity:.0f} FLOPs a byte: bound by {bound}"
    )
