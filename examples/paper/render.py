"""Writes docs/paper.md from the records in benchmarks/results/paper.

    python examples/paper/render.py                          # write
    python examples/paper/render.py --check                  # exit 1 if the page is stale
    python examples/paper/render.py --add build/paper/attention/record.json   # take a record, write

No figure in the page is typed but the paper's own and the goals. A claim without a record says so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import goals
from figures import LENGTHS, Record, dense, longer, memory, percent, ratio, times
from reasons import falls_short

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "paper"
PAGE = ROOT / "docs" / "paper.md"
MISSING = "not run yet"

INTRODUCTION = """\
<!-- Written by examples/paper/render.py from benchmarks/results/paper; change it there. -->
# The paper, reproduced

What FlashAttention (arXiv 2205.14135) claims, and what becomes of it with flashsdk. Each row is a
program of `examples/paper/`, whose head says how it is used. Its command is given in the folder of
the sources. Where no record was taken, the row says so. The paper measured on an A100 for the most
part. A program stops after `--minutes`, goes on when it is run again, and has `--smoke`, a check of
seconds on a CPU. Beside PyTorch the programs need `pip install '.[paper]'`. The name of a claim
leads to its measurements, and to the commands as they were given, with the folders of that machine.
The text is files found on the machine, so that language models cannot be repeated to the last digit
elsewhere. GPT-2 and BERT are trained without dropout, from one seed.
`python examples/paper/render.py --add FOLDER/record.json` adds a record to this page. How bytes are
counted: [io.md](io.md).

A GPU's kernels are built where `pip install` finds nvcc and a GPU ([install.md](install.md)).
`traffic.py` and `tiles.py` read counters with Nsight Compute (ncu), which may need
[rights](https://developer.nvidia.com/ERR_NVGPUCTRPERM). `tiles.py` also takes CUTLASS 4.2, as its
`--help` says. A program writes to `build/paper/`, unless `--out` is given.
"""


@dataclass(frozen=True)
class Claim:
    name: str
    paper: str  # the paper's figure
    record: str  # file name in RECORDS, without its ending
    command: str
    ours: Callable[[Record], str]
    missing: str = MISSING  # said where there is no record


def accuracy(record: Record) -> str:
    result = record["result"]
    if "accuracy" not in result:
        return f"no test yet; {result.get('images', 0)} images"
    stage = ""
    if result["stage"] < result["last_stage"]:
        stage = f", at stage {result['stage']} of {result['last_stage']} of the training"
    if not result["images"]:
        raise ValueError("no image was trained on")
    taught = result.get("teach") or any(run.get("teach") for run in record["runs"])
    by = "labels and a loss for each pixel" if taught else "labels alone"
    return f"{right(result, 'images')}{stage}; {record['settings']['attention']}, from {by}"


def right(found: dict[str, Any], things: str) -> str:
    """A share with its 95 % interval."""
    low, high = percent(found["low"]), percent(found["high"])
    count = f"{round(found['accuracy'] * found['tested'])} of {found['tested']}"
    return f"{percent(found['accuracy'])} ({low} to {high}, {count} {things})"


def arena(record: Record) -> str:
    row = record["rows"][-1]
    return f"{right(row, 'examples')}, after {row['at']} steps"


def gpt2_speed(record: Record) -> str:
    compiled = {"whole": "compiled"}.get(record["settings"]["compile"], "each layer compiled")
    return "; ".join(
        f"{size}: {ratio(record, 'eager_as_shipped', size=size, seqlen=1024, compiled=False)}"
        f", {compiled} {ratio(record, 'eager_as_shipped', size=size, seqlen=1024, compiled=True)}"
        f" ({ratio(record, 'eager', size=size, seqlen=1024, compiled=True)} with eager's, too)"
        for size in ("small", "medium")
    )


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


def gpt2_loss(record: Record) -> str:
    result = record["result"]
    if "apart" not in result:
        return MISSING
    of = f"{record['settings']['size']} at {record['settings']['seqlen']}"
    apart = f"losses at most {100 * result['apart']:.3f} % apart"
    line = f"{result['steps']} equal steps of {of}: {apart}"
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
    found = dense(record)
    shown = [
        f"{name}: {times(min(found[name]))} to {times(max(found[name]))}"
        for name in ("causal, dropout 0.1", "plain")
        if name in found
    ]
    return "; ".join(shown) or MISSING


def attention_memory(record: Record) -> str:
    found = {seqlen: memory(record, seqlen) for seqlen in (4096, 16384)}
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
    return f"lra/pathfinder.py --size {size} --minutes 5{start}"


def given_data(task: str, paper: str) -> Claim:
    """Long Range Arena's tasks whose data others made."""
    path = "FILE" if task != "text" else "FOLDER"
    command = f"lra/arena.py train --task {task} --{task} {path}"
    missing = "not run: its data was not at hand, and is not made here"
    return Claim(f"Long Range Arena, {task}", paper, f"arena-{task}", command, arena, missing)


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
        arena,
    ),
    given_data("text", "63.9 %"),
    given_data("retrieval", "81.4 %"),
    given_data("image", "43.5 %"),
    Claim("Long Range Arena, Pathfinder", "72.7 %", "pathfinder32", pathfinder(32), accuracy),
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
        command = f"`python examples/paper/{claim.command}`"
        if record is None:
            row = [claim.name, claim.paper, claim.missing, command, "", ""]
        else:
            runs = measured(record)
            cards = ", ".join(dict.fromkeys(run["device"] for run in runs))
            seconds = f"{sum(run['seconds'] for run in runs):.0f}"
            name = f"[{claim.name}](#{claim.record})"
            row = [name, claim.paper, claim.ours(record), command, cards, seconds]
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
    if not record.get("result"):
        sys.exit(f"{path}: not all is measured; run its program again, to go on")
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
