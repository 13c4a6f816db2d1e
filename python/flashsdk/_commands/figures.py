"""Pictures of records, by matplotlib where it is installed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashsdk._commands import table
from flashsdk._commands.roof import Roof

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, OURS_LIGHT = "#1d5c96", "#86b6dc"
STANDARD, STANDARD_LIGHT = "#8f8f8a", "#c9c9c4"
SPARSE = "#d9822b"
INK = "#333333"

Record = dict[str, Any]


def save(draw: Callable[[Figure, Record], None], record: Record, path: str | Path) -> str:
    """Draws and saves; the line that says where, or why not."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed; pip install 'flashsdk[plot]'"
    style: Any = {
        "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": "#bbbbbb",
        "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False,
        "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(layout="constrained", facecolor="white")
        draw(figure, record)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
    return f"picture: {path}"


def where(record: Record) -> str:
    if "device" in record:
        return str(record["device"])
    return f"{record['cpu']}, {record['isa']}, {record['threads']} threads"


def problem(record: Record) -> str:
    """The one that ``bench --shape`` has measured."""
    s = record["shape"]
    return (
        f"batch {s['batch']}, seqlen {s['seqlen']}, heads {s['heads']}:{s['heads_kv']}, head_dim "
        f"{s['head_dim']}, {record['dtype']}, mask {record['mask']}"
    )


def demo(figure: Figure, record: Record) -> None:
    """Time and memory beside standard attention, and what block sparsity adds at 16K."""
    rows = record["rows"]
    figure.set_size_inches(12.5, 4.6)
    figure.suptitle(
        f"Exact attention, forward + backward, fp32: flashsdk {record['flashsdk']} and "
        f"standard attention ({record['framework']})\n{where(record)}",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    time_axes, memory_axes, long_axes = figure.subplots(1, 3, width_ratios=[1.25, 1.1, 1])
    dense = [r for r in rows if r["mask"] != "block-sparse"]
    labels = [f"{r['name']}\n{r['dims']}, {table.length(r['seqlen'])}, {_mask(r)}" for r in dense]

    ours = [r["fwd"] + r["bwd"] for r in dense]
    standard = [r["standard_fwd"] + r["standard_bwd"] for r in dense]
    texts = [
        (table.seconds(s), f"flashsdk {table.seconds(o)}, {table.times(s / o)} faster")
        for o, s in zip(ours, standard, strict=True)
    ]
    _pairs(time_axes, labels, ours, standard, texts)
    time_axes.set_title("Time, standard attention = 1")

    ours = [r["memory"] for r in dense]
    standard = [r["standard_memory"] for r in dense]
    texts = [
        (table.size(s), f"flashsdk {table.size(o)}, {table.times(s / o)} less")
        for o, s in zip(ours, standard, strict=True)
    ]
    _pairs(memory_axes, [""] * len(dense), ours, standard, texts)
    memory_axes.set_title("Extra memory, standard attention = 1")

    _long(long_axes, [r for r in rows if r["seqlen"] == max(r["seqlen"] for r in rows)])


def _mask(row: Record) -> str:
    return "no mask" if row["mask"] == "none" else str(row["mask"])


def _pairs(
    axes: Axes,
    labels: list[str],
    ours: list[float],
    standard: list[float],
    texts: list[tuple[str, str]],
) -> None:
    """Two bars a row, the standard one of length 1."""
    for i, (o, s, (theirs_text, ours_text)) in enumerate(zip(ours, standard, texts, strict=True)):
        axes.barh(i - 0.2, 1, 0.36, color=STANDARD_LIGHT)
        axes.barh(i + 0.2, o / s, 0.36, color=OURS)
        axes.text(0.99, i - 0.2, f"standard {theirs_text}", va="center", ha="right", fontsize=8)
        inside = o / s > 0.62
        axes.text(
            0.99 * o / s if inside else o / s + 0.02, i + 0.2, ours_text, va="center",
            ha="right" if inside else "left", fontsize=8, weight="bold",
            color="white" if inside else OURS,
        )  # fmt: skip
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.02, *(o / s for o, s in zip(ours, standard, strict=True))))
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


def _long(axes: Axes, rows: list[Record]) -> None:
    """Our own times at the longest sequence: no mask, causal, block-sparse."""
    colors = {"none": OURS, "causal": OURS, "block-sparse": SPARSE}
    for i, r in enumerate(rows):
        total = r["fwd"] + r["bwd"]
        axes.barh(i, r["fwd"], 0.6, color=colors[r["mask"]])
        axes.barh(i, r["bwd"], 0.6, left=r["fwd"], color=colors[r["mask"]], alpha=0.6)
        share = total / (rows[0]["fwd"] + rows[0]["bwd"])
        note = "" if i == 0 else f"   {share:.1%} of the time"
        axes.text(total, i, f" {table.seconds(total)}{note}", va="center", fontsize=8)
    labels = [f"{_mask(r)}\n{r['density']:.1%} of scores" for r in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(r["fwd"] + r["bwd"] for r in rows))
    axes.set_xlabel("seconds; dark: forward, light: backward")
    axes.set_title(f"flashsdk at {table.length(rows[0]['seqlen'])} tokens")


def bench_cpu(
    figure: Figure, record: Record, allowed: Callable[[float], float] | None = None
) -> None:
    """Ours and PyTorch as shares of the peak, and block-sparse time over density.

    ``allowed`` gives the most time, of dense time, for a density, to be drawn beside it.
    """
    dense = [r for r in record["rows"] if r["kind"] == "dense"]
    sparse = [r for r in record["rows"] if r["kind"] == "sparse"]
    dtypes = list(dict.fromkeys(r["dtype"] for r in dense))
    panels = len(dtypes) + bool(sparse)
    if panels == 0:
        figure.set_size_inches(4, 1)
        figure.text(0.5, 0.5, "no rows to draw", ha="center")
        return
    columns = min(panels, 2)
    lines = -(-panels // columns)
    figure.set_size_inches(6.3 * columns, 3.3 * lines + 0.5)
    figure.suptitle(
        f"flashsdk {record['flashsdk']}: {where(record)}", fontsize=10, x=0.01, ha="left"
    )
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for dtype, axes in zip(dtypes, grid, strict=False):
        _shares(axes, dtype, [r for r in dense if r["dtype"] == dtype])
    if sparse:
        _densities(grid[len(dtypes)], sparse, allowed)
    for spare in grid[panels:]:
        spare.set_axis_off()
    if dense:
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=4, fontsize=8, frameon=False)


def _shares(axes: Axes, dtype: str, rows: list[Record]) -> None:
    shapes = list(dict.fromkeys((r["seqlen"], r["head_dim"], r["mask"]) for r in rows))
    bars = (
        ("fwd", "ours", OURS), ("fwd", "torch", STANDARD),
        ("bwd", "ours", OURS_LIGHT), ("bwd", "torch", STANDARD_LIGHT),
    )  # fmt: skip
    names = {"fwd": "forward", "bwd": "backward", "ours": "flashsdk", "torch": "PyTorch flash"}
    for i, (op, who, color) in enumerate(bars):
        points = []
        for x, shape in enumerate(shapes):
            for r in rows:
                if (r["seqlen"], r["head_dim"], r["mask"]) == shape and r["op"] == op:
                    share = r["share"]
                    if who == "torch":
                        share = share / r["ratio"] if "ratio" in r else 0.0
                    points.append((x + (i - 1.5) * 0.2, 100 * share))
        if points:
            label = f"{names[who]}, {names[op]}"
            x_of, heights = zip(*points, strict=True)
            bar = axes.bar(x_of, heights, 0.19, color=color, label=label)
            axes.bar_label(bar, fmt="%.0f", fontsize=7, padding=1)
    labels = [
        f"{table.length(n)} × {d}" + ("\ncausal" if mask == "causal" else "")
        for n, d, mask in shapes
    ]
    axes.set_xticks(range(len(shapes)), labels)
    axes.axhline(100, color=INK, lw=0.8, ls=":")
    axes.set_ylim(0, max(108, 1.06 * axes.dataLim.y1))
    axes.set_ylabel(f"% of the {rows[0]['peak_kind']} peak")
    axes.set_title(dtype)


def _densities(axes: Axes, rows: list[Record], allowed: Callable[[float], float] | None) -> None:
    ends = [0.8 * min(r["density"] for r in rows), 1.25 * max(r["density"] for r in rows)]
    steps = [ends[0] * (ends[1] / ends[0]) ** (i / 40) for i in range(41)]
    axes.plot(steps, steps, color=STANDARD, lw=1, label="time = density × dense")
    if allowed is not None:
        axes.plot(steps, list(map(allowed, steps)), color=STANDARD, lw=1, ls=":", label="allowed")
    kinds = list(dict.fromkeys((r["dtype"], r["head_dim"]) for r in rows))
    colors = dict(zip(kinds, (OURS, OURS_LIGHT, SPARSE, STANDARD), strict=False))
    groups = list(dict.fromkeys((r["dtype"], r["head_dim"], r["op"]) for r in rows))
    for i, (dtype, dim, op) in enumerate(groups):
        of = [r for r in rows if (r["dtype"], r["head_dim"], r["op"]) == (dtype, dim, op)]
        aside = 1 + 0.03 * (i - (len(groups) - 1) / 2)  # so that they do not hide each other
        axes.plot(
            [r["density"] * aside for r in of], [r["of_dense"] for r in of],
            {"fwd": "o", "bwd": "s"}[op], ms=4, color=colors[dtype, dim],
            label=f"{dtype} {op}, head_dim {dim}",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = sorted({2.0 ** round(math.log2(r["density"])) for r in rows})
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks(ticks, [f"{100 * x:.3g} %" for x in ticks])
    axes.set_xlabel("density: visited blocks / all blocks")
    axes.set_ylabel("time / dense time")
    axes.set_title(f"Block-sparse, {table.length(rows[0]['seqlen'])} tokens")
    axes.legend(fontsize=7, frameon=False, loc="upper left")


def roofline(figure: Figure, record: Record) -> None:
    """Of one problem: who does how many GFLOP/s, below what the machine can do at most."""
    figure.set_size_inches(11, 4.4)
    figure.suptitle(
        f"flashsdk {record['flashsdk']}: {where(record)}\n{problem(record)}",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    names = {"fwd": "Forward", "bwd": "Backward"}
    for axes, op in zip(figure.subplots(1, 2, sharey=True), names, strict=True):
        limits = Roof(**record["roof"][op])
        rows = [r for r in record["rows"] if r["op"] == op]
        _roof(axes, limits, rows)
        axes.set_title(names[op])
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.16))


def _roof(axes: Axes, limits: Roof, rows: list[Record]) -> None:
    """The roof over two decades around its edge and the problem, and a mark for each row."""
    at, edge = rows[0]["intensity"], limits.flops / limits.bytes
    ends = [min(at, edge) / 10, max(at, edge) * 10]
    corners = sorted([*ends, edge])
    axes.plot(
        corners, [limits.limit(x) / 1e9 for x in corners], color=INK, lw=1.2,
        label=f"roof: {limits.flops / 1e9:.0f} GFLOP/s, {limits.bytes / 1e9:.0f} GB/s",
    )  # fmt: skip
    colors = (OURS, STANDARD, SPARSE, STANDARD_LIGHT, OURS_LIGHT)
    for i, row in enumerate(rows):
        low, high = (row["gflops"] * row["seconds"] / q for q in reversed(row["quartiles"]))
        axes.errorbar(
            at, row["gflops"], yerr=[[row["gflops"] - low], [high - row["gflops"]]], ms=6,
            fmt="osD^v"[i % 5], color=colors[i % 5], label=f"{row['name']}: {row['gflops']:.0f}",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs for each byte of inputs and outputs")
    axes.set_ylabel("GFLOP/s, quartiles")
