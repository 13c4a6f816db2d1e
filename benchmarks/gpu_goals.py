"""What the GPU kernels are to reach, and what of it a record of `make bench-gpu` shows.

The yardstick is the fastest peer's ratio to cuDNN 9.19, cell by cell, in a run of an H100 and in
one of an H200 (`results/peers_*.csv`): the larger of the two is what a cell is to beat. Clocks
move, so ours is compared by its ratio to the cuDNN of its own run.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cpu_goals
from flashsdk._commands.table import length, markdown_table
from gpu_tables import DIRECTIONS, FP8, READ, Record, by_name

Cell = tuple[float, str]  # a figure and where it is from
RESULTS = Path(__file__).parent / "results"
CARDS = ("h100", "h200")
CUDNN = "9.19"  # whose ratio the yardstick is
# What ours reached in the run that an H100's yardstick is of: peers_h100.csv, ours_over_peer.
OURS_THEN = "flashsdk at b1240af"

OVER_PEERS = 1.05  # geometric mean of our ratio over theirs
OVER_FA2 = 0.98  # counts as equal
CAUSAL_16K = 0.55  # of the time without a mask
SPARSE_SM80 = 0.17  # of the dense time, at density 0.125
PACKED = 0.9  # of the rate of equally long sequences
GPT2_MS = {0.0: 1.5, 0.1: 1.9}  # forward and backward on an H200, by dropout
DROPOUT = 1.2  # of the forward without
DETERMINISTIC = 1.2  # of the default backward
FEATURES_OFF = 1.15  # of the plain kernels
NOT_MEASURED = "–"
OF_A_READ = 0.9  # of the rate of a read of K and V, from so many bytes on:
FROM_BYTES = 64e6
DECODE_US = 7.5  # of one query of 1024 keys
OVER_BF16 = 1.7  # of the speed of bf16, from FROM_BYTES of that on
PAGES = 1.03  # of the time of the same cache in one piece
CHUNK = 0.95  # of the rate of the same keys alone, of a chunk of a prompt on pages


def table(record: Record) -> str:
    rows = [row for rows in GOALS for row in rows(record)]
    if "part" in record:
        rows = [row for row in rows if row[2] != NOT_MEASURED]
    return markdown_table(["goal", "asked", "reached in", "range"], rows, 2)


def cudnn_version(record: Record) -> str:
    """As it was loaded; of older records as it was installed."""
    return record["versions"].get("cuDNN") or record["versions"].get("nvidia-cudnn-cu13", "")


def text(record: Record) -> str:
    """The table, and what it can be held against."""
    version = cudnn_version(record)
    parts = [
        "What is asked of the kernels, in how many cells this run shows it, and the lowest and "
        "highest of them. Why some are missed: [gpu.md](gpu.md). A cell's goal is the fastest "
        f"peer's ratio to cuDNN {CUDNN}, on an H100 or an H200, whichever is larger "
        "(`benchmarks/results/peers_h100.csv`, `peers_h200.csv`).",
    ]
    if not version.startswith(CUDNN):
        parts.append(f"This run's cuDNN is {version}: its ratios are not to the same library.")
    if "timing" not in record:
        parts.append(f"As said above, this record's ratios to cuDNN are too high. {then()}")
    return "\n\n".join([*parts, table(record)])


def beside_peers(record: Record) -> str:
    """Ours over the fastest peer, as this record shows it; as another run did, if it cannot."""
    if "timing" not in record:
        return then()
    cells = over_yardstick(record).items()
    ratios = {op: [x for cell, x in cells if cell[0] == op] for op in DIRECTIONS}
    return (
        f"Our ratio to cuDNN over the fastest peer's ({', '.join(fastest())}; an H100's run or an "
        f"H200's, the larger): {reached(ratios)}."
    )


def holds(record: Record) -> str:
    """In how many cells ours is at least as fast as cuDNN in the same run."""
    found = []
    for op, direction in DIRECTIONS.items():
        if ratios := [x for cell, x in over_cudnn(record).items() if cell[0] == op]:
            found.append(
                f"in {sum(x >= 1 for x in ratios)} of {len(ratios)} cells of the {direction} "
                f"({min(ratios):.2f} of its speed at the lowest)"
            )
    return (
        f"What holds, timed alike on one {record['device']} on {record['date']}: ours is at least "
        f"as fast as cuDNN {' and '.join(found)}."
    )


def over_cudnn(record: Record) -> dict[tuple[Any, ...], float]:
    """How many times as fast as cuDNN ours is, of each cell that has both."""
    both = {"sm90", "cudnn"}
    cells = dense(record).items()
    return {cell: of["sm90"] / of["cudnn"] for cell, of in cells if both <= of.keys()}


def in_short(record: Record) -> str:
    """How many times as fast as cuDNN, for each head_dim: the mean and the ends of its cells."""
    ratios: dict[tuple[str, bool, int], list[float]] = {}
    for (op, dim, causal, _), ratio in over_cudnn(record).items():
        ratios.setdefault((op, causal, dim), []).append(ratio)
    dims = sorted({dim for _, _, dim in ratios})
    lengths = sorted({seqlen for *_, seqlen in over_cudnn(record)})
    rows = [
        [f"{DIRECTIONS[op]}, {'causal' if causal else 'no mask'}"]
        + [mean_and_ends(ratios.get((op, causal, dim), [])) for dim in dims]
        for op in DIRECTIONS
        for causal in (False, True)
    ]
    header = ["", *(f"head_dim {dim}" for dim in dims)]
    between = f"{length(lengths[0])} to {length(lengths[-1])} tokens"
    cudnn = f"cuDNN {cudnn_version(record)}"
    return (
        f"{record['device']}, bf16, {between}, batch × seqlen = 16384, heads × head_dim = 2048, "
        f"timed alike on {record['date']}: how many times as fast as {cudnn}, in the geometric "
        f"mean (lowest–highest).\n\n{markdown_table(header, rows, 1)}"
    )


def mean_and_ends(ratios: list[float]) -> str:
    if not ratios:
        return NOT_MEASURED
    return f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def then() -> str:
    """What the run of the H100's yardstick says of ours, timed as the peers were."""
    rows = yardstick_of("h100")
    ratios = {op: [float(r["ours_over_peer"]) for r in rows if r["op"] == op] for op in DIRECTIONS}
    return f"Timed alike on an H100, {OURS_THEN} over the fastest peer: {reached(ratios)}."


def reached(ratios: dict[str, list[float]]) -> str:
    """In words, for each direction."""
    found = []
    for op, direction in DIRECTIONS.items():
        if of_op := ratios[op]:
            at_least = f"at least 1 in {sum(x >= 1 for x in of_op)} of {len(of_op)} cells"
            mean = f"{statistics.geometric_mean(of_op):.3f} in the geometric mean"
            found.append(f"{direction} {at_least}, {mean}, {min(of_op):.3f} at the lowest")
    return "; ".join(found) or "no cell of this record"


def line(goal: str, asked: str, cells: Iterable[Cell], met: Callable[[float], bool]) -> list[str]:
    """One row: in how many cells it is met, the lowest and the highest, and where those are."""
    found = sorted(cells)
    if not found:
        return [goal, asked, NOT_MEASURED, NOT_MEASURED]
    ends = [found[0], found[-1]] if len(found) > 1 else [found[0]]
    between = " to ".join(f"{value:.3f} ({place})" for value, place in ends)
    return [goal, asked, f"{sum(met(value) for value, _ in found)} of {len(found)}", between]


def dense(record: Record) -> dict[tuple[Any, ...], dict[str, float]]:
    """TFLOP/s of each cell by name."""
    return by_name(record.get("dense", []), ("op", "head_dim", "causal", "seqlen"), "tflops")


def place(op: str, dim: int, causal: bool, seqlen: int) -> str:
    return f"{DIRECTIONS[op]} {dim} {'causal' if causal else 'no mask'} {length(seqlen)}"


def yardstick_of(card: str) -> list[dict[str, str]]:
    with (RESULTS / f"peers_{card}.csv").open() as file:
        return list(csv.DictReader(file))


def yardstick() -> dict[tuple[str, int, bool, int], float]:
    """The ratio to cuDNN that each cell is to beat: the larger of the cards'."""
    goal: dict[tuple[str, int, bool, int], float] = {}
    for r in itertools.chain.from_iterable(map(yardstick_of, CARDS)):
        cell = r["op"], int(r["head_dim"]), r["causal"] == "1", int(r["seqlen"])
        goal[cell] = max(goal.get(cell, 0.0), float(r["over_cudnn"]))
    return goal


def fastest() -> list[str]:
    """The peers that are the fastest somewhere."""
    return sorted({r["peer"] for card in CARDS for r in yardstick_of(card)})


def over_yardstick(record: Record) -> dict[tuple[Any, ...], float]:
    """Our ratio to cuDNN over the fastest peer's, by cell."""
    theirs = yardstick()
    return {
        cell: ratio / theirs[cell] for cell, ratio in over_cudnn(record).items() if cell in theirs
    }


def over_peers(record: Record) -> list[list[str]]:
    rows = []
    for op, direction in DIRECTIONS.items():
        cells = [(x, place(*cell)) for cell, x in over_yardstick(record).items() if cell[0] == op]
        goal = f"sm90 {direction}: ratio to cuDNN over the fastest peer's"
        rows.append(line(goal, "1", cells, lambda x: x >= 1))
        if cells:
            mean = statistics.geometric_mean(x for x, _ in cells)
            rows += [line(f"{goal}, geometric mean", str(OVER_PEERS), [(mean, f"all {len(cells)}")],
                          lambda x: x >= OVER_PEERS)]  # fmt: skip
    return rows


def over(record: Record, name: str, peer: str, least: float) -> list[list[str]]:
    cells = [
        (of[name] / of[peer], place(*cell))
        for cell, of in dense(record).items()
        if {name, peer} <= of.keys()
    ]
    goal = f"{name} over {'cuDNN' if peer == 'cudnn' else 'FA2'}, both directions"
    return [line(goal, f"{least:g}", cells, lambda x: x >= least)]


def causal(record: Record) -> list[list[str]]:
    cells = dense(record)
    return [
        line(
            f"{name}: causal at 16K, of the time without a mask", f"at most {CAUSAL_16K}",
            [
                (0.5 * cells[op, dim, False, seqlen][name] / of[name], f"{DIRECTIONS[op]} {dim}")
                for (op, dim, is_causal, seqlen), of in cells.items()
                if is_causal and seqlen == 16384 and name in of
            ],
            lambda x: x <= CAUSAL_16K,
        )
        for name in ("sm80", "sm90")
    ]  # fmt: skip


def windows(record: Record) -> list[list[str]]:
    return [
        line(
            f"{name}: window of 1024 at 16K, time over the part of the blocks visited",
            f"at most {cpu_goals.SPARSE_SLOPE}",
            [
                (
                    r["of_dense"] / r["visited"],
                    f"{DIRECTIONS[r['op']]} {r['head_dim']} {r['sides']}",
                )
                for r in record.get("windows", [])
                if r["name"] == name
            ],
            lambda x: x <= cpu_goals.SPARSE_SLOPE,
        )
        for name in ("sm80", "sm90")
    ]


def sparse(record: Record) -> list[list[str]]:
    def cells(name: str) -> list[Record]:
        return [r for r in record.get("sparse", []) if r["name"] == name]

    rows = [
        line(
            f"{name}: block-sparse, time over {cpu_goals.SPARSE_SLOPE} × density + "
            f"{100 * cpu_goals.SPARSE_OFFSET:.0f} % of dense",
            "at most 1",
            [
                (
                    r["of_dense"] / cpu_goals.sparse_limit(r["density"]),
                    f"{DIRECTIONS[r['op']]} {r['head_dim']} {length(r['seqlen'])} at "
                    f"{r['density']:.3g}",
                )
                for r in cells(name)
            ],
            lambda x: x <= 1,
        )
        for name in ("sm80", "sm90")
    ]
    eighth = [
        (r["of_dense"], f"{DIRECTIONS[r['op']]} {r['head_dim']} {length(r['seqlen'])}")
        for r in cells("sm80")
        if r["density"] == 0.125
    ]
    rows.append(
        line("sm80: block-sparse at density 0.125, of dense", f"at most {SPARSE_SM80}", eighth,
             lambda x: x <= SPARSE_SM80)
    )  # fmt: skip
    return rows


def packed(record: Record) -> list[list[str]]:
    cells = [
        (
            r["of_equal"],
            f"{DIRECTIONS[r['op']]} {r['head_dim']} {'causal' if r['causal'] else 'no mask'}",
        )
        for r in record.get("packed", [])
        if r["name"] == "sm90"
    ]
    goal = "sm90: packed, of the rate of equally long sequences"
    return [line(goal, str(PACKED), cells, lambda x: x >= PACKED)]


def gpt2(record: Record) -> list[list[str]]:
    of = {(r["name"], r["dropout"]): r for r in record.get("gpt2_medium", [])}
    rows = []
    for dropout, limit in GPT2_MS.items() if "H200" in record["device"] else ():
        r = of.get(("sm90", dropout))
        cells = [(r["fwd_ms"] + r["bwd_ms"], "both directions")] if r else []
        goal = f"sm90: GPT-2 medium, dropout {dropout:g}, ms"
        rows.append(line(goal, f"at most {limit}", cells, lambda x, limit=limit: x <= limit))
    if ("sm90", 0.1) in of:
        ratio = of["sm90", 0.1]["fwd_ms"] / of["sm90", 0.0]["fwd_ms"]
        rows.append(
            line("sm90: GPT-2 medium's forward with dropout, of that without",
                 f"at most {DROPOUT}", [(ratio, "dropout 0.1")], lambda x: x <= DROPOUT)
        )  # fmt: skip
    if {("sm80", 0.1), ("fa2", 0.1)} <= of.keys():
        both = {name: of[name, 0.1]["fwd_ms"] + of[name, 0.1]["bwd_ms"] for name in ("sm80", "fa2")}
        rows.append(
            line("sm80: GPT-2 medium with dropout, of FA2's time", "below 1",
                 [(both["sm80"] / both["fa2"], "dropout 0.1")], lambda x: x < 1)
        )  # fmt: skip
    return rows


def few_queries(record: Record) -> list[list[str]]:
    def where(r: Record) -> str:
        heads = f"{r['heads']}:{r['heads_kv']} × {r['head_dim']}"
        return f"{r['batch']} × {length(r['keys'])}, {heads}"

    one = [r for r in record.get("few_queries", []) if r["queries"] == 1]
    ours = [r for r in one if r["name"] == "flashsdk"]
    first = [(r["us"], where(r)) for r in ours if r["batch"] == 1 and r["keys"] == 1024]
    rows = [
        line("decode, one query of 1K keys, µs", f"at most {DECODE_US}", first,
             lambda x: x <= DECODE_US)
    ]  # fmt: skip
    read = {where(r): r["us"] for r in one if r["name"] == READ}
    if read:
        large = [r for r in ours if r["bytes"] >= FROM_BYTES]
        cells = [(read[where(r)] / r["us"], where(r)) for r in large]
        goal = f"decode, K and V of {FROM_BYTES / 1e6:.0f} MB and more: rate, of a read's"
        rows.append(line(goal, str(OF_A_READ), cells, lambda x: x >= OF_A_READ))
    fp8 = {where(r): r["us"] for r in one if r["name"] == FP8}
    if fp8:
        large = [r for r in ours if r["bytes"] >= FROM_BYTES]
        cells = [(r["us"] / fp8[where(r)], where(r)) for r in large]
        goal = f"decode, fp8 K and V in place of {FROM_BYTES / 1e6:.0f} MB and more of bf16: speed"
        rows.append(line(goal, str(OVER_BF16), cells, lambda x: x >= OVER_BF16))
    return rows


def caches(record: Record) -> list[list[str]]:
    shape = ("batch", "queries", "keys", "heads", "heads_kv", "head_dim", "bytes")
    if "caches" not in record:  # of an older bench
        return []
    read, pages, chunk = [], [], []
    for cell, of in by_name(record["caches"], shape, "us").items():
        batch, queries, keys, heads, heads_kv, dim, size = cell
        where = f"{batch} × {queries} × {length(keys)}, {heads}:{heads_kv} × {dim}"
        paged = {name: us for name, us in of.items() if name.startswith("pages")}
        if queries > 16:
            chunk += [(of["alone"] / us, f"{where}, {name}") for name, us in paged.items()]
            continue
        if size >= FROM_BYTES:
            names = ("used", "unequal") if batch > 1 else ("used",)
            read += [(of[READ] / of[name], f"{where}, {name}") for name in names]
        pages += [(us / of["used"], f"{where}, {name}") for name, us in paged.items()]
    return [
        line("used lengths: rate, of a read's", str(OF_A_READ), read, lambda x: x >= OF_A_READ),
        line("pages, of the time in one piece", f"at most {PAGES}", pages, lambda x: x <= PAGES),
        line("a chunk of a prompt on pages: rate, of the same keys alone", str(CHUNK), chunk,
             lambda x: x >= CHUNK),
    ]  # fmt: skip


def deterministic(record: Record) -> list[list[str]]:
    cells = [
        (r["of_default"], place("bwd", r["head_dim"], r["causal"], r["seqlen"]))
        for r in record.get("deterministic", [])
        if r["name"] == "sm90"
    ]
    goal = "sm90: deterministic, of the default's time"
    return [line(goal, f"at most {DETERMINISTIC}", cells, lambda x: x <= DETERMINISTIC)]


def features_off(record: Record) -> list[list[str]]:
    cells = [
        (r["of_plain"], f"{r['compiled_in']}, {DIRECTIONS[r['op']]} {r['head_dim']}")
        for r in record.get("features_off", [])
        if r["name"] == "sm80"
    ]
    goal = "sm80: features compiled in and off, of the plain kernels' time"
    return [line(goal, f"at most {FEATURES_OFF}", cells, lambda x: x <= FEATURES_OFF)]


GOALS: tuple[Callable[[Record], list[list[str]]], ...] = (
    over_peers,
    lambda record: over(record, "sm90", "cudnn", 1.0),
    lambda record: over(record, "sm80", "fa2", OVER_FA2),
    causal,
    windows,
    sparse,
    packed,
    gpt2,
    few_queries,
    caches,
    deterministic,
    features_off,
)
