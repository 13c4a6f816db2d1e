"""Calls of many threads at once, in forked processes too, and on a Python without a GIL."""

import os
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import flashsdk as fs
import pytest
from cases import assert_same_bits, both, qkv


def test_several_threads_at_once():
    problems = [qkv((64 + 7 * i, 90 - i), 2, 32, seed=i) for i in range(8)]
    masks = [fs.Causal() if i % 2 else None for i in range(8)]
    want = [both(*x, mask=m) for x, m in zip(problems, masks, strict=True)]
    got, failures = {}, []

    def work(i):
        try:
            for _ in range(5):
                got[i] = both(*problems[i], mask=masks[i])
                assert_same_bits(got[i], want[i])
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failures
    assert len(got) == 8


def test_the_number_of_threads_changes_while_calls_run():
    x = qkv((130, 150), 4, 32)
    want = both(*x)
    stop = time.monotonic() + 1

    def change():
        n = 1
        while time.monotonic() < stop:
            fs.set_num_threads(n)
            n = n % 4 + 1

    thread = threading.Thread(target=change)
    thread.start()
    while time.monotonic() < stop:
        assert_same_bits(both(*x), want)
    thread.join()


def test_other_python_threads_run_meanwhile():
    """The GIL is released: a thread that counts is not held up by one that computes."""
    q, k, v, dout = qkv(3000, 2, 64, batch=1)
    fs.set_num_threads(1)
    out, lse = fs.mha_fwd(q, k, v)
    for call in (lambda: fs.mha_fwd(q, k, v), lambda: fs.mha_bwd(dout, q, k, v, out, lse)):
        ticks, running = [], threading.Event()

        def tick(ticks=ticks, running=running):
            running.set()
            while running.is_set():
                ticks.append(time.monotonic())
                time.sleep(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        running.wait()
        time.sleep(0.01)
        start = time.monotonic()
        call()
        end = time.monotonic()
        running.clear()
        thread.join()
        assert sum(start < t < end for t in ticks) > (end - start) / 0.02


FORK = """
import os, signal
import numpy as np
import flashsdk as fs

fs.set_num_threads(3)
x = np.random.default_rng(0).standard_normal((2, 150, 4, 32), np.float32)

def both():
    out, lse = fs.mha_fwd(x, x, x)
    return b"".join(a.tobytes() for a in (out, lse, *fs.mha_bwd(x, x, x, x, out, lse)))

want = both()
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if both() == want else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert both() == want
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_after_use():
    """A child process has none of its parent's threads, and computes all the same."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


# ---- a process each: what calls share is made by the first of them

without_gil = pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL"
)


def run(program: str, *options: str) -> str:
    clean = {name: x for name, x in os.environ.items() if name != "PYTHON_GIL"}
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True, text=True, timeout=300, env=clean, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@without_gil
def test_import_leaves_the_gil_off():
    """An extension that does not say so has Python turn it on, with a warning."""
    program = "import sys, flashsdk; print(sys._is_gil_enabled())"
    assert run(program, "-W", "error") == "False\n"


FIRST_CALLS = """
import faulthandler, sys, threading
faulthandler.dump_traceback_later(200, exit=True)  # what it is to find is a deadlock
import flashsdk as fs
import numpy as np
from cases import qkv

sys.setswitchinterval(1e-6)  # of a Python with a GIL
fs.set_num_threads(2)
THREADS = 8

class Foreign:  # knows DLPack alone
    def __init__(self, array):
        self.array, self.shape, self.ndim = array, array.shape, array.ndim

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self, api_version=None):
        return np

def both(q, k, v, dout, **options):
    out, lse = fs.mha_fwd(q, k, v, **options)
    return out, lse, *fs.mha_bwd(dout, q, k, v, out, lse, **options)

def lend(x):  # with outputs of NumPy
    out, lse = np.empty_like(x[3]), np.empty((*x[0].shape[:1], 4, x[0].shape[1]), np.float32)
    fs.mha_fwd(*map(Foreign, x[:3]), out=Foreign(out), lse=Foreign(lse))
    return out, lse

def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except fs.Error as e:
        return type(e).__name__, str(e)
    raise AssertionError("was taken")

def packed(q, k, v, dout):
    ends = np.array([0, 30, 60], np.int32)
    q, k, v, dout = (x[0, :60].copy() for x in (q, k, v, dout))
    packed = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=30, max_seqlen_k=30)
    out, lse = fs.mha_varlen_fwd(q, k, v, **packed, mask=fs.Causal())
    return out, lse, *fs.mha_varlen_bwd(dout, q, k, v, out, lse, **packed, mask=fs.Causal())

def append(k, v):
    caches = [np.zeros_like(x) for x in (k, v)]
    fs.kv_append(*caches, k[:, :5], v[:, :5], np.array([3, 7], np.int32))
    return caches

x = qkv((70, 90), (4, 2), 32)
half = qkv((70, 90), 4, 32, dtype="bfloat16")
blocks = np.random.default_rng(0).random((5, 6)) < 0.5
blocks[:, 0] = True
slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)

def layout():
    return fs.BlockMask.from_dense(blocks, block_size=16, seqlen_q=70, seqlen_k=90)

def calls(mask):
    return [
        lambda: both(*x, mask=fs.Causal()),
        lambda: both(*x, mask=mask, softcap=5.0),
        lambda: both(*half, mask=mask),
        lambda: both(*x, alibi_slopes=slopes, dropout_p=0.1, seed=7),
        lambda: lend(x),
        lambda: packed(*x),
        lambda: append(*x[1:3]),
        lambda: (hash(mask), mask.density, mask.visible_share(), mask == layout()),
        lambda: refused(fs.mha_fwd, *x[:3], softcap=-1),
        lambda: refused(fs.mha_fwd, np.ma.masked_array(x[0]), *x[1:3]),
        lambda: refused(fs.mha_fwd, [1], *x[1:3]),
        lambda: fs.explain(*x[:3], mask=mask, op="bwd"),
        lambda: (len(fs.kernels()), fs.build_info()),
    ]

def bits(result):
    if isinstance(result, np.ndarray):
        return result.tobytes()
    return tuple(map(bits, result)) if isinstance(result, (tuple, list)) else result

def at_once(mask):
    todo, found = calls(mask), [{} for _ in range(THREADS)]
    begin = threading.Barrier(THREADS)

    def work(thread):
        begin.wait()
        for i in range(len(todo)):  # each begins with another call
            which = (i + thread) % len(todo)
            found[thread][which] = bits(todo[which]())

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found

first = at_once(layout())
alone = dict(enumerate(bits(call()) for call in calls(layout())))
for found in [first, *(at_once(layout()) for _ in range(3))]:
    for results in found:
        assert results.keys() == alone.keys()
        wrong = [which for which in alone if results[which] != alone[which]]
        assert not wrong, wrong
print(getattr(sys, "_is_gil_enabled", lambda: True)())
"""


def test_first_calls_of_many_threads():
    """Every thread has the bits of a call alone, and every error its words."""
    pytest.importorskip("ml_dtypes")
    with_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
    assert run(FIRST_CALLS, "-W", "error") == f"{with_gil}\n"
