"""Sections of docs/dev/benchmarks.md from the records of `make bench-gpu` and `make test-gpu`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import cpu_goals
from flashsdk._commands.table import length, markdown_table

Record = dict[str, Any]
PEERS = ("cudnn", "fa2")
WITH_BIAS = ("cudnn", "efficient")
OURS = ("sm80", "sm90")
FLASHINFER = "flashinfer"  # and the size of its pages
READ = "read"  # a sum over the bytes of K and V
FP8 = "fp8"  # ours, of keys and values in float8_e4m3fn
NAMES = {"cudnn": "cuDNN", "fa2": "FA2", "efficient": "efficient", "sm80": "sm80", "sm90": "sm90"}
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
OF_AN_OLDER_BENCH = (
    "This record was not timed alike: a peer's backward began right after the card had been waited "
    "for, so that the host's time counted, and peers allocated what ours was given. Its ratios to "
    "cuDNN and FA2 are therefore too high."
)


def about(record: Record) -> str:
    """Of what a record of any kind is."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    sources = f", kernel sources {record['kernel_sources']}" if record["kernel_sources"] else ""
    commit = f", commit {record['commit']}" if record["commit"] else ""
    return (
        f"{record['date']}, flashsdk {record['flashsdk']}{commit}{sources}; "
        f"Python {record['python']}, {versions}."
    )


def how(record: Record) -> str:
    """How calls were made and timed; of a record that does not say, what is wrong with it."""
    timing = record.get("timing")
    if timing is None:
        return OF_AN_OLDER_BENCH
    ways = {
        "graph": "captured in CUDA graphs",
        "queued": "queued one by one, with the card held back until the host was ahead",
    }
    used = timing["ways"]
    text = " or ".join(ways[way] for way in ways if way in used)
    if len(used) > 1:
        text += f" ({used['queued']} of {sum(used.values())} rows)"
    return (
        "Ours and the peers' calls go the same way: through PyTorch's autograd, which allocates "
        f"what they return; {text}. They take turns in an order drawn anew in each of "
        f"{timing['rounds']} rounds. Times are medians; a spread is from the 10th to the 90th "
        "percentile."
    )


def clocks(record: Record) -> str:
    """The card, and what its clocks were while calls were timed."""
    card = record.get("card")
    if card is None:
        return "Of the card's clocks this record says nothing."
    parts = [card["name"]]
    if "driver" in card:
        parts += [f"driver {card['driver']}", f"power limit {card['limit_watts']:.0f} W"]
        parts += [f"SM clock at most {card['max_sm_mhz']:.0f} MHz"]
    text = ", ".join(parts) + "."
    if (dense := record.get("clocks", {}).get("dense")) is None:
        return f"{text} No clocks were read while the dense cells ran."
    text += (
        f" While the dense cells ran: SM clock {dense['sm_mhz']:.0f} MHz in the median "
        f"({dense['sm_mhz_p10']:.0f} to {dense['sm_mhz_p90']:.0f}), memory "
        f"{dense['memory_mhz']:.0f} MHz, {dense['watts']:.0f} W"
    )
    lowered = [f"{name} {100 * share:.0f} %" for name, share in dense["lowered_by"].items()]
    return text + (f"; lowered by {', '.join(lowered)} of the time." if lowered else ".")


def with_spread(
    header: list[str], table: list[list[str]], groups: Iterable[list[Record]], value: str = "ms"
) -> tuple[list[str], list[list[str]]]:
    """With a last column: the widest spread, as a part of the median, of what a line is made from.

    groups: the rows of the record behind each line. An older record has no spread and no column.
    """

    def widest(rows: list[Record]) -> str:
        parts = [(r[f"{value}_p90"] - r[f"{value}_p10"]) / r[value] for r in rows]
        return f"{100 * max(parts):.1f} %"

    behind = list(groups)
    if any(f"{value}_p10" not in r for rows in behind for r in rows):
        return header, table
    lines = [[*line, widest(rows)] for line, rows in zip(table, behind, strict=True)]
    return [*header, "widest spread"], lines


def milliseconds(row: Record, digits: int = 2, value: str = "ms") -> str:
    """With the spread beside it, where the record has one."""
    text = f"{row[value]:.{digits}f} ms"
    if f"{value}_p10" in row:
        low, high = row[f"{value}_p10"], row[f"{value}_p90"]
        text += f" ({low:.{digits}f} to {high:.{digits}f})"
    return text


FURTHER = (  # cells besides the dense ones
    (
        "lengths", "Short and long sequences",
        "Up to 16K as above; beyond, batch 1 and heads × head_dim = 256.",
    ),
    ("gqa", "Grouped queries: 32 query heads, 8 key heads", "batch × seqlen = 16384."),
)  # fmt: skip


def bench_section(picture: str, record: Record, goals_text: str) -> str:
    parts = [
        f"## {record['device']}: `make bench-gpu`",
        about(record),
        clocks(record),
        picture,
        "bf16, batch × seqlen = 16384, heads × head_dim = 2048, TFLOP/s. cuDNN and FA2 are "
        f"PyTorch's scaled_dot_product_attention, timed in turns with ours. {how(record)}",
        "### Goals",
        goals_text,
    ]
    if "part" in record:
        given = ", ".join(f"{name} {value}" for name, value in record["part"].items() if value)
        parts.insert(2, f"A part of the bench: {given}.")
    for op, title in DIRECTIONS.items():
        if "dense" in record:
            parts += [f"### {title.capitalize()}", dense_table(record["dense"], op)]
    for key, title, text in FURTHER:
        if key in record:
            for op, direction in DIRECTIONS.items():
                parts += [f"### {title}, {direction}", text, dense_table(record[key], op)]
    for key, (title, of_rows) in TABLES.items():
        if record.get(key):
            parts += [f"### {title}", of_rows(record[key])]
    every = [*(key for key, *_ in FURTHER), *TABLES]
    if missing := [key for key in every if not record.get(key)]:
        parts.append(f"Not in this record: {', '.join(missing)}.")
    return "\n\n".join(filter(None, parts))


def rates(rows: list[Record]) -> dict[tuple[Any, ...], float]:
    """TFLOP/s by (op, head_dim, causal, seqlen, name)."""
    return {
        (r["op"], r["head_dim"], r["causal"], r["seqlen"], r["name"]): r["tflops"] for r in rows
    }


def dense_table(rows: list[Record], op: str) -> str:
    rate = {key[1:]: x for key, x in rates(rows).items() if key[0] == op}
    ours = sorted({name for *_, name in rate} - set(PEERS))
    cells = list(dict.fromkeys(key[:3] for key in rate))
    header = ["head_dim", "mask", "seqlen", *(NAMES.get(n, n) for n in (*PEERS, *ours))]
    header += [f"{NAMES.get(n, n)} / {NAMES[peer]}" for n in ours for peer in PEERS]
    ratios: dict[tuple[str, str], list[float]] = {}
    table = []
    for cell in cells:
        dim, causal, seqlen = cell
        line = [str(dim), "causal" if causal else "none", length(seqlen)]
        line += [number(rate.get((*cell, name))) for name in (*PEERS, *ours)]
        for name in ours:
            for peer in PEERS:
                a, b = rate.get((*cell, name)), rate.get((*cell, peer))
                if a is None or b is None:
                    line.append("–")
                    continue
                ratios.setdefault((name, peer), []).append(a / b)
                line.append(f"{a / b:.2f}")
        table.append(line)
    mean = ["geometric mean", "", "", *[""] * (len(PEERS) + len(ours))]
    for name in ours:
        for peer in PEERS:
            found = ratios.get((name, peer), [])
            mean.append(f"{statistics.geometric_mean(found):.2f}" if found else "–")
    of_op = [r for r in rows if r["op"] == op]
    header, table = with_spread(
        header, table, grouped(of_op, ("head_dim", "causal", "seqlen")).values()
    )
    return markdown_table(header, [*table, mean + [""] * (len(header) - len(mean))], 3)


def headline(record: Record) -> str:
    """The fastest of our backends in each cell: TFLOP/s, and over cuDNN's."""
    rate = rates(record["dense"])
    lines = list(dict.fromkeys(key[:3] for key in rate))
    seqlens = sorted({key[3] for key in rate})
    table = []
    for line in sorted(lines, key=lambda line: line[0], reverse=True):
        op, dim, causal = line
        cells = [DIRECTIONS[op], str(dim), "causal" if causal else "none"]
        for seqlen in seqlens:
            ours = max(rate.get((*line, seqlen, name), 0.0) for name in OURS)
            theirs = rate.get((*line, seqlen, "cudnn"))
            cells.append(f"{ours:.0f}" + (f" ({ours / theirs:.2f}×)" if theirs else ""))
        table.append(cells)
    header = ["", "head_dim", "mask", *map(length, seqlens)]
    text = (
        f"{record['device']}, bf16, batch × seqlen = 16384, heads × head_dim = 2048: TFLOP/s, and "
        f"how many times cuDNN's. {how(record)}"
    )
    return f"{text}\n\n{markdown_table(header, table, 3)}"


def sparse_table(rows: list[Record]) -> str:
    header = ["backend", "op", "head_dim", "seqlen", "density", "time", "of dense", "allowed"]
    table = [
        [
            r["name"], r["op"], str(r["head_dim"]), length(r["seqlen"]),
            f"{100 * r['density']:.1f} %", milliseconds(r, 3), f"{100 * r['of_dense']:.1f} %",
            f"{100 * cpu_goals.sparse_limit(r['density']):.1f} %",
        ]
        for r in rows
    ]  # fmt: skip
    return markdown_table(header, table, 4)


def by_name(
    rows: list[Record], shape: tuple[str, ...], value: str
) -> dict[tuple[Any, ...], dict[str, float]]:
    """What each name has for a shape."""
    return {
        cell: {r["name"]: r[value] for r in of_cell}
        for cell, of_cell in grouped(rows, shape).items()
    }


def grouped(rows: list[Record], shape: tuple[str, ...]) -> dict[tuple[Any, ...], list[Record]]:
    found: dict[tuple[Any, ...], list[Record]] = {}
    for r in rows:
        found.setdefault(tuple(r[key] for key in shape), []).append(r)
    return found


def few_queries_table(rows: list[Record]) -> str:
    ours = sorted({r["name"] for r in rows} - {*PEERS, "flashsdk", FP8, READ})
    with_fp8 = any(r["name"] == FP8 for r in rows)
    columns = [*PEERS, *ours, "flashsdk", *([FP8] if with_fp8 else [])]
    with_read = any(r["name"] == READ for r in rows)
    shape = ("batch", "queries", "keys", "heads", "heads_kv", "head_dim", "bytes", "kernel")
    times = by_name(rows, shape, "us")
    table = []
    for (batch, queries, keys, heads, heads_kv, dim, size, kernel), of in times.items():
        line = [str(batch), str(queries), length(keys), f"{heads} / {heads_kv}", str(dim)]
        line += [f"{of[name]:.1f}" if name in of else "–" for name in columns]
        line += [f"{of[name] / of['flashsdk']:.2f}" if name in of else "–" for name in PEERS]
        if with_fp8:
            line.append(f"{of['flashsdk'] / of[FP8]:.2f}")
        line.append(f"{size / of['flashsdk'] / 1e6:.2f}")
        if with_read:
            line.append(f"{of[READ] / of['flashsdk']:.2f}")
        table.append([*line, f"`{kernel}`"])
    header = ["batch", "queries", "keys", "heads / of keys", "head_dim"]
    header += [NAMES.get(name, name) for name in columns]
    header += [f"{NAMES[name]} / ours" for name in PEERS]
    header += ["ours / fp8"] if with_fp8 else []
    header += ["TB/s", *(["of a read"] if with_read else []), "kernel"]
    text = (
        "Forward, bf16; several queries are causal, aligned to the last key. µs a call from a CUDA "
        "graph, each with another K and V, together more than any cache holds; TB/s are of K and "
        'V. sm90 is the same call with backend="sm90", which does not split keys; flashsdk what a '
        "call gets by itself, the kernel named. cuDNN is left out where there are several queries: "
        "PyTorch hands it their mask as a matrix."
    )
    if with_fp8:
        text += " fp8: the same call with K and V in float8_e4m3fn, half the bytes, of fs.mha_fwd."
    if with_read:
        text += " Of a read: the rate beside that of PyTorch's sum over the same bytes."
    header, table = with_spread(header, table, grouped(rows, shape).values(), "us")
    return f"{text}\n\n{markdown_table(header, table, 5)}"


def decoding(record: Record) -> str:
    """One query a sequence: what a page for users shows of few_queries and caches."""
    shape = ("batch", "queries", "keys", "heads", "heads_kv", "head_dim")
    paged = by_name(record.get("caches", []), shape, "us")
    table = []
    for cell, of in by_name(record["few_queries"], shape, "us").items():
        batch, queries, keys, heads, heads_kv, dim = cell
        if queries > 1 or READ not in of:
            continue
        pages = paged.get(cell, {})
        ours, theirs = pages.get("pages of 16"), pages.get(f"{FLASHINFER}, 16")
        line = [f"{batch} × {length(keys)}, {heads}:{heads_kv} × {dim}", f"{of['flashsdk']:.1f}"]
        line.append(f"{of[READ] / of['flashsdk']:.2f}")
        line += [f"{of[name] / of['flashsdk']:.2f}" if name in of else "–" for name in PEERS]
        line += [f"{ours:.1f}" if ours else "–"]
        table.append([*line, f"{theirs / ours:.2f}" if ours and theirs else "–"])
    header = ["batch × keys, heads:heads_kv × head_dim", "µs", "of a read"]
    header += [f"{NAMES[name]}'s time" for name in PEERS]
    header += ["pages of 16, µs", "FlashInfer's time"]
    return (
        f"{record['device']}, bf16, one query a sequence, {record['date']}, kernel sources "
        f"{record['kernel_sources']}: µs of a call, the rate at which it reads K and V beside a "
        "read of the same bytes, and how long others take in the same run, ours being 1.\n\n"
        + markdown_table(header, table, 1)
    )


def caches_table(rows: list[Record]) -> str:
    names = [name for name in dict.fromkeys(r["name"] for r in rows) if name != READ]
    shape = ("batch", "queries", "keys", "heads", "heads_kv", "head_dim", "bytes")
    table = []
    for (batch, queries, keys, heads, heads_kv, dim, size), of in by_name(
        rows, shape, "us"
    ).items():
        line = [str(batch), str(queries), length(keys), f"{heads} / {heads_kv}", str(dim)]
        line += [f"{of[name]:.1f}" if name in of else "–" for name in names]
        line += [f"{size / of['used'] / 1e6:.2f}", f"{of[READ] / of['used']:.2f}"]
        table.append(line)
    header = ["batch", "queries", "keys", "heads / of keys", "head_dim", *names]
    header += ["TB/s, used", "of a read"]
    text = (
        "Forward, bf16, µs a call as above. Each sequence uses so many keys of a cache of twice as "
        "many. alone: the same keys without a cache. unequal: several sequences of 1/16 to 31/16 "
        "of them. Pages lie in any order. Of a read: the rate beside that of PyTorch's sum over "
        "the bytes."
    )
    if any(name.startswith(FLASHINFER) for name in names):
        text += (
            " flashinfer: the same pages, of so many keys; it has planned the lengths on the host, "
            "ahead of the clock."
        )
    header, table = with_spread(header, table, grouped(rows, shape).values(), "us")
    return f"{text}\n\n{markdown_table(header, table, 5)}"


def many_short_table(rows: list[Record]) -> str:
    ours = sorted({r["name"] for r in rows} - set(PEERS))
    columns = [*PEERS, *ours]
    shape = ("sequences", "seqlen", "head_dim", "kind", "op")
    memory = by_name(rows, shape, "extra_bytes")
    table = []
    for cell, ms in by_name(rows, shape, "ms").items():
        line = [str(cell[0]), *map(str, cell[1:])]
        line += [f"{ms[name]:.3f} ms" if name in ms else "–" for name in columns]
        extra = memory[cell]
        line += [f"{extra[name] / 2**20:.1f}" if name in extra else "–" for name in columns]
        table.append(line)
    names = [NAMES.get(name, name) for name in columns]
    header = ["sequences", "tokens of each", "head_dim", "", "op", *names]
    header += [f"{name}, MiB" for name in names]
    header, table = with_spread(header, table, grouped(rows, shape).values())
    text = (
        "bf16, 512 / head_dim heads, no mask. MiB: the peak of a call beyond its inputs and what "
        "it returns, of ours the workspace. FA2 on packed sequences is PyTorch's varlen_attn. A "
        "call that names no backend gets what log-sm90-backward.md says.\n\n"
    )
    return text + markdown_table(header, table, 5)


def windows_table(rows: list[Record]) -> str:
    header = ["backend", "op", "head_dim", "seqlen", "window", "time", "of dense", "blocks visited",
              "allowed"]  # fmt: skip
    sides = {"left": "{} to the left", "both": "{} around"}
    table = [
        [
            r["name"], r["op"], str(r["head_dim"]), length(r["seqlen"]),
            sides[r["sides"]].format(r["window"]), milliseconds(r, 3),
            f"{100 * r['of_dense']:.1f} %", f"{100 * r['visited']:.1f} %",
            f"{100 * cpu_goals.SPARSE_SLOPE * r['visited']:.1f} %",
        ]
        for r in rows
    ]  # fmt: skip
    text = (
        "Time beside that without a mask, and blocks of 128 × 128 of which a part is visible.\n\n"
    )
    return text + markdown_table(header, table, 5)


def packed_table(rows: list[Record]) -> str:
    header = ["backend", "op", "head_dim", "mask", "packed", "equally long",
              "packed / equally long", "by blocks"]  # fmt: skip
    table = [
        [
            NAMES[r["name"]], r["op"], str(r["head_dim"]), "causal" if r["causal"] else "none",
            number(r["tflops"]), number(r["equal_tflops"]), f"{r['of_equal']:.2f}",
            f"{r['of_blocks']:.2f}",
        ]
        for r in rows
    ]  # fmt: skip
    header, table = with_spread(header, table, ([r] for r in rows))
    first = rows[0]
    text = (
        f"{first['sequences']} sequences of at most {first['longest']} tokens, {first['tokens']} "
        f"together, beside {first['equal_batch']} of {first['equal_seqlen']}, which are as many "
        "FLOPs; heads × head_dim = 2048, TFLOP/s. The last column is the quotient if blocks of "
        "128 × 128 took the same time however full they are.\n\n"
    )
    return text + markdown_table(header, table, 4)


def gpt2_table(rows: list[Record]) -> str:
    header = ["", "dropout", "forward", "backward", "both"]
    table = [
        [
            NAMES[r["name"]], str(r["dropout"]), milliseconds(r, value="fwd_ms"),
            milliseconds(r, value="bwd_ms"), f"{r['fwd_ms'] + r['bwd_ms']:.2f} ms",
        ]
        for r in rows
    ]  # fmt: skip
    text = "batch 64, 16 heads, seqlen 1024, head_dim 64, fp16, causal.\n\n"
    return text + markdown_table(header, table, 1)


def bias_table(rows: list[Record]) -> str:
    ours = sorted({r["name"] for r in rows} - set(WITH_BIAS))
    columns = [*WITH_BIAS, *ours]
    table = []
    shape = ("bias", "dropout", "op", "head_dim", "seqlen")
    for (kind, dropout, op, dim, seqlen), ms in by_name(rows, shape, "ms").items():
        line = [kind, str(dropout), op, str(dim), length(seqlen)]
        line += [f"{ms[name]:.2f} ms" if name in ms else "–" for name in columns]
        for name in ours:
            line += [f"{ms[peer] / ms[name]:.2f}" if peer in ms else "–" for peer in WITH_BIAS]
        table.append(line)
    header = ["bias", "dropout", "op", "head_dim", "seqlen"]
    header += [NAMES[name] for name in columns]
    header += [f"{NAMES[peer]} / {name}" for name in ours for peer in WITH_BIAS]
    header, table = with_spread(header, table, grouped(rows, shape).values())
    text = (
        "(1, 1, seqlen, seqlen), batch × seqlen = 16384. efficient is the memory-efficient "
        "attention of PyTorch; its FlashAttention-2 takes none.\n\n"
    )
    return text + markdown_table(header, table, 5)


def alibi_table(rows: list[Record]) -> str:
    header = ["backend", "op", "head_dim", "mask", "time", "time / plain"]
    table = [
        [
            r["name"], r["op"], str(r["head_dim"]), "causal" if r["causal"] else "none",
            milliseconds(r), f"{r['of_plain']:.2f}",
        ]
        for r in rows
    ]  # fmt: skip
    text = "Four sequences of 4096, slopes as in ALiBi's paper, against the same call without.\n\n"
    return text + markdown_table(header, table, 4)


def deterministic_table(rows: list[Record]) -> str:
    header = ["backend", "head_dim", "mask", "seqlen", "time", "time / default"]
    table = [
        [
            r["name"], str(r["head_dim"]), "causal" if r["causal"] else "none",
            length(r["seqlen"]), milliseconds(r), f"{r['of_default']:.2f}",
        ]
        for r in rows
    ]  # fmt: skip
    text = "The same bits from run to run, against the same call without.\n\n"
    return text + markdown_table(header, table, 4)


def features_table(rows: list[Record]) -> str:
    header = ["backend", "compiled in", "op", "head_dim", "time / plain"]
    table = [
        [r["name"], r["compiled_in"], r["op"], str(r["head_dim"]), f"{r['of_plain']:.2f}"]
        for r in rows
    ]
    text = "Kernels that calls with features take, launched without any.\n\n"
    return text + markdown_table(header, table, 4)


TABLES: dict[str, tuple[str, Callable[[list[Record]], str]]] = {
    "many_short": ("Many short sequences", many_short_table),
    "few_queries": ("Few queries, many keys", few_queries_table),
    "caches": ("Caches of keys", caches_table),
    "windows": ("Sliding windows", windows_table),
    "packed": ("Packed sequences of long-tailed lengths", packed_table),
    "sparse": ("Block-sparse, blocks of 128 × 128", sparse_table),
    "gpt2_medium": ("The attention of GPT-2 medium", gpt2_table),
    "bias": ("Bias", bias_table),
    "alibi": ("ALiBi", alibi_table),
    "deterministic": ("Deterministic backward", deterministic_table),
    "features_off": ("Features compiled in, all off", features_table),
}


def tests_section(record: Record) -> str:
    steps = record["steps"]
    table, missing = [], []

    def row(name: str, key: str, text: str) -> None:
        if key not in steps:
            missing.append(key)
            return
        step = steps[key]
        outcome = step.get("skipped") if isinstance(step.get("skipped"), str) else None
        table.append([name, outcome or text, "passed" if step["ok"] else "FAILED"])

    for backend, kernels in record["built"].items():
        dims = ", ".join(map(str, kernels["head_dims"]))
        text = f"{kernels['kernels']} kernels; {', '.join(kernels['dtypes'])}; head_dim {dims}"
        table.append([f"built: {backend}", text, ""])

    def of(key: str) -> Record:
        return {"passed": 0, "failed": 0, "skipped": 0, **steps.get(key, {})}

    build = of("build")
    text = f"for {build.get('arch')}"
    if "seconds" in build:  # a build of everything
        text += f" in {build['seconds']} s on {build['jobs']} cores"
    row("build", "build", text)
    row("machine code", "machine_code", machine_code_text(of("machine_code")))
    for name in ("ctest", "pytest"):
        p = of(name)
        row(name, name, f"{p['passed']} passed, {p['failed']} failed, {p['skipped']} skipped")
    problems = of("verify").get("problems", {})
    text = ", ".join(f"{n} on {backend}" for backend, n in problems.items())
    row("random problems against float64", "verify", text)
    row("launches at random shapes", "soak", soak_text(of("soak")))
    sanitizer = of("sanitizer")
    text = ", ".join(
        f"{tool} {part['kernels']} kernels {'clean' if part['clean'] else 'NOT clean'}"
        + (f" ({part['left_out']}, left out)" if "left_out" in part else "")
        for tool, part in sanitizer.items()
        if isinstance(part, dict)
    )
    row("compute-sanitizer", "sanitizer", text)
    several = f"{record['gpus']} × " if record.get("gpus", 1) > 1 else ""
    times = of("overhead").get("microseconds", {})
    row("host time of a call, µs", "overhead", ", ".join(f"{n} {t}" for n, t in times.items()))
    if "sdpa_enabled" in times:
        row(
            "PyTorch's function with `enable()` over ours called directly, µs", "overhead",
            enabled_text(times),
        )  # fmt: skip
    parts = [
        f"## {several}{record['device']}: `make test-gpu`",
        about(record),
        markdown_table(["step", "result", ""], table, 3),
    ]
    if missing:
        parts.append(f"Not in this record: {', '.join(missing)}.")
    parts += [f"```text\n{step['why'].strip()}\n```" for step in steps.values() if "why" in step]
    return "\n\n".join(parts)


def enabled_text(times: Record) -> str:
    """What PyTorch's own way to our kernels adds to the host time of a call."""
    forward, training = (
        times[f"sdpa_enabled{both}"] - times[f"sdpa{both}"] for both in ("", "_train")
    )
    goal = "reached" if forward <= 3 else "missed"
    return f"forward {forward:+.1f} (goal: at most 3, {goal}), with its backward {training:+.1f}"


def machine_code_text(code: Record) -> str:
    local = code.get("local_in_main_loops", {})
    with_local = ", ".join(f"{n} of {backend}" for backend, n in local.items())
    wgmma = code.get("sm90", 0) - code.get("sm90_without_wgmma", 0)
    return (
        f"{code.get('kernels')} kernels; wgmma in the main loops of {wgmma} of {code.get('sm90')} "
        f"of sm90; local memory in those of {with_local}"
    )


def soak_text(soak: Record) -> str:
    """Largest errors are those of the fast backend: what the others are says less."""
    launches, asked = soak.get("launches", 0), soak.get("asked", 0)
    text = f"{launches}" + (f" of {asked}" if launches < asked else "")
    text += f" on sm90 in {soak.get('seconds')} s, {soak.get('repeated')} of them for equal bits"
    for pair, shares in soak.get("shares", {}).items():
        if pair.startswith("sm90 from "):
            parts = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
            other = pair.removeprefix("sm90 from ")
            text += f"; largest error beside {other} as a part of what is allowed: {parts}"
    return text


def number(x: float | None) -> str:
    return "–" if x is None else f"{x:.0f}"
