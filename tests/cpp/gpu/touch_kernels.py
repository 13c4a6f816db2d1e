"""Launches every kernel family on a small problem, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python touch_kernels.py HARNESS.so [--only REGEX]

A family is all that kernels differ in but the dtype and the mask: where both dtypes are built,
bfloat16 stands for both. One SM90 kernel serves all masks, and its tile may be no choice for some
of them: a tile has to be taken for one mask at least. Sequences end inside tiles, layouts skip
blocks, packed tensors have rows behind the last sequence, and each kernel gets the most features
that it takes. Persistent kernels are told that the card has two multiprocessors: small problems
then take a thread block round all its rings. Inputs are made on the CPU, so that few kernels other
than ours run under the tool. Results only have to be numbers: check_kernels.py says whether they
are right.

Processes share the list by --claims FOLDER: each takes the next family that none has, the dearest
first. A family's name is printed before its first launch: an error that sticks is of the last one.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import re
import sys
import time

import numpy as np
import torch
from harness import DTYPES, FP8, Harness, Mask, Problem

FORWARD, BACKWARD = 0, 1
KINDS = ("dense", "band", "block_sparse")
FEATURES = (
    ("softcap", "bias", "alibi", "dropout"), ("softcap", "dropout"), ("bias", "dropout"),
    ("dropout",), ("alibi",), ("bias",), (),
)  # fmt: skip
MULTIPROCESSORS = 2


def empty(*shape, dtype, aligned=True):
    """On the GPU; not aligned: rows that begin at any element."""
    wide = torch.empty(*shape[:-1], shape[-1] + (0 if aligned else 3), dtype=dtype, device="cuda")
    return wide[..., : shape[-1]]


def random(*shape, dtype, aligned=True):
    wide = torch.randn(*shape[:-1], shape[-1] + (0 if aligned else 3)).to(dtype).cuda()
    return wide[..., : shape[-1]]


def of_bits(f, x):
    """f(x); fp8 by its bits, as PyTorch moves few elements of it."""
    return f(x.view(torch.uint8)).view(FP8) if x.dtype == FP8 else f(x)


def lengths(tile_m, tile_n):
    """Queries and keys: more tiles than a ring has places, then what large tiles are chosen for."""
    rows, keys = 2 * tile_m + 5, 3 * tile_n + 7
    return (
        (rows, keys),
        (2048 + tile_m + 5, keys),
        (rows, 1024 + tile_n + 7),
    )


def many_keys(tile_m, tile_n):
    """For the last tile's logits to be far above all before, or for keys to be split."""
    return ((tile_m + 9, 4096 + tile_n + 7),)


def few_rows(tile_n):
    """Of two heads: for kernels that take one tile of 16 rows."""
    return ((7, 4096 + tile_n + 7),)


def serve(p, tile_n, page_size):
    """p with used lengths and sinks, and with keys in pages where page_size is not 0."""
    (batch, rows), keys = p.q.shape[:2], p.k.shape[1]
    p.used_q = torch.tensor([max(rows - 7, 1), 0], dtype=torch.int32).cuda()
    p.used_k = torch.tensor([keys - 2, tile_n + 3], dtype=torch.int32).cuda()
    p.sink = torch.randn(p.q.shape[2]).cuda()
    if page_size:
        each = -(-keys // page_size)
        table = torch.randperm(batch * each).to(torch.int32).reshape(batch, each)
        p.table = table.cuda()
        p.k, p.v = (
            of_bits(lambda x: x[:, :1].repeat_interleave(each * page_size, 1), x).reshape(
                -1, page_size, *x.shape[2:]
            )
            for x in (p.k, p.v)
        )
    return p


def problem(
    entry, make, features, block, size, aligned, packed, narrow_v, bias, page_size, in_keys=False
):
    """Tensors by `make`: empty will do to ask whether a kernel takes it. page_size: None where all
    rows are used, else as in serve(). in_keys: v is the first columns of k."""
    _, code, head_dim, mask, _, tile_m, tile_n, _, head_dim_v, fp8 = entry
    dtype = next(dtype for dtype, c in DTYPES.items() if c == code)
    rows, keys = size
    batch, heads, dim = 2, 2, head_dim if aligned else head_dim - 3
    dim_v = dim - 64 if narrow_v and head_dim_v == head_dim else dim - head_dim + head_dim_v
    lead_q, lead_k = ((rows,), (keys,)) if packed else ((batch, rows), (batch, keys))
    m = Mask(KINDS[mask])
    if m.kind == "band":
        m.right = 3
    elif m.kind == "block_sparse":
        m.right, m.block = 3, block
        grid = -(-rows // block[0]), -(-keys // block[1])
        m.blocks = np.random.default_rng(0).integers(0, 3, (1, heads, *grid))
        m.blocks[0, 0, 0, 0] = 2
    of_keys = FP8 if fp8 else dtype
    p = Problem(
        make(*lead_q, heads, dim, dtype=dtype, aligned=aligned),
        make(*lead_k, 1, dim, dtype=of_keys, aligned=aligned),
        make(*lead_k, 1, dim_v, dtype=of_keys, aligned=aligned),
        m,
        softcap=5.0 if "softcap" in features else 0.0,
        threshold=40 if "dropout" in features else 0,
    )
    if fp8:
        p.k_descale, p.v_descale = (torch.rand(batch, 1).cuda() for _ in range(2))
    if packed:
        first = tile_m + 3 if rows > tile_m + 5 else rows // 2
        p.cu_q = torch.tensor([0, first, rows - 2], dtype=torch.int32).cuda()
        p.cu_k = torch.tensor([0, tile_n + 2, keys - 2], dtype=torch.int32).cuda()
    if "bias" in features:
        # Rows of whole vectors, but for float32: kernels copy them otherwise.
        in_memory = keys if bias == torch.float32 else keys + -keys % 16
        p.bias = make(1, heads, rows, in_memory, dtype=bias or dtype)[..., :keys]
    if "alibi" in features:
        p.alibi = torch.rand(heads).cuda()
    if page_size is not None:
        p = serve(p, tile_n, page_size)
    if in_keys:
        p.v = p.k[..., :dim_v]
    return p


def arguments(harness, p, make):
    """A call's words, and the tensors that they point to: out, lse, dout, gradients."""
    dtype = p.q.dtype
    rows = (2, p.q.shape[0]) if p.packed else (2, 2, p.q.shape[1])
    out = make(*p.q.shape[:-1], p.v.shape[-1], dtype=dtype)
    lse = make(*rows, dtype=torch.float32)
    dout = make(*out.shape, dtype=dtype)
    grads = [make(*t.shape, dtype=dtype) for t in (p.q, p.k, p.v)]
    if p.sink is not None:
        grads.append(make(*p.sink.shape, dtype=torch.float32))
    words = harness.words(p, out, lse, dout, *grads[:3], dsink=(*grads, None)[3])
    return words, (out, lse, dout, grads)


def takes(harness, index, p):
    words, _ = arguments(harness, p, empty)
    scale, softcap = ctypes.c_double(p.scale), ctypes.c_double(p.softcap)
    return harness.lib.harness_refusal(index, words, scale, softcap) is None


def touch(
    harness, index, *, aligned=True, packed=False, deterministic=False, growing=False, scale=None,
    bias=torch.float32, page_size=None, in_keys=False,
):  # fmt: skip
    """Whether the kernel takes a problem, which it then has run; growing: in its last keys. A bias
    of None is of q's type; of any but float32, there is one. page_size and in_keys: problem()."""
    entry = harness.entries[index]
    tile = entry[5], entry[6]
    blocks = ((128, 128), tile) if KINDS[entry[3]] == "block_sparse" else ((0, 0),)
    all_features = FEATURES if entry[4] else ((),)
    if bias != torch.float32:
        all_features = [features for features in FEATURES if "bias" in features]
    widths = (False, True) if entry[2] == 192 else (False,)  # 192 x 128 has kernels of its own
    sizes = many_keys(*tile) if growing or entry[7] else lengths(*tile)
    if entry[7] and tile[0] == 16 and not entry[9]:
        sizes = few_rows(tile[1])
    elif entry[7] and page_size is not None:  # so few queries that a kernel plans the parts
        sizes = tuple((min(12, tile[0] // 2), keys) for _, keys in sizes)
    for size, features, block, narrow_v in itertools.product(sizes, all_features, blocks, widths):
        what = features, block, size, aligned, packed, narrow_v, bias, page_size, in_keys
        shape = problem(entry, empty, *what)
        shape.softmax_scale = scale
        if not takes(harness, index, shape):
            continue
        p = problem(entry, random, *what)
        p.deterministic, p.softmax_scale = deterministic, scale
        if growing:
            p.k[..., -tile[1] :, :, :] *= 40
        words, (out, lse, _, grads) = arguments(harness, p, random)
        size = harness.lib.harness_workspace(index, words)
        workspace = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8).cuda()  # NaN
        harness.launch(index, p, words, workspace)
        torch.cuda.synchronize()
        written = grads if entry[0] == BACKWARD else (out, lse)
        for x in written:
            assert not x.cpu().isnan().any(), f"kernel {index}: NaN"
        return True
    return False


def families(harness):
    """Indices of kernels by the family's name."""
    dtype = max(entry[1] for entry in harness.entries)
    found = {}
    for i, (op, of, head_dim, _, features, m, n, splits, _, fp8) in enumerate(harness.entries):
        if of == dtype:
            way = "split" if splits else "forward" if op == FORWARD else "backward"
            way = f"fp8kv_{way}" if fp8 else way
            kind = "featured" if features else "plain"
            name = f"{harness.backend(i)}_{way}_d{head_dim}_{kind}_{m}x{n}"
            found.setdefault(name, []).append(i)
    return found


def cost(name):
    """What a family costs, in an order that was measured; those that split keys go first."""
    dim = int(re.search(r"_d(\d+)", name)[1])
    return ("split" in name, name.startswith("sm90"), "backward" in name, dim)


def claimed(folder, name):
    """Whether this process is the one to do it."""
    if folder is None:
        return True
    try:
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--list", action="store_true", help="the families, and launch nothing")
    parser.add_argument("--only", default="", help="regular expression of family names")
    parser.add_argument("--claims", help="folder that all processes of one list share")
    args = parser.parse_args()
    torch.manual_seed(0)
    harness = Harness(args.library)
    of_name = families(harness)
    if args.list:
        print("\n".join(of_name))
        return 0
    touched = grown = 0
    for name in sorted(filter(re.compile(args.only).search, of_name), key=cost, reverse=True):
        if not claimed(args.claims, name):
            continue
        if "split" not in name:  # keys are split where a card has many multiprocessors
            harness.lib.harness_limit_multiprocessors(0, MULTIPROCESSORS)
        print(f"family {name}", flush=True)
        start, before = time.monotonic(), touched
        for turn, index in enumerate(of_name[name], list(of_name).index(name)):
            packed, deterministic = turn % 2 == 1, turn % 3 == 0
            done = touch(harness, index, packed=packed, deterministic=deterministic)
            touch(harness, index, aligned=False)  # of those that take any alignment
            if "_plain_" in name:
                page_sizes = [0]
                if harness.entries[index][0] == FORWARD:
                    page_sizes.append(5 if harness.backend(index) == "sm80" else 16)
                if harness.entries[index][7]:
                    page_sizes.append(32)
                for page_size in page_sizes:
                    touch(harness, index, deterministic=deterministic, page_size=page_size)
                if harness.entries[index][7] and harness.entries[index][2] > 256:
                    for page_size in (None, *page_sizes):
                        touch(harness, index, page_size=page_size, in_keys=True)
            vectors = (None, torch.bool) if "_featured_" in name else ()
            for bias in vectors:
                done |= touch(harness, index, packed=packed, deterministic=deterministic, bias=bias)
            touched += done
            if name.startswith("sm90_forward") and KINDS[harness.entries[index][3]] == "dense":
                for bias in (torch.float32, *vectors):
                    grown += touch(harness, index, growing=True, bias=bias)
                touch(harness, index, scale=-0.1)  # which no tile tries
        if touched == before:
            print(f"{name}: takes no problem of this list")
            return 1
        print(f"done {name}: {time.monotonic() - start:.1f} s", flush=True)
    print(f"touched {touched} kernels; {grown} times with scores that grow")
    return 0


if __name__ == "__main__":
    sys.exit(main())
