"""``bench --shape``: a problem of the user's own on a CPU, beside what else is here for it.

Ours and each peer are timed in turns, forward and backward, on the same numbers. A peer whose
output is another is not timed: it would be another problem.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import flashsdk as fs
from flashsdk import _bindings
from flashsdk._commands import INTERRUPTED, figures, machine
from flashsdk._commands.bench_cpu import DOT_PRODUCTS, DTYPES, PEAK_SECONDS
from flashsdk._commands.files import writable_folder
from flashsdk._commands.standard import have_torch
from flashsdk._commands.table import percent, seconds, size, text_table, times
from flashsdk._commands.timing import Call, Interleaved
from flashsdk._errors import InvalidArgument, first_line, type_name

Record = dict[str, Any]
ROUNDS, SECONDS, SLICE = 15, 8.0, 0.1
QUICK = 5, 0.6, 0.02
MOST_SCORES = 1 << 30  # bytes; several such matrices are there at once, and a minute goes by
# Largest difference of two outputs of one problem, of the largest element: both round their own.
ALIKE = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 5e-3}


@dataclass(frozen=True)
class Shape:
    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int


def read_mask(text: str) -> fs.Dense | fs.Band:
    """Of none, causal, window:L or window:L,R, as the command line checked it."""
    if text in ("none", "causal"):
        return fs.Causal() if text == "causal" else fs.Dense()
    left, right = (*map(int, text.partition(":")[2].split(",")), 0)[:2]
    return fs.SlidingWindow(left, right)


@dataclass(frozen=True)
class Problem:
    shape: Shape
    mask: fs.Dense | fs.Band
    dtype: str
    arrays: tuple[Any, Any, Any, Any]  # q, k, v, dout

    @property
    def scores(self) -> int:
        """Bytes of all scores in float32, for who makes a matrix of them."""
        s = self.shape
        return 4 * s.batch * s.heads * s.seqlen**2

    @property
    def elements(self) -> Any:
        """bool (seqlen, seqlen), None where all are visible."""
        n = self.shape.seqlen
        return None if isinstance(self.mask, fs.Dense) else self.mask.to_dense(n, n)

    def flops(self, op: str) -> float:
        """Of the products with visible elements; a backward counts 2.5 forwards."""
        s = self.shape
        visible = s.seqlen**2 * self.mask.visible_share(s.seqlen, s.seqlen)
        return 4.0 * s.batch * s.heads * s.head_dim * visible * (2.5 if op == "bwd" else 1.0)


def make(shape: Shape, mask: fs.Dense | fs.Band, dtype: str) -> Problem:
    """Random normal numbers, as PyTorch's tensors where it is installed."""
    rng = np.random.default_rng(0)
    of_q = (shape.batch, shape.seqlen, shape.heads, shape.head_dim)
    of_kv = (shape.batch, shape.seqlen, shape.heads_kv, shape.head_dim)
    values = [rng.standard_normal(x, dtype=np.float32) for x in (of_q, of_kv, of_kv, of_q)]
    if have_torch():
        import torch

        arrays: list[Any] = [torch.from_numpy(x).to(getattr(torch, DTYPES[dtype])) for x in values]
    else:
        kind: Any = DTYPES[dtype]
        if dtype == "bf16":
            try:
                import ml_dtypes
            except ImportError:
                raise InvalidArgument("--dtype: bf16; fp32 or fp16, or install ml_dtypes") from None
            kind = ml_dtypes.bfloat16
        arrays = [x.astype(kind) for x in values]
    q, k, v, dout = arrays
    return Problem(shape, mask, dtype, (q, k, v, dout))


# ---- who is timed: each gives its forward, its backward, and its output as float32


@dataclass(frozen=True)
class Runner:
    forward: Call
    backward: Call
    out: Any


def ours(problem: Problem) -> Runner:
    q, k, v, dout = problem.arrays
    mask = problem.mask
    out, lse = fs.mha_fwd(q, k, v, mask=mask, backend="cpu")
    return Runner(
        lambda: fs.mha_fwd(q, k, v, mask=mask, backend="cpu"),
        lambda: fs.mha_bwd(dout, q, k, v, out, lse, mask=mask, backend="cpu"),
        _float32(out),
    )


def pytorch(problem: Problem, backend: str) -> Runner:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, dout = (x.transpose(1, 2) for x in problem.arrays)
    causal = isinstance(problem.mask, fs.Causal)
    elements = None if causal else problem.elements
    mask = None if elements is None else torch.from_numpy(elements)
    gqa = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    which = getattr(SDPBackend, backend)

    def forward(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(which):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, **gqa
            )

    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = forward(*inputs)
    return Runner(
        lambda: forward(q, k, v),
        lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True),
        _float32(out.detach().transpose(1, 2)),
    )


def jax_nn(problem: Problem) -> Runner:
    import jax
    import jax.numpy as jnp

    kind = jnp.bfloat16 if problem.dtype == "bf16" else DTYPES[problem.dtype]
    host = jax.devices("cpu")[0]
    q, k, v, dout = (
        jax.device_put(jnp.asarray(_float32(x)).astype(kind), host) for x in problem.arrays
    )
    causal = isinstance(problem.mask, fs.Causal)
    elements = None if causal else problem.elements
    mask = None if elements is None else jnp.asarray(elements)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, mask=None if mask is None else mask[None, None], is_causal=causal
        )

    forward = jax.jit(attend)
    # Its own forward is among it: XLA keeps nothing from one program to the next.
    both = jax.jit(lambda q, k, v, dout: jax.vjp(attend, q, k, v)[1](dout))
    return Runner(
        lambda: forward(q, k, v).block_until_ready(),
        lambda: jax.block_until_ready(both(q, k, v, dout)),
        _float32(forward(q, k, v)),
    )


def _peers() -> Iterator[tuple[str, bool, Callable[[Problem], Runner]]]:
    """Name, whether all scores are a matrix there, and what makes its Runner."""
    if have_torch():
        yield "PyTorch, flash", False, lambda problem: pytorch(problem, "FLASH_ATTENTION")
        yield "PyTorch, math", True, lambda problem: pytorch(problem, "MATH")
    if importlib.util.find_spec("jax") is not None:
        yield "JAX, XLA (backward with forward)", True, jax_nn


def runners(problem: Problem) -> tuple[dict[str, Runner], dict[str, str]]:
    """Those that compute the problem, ours first; and why others of this machine do not."""
    found, left_out = {"flashsdk": ours(problem)}, dict[str, str]()
    want = found["flashsdk"].out
    largest = float(np.abs(want).max())
    for name, whole, make_runner in _peers():
        if whole and problem.scores > MOST_SCORES:
            left_out[name] = f"its scores take {size(problem.scores)}; {size(MOST_SCORES)} at most"
            continue
        try:
            runner = make_runner(problem)
        except Exception as e:  # whatever a peer says to what it does not take
            left_out[name] = f"{type_name(e)}: {first_line(e)}"
            continue
        difference = float(np.abs(runner.out - want).max()) / largest
        if difference <= ALIKE[problem.dtype]:
            found[name] = runner
        else:
            left_out[name] = f"its output differs by {difference:.2g} of the largest element"
    return found, left_out


def _float32(x: Any) -> Any:
    return np.asarray(x.float().numpy() if hasattr(x, "float") else x, np.float32)


# ---- the command


def run(shape: tuple[int, ...], mask: str, dtype: str, *, quick: bool, out: str) -> int:
    """Measures, prints a table and writes a record into the folder ``out``."""
    problem = make(Shape(*shape), read_mask(mask), dtype)
    folder = writable_folder("--out", Path(out))
    if have_torch():
        import torch

        torch.set_num_threads(fs.get_num_threads())  # of JAX there is no such way
    found, left_out = runners(problem)
    record: Record = {
        **machine.record_header("bench_shape"),
        **{
            "backend": "cpu",
            "quick": quick,
            "shape": asdict(problem.shape),
            "mask": mask,
            "dtype": dtype,
        },
        "kernel": {
            "fwd": fs.explain(*problem.arrays[:3], op="fwd", mask=problem.mask).kernel,
            "bwd": fs.explain(*problem.arrays[:3], op="bwd", mask=problem.mask).kernel,
        },
        "left_out": left_out,
        "rows": [],
    }
    try:
        for op in ("fwd", "bwd"):
            record["rows"] += measure(problem, found, op, QUICK if quick else None)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C: no record")
        return INTERRUPTED
    print(describe(record))
    path = folder / f"cpu_{record['isa']}_shape.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {path}")
    return 0


def measure(
    problem: Problem, found: dict[str, Runner], op: str, effort: tuple[int, float, float] | None
) -> list[Record]:
    rounds, budget, piece = effort or (ROUNDS, SECONDS, SLICE)
    dot = problem.dtype in DOT_PRODUCTS.get(fs.build_info()["cpu_isa"], ())
    peaks: list[float] = []

    def peak() -> None:
        peaks.append(_bindings.measure_peak("bf16_dot" if dot else "fp32", PEAK_SECONDS))

    calls: dict[str, Call] = {"peak": peak}
    calls |= {n: r.forward if op == "fwd" else r.backward for n, r in found.items()}
    samples = Interleaved(calls, slice=piece).run(rounds, budget * len(calls) / 2)
    del samples["peak"]
    best = statistics.median(peaks)
    mine = statistics.median(samples["flashsdk"])
    rows = []
    for name, taken in samples.items():
        low, middle, high = quartiles(taken)
        rate = problem.flops(op) / middle / 1e9
        rows.append(
            {"op": op, "name": name, "samples": taken, "seconds": middle, "quartiles": [low, high]}
            | {"gflops": rate, "share": rate / best, "of_ours": middle / mine}
        )
    return rows


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def describe(record: Record) -> str:
    s = record["shape"]
    title = (
        f"batch {s['batch']}, seqlen {s['seqlen']}, heads {s['heads']}:{s['heads_kv']}, head_dim "
        f"{s['head_dim']}, {record['dtype']}, mask {record['mask']}"
    )
    header = ["", "op", "median", "quartiles", "samples", "GFLOP/s", "of peak", "time / ours"]
    rows = [
        [
            row["name"],
            row["op"],
            seconds(row["seconds"]),
            " to ".join(map(seconds, row["quartiles"])),
            str(len(row["samples"])),
            f"{row['gflops']:.0f}",
            percent(row["share"]),
            times(row["of_ours"]),
        ]
        for row in record["rows"]
    ]
    lines = [
        f"flashsdk {record['flashsdk']} on {figures.where(record)}",
        title,
        *(f"{op}: {kernel}" for op, kernel in record["kernel"].items()),
        "",
        text_table([header], rows, 2),
    ]
    lines += [f"not timed: {name}: {why}" for name, why in record["left_out"].items()]
    return "\n".join(lines)
