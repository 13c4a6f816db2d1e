"""Memory grows with seqlen, not with its square."""

import gc
import json
import subprocess
import sys
import weakref
from typing import Any

import flashsdk as fs
import numpy as np
import pytest

# VmHWM, the high-water mark of resident memory, before and after a call in a fresh process.
PROGRAM = """
import json, sys
import numpy as np
import flashsdk as fs
from flashsdk._testing.problems import numpy_dtype

dtype, seqlen, kind, threads = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])

def peak():
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the high-water mark starts again from here
    def read():
        with open("/proc/self/status") as f:
            return int(next(line for line in f if line.startswith("VmHWM")).split()[1]) * 1024
    return read

fs.set_num_threads(threads)
x = [np.random.default_rng(i).standard_normal((1, seqlen, 1, 64), np.float32) for i in range(4)]
q, k, v, dout = (a.astype(numpy_dtype(dtype)) for a in x)
del x
blocks = fs.layouts.bigbird(seqlen, seqlen, 128)
mask = {"dense": None, "causal": fs.Causal(), "blocks": blocks}[kind]
small = [a[:, :16] for a in (q, k, v, dout)]
fs.mha_bwd(small[3], *small[:3], *fs.mha_fwd(*small[:3]))  # threads and their stacks exist
out, lse = np.ones_like(q), np.ones((1, 1, seqlen), np.float32)
grads = {n: np.ones_like(q) for n in ("dq", "dk", "dv")}
used = {}
read = peak()
before = read()
fs.mha_fwd(q, k, v, mask=mask, out=out, lse=lse)
used["forward"] = read() - before
read = peak()
before = read()
fs.mha_bwd(dout, q, k, v, out, lse, mask=mask, **grads)
used["backward"] = read() - before
print(json.dumps(used))
"""


def extra(dtype: str, seqlen: int, kind: str, threads: int) -> dict[str, int]:
    """Bytes beyond inputs and outputs at the peak of forward and backward."""
    arguments = [sys.executable, "-c", PROGRAM, dtype, str(seqlen), kind, str(threads)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    if done.returncode != 0 and "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "causal", "blocks"])
def test_extra_memory_is_linear(dtype, kind):
    """At 8K one head's S alone would be 256 MiB; dq in float32 is 2 MiB, delta 32 KiB."""
    seqlen = 8192
    used = extra(dtype, seqlen, kind, threads=2)
    tiles = 4 << 20  # what two threads keep in their caches, and the allocator's page
    assert used["forward"] < tiles
    assert used["backward"] < tiles + 3 * seqlen * (64 * 4 + 8)


def told_by(program: str) -> dict[str, Any]:
    """The JSON that a program of its own process prints."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# dq alone is 4 to 16 floats a query, by the instruction set, and everything else one: 112 MiB and
# more.
LARGE = """
import json, resource
import numpy as np
import flashsdk as fs

fs.set_num_threads(1)
q = np.ones((1, 4 << 20, 1, 1), np.float32)
k = np.ones((1, 1, 1, 1), np.float32)
out, lse = fs.mha_fwd(q, k, k)
grads = {"dq": np.ones_like(q), "dk": np.ones_like(k), "dv": np.ones_like(k)}
faults = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fs.mha_bwd(q, q, k, k, out, lse, **grads)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
with open("/proc/self/smaps") as f:
    lazy = [int(line.split()[1]) * 1024 for line in f if line.startswith("LazyFree:")]
print(json.dumps({"faults": faults, "lazy": sum(lazy) if lazy else None}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_workspace_is_found_again_and_lent_to_the_system():
    """Without a fault a page in each call, and beyond 64 MiB for the system to take."""
    found = told_by(LARGE)
    if found["lazy"] is None:
        pytest.skip("this system does not tell what it may take")
    assert found["faults"][-1] <= max(found["faults"][0] / 10, 50)  # few where pages are huge
    assert found["lazy"] > 40 << 20


# Microseconds of a small call, before and after one that takes a workspace of some 500 MiB.
SMALL_AFTER_LARGE = """
import json, time
import numpy as np
import flashsdk as fs

fs.set_num_threads(1)
q = np.ones((1, 8 << 20, 1, 1), np.float32)
k = np.ones((1, 1, 1, 1), np.float32)

def step(q):
    out, lse = fs.mha_fwd(q, k, k)
    return fs.mha_bwd(q, q, k, k, out, lse)

def small():
    times = []
    for _ in range(300):
        start = time.perf_counter()
        step(q[:, :4])
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6

before = small()
step(q)
print(json.dumps({"before": before, "after": small()}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what is lent is Linux's")
def test_a_small_call_does_not_pay_for_a_large_one():
    found = told_by(SMALL_AFTER_LARGE)
    assert found["after"] < 3 * found["before"] + 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_twice_the_length_is_at_most_twice_the_memory():
    short, long = (extra("float32", n, "causal", 2) for n in (6144, 12288))
    for name in short:
        assert long[name] < 2 * short[name] + (1 << 20)


def test_classes_of_arrays_are_not_kept():
    """But for the last few, by which the next call is faster."""

    def refused():
        class Made:
            def __dlpack__(self, **keywords):
                raise ValueError

            def __dlpack_device__(self):
                return (1, 0)

        k = np.ones((1, 2, 1, 8), np.float32)
        with pytest.raises(fs.Error):
            fs.mha_fwd(Made(), k, k)
        return weakref.ref(Made)

    classes = [refused() for _ in range(30)]
    gc.collect()
    assert sum(x() is not None for x in classes) <= 8
