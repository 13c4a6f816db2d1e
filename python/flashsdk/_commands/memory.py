"""How far a call raises the memory of this process."""

from __future__ import annotations

import ctypes
import gc
import mmap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
M_MMAP_THRESHOLD = -3  # malloc.h
RESET_PEAK = "5"  # proc(5): resets VmHWM to the present resident set


def extra_bytes(call: Callable[[], object]) -> int:
    """Peak of the resident set while `call` runs, above what it was before.

    Call something like it before: first calls load code and start threads. It runs in a thread of
    its own, so that scratch memory which the library keeps for each thread is counted. Pages of
    mapped files that the system takes back meanwhile are made up for, up to what the call takes;
    beyond, they are what is returned. At least one page: less cannot be told from nothing.
    """
    gc.collect()
    with _fresh_memory():
        return max(mmap.PAGESIZE, _raised_by(call))


def _raised_by(call: Callable[[], object]) -> int:
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return _sampled(call)
    with ThreadPoolExecutor(max_workers=1) as thread:
        before, of_files = _status("VmRSS"), _status("RssFile")
        thread.submit(call).result()
        peak = _status("VmHWM")
        taken_back = max(0, of_files - _status("RssFile"))
    return peak - before + taken_back


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


@contextmanager
def _fresh_memory() -> Iterator[None]:
    """Large allocations come from the system and go back: what malloc keeps would hide them."""
    libc = ctypes.CDLL(None)
    mallopt, trim = (getattr(libc, name, None) for name in ("mallopt", "malloc_trim"))
    if trim is not None:
        trim(0)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 128 << 10)
    try:
        yield
    finally:
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 32 << 20)  # what glibc arrives at by itself


def _sampled(call: Callable[[], object]) -> int:
    """Where the peak cannot be reset: look once a millisecond."""
    before = peak = _status("VmRSS")
    running = True

    def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, _status("VmRSS"))
            time.sleep(1e-3)

    with ThreadPoolExecutor(max_workers=2) as threads:
        watching = threads.submit(watch)
        try:
            threads.submit(call).result()
        finally:
            running = False
            watching.result()
    return peak - before
