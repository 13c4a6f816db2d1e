"""A progress bar on one line of the terminal; where output is no terminal, a line now and then."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType

BAR_WIDTH = 28
REDRAW_SECONDS = 0.1
LOG_SECONDS = 15.0  # between two lines of a log


class Progress:
    """``with Progress("demo", total) as progress: progress.update(done, "forward")``."""

    def __init__(self, label: str, total: float) -> None:
        self.label = label
        self.total = total
        self.done = 0.0
        self.stream = sys.stderr
        self.live = self.stream.isatty()
        self.started = self.drawn = time.monotonic()
        if self.live:
            self.drawn = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live:
            self._write("\r\x1b[K")

    def update(self, done: float, text: str = "") -> None:
        """Sets how much of `total` is done, and what is being worked on."""
        self.done = min(done, self.total)
        now = time.monotonic()
        if now - self.drawn < (REDRAW_SECONDS if self.live else LOG_SECONDS):
            return
        self.drawn = now
        share = self.done / self.total if self.total > 0 else 1.0
        if not self.live:
            self._write(f"{self.label}: {share:4.0%}  {now - self.started:4.0f} s  {text}\n")
            return
        filled = round(BAR_WIDTH * share)
        bar = "█" * filled + "░" * (BAR_WIDTH - filled)
        line = f"{self.label} {bar} {share:4.0%}  {now - self.started:3.0f} s  {text}"
        self._write("\r" + line[: shutil.get_terminal_size().columns - 1] + "\x1b[K")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
