"""Times kernels of the harness beside PyTorch's FlashAttention-2, interleaved.

python bench_kernels.py HARNESS.so [--csv FILE] [--head-dims 64 128 256] [--all-kernels]
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))

import numpy as np
import torch
from flashsdk._commands.gpu_timing import timed
from harness import Harness, Mask, Problem


def median_ms(runs: dict) -> dict:
    return {key: times.ms for key, times in timed(runs).items()}


def runs_of(harness, p, causal, all_kernels, torch_too=True):
    """{(op, name): callable} of our fitting kernels and PyTorch's."""
    out, lse = harness.outputs(p)
    dout = torch.randn_like(out)
    grads = [torch.empty_like(t) for t in (p.q, p.k, p.v)]
    words = harness.words(p, out, lse, dout, *grads)
    runs = {}
    for op in (0, 1):
        found = harness.pick(op, p, words, all_fitting=True)
        same_size = [i for i in found if harness.entries[i][2] == harness.entries[found[0]][2]]
        for index in same_size if all_kernels else found[:1]:
            size = harness.lib.harness_workspace(index, words)
            workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
            features = "f" if harness.entries[index][4] else ""
            name = f"{index}:{harness.entries[index][5]}x{harness.entries[index][6]}{features}"
            runs[op, name] = lambda index=index, workspace=workspace: harness.launch(
                index, p, words, workspace
            )
    first = harness.pick(0, p, words)
    harness.launch(
        first, p, words, harness.workspace(first, p, words)
    )  # the backward reads its output
    if torch_too:
        leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (p.q, p.k, p.v)]
        dropout = p.threshold / 256
        # Only kernels are timed: the op behind scaled_dot_product_attention, forward and backward.
        forward = torch.ops.aten._scaled_dot_product_flash_attention
        result = forward(*(t.detach() for t in leaves), dropout, causal)
        o, fa2_lse, cq, ck, mq, mk, seed, offset, _ = result
        runs[0, "fa2"] = lambda: forward(*(t.detach() for t in leaves), dropout, causal)
        do = dout.transpose(1, 2)
        runs[1, "fa2"] = lambda: torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do,
            *(t.detach() for t in leaves),
            o,
            fa2_lse,
            cq,
            ck,
            mq,
            mk,
            dropout,
            causal,
            seed,
            offset,
        )
    return runs


def bench_sparse(harness, seqlen=8192, block=128):
    """Random layouts with the diagonal, against our own kernels without a mask and at density 1."""
    for head_dim in (64, 128):
        heads = 2048 // head_dim
        q, k, v = (
            torch.randn(2, seqlen, heads, head_dim, device="cuda").bfloat16() for _ in range(3)
        )
        n = seqlen // block
        runs = {}
        densities = {}
        for density in (0.0625, 0.125, 0.25, 0.5, 1.0):
            blocks = np.random.default_rng(0).random((1, 1, n, n)) < density
            blocks |= np.eye(n, dtype=bool)
            densities[density] = float(blocks.mean())
            mask = Mask("block_sparse", block=(block, block), blocks=blocks.astype(np.int64))
            try:
                found = runs_of(harness, Problem(q, k, v, mask), False, False, torch_too=False)
            except LookupError:
                return
            runs |= {(op, density): run for (op, _), run in found.items()}
        dense = runs_of(harness, Problem(q, k, v, Mask()), False, False, torch_too=False)
        runs |= {(op, "dense"): run for (op, _), run in dense.items()}
        ms = median_ms(runs)
        for op, label in ((0, "fwd"), (1, "bwd")):
            print(
                f"sparse {label} d{head_dim} {seqlen}: dense {ms[op, 'dense']:.3f} ms  "
                + "  ".join(
                    f"density {densities[d]:.3f}: {ms[op, d]:.3f} ms"
                    f" = {ms[op, d] / ms[op, 'dense']:.3f}"
                    for d in densities
                ),
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library")
    parser.add_argument("--csv")
    parser.add_argument("--head-dims", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument(
        "--seqlens", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192, 16384]
    )
    parser.add_argument("--all-kernels", action="store_true")
    args = parser.parse_args()
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    harness = Harness(args.library)
    rows = []
    for head_dim in args.head_dims:
        for causal in (False, True):
            for seqlen in args.seqlens:
                batch, heads = 16384 // seqlen, 2048 // head_dim
                q, k, v = (
                    torch.randn(batch, seqlen, heads, head_dim, device="cuda").bfloat16()
                    for _ in range(3)
                )
                p = Problem(q, k, v, Mask("band", right=0) if causal else Mask())
                try:
                    ms = median_ms(runs_of(harness, p, causal, args.all_kernels))
                except LookupError:  # not in this build
                    continue
                for op, label in ((0, "fwd"), (1, "bwd")):
                    flops = (
                        4
                        * batch
                        * heads
                        * seqlen**2
                        * head_dim
                        * (0.5 if causal else 1)
                        * (2.5 if op else 1)
                    )
                    cells = {name: flops / t / 1e9 for (o, name), t in ms.items() if o == op}
                    best = max((n for n in cells if n != "fa2"), key=cells.get)
                    print(
                        f"{label} d{head_dim} {'causal' if causal else 'full':6} {seqlen:5}: "
                        f"fa2 {cells['fa2']:.0f}  "
                        f"best {best} {cells[best] / cells['fa2']:.3f}  "
                        + "  ".join(f"{n} {c:.0f}" for n, c in cells.items() if n != "fa2"),
                        flush=True,
                    )
                    rows += [
                        (
                            label,
                            head_dim,
                            int(causal),
                            seqlen,
                            n,
                            round(c, 1),
                            round(c / cells["fa2"], 3),
                        )
                        for n, c in cells.items()
                    ]
    bench_sparse(harness)
    # The paper's GPT-2-medium attention
    for threshold in (0, 26):
        q, k, v = (torch.randn(64, 1024, 16, 64, device="cuda").bfloat16() for _ in range(3))
        p = Problem(q, k, v, Mask("band", right=0), threshold=threshold)
        try:
            ms = median_ms(runs_of(harness, p, True, args.all_kernels))
        except LookupError:
            continue
        print(
            f"gpt2-medium attention, dropout {threshold / 256:.3f}: "
            + "  ".join(f"{'bwd' if op else 'fwd'} {n} {t:.3f} ms" for (op, n), t in ms.items()),
            flush=True,
        )
    if args.csv:
        with open(args.csv, "w", newline="") as f:
            csv.writer(f).writerows(
                [("op", "head_dim", "causal", "seqlen", "kernel", "tflops", "over_fa2"), *rows]
            )


if __name__ == "__main__":
    main()
