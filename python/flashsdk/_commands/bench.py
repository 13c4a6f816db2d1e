"""``bench``: how fast the kernels are, as shares of what the machine can do and beside others.

A backend adds a suite: its cases, how one is measured, and the tables and the picture of a record.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashsdk._commands import INTERRUPTED, bench_cpu, bench_cpu_tables, figures, machine
from flashsdk._commands.bench_cpu import QUICK, Case, Effort
from flashsdk._commands.files import writable_folder
from flashsdk._commands.progress import Progress
from flashsdk._commands.table import text_table
from flashsdk._errors import InvalidArgument, shown

Record = dict[str, Any]


@dataclass(frozen=True)
class Suite:
    cases: Callable[[bool], list[Case]]
    runnable: Callable[[Case], str | None]
    measure: Callable[[Case, Effort], list[Record]]
    tables: Callable[[Record], list[bench_cpu_tables.Table]]
    headline: Callable[[Record], bench_cpu_tables.Table]
    notes: Callable[[Record], list[str]]
    figure: Callable[[Any, Record], None]


def cpu_notes(record: Record) -> list[str]:
    peak = bench_cpu_tables.peak(record)
    return [f"peak measured between the rows: {peak}"] if peak else []


SUITES = {
    "cpu": Suite(
        cases=bench_cpu.cases,
        runnable=bench_cpu.runnable,
        measure=bench_cpu.measure,
        tables=bench_cpu_tables.tables,
        headline=bench_cpu_tables.headline,
        notes=cpu_notes,
        figure=figures.bench_cpu,
    )
}


def run(*, backend: str, quick: bool, words: list[str], out: str) -> int:
    """Measures the cases whose names hold all `words`; writes a record and a picture into `out`."""
    suite = SUITES[backend]
    every = suite.cases(quick)
    cases = [c for c in every if set(words) <= set(c.name.split())]
    if not cases:
        known = " ".join(sorted({word for c in every for word in c.name.split()}))
        of = "with --quick words" if quick else "words"
        raise InvalidArgument(
            f"--filter: {shown(' '.join(words))}; {of} of one case, among these: {known}"
        )
    skipped = {c.name: why for c in cases if (why := suite.runnable(c)) is not None}
    cases = [c for c in cases if c.name not in skipped]
    folder = writable_folder("--out", Path(out))

    record: Record = {
        **machine.record_header("bench"),
        "backend": backend,
        "quick": quick,
        "rows": [],
    }
    interrupted = False
    try:
        with Progress("bench", len(cases)) as progress:
            for done, case in enumerate(cases):
                progress.update(done, case.name)
                record["rows"] += suite.measure(case, QUICK if quick else Effort())
    except KeyboardInterrupt:
        interrupted = True
    print(describe(suite, record))
    if interrupted:
        print("stopped by Ctrl-C: no record, no picture")
        return INTERRUPTED
    for name, why in skipped.items():
        print(f"not run: {name}: {why}")
    stem = f"{backend}_{record['isa']}"
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {path}")
    print(figures.save(suite.figure, record, folder / f"{stem}.png"))
    return 0


def describe(suite: Suite, record: Record) -> str:
    peer = record["versions"].get("torch")
    lines = [
        f"flashsdk {record['flashsdk']} on {figures.where(record)}"
        + (f"; PyTorch {peer}, flash attention" if peer else "; no PyTorch to compare with")
    ]
    for table in suite.tables(record):
        lines += ["", table.title, text_table([table.header], table.rows, table.left)]
    return "\n".join([*lines, "", *suite.notes(record)])
