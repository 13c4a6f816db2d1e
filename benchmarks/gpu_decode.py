"""Sections of gpu_bench.py: few queries of many keys, beside a read of them, and in caches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from flashsdk._commands.gpu_timing import Runs, timed
from flashsdk._errors import first_line
from gpu_calls import DEVICE, backends, fs, peer_forward
from gpu_tables import FLASHINFER, FP8, READ
from gpu_wanted import Row, Wanted

BEYOND_CACHES = 300_000_000  # bytes
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

    Beside them the same keys and values in fp8, half the bytes, and a sum of the bytes: what
    reading them takes.
    """
    causal = queries > 1
    mask = fs.Causal() if causal else None
    size = 4 * batch * keys * heads_kv * dim  # bytes of K and V
    inputs = []
    for _ in range(1 + BEYOND_CACHES // size):
        q = torch.randn(batch, queries, heads, dim, device=DEVICE).bfloat16()
        kv = torch.randn(2, batch, keys, heads_kv, dim, device=DEVICE).bfloat16()
        inputs.append((q, *kv, kv.to(torch.float8_e4m3fn), kv.view(torch.float32)))
    descale = torch.rand(2, batch, heads_kv, device=DEVICE) + 0.5
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
            for q, k, v, *_ in inputs:
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

    def on_fp8() -> None:
        for q, _, _, (k, v), _ in inputs:
            fs.mha_fwd(q, k, v, mask=mask, k_descale=descale[0], v_descale=descale[1])

    runs[FP8] = on_fp8
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
FLASHINFER_WORKSPACE = 128 << 20  # bytes, what its examples give it


def flashinfer_call(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Callable[..., Any] | None:
    """FlashInfer's decoding over such pages, where it is installed and computes what ours does.

    It plans on the host, from lengths that the host knows: before the clock runs, as a server does
    once a step, for all layers.
    """
    try:
        call = planned_by_flashinfer(q, k, table, lengths)
        theirs = call(q, k, v).view(q.shape)
    except ImportError:
        return None
    except (RuntimeError, ValueError, NotImplementedError) as e:  # it compiles when it is called
        print(f"{FLASHINFER}: left out: {first_line(e)}", flush=True)
        return None
    ours = fs.torch.attention(q, k, v, seqused_k=lengths, block_table=table)
    if (theirs.float() - ours.float()).abs().max() > 0.05:
        print(f"{FLASHINFER}: left out: its output is another", flush=True)
        return None
    return call


def planned_by_flashinfer(q: Any, k: Any, table: Any, lengths: Any) -> Callable[..., Any]:
    import flashinfer

    page, heads_kv, dim = k.shape[1:]
    heads = q.shape[2]
    pages_of = [int(n) for n in (lengths + page - 1) // page]
    ends = torch.tensor([0, *itertools.accumulate(pages_of)], dtype=torch.int32, device=DEVICE)
    used = torch.cat([row[:n] for row, n in zip(table, pages_of, strict=True)])
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=heads > heads_kv
    )
    in_last = (lengths - 1) % page + 1
    types = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    wrapper.plan(ends, used, in_last, heads, heads_kv, dim, page, **types)
    return lambda q, k, v: wrapper.run(q.squeeze(1), (k, v))


def on_each(call: Callable[..., Any], qs: list[Any], kvs: list[Any]) -> None:
    for q, (k, v) in zip(qs, kvs, strict=True):
        call(q, k, v)


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
        call = functools.partial(fs.torch.attention, mask=mask, **given)
        runs[name] = functools.partial(on_each, call, qs, inputs)

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
        if queries == 1 and (peer := flashinfer_call(qs[0], *pages[0], table, equal)):
            runs[f"{FLASHINFER}, {page}"] = functools.partial(on_each, peer, qs, pages)
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
