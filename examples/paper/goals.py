"""The goals that flashsdk has beside the paper's claims, and what of them the records show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
Figures = Iterator[tuple[str, float | None]]  # what it is of, and how many times; None: not run

LAYERS, HEADS = {"small": 12, "medium": 24}, {"small": 12, "medium": 16}  # of gpt2.py's SIZES


@dataclass(frozen=True)
class Goal:
    name: str
    least: float
    figures: Callable[[dict[str, Record]], Figures]
    remark: Callable[[dict[str, Record]], str] = lambda _: ""


def ratio(record: Record | None, what: str, **wanted: Any) -> float | None:
    """Of the first entry of the record's ratios that is of all that is wanted."""
    entries = record["result"].get("ratios", []) if record else []
    found = (e for e in entries if all(e.get(key) == value for key, value in wanted.items()))
    return next(found, {}).get(what)


def gpt2(what: str, seqlen: int, *ways: bool) -> Callable[[dict[str, Record]], Figures]:
    """Of both sizes, uncompiled or compiled; compiled steps also as CUDA graphs."""

    def figures(records: dict[str, Record]) -> Figures:
        for compiled in ways:
            shown = "compiled" if compiled else "uncompiled"
            for size in LAYERS:
                of = {"size": size, "seqlen": seqlen, "compiled": compiled}
                yield f"{size}, {shown}", ratio(records.get("gpt2-speed"), what, **of)
                if compiled:
                    graphs = ratio(records.get("gpt2-graphs"), what, **of)
                    yield f"{size}, CUDA graphs", graphs

    return figures


def bert(kind: str) -> Callable[[dict[str, Record]], Figures]:
    def figures(records: dict[str, Record]) -> Figures:
        for compiled, shown in ((False, "uncompiled"), (True, "compiled")):
            of = {"kind": kind, "compiled": compiled}
            yield shown, ratio(records.get("bert"), "best_sdpa", **of)

    return figures


def arena(method: str) -> Callable[[dict[str, Record]], Figures]:
    def figures(records: dict[str, Record]) -> Figures:
        found = records["arena"]["result"]["ratios"] if "arena" in records else []
        yield f"mean of {len(found)} tasks", sum(e[method] for e in found) / max(1, len(found))

    return figures


def attention(records: dict[str, Record]) -> Figures:
    """The least of all lengths to 2K, forward and backward together."""
    found: dict[str, list[float]] = {}
    for entry in records.get("attention", {"result": {"ratios": []}})["result"]["ratios"]:
        if entry["seqlen"] <= 2048 and "dense" in entry:
            found.setdefault(entry["name"], []).append(entry["dense"])
    for name, ratios in found.items():
        yield name, min(ratios)


def gpt2_attention(records: dict[str, Record]) -> Figures:
    yield "with the backward", ratio(records.get("attention"), "dense", name="GPT-2 medium")


def memory(record: Record | None, seqlen: int) -> float | None:
    """How many times less, with the eight tensors of the problem, which are there anyway."""
    found = {}
    for row in record["rows"] if record else []:
        if (row["name"], row["seqlen"]) == ("causal, dropout 0.1", seqlen) and row.get("memory"):
            tensor = 2 * row["batch"] * row["seqlen"] * row["heads"] * row["head_dim"]
            found[row["method"]] = row["memory"] + 8 * tensor
    both = {"standard", "flashsdk"} <= found.keys()
    return found["standard"] / found["flashsdk"] if both else None


def ceiling(records: dict[str, Record], size: str, seqlen: int) -> float | None:
    """How many times faster the best backend's compiled step is, if attention takes no time.

    Attention's time is that of attention.py's causal problem, in proportion to the heads of all
    sequences and layers.
    """
    speed, alone = records.get("gpt2-speed"), records.get("attention")
    if not speed or not alone or speed["runs"][-1]["device"] != alone["runs"][-1]["device"]:
        return None
    steps = [
        (row["seconds"], row["batch"])
        for row in speed["rows"]
        if (row["size"], row["seqlen"], row["compiled"]) == (size, seqlen, True)
        and row["method"].startswith("SDPA")
        and "seconds" in row
    ]
    calls = [
        row["both"] / (row["batch"] * row["heads"])
        for row in alone["rows"]
        if (row["name"], row["seqlen"]) == ("causal", seqlen)
        and row["method"].startswith("SDPA")
        and row.get("both")
    ]
    if not steps or not calls:
        return None
    step, batch = min(steps)
    return step / (step - min(calls) * batch * HEADS[size] * LAYERS[size])


def ceilings(seqlen: int) -> Callable[[dict[str, Record]], str]:
    def remark(records: dict[str, Record]) -> str:
        found = [ceiling(records, size, seqlen) for size in LAYERS]
        if None in found:
            return ""
        small, medium = (shown(value) for value in found)
        return f". An attention that takes no time would give {small} and {medium}"

    return remark


GOALS = (
    Goal("GPT-2 at 1K, against eager as shipped", 4.5, gpt2("eager_as_shipped", 1024, True)),
    Goal("GPT-2 at 1K, against eager alike", 1.75, gpt2("eager", 1024, False, True)),
    Goal("GPT-2 at 1K, against the best SDPA", 1.12, gpt2("best_sdpa", 1024, True), ceilings(1024)),
    Goal("GPT-2 at 4K, against eager alike", 3.0, gpt2("eager", 4096, False, True)),
    Goal("GPT-2 at 4K, against the best SDPA", 1.2, gpt2("best_sdpa", 4096, True), ceilings(4096)),
    Goal("BERT-large, packed, against the best SDPA", 1.15, bert("documents")),
    Goal("BERT-large, full sequences, against the best SDPA", 1.0, bert("full")),
    Goal("Long Range Arena, against standard attention", 2.4, arena("flashsdk")),
    Goal("Long Range Arena, block-sparse", 2.8, arena("flashsdk block-sparse")),
    Goal("Attention, 128 to 2K, against standard attention", 3.0, attention),
    Goal("Attention of GPT-2, against standard attention", 8.0, gpt2_attention),
    Goal(
        "Memory of attention at 4K",
        20.0,
        lambda records: iter([("", memory(records.get("attention"), 4096))]),
    ),
)


def shown(value: float | None) -> str:
    """Rounded down: a figure that is short of a goal does not look like it."""
    return f"{int(100 * value + 1e-6) / 100:.2f}×" if value else "–"


def rows(records: dict[str, Record]) -> list[list[str]]:
    """Goal, how much at least, what is shown, and whether that reaches it."""
    lines = []
    for goal in GOALS:
        figures = list(goal.figures(records))
        values = [value for _, value in figures if value]
        reached = sum(value >= goal.least for value in values)
        verdict = "–" if not values else "no" if not reached else "in part"
        if values and reached == len(figures):
            verdict = "yes"
        text = "; ".join(f"{name} {shown(value)}".strip() for name, value in figures)
        lines.append([goal.name, f"{goal.least:g}×", text + goal.remark(records), verdict])
    return lines
