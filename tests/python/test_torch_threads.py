"""Threads of calls through PyTorch: its number of them, its pool, and what else uses either.

Each program is a process of its own, as pools, forks and pinned threads are of a whole process. The
library's own helpers are known by their name, "flashsdk".
"""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from flashsdk import _torch_eager  # noqa: E402

BEGIN = """
import os, sys, threading, time
import numpy as np
import torch
import flashsdk as fs
import flashsdk.torch as ft

# Enough work for three threads, and not enough elements for PyTorch's own functions to start any.
x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 100, 4, 32), np.float32))

def both():
    leaf = x.clone().requires_grad_()
    out = ft.flash_attn_func(leaf, leaf, leaf, causal=True)
    out.sum().backward()
    return out.detach().numpy().tobytes() + leaf.grad.numpy().tobytes()

def threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            names.append(open(f"/proc/self/task/{task}/comm").read().strip())
        except OSError:
            pass  # it has ended
    return len(names), names.count("flashsdk")

def parallel(f):  # f, once, inside of a parallel region of PyTorch
    import ctypes, pathlib
    lib = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
    chunk = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    held = chunk(lambda begin, end, context: f() if begin == 0 else None)
    i64 = ctypes.c_int64
    assert lib.torch_parallel_for(i64(0), i64(2), i64(1), held, None) == 0
"""

needs_pool = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10),
    reason="PyTorch before 2.10 has no door to its pool",
)
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc")


def run(program, timeout=100, **env):
    # What users have: PyTorch's threads spin while they wait.
    ruled = ("_NUM_THREADS", "OMP_WAIT_POLICY")
    clean = {k: v for k, v in os.environ.items() if not k.endswith(ruled)}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=clean | env,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


# Of PyTorch's first parallel region the pool is as large as torch.get_num_threads().
FOLLOWS = """
torch.set_num_threads(3)
before, _ = threads()
want = both()
after, own = threads()
assert (after - before, own) == (2, 0), (before, after, own)
q = x.numpy()
fs.mha_fwd(q, q, q)  # NumPy's arrays have nothing to do with it
assert threads()[1] == fs.get_num_threads() - 1

torch.set_num_threads(1)
def alone():
    count, _ = threads()
    assert both() == want
    assert threads()[0] <= count
t = threading.Thread(target=alone)  # PyTorch's threads belong to the one that made them
t.start(), t.join()

torch.set_num_threads(3)
parallel(lambda: None)
count, _ = threads()
results = []
parallel(lambda: results.append(both()))  # inside of a parallel region, serially
assert results == [want], len(results)
assert threads()[0] <= count, (count, threads())

# Several threads at once, forward, and backward in autograd's threads: of reentrant checkpoints.
from torch.utils.checkpoint import checkpoint
def reentrant():
    leaf = x.clone().requires_grad_()
    call = lambda a: ft.flash_attn_func(a, a, a, causal=True)
    out = checkpoint(call, leaf, use_reentrant=True)
    out.sum().backward()
    return out.detach().numpy().tobytes() + leaf.grad.numpy().tobytes()
results = []
def many():
    for _ in range(5):
        results.append(both())
        results.append(reentrant())
several = [threading.Thread(target=many) for _ in range(4)]
[t.start() for t in several], [t.join() for t in several]
assert len(results) == 40 and set(results) == {want}
assert threads()[1] == fs.get_num_threads() - 1

fs.set_num_threads(2)  # holds, on PyTorch's threads
assert both() == want and threads()[1] == 1
fs.set_num_threads(6)  # more than PyTorch has: the library's own
assert both() == want and threads()[1] == 5
"""


@linux
@needs_pool
@pytest.mark.parametrize("native", ["1", "0"])
def test_follows_pytorch(native):
    """With the same bits for any number of threads, in C++ and in Python."""
    run(FOLLOWS, FLASHSDK_TORCH_NATIVE=native, OMP_NUM_THREADS="2")


PINNED = """
torch.randn(400, 400) @ torch.randn(400, 400)
mine = os.sched_getaffinity(0)
assert fs.get_num_threads() == torch.get_num_threads(), fs.get_num_threads()
fs.set_num_threads(5)
q = x.numpy()
fs.mha_fwd(q, q, q)
helpers = [
    task for task in os.listdir("/proc/self/task")
    if open(f"/proc/self/task/{task}/comm").read().strip() == "flashsdk"
]
free = {frozenset(os.sched_getaffinity(int(task))) for task in helpers}
print(len(mine), len(helpers), len(free), *sorted(free.pop()))
"""


@linux
def test_openmp_binds_its_threads_alone():
    """What it bound the main thread to is not what the process was given (case 1)."""
    given = sorted(os.sched_getaffinity(0))
    done = run(PINNED, OMP_PROC_BIND="close", OMP_PLACES="threads")
    mine, helpers, kinds, *free = map(int, done.stdout.split())
    assert mine == 1
    assert (helpers, kinds) == (4, 1)
    assert free == given


WORKERS = """
import torch.utils.data as data
import torch.multiprocessing as mp

class Items(data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        both()  # starts what it needs
        before, _ = threads()
        result = both()
        return torch.get_num_threads(), threads()[0] - before, threads()[1], result

def child(i, want):
    assert both() == want

def main():
    torch.set_num_threads(2)
    want = both()  # PyTorch's pool is there, of which a child has no thread
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}  # Python 3.14 has another
    for numbers in data.DataLoader(Items(), batch_size=None, **workers):
        assert tuple(numbers) == (1, 0, 0, want), numbers[:3]
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            import signal
            signal.alarm(30)
            os._exit(0 if both() == want and threads()[1] == 1 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert both() == want
    assert threads()[1] == 0

main()
"""


@linux
@needs_pool
def test_dataloader_workers_and_fork():
    """A worker of a DataLoader has one thread, a forked child threads of its own."""
    run(WORKERS, OMP_NUM_THREADS="2")


SPAWN = """
import torch.multiprocessing as mp
from flashsdk.torch import flash_attn_func
import torch

def child(i, want):
    x = torch.arange(2.0 * 300 * 4 * 32).reshape(2, 300, 4, 32).sin()
    assert torch.equal(flash_attn_func(x, x, x), want)

if __name__ == "__main__":
    x = torch.arange(2.0 * 300 * 4 * 32).reshape(2, 300, 4, 32).sin()
    mp.spawn(child, (flash_attn_func(x, x, x),), nprocs=1)
"""


def test_spawn(tmp_path):
    program = tmp_path / "spawns.py"
    program.write_text(SPAWN)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


ENDS = """
import sys, threading, time
import numpy as np
import flashsdk as fs

q = np.random.default_rng(0).standard_normal((2, 100, 4, 32), np.float32)
out, lse = fs.mha_fwd(q, q, q)

def numpy():
    while True:
        fs.mha_bwd(q, q, q, q, *fs.mha_fwd(q, q, q))

def torch():
    kept = []  # to free a tensor, PyTorch takes the lock back, and ends a process that is ending
    while True:
        kept.append(ft.flash_attn_func(row, rows, rows))

if sys.argv[1] == "torch":
    from torch import from_numpy
    import flashsdk.torch as ft
    row, rows = from_numpy(q[:, :1]), from_numpy(np.tile(q, (1, 20, 1, 1)))
for _ in range(2):
    threading.Thread(target=globals()[sys.argv[1]], daemon=True).start()
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("of, times", [("numpy", 3), ("torch", 1)])
def test_the_interpreter_ends_under_a_call(of, times):
    """Daemon threads in calls without the GIL do not bring the process down (case 4)."""
    if of == "torch" and _torch_eager.native is _torch_eager.InPython:
        pytest.skip("no _torch_native: PyTorch's own torch.empty() ends a process that is ending")
    for i in range(times):
        command = [sys.executable, "-c", ENDS, of, str(0.1 + 0.001 * i)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{done.returncode}\n{done.stderr}"
