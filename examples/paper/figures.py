"""Figures that docs/paper.md takes from records: ratios, seconds, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]

LENGTHS = (1024, 2048, 4096)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def times(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}f}×" if value else "–"


def fitting(rows: list[dict[str, Any]], **wanted: Any) -> Iterator[dict[str, Any]]:
    """Those that are of all that is wanted."""
    return (row for row in rows if all(row.get(key) == x for key, x in wanted.items()))


def ratios(record: Record | None) -> list[dict[str, Any]]:
    return record["result"].get("ratios", []) if record else []


def ratio_of(record: Record | None, what: str, **wanted: Any) -> float | None:
    """Of the first of the record's ratios that fits."""
    return next(fitting(ratios(record), **wanted), {}).get(what)


def ratio(record: Record, what: str, digits: int = 2, **wanted: Any) -> str:
    return times(ratio_of(record, what, **wanted), digits)


def seconds_of(record: Record) -> dict[tuple, float]:
    """Of a step, by size, length, whether it is compiled, and method."""
    return {
        (row["size"], row["seqlen"], row["compiled"], row["method"]): row["seconds"]
        for row in record["rows"]
        if "seconds" in row
    }


def longer(record: Record, compiled: bool) -> str:
    seconds = seconds_of(record)
    eager = seconds.get(("small", 1024, compiled, "eager"))
    ours = seconds.get(("small", 4096, compiled, "flashsdk"))
    return times(eager / ours if eager and ours else None)


def best_step(record: Record, size: str, seqlen: int) -> dict[str, Any]:
    """The row of the fastest of PyTorch's backends, compiled. Raises ValueError without any."""
    rows = [
        row
        for row in fitting(record["rows"], size=size, seqlen=seqlen, compiled=True)
        if row["method"].startswith("SDPA") and "seconds" in row
    ]
    return min(rows, key=lambda row: row["seconds"])


def dense(record: Record | None) -> dict[str, list[float]]:
    """Of each problem of many lengths, forward and backward, at 128 to 2048."""
    found: dict[str, list[float]] = {}
    for entry in ratios(record):
        if entry["seqlen"] <= 2048 and "dense" in entry and entry["name"] != "GPT-2 medium":
            found.setdefault(entry["name"], []).append(entry["dense"])
    return found


def memory(record: Record | None, seqlen: int) -> float | None:
    """How many times less, with the eight tensors of the problem, which are there anyway."""
    found = {}
    for row in record["rows"] if record else []:
        if (row["name"], row["seqlen"]) == ("causal, dropout 0.1", seqlen) and row.get("memory"):
            tensor = 2 * row["batch"] * row["seqlen"] * row["heads"] * row["head_dim"]
            found[row["method"]] = row["memory"] + 8 * tensor
    both = {"standard", "flashsdk"} <= found.keys()
    return found["standard"] / found["flashsdk"] if both else None
