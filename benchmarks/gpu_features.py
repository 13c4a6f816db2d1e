"""Sections of gpu_bench.py: what dropout, a bias, ALiBi and equal bits take, asked for and not."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cpp" / "gpu"))

import torch
from flashsdk._commands.gpu_timing import Runs, timed
from gpu_calls import DEVICE, TOKENS, WIDTH, fs, ours, peer, tensors
from gpu_tables import WITH_BIAS
from gpu_wanted import OPS, Row, Wanted
from harness import Harness, Problem

GPT2_MEDIUM = (64, 1024, 16, 64)  # batch, seqlen, heads, head_dim


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
