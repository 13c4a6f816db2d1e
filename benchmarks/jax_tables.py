"""The table of docs/jax.md from the records of jax_bench.py."""

from __future__ import annotations

from typing import Any

from flashsdk._commands.table import length, markdown_table

KIND = "jax_bench"
Record = dict[str, Any]


def block(record: Record) -> str:
    """How fast flashsdk.jax is beside JAX's own attention, all cells of a record."""
    where = record["device"]
    if record["threads"]:
        where += f", {record['threads']} thread" + "s" * (record["threads"] > 1)
    reached = sum(row["reached"] for row in record["rows"])
    host = record["host_us"]
    text = (
        f"{where}, JAX {record['jax']}, {record['dtype']}, {record['date']}, commit "
        f"{record['commit'].removesuffix('-dirty')}. Beside {record['peer']}, both under jit and "
        f"in turns. A cell is our time in milliseconds, and theirs over ours. "
        f"{reached} of {len(record['rows'])} reach the goal of {record['rows'][0]['goal']:g}. A "
        f"call takes the host {host['attention']:.0f} µs, a jitted `q + 1` {host['q + 1']:.0f} µs."
    )
    cells: dict[tuple[Any, ...], list[str]] = {}
    for row in record["rows"]:
        batch, seqlen, heads, head_dim = row["shape"]
        problem = f"{batch} × {length(seqlen)}, {heads} heads of {head_dim}"
        key = (problem, "causal" if row["causal"] else "none")
        cells.setdefault(key, []).append(f"{row['ours']['ms']:.2f}, {row['ratio']:.2f} ×")
    rows = [[*key, *values] for key, values in cells.items()]
    return f"{text}\n\n{markdown_table(['problem', 'mask', 'forward', 'backward'], rows, 2)}"
