"""What bounds the dense cells that miss: from the records of gpu_bounds.py and gpu_counters.py."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gpu_goals
from flashsdk._commands.table import markdown_table

RESULTS = Path(__file__).resolve().parent / "results"
BOUNDS, COUNTERS = RESULTS / "gpu_bounds_h200.csv", RESULTS / "gpu_counters.csv"
GAIN = 1.1  # on zeros: from there on, at a lowered clock, the bound is what numbers cost in power
LOWERED = 0.9 * 1980  # MHz
BUSY = 60  # percent of a unit's cycles
UNITS = {"l1_percent": "L1 and shared memory", "l2_percent": "L2", "memory_percent": "memory"}
Row = dict[str, Any]
Cell = tuple[str, int, bool, int]  # op, head_dim, causal, seqlen


def text(records: Iterable[Row]) -> str:
    missed = [
        {cell: x for cell, x in gpu_goals.over_yardstick(record).items() if x < 1}
        for record in records
    ]
    bounds, counters = by_cell(BOUNDS), by_cell(COUNTERS)
    cells = sorted(set().union(*missed))
    both = bounds.keys() & counters.keys()
    if left := [gpu_goals.place(*cell) for cell in cells if cell not in both]:
        raise SystemExit(f"gpu_bounds.py and gpu_counters.py have no record of {', '.join(left)}")
    header = ["cell", "of the goal", "MHz", "on zeros", "products", "slots", "L1", "L2", "memory"]
    header += ["bound"]
    rows = [line(cell, missed, bounds[cell], counters[cell]) for cell in cells]
    return markdown_table(header, rows, 1)


def by_cell(path: Path) -> dict[Cell, list[Row]]:
    found: dict[Cell, list[Row]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            cell = row["op"], int(row["head_dim"]), row["mask"] == "causal", int(row["seqlen"])
            found.setdefault(cell, []).append(row)
    return found


def line(
    cell: Cell, missed: list[dict[Any, float]], bounds: list[Row], counted: list[Row]
) -> list[str]:
    calls = {r["data"]: r for r in bounds if r["name"] == "sm90" and r["part"] == "call"}
    gain = float(calls["random"]["ms"]) / float(calls["zeros"]["ms"])
    main = max(counted, key=lambda r: float(r["microseconds"]))
    found = [
        gpu_goals.place(*cell),
        ", ".join(f"{of[cell]:.3f}" if cell in of else "reached" for of in missed),
        f"{float(calls['random']['mhz']):.0f}",
        f"{100 * gain - 100:+.0f} %",
        f"{100 * float(calls['random']['of_peak']):.0f} %",
    ]
    percent = ("issue_slots_percent", *UNITS)
    found += [f"{float(main[name]):.0f} %" for name in percent]
    busy = [name for unit, name in UNITS.items() if float(main[unit]) >= BUSY]
    if gain >= GAIN and float(calls["random"]["mhz"]) < LOWERED:
        return [*found, "power"]
    return [*found, " and ".join(busy) or "none of these"]
