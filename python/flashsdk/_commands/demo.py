"""``demo``: error, time and memory at the shapes of real models, beside standard attention."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashsdk as fs
from flashsdk import _plot
from flashsdk._commands import exact, figures, machine, standard, table
from flashsdk._commands.files import writable_file
from flashsdk._commands.memory import available_bytes, extra_bytes
from flashsdk._commands.progress import Progress
from flashsdk._commands.timing import Interleaved, median

Array = NDArray[np.float32]
SCORE_BYTES = 320 << 20  # most that one score matrix of standard attention may take here
BLOCK = 128
SPARSE_DENSITY = 1 / 8
SLOW = 0.5  # seconds of forward and backward that are not repeated


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    heads_kv: int
    seqlen: int
    head_dim: int
    mask: str  # "none", "causal", "block-sparse"

    def make_mask(self) -> fs.Dense | fs.Band | fs.BlockMask:
        if self.mask == "block-sparse":
            return fs.layouts.random(
                self.seqlen, self.seqlen, BLOCK, density=SPARSE_DENSITY, seed=0
            )
        return fs.Causal() if self.mask == "causal" else fs.Dense()

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}:{self.heads_kv}"
        return f"{heads} × {self.head_dim}"


SHAPES = (
    Shape("GPT-2 small", 12, 12, 1024, 64, "causal"),
    Shape("BERT-large", 16, 16, 512, 64, "none"),
    Shape("Llama-3-8B", 32, 8, 2048, 128, "causal"),
    Shape("16K tokens", 2, 2, 16384, 64, "none"),
    Shape("16K tokens", 2, 2, 16384, 64, "causal"),
    Shape("16K tokens", 2, 2, 16384, 64, "block-sparse"),
)


@dataclass
class Row:
    """What was measured at one shape. Times in seconds, memory in bytes, errors against float64."""

    name: str
    dims: str  # heads (query:key) × head_dim
    seqlen: int
    mask: str
    density: float  # of the blocks of scores that are visited
    fwd: float
    bwd: float
    memory: int
    standard_fwd: float
    standard_bwd: float
    standard_memory: float
    measured_part: float  # of standard attention; the rest is scaled up
    error_out: float
    error_grads: float
    standard_error_out: float
    standard_error_grads: float
    ok: bool


class Once:
    """Both calls, once: seconds, and bytes beyond what was there before."""

    def __init__(self, pair: standard.Pair) -> None:
        self.fwd = self.bwd = 0.0
        self.memory = extra_bytes(lambda: self._run(pair))

    def _run(self, pair: standard.Pair) -> None:
        start = time.perf_counter()
        pair.forward()
        middle = time.perf_counter()
        pair.backward(keep=False)
        self.fwd, self.bwd = middle - start, time.perf_counter() - middle


class Inputs:
    """q, k, v and dout of one shape, batch 1, random normal."""

    def __init__(self, shape: Shape) -> None:
        rng = np.random.default_rng(0)

        def random(heads: int) -> Array:
            return rng.standard_normal((1, shape.seqlen, heads, shape.head_dim), dtype=np.float32)

        self.q, self.dout = random(shape.heads), random(shape.heads)
        self.k, self.v = random(shape.heads_kv), random(shape.heads_kv)


class Ours:
    """Our calls, into arrays that hold NaN until then and whose every page is there."""

    def __init__(self, x: Inputs, mask: fs.Mask) -> None:
        batch, seqlen, heads, _ = x.q.shape
        self.lse = np.full((batch, heads, seqlen), np.nan, np.float32)
        self.out, *self.grads = (np.full_like(t, np.nan) for t in (x.dout, x.q, x.k, x.v))
        self.x, self.mask = x, mask

    def forward(self) -> object:
        x = self.x
        return fs.mha_fwd(x.q, x.k, x.v, mask=self.mask, out=self.out, lse=self.lse)

    def backward(self, keep: bool = True) -> object:
        x, (dq, dk, dv) = self.x, self.grads
        return fs.mha_bwd(
            x.dout, x.q, x.k, x.v, self.out, self.lse, mask=self.mask, dq=dq, dk=dk, dv=dv
        )


def run(out: str, record: str | None) -> int:
    """Prints the table and draws `out`; 1 if an error bound is missed."""
    picture = writable_file("--out", _plot.picture("--out", out))
    if record is not None:
        writable_file("--record", Path(record))
    warm_up()
    rows: list[Row] = []
    steps = 4.0 * len(SHAPES)
    with Progress("demo", steps) as progress:
        for i, shape in enumerate(SHAPES):

            def step(text: str, part: int, i: int = i, shape: Shape = shape) -> None:
                name = f"{shape.name}, {shape.mask}" if shape.mask != "none" else shape.name
                progress.update(4 * i + part, f"{name}: {text}")

            rows.append(measure(shape, step))
    header = machine.record_header("demo")
    data = {**header, "framework": framework(), "rows": [asdict(row) for row in rows]}
    print(describe(data))
    if record is not None:
        Path(record).write_text(json.dumps(data, indent=1) + "\n")
    print(figures.save(figures.demo, data, picture))
    missed = [row.name for row in rows if not row.ok]
    if missed:
        print(f"error bound missed: {', '.join(missed)}")
    return 1 if missed else 0


def warm_up() -> None:
    """Code is loaded and threads are started."""
    tiny = Shape("", 2, 1, 64, 64, "causal")
    x, mask = Inputs(tiny), tiny.make_mask()
    fs.mha_bwd(x.dout, x.q, x.k, x.v, *fs.mha_fwd(x.q, x.k, x.v, mask=mask), mask=mask)
    theirs = standard_part(x, exact.Visibility.of(mask), tiny.heads, tiny.seqlen)
    theirs.forward()
    theirs.backward()


def framework() -> str:
    return "PyTorch" if standard.have_torch() else "NumPy"


def measure(shape: Shape, step: Callable[[str, int], None]) -> Row:
    x, mask = Inputs(shape), shape.make_mask()
    visibility = exact.Visibility.of(mask)
    density = 0.5 if visibility.causal else 1.0
    step("memory", 0)
    ours = Ours(x, mask)
    heads, rows = affordable(shape)
    part = heads / shape.heads * rows / shape.seqlen
    theirs = standard_part(x, visibility, heads, rows)
    standard_once = Once(theirs)
    once = Once(ours)

    step("time", 1)
    # Calls of seconds have been timed well enough.
    calls: dict[str, Callable[[], object]] = {}
    times = {"fwd": once.fwd, "bwd": once.bwd}
    times |= {"standard fwd": standard_once.fwd, "standard bwd": standard_once.bwd}
    if standard_once.fwd + standard_once.bwd < SLOW:
        calls |= {"standard fwd": theirs.forward, "standard bwd": theirs.backward}
    if once.fwd + once.bwd < SLOW:
        calls |= {"fwd": ours.forward, "bwd": ours.backward}
    samples = Interleaved(calls, slice=0.05).run(rounds=7, seconds=1.5)
    times |= {name: median(s) for name, s in samples.items()}
    del theirs

    step("error against float64", 2)
    errors = compare(shape, x, visibility, ours)
    return Row(
        name=shape.name,
        dims=str(shape),
        seqlen=shape.seqlen,
        mask=shape.mask,
        density=mask.density if isinstance(mask, fs.BlockMask) else density,
        fwd=times["fwd"],
        bwd=times["bwd"],
        # out and gradients are results; the LSE is what the backward needs beyond them.
        memory=once.memory + ours.lse.nbytes,
        standard_fwd=times["standard fwd"] / part,
        standard_bwd=times["standard bwd"] / part,
        standard_memory=standard_once.memory / part,
        measured_part=part,
        error_out=errors["ours"][0],
        error_grads=errors["ours"][1],
        standard_error_out=errors["standard"][0],
        standard_error_grads=errors["standard"][1],
        ok=all(
            ours <= 2 * naive + 1e-5
            for ours, naive in zip(errors["ours"], errors["standard"], strict=True)
        ),
    )


def affordable(shape: Shape) -> tuple[int, int]:
    """Heads and query rows of standard attention that fit: all, or whole heads, or part of one."""
    budget = min(SCORE_BYTES, available_bytes() // 8)
    per_head = 4 * shape.seqlen**2
    if per_head <= budget:
        # Whole groups of query heads, so that GQA stays what it is.
        group = shape.heads // shape.heads_kv
        return min(shape.heads, max(group, budget // per_head // group * group)), shape.seqlen
    rows = shape.seqlen
    while 4 * shape.seqlen * rows > budget and rows > 256:
        rows //= 2
    return 1, rows


def standard_part(x: Inputs, visibility: exact.Visibility, heads: int, rows: int) -> standard.Pair:
    """Standard attention of the first heads and the last query rows."""
    seqlen, group = x.q.shape[1], x.q.shape[2] // x.k.shape[2]
    heads_kv = max(1, heads // group)
    start = seqlen - rows
    hidden = visibility.hidden(start, seqlen, seqlen, seqlen)
    q, dout = (t[:, start:, :heads] for t in (x.q, x.dout))
    k, v = (t[:, :, :heads_kv] for t in (x.k, x.v))
    return standard.standard_attention(q, k, v, dout, hidden, fs.get_num_threads())


def compare(
    shape: Shape, x: Inputs, visibility: exact.Visibility, ours: Ours
) -> dict[str, tuple[float, float]]:
    """Largest error against float64 of (out, gradients), ours and standard attention's in float32.

    One key head and the query heads that share it; of long sequences every eighth block of dq, dk
    and dv.
    """
    kv = shape.heads_kv - 1
    group = shape.heads // shape.heads_kv
    heads = slice(kv * group, (kv + 1) * group)
    every = 8 if shape.seqlen > 4096 else 1

    def attention(dtype: type) -> exact.Gradients:
        q, dout = x.q[0, :, heads], x.dout[0, :, heads]
        return exact.attention(q, x.k[0, :, kv], x.v[0, :, kv], dout, visibility, dtype, every)

    with ThreadPoolExecutor() as threads:
        truth, naive = threads.map(attention, (np.float64, np.float32))
    dq, dk, dv = ours.grads
    got = exact.Gradients(ours.out[0, :, heads], dq[0, :, heads], dk[0, :, kv], dv[0, :, kv])

    def errors(result: exact.Gradients) -> tuple[float, float]:
        def worst(name: str) -> float:
            right = getattr(truth, name)
            known = ~np.isnan(right)
            return float(np.abs(getattr(result, name)[known] - right[known]).max())

        # Not max(), which would let a NaN pass.
        return worst("out"), float(np.max([worst(name) for name in ("dq", "dk", "dv")]))

    return {"ours": errors(got), "standard": errors(naive)}


def describe(data: dict[str, Any]) -> str:
    """The table of a record."""
    header = [
        ["fp32, batch 1", "heads", "seqlen", "mask", "forward ms", "", "", "backward ms", "", "",
         "extra memory MiB", "", "", "max error"],
        ["", "× dim", "", "", *["standard", "ours", ""] * 3, "vs fp64"],
    ]  # fmt: skip
    rows = []
    for r in (Row(**row) for row in data["rows"]):
        scaled = "" if r.measured_part == 1 else "*"
        mask = r.mask if r.mask != "block-sparse" else f"sparse {r.density:.1%}"
        cells = [r.name, r.dims, table.length(r.seqlen), mask]
        for standard_, ours, unit in (
            (r.standard_fwd, r.fwd, 1e-3),
            (r.standard_bwd, r.bwd, 1e-3),
            (r.standard_memory, r.memory, 1 << 20),
        ):
            cells += [
                scaled + table.three_digits(standard_ / unit),
                table.three_digits(ours / unit),
                table.times(standard_ / ours),
            ]
        rows.append(
            [*cells, f"{max(r.error_out, r.error_grads):.1e}" + ("" if r.ok else " MISSED")]
        )
    lines = [
        f"flashsdk {data['flashsdk']} on {data['cpu']}, {data['isa']}, {data['threads']} threads",
        f"standard attention: softmax(QKᵀ)V with the scores stored, in {data['framework']}",
        "",
        table.text_table(header, rows, left=4),
        "",
    ]
    parts = sorted({r["measured_part"] for r in data["rows"]} - {1})
    if parts:
        of = " and ".join(str(Fraction(part).limit_denominator(2**16)) for part in parts)
        lines.append(
            f"* standard attention measured on {of} of the heads and query rows, scaled up"
        )
    lines += [
        "extra memory: peak beyond inputs, outputs and gradients, forward and backward together",
        "max error: of out, dq, dk, dv; allowed: twice the error of standard attention + 1e-5",
    ]
    return "\n".join(lines)
