"""Sections of gpu_bench.py: whole matrices of scores, of long, short and many sequences."""

from __future__ import annotations

import torch
from flashsdk._commands.gpu_timing import Runs, timed
from gpu_calls import (
    BASELINE,
    DEVICE,
    TOKENS,
    WIDTH,
    extra_bytes,
    flops,
    fs,
    named,
    ours,
    peer,
    peer_packed,
    tensors,
)
from gpu_tables import OURS
from gpu_wanted import Row, Wanted


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


def over(rows: list[Row], base: str) -> list[tuple[str, float]]:
    """Our rates over a peer's, or over our other build's, of the rows of one cell."""
    rate = {(r["op"], r["name"]): r["tflops"] for r in rows}
    found = []
    for op, name in rate:
        other = f"{name} {base}" if base == BASELINE else base
        if name in OURS and (op, other) in rate:
            found.append((f"{op} {name}", rate[op, name] / rate[op, other]))
    return found


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


MANY_SHORT = ((20000, 1), (1024, 8), (512, 17))  # sequences, tokens of each


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
