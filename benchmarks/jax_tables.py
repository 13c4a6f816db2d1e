"""What the pages on JAX show of the records of jax_bench.py and train_flax.py."""

from __future__ import annotations

from typing import Any

from flashsdk._commands.table import length, markdown_table

KIND = "jax_bench"
EXAMPLE = "train_flax"
Record = dict[str, Any]


def block(record: Record) -> str:
    """How fast flashsdk.jax is beside JAX's own attention, all cells of a record."""
    where = record["device"]
    if record["threads"]:
        where += f", {record['threads']} thread" + "s" * (record["threads"] > 1)
    commit = (record["commit"] or "none").removesuffix("-dirty")
    if sources := record.get("kernel_sources"):  # older records have none
        commit += f", kernel sources {sources}"
    quick = " A quick run: its samples are few and short." if record.get("quick") else ""
    reached = sum(row["reached"] for row in record["rows"])
    host = record["host_us"]
    text = (
        f"{where}, JAX {record['jax']}, {record['dtype']}, {record['date']}, commit {commit}."
        f"{quick} Beside {record['peer']}, both under jit and "
        f"in turns. A cell is our time in milliseconds, and theirs over ours. "
        f"{reached} of {len(record['rows'])} reach the goal of {record['rows'][0]['goal']:g} ×. A "
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


def example(record: Record) -> str:
    """How far examples/train_flax.py came, and in what time."""
    threads = f"{record['threads']} thread" + "s" * (record["threads"] > 1)
    return (
        f"On {record['cpu']}, {threads}, it made {record['steps']} steps in "
        f"{record['seconds']:.0f} s, compiling included. The loss went from "
        f"{record['first_loss']:.2f} to {record['last_loss']:.2f} nats a character "
        f"({record['date']})."
    )
