"""The tables of a CPU record, to be printed as text or Markdown.

``goals`` of a function is benchmarks/cpu_goals.py, where what the kernels must reach is to stand
beside what they do; None for everybody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flashsdk._commands.table import length, percent, seconds

Rows = list[dict[str, Any]]
MISSED = " ✗"


class Table(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]
    left: int


def tables(record: dict[str, Any], goals: Any = None) -> list[Table]:
    """Only those that the record has rows for."""
    every = [kind(record, goals) for kind in (dense, sparse, latency)]
    return [table for table in every if table.rows]


def missed(record: dict[str, Any], goals: Any) -> tuple[int, int]:
    """(goals missed, goals)."""
    cells = [cell for table in tables(record, goals) for row in table.rows for cell in row]
    return sum(MISSED in c for c in cells), sum("(≥" in c or "(≤" in c for c in cells)


def left_out(record: dict[str, Any], goals: Any) -> int:
    """Ratios to PyTorch that are stated for other processors, and were measured here."""
    rows = [row for row in _of(record, "dense") if "ratio" in row]
    return sum(goals.goal(row, record).left_out for row in rows)


def dense(record: dict[str, Any], goals: Any = None) -> Table:
    rows = _of(record, "dense")
    keys = ("dtype", "heads", "seqlen", "head_dim", "mask")
    ops = {row["op"] for row in rows}
    lines: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for row in rows:
        goal = goals and goals.goal(row, record)
        ratio = f"{row['ratio']:.2f}×" if "ratio" in row else "–"
        lines.setdefault(tuple(row[k] for k in keys), {})[row["op"]] = [
            f"{row['gflops']:.0f}",
            _above(percent(row["share"]), row["share"], goal and goal.share, percent),
            _above(ratio, row.get("ratio", 0.0), goal and goal.ratio, lambda x: f"{x:g}×"),
        ]
    header = ["dtype", "heads × dim", "seqlen", "mask"]
    names = {"fwd": "forward", "bwd": "backward"}
    shown = [op for op in names if op in ops]
    for op in shown:
        header += [f"{names[op]} GFLOP/s", "of peak", "vs PyTorch"]
    cells = [
        [
            dtype,
            f"{heads} × {dim}",
            length(seqlen),
            mask,
            *(cell for op in shown for cell in of.get(op, ["", "", ""])),
        ]
        for (dtype, heads, seqlen, dim, mask), of in lines.items()
    ]
    return Table("Dense and causal, batch 1", header, cells, 4)


def sparse(record: dict[str, Any], goals: Any = None) -> Table:
    lines = [
        [
            r["dtype"],
            r["op"],
            f"{r['heads']} × {r['head_dim']}",
            length(r["seqlen"]),
            percent(r["density"]),
            seconds(r["seconds"]),
            seconds(r["dense_seconds"]),
            _below(percent(r["of_dense"]), r["of_dense"], limit(record, r, goals), percent),
        ]
        for r in _of(record, "sparse")
    ]
    header = ["dtype", "op", "heads × dim", "seqlen", "density", "time", "dense", "of dense"]
    return Table("Block-sparse, blocks of 128 × 128", header, lines, 4)


def latency(record: dict[str, Any], goals: Any = None) -> Table:
    lines = []
    for r in _of(record, "latency"):
        ours = _below(seconds(r["seconds"]), r["seconds"], limit(record, r, goals), seconds)
        peer = seconds(r["torch_seconds"]) if "torch_seconds" in r else "–"
        lines.append([r["framework"], r["op"], ours, peer])
    return Table("A small call, (1, 16, 1, 64)", ["arrays", "op", "time", "PyTorch's"], lines, 2)


def peak(record: dict[str, Any]) -> str:
    """The peaks that were measured, as one phrase."""
    kinds: dict[str, list[float]] = {}
    for row in _of(record, "dense"):
        kinds.setdefault(row["peak_kind"], []).append(row["peak"])
    return ", ".join(f"{kind} {sorted(p)[len(p) // 2]:.0f} GFLOP/s" for kind, p in kinds.items())


def headline(record: dict[str, Any]) -> Table:
    """For a README: the dense rows of the longest sequences and the largest head dimension."""

    def size(row: dict[str, Any]) -> tuple[int, int]:
        return row["seqlen"], row["head_dim"]

    largest = max(map(size, _of(record, "dense")), default=None)
    rows = [row for row in _of(record, "dense") if size(row) == largest]
    table = dense({**record, "rows": rows})
    cells = [[cell.partition(" (")[0] for cell in row] for row in table.rows]
    return table._replace(rows=cells)


def _of(record: dict[str, Any], kind: str) -> Rows:
    return [row for row in record["rows"] if row["kind"] == kind]


def limit(record: dict[str, Any], row: dict[str, Any], goals: Any) -> float | None:
    """Sizes of a quick run are too small for goals."""
    return None if goals is None or record["quick"] else goals.limit(row)


def _above(text: str, value: float, goal: float | None, show: Callable[[float], str]) -> str:
    """`text`, with the goal beside it where there is one."""
    if goal is None:
        return text
    return f"{text} (≥{show(goal)}){'' if value >= goal else MISSED}"


def _below(text: str, value: float, goal: float | None, show: Callable[[float], str]) -> str:
    if goal is None:
        return text
    return f"{text} (≤{show(goal)}){'' if value <= goal else MISSED}"
