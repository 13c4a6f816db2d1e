"""Writes docs/dev/benchmarks.md, its pictures and the figures of other pages from results/.

    python benchmarks/render.py            # write
    python benchmarks/render.py --check    # exit 1 if a text is stale

No figure in these texts is typed: to change one, measure again and put the record into results/.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import context_parallel_tables
import cpu_goals
import gpu_bounds_tables
import gpu_figure
import gpu_goals
import gpu_tables
import jax_tables
import transformers_step
from flashsdk._commands import bench, bench_cpu_tables, demo, figures
from flashsdk._commands.table import markdown_table
from gpu_tables import about

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
DOCUMENT = DOCS / "dev" / "benchmarks.md"
IMAGES = DOCS / "images"
README = ROOT / "README.md"
PAGES = (  # with marked blocks
    README,
    *(
        DOCS / f"{name}.md"
        for name in (
            "benchmarks",
            "context_parallel",
            "dev/gpu",
            "jax",
            "jax_details",
            "torch_sdpa_details",
            "versions",
        )
    ),
)

Record = dict[str, Any]

INTRODUCTION = """\
<!-- Written by benchmarks/render.py from benchmarks/results/; change it there. -->
# How fast: all tables

The main ones are in [benchmarks.md](../benchmarks.md). `python -m flashsdk bench` measures;
`benchmarks/README.md` says how, and how to add a machine. Compare figures of one run only: absolute
ones move with clocks and load.
"""


def records() -> dict[str, Record]:
    """By file name without its ending."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def image(name: str) -> str:
    return f"![{name}]({os.path.relpath(IMAGES / name, DOCUMENT.parent)}.png)"


def bench_section(name: str, record: Record) -> str:
    suite = bench.SUITES[record["backend"]]
    parts = [f"## {figures.where(record)}", about(record), image(name)]
    for table in bench_cpu_tables.tables(record, cpu_goals):
        parts += [f"### {table.title}", markdown_table(table.header, table.rows, table.left)]
    notes = (*suite.notes(record), *cpu_goals.notes(record))
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)])


def demo_section(name: str, record: Record) -> str:
    text = fenced(demo.describe(record))
    return "\n\n".join(
        ["## Beside standard attention: `make demo`", about(record), image(name), text]
    )


def fenced(text: str) -> str:
    return f"```text\n{text}\n```"


SECTIONS = {
    "demo": demo_section,
    "bench": bench_section,
    "gpu_bench": lambda name, record: gpu_tables.bench_section(
        image(name) if "dense" in record else "", record, gpu_goals.text(record)
    ),
    "gpu_tests": lambda _, record: gpu_tables.tests_section(record),
    transformers_step.KIND: lambda _, record: transformers_step.section(record, about(record)),
}
VERSIONED = {  # columns of the versions' record
    "python": "Python",
    "numpy": "NumPy",
    "torch": "PyTorch",
    "jax": "JAX",
    "transformers": "transformers",
}
PLAYED = ("actions/checkout@", "actions/setup-python@")  # what scripts/try_workflow.py does itself
ELSEWHERE = {  # in pages of their own
    "torch_tests",
    "versions",
    "workflows",
    jax_tables.KIND,
    jax_tables.EXAMPLE,
    context_parallel_tables.KIND,
}


def document(found: dict[str, Record]) -> str:
    sections = [
        SECTIONS[record["kind"]](name, record)
        for name, record in found.items()
        if record["kind"] not in ELSEWHERE
    ]
    return "\n\n".join([INTRODUCTION.rstrip(), *sections]) + "\n"


def blocks_of(found: dict[str, Record]) -> dict[str, str]:
    """What stands between marks in the README and other pages, by their names."""
    demos = {name: r for name, r in found.items() if r["kind"] == "demo"}
    benches = [r for r in found.values() if r["kind"] == "bench"]
    dense = [r for r in found.values() if r["kind"] == "gpu_bench" and "dense" in r]
    return {
        "demo": "\n\n".join(fenced(demo.describe(r)) for r in demos.values()),
        "picture": "\n\n".join(f"![{name}](docs/images/{name}.png)" for name in demos),
        "figures": "\n\n".join(map(headline, benches)),
        "gpu": dense_of(dense),
        "speed": "\n\n".join(  # of the common card: the README is short
            gpu_goals.in_short(r) for r in dense if "timing" in r and "H100" in r["device"]
        ),
        "decoding": "\n\n".join(gpu_tables.decoding(r) for r in dense if "caches" in r),
        "bounds": gpu_bounds_tables.text(r for r in dense if "timing" in r),
        "torch_tests": "\n\n".join(
            torch_tests(r) for r in found.values() if r["kind"] == "torch_tests"
        ),
        "jax": "\n\n".join(
            jax_tables.block(r) for r in found.values() if r["kind"] == jax_tables.KIND
        ),
        context_parallel_tables.KIND: context_parallel_tables.text(
            [r for r in found.values() if r["kind"] == context_parallel_tables.KIND]
        ),
        "flax": "\n\n".join(
            jax_tables.example(r) for r in found.values() if r["kind"] == jax_tables.EXAMPLE
        ),
        "versions": "\n\n".join(versions(r) for r in found.values() if r["kind"] == "versions"),
        "workflows": "\n\n".join(workflows(r) for r in found.values() if r["kind"] == "workflows"),
    }


def filled(text: str, blocks: dict[str, str]) -> str:
    """A page with its marked blocks filled; one whose marks are missing is left out."""
    for name, block in blocks.items():
        marks = (f"<!-- {name}:begin -->", f"<!-- {name}:end -->")
        pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
        new = f"{marks[0]}\n{block}\n{marks[1]}"
        text = re.sub(pattern, lambda _, new=new: new, text, flags=re.DOTALL)
    return text


def torch_tests(record: Record) -> str:
    """The outcome of scripts/torch_tests.py."""
    plain, ours = (record[way] for way in ("without", "with"))
    text = (
        f"`{record['file']}` of PyTorch {record['file_version']}, run with PyTorch "
        f"{record['torch']} and `{' '.join(record['options'])}`. {ours['passed']} tests pass with "
        f"`enable` on and {plain['passed']} without, {ours['failed']} fail with it and "
        f"{plain['failed']} without. {ours['skipped']} are skipped."
    )
    if record["note"]:
        text += f" {record['note']}"
    rows = [*record["changed"].items(), *together(record["neither"])]
    for way, where in (("only_without", "without"), ("only_with", "with")):
        rows += [(name, f"collected only {where} it") for name in record.get(way, [])]
    if not rows:
        return text
    cells = [[f"`{name}`", why.replace("|", "\\|")] for name, why in rows]
    return f"{text}\n\n{markdown_table(['test', 'why it fails'], cells, 2)}"


def together(failed: dict[str, str]) -> list[tuple[str, str]]:
    """A row for all tests of a function that fail alike: parameters stand behind its name."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, why in failed.items():
        function = re.split(
            r"_(?:batch_size|(?:fused_)?kernel\d|cuda|cpu|\dD|attn_mask_dim)", name
        )[0]
        alike.setdefault((function, why), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{function}… ({len(names)} tests)", why)
        for (function, why), names in alike.items()
    ]


def versions(record: Record) -> str:
    """The outcome of scripts/test_versions.py."""
    rows = []
    for cell in record["cells"]:
        if "missing" in cell:
            names = dict(p.partition("==")[::2] for p in cell["spec"].split(","))
            found = {name: version or "newest" for name, version in names.items()}
            outcome = f"not run: no {cell['missing']}"
        else:
            found = cell["versions"]
            outcome = f"{cell['passed']} passed, {cell['failed']} failed, {cell['skipped']} skipped"
        rows.append([*(found.get(name, "–") for name in VERSIONED), outcome])
    header = [*VERSIONED.values(), f"tests, {record['date']}"]
    names = dict.fromkeys(name for cell in record["cells"] for name in cell.get("tests", []))
    tests = ", ".join(f"`{name}`" for name in names)
    table = markdown_table(header, rows, len(header))
    return (
        f"{table}\n\nTest files of all rows (of each: the record): "
        f"{tests}. pytest's options were `{' '.join(record['options'])}`."
    )


def workflows(record: Record) -> str:
    """The outcome of scripts/try_workflow.py: what of each job ran on one machine."""
    rows = []
    for entry in record["jobs"]:
        job = f"{entry['workflow']} {entry['job']} {entry['cell']}".rstrip()
        actions = dict.fromkeys(entry["actions"])
        theirs = [code(name) for name in actions if not name.startswith(PLAYED)]
        why = [f"it is for {' and '.join(entry['elsewhere'])}"] if entry["elsewhere"] else []
        why += [f"it uses {', '.join(theirs)}"] if theirs else []
        outcome = f"not run: {'; '.join(why)}" if why else "not run"
        if "steps" in entry:
            found: dict[str, list[str]] = {}
            for step in entry["steps"]:
                if not step["step"].startswith(PLAYED):
                    text = code(step["step"])
                    if step["outcome"] == "passed":
                        text += f" in {step['seconds']:.0f} s"
                    found.setdefault(step["outcome"].partition(":")[0], []).append(text)
            outcome = "; ".join(f"{how}: {', '.join(steps)}" for how, steps in found.items())
            if entry["elsewhere"]:  # --anyway
                outcome += f"; not in {' and '.join(entry['elsewhere'])}"
            outcome += f" ({entry['date']})"
        rows.append([code(job), outcome])
    return markdown_table(["job", f"its steps, on {record['machine']}"], rows, 2)


def code(text: str) -> str:
    """In a cell of a table; the middle of a long one is left out."""
    text = text if len(text) <= 60 else f"{text[:40]} … {text[-17:]}"
    return f"`{text}`".replace("|", "\\|")


def dense_of(benches: list[Record]) -> str:
    """Those timed alike first, and what holds by them; an older one says why it is not of these."""
    alike = [r for r in benches if "timing" in r]
    older = [r for r in benches if "timing" not in r]
    parts = [f"{gpu_goals.holds(r)} {gpu_goals.beside_peers(r)}" for r in alike]
    parts += map(gpu_tables.headline, alike)
    parts += map(gpu_tables.headline, older)
    if older and not alike:
        parts.append(gpu_goals.then())
    return "\n\n".join(parts)


def headline(record: Record) -> str:
    """The rows of the longest sequence and largest head dimension, without mask and causal."""
    suite = bench.SUITES[record["backend"]]
    table = suite.headline(record)
    return f"{figures.where(record)}:\n\n{markdown_table(table.header, table.rows, table.left)}"


def draw(found: dict[str, Record]) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, record in found.items():
        match record["kind"]:
            case "demo":
                drawing = figures.demo
            case "bench":
                drawing = functools.partial(figures.bench_cpu, allowed=cpu_goals.sparse_limit)
            case "gpu_bench" if "dense" in record:
                drawing = gpu_figure.dense
            case _:
                continue
        print(figures.save(drawing, record, IMAGES / f"{name}.png"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a text is stale")
    check = parser.parse_args().check
    found = records()
    texts = {DOCUMENT: document(found)}
    blocks = blocks_of(found)
    texts |= {page: filled(page.read_text(), blocks) for page in PAGES if page.exists()}
    stale = [p for p, text in texts.items() if not p.exists() or p.read_text() != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(ROOT)}: stale; run python benchmarks/render.py")
        return 1 if stale else 0
    draw(found)
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
