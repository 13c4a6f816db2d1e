"""How far a call raises the memory of this process."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): resets VmHWM to the present resident set


def extra_bytes(call: Callable[[], object]) -> int:
    """Peak of the resident set while `call` runs, above what it was before.

    Call it once before: first calls load code and start threads.
    """
    gc.collect()
    _give_back_free_memory()
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return _sampled(call)
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 << 30


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def _give_back_free_memory() -> None:
    """Freed memory that malloc keeps would hide allocations that follow."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _sampled(call: Callable[[], object]) -> int:
    """Where the peak cannot be reset: look once a millisecond."""
    before = peak = _status("VmRSS")
    running = True

    def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, _status("VmRSS"))
            time.sleep(1e-3)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = call()
        peak = max(peak, _status("VmRSS"))
        del result
    finally:
        running = False
        thread.join()
    return max(0, peak - before)
