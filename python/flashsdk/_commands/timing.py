"""Timing on a machine that others use too: short slices, interleaved, and medians of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

Call = Callable[[], object]


def slice_seconds(call: Call, seconds: float) -> float:
    """Seconds a call, over as many calls as fit into `seconds`; at least one."""
    count = 0
    start = time.perf_counter()
    while True:
        call()
        count += 1
        elapsed = time.perf_counter() - start
        # Another call must not overrun by more than half of itself.
        if elapsed + 0.5 * elapsed / count >= seconds:
            return elapsed / count


class Interleaved:
    """Several calls timed in turns, so that a change of clocks or of the load meets all of them.

    A call that takes longer than `slow` seconds is run once, and that run counts.
    """

    def __init__(self, calls: dict[str, Call], *, slice: float = 0.1, slow: float = 4.0) -> None:
        self.calls = calls
        self.slice = slice
        self.slow = slow
        self.samples: dict[str, list[float]] = {name: [] for name in calls}

    def run(self, rounds: int, seconds: float) -> dict[str, list[float]]:
        """Up to `rounds` rounds, at least two, until `seconds` have passed. Seconds a call."""
        start = time.perf_counter()
        slow = {name for name, call in self.calls.items() if self._first(name, call) > self.slow}
        for i in range(rounds):
            if i >= 2 and time.perf_counter() - start > seconds:
                break
            for name, call in self.calls.items():
                if name not in slow:
                    self.samples[name].append(slice_seconds(call, self.slice))
        return self.samples

    def _first(self, name: str, call: Call) -> float:
        """The warm-up, unless it takes so long that it had better count."""
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        if elapsed > self.slow:
            self.samples[name].append(elapsed)
        return elapsed


def median(samples: list[float]) -> float:
    return statistics.median(samples)
