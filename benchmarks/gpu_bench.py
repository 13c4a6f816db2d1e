"""How fast the GPU kernels are: our backends beside PyTorch's FlashAttention-2 and cuDNN.

    python3 benchmarks/gpu_bench.py [--out benchmarks/results/gpu_bench] [--quick]

`make bench-gpu` builds first, also the library of single kernels that `features_off` launches from.
Writes OUT.json, the record that docs/benchmarks.md is made from, and
OUT.csv, its cells. Everything a row compares is timed in turns in one process: medians of
CUDA-event times, after warm-up. FLOPs: forward 4·batch·heads·seqlen²·head_dim, half of it when
causal; backward 2.5 forwards. A backward's time holds all of its passes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cpp" / "gpu"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import flashsdk as fs
import numpy as np
import torch
from flashsdk._commands import gpu_record
from gpu_calls import (
    PEERS,
    TOKENS,
    WIDTH,
    WITH_BIAS,
    Runs,
    backends,
    flops,
    graphed,
    median_ms,
    ours,
    peer,
    peer_forward,
    tensors,
    with_gradients,
)
from harness import Harness, Problem

KERNELS = Path(__file__).resolve().parent.parent / "build" / "gpu" / "libflashsdk_gpu_harness.so"
Row = dict[str, Any]


def dense(head_dims: list[int], seqlens: list[int]) -> list[Row]:
    rows = []
    for dim in head_dims:
        for causal in (False, True):
            for seqlen in seqlens:
                x = tensors(TOKENS // seqlen, seqlen, WIDTH // dim, dim, torch.bfloat16)
                rows += cell(x, causal)
    return rows


def cell(x: list[Any], causal: bool, rounds: int = 5) -> list[Row]:
    """Every backend and peer on one shape, forward and backward."""
    batch, seqlen, heads, dim = x[0].shape
    runs: Runs = {}
    for backend in backends():
        runs |= ours(x, backend, mask=fs.Causal() if causal else None)
    for name in PEERS:
        runs |= peer(x, name, causal)
    rows = []
    for (op, name), ms in median_ms(runs, rounds=rounds).items():
        row = {"head_dim": dim, "causal": causal, "seqlen": seqlen, "op": op}
        rate = batch * seqlen**2 * flops(op, heads, dim, causal) / ms / 1e9
        rows.append({**row, "name": name, "ms": ms, "tflops": rate})
    ratios = ", ".join(f"{n} {r:.2f}" for n, r in over(rows, "cudnn"))
    print(f"d{dim} {'causal' if causal else 'full'} {seqlen}: {ratios}", flush=True)
    return rows


def lengths(seqlens: list[int]) -> list[Row]:
    """Shorter and longer sequences than `dense` has; the long ones of an eighth of the width."""
    rows = []
    for dim in (64, 128):
        for causal in (False, True):
            for seqlen in seqlens:
                heads = (WIDTH if seqlen <= TOKENS else WIDTH // 8) // dim
                x = tensors(max(1, TOKENS // seqlen), seqlen, heads, dim, torch.bfloat16)
                rows += cell(x, causal, rounds=5 if seqlen <= TOKENS else 3)
    return rows


def gqa(seqlens: list[int]) -> list[Row]:
    """32 query heads, each four of which share one of 8 key heads."""
    return [
        row
        for causal in (False, True)
        for seqlen in seqlens
        for row in cell(tensors(TOKENS // seqlen, seqlen, 32, 128, torch.bfloat16, 8), causal)
    ]


def beside_dense(
    x: list[Any], backend: str, masks: dict[Any, Any]
) -> Iterator[tuple[str, Any, Row]]:
    """For each direction and mask the time, and as a part of that without a mask."""
    runs: Runs = {}
    for key, mask in {"dense": None, **masks}.items():
        runs |= {(op, key): run for (op, _), run in ours(x, backend, mask=mask).items()}
    if ("fwd", "dense") not in runs:
        return
    ms = median_ms(runs)
    for (op, key), t in ms.items():
        if key != "dense":
            yield op, key, {"ms": t, "of_dense": t / ms[op, "dense"]}


FEW = (  # batch, queries, keys, heads, heads of keys, head_dim
    (1, 1, 1024, 32, 8, 128),
    (1, 1, 2048, 32, 8, 128),
    (1, 1, 4096, 32, 8, 128),
    (1, 1, 16384, 32, 8, 128),
    (1, 1, 65536, 32, 8, 128),
    (8, 1, 8192, 32, 8, 128),
    (1, 1, 65536, 8, 1, 128),
    (1, 1, 16384, 16, 16, 64),
    (1, 1, 16384, 8, 8, 256),
    (1, 128, 16384, 8, 8, 128),
    (1, 512, 16384, 8, 8, 128),
)


def few_queries(most_keys: int) -> list[Row]:
    """One query a sequence, as in decoding, and a few, causal: the forward alone."""
    return [row for shape in FEW if shape[2] <= most_keys for row in few_queries_of(*shape)]


def few_queries_of(
    batch: int, queries: int, keys: int, heads: int, heads_kv: int, dim: int
) -> list[Row]:
    """Calls take turns with keys that together are more than any cache holds, from a CUDA graph.

    The host would take longer than most of them.
    """
    causal = queries > 1
    mask = fs.Causal() if causal else None
    size = 4 * batch * keys * heads_kv * dim  # bytes of K and V
    inputs = []
    for _ in range(1 + 300_000_000 // size):
        q = torch.randn(batch, queries, heads, dim, device="cuda").bfloat16()
        _, k, v, _ = tensors(batch, keys, heads_kv, dim, torch.bfloat16)
        inputs.append((q, k, v))
    fastest = backends()[-1]
    calls: dict[str, Callable[..., Any]] = {
        fastest: lambda q, k, v: fs.mha_fwd(q, k, v, mask=mask, backend=fastest),
        "flashsdk": lambda q, k, v: fs.mha_fwd(q, k, v, mask=mask),
        "fa2": functools.partial(peer_forward, "fa2", causal),
    }
    if not causal:  # PyTorch would hand it the mask as a matrix
        calls["cudnn"] = functools.partial(peer_forward, "cudnn", causal)
    graphs = {name: graphed(call, inputs) for name, call in calls.items()}
    ms = median_ms({name: graph.replay for name, graph in graphs.items() if graph})
    us = {name: 1e3 * t / len(inputs) for name, t in ms.items()}
    times = ", ".join(f"{name} {t:.1f}" for name, t in us.items())
    print(f"{batch} x {queries} queries, {keys} keys, d{dim}: {times} us", flush=True)
    row = {"batch": batch, "queries": queries, "keys": keys, "heads": heads}
    row |= {"heads_kv": heads_kv, "head_dim": dim, "bytes": size}
    row["kernel"] = fs.explain(*inputs[0], mask=mask).kernel
    return [{**row, "name": name, "us": t} for name, t in us.items()]


def windows(seqlen: int, window: int = 1024, block: int = 128) -> list[Row]:
    """Windows, as parts of the time without one, beside the part of the blocks that they touch."""
    rows = []
    bands = {"left": (window - 1, 0), "both": (window // 2, window // 2)}
    masks = {sides: fs.SlidingWindow(*band) for sides, band in bands.items()}
    visited = {
        sides: fs.layouts.sliding_window(seqlen, seqlen, block, left=left, right=right).density
        for sides, (left, right) in bands.items()
    }
    for dim in (64, 128):
        x = tensors(1, seqlen, WIDTH // dim, dim, torch.bfloat16)
        for backend in backends():
            for op, sides, time in beside_dense(x, backend, masks):
                row = {"name": backend, "op": op, "head_dim": dim, "seqlen": seqlen}
                row |= {"window": window, "sides": sides, "visited": visited[sides], **time}
                rows.append(row)
                print(
                    f"window {sides}, {backend} {op} d{dim}: {time['of_dense']:.4f} of dense, "
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


def packed(total: int) -> list[Row]:
    """Long-tailed lengths, beside equally long sequences of the same FLOPs and nearly the tokens.

    Both rates are of FLOPs that count: each sequence its own square. Short sequences leave their
    last blocks half empty: ``of_blocks`` is the quotient if time went by blocks alone.
    """
    each = long_tailed(total)
    squares = sum(n * n for n in each)
    seqlen = 64 * round(squares / total / 64)
    batch = round(squares / seqlen**2)
    ends = torch.from_numpy(np.cumsum([0, *each]).astype(np.int32)).cuda()
    of_packed = ends, ends, max(each), max(each)
    rows = []
    for dim in (64, 128):
        heads = WIDTH // dim
        x = [t[0] for t in tensors(1, total, heads, dim, torch.bfloat16)]
        equal = tensors(batch, seqlen, heads, dim, torch.bfloat16)
        for causal in (False, True):
            mask = fs.Causal() if causal else None
            of_blocks = filled(each, causal) / filled([seqlen], causal)
            runs: Runs = {}
            for backend in backends():
                runs |= named("packed", ours(x, backend, of_packed, mask=mask))
                runs |= named("equal", ours(equal, backend, mask=mask))
            runs |= named("packed", peer_packed(x, ends, max(each), causal))
            runs |= named("equal", peer(equal, "fa2", causal))
            ms = median_ms(runs)
            for op, name in dict.fromkeys((op, name) for _, op, name in ms):
                if ("packed", op, name) not in ms or ("equal", op, name) not in ms:
                    continue
                per_square = flops(op, heads, dim, causal)
                rate = per_square * squares / ms["packed", op, name] / 1e9
                of_equal = per_square * batch * seqlen**2 / ms["equal", op, name] / 1e9
                row = {"name": name, "op": op, "head_dim": dim, "causal": causal}
                row |= {"sequences": len(each), "longest": max(each), "tokens": total}
                row |= {"equal_batch": batch, "equal_seqlen": seqlen, "tflops": rate}
                row |= {"equal_tflops": of_equal, "of_equal": rate / of_equal}
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


def peer_packed(x: list[Any], ends: Any, longest: int, causal: bool) -> Runs:
    """PyTorch's varlen_attn, where it has one: FlashAttention-2."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return {}
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    window = {"window_size": (-1, 0 if causal else -1)}
    if "window_size" not in inspect.signature(varlen_attn).parameters:
        window = {"is_causal": causal}

    def forward() -> Any:
        return varlen_attn(q, k, v, ends, ends, longest, longest, **window)

    return with_gradients("fa2", forward, (q, k, v), x[3])


def over(rows: list[Row], base: str) -> list[tuple[str, float]]:
    """Our rates over a peer's, of the rows of one cell."""
    rate = {(r["op"], r["name"]): r["tflops"] for r in rows}
    return [
        (f"{op} {name}", rate[op, name] / rate[op, base])
        for op, name in rate
        if name not in PEERS and (op, base) in rate
    ]


def random_blocks(n: int, density: float) -> Any:
    """n x n blocks: the diagonal, and as many others at random places as make exactly this part."""
    blocks = np.eye(n, dtype=bool)
    others = np.flatnonzero(~blocks)
    more = round(density * n * n) - n
    blocks.flat[np.random.default_rng(0).choice(others, more, replace=False)] = True
    return blocks


def sparse(seqlen: int, block: int = 128) -> list[Row]:
    """Random layouts with the diagonal, as parts of the time without a mask."""
    rows = []
    n = seqlen // block
    for dim in (64, 128):
        x = tensors(2, seqlen, WIDTH // dim, dim, torch.bfloat16)
        masks = {}
        for density in (0.0625, 0.125, 0.25, 0.5):
            masks[density] = fs.BlockMask.from_dense(
                random_blocks(n, density)[None, None],
                (block, block),
                seqlen_q=seqlen,
                seqlen_k=seqlen,
            )
        for backend in backends():
            for op, density, time in beside_dense(x, backend, masks):
                row = {"name": backend, "op": op, "head_dim": dim, "seqlen": seqlen}
                rows.append({**row, "density": density, **time})
                part = time["of_dense"]
                print(f"sparse {backend} {op} d{dim} {density:.3f}: {part:.3f}", flush=True)
    return rows


def gpt2_medium() -> list[Row]:
    """The attention of the paper's GPT-2 medium: batch 64, 16 heads, 1024, fp16, causal."""
    rows = []
    x = tensors(64, 1024, 16, 64, torch.float16)
    for dropout in (0.0, 0.1):
        runs: Runs = {}
        for backend in backends():
            runs |= ours(x, backend, mask=fs.Causal(), dropout_p=dropout, seed=1)
        for name in PEERS:
            runs |= peer(x, name, True, dropout)
        ms = median_ms(runs, budget_ms=50)
        for name in dict.fromkeys(name for _, name in ms):
            forward, backward = ms["fwd", name], ms["bwd", name]
            rows.append({"name": name, "dropout": dropout, "fwd_ms": forward, "bwd_ms": backward})
            print(
                f"GPT-2 medium, dropout {dropout}: {name} {forward + backward:.2f} ms", flush=True
            )
    return rows


def bias(seqlen: int) -> list[Row]:
    """A bias of q's type, and one of bool, also beside dropout, that all heads share."""
    rows = []
    for dim in (64, 128):
        x = tensors(TOKENS // seqlen, seqlen, WIDTH // dim, dim, torch.bfloat16)
        values = torch.randn(1, 1, seqlen, seqlen, device="cuda")
        of = {"bfloat16": values.bfloat16(), "bool": values > 0}
        for kind, dropout in (("bfloat16", 0.0), ("bool", 0.0), ("bool", 0.1)):
            runs: Runs = {}
            for backend in backends():
                runs |= ours(x, backend, bias=of[kind], dropout_p=dropout, seed=1)
            for name in WITH_BIAS:
                runs |= peer(x, name, False, dropout, of[kind])
            for (op, name), ms in median_ms(runs).items():
                row = {"name": name, "op": op, "head_dim": dim, "seqlen": seqlen, "bias": kind}
                rows.append({**row, "dropout": dropout, "ms": ms})
                what = f"{kind}, dropout {dropout}"
                print(f"bias, {what}, {name} {op} d{dim}: {ms:.3f} ms", flush=True)
    return rows


def alibi() -> list[Row]:
    """ALiBi with the slopes of its paper (arXiv 2108.12409, section 3) beside the plain call."""
    rows = []
    for dim, causal in itertools.product((64, 128), (False, True)):
        heads = WIDTH // dim
        x = tensors(4, 4096, heads, dim, torch.bfloat16)
        mask = fs.Causal() if causal else None
        slopes = 2.0 ** (-8 / heads * torch.arange(1, heads + 1, device="cuda"))
        for backend in backends():
            runs: Runs = {}
            for kind, options in {"plain": {}, "alibi": {"alibi_slopes": slopes}}.items():
                found = ours(x, backend, mask=mask, **options)
                runs |= {(op, kind): run for (op, _), run in found.items()}
            if len(runs) < 4:
                continue
            ms = median_ms(runs)
            for op in ("fwd", "bwd"):
                part = ms[op, "alibi"] / ms[op, "plain"]
                row = {"name": backend, "op": op, "head_dim": dim, "causal": causal}
                rows.append({**row, "ms": ms[op, "alibi"], "of_plain": part})
                where = f"{backend} {op} d{dim} {'causal' if causal else 'full'}"
                print(f"ALiBi, {where}: {part:.3f}", flush=True)
    return rows


def deterministic(seqlens: list[int]) -> list[Row]:
    """What the same bits from run to run cost in the backward."""
    rows = []
    for dim in (64, 128, 256):
        for causal in (False, True):
            for seqlen in seqlens:
                x = tensors(TOKENS // seqlen, seqlen, WIDTH // dim, dim, torch.bfloat16)
                mask = fs.Causal() if causal else None
                for backend in backends():
                    runs: Runs = {}
                    for same_bits in (False, True):
                        found = ours(x, backend, mask=mask, deterministic=same_bits)
                        if found:
                            runs[same_bits] = found["bwd", backend]
                    if len(runs) < 2:
                        continue
                    ms = median_ms(runs)
                    row = {"name": backend, "head_dim": dim, "causal": causal, "seqlen": seqlen}
                    rows.append({**row, "ms": ms[True], "of_default": ms[True] / ms[False]})
                    where = f"{backend} d{dim} {'causal' if causal else 'full'} {seqlen}"
                    print(f"deterministic, {where}: {rows[-1]['of_default']:.3f}", flush=True)
                del x
    return rows


def features_off(library: Path) -> list[Row]:
    """What it costs to have features compiled in of which a call asks for none.

    No call takes such a kernel: each is found by a problem that needs it, and launched without.
    """
    harness = Harness(str(library))
    rows = []
    for dim in (64, 128):
        q, k, v, dout = tensors(4, 4096, WIDTH // dim, dim, torch.bfloat16)
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

        for backend in backends():
            runs: Runs = {}
            for kind, need in {"plain": off, "dropout": dropout, "all": everything}.items():
                for op, name in enumerate(("fwd", "bwd")):
                    fitting = harness.pick(op, need, words(need), all_fitting=True)
                    of_backend = [i for i in fitting if harness.backend(i) == backend]
                    if of_backend:
                        runs[name, kind] = launch(of_backend[0])
            for (op, kind), ms in (times := median_ms(runs)).items():
                if kind != "plain":
                    row = {"name": backend, "op": op, "head_dim": dim, "compiled_in": kind}
                    part = ms / times[op, "plain"]
                    rows.append({**row, "of_plain": part})
                    print(f"{kind} compiled in, {backend} {op} d{dim}: {part:.3f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default="benchmarks/results/gpu_bench", help="without an ending")
    parser.add_argument("--quick", action="store_true", help="few cells")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument(
        "--kernels",
        type=Path,
        default=KERNELS,
        help="the library of single kernels",
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    seqlens = [1024, 4096] if args.quick else [512, 1024, 2048, 4096, 8192, 16384]
    record = gpu_record.header("gpu_bench", torch.cuda.get_device_name())
    record["dense"] = dense(args.head_dims, seqlens)
    record["lengths"] = lengths([128, 256] if args.quick else [128, 256, 32768, 65536])
    record["gqa"] = gqa([1024] if args.quick else [4096, 16384])
    record["few_queries"] = few_queries(4096 if args.quick else 65536)
    record["windows"] = windows(4096 if args.quick else 16384)
    record["packed"] = packed(16384 if args.quick else 32768)
    record["sparse"] = sparse(2048 if args.quick else 8192)
    record["gpt2_medium"] = gpt2_medium()
    record["bias"] = bias(1024 if args.quick else 4096)
    record["alibi"] = alibi()
    record["deterministic"] = deterministic([1024] if args.quick else [2048, 16384])
    record["features_off"] = features_off(args.kernels)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(_rounded(record), indent=1) + "\n")
    with open(out.with_suffix(".csv"), "w", newline="") as f:
        columns = ("op", "head_dim", "causal", "seqlen", "name", "ms", "tflops")
        writer = csv.writer(f)
        writer.writerow(columns)
        for row in _rounded(record["dense"]):
            writer.writerow([int(row[c]) if c == "causal" else row[c] for c in columns])
    print(f"record: {out.with_suffix('.json')}")


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.4g}")
    if isinstance(x, dict):
        return {key: _rounded(value) for key, value in x.items()}
    return [_rounded(value) for value in x] if isinstance(x, list) else x


if __name__ == "__main__":
    main()
