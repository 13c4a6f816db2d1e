"""flashsdk.jax beside jax.nn.dot_product_attention under jit, forward and backward: a JSON record.

    python benchmarks/jax_bench.py                      # on what JAX has, a GPU or a CPU
    python benchmarks/jax_bench.py --out benchmarks/results/jax_h100.json    # or jax_cpu_avx512
    python benchmarks/jax_bench.py --quick              # short sequences and few samples

On a GPU the peer is JAX's cuDNN path, on a CPU its XLA path. Both go through one jitted function
each: the forward, and the gradients of q, k and v of what a forward returned (jax.vjp, so that the
forward's time is in neither). All calls of a cell go in turns, in another order each round, and the
record has the median of all rounds with their 10th and 90th percentile, in milliseconds. On a GPU
each sample is a queue of calls, so that the host, which is measured by itself, is not in it.

A row: shape (batch, seqlen, heads, head_dim), causal, pass; of ours and the peer the milliseconds;
their ratio; the goal's; the largest difference of the two results, relative to the largest value.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))

import flashsdk as fs
import jax
import jax.numpy as jnp
import numpy as np
from flashsdk._commands import gpu_record, machine
from flashsdk.jax import attention
from jax_tables import KIND

GPU: dict[str, Any] = {
    "tokens": 16384,
    "seqlens": (1024, 4096, 16384),
    "head_dims": (64, 128),
    "width": 2048,
    "dtype": "bfloat16",
    "goal": 1.0,
    "rounds": 15,
    "sample_ms": 20.0,
}
CPU: dict[str, Any] = {
    "tokens": 2048,
    "seqlens": (512, 1024, 2048),
    "head_dims": (64, 128),
    "width": 512,
    "dtype": "float32",
    "goal": 3.0,
    "rounds": 7,
    "sample_ms": 50.0,
}
QUICK = {"tokens": 512, "seqlens": (512,), "width": 256, "rounds": 2, "sample_ms": 1.0}
HOST_GOAL = 30.0  # microseconds a call under jit
Call = Callable[[], Any]


def cells(settings: dict[str, Any]) -> list[tuple[tuple[int, int, int, int], bool]]:
    """Shapes of as many tokens and of as much width each, and whether causal."""
    return [
        ((settings["tokens"] // seqlen, seqlen, settings["width"] // dim, dim), causal)
        for dim in settings["head_dims"]
        for seqlen in settings["seqlens"]
        for causal in (False, True)
    ]


def calls_of(shape: tuple[int, ...], causal: bool, dtype: str, peer: str) -> dict[str, Call]:
    """Jitted forwards and backwards of both sides, by name."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in keys)
    mask = fs.Causal() if causal else None
    sides: dict[str, Callable[..., Any]] = {
        "ours": lambda q, k, v: attention(q, k, v, mask=mask),
        "peer": lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, implementation=peer
        ),
    }
    calls: dict[str, Call] = {}
    for name, function in sides.items():
        forward = jax.jit(function)
        _, pull = jax.jit(lambda q, k, v, f=function: jax.vjp(f, q, k, v))(q, k, v)
        backward = jax.jit(lambda pull, dout: pull(dout))
        calls[f"{name} forward"] = lambda f=forward: f(q, k, v)
        calls[f"{name} backward"] = lambda f=backward, pull=pull: f(pull, dout)
    return calls


def milliseconds(call: Call, repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / repeats * 1e3


def timed(calls: dict[str, Call], rounds: int, sample_ms: float) -> dict[str, list[float]]:
    """Milliseconds of every call in every round."""
    repeats = {}
    for name, call in calls.items():
        jax.block_until_ready(call())  # compiles
        repeats[name] = max(1, math.ceil(sample_ms / milliseconds(call, 1)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        order = list(calls)
        random.Random(number).shuffle(order)
        for name in order:
            times[name].append(milliseconds(calls[name], repeats[name]))
    return times


def spread(samples: list[float]) -> dict[str, float]:
    low, high = np.percentile(samples, (10, 90))
    return {"ms": statistics.median(samples), "ms_p10": float(low), "ms_p90": float(high)}


def difference(calls: dict[str, Call], which: str) -> float:
    """The largest, of all that the pass gives, relative to the largest value."""
    pairs = zip(*(jax.tree.leaves(calls[f"{side} {which}"]()) for side in ("ours", "peer")))
    a_b = [[np.asarray(x, np.float32) for x in pair] for pair in pairs]
    return float(max(np.abs(a - b).max() / np.abs(b).max() for a, b in a_b))


def host_microseconds(dtype: str) -> dict[str, float]:
    """What a small jitted call takes the host: nothing is waited for before the last."""
    q = jnp.ones((1, 16, 1, 64), dtype)
    forward = jax.jit(lambda q: attention(q, q, q))
    empty = jax.jit(lambda q: q + 1)
    result = {}
    for name, call in (("attention", forward), ("q + 1", empty)):
        jax.block_until_ready(call(q))
        times = [milliseconds(lambda c=call: c(q), 200) * 1e3 for _ in range(15)]
        result[name] = statistics.median(times)
    return result


def header() -> dict[str, Any]:
    """What a record begins with, as those of the other benchmarks do."""
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    where = {
        "device": machine.cpu_name() if on_cpu else device.device_kind,
        "platform": device.platform,
        "threads": fs.get_num_threads() if on_cpu else None,
        "cpu_isa": fs.build_info()["cpu_isa"],
        "jax": jax.__version__,
    }
    sources = machine.kernel_sources_hash() if on_cpu else gpu_record.sources_hash()
    return machine.header_of(KIND, sources, where, ("numpy", "jax", "jaxlib"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument(
        "--rounds", type=int, help=f"{CPU['rounds']} on a CPU, {GPU['rounds']} else"
    )
    parser.add_argument("--sample-ms", type=float, help="least length of a sample")
    parser.add_argument("--quick", action="store_true", help="short sequences, few samples")
    arguments = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    settings = (GPU if on_gpu else CPU) | (QUICK if arguments.quick else {})
    rounds = arguments.rounds or settings["rounds"]
    sample_ms = arguments.sample_ms or settings["sample_ms"]
    peer = "cudnn" if on_gpu else "xla"
    rows: list[dict[str, Any]] = []
    record = {
        **header(),
        "quick": arguments.quick,
        "peer": f"jax.nn.dot_product_attention, {peer}",
        "rounds": rounds,
    }
    record |= {"dtype": settings["dtype"], "rows": rows}
    for shape, causal in cells(settings):
        calls = calls_of(shape, causal, settings["dtype"], peer)
        times = timed(calls, rounds, sample_ms)
        for which in ("forward", "backward"):
            ours, theirs = (spread(times[f"{side} {which}"]) for side in ("ours", "peer"))
            ratio = theirs["ms"] / ours["ms"]
            rows.append(
                {
                    "shape": shape,
                    "causal": causal,
                    "pass": which,
                    "ours": ours,
                    "peer": theirs,
                    "ratio": ratio,
                    "goal": settings["goal"],
                    "reached": ratio >= settings["goal"],
                    "difference": difference(calls, which),
                }
            )
            row = f"{'x'.join(map(str, shape)):>16} {'causal' if causal else 'none':6} {which:8}"
            print(
                f"{row} ours {ours['ms']:9.3f} ms  peer {theirs['ms']:9.3f} ms  x {ratio:.2f}",
                flush=True,
            )
    record["host_us"] = host_microseconds(settings["dtype"])
    record["host_goal_us"] = HOST_GOAL if on_gpu else None
    print(f"host, microseconds a call: {record['host_us']}")
    print(f"goal {settings['goal']}: {sum(r['reached'] for r in rows)} of {len(rows)} cells")
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
