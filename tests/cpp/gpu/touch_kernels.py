"""Launches every kernel family once on a small problem, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python touch_kernels.py HARNESS.so [--shard 0 --shards 4]

A family is all that kernels differ in but the dtype: where both are built, bfloat16 stands for
both. One SM90 kernel serves all masks, and its tile may be no choice for some of them: a tile has
to be taken for one mask at least. Sequences end inside tiles, layouts skip blocks, and each kernel
gets the most features that it takes. Inputs are made on the CPU, so that few kernels other than
ours run under the tool. Results only have to be numbers: check_kernels.py says whether they are
right.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys

import numpy as np
import torch
from harness import DTYPES, Harness, Mask, Problem

FORWARD, BACKWARD = 0, 1
KINDS = ("dense", "band", "block_sparse")
FEATURES = (("softcap", "bias", "alibi", "dropout"), ("softcap", "dropout"), ("dropout",), ())


def random(*shape, dtype, aligned=True):
    """On the GPU; not aligned: rows that begin at any element."""
    wide = torch.randn(*shape[:-1], shape[-1] + (0 if aligned else 3)).to(dtype).cuda()
    return wide[..., : shape[-1]]


def problem(entry, features, block, aligned, packed, long, narrow_v):
    _, code, head_dim, mask, _, tile_m, tile_n = entry
    dtype = next(dtype for dtype, c in DTYPES.items() if c == code)
    # Large tiles are for long sequences only.
    rows, keys = (2 * tile_m + 5, 2 * tile_n + 7) if not long else (2 * tile_m + 2048, 8199)
    batch, heads, dim = 2, 2, head_dim if aligned else head_dim - 3
    dim_v = dim - 64 if narrow_v else dim
    lead_q, lead_k = ((rows,), (keys,)) if packed else ((batch, rows), (batch, keys))
    m = Mask(KINDS[mask])
    if m.kind == "band":
        m.right = 3
    elif m.kind == "block_sparse":
        m.right, m.block = 3, block
        grid = -(-rows // block[0]), -(-keys // block[1])
        m.blocks = np.random.default_rng(0).integers(0, 3, (1, heads, *grid))
        m.blocks[0, 0, 0, 0] = 2
    p = Problem(
        random(*lead_q, heads, dim, dtype=dtype, aligned=aligned),
        random(*lead_k, 1, dim, dtype=dtype, aligned=aligned),
        random(*lead_k, 1, dim_v, dtype=dtype, aligned=aligned),
        m,
        softcap=5.0 if "softcap" in features else 0.0,
        threshold=40 if "dropout" in features else 0,
    )
    if packed:
        p.cu_q = torch.tensor([0, tile_m + 3, rows], dtype=torch.int32).cuda()
        p.cu_k = torch.tensor([0, tile_n + 2, keys], dtype=torch.int32).cuda()
    if "bias" in features:
        p.bias = torch.randn(1, heads, rows, keys).cuda()
    if "alibi" in features:
        p.alibi = torch.rand(heads).cuda()
    return p


def takes(harness, index, p, words):
    scale, softcap = ctypes.c_double(p.scale), ctypes.c_double(p.softcap)
    return harness.lib.harness_refusal(index, words, scale, softcap) is None


def touch(harness, index, aligned, packed, deterministic):
    """Whether the kernel takes a problem, which it then has run."""
    entry = harness.entries[index]
    tile = entry[5], entry[6]
    blocks = ((128, 128), tile) if KINDS[entry[3]] == "block_sparse" else ((0, 0),)
    all_features = FEATURES if entry[4] else ((),)
    widths = (False, True) if entry[2] == 192 else (False,)  # 192 x 128 has kernels of its own
    for features, block, long, narrow_v in itertools.product(
        all_features, blocks, (False, True), widths
    ):
        p = problem(entry, features, block, aligned, packed, long, narrow_v)
        p.deterministic = deterministic
        out = torch.randn(*p.q.shape[:-1], p.v.shape[-1]).to(p.q.dtype).cuda()
        rows = (2, p.q.shape[0]) if packed else (2, 2, p.q.shape[1])
        lse = torch.randn(*rows).cuda() + 8
        dout = torch.randn(*out.shape).to(p.q.dtype).cuda()
        grads = [torch.randn(*t.shape).to(t.dtype).cuda() for t in (p.q, p.k, p.v)]
        words = harness.words(p, out, lse, dout, *grads)
        if not takes(harness, index, p, words):
            continue
        size = harness.lib.harness_workspace(index, words)
        workspace = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8).cuda()  # NaN
        harness.launch(index, p, words, workspace)
        torch.cuda.synchronize()
        written = grads if entry[0] == BACKWARD else (out, lse)
        for x in written:
            assert not x.cpu().isnan().any(), f"kernel {index}: NaN"
        return True
    return False


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    harness = Harness(args.library)
    dtype = max(entry[1] for entry in harness.entries)
    of_tile = {}  # indices by (op, dtype, head_dim, features, tile)
    for i, (op, of, head_dim, _, *rest) in enumerate(harness.entries):
        if of == dtype:
            of_tile.setdefault((op, of, head_dim, *rest), []).append(i)
    touched = 0
    for n, (tile, indices) in enumerate(of_tile.items()):
        if n % args.shards != args.shard:
            continue
        before = touched
        for turn, index in enumerate(indices, n // args.shards):
            touched += touch(harness, index, True, turn % 2 == 1, turn % 3 == 0)
            touch(harness, index, False, False, False)  # of those that take any alignment
        if touched == before:
            print(f"{tile}: takes no problem of this list")
            return 1
    print(f"touched {touched} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
