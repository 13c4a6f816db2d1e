"""Calls of many threads at once: a process's first ones, and on a Python without a GIL all of them.

Each program is a process of its own: what calls share is made by the first of them.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

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
import sys, threading
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
