"""The table of docs/context_parallel.md from the records of context_parallel.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashsdk._commands.table import length, markdown_table

KIND = "context_parallel"
PASSES = ("forward", "backward", "both")
Record = dict[str, Any]


def text(records: Sequence[Record]) -> str:
    """What the page says of all records, and where there is none."""
    return "\n\n".join(map(block, records)) or "It has not been run on two GPUs yet."


def block(record: Record) -> str:
    goals = [row for row in record["rows"] if row["goal"] is not None]
    reached = sum(row["ratio"] >= row["goal"] for row in goals)
    about = (
        f"Two of {record['device']}, PyTorch {record['versions']['torch']}, {record['dtype']}, "
        f"{record['date']}, commit {record['commit']}: one sequence of {length(record['seqlen'])} "
        f"tokens, {record['heads']} heads. A cell is the time in milliseconds, and the speed as a "
        f"part of twice one GPU's, which has the whole sequence. The goal of "
        f"{goals[0]['goal']:.2f}, of a causal forward and backward together, is reached in "
        f"{reached} of {len(goals)}."
    )
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in record["rows"]:
        key = (str(row["head_dim"]), "causal" if row["causal"] else "none")
        cells.setdefault(key, {})[row["pass"]] = f"{row['two']['ms']:.2f}, {row['ratio']:.2f} ×"
    rows = [[*key, *(of[name] for name in PASSES)] for key, of in cells.items()]
    table = markdown_table(["head_dim", "mask", "forward", "backward", "both"], rows, 2)
    return f"{about}\n\n{table}\n\n{exactness(record)}"


def exactness(record: Record) -> str:
    """The largest of all cells, of out and of the gradients."""
    apart = _largest(record["beside_one"], "difference")
    two, one = (_largest(record["beside_float64"], who) for who in ("two", "one"))
    return (
        f"Two GPUs give what one gives but for {apart['out']:.1e} of out and "
        f"{apart['gradients']:.1e} of the gradients, as parts of the largest value. From float64, "
        f"with {length(record['small_seqlen'])} tokens, two are {two['out']:.1e} and "
        f"{two['gradients']:.1e} away, and one is {one['out']:.1e} and {one['gradients']:.1e}."
    )


def _largest(rows: Sequence[Record], name: str) -> dict[str, float]:
    of_out = [row[name] for row in rows if row["tensor"] == "out"]
    others = [row[name] for row in rows if row["tensor"] != "out"]
    return {"out": max(of_out), "gradients": max(others)}
