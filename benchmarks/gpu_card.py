"""The card under a bench: its name, driver and limits, and its clocks while calls are timed."""

from __future__ import annotations

import re
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from flashsdk._commands.gpu_timing import percentiles

# Bits of clocks_event_reasons.active: nvmlClocksEventReasons in NVML's reference. All but "idle".
REASONS = {
    0x2: "clocks set by a user",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature",
    0x40: "hardware temperature",
    0x80: "power brake",
    0x100: "display clocks",
}
SAMPLED = "clocks.sm,clocks.mem,power.draw.instant,clocks_event_reasons.active"
LINE = re.compile(r"\s*([\d.]+), ([\d.]+), ([\d.]+), 0x([\dA-Fa-f]+)\s*")
Reading = tuple[float, float, float, float, int]  # monotonic seconds, MHz, MHz, W, bits of REASONS


def nvidia_smi(query: str) -> list[str]:
    uuid = str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-")
    return ["nvidia-smi", "-i", f"GPU-{uuid}", query, "--format=csv,noheader,nounits"]


def card() -> dict[str, Any]:
    """What does not change while a bench runs; the name alone where nvidia-smi does not answer."""
    found: dict[str, Any] = {"name": torch.cuda.get_device_name()}
    fields = {
        "driver": "driver_version",
        "limit_watts": "power.limit",
        "max_sm_mhz": "clocks.max.sm",
    }
    try:
        command = nvidia_smi(f"--query-gpu={','.join(fields.values())}")
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return found
    driver, *numbers = (x.strip() for x in text.strip().split(","))
    return found | dict(zip(fields, [driver, *map(float, numbers)], strict=True))


def libraries() -> dict[str, str]:
    """Versions that were loaded, which a list of installed packages does not tell."""
    version = torch.backends.cudnn.version() or 0
    major, rest = divmod(version, 10000)
    return {
        "CUDA": str(torch.version.cuda),
        "cuDNN": f"{major}.{rest // 100}.{rest % 100}",
    }


class Meter:
    """nvidia-smi's clocks (MHz), power (W) and REASONS, every 20 ms while the block runs."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []

    def __enter__(self) -> Meter:
        command = [*nvidia_smi(f"--query-gpu={SAMPLED}"), "-lms", "20"]
        self.process = None
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            return self  # no clocks in the record, which says so
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        return self

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            if (reading := parsed(line)) is not None:
                self.readings.append((time.monotonic(), *reading))

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.reader.join()
        self.process.communicate()

    def during(self, windows: Iterable[tuple[float, float]]) -> list[Reading]:
        spans = list(windows)
        return [r for r in self.readings if any(begin <= r[0] <= end for begin, end in spans)]


def parsed(line: str) -> tuple[float, float, float, int] | None:
    found = LINE.fullmatch(line)
    if found is None:
        return None
    return float(found[1]), float(found[2]), float(found[3]), int(found[4], 16)


def summary(readings: list[Reading]) -> dict[str, Any] | None:
    """Medians, of the SM clock with its 10th and 90th percentile; what lowered it, how often."""
    if not readings:
        return None
    _, sm, memory, watts, bits = zip(*readings, strict=True)
    median, p10, p90 = percentiles(list(sm))
    shares = {name: sum(bool(b & bit) for b in bits) / len(bits) for bit, name in REASONS.items()}
    return {
        "sm_mhz": median, "sm_mhz_p10": p10, "sm_mhz_p90": p90,
        "memory_mhz": statistics.median(memory), "watts": statistics.median(watts),
        "lowered_by": {name: share for name, share in shares.items() if share},
        "readings": len(readings),
    }  # fmt: skip
