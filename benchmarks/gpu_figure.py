"""The picture of a record of `make bench-gpu`: TFLOP/s over seqlen, ours beside the peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashsdk._commands import table
from flashsdk._commands.figures import OURS, OURS_LIGHT, STANDARD, STANDARD_LIGHT
from gpu_tables import DIRECTIONS, rates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]
LINES = {
    "sm90": ("flashsdk sm90", OURS),
    "sm80": ("flashsdk sm80", OURS_LIGHT),
    "cudnn": ("cuDNN", STANDARD),
    "fa2": ("FlashAttention-2", STANDARD_LIGHT),
}


def dense(figure: Figure, record: Record) -> None:
    """One panel for each direction, mask and head_dim; bars in groups of one seqlen."""
    rows = record["dense"]
    dims = sorted({r["head_dim"] for r in rows})
    seqlens = sorted({r["seqlen"] for r in rows})
    names = [name for name in LINES if any(r["name"] == name for r in rows)]
    rate = rates(rows)
    figure.set_size_inches(4.2 * len(dims), 9)
    figure.suptitle(
        f"Attention on an {record['device']}, bf16, TFLOP/s: flashsdk {record['flashsdk']} and "
        f"PyTorch {record['versions'].get('torch', '')}'s",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    panels = [(op, causal) for op in DIRECTIONS for causal in (False, True)]
    all_axes = figure.subplots(len(panels), len(dims), sharey="row", squeeze=False)
    width = 0.8 / len(names)
    for line, (op, causal) in zip(all_axes, panels, strict=True):
        for axes, dim in zip(line, dims, strict=True):
            for i, name in enumerate(names):
                label, colour = LINES[name]
                heights = [rate.get((op, dim, causal, s, name), 0.0) for s in seqlens]
                at = [x + (i - (len(names) - 1) / 2) * width for x in range(len(seqlens))]
                axes.bar(at, heights, width, color=colour, label=label)
            axes.set_title(f"{DIRECTIONS[op]}, head_dim {dim}{', causal' if causal else ''}")
            axes.set_xticks(range(len(seqlens)), [table.length(s) for s in seqlens])
            axes.tick_params(axis="x", length=0)
    all_axes[0][0].legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    for line in all_axes:
        low, high = line[0].get_ylim()
        line[0].set_ylim(low, 1.15 * high)
