"""Draws masks. Only this file imports matplotlib, and only when a picture is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._errors import InvalidArgument, Unsupported, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"skipped": "#f2f2ee", "partial": "#86b6dc", "full": "#1d5c96"}


class Panel(NamedTuple):
    """One picture: which cells are partly and which are wholly visible, bool (rows, cols)."""

    title: str
    partial: NDArray[np.bool_]
    full: NDArray[np.bool_]


PICTURES = (".png", ".svg", ".pdf")


def picture(name: str, path: object) -> Path:
    """Where a picture is to go, or an Error that names the argument."""
    if not isinstance(path, (str, os.PathLike)) or Path(path).suffix.lower() not in PICTURES:
        raise InvalidArgument(f"{name}: {shown(path)}; a path that ends in {', '.join(PICTURES)}")
    return Path(path)


def draw(
    panels: list[Panel],
    seqlens: tuple[int, int],  # seqlen_q, seqlen_k
    cell: tuple[int, int],  # queries, keys
    ax: Axes | None,
    path: str | os.PathLike[str] | None,
) -> Figure:
    """One picture per panel on a new figure, or the first one on ``ax``; saved if ``path``."""
    try:
        from matplotlib.axes import Axes
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch
    except ImportError as error:
        message = "plot: matplotlib is not installed; pip install 'flashsdk[plot]'"
        raise Unsupported(message) from error

    if ax is not None and not isinstance(ax, Axes):
        raise InvalidArgument(f"ax: {shown(ax)}; an Axes of matplotlib")
    if path is not None:
        path = picture("path", path)
    colors = ListedColormap(list(KINDS.values()))
    if ax is None:
        figure, axes = _axes(len(panels), seqlens[0] / seqlens[1], path)
    else:
        figure, axes = ax.figure.figure, [ax]  # a subfigure's figure is the whole one
    for panel, here in zip(panels, axes, strict=False):
        kind = panel.partial + 2 * panel.full  # places in KINDS
        rows, cols = kind.shape
        extent = (0, cols * cell[1], rows * cell[0], 0)
        here.imshow(kind, cmap=colors, vmin=0, vmax=2, extent=extent, interpolation="nearest")
        here.set(xlim=(0, seqlens[1]), ylim=(seqlens[0], 0), xlabel="key", ylabel="query")
        visited = float((panel.partial | panel.full).mean())
        here.set_title(f"{panel.title}  {visited:.1%} visited".strip(), fontsize="small")
        here.set_aspect("equal" if 0.3 < seqlens[0] / seqlens[1] < 3 else "auto")
    handles = [Patch(facecolor=c, edgecolor="#999", label=k) for k, c in KINDS.items()]
    if ax is None:
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    if path is not None:
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            allowed = f"a file that can be written ({error.strerror})"
            raise InvalidArgument(f"path: {str(path)!r}; {allowed}") from error
    return figure


def _axes(count: int, aspect: float, path: object) -> tuple[Figure, list[Axes]]:
    cols = min(count, 4)
    rows = -(-count // cols)
    size = (1 + 3.6 * cols, 1 + (0.4 + 3.2 * min(max(aspect, 0.3), 3)) * rows)
    # A figure that only goes to a file needs no window and none of pyplot's global state.
    if path is None:
        from matplotlib import pyplot

        figure = pyplot.figure(figsize=size, layout="constrained")
    else:
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, cols, squeeze=False).ravel()
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, list(axes[:count])
