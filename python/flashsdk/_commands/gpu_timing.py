"""How calls on a GPU are timed: all of them alike, whoever's they are.

What is compared runs in turns, in an order drawn anew every round, and nothing waits between two of
them. CUDA events stand around each sample, which is as many calls as last SAMPLE_MS. The host must
be ahead of the card, or its own time would count: calls are captured in CUDA graphs, or, where one
of those compared cannot be, all are queued one by one. Either way a spinning kernel holds the card
back until a round is queued, and a round is dropped in which the card reached a sample before all
of it was queued.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from flashsdk._errors import first_line

Run = Callable[[], object]
Runs = dict[Any, Run]
Key = TypeVar("Key", bound=Hashable)

ROUNDS = 15  # samples of each
SAMPLE_MS = 1.0  # events take some 2 µs, which is to be little of it
MOST_CALLS = 100  # of a sample
TRIES = 4  # rounds begun for each that counts, at most
SPIN_HZ = 2e9  # cycles of torch.cuda._sleep a second, at least: a card's highest clock
ORDERS = random.Random(0)  # of the rounds
GRAPH, QUEUED = "graph", "queued"

# (begin, end) by time.monotonic of all that was timed: what clocks are sampled beside (gpu_card).
WINDOWS: list[tuple[float, float]] = []


@dataclass(frozen=True)
class Times:
    """Milliseconds of a call: the median, the 10th and the 90th percentile; and how it was run."""

    ms: float
    p10: float
    p90: float
    way: str

    def row(self) -> dict[str, Any]:
        return {"ms": self.ms, "ms_p10": self.p10, "ms_p90": self.p90, "way": self.way}


def percentiles(samples: list[float]) -> tuple[float, float, float]:
    """The median, the 10th and the 90th percentile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return statistics.median(samples), tenths[0], tenths[-1]


def drawn(keys: Iterable[Key], rng: random.Random) -> list[Key]:
    """An order for one round: in a fixed one each would always meet the same predecessor."""
    order = list(keys)
    rng.shuffle(order)
    return order


def calls_in(once_ms: float, sample_ms: float) -> int:
    return max(1, min(MOST_CALLS, math.ceil(sample_ms / max(once_ms, 1e-6))))


@dataclass(frozen=True)
class Sample:
    queue: Run
    calls: int  # that it holds
    host: float  # seconds to queue it


def timed(runs: dict[Key, Run], rounds: int = ROUNDS, graphs: bool = True) -> dict[Key, Times]:
    """Of each run, all of them in turns.

    graphs: False where one of them cannot be captured, and does not say so.
    """
    if not runs:
        return {}
    samples, way = prepared(runs, SAMPLE_MS, graphs)
    found = measured(samples, rounds)
    return {key: Times(*percentiles(ms), way) for key, ms in found.items()}


def prepared(
    runs: dict[Key, Run], sample_ms: float, may_capture: bool = True
) -> tuple[dict[Key, Sample], str]:
    """Warmed up and, if all of them can be, captured."""
    calls = {}
    for key, run in runs.items():
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        begin, end = _events()
        hold(1e-3)
        begin.record()
        run()
        end.record()
        end.synchronize()
        calls[key] = calls_in(begin.elapsed_time(end), sample_ms)
    repeated = {key: _repeated(run, calls[key]) for key, run in runs.items()}
    graphs = captured(repeated) if may_capture else {}
    queues = graphs or repeated
    samples = {}
    for key, queue in queues.items():
        torch.cuda.synchronize()
        start = time.perf_counter()
        queue()
        samples[key] = Sample(queue, calls[key], time.perf_counter() - start)
    return samples, GRAPH if graphs else QUEUED


def measured(samples: dict[Key, Sample], rounds: int) -> dict[Key, list[float]]:
    """Milliseconds of a call in each round that counts."""
    wait = 2e-4 + 2 * sum(sample.host for sample in samples.values())
    kept: list[list[tuple[Key, Any, Any]]] = []
    torch.cuda.synchronize()
    start = time.monotonic()
    for tried in range(1 + TRIES * rounds):
        hold(wait)
        marks, ahead = [], True
        for key in drawn(samples, ORDERS):
            begin, end = _events()
            begin.record()
            samples[key].queue()
            end.record()
            ahead = ahead and not begin.query()
            marks.append((key, begin, end))
        if not ahead:
            wait = min(2 * wait, 1.0)
        elif tried > 0:  # the first warms clocks and caches up
            kept.append(marks)
        if len(kept) == rounds:
            break
    torch.cuda.synchronize()
    WINDOWS.append((start, time.monotonic()))
    if len(kept) < rounds:
        raise RuntimeError(f"the host was ahead of the card in {len(kept)} of {rounds} rounds only")
    times: dict[Key, list[float]] = {key: [] for key in samples}
    for marks in kept:
        for key, begin, end in marks:
            times[key].append(begin.elapsed_time(end) / samples[key].calls)
    return times


def hold(seconds: float) -> None:
    """Keeps the card, not the host, at least so long."""
    torch.cuda._sleep(int(seconds * SPIN_HZ))  # type: ignore[no-untyped-call]


def captured(runs: dict[Key, Run]) -> dict[Key, Run] | None:
    """A CUDA graph of each; None, and why, if one cannot be captured.

    The current stream must not be the default one. Autograd runs a backward on the stream of its
    forward: both have to be the one that is captured. All share memory, as none needs what another
    has left there: a workspace for each may be more than the card has.
    """
    graphs: dict[Key, Run] = {}
    pool = torch.cuda.graph_pool_handle()
    for key, run in runs.items():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
                run()
        except (RuntimeError, ValueError) as e:
            print(f"{key}: not captured, so all are queued: {first_line(e)}", flush=True)
            return None
        graphs[key] = graph.replay
    return graphs


def _repeated(run: Run, calls: int) -> Run:
    def queue() -> None:
        for _ in range(calls):
            run()

    return queue


def _events() -> tuple[Any, Any]:
    Event: Any = torch.cuda.Event
    return Event(enable_timing=True), Event(enable_timing=True)
