"""Tables and quantities as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(
    header: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], left: int = 1
) -> str:
    """Columns aligned by spaces, the first `left` to the left, the others to the right.

    The header may have several lines; in its first ones a title runs over the empty cells to its
    right.
    """
    body = [header[-1], *rows]
    widths = [max(len(row[i]) for row in body) for i in range(len(body[0]))]
    titles = [_spans(line) for line in header[:-1]]
    for spans in titles:
        for start, stop, title in spans:
            missing = len(title) - sum(widths[start:stop]) - 2 * (stop - start - 1)
            widths[stop - 1] += max(0, missing)

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    def title_line(spans: list[tuple[int, int, str]]) -> str:
        cells = []
        for start, stop, title in spans:
            width = sum(widths[start:stop]) + 2 * (stop - start - 1)
            cells.append(title.ljust(width) if start < left else title.center(width))
        return "  ".join(cells).rstrip()

    rule = "  ".join("─" * w for w in widths)
    return "\n".join([*map(title_line, titles), line(header[-1]), rule, *map(line, rows)])


def _spans(line: Sequence[str]) -> list[tuple[int, int, str]]:
    """(start, stop, title) of every title; empty cells belong to the title on their left."""
    starts = [i for i, title in enumerate(line) if title or i == 0]
    return [(a, b, line[a]) for a, b in zip(starts, [*starts[1:], len(line)], strict=True)]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    marks = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, marks, *rows])


def percent(x: float) -> str:
    return f"{100 * x:.1f} %"


def seconds(s: float) -> str:
    """A duration with three significant digits: 812 µs, 34.5 ms, 1.27 s."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if s >= scale:
            return f"{three_digits(s / scale)} {unit}"
    return f"{three_digits(s / 1e-6)} µs"


def size(n: float) -> str:
    """Bytes in binary units: 48 KiB, 3.1 GiB."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if n >= scale:
            return f"{three_digits(n / scale)} {unit}"
    return f"{three_digits(n / 1024)} KiB"


def three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}"


def times(x: float) -> str:
    """A ratio: 3.4×."""
    return f"{x:.1f}×" if x < 99.95 else f"{x:.0f}×"


def length(n: int) -> str:
    """A sequence length: 512, 1K, 16K."""
    return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n)
