"""The goals that flashsdk has beside the paper's claims, and what of them the records show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from figures import Record, best_step, dense, fitting, memory, ratio_of, ratios, times

Records = dict[str, Record]
Figures = Iterator[tuple[str, float | None]]  # what it is of, and how many times; None: not run

LAYERS, HEADS = {"small": 12, "medium": 24}, {"small": 12, "medium": 16}  # of gpt2.py's SIZES


@dataclass(frozen=True)
class Goal:
    name: str
    least: float
    figures: Callable[[Records], Figures]
    remark: Callable[[Records], str] = lambda _: ""


# ---- figures of each goal


def gpt2(what: str, seqlen: int, *ways: str) -> Callable[[Records], Figures]:
    """Of both sizes, "uncompiled" or "compiled", and compiled also as CUDA graphs."""

    def figures(records: Records) -> Figures:
        speed = records.get("gpt2-speed")
        for way in ways:
            for size in LAYERS:
                of = {"size": size, "seqlen": seqlen, "compiled": way == "compiled"}
                remark = ", eager recomputing" if what == "eager" and recomputed(speed, of) else ""
                yield f"{size}, {way}{remark}", ratio_of(speed, what, **of)
                if way == "compiled":
                    yield f"{size}, CUDA graphs", ratio_of(records.get("gpt2-graphs"), what, **of)

    return figures


def recomputed(record: Record | None, of: dict[str, Any]) -> bool:
    """Whether eager attention fits only if its layers are computed twice."""
    rows = record["rows"] if record else []
    return any(fitting(rows, **of, method="eager", recomputed=True))


def bert(kind: str) -> Callable[[Records], Figures]:
    def figures(records: Records) -> Figures:
        for way in ("uncompiled", "compiled"):
            of = {"kind": kind, "compiled": way == "compiled"}
            yield way, ratio_of(records.get("bert"), "best_sdpa", **of)

    return figures


def arena(method: str) -> Callable[[Records], Figures]:
    def figures(records: Records) -> Figures:
        found = [entry[method] for entry in ratios(records.get("arena"))]
        yield "", sum(found) / len(found) if found else None

    return figures


def attention(records: Records) -> Figures:
    found = dense(records.get("attention"))
    yield from ((name, min(values)) for name, values in found.items()) if found else [("", None)]


def gpt2_attention(records: Records) -> Figures:
    yield "", ratio_of(records.get("attention"), "dense", name="GPT-2 medium")


def attention_memory(records: Records) -> Figures:
    yield "", memory(records.get("attention"), 4096)


# ---- what attention can give at most


def ceiling(records: Records, size: str, seqlen: int) -> float | None:
    """How many times faster the best backend's compiled step is, if attention takes no time.

    The backend's attention is that of attention.py's causal problem, in proportion to the heads of
    all sequences and layers. What PyTorch picks by itself counts as the fastest backend there.
    """
    speed, alone = records.get("gpt2-speed"), records.get("attention")
    if not speed or not alone:
        return None
    try:
        step = best_step(speed, size, seqlen)
    except ValueError:  # not measured
        return None
    method, device = step["method"], speed["runs"][step["run"]]["device"]
    calls = [
        row["both"] / (row["batch"] * row["heads"])
        for row in fitting(alone["rows"], name="causal", seqlen=seqlen)
        if (row["method"] == method or (method == "SDPA" and row["method"].startswith("SDPA")))
        and row.get("both")
        and alone["runs"][row["run"]]["device"] == device
    ]
    if not calls:
        return None
    rest = step["seconds"] - min(calls) * step["batch"] * HEADS[size] * LAYERS[size]
    return step["seconds"] / rest if rest > 0 else None


def ceilings(seqlen: int) -> Callable[[Records], str]:
    def remark(records: Records) -> str:
        found = [ceiling(records, size, seqlen) for size in LAYERS]
        if None in found:
            return ""
        small, medium = map(times, found)
        return f". If attention took no time, compiled: about {small} (small), {medium} (medium)"

    return remark


GOALS = (
    Goal("GPT-2 at 1K, against eager as shipped", 4.5, gpt2("eager_as_shipped", 1024, "compiled")),
    Goal("GPT-2 at 1K, against eager", 1.75, gpt2("eager", 1024, "uncompiled", "compiled")),
    Goal(
        "GPT-2 at 1K, against the best SDPA",
        1.12,
        gpt2("best_sdpa", 1024, "compiled"),
        ceilings(1024),
    ),
    Goal("GPT-2 at 4K, against eager", 3.0, gpt2("eager", 4096, "uncompiled", "compiled")),
    Goal(
        "GPT-2 at 4K, against the best SDPA",
        1.2,
        gpt2("best_sdpa", 4096, "compiled"),
        ceilings(4096),
    ),
    Goal("BERT-large, packed, against the best SDPA", 1.15, bert("documents")),
    Goal("BERT-large, full sequences, against the best SDPA", 1.0, bert("full")),
    Goal("Long Range Arena, mean of the tasks, against standard attention", 2.4, arena("flashsdk")),
    Goal("The same, block-sparse", 2.8, arena("flashsdk block-sparse")),
    Goal("Attention, the least of 128 to 2K, against standard attention", 3.0, attention),
    Goal("Attention of GPT-2, against standard attention", 8.0, gpt2_attention),
    Goal("Memory of attention at 4K, against standard attention", 20.0, attention_memory),
)


def rows(records: Records) -> list[list[str]]:
    """Goal, how much at least, what is measured, and whether that reaches it."""
    lines = []
    for goal in GOALS:
        figures = list(goal.figures(records))
        reached = sum(value is not None and value >= goal.least for _, value in figures)
        verdict = "yes" if reached == len(figures) else "in part" if reached else "no"
        if all(value is None for _, value in figures):
            verdict = "–"
        text = "; ".join(f"{name} {times(value, 3)}".strip() for name, value in figures)
        lines.append([goal.name, f"{goal.least:g}×", text + goal.remark(records), verdict])
    return lines
