"""Writes docs/paper.md from the records in benchmarks/results/paper.

    python examples/paper/render.py                          # write
    python examples/paper/render.py --check                  # exit 1 if the page is stale
    python examples/paper/render.py --add build/paper/attention/record.json   # take a record, write

No figure in the page is typed but the paper's own and the goals. A claim without a record says
"not run yet".
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

import goals
from goals import times

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
says "not run yet". The paper measured on an A100 for the most part. A program stops after
`--minutes`, goes on when it is run again, and has `--smoke`, a check of seconds on a CPU. Beside
PyTorch the programs need `pip install '.[paper]'`, in the folder of the sources. The name of a
claim leads to its measurements, and to the exact commands. The text is files found on the machine,
so that language models cannot be repeated to the last digit elsewhere.
`python examples/paper/render.py --add FOLDER/record.json` adds a record to this page. How bytes are
counted: [io.md](io.md).

A GPU's kernels are built where `pip install` finds nvcc and a GPU ([install.md](install.md)).
`traffic.py` and `tiles.py` read counters with Nsight Compute (ncu), which may need
[rights](https://developer.nvidia.com/ERR_NVGPUCTRPERM). A program writes to `build/paper/`, unless
`--out` is given.
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


def accuracy(record: Record) -> str:
    result = record["result"]
    if "accuracy" not in result:
        return f"no test yet; {result.get('images', 0)} images"
    stage = ""
    if result["stage"] < result["last_stage"]:
        stage = f", at stage {result['stage']} of {result['last_stage']} of the training"
    if any(run.get("teach") for run in record["runs"]):
        stage += "; trained with a loss for each pixel, too"
    low, high = percent(result["low"]), percent(result["high"])
    right = f"{round(result['accuracy'] * result['tested'])} of {result['tested']}"
    return f"{percent(result['accuracy'])} ({low} to {high}, {right} images){stage}"


def ratio(record: Record, what: str, **wanted: Any) -> str:
    return times(goals.ratio(record, what, **wanted))


def gpt2_speed(record: Record) -> str:
    compiled = {"whole": "compiled"}.get(record["settings"]["compile"], "each layer compiled")
    return "; ".join(
        f"{size}: {ratio(record, 'eager_as_shipped', size=size, seqlen=1024, compiled=False)}"
        f", {compiled} {ratio(record, 'eager_as_shipped', size=size, seqlen=1024, compiled=True)}"
        f" ({ratio(record, 'eager', size=size, seqlen=1024, compiled=True)} with eager's, too)"
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


def captured(record: Record, what: str) -> str:
    """Beside another method that is compiled and captured, too, of the lengths in their order."""
    return "; ".join(
        f"{size}: "
        + ", ".join(ratio(record, what, size=size, seqlen=n, compiled=True) for n in LENGTHS)
        for size in ("small", "medium")
    )


def graphs_sdpa(record: Record) -> str:
    return captured(record, "best_sdpa")


def graphs_eager(record: Record) -> str:
    shipped = (
        ratio(record, "eager_as_shipped", size=size, seqlen=1024, compiled=True)
        for size in ("small", "medium")
    )
    return f"{captured(record, 'eager')}. Against eager as shipped at 1K: {', '.join(shipped)}"


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
        f"{shown}: {ratio(record, 'best_sdpa', kind=kind, compiled=False)} against the best SDPA "
        f"backend, each layer compiled {ratio(record, 'best_sdpa', kind=kind, compiled=True)}"
        for kind, shown in (("documents", "documents, packed"), ("full", "sequences of 512"))
    )


def attention_times(record: Record) -> str:
    """Forward and backward, of two of its problems."""
    found = goals.dense(record)
    shown = [
        f"{name}: {times(min(found[name]))} to {times(max(found[name]))}"
        for name in ("causal, dropout 0.1", "plain")
        if name in found
    ]
    return "; ".join(shown) or MISSING


def attention_memory(record: Record) -> str:
    found = {seqlen: goals.memory(record, seqlen) for seqlen in (4096, 16384)}
    shown = [f"{value:.0f}× less at {seqlen}" for seqlen, value in found.items() if value]
    return ", ".join(shown) or MISSING


def attention_gpt2(record: Record) -> str:
    forward = {
        row["method"]: row.get("forward") for row in record["rows"] if row["name"] == "GPT-2 medium"
    }
    both = ratio(record, "dense", name="GPT-2 medium")
    standard, ours = forward.get("standard"), forward.get("flashsdk")
    return f"{times(standard / ours if standard and ours else None)}, with the backward {both}"


def summary(record: Record) -> str:
    """What a program says of itself in one line."""
    return record["result"].get("summary", MISSING)


def pathfinder(size: int, before: int = 0) -> str:
    """The command, which goes on from the model of the size before, in its default folder."""
    start = f" --start build/paper/lra-pathfinder{before}/checkpoint.pt" if before else ""
    return f"lra/pathfinder.py --size {size}{start}"


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
    Claim(
        "GPT-2 with CUDA graphs, 1K, 2K, 4K, against SDPA",
        "–",
        "gpt2-graphs",
        "gpt2.py speed --compile graphs",
        graphs_sdpa,
    ),
    Claim(
        "GPT-2 with CUDA graphs, 1K, 2K, 4K, against eager",
        "–",
        "gpt2-graphs",
        "gpt2.py speed --compile graphs",
        graphs_eager,
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
    Claim(
        "Long Range Arena, time", "2.4×; block-sparse 2.8×", "arena", "lra/arena.py speed", summary
    ),
    Claim(
        "Long Range Arena, ListOps",
        "37.6 %",
        "arena-listops",
        "lra/arena.py train --task listops",
        summary,
    ),
    Claim(
        "Long Range Arena, Pathfinder",
        "72.7 %",
        "arena-pathfinder",
        "lra/arena.py train --task pathfinder",
        summary,
    ),
    Claim("Pathfinder, 32 × 32", "–", "pathfinder32", pathfinder(32), accuracy),
    Claim("Pathfinder, 64 × 64", "–", "pathfinder64", pathfinder(64, 32), accuracy),
    Claim("Path-X", "61.4 %", "pathfinder128", pathfinder(128, 64), accuracy),
    Claim("Path-256", "63.1 %", "pathfinder256", pathfinder(256, 128), accuracy),
    Claim("Attention, 128 to 2K", "up to 3×", "attention", "attention.py", attention_times),
    Claim("Attention of GPT-2", "7.6×", "attention", "attention.py", attention_gpt2),
    Claim("Memory of attention", "up to 20× less", "attention", "attention.py", attention_memory),
    Claim("Bytes moved", "9× fewer (40.3 GB, 4.4 GB)", "traffic", "traffic.py", summary),
    Claim("Larger tiles", "fewer bytes, less time", "tiles", "tiles.py", summary),
)


def records() -> dict[str, Record]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}


def measured(record: Record) -> list[Record]:
    """The runs of which something is in the record."""
    numbers = {x["run"] for x in (*record["rows"], *record["curve"])}
    return [run for number, run in enumerate(record["runs"]) if number in numbers]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def overview(found: dict[str, Record]) -> str:
    rows = []
    for claim in CLAIMS:
        record = found.get(claim.record)
        if record is None:
            row = [claim.name, claim.paper, MISSING, f"`{claim.command}`", "", ""]
        else:
            runs = measured(record)
            cards = ", ".join(dict.fromkeys(run["device"] for run in runs))
            seconds = f"{sum(run['seconds'] for run in runs):.0f}"
            name = f"[{claim.name}](#{claim.record})"
            row = [name, claim.paper, claim.ours(record), f"`{claim.command}`", cards, seconds]
        rows.append(row)
    return table(["claim", "the paper", "flashsdk", "program", "card", "seconds"], rows)


def own_goals(found: dict[str, Record]) -> str:
    cards = ", ".join(
        f"{name} on {found[name]['runs'][-1]['device']}"
        for name in ("gpt2-speed", "gpt2-graphs", "bert", "arena", "attention")
        if name in found
    )
    text = (
        "## Goals beside the paper's\n\n"
        "Each figure says how many times faster flashsdk is, or how many times less memory it "
        'takes. "Compiled" and "CUDA graphs" are said of both sides. Eager as shipped is '
        "always uncompiled. Turns of one method differ by some percent, so a figure that is so "
        f"close to 1 says little. Measured: {cards}.\n\n"
    )
    return text + table(["goal", "at least", "measured", "reached"], goals.rows(found))


def falls_short(found: dict[str, Record]) -> str:
    """What is below the paper's or was done in another way: how far it is from it, and why."""
    reasons = {
        "bert": why_bert,
        "gpt2-speed": why_gpt2,
        "gpt2-graphs": why_graphs,
        "long_context": why_context,
        "documents": why_documents,
        "arena": why_arena,
        "pathfinder128": why_pathfinder,
        "attention": why_attention,
        "traffic": why_traffic,
        "tiles": why_tiles,
    }
    lines = []
    for name, why in reasons.items():
        try:
            if text := why(found[name]):
                lines.append(f"- {text}")
        except (KeyError, IndexError, ValueError):  # no record, or one without all that is compared
            if name in found:
                print(f"{name}: not all is there that its reason takes", file=sys.stderr)
    return "\n".join(["## What falls short or differs, and why", "", *lines])


def why_bert(record: Record) -> str:
    tokens = {
        row["method"]: row["tokens"]
        for row in record["rows"]
        if row.get("kind") == "documents" and not row["compiled"] and "tokens" in row
    }
    packed, padded = tokens["flashsdk"], tokens["SDPA"]
    plain, compiled = (
        times(goals.ratio(record, "best_sdpa", kind="documents", compiled=way), 3)
        for way in (False, True)
    )
    return (
        f"**BERT-large: {plain}, and {compiled} with each layer compiled, of 1.15×.** The paper's "
        "baseline wrote its scores to memory, which PyTorch's backends do not. flashsdk packs "
        f"sequences, and so skips the {percent(1 - padded / packed)} of the rows that are padding. "
        f"That alone gives {times(packed / padded)} where time goes by rows."
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
        "programs. Here only the attention differs: a step of small takes "
        f"{ours:.0f} in place of {eager:.0f} ms, and most of what is left is the rest of the "
        f"model. With each layer compiled it is {compiled} beside eager as transformers ships it, "
        f"and {alike} beside eager compiled alike. flashsdk's compiled steps of medium differ from "
        "turn to turn by more than it and PyTorch's fastest backends differ, so that a ratio near "
        "1 says little there: "
        + ", ".join(f"{turns[n]} at {n}" for n in LENGTHS)
        + f". All methods of a problem took turns in one run: {of_runs(record)}."
    )


def of_runs(record: Record) -> str:
    """When each size was measured."""
    found: dict[str, list[str]] = {}
    for row in record["rows"]:
        found.setdefault(row["size"], []).append(record["runs"][row["run"]]["date"])
    return "; ".join(f"{size} {', '.join(dict.fromkeys(at))}" for size, at in found.items())


def why_graphs(record: Record) -> str:
    rows = [row for row in record["rows"] if row["compiled"] and "seconds" in row]
    spread = max(row["slowest"] / row["fastest"] - 1 for row in rows)

    def milliseconds(seqlen: int) -> tuple[str, str]:
        """Of small: with flashsdk, and with the fastest SDPA backend."""
        found = {
            row["method"]: 1e3 * row["seconds"]
            for row in rows
            if (row["size"], row["seqlen"]) == ("small", seqlen)
        }
        best = min(ms for method, ms in found.items() if method.startswith("SDPA"))
        return f"{found['flashsdk']:.1f}", f"{best:.1f}"

    (ours, best), (ours_4k, best_4k) = milliseconds(1024), milliseconds(4096)
    return (
        "**GPT-2 with CUDA graphs is the time of the card alone.** The graph holds all kernels of "
        "a step, and the host starts it with one call. Each layer is compiled before, as in the "
        "rows above. Turns of one captured method differ by at most "
        f"{percent(spread)}. A step of small takes {ours} ms with flashsdk and {best} with the "
        f"best SDPA backend at 1024, {ours_4k} and {best_4k} at 4096. It has as many tokens at "
        "each length, so the rest of the model takes as long. The memory of captured steps counts "
        "eager's masks in every row."
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
        f"of the machine, {passes:.0f} times over, and fits it more closely than new text: its own "
        f"perplexity is {trained[0]:.1f} at 1024 and {trained[1]:.1f} at 4096 by then. The gain "
        f"grows with the steps: {shown}. Part of it is that the shorter context fits the training "
        "text more closely, and new text less. The lowest is chosen by the windows that are "
        f"reported, of one seed. In the last turns 1024 goes up or down by as much as {jump:.2f}."
    )


def why_documents(record: Record) -> str:
    lengths = [row["seqlen"] for row in record["rows"]]
    return (
        "**Long documents are sources of Python.** The paper classifies medical and legal texts, "
        "and its figure is the mean of two data sets. Here the label is the package that a file "
        f"belongs to. Of each file the first N tokens are read, N from {min(lengths)} to "
        f"{max(lengths)}. Imports, comments at the top and the package's name are taken out; a "
        "docstring at the top stays."
    )


def why_arena(record: Record) -> str:
    kinds: dict[str, list[str]] = {}
    for row in record["rows"]:
        kinds.setdefault(row["data"], []).append(row["task"])
    data = "; ".join(f"{', '.join(dict.fromkeys(tasks))}: {kind}" for kind, tasks in kinds.items())
    return (
        "**Long Range Arena has its accuracy in rows of its own.** It can be measured of the tasks "
        "whose data is the benchmark's: ListOps and Pathfinder, from generators of this project. "
        f"What is timed reads: {data}."
    )


def why_pathfinder(_: Record) -> str:
    return (
        "**Path-X, Path-256 and the smaller ones are not the paper's training, nor its images.** "
        "Images are drawn by a generator of this project, at the benchmark's difficulty: without "
        "end to train on, and others to test on. Beside the label each pixel has a loss, of how "
        "many dots its contour carries. As in the paper a model begins with the weights of the "
        "size before, whose seconds are in its own row: 32, 64, 128 and 256 come in this order."
    )


def why_attention(record: Record) -> str:
    slower = sorted(
        {
            entry["seqlen"]
            for entry in record["result"]["ratios"]
            if entry.get("sparse") and entry["sparse"] < entry["dense"]
        }
    )
    claim = "**Block-sparse attention is not the fastest of all at every length.**"
    lengths = ", ".join(map(str, slower))
    return f"{claim} At {lengths} some problem is faster dense." if slower else ""


def why_traffic(record: Record) -> str:
    apart = [
        f"{row['name']}, {row['method']}, {row['phase']}"
        for row in record["rows"]
        if abs((row["read"] + row["written"]) / row["dram"] - 1) > 0.15
    ]
    if not apart:
        return ""
    return (
        f"**Counts and counters of memory are more than 15 % apart in {len(apart)} of "
        f"{len(record['rows'])} rows** ({'; '.join(apart)}). [io.md](io.md) says why: the last "
        "bytes written stay in L2, and the softmax's derivative is two kernels in PyTorch."
    )


def why_tiles(record: Record) -> str:
    last = record["rows"][-1]
    best = min(record["rows"], key=lambda row: row["seconds"])
    if best is last:
        return ""
    return (
        f"**Larger tiles take less time up to {best['queries']} queries.** Tiles of "
        f"{last['queries']} read {times(best['received'] / last['received'])} fewer bytes from L2 "
        f"than those, and take {times(last['seconds'] / best['seconds'])} their time. Bytes are no "
        "longer what bounds them, and more warps wait for each other."
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
    for run in measured(record):
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
    # In the overview's order.
    names = dict.fromkeys([*(claim.record for claim in CLAIMS), *found])
    sections = [detail(name, found[name]) for name in names if name in found]
    parts = [INTRODUCTION.rstrip(), overview(found), own_goals(found), falls_short(found)]
    parts += sections
    return "\n\n".join(parts) + "\n"


def name_of(record: Record) -> str:
    """The file that a record is kept in."""
    program, settings = record["program"], record["settings"]
    if program == "lra/pathfinder":
        return f"pathfinder{settings['size']}"
    if program == "gpt2":
        return "gpt2-graphs" if settings.get("compile") == "graphs" else f"gpt2-{settings['what']}"
    if program == "long_context":
        return "documents" if settings["what"] == "documents" else "long_context"
    if program == "lra/arena" and settings["what"] == "train":
        return f"arena-{settings['task']}"
    return program.split("/")[-1]


def given(path: Path) -> Record:
    """A record that a program wrote, to be added."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except OSError as e:
        sys.exit(f"{path}: {e.strerror}")
    except ValueError:
        sys.exit(f"{path}: no JSON")
    if not isinstance(record, dict) or record.get("kind") != "paper":
        sys.exit(f"{path}: no record of a program of this folder")
    if record.get("smoke"):
        sys.exit(f"{path}: of --smoke, which measures nothing")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="RECORD")
    arguments = parser.parse_args()
    found, text = records(), ""
    names = {}
    for path in arguments.add:
        record = given(path)
        # Before anything is written: a run that was stopped early may lack what a row compares.
        try:
            names[path] = name_of(record)
            found[names[path]] = record
            text = page(found)
        except (KeyError, IndexError, ValueError, TypeError) as e:
            sys.exit(f"{path}: not all is measured that the page shows ({type(e).__name__} {e})")
    text = text or page(found)
    RECORDS.mkdir(parents=True, exist_ok=True)
    for path, name in names.items():
        shutil.copy(path, RECORDS / f"{name}.json")
    if arguments.check:
        if not PAGE.exists() or PAGE.read_text("utf-8") != text:
            sys.exit(f"{PAGE.relative_to(ROOT)} is stale: python examples/paper/render.py")
        return
    PAGE.write_text(text, "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
