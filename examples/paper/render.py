"""Writes docs/paper.md from the records in benchmarks/results/paper.

    python examples/paper/render.py                          # write
    python examples/paper/render.py --check                  # exit 1 if the page is stale
    python examples/paper/render.py --add build/paper/attention/record.json   # take a record, write

No figure in the page is typed but the paper's own. A claim without a record says "not run yet".
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "paper"
PAGE = ROOT / "docs" / "paper.md"
MISSING = "not run yet"

Record = dict[str, Any]

INTRODUCTION = """\
<!-- Written by examples/paper/render.py from benchmarks/results/paper; change it there. -->
# The paper, reproduced

What FlashAttention (arXiv 2205.14135) claims, and what becomes of it with flashsdk. Each row is a
program of `examples/paper/`, whose head says how it is used. Where no record was taken, the row
says "not run yet". A program stops after `--minutes`, goes on when it is run again, and has
`--smoke`, a check of seconds on a CPU. Beside PyTorch the programs need `pip install '.[paper]'`,
in the folder of the sources. `python examples/paper/render.py --add FOLDER/record.json` takes a
record. How bytes are counted: [io.md](io.md).
"""


@dataclass(frozen=True)
class Claim:
    name: str
    paper: str  # the paper's figure
    record: str  # file name in RECORDS, without its ending
    command: str
    ours: Callable[[Record], str]


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def times(value: float | None) -> str:
    return f"{value:.2f}×" if value else "–"


def accuracy(record: Record) -> str:
    result = record["result"]
    if "accuracy" not in result:
        return f"no test yet; {result.get('images', 0)} images"
    stage = ""
    if result["stage"] < result["last_stage"]:
        stage = f", at stage {result['stage']} of {result['last_stage']} of the training"
    if any(run.get("teach") for run in record["runs"]):
        stage += "; trained with a loss for each pixel as well"
    low, high = percent(result["low"]), percent(result["high"])
    return f"{percent(result['accuracy'])} ({low} to {high}, {result['tested']} images){stage}"


def ratio(record: Record, what: str, **wanted: Any) -> str:
    for entry in record["result"].get("ratios", []):
        if all(entry.get(key) == value for key, value in wanted.items()):
            return times(entry.get(what))
    return "–"


def gpt2_speed(record: Record) -> str:
    compiled = {"whole": "compiled"}.get(record["settings"]["compile"], "each layer compiled")
    return "; ".join(
        f"{size}: {ratio(record, 'eager_as_shipped', size=size, seqlen=1024, compiled=False)}"
        f", {compiled} {ratio(record, 'eager_as_shipped', size=size, seqlen=1024, compiled=True)}"
        f" ({ratio(record, 'eager', size=size, seqlen=1024, compiled=True)} eager compiled alike)"
        for size in ("small", "medium")
    )


LENGTHS = (1024, 2048, 4096)


def gpt2_sdpa(record: Record) -> str:
    """Beside the fastest backend of each problem, of the lengths in their order."""

    def of_lengths(size: str, compiled: bool) -> str:
        of = {"size": size, "compiled": compiled}
        return ", ".join(ratio(record, "best_sdpa", seqlen=n, **of) for n in LENGTHS)

    return "; ".join(
        f"{size}: {of_lengths(size, False)}, each layer compiled {of_lengths(size, True)}"
        for size in ("small", "medium")
    )


def gpt2_longer(record: Record) -> str:
    """Small at 4K beside the standard program at 1K: as many tokens a step."""
    return f"small: {longer(record, False)}, each layer of both compiled {longer(record, True)}"


def longer(record: Record, compiled: bool) -> str:
    seconds = seconds_of(record)
    eager = seconds.get(("small", 1024, compiled, "eager"))
    ours = seconds.get(("small", 4096, compiled, "flashsdk"))
    return times(eager / ours if eager and ours else None)


def seconds_of(record: Record) -> dict[tuple, float]:
    """Of a step, by size, length, whether it is compiled, and method."""
    return {
        (row["size"], row["seqlen"], row["compiled"], row["method"]): row["seconds"]
        for row in record["rows"]
        if "seconds" in row
    }


def gpt2_loss(record: Record) -> str:
    result = record["result"]
    if "apart" not in result:
        return MISSING
    line = f"{result['steps']} equal steps: losses at most {100 * result['apart']:.3f} % apart"
    if "control" not in result:
        return line
    means = f"{100 * result['apart_mean']:+.3f} % in the mean"
    return (
        f"{line}, {means}; SDPA and eager {100 * result['control']:.3f} %, "
        f"{100 * result['control_mean']:+.3f} %"
    )


def bert(record: Record) -> str:
    return "; ".join(
        f"{kind}: {ratio(record, 'best_sdpa', kind=kind, compiled=False)} the best SDPA backend"
        f", each layer compiled {ratio(record, 'best_sdpa', kind=kind, compiled=True)}"
        for kind in ("documents", "full")
    )


def attention_times(record: Record) -> str:
    found = [
        entry["dense"]
        for entry in record["result"]["ratios"]
        if entry["name"] == "causal, dropout 0.1" and entry["seqlen"] <= 2048 and "dense" in entry
    ]
    return f"{times(min(found))} to {times(max(found))}" if found else MISSING


def attention_memory(record: Record) -> str:
    found = [
        f"{entry['memory']:.0f}× less at {entry['seqlen']}"
        for entry in record["result"]["ratios"]
        if entry["name"] == "causal, dropout 0.1" and entry.get("memory")
    ]
    return found[-1] if found else MISSING


def attention_gpt2(record: Record) -> str:
    return ratio(record, "dense", name="GPT-2 medium")


def summary(record: Record) -> str:
    """What a program says of itself in one line."""
    return record["result"].get("summary", MISSING)


CLAIMS = (
    Claim("BERT-large, 512", "1.15×", "bert", "bert.py", bert),
    Claim("GPT-2, 1K, against eager", "3.5×; 3.0×", "gpt2-speed", "gpt2.py speed", gpt2_speed),
    Claim("GPT-2, 1K, 2K, 4K, against SDPA", "–", "gpt2-speed", "gpt2.py speed", gpt2_sdpa),
    Claim(
        "GPT-2 at 4K, against eager at 1K",
        "2.6×; 1.3× Megatron-LM",
        "gpt2-speed",
        "gpt2.py speed",
        gpt2_longer,
    ),
    Claim("GPT-2, the same loss", "the same", "gpt2-train", "gpt2.py train", gpt2_loss),
    Claim(
        "GPT-2 with more context",
        "0.7 (3.8 %) less perplexity at 4K than at 1K (18.2)",
        "long_context",
        "long_context.py gpt2",
        summary,
    ),
    Claim("Long documents", "+6.4 points", "documents", "long_context.py documents", summary),
    Claim("Long Range Arena", "2.4×; block-sparse 2.8×", "arena", "lra/arena.py", summary),
    Claim("Path-X", "61.4 %", "pathfinder128", "lra/pathfinder.py --size 128", accuracy),
    Claim("Path-256", "63.1 %", "pathfinder256", "lra/pathfinder.py --size 256", accuracy),
    Claim("Pathfinder, 32 × 32", "–", "pathfinder32", "lra/pathfinder.py --size 32", accuracy),
    Claim("Pathfinder, 64 × 64", "–", "pathfinder64", "lra/pathfinder.py --size 64", accuracy),
    Claim("Attention, 128 to 2K", "up to 3×", "attention", "attention.py", attention_times),
    Claim("Attention of GPT-2", "7.6×", "attention", "attention.py", attention_gpt2),
    Claim("Memory of attention", "up to 20× less", "attention", "attention.py", attention_memory),
    Claim("Bytes moved", "fewer", "traffic", "traffic.py", summary),
    Claim("Larger tiles", "fewer bytes, less time", "tiles", "tiles.py", summary),
)


def records() -> dict[str, Record]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}


def device(record: Record) -> str:
    return ", ".join(dict.fromkeys(run["device"] for run in record["runs"]))


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def overview(found: dict[str, Record]) -> str:
    rows = []
    for claim in CLAIMS:
        row = [claim.name, claim.paper]
        record = found.get(claim.record)
        if record is None:
            row += [MISSING, f"`{claim.command}`", "", ""]
        else:
            seconds = sum(run["seconds"] for run in record["runs"])
            row += [claim.ours(record), f"`{claim.command}`", device(record), f"{seconds:.0f}"]
        rows.append(row)
    return table(["claim", "the paper", "flashsdk", "program", "card", "seconds"], rows)


def falls_short(found: dict[str, Record]) -> str:
    """What is below the paper's or was done in another way: how far it is from it, and why."""
    reasons = {
        "bert": why_bert,
        "gpt2-speed": why_gpt2,
        "long_context": why_context,
        "pathfinder128": why_pathfinder,
    }
    lines = []
    for name, why in reasons.items():
        try:
            lines.append(f"- {why(found[name])}")
        except (KeyError, IndexError):  # no record, or one without all that is compared
            continue
    return "\n".join(["## What falls short or differs, and why", "", *lines])


def why_bert(record: Record) -> str:
    tokens = {
        row["method"]: row["tokens"]
        for row in record["rows"]
        if row.get("kind") == "documents" and not row["compiled"] and "tokens" in row
    }
    packed, padded = tokens["flashsdk"], tokens["SDPA"]
    plain = ratio(record, "best_sdpa", kind="documents", compiled=False)
    compiled = ratio(record, "best_sdpa", kind="documents", compiled=True)
    return (
        f"**BERT-large: {plain}, and {compiled} with each layer compiled, of 1.15×.** The paper's "
        "baseline wrote its scores to memory, which PyTorch's backends do not. Beside these the "
        f"gain is padding, which packing leaves out: {percent(1 - padded / packed)} of the rows "
        f"here. A step whose time goes by its rows gains {times(packed / padded)} by that."
    )


def why_gpt2(record: Record) -> str:
    seconds = seconds_of(record)
    sizes = ("small", "medium")
    plain, compiled, alike = (
        ", ".join(ratio(record, what, size=size, seqlen=1024, compiled=way) for size in sizes)
        for what, way in (("eager_as_shipped", False), ("eager_as_shipped", True), ("eager", True))
    )
    eager, ours = (1e3 * seconds["small", 1024, False, name] for name in ("eager", "flashsdk"))
    turns = {
        row["seqlen"]: f"{1e3 * row['fastest']:.0f} to {1e3 * row['slowest']:.0f} ms"
        for row in record["rows"]
        if (row["size"], row["compiled"], row["method"]) == ("medium", True, "flashsdk")
    }
    return (
        f"**GPT-2 small and medium against eager: {plain} of 3.5×, 3.0×, and small at 4K "
        f"{longer(record, False)} of 2.6×.** The paper compared whole "
        "programs. Here the attention alone is another: a step of small takes "
        f"{ours:.0f} in place of {eager:.0f} ms, and most of what is left is the rest of the "
        f"model. With each layer compiled it is {compiled} beside eager as transformers ships it, "
        f"and {alike} beside eager compiled alike. Medium's compiled steps differ from turn to "
        "turn by more than the methods do: "
        + ", ".join(f"{turns[n]} at {n}" for n in LENGTHS)
        + "."
    )


def why_context(record: Record) -> str:
    at = {(row["seqlen"], row["steps"]): row for row in record["rows"]}
    steps = [n for length, n in at if length == 4096]
    gains = [(at[1024, n]["perplexity"] - at[4096, n]["perplexity"], n) for n in steps]
    shown = ", ".join(f"{gain:.2f} after {n}" for gain, n in gains[3::4])
    lowest = [
        min((at[length, n] for n in steps), key=lambda row: row["perplexity"])
        for length in (1024, 4096)
    ]
    passes = lowest[-1]["tokens"] / record["result"]["text_tokens"]
    trained = [
        math.exp(
            [
                point["loss"]
                for point in record["curve"]
                if point["seqlen"] == row["seqlen"]
                and point["steps_before"]
                and point["step"] <= row["steps"]
            ][-1]
        )
        for row in lowest
    ]
    turns = [at[1024, n]["perplexity"] for n in steps[-4:]]
    jump = max(abs(a - b) for a, b in itertools.pairwise(turns))
    return (
        "**GPT-2 with more context is not the paper's training.** It reads code and documentation "
        f"of the machine, {passes:.0f} times over, and learns it by heart: the training text's own "
        f"perplexity is {trained[0]:.1f} at 1024 and {trained[1]:.1f} at 4096 in the end. The gain "
        f"grows with the steps: {shown}. Part of it is that the shorter context fits the training "
        "text more closely, and new text less. The lowest is chosen by the windows that are "
        f"reported, of one seed. From turn to turn 1024 goes up or down by as much as {jump:.2f}."
    )


def why_pathfinder(_: Record) -> str:
    return (
        "**Path-X, Path-256 and their kin are not the paper's training.** Beside the label each "
        "pixel has a loss, of how many dots its contour carries, and images are drawn anew without "
        "end. As in the paper a model begins with the weights of the size before."
    )


def shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def detail(name: str, record: Record) -> str:
    """Every measurement of a record, but the steps of a training."""
    parts = [f"## {name}"]
    for run in record["runs"]:
        parts.append(
            f"- {run['date']}, {run['device']}, PyTorch {run['torch']}, {run['seconds']:.0f} s: "
            f"`{run['command']}`"
        )
    text = parts[0] + "\n\n" + "\n".join(parts[1:])
    rows = [row for row in record["rows"] if "step" not in row]
    if rows:
        keys = [key for key in dict.fromkeys(k for row in rows for k in row) if key != "run"]
        text += "\n\n" + table(keys, [[shown(row.get(key)) for key in keys] for row in rows])
    return text


def page(found: dict[str, Record]) -> str:
    sections = [detail(name, record) for name, record in found.items()]
    parts = [INTRODUCTION.rstrip(), overview(found), falls_short(found), *sections]
    return "\n\n".join(parts) + "\n"


def name_of(record: Record) -> str:
    """The file that a record is kept in."""
    program, settings = record["program"], record["settings"]
    if program == "lra/pathfinder":
        return f"pathfinder{settings['size']}"
    if program == "gpt2":
        return f"gpt2-{settings['what']}"
    if program == "long_context":
        return "documents" if settings["what"] == "documents" else "long_context"
    return program.split("/")[-1]


def add(path: Path) -> None:
    try:
        record = json.loads(path.read_text("utf-8"))
    except OSError as e:
        sys.exit(f"{path}: {e.strerror}")
    except ValueError:
        sys.exit(f"{path}: no JSON")
    if not isinstance(record, dict) or record.get("kind") != "paper":
        sys.exit(f"{path}: no record of a program of this folder")
    if record["smoke"]:
        sys.exit(f"{path}: of --smoke, which measures nothing")
    RECORDS.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, RECORDS / f"{name_of(record)}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="RECORD")
    arguments = parser.parse_args()
    for path in arguments.add:
        add(path)
    text = page(records())
    if arguments.check:
        if not PAGE.exists() or PAGE.read_text("utf-8") != text:
            sys.exit(f"{PAGE.relative_to(ROOT)} is stale: python examples/paper/render.py")
        return
    PAGE.write_text(text, "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
