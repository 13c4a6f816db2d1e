"""A sequence over two GPUs by context_parallel, beside all of it on one: a JSON record.

    python benchmarks/context_parallel.py --out benchmarks/results/context_parallel_h100.json
    python benchmarks/context_parallel.py --smoke          # tiny, on a CPU

It starts two processes, one for each GPU. Forward, backward (torch.autograd.grad of what a forward
returned) and both together are timed in turns with the same calls of the whole sequence on one GPU,
in an order drawn anew each round. A call begins on both GPUs at once, behind an all-reduce and with
the host ahead, and it has taken what the slower of them took. One GPU's time is the mean of the
two, which run at the same time, as each bounds what both can do. Times are medians, with the 10th
and the 90th percentile, in milliseconds; "ratio" is the speed over twice that of one GPU.

Exactness: the largest difference of out and gradients from one GPU's, and of a short sequence that
of both from float64; all relative to the largest value.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))

import flashsdk as fs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from context_parallel_tables import KIND, PASSES
from flashsdk._commands import gpu_record
from flashsdk._commands.gpu_timing import drawn, hold, percentiles
from flashsdk._testing import naive
from flashsdk._testing.reference import Features
from flashsdk.torch import attention
from flashsdk.torch.distributed import context_parallel, shard_sequence, unshard_sequence
from torch import Tensor

PROCESSES = 2
GPU = {
    "seqlen": 65536,
    "small_seqlen": 2048,
    "heads": 16,
    "head_dims": (64, 128),
    "dtype": "bfloat16",
    "rounds": 9,
}
SMOKE = {**GPU, "seqlen": 64, "small_seqlen": 32, "heads": 2, "head_dims": (16,), "rounds": 2}
GOAL = 0.9  # of twice one GPU, forward and backward of a causal sequence
HOLD = 5e-3  # seconds in which the host queues what a GPU waits with: a call takes it less
MINUTES = 2  # until a process that waits for the other gives up
NAMES = ("out", "dq", "dk", "dv")
Run = Callable[[], Any]
Settings = dict[str, Any]


class Problem:
    """A sequence, whole and the part of this process."""

    def __init__(self, seqlen: int, heads: int, head_dim: int, dtype: torch.dtype, causal: bool):
        torch.manual_seed(head_dim)  # the same in both processes
        shape = (1, seqlen, heads, head_dim)
        *whole, self.dout = (torch.randn(shape, device=device(), dtype=dtype) for _ in range(4))
        self.mask = fs.Causal() if causal else None
        self.inputs = {
            "one": [x.requires_grad_() for x in whole],
            "two": [shard_sequence(x.detach()).requires_grad_() for x in whole],
        }
        self.douts = {"one": self.dout, "two": shard_sequence(self.dout)}

    def forward(self, who: str) -> Tensor:
        call: Any = attention if who == "one" else context_parallel
        return call(*self.inputs[who], mask=self.mask)  # type: ignore[no-any-return]

    def backward(self, who: str, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.inputs[who], self.douts[who], retain_graph=True)

    def results(self, who: str) -> list[Tensor]:
        """out, dq, dk, dv."""
        out = self.forward(who)
        return [out.detach(), *self.backward(who, out)]

    def runs(self) -> dict[tuple[str, str], Run]:
        runs: dict[tuple[str, str], Run] = {}
        for who in ("one", "two"):
            out = self.forward(who)
            runs[who, "forward"] = lambda w=who: self.forward(w)
            runs[who, "backward"] = lambda w=who, out=out: self.backward(w, out)
            runs[who, "both"] = lambda w=who: self.backward(w, self.forward(w))
        return runs


def device() -> torch.device:
    """Of this process."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else CPU


CPU = torch.device("cpu")


# ---- times


def timed(runs: dict[tuple[str, str], Run], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of each run in each round, all of them in turns."""
    once = once_on_gpu if device().type == "cuda" else once_on_cpu
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for number in range(rounds + 1):
        for key in drawn(runs, random.Random(number)):  # the same order in both processes
            ms = once(runs[key])
            if number > 0:  # the first warms up
                times[key].append(ms)
    return {key: joined(key[0], samples) for key, samples in times.items()}


def once_on_gpu(run: Run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    hold(HOLD)
    dist.all_reduce(torch.zeros(1, device=device()))  # both GPUs go on at once
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def once_on_cpu(run: Run) -> float:
    dist.barrier()
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def joined(who: str, samples: list[float]) -> list[float]:
    """Of both processes: the slower one's, where they work on one call."""
    both = torch.tensor(samples, device=device(), dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX if who == "two" else dist.ReduceOp.SUM)
    return (both if who == "two" else both / PROCESSES).tolist()  # type: ignore[no-any-return]


def rows_of(times: dict[tuple[str, str], list[float]], head_dim: int, causal: bool) -> list[Any]:
    rows = []
    for which in PASSES:
        row: dict[str, Any] = {"head_dim": head_dim, "causal": causal, "pass": which}
        for who in ("one", "two"):
            row[who] = dict(zip(("ms", "ms_p10", "ms_p90"), percentiles(times[who, which])))
        pairs = zip(times["one", which], times["two", which], strict=True)
        row["ratio"] = statistics.median(one / (PROCESSES * two) for one, two in pairs)
        row["goal"] = GOAL if causal and which == "both" else None
        rows.append(row)
    return rows


# ---- exactness


def beside_one(problem: Problem) -> list[dict[str, Any]]:
    """The largest difference of two GPUs from one, over both."""
    rows = []
    for name, one, two in zip(NAMES, *map(problem.results, ("one", "two")), strict=True):
        apart = (two - shard_sequence(one)).abs().max().float()
        dist.all_reduce(apart, dist.ReduceOp.MAX)
        rows.append({"tensor": name, "difference": float(apart / one.abs().max())})
    return rows


def beside_float64(problem: Problem) -> list[dict[str, Any]]:
    """How far from float64 two GPUs are, and one is."""
    want = in_float64(problem)
    one, two = problem.results("one"), list(map(unshard_sequence, problem.results("two")))
    return [
        {"tensor": name, "one": distance(a, exact), "two": distance(b, exact)}
        for name, a, b, exact in zip(NAMES, one, two, want, strict=True)
    ]


def in_float64(problem: Problem) -> list[Tensor]:
    """out, dq, dk, dv by the definition, and autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in problem.inputs["one"])
    visible: Any = None
    if problem.mask is not None:
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    by_heads = (x.transpose(1, 2) for x in (q, k, v))
    head = naive.Heads(Features(), *by_heads, None, None, q.shape[-1] ** -0.5)
    whole: Any = naive.attention(head, visible=visible, xp=torch)[0]
    out = whole.transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), problem.dout.double())]


def distance(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).abs().max() / exact.abs().max())


# ---- the processes


def work(rank: int, port: int, settings: Settings, out: Path | None) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    on_gpu = settings["on_gpu"]
    options: dict[str, Any] = {"timeout": datetime.timedelta(minutes=MINUTES)}
    if on_gpu:
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=PROCESSES, **options)
    record = measured(settings)
    dist.destroy_process_group()
    if rank == 0 and out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n")


def measured(settings: Settings) -> dict[str, Any]:
    """The record; the same in both processes but for what rounding of the host's makes of it."""
    on_gpu, dtype = device().type == "cuda", getattr(torch, settings["dtype"])
    record = gpu_record.header(KIND, torch.cuda.get_device_name() if on_gpu else "cpu")
    record |= {name: settings[name] for name in GPU if name != "head_dims"}
    if on_gpu:
        record["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        record["peer_access"] = torch.cuda.can_device_access_peer(0, 1)
    rows: dict[str, list[Any]] = {"rows": [], "beside_one": [], "beside_float64": []}
    for head_dim in settings["head_dims"]:
        for causal in (True, False):
            cell = {"head_dim": head_dim, "causal": causal}
            sizes = (settings["heads"], head_dim, dtype, causal)
            small = beside_float64(Problem(settings["small_seqlen"], *sizes))
            rows["beside_float64"] += [cell | row for row in small]
            problem = Problem(settings["seqlen"], *sizes)
            rows["beside_one"] += [cell | row for row in beside_one(problem)]
            times = rows_of(timed(problem.runs(), settings["rounds"]), head_dim, causal)
            rows["rows"] += times
            if dist.get_rank() == 0:
                show(times)
    return record | rows


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        mask = "causal" if row["causal"] else "none"
        times = f"two {row['two']['ms']:9.3f} ms  one {row['one']['ms']:9.3f} ms"
        print(
            f"{row['head_dim']:>4} {mask:6} {row['pass']:8} {times}  x {row['ratio']:.3f}",
            flush=True,
        )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--rounds", type=int, help=f"default: {GPU['rounds']}")
    parser.add_argument("--smoke", action="store_true", help="a tiny problem, on a CPU")
    given = parser.parse_args()
    settings: Settings = {**(SMOKE if given.smoke else GPU), "on_gpu": not given.smoke}
    if given.rounds is not None:
        settings["rounds"] = given.rounds
    if settings["on_gpu"] and torch.cuda.device_count() < PROCESSES:
        raise SystemExit(f"{torch.cuda.device_count()} GPUs; two, or --smoke")
    mp.spawn(work, (free_port(), settings, given.out), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
