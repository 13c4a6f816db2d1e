"""How fast the GPU kernels are: our backends beside PyTorch's FlashAttention-2 and cuDNN.

    python3 benchmarks/gpu_bench.py [--out benchmarks/results/gpu_bench] [--quick]
    python3 benchmarks/gpu_bench.py --only dense --head-dims 128 --ops bwd --libraries sm90 cudnn

`make bench-gpu` builds first, also the library of single kernels that `features_off` launches from.
Writes OUT.json, the record that docs/dev/benchmarks.md is made from, and OUT.csv, its dense cells.
How calls are made: gpu_calls.py; how they are timed: `flashsdk._commands.gpu_timing`. FLOPs:
forward 4·batch·heads·seqlen²·head_dim, half of it when causal; backward 2.5 forwards. A backward's
time holds all of its passes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cpp" / "gpu"))

import numpy as np
import torch
from flashsdk._commands import gpu_record, gpu_timing
from flashsdk._commands.gpu_timing import Runs, timed
from flashsdk._errors import first_line
from gpu_calls import (
    BASELINE,
    DEVICE,
    TOKENS,
    WIDTH,
    backends,
    extra_bytes,
    flops,
    fs,
    ours,
    peer,
    peer_forward,
    peer_packed,
    second_build,
    tensors,
)
from gpu_card import Meter, card, libraries, summary
from gpu_tables import OURS, PEERS, READ, WITH_BIAS
from harness import Harness, Problem

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "build" / "gpu" / "libflashsdk_gpu_harness.so"
RECORD = ROOT / "benchmarks" / "results" / "gpu_bench"
PART = ROOT / "build" / "gpu_bench"  # where a run of a part goes: it must not replace the record
OPS = ("fwd", "bwd")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What of the bench is asked for; None is everything."""

    quick: bool = False
    dims: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    ops: tuple[str, ...] = OPS
    libraries: tuple[str, ...] = (*PEERS, *OURS)
    baseline: ModuleType | None = None
    kernels: Path = KERNELS

    def head_dims(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        return usual if self.dims is None else self.dims

    def seqlens(self, usual: list[int], quick: list[int]) -> tuple[int, ...]:
        return tuple(quick if self.quick else usual) if self.lengths is None else self.lengths

    def backends(self) -> list[str]:
        return [name for name in backends() if name in self.libraries]

    def peers(self, names: tuple[str, ...] = PEERS) -> list[str]:
        return [name for name in names if name in self.libraries or name not in PEERS]

    def of(self, runs: Runs) -> Runs:
        """Those of the directions asked for; a key ends with (op, name)."""
        return {key: run for key, run in runs.items() if key[-2] in self.ops}


def dense(wanted: Wanted) -> list[Row]:
    return [
        row
        for dim in wanted.head_dims((64, 128, 256))
        for causal in (False, True)
        for seqlen in wanted.seqlens([512, 1024, 2048, 4096, 8192, 16384], [1024, 4096])
        for row in cell(wanted, (TOKENS // seqlen, seqlen, WIDTH // dim, dim), causal)
    ]


def cell(
    wanted: Wanted, shape: tuple[int, int, int, int], causal: bool, heads_kv: int | None = None
) -> list[Row]:
    """Every backend and peer on one shape, forward and backward."""
    batch, seqlen, heads, dim = shape
    x = tensors(*shape, torch.bfloat16, heads_kv)
    runs: Runs = {}
    for package in filter(None, (fs, wanted.baseline)):
        for backend in wanted.backends():
            mask = package.Causal() if causal else None
            runs |= ours(x, backend, package=package, mask=mask)
    for name in wanted.peers():
        runs |= peer(x, name, causal)
    rows = []
    for (op, name), times in timed(wanted.of(runs)).items():
        row = {"head_dim": dim, "causal": causal, "seqlen": seqlen, "op": op, "name": name}
        rate = batch * seqlen**2 * flops(op, heads, dim, causal) / times.ms / 1e9
        rows.append({**row, **times.row(), "tflops": rate})
    ratios = ", ".join(
        f"{name} over {base} {ratio:.3f}"
        for base in ("cudnn", BASELINE)
        for name, ratio in over(rows, base)
    )
    print(f"d{dim} {'causal' if causal else 'full'} {seqlen}: {ratios}", flush=True)
    return rows


def lengths(wanted: Wanted) -> list[Row]:
    """Shorter and longer sequences than `dense` has; the long ones of an eighth of the width."""
    rows = []
    for dim in wanted.head_dims((64, 128)):
        for causal in (False, True):
            for seqlen in wanted.seqlens([128, 256, 32768, 65536], [128, 256]):
                heads = (WIDTH if seqlen <= TOKENS else WIDTH // 8) // dim
                rows += cell(wanted, (max(1, TOKENS // seqlen), seqlen, heads, dim), causal)
    return rows


def gqa(wanted: Wanted) -> list[Row]:
    """32 query heads, each four of which share one of 8 key heads."""
    return [
        row
        for causal in (False, True)
        for seqlen in wanted.seqlens([4096, 16384], [1024])
        for row in cell(wanted, (TOKENS // seqlen, seqlen, 32, 128), causal, 8)
    ]


def many_short(wanted: Wanted) -> list[Row]:
    """Many sequences of few tokens, batched and packed, with the memory that a call asks for.

    Of 8 heads, or 4: with twice as many, PyTorch's FlashAttention-2 has a dq of over 2³¹ elements
    in whole tiles, and its backward reads memory that is not its own.
    """
    rows = []
    for batch, seqlen in MANY_SHORT[:1] if wanted.quick else MANY_SHORT:
        ends = torch.arange(0, batch * seqlen + 1, seqlen, dtype=torch.int32, device=DEVICE)
        for dim in wanted.head_dims((64, 128)):
            x = tensors(batch, seqlen, 512 // dim, dim, torch.bfloat16)
            flat = [t.flatten(0, 1) for t in x]
            runs: Runs = {}
            for backend in wanted.backends():
                runs |= named("batched", ours(x, backend))
                runs |= named("packed", ours(flat, backend, (ends, ends, seqlen, seqlen)))
            for name in wanted.peers():
                runs |= named("batched", peer(x, name, False))
            if "fa2" in wanted.peers():
                runs |= named("packed", peer_packed(flat, ends, seqlen, False))
            runs = wanted.of(runs)
            extra = {key: extra_bytes(run) for key, run in runs.items()}
            for (kind, op, name), times in timed(runs).items():
                row = {"sequences": batch, "seqlen": seqlen, "head_dim": dim, "kind": kind}
                row |= {"op": op, "name": name, **times.row(), "extra_bytes": extra[kind, op, name]}
                rows.append(row)
                what = f"{batch} of {seqlen}, {kind}, {name} {op} d{dim}"
                memory = f"{row['extra_bytes'] / 2**20:.1f} MiB"
                print(f"{what}: {times.ms:.3f} ms, {memory}", flush=True)
    return rows


def beside_dense(
    x: list[Any], backend: str, masks: dict[Any, Any]
) -> Iterator[tuple[str, Any, Row]]:
    """For each direction and mask the time, and as a part of that without a mask."""
    runs: Runs = {}
    for key, mask in {"dense": None, **masks}.items():
        runs |= {(op, key): run for (op, _), run in ours(x, backend, mask=mask).items()}
    if ("fwd", "dense") not in runs:
        return
    of = timed(runs)
    for (op, key), times in of.items():
        if key != "dense":
            yield op, key, {**times.row(), "of_dense": times.ms / of[op, "dense"].ms}


GPT2_MEDIUM = (64, 1024, 16, 64)  # batch, seqlen, heads, head_dim
BEYOND_CACHES = 300_000_000  # bytes
MANY_SHORT = ((20000, 1), (1024, 8), (512, 17))  # sequences, tokens of each
FEW = (  # batch, queries, keys, heads, heads of keys, head_dim
    (1, 1, 1024, 32, 8, 128),
    (1, 1, 2048, 32, 8, 128),
    (1, 1, 4096, 32, 8, 128),
    (1, 1, 16384, 32, 8, 128),
    (1, 1, 65536, 32, 8, 128),
    (8, 1, 8192, 32, 8, 128),
    (16, 1, 8192, 32, 8, 128),
    (64, 1, 4096, 32, 8, 128),
    (8, 1, 65536, 32, 8, 128),
    (128, 1, 1024, 32, 8, 128),
    (64, 1, 4096, 16, 16, 64),
    (1, 1, 65536, 8, 1, 128),
    (1, 1, 16384, 16, 16, 64),
    (1, 1, 16384, 8, 8, 256),
    (1, 128, 16384, 8, 8, 128),
    (1, 512, 16384, 8, 8, 128),
)


def few_queries(wanted: Wanted) -> list[Row]:
    """One query a sequence, as in decoding, and a few, causal: the forward alone."""
    shapes = [s for s in FEW if wanted.dims is None or s[-1] in wanted.dims]
    return [row for s in shapes if not wanted.quick or s[2] <= 4096 for row in few_queries_of(*s)]


def few_queries_of(
    batch: int, queries: int, keys: int, heads: int, heads_kv: int, dim: int
) -> list[Row]:
    """A run is calls on keys of their own, together more than any cache holds.

    Beside them a sum of the same bytes: what reading them takes.
    """
    causal = queries > 1
    mask = fs.Causal() if causal else None
    size = 4 * batch * keys * heads_kv * dim  # bytes of K and V
    inputs = []
    for _ in range(1 + BEYOND_CACHES // size):
        q = torch.randn(batch, queries, heads, dim, device=DEVICE).bfloat16()
        kv = torch.randn(2, batch, keys, heads_kv, dim, device=DEVICE).bfloat16()
        inputs.append((q, *kv, kv.view(torch.float32)))
    attention, fastest = fs.torch.attention, backends()[-1]
    calls: dict[str, Callable[..., Any]] = {
        fastest: lambda q, k, v: attention(q, k, v, mask=mask, backend=fastest),
        "flashsdk": lambda q, k, v: attention(q, k, v, mask=mask),
        "fa2": functools.partial(peer_forward, "fa2", causal),
    }
    if not causal:  # PyTorch would hand it the mask as a matrix
        calls["cudnn"] = functools.partial(peer_forward, "cudnn", causal)

    def on_all(call: Callable[..., Any]) -> Callable[[], object]:
        def run() -> None:
            for q, k, v, _ in inputs:
                call(q, k, v)

        return run

    runs: Runs = {}
    for name, call in calls.items():
        try:
            call(*inputs[0][:3])
        except (fs.Error, RuntimeError) as e:
            print(f"{name}: left out: {first_line(e)}", flush=True)
            continue
        runs[name] = on_all(call)
    runs[READ] = lambda: [kv.sum() for *_, kv in inputs]
    of = timed(runs)
    row = {"batch": batch, "queries": queries, "keys": keys, "heads": heads}
    row |= {"heads_kv": heads_kv, "head_dim": dim, "bytes": size}
    row["kernel"] = fs.explain(*inputs[0][:3], mask=mask).kernel
    rows = []
    for name, times in of.items():
        of_call = [1e3 * t / len(inputs) for t in (times.ms, times.p10, times.p90)]
        spread = dict(zip(("us", "us_p10", "us_p90"), of_call, strict=True))
        rows.append({**row, "name": name, **spread, "way": times.way})
    shown = ", ".join(f"{r['name']} {r['us']:.1f}" for r in rows)
    print(f"{batch} x {queries} queries, {keys} keys, d{dim}: {shown} us", flush=True)
    return rows


CACHES = (  # batch, queries, used keys, heads, heads of keys, head_dim
    (1, 1, 16384, 32, 8, 128),
    (16, 1, 8192, 32, 8, 128),
    (128, 1, 2048, 32, 8, 128),
    (16, 4, 8192, 32, 8, 128),
    (64, 1, 4096, 16, 16, 64),
    (1, 512, 32768, 32, 8, 128),
)
PAGE_SIZES = (16, 64, 256)


def caches(wanted: Wanted) -> list[Row]:
    """Keys in a cache: used lengths, equal and not, and pages, beside the same keys alone."""
    shapes = [s for s in CACHES if wanted.dims is None or s[-1] in wanted.dims]
    return [row for s in shapes if not wanted.quick or s[2] <= 4096 for row in caches_of(*s)]


def caches_of(
    batch: int, queries: int, keys: int, heads: int, heads_kv: int, dim: int
) -> list[Row]:
    """Calls on keys of their own, as in few_queries_of(). Several queries are causal.

    "unequal": a sequence has between 1/16 and 31/16 of the keys that the others have on average.
    """
    mask = fs.Causal() if queries > 1 else None
    size = 4 * batch * keys * heads_kv * dim  # bytes of the used K and V
    equal = torch.full((batch,), keys, dtype=torch.int32, device=DEVICE)
    turns = range(1 + BEYOND_CACHES // size)

    def random(*shape: int) -> Any:
        return torch.randn(shape, device=DEVICE).bfloat16()

    qs = [random(batch, queries, heads, dim) for _ in turns]
    runs: Runs = {}

    def add(name: str, inputs: list[Any], **given: Any) -> None:
        def run() -> None:
            for q, (k, v) in zip(qs, inputs, strict=True):
                fs.torch.attention(q, k, v, mask=mask, **given)

        runs[name] = run

    alone = [random(2, batch, keys, heads_kv, dim) for _ in turns]
    add("alone", alone)
    runs[READ] = lambda: [kv.view(torch.float32).sum() for kv in alone]
    cache = [random(2, batch, 2 * keys, heads_kv, dim) for _ in turns]
    add("used", cache, seqused_k=equal)
    if batch > 1:
        spread = torch.linspace(1 / 16, 31 / 16, batch)
        unequal = (spread * keys).int()[torch.randperm(batch)].to(DEVICE)
        unequal[0] += batch * keys - int(unequal.sum())
        add("unequal", cache, seqused_k=unequal)
    for page in PAGE_SIZES:  # the same memory as the cache, its pages in any order
        each = 2 * keys // page
        table = torch.randperm(batch * each, device=DEVICE).int().view(batch, each)
        pages = [kv.view(2, batch * each, page, heads_kv, dim) for kv in cache]
        add(f"pages of {page}", pages, seqused_k=equal, block_table=table)
    row = {"batch": batch, "queries": queries, "keys": keys, "heads": heads}
    row |= {"heads_kv": heads_kv, "head_dim": dim, "bytes": size}
    rows = []
    for name, times in timed(runs).items():
        of_call = [1e3 * t / len(turns) for t in (times.ms, times.p10, times.p90)]
        spread_of = dict(zip(("us", "us_p10", "us_p90"), of_call, strict=True))
        rows.append({**row, "name": name, **spread_of, "way": times.way})
    shown = ", ".join(f"{r['name']} {r['us']:.1f}" for r in rows)
    print(f"{batch} x {queries} queries, {keys} used keys, d{dim}: {shown} us", flush=True)
    return rows


def windows(wanted: Wanted, window: int = 1024, block: int = 128) -> list[Row]:
    """Windows, as parts of the time without one, beside the part of the blocks that they touch."""
    rows = []
    seqlen = TOKENS // 4 if wanted.quick else TOKENS
    bands = {"left": (window - 1, 0), "both": (window // 2, window // 2)}
    masks = {sides: fs.SlidingWindow(*band) for sides, band in bands.items()}
    visited = {
        sides: fs.layouts.sliding_window(seqlen, seqlen, block, left=left, right=right).density
        for sides, (left, right) in bands.items()
    }
    for dim in wanted.head_dims((64, 128)):
        x = tensors(1, seqlen, WIDTH // dim, dim, torch.bfloat16)
        for backend in wanted.backends():
            for op, sides, times in beside_dense(x, backend, masks):
                row = {"name": backend, "op": op, "head_dim": dim, "seqlen": seqlen}
                row |= {"window": window, "sides": sides, "visited": visited[sides], **times}
                rows.append(row)
                print(
                    f"window {sides}, {backend} {op} d{dim}: {times['of_dense']:.4f} of dense, "
                    f"{visited[sides]:.4f} of the blocks",
                    flush=True,
                )
    return rows


def long_tailed(total: int) -> list[int]:
    """Lengths of documents: many short ones, few long ones; exactly so many tokens together."""
    rng = np.random.default_rng(0)
    found: list[int] = []
    while (left := total - sum(found)) > 0:
        found.append(min(left, int(np.clip(rng.lognormal(np.log(400), 1.1), 16, 8192))))
    return found


def packed(wanted: Wanted) -> list[Row]:
    """Long-tailed lengths, beside equally long sequences of the same FLOPs and nearly the tokens.

    Both rates are of FLOPs that count: each sequence its own square. Short sequences leave their
    last blocks half empty: ``of_blocks`` is the quotient if time went by blocks alone.
    """
    total = TOKENS if wanted.quick else 2 * TOKENS
    each = long_tailed(total)
    squares = sum(n * n for n in each)
    seqlen = 64 * round(squares / total / 64)
    batch = round(squares / seqlen**2)
    ends = torch.from_numpy(np.cumsum([0, *each]).astype(np.int32)).to(DEVICE)
    of_packed = ends, ends, max(each), max(each)
    rows = []
    for dim in wanted.head_dims((64, 128)):
        heads = WIDTH // dim
        x = [t[0] for t in tensors(1, total, heads, dim, torch.bfloat16)]
        equal = tensors(batch, seqlen, heads, dim, torch.bfloat16)
        for causal in (False, True):
            mask = fs.Causal() if causal else None
            of_blocks = filled(each, causal) / filled([seqlen], causal)
            runs: Runs = {}
            for backend in wanted.backends():
                runs |= named("packed", ours(x, backend, of_packed, mask=mask))
                runs |= named("equal", ours(equal, backend, mask=mask))
            if "fa2" in wanted.peers():
                runs |= named("packed", peer_packed(x, ends, max(each), causal))
                runs |= named("equal", peer(equal, "fa2", causal))
            of = timed(runs)
            for op, name in dict.fromkeys((op, name) for _, op, name in of):
                if ("packed", op, name) not in of or ("equal", op, name) not in of:
                    continue
                per_square = flops(op, heads, dim, causal)
                times = of["packed", op, name]
                rate = per_square * squares / times.ms / 1e9
                of_equal = per_square * batch * seqlen**2 / of["equal", op, name].ms / 1e9
                row = {"name": name, "op": op, "head_dim": dim, "causal": causal}
                row |= {"sequences": len(each), "longest": max(each), "tokens": total}
                row |= {"equal_batch": batch, "equal_seqlen": seqlen, **times.row()}
                row |= {"tflops": rate, "equal_tflops": of_equal, "of_equal": rate / of_equal}
                rows.append({**row, "of_blocks": of_blocks})
                print(
                    f"packed, {name} {op} d{dim} {'causal' if causal else 'full'}: "
                    f"{rate:.0f} TFLOP/s, {rate / of_equal:.3f} of equal lengths",
                    flush=True,
                )
    return rows


def filled(lengths: list[int], causal: bool, block: int = 128) -> float:
    """FLOPs that count over those of the blocks that hold them."""
    n = np.asarray(lengths)
    blocks = -(-n // block)
    touched = blocks * (blocks + 1) / 2 if causal else blocks**2
    return float((n**2).sum() * (0.5 if causal else 1) / (touched.sum() * block**2))


def named(kind: str, runs: Runs) -> Runs:
    return {(kind, *key): run for key, run in runs.items()}


def over(rows: list[Row], base: str) -> list[tuple[str, float]]:
    """Our rates over a peer's, or over our other build's, of the rows of one cell."""
    rate = {(r["op"], r["name"]): r["tflops"] for r in rows}
    found = []
    for op, name in rate:
        other = f"{name} {base}" if base == BASELINE else base
        if name in OURS and (op, other) in rate:
            found.append((f"{op} {name}", rate[op, name] / rate[op, other]))
    return found


def random_blocks(n: int, density: float) -> Any:
    """n x n blocks: the diagonal, and as many others at random places as make exactly this part."""
    blocks = np.eye(n, dtype=bool)
    others = np.flatnonzero(~blocks)
    more = round(density * n * n) - n
    blocks.flat[np.random.default_rng(0).choice(others, more, replace=False)] = True
    return blocks


def sparse(wanted: Wanted, block: int = 128) -> list[Row]:
    """Random layouts with the diagonal, as parts of the time without a mask."""
    rows = []
    for seqlen in (TOKENS // 8,) if wanted.quick else (TOKENS // 2, 2 * TOKENS):
        for dim in wanted.head_dims((64, 128)):
            x = tensors(max(1, TOKENS // seqlen), seqlen, WIDTH // dim, dim, torch.bfloat16)
            masks = {
                density: fs.BlockMask.from_dense(
                    random_blocks(seqlen // block, density)[None, None],
                    (block, block),
                    seqlen_q=seqlen,
                    seqlen_k=seqlen,
                )
                for density in (0.0625, 0.125, 0.25, 0.5)
            }
            for backend in wanted.backends():
                for op, density, times in beside_dense(x, backend, masks):
                    row = {"name": backend, "op": op, "head_dim": dim, "seqlen": seqlen}
                    rows.append({**row, "density": density, **times})
                    what = f"{backend} {op} d{dim} {seqlen} {density:.3f}"
                    print(f"sparse {what}: {times['of_dense']:.3f}", flush=True)
    return rows


def gpt2_medium(wanted: Wanted) -> list[Row]:
    """The attention of the paper's GPT-2 medium, fp16, causal."""
    rows = []
    x = tensors(*GPT2_MEDIUM, torch.float16)
    for dropout in (0.0, 0.1):
        runs: Runs = {}
        for backend in wanted.backends():
            runs |= ours(x, backend, mask=fs.Causal(), dropout_p=dropout, seed=1)
        for name in wanted.peers():
            runs |= peer(x, name, True, dropout)
        of = timed(runs)
        for name in dict.fromkeys(name for _, name in of):
            row = {"name": name, "dropout": dropout, "way": of["fwd", name].way}
            for op in OPS:
                times = of[op, name].row()
                row |= {f"{op}_{key}": times[key] for key in ("ms", "ms_p10", "ms_p90")}
            rows.append(row)
            both = row["fwd_ms"] + row["bwd_ms"]
            print(f"GPT-2 medium, dropout {dropout}: {name} {both:.2f} ms", flush=True)
    return rows


def bias(wanted: Wanted) -> list[Row]:
    """A bias of q's type, and one of bool, also beside dropout, that all heads share."""
    rows = []
    seqlen = TOKENS // 16 if wanted.quick else TOKENS // 4
    for dim in wanted.head_dims((64, 128)):
        x = tensors(TOKENS // seqlen, seqlen, WIDTH // dim, dim, torch.bfloat16)
        values = torch.randn(1, 1, seqlen, seqlen, device=DEVICE)
        of = {"bfloat16": values.bfloat16(), "bool": values > 0}
        for kind, dropout in (("bfloat16", 0.0), ("bool", 0.0), ("bool", 0.1)):
            runs: Runs = {}
            for backend in wanted.backends():
                runs |= ours(x, backend, bias=of[kind], dropout_p=dropout, seed=1)
            for name in wanted.peers(WITH_BIAS):
                runs |= peer(x, name, False, dropout, of[kind])
            # PyTorch's memory-efficient backward, captured after a forward that was not, takes the
            # seed of dropout for an address on the device.
            for (op, name), times in timed(runs, graphs=dropout == 0).items():
                row = {"name": name, "op": op, "head_dim": dim, "seqlen": seqlen, "bias": kind}
                rows.append({**row, "dropout": dropout, **times.row()})
                what = f"{kind}, dropout {dropout}"
                print(f"bias, {what}, {name} {op} d{dim}: {times.ms:.3f} ms", flush=True)
    return rows


def alibi(wanted: Wanted) -> list[Row]:
    """ALiBi with the slopes of its paper (arXiv 2108.12409, section 3) beside the plain call."""
    rows = []
    for dim, causal in itertools.product(wanted.head_dims((64, 128)), (False, True)):
        heads = WIDTH // dim
        x = tensors(4, TOKENS // 4, heads, dim, torch.bfloat16)
        mask = fs.Causal() if causal else None
        slopes = 2.0 ** (-8 / heads * torch.arange(1, heads + 1, device=DEVICE))
        for backend in wanted.backends():
            runs: Runs = {}
            for kind, options in {"plain": {}, "alibi": {"alibi_slopes": slopes}}.items():
                found = ours(x, backend, mask=mask, **options)
                runs |= {(op, kind): run for (op, _), run in found.items()}
            if len(runs) < 4:
                continue
            of = timed(runs)
            for op in OPS:
                times = of[op, "alibi"]
                part = times.ms / of[op, "plain"].ms
                row = {"name": backend, "op": op, "head_dim": dim, "causal": causal}
                rows.append({**row, **times.row(), "of_plain": part})
                where = f"{backend} {op} d{dim} {'causal' if causal else 'full'}"
                print(f"ALiBi, {where}: {part:.3f}", flush=True)
    return rows


def deterministic(wanted: Wanted) -> list[Row]:
    """What the same bits from run to run cost in the backward."""
    rows = []
    for dim, causal, seqlen in itertools.product(
        wanted.head_dims((64, 128, 256)), (False, True), wanted.seqlens([2048, 16384], [1024])
    ):
        x = tensors(TOKENS // seqlen, seqlen, WIDTH // dim, dim, torch.bfloat16)
        mask = fs.Causal() if causal else None
        for backend in wanted.backends():
            runs: Runs = {}
            for same_bits in (False, True):
                found = ours(x, backend, mask=mask, deterministic=same_bits)
                if found:
                    runs[same_bits] = found["bwd", backend]
            if len(runs) < 2:
                continue
            of = timed(runs)
            part = of[True].ms / of[False].ms
            row = {"name": backend, "head_dim": dim, "causal": causal, "seqlen": seqlen}
            rows.append({**row, **of[True].row(), "of_default": part})
            where = f"{backend} d{dim} {'causal' if causal else 'full'} {seqlen}"
            print(f"deterministic, {where}: {part:.3f}", flush=True)
    return rows


def features_off(wanted: Wanted) -> list[Row]:
    """What it costs to have features compiled in of which a call asks for none.

    No call takes such a kernel: each is found by a problem that needs it, and launched without.
    """
    harness = Harness(str(wanted.kernels))
    rows = []
    for dim in wanted.head_dims((64, 128)):
        q, k, v, dout = tensors(4, TOKENS // 4, WIDTH // dim, dim, torch.bfloat16)
        off = Problem(q, k, v)
        dropout = dataclasses.replace(off, threshold=26)
        everything = dataclasses.replace(dropout, softcap=30.0)
        out, lse = harness.forward(off)
        grads = [torch.empty_like(t) for t in (q, k, v)]

        def words(problem: Any, results: Any = (out, lse, dout, *grads)) -> Any:
            return harness.words(problem, *results)

        def launch(index: int, off: Any = off, words: Any = words) -> Callable[[], object]:
            call = words(off)
            workspace = harness.workspace(index, off, call)
            return lambda: harness.launch(index, off, call, workspace)

        for backend in wanted.backends():
            runs: Runs = {}
            for kind, need in {"plain": off, "dropout": dropout, "all": everything}.items():
                for op, name in enumerate(OPS):
                    fitting = harness.pick(op, need, words(need), all_fitting=True)
                    of_backend = [i for i in fitting if harness.backend(i) == backend]
                    if of_backend:
                        runs[name, kind] = launch(of_backend[0])
            for (op, kind), times in (of := timed(runs)).items():
                if kind != "plain":
                    row = {"name": backend, "op": op, "head_dim": dim, "compiled_in": kind}
                    part = times.ms / of[op, "plain"].ms
                    rows.append({**row, **times.row(), "of_plain": part})
                    print(f"{kind} compiled in, {backend} {op} d{dim}: {part:.3f}", flush=True)
    return rows


SECTIONS: dict[str, Callable[[Wanted], list[Row]]] = {
    "dense": dense,
    "lengths": lengths,
    "gqa": gqa,
    "many_short": many_short,
    "few_queries": few_queries,
    "caches": caches,
    "windows": windows,
    "packed": packed,
    "sparse": sparse,
    "gpt2_medium": gpt2_medium,
    "bias": bias,
    "alibi": alibi,
    "deterministic": deterministic,
    "features_off": features_off,
}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out",
        type=Path,
        help=f"without an ending; {_relative(RECORD)}, or of a part {_relative(PART)}",
    )
    parser.add_argument("--quick", action="store_true", help="few cells")
    parser.add_argument(
        "--only", type=_names, metavar="SECTION,…", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--head-dims", type=int, nargs="+")
    parser.add_argument(
        "--seqlens", type=int, nargs="+", help="of dense, lengths, gqa and deterministic"
    )
    parser.add_argument(
        "--ops", nargs="+", choices=OPS, help="of dense, lengths, gqa and many_short"
    )
    parser.add_argument("--libraries", nargs="+", choices=(*PEERS, *OURS))
    parser.add_argument(
        "--baseline", type=Path, metavar="BUILD",
        help="another build's python/flashsdk, or its extension, in turns with ours: dense, "
        "lengths, gqa",
    )  # fmt: skip
    parser.add_argument(
        "--kernels", type=Path, default=KERNELS, help="the library of single kernels"
    )
    args = parser.parse_args(arguments)
    parts = ("only", "head_dims", "seqlens", "ops", "libraries", "baseline")
    given = {name: getattr(args, name) for name in parts if getattr(args, name)}
    args.part = {n: str(x) if n == "baseline" else list(x) for n, x in given.items()}
    args.out = args.out or (PART if args.part or args.quick else RECORD)
    return args


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - SECTIONS.keys():
        raise argparse.ArgumentTypeError(f"no section {', '.join(sorted(unknown))}")
    return names


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def wanted_of(args: argparse.Namespace) -> Wanted:
    given: dict[str, Any] = {
        "dims": args.head_dims, "lengths": args.seqlens, "ops": args.ops,
        "libraries": args.libraries,
    }  # fmt: skip
    given = {name: tuple(values) for name, values in given.items() if values}
    if args.baseline:
        given["baseline"] = second_build(args.baseline)
    return Wanted(quick=args.quick, kernels=args.kernels, **given)


def main(arguments: list[str] | None = None) -> int:
    args = parsed(arguments)
    wanted = wanted_of(args)
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    record = gpu_record.header("gpu_bench", torch.cuda.get_device_name())
    record["versions"] |= libraries()
    record["card"] = card()
    record["timing"] = {"rounds": gpu_timing.ROUNDS, "sample_ms": gpu_timing.SAMPLE_MS}
    if args.part or args.quick:
        record["part"] = {**args.part, "quick": args.quick}
    failed = False
    with Meter() as meter:
        for name in args.only or SECTIONS:
            start, windows_before = time.monotonic(), len(gpu_timing.WINDOWS)
            try:
                record[name] = SECTIONS[name](wanted)
            except Exception:  # device time is short: one section must not cost the others
                traceback.print_exc()
                failed = True
            windows_of = gpu_timing.WINDOWS[windows_before:]
            record.setdefault("clocks", {})[name] = summary(meter.during(windows_of))
            record["timing"]["ways"] = ways(record)
            write(args.out, record)  # after every section: the machine may go
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"record: {args.out.with_suffix('.json')}")
    return 1 if failed else 0


def ways(record: dict[str, Any]) -> dict[str, int]:
    """In how many rows calls were captured in graphs, in how many queued one by one."""
    return dict(Counter(row["way"] for name in SECTIONS for row in record.get(name, [])))


def write(out: Path, record: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(_rounded(record), indent=1) + "\n")
    columns = ("op", "head_dim", "causal", "seqlen", "name", "ms", "ms_p10", "ms_p90", "tflops")
    with open(out.with_suffix(".csv"), "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(columns)
        for row in _rounded(record.get("dense", [])):
            writer.writerow([int(row[c]) if c == "causal" else row[c] for c in columns])


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.4g}")
    if isinstance(x, dict):
        return {key: _rounded(value) for key, value in x.items()}
    return [_rounded(value) for value in x] if isinstance(x, list) else x


if __name__ == "__main__":
    sys.exit(main())
