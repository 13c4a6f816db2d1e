"""The ranges of NVTX that a profiler sees, from NumPy, PyTorch and JAX: check_ranges.py RECORDER.

Run by ctest. RECORDER is the library of recorder.cpp; PyTorch and JAX where they are installed.
"""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))
os.environ["NVTX_INJECTION64_PATH"] = sys.argv[1]  # read when the first range begins

import flashsdk as fs
import numpy as np

recorder = ctypes.CDLL(sys.argv[1])
recorder.recorded.restype = ctypes.c_char_p
seen = 0


def expect(*want: str) -> None:
    """The ranges since the last time, each of which has ended."""
    global seen
    text = recorder.recorded().decode()
    got = text[seen:].split()
    seen = len(text)
    assert got == [line for name in want for line in (name, "end")], (got, want)


assert fs.build_info()["nvtx"]
q, k, v = (np.random.default_rng(i).standard_normal((1, 32, 2, 16), np.float32) for i in range(3))
out, lse = fs.mha_fwd(q, k, v)
fs.mha_bwd(out, q, k, v, out, lse)
expect("mha_fwd", "mha_bwd")

lengths = np.array([0, 12, 32], np.int32)
rows = [x[0] for x in (q, k, v)]
out, lse = fs.mha_varlen_fwd(*rows, lengths, lengths, 20, 20)
fs.mha_varlen_bwd(out, *rows, out, lse, lengths, lengths, 20, 20)
expect("mha_varlen_fwd", "mha_varlen_bwd")

try:
    fs.mha_fwd(q, k, v[..., :0])
except fs.Error:
    expect()

if importlib.util.find_spec("torch") is not None:
    import torch
    from flashsdk.integrations._rows import put, take
    from flashsdk.torch import attention

    x = torch.from_numpy(q).requires_grad_()
    attention(x, x, x).sum().backward()
    places = (torch.arange(0, 32, 2),)
    packed = take(x.detach()[0], places)
    put(packed, places, (32,))
    expect("mha_fwd", "mha_bwd", "pack", "unpack")

if importlib.util.find_spec("jax") is not None:
    import jax
    from flashsdk.jax import attention as jax_attention

    jax.block_until_ready(jax.jit(jax_attention)(q, k, v))
    expect("mha_fwd")
print("ranges: as expected")
