"""What the programs of this folder share: runs that resume, records, a progress bar, pictures.

A record is one JSON file, which every run of a program adds to::

    {
      "kind": "paper",
      "program": "lra/pathfinder",   # the file's name
      "smoke": false,                # true: tiny shapes, to see that the program works
      "settings": {...},             # what must stay the same from run to run
      "runs": [{"date", "device", "torch", "command", "seconds"}, ...],
      "curve": [{...}, ...],         # points of a training, of all runs; "run" is the index in runs
      "rows": [{...}, ...],          # measurements, each with "run"
      "result": {...}                # what the program is for, as it stands
    }

``render.py`` makes docs/paper.md from records in benchmarks/results/paper.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Row = dict[str, Any]
COLOURS = ("#0a7d5a", "#c2571a", "#3566b0", "#8a4fa0", "#777777", "#b59a00", "#000000")


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser with what every program takes."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of record, checkpoint and pictures")
    parser.add_argument(
        "--minutes", type=at_least(0, float), default=1e9, help="stop after, and save"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, as a check: seconds")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=found)
    return parser


def device(text: str) -> str:
    """An argument that names a device which is there: a CPU or the GPU that PyTorch begins with."""
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text}; cpu or cuda (CUDA_VISIBLE_DEVICES says which)")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("cuda; PyTorch finds no GPU")
    return text


def at_least(least: int, kind: type = int) -> Callable[[str], Any]:
    """The type of an argument that is a number, and not below ``least``."""

    def number(text: str) -> Any:
        value = kind(text)
        if not value >= least:  # as for nan
            raise argparse.ArgumentTypeError(f"{text}; {least} or more")
        return value

    return number


count = at_least(1)


def entry(main: Callable[[], None]) -> None:
    """Runs a program; what its user can mend ends in one line."""
    try:
        main()
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name}: not installed; pip install '.[paper]'")
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        if not type(error).__module__.startswith("flashsdk"):  # text.py is run without it, too
            raise
        sys.exit(str(error))


def folder(out: Path | None, program: str, smoke: bool) -> Path:
    """Where a run writes, which it can: ``--out``, or a folder under build/."""
    root = Path(__file__).resolve().parents[2] / "build" / ("paper-smoke" if smoke else "paper")
    path = out or root / program.replace("/", "-")
    path.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()  # an error now, not after an hour of training
    return path


class Clock:
    """Seconds since the program started, and whether its minutes are over.

    SIGTERM, by which ``timeout`` ends a program, and Ctrl-C end the minutes. A second one ends the
    program.
    """

    def __init__(self, minutes: float):
        self.started, self.limit = time.monotonic(), minutes * 60
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def _end(self, number: int, frame: Any) -> None:
        self.limit = 0.0
        signal.signal(number, signal.SIG_DFL)

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def share(self) -> float:
        """Of the minutes, what has passed."""
        return min(1.0, self.seconds() / self.limit) if self.limit > 0 else 1.0

    def over(self, reserve: float = 0.0) -> bool:
        """Whether less than ``reserve`` seconds are left."""
        return self.seconds() + reserve >= self.limit


def device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def synchronise(device: str | torch.device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


# After it nothing runs on the GPU: what follows would fail as well, and be written down.
_Fatal: Any = getattr(torch, "AcceleratorError", ())


def failure(error: Exception) -> Row:
    """The row of a call that failed: without memory, or with what a backend said of the problem."""
    cause: BaseException = error
    while inner := cause.__cause__ or cause.__context__:  # torch.compile wraps what was raised
        cause = inner
    text = str(cause).strip()
    # Libraries have their own words where memory that PyTorch does not hand out is short.
    if isinstance(cause, torch.OutOfMemoryError) or re.search("ALLOC_FAILED|out of memory", text):
        return {"error": "out of memory"}
    if isinstance(cause, _Fatal):
        raise error
    return {"error": (text.splitlines() or [type(cause).__name__])[0][:100]}


def write(path: Path, save: Callable[[Path], None]) -> None:
    """Replaces a file in one step, so that a run that is ended meanwhile leaves the old one."""
    temporary = path.with_name(path.name + ".part")
    save(temporary)
    os.replace(temporary, path)


def save(found: Any, path: Path) -> None:
    """torch.save, whose own files raise no OSError where a disk is full."""
    with path.open("wb") as file:
        torch.save(found, file)


class Record:
    """The file of a program, with a new run begun."""

    def __init__(self, path: Path, program: str, settings: Row, *, smoke: bool, device: str):
        self.path = path
        fresh = {"kind": "paper", "program": program, "smoke": smoke, "settings": settings}
        self.data: Row = {**fresh, "runs": [], "curve": [], "rows": [], "result": {}}
        if path.exists():
            self.data = _resumed(path, json.loads(json.dumps(fresh)))  # where a tuple is a list
        self.clock = time.monotonic()
        self.data["runs"].append(
            {
                "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
                "device": device_name(device),
                "torch": torch.__version__,
                "command": " ".join(["python", *map(_shown, sys.argv)]),
                "seconds": 0.0,
            }
        )

    @classmethod
    def of(cls, options: argparse.Namespace, out: Path, program: str, settings: Row) -> Record:
        """That of a program's folder, by what ``arguments`` takes."""
        path = out / "record.json"
        left = None if path.exists() else next(out.glob("*.pt"), None)
        if left:
            sys.exit(f"{left}: its record.json is gone; take another --out, or remove the folder")
        return cls(path, program, settings, smoke=options.smoke, device=options.device)

    @property
    def result(self) -> Row:
        return self.data["result"]

    @property
    def rows(self) -> list[Row]:
        return self.data["rows"]

    def point(self, **values: Any) -> None:
        self._add("curve", values)

    def row(self, **values: Any) -> None:
        self._add("rows", values)

    def _add(self, where: str, values: Row) -> None:
        rounded = {key: _rounded(value) for key, value in values.items()}
        self.data[where].append({"run": len(self.data["runs"]) - 1, **rounded})

    def save(self) -> None:
        runs = self.data["runs"]
        runs[-1]["seconds"] = round(time.monotonic() - self.clock, 3)
        # A run that has measured nothing is none.
        measured = any(x["run"] == len(runs) - 1 for x in (*self.data["curve"], *self.rows))
        data = {**self.data, "runs": runs if measured else runs[:-1]}
        write(self.path, lambda path: path.write_text(_text(data)))


def _resumed(path: Path, fresh: Row) -> Row:
    """The record of earlier runs, whose settings are those of this one."""
    again = "take another --out, or remove the folder"
    try:
        found = json.loads(path.read_text())
        parts = {"runs": list, "curve": list, "rows": list, "result": dict}
        whole = all(isinstance(found[name], kind) for name, kind in parts.items())
        whole = whole and isinstance(found.get("settings", {}), dict)
    except (ValueError, TypeError, KeyError):
        whole = False
    if not whole:
        sys.exit(f"{path}: no record of a program of this folder; {again}")
    had, wanted = ({**x, **(x.get("settings") or {})} for x in (found, fresh))
    for name in (*fresh, *fresh["settings"]):
        if name != "settings" and had.get(name) != wanted[name]:
            sys.exit(f"{path}: {name} is {had.get(name)}, not {wanted[name]}; {again}")
    return found


def _shown(argument: str) -> str:
    """Of the program's own path, what lies in the checkout."""
    root = f"{Path(__file__).resolve().parents[2]}/"
    return argument.removeprefix(root) if argument.startswith(root) else argument


def _rounded(value: Any) -> Any:
    """To six digits; what is no number becomes null, as JSON has neither NaN nor infinity."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _text(data: Row) -> str:
    """JSON with one line a point, so that a diff of two records can be read."""
    parts = []
    for key, value in data.items():
        if isinstance(value, list):
            lines = ",\n  ".join(json.dumps(row) for row in value)
            body = f"[\n  {lines}\n ]" if value else "[]"
        else:
            body = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


class Training:
    """A model, its optimizer and a state of plain numbers, which are restored exactly.

    On a CPU a training in parts is that of one run, to the bit. A GPU adds up embeddings' gradients
    and attention's dQ in another order each time, so that its steps differ by rounding.
    ``state`` holds at least "step" and "seconds", the time trained by all runs together. All that a
    step draws at random must follow from ``state``. ``counters`` are tensors that go with it, whose
    values stay on the device.
    """

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Row,
        counters: dict[str, Tensor] | None = None,
    ):
        self.path, self.model, self.optimizer = path, model, optimizer
        self.counters = counters or {}
        self.state: Row = {"step": 0, "seconds": 0.0, **state}
        self.resumed = path.exists()
        if self.resumed:
            found = load_weights(path, model)
            optimizer.load_state_dict(found["optimizer"])
            self.state = found["state"]
            for name, counter in self.counters.items():
                counter.copy_(found["counters"][name])

    def save(self) -> None:
        found = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": self.state,
            "counters": self.counters,
        }
        write(self.path, lambda path: save(found, path))

    def learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def run(
        self,
        step: Callable[[Row], dict[str, Tensor]],
        record: Record,
        clock: Clock,
        *,
        until: Callable[[Row], bool],
        show: Callable[[Row, Row], str],
        share: Callable[[Row], float],
        reserve: float = 0.0,
        every: float = 10.0,
        device: str = "cpu",
    ) -> None:
        """Takes steps until ``until`` or until the minutes, less ``reserve`` seconds, are over.

        ``step`` does one and returns scalars, whose means make a point of the curve every ``every``
        seconds, with the numbers of the state. ``show`` and ``share`` are for the progress bar.
        Saves checkpoint and record every two minutes and at the end.
        """
        sums: dict[str, Tensor] = {}
        steps = 0
        last = saved = time.monotonic()
        while True:
            over = until(self.state) or clock.over(reserve)
            if not over:
                for name, value in step(self.state).items():
                    value = value.detach()
                    sums[name] = sums[name] + value if name in sums else value
                self.state["step"] += 1
                steps += 1
            now = time.monotonic()
            if steps and (over or now - last >= every):
                means = {name: (value / steps).item() for name, value in sums.items()}
                synchronise(device)
                now = time.monotonic()
                self.state["seconds"] += now - last
                numbers = {k: v for k, v in self.state.items() if isinstance(v, (int, float))}
                record.point(**numbers, **means, steps_a_second=steps / (now - last))
                progress(share(self.state), show(self.state, means))
                sums, steps, last = {}, 0, now
            if over or now - saved >= 120:
                self.save()
                record.save()
                saved = time.monotonic()
                last += saved - now  # saving is no training
            if over:
                break
        if sys.stderr.isatty():
            print(file=sys.stderr)


def load_weights(path: Path, model: nn.Module) -> Row:
    """Puts a checkpoint's weights into the model; all that it holds."""
    if not path.exists():
        sys.exit(f"{path}: no such file")
    try:
        found: Row = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(found["model"])
        found["state"], found["optimizer"]
    except Exception as error:  # PyTorch raises what its reader met, of many kinds
        sys.exit(f"{path}: no checkpoint of this model: {(str(error).splitlines() or ['?'])[0]}")
    return found


def progress(share: float, text: str) -> None:
    filled = round(24 * min(max(share, 0.0), 1.0))
    line = f"{'█' * filled}{'░' * (24 - filled)}  {text}"
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start}{line}", end="" if start else "\n", file=sys.stderr, flush=True)


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share, of 95 % by default."""
    share, square = right / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def measure(
    call: Callable[..., Any],
    device: str,
    *,
    seconds: float,
    least: int = 3,
    prepare: Callable[[], tuple] = tuple,
) -> list[float]:
    """Seconds of single calls, after one that warms up, for about ``seconds``.

    ``prepare`` makes the arguments of each call, and its time does not count.
    """
    call(*prepare())
    synchronise(device)
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < least or time.perf_counter() - started < seconds:
        given = prepare()
        synchronise(device)
        if torch.device(device).type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call(*given)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            before = time.perf_counter()
            call(*given)
            times.append(time.perf_counter() - before)
        if len(times) >= 200:
            break
    return times


def plot(
    path: Path,
    lines: dict[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
    log: str = "",
    level: tuple[float, str] | None = None,
) -> bool:
    """A PNG of lines, each {name: (xs, ys)}; ``log`` names the logarithmic axes: "", "x", "xy".

    ``level`` is a dashed horizontal line and its name. Returns whether matplotlib is there.
    """
    try:
        import matplotlib
    except ImportError:
        print("no picture, as matplotlib is missing: pip install matplotlib", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, (xs, ys)), colour in zip(lines.items(), _cycle(COLOURS, len(lines))):
        marker = "o" if len(xs) < 30 else None
        axes.plot(xs, ys, label=name, color=colour, marker=marker, markersize=3, linewidth=1.4)
    if level:
        axes.axhline(level[0], linestyle="--", color="#999999", linewidth=1, label=level[1])
    axes.set(title=title, xlabel=x, ylabel=y)
    if "x" in log:
        axes.set_xscale("log", base=2)
    if "y" in log:
        axes.set_yscale("log")
    if len(lines) > 1 or level:
        axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"wrote {path}")
    return True


def _cycle(values: Iterable[str], count: int) -> list[str]:
    values = list(values)
    return [values[i % len(values)] for i in range(count)]
