"""Sections of gpu_bench.py: windows, packed sequences and layouts of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from flashsdk._commands.gpu_timing import Runs, timed
from gpu_calls import DEVICE, TOKENS, WIDTH, flops, fs, named, ours, peer, peer_packed, tensors
from gpu_wanted import Row, Wanted


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
