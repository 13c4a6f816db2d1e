"""flashsdk: exact attention as fast, memory-efficient kernels, on arrays of any framework.

    import flashsdk as fs
    out = fs.attention(q, k, v, mask=fs.Causal())  # NumPy, CuPy, PyTorch, JAX

    out, lse = fs.mha_fwd(q, k, v, mask=fs.Causal())
    dq, dk, dv = fs.mha_bwd(dout, q, k, v, out, lse, mask=fs.Causal())

``help(flashsdk.ops)`` has the arguments, ``flashsdk.masks`` and ``flashsdk.layouts`` what a query
sees, ``flashsdk.torch`` is the adapter for PyTorch and ``flashsdk.jax`` the one for JAX.
``python -m flashsdk info`` shows what runs here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _bindings, layouts
from ._attention import attention
from ._bindings import __version__
from ._errors import DeviceError, Error, InvalidArgument, Unsupported
from ._kv_append import kv_append
from ._merge import merge
from .masks import Band, BlockMask, Causal, Dense, Mask, SlidingWindow
from .ops import Backend, Explanation, explain, mha_bwd, mha_fwd, mha_varlen_bwd, mha_varlen_fwd

__all__ = [
    "Backend",
    "Band",
    "BlockMask",
    "Causal",
    "Dense",
    "DeviceError",
    "Error",
    "Explanation",
    "InvalidArgument",
    "Mask",
    "SlidingWindow",
    "Unsupported",
    "__version__",
    "attention",
    "build_info",
    "explain",
    "get_num_threads",
    "kernels",
    "kv_append",
    "layouts",
    "merge",
    "mha_bwd",
    "mha_fwd",
    "mha_varlen_bwd",
    "mha_varlen_fwd",
    "set_num_threads",
]


if not TYPE_CHECKING:  # to which any other name is a mistake as before

    def __getattr__(name: str) -> Any:
        """The adapters, whose frameworks are imported when somebody asks for them."""
        if name in ("jax", "torch"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def kernels() -> list[dict[str, Any]]:
    """Every kernel of this build, in the order in which a call tries them, except that it tries
    those that split keys first.

    Keys: name (unique in a build), op ("fwd", "bwd"), backend ("cpu", "sm80", "sm90"), arch
    (instruction set or GPU architecture), dtype, head_dim and head_dim_v (the largest it takes),
    mask ("dense", "band", "block_sparse"), features (compiled in: a list of "softcap", "bias",
    "alibi", "dropout"; score_features, until 0.3, says whether there is any), any_alignment (of a
    GPU's: takes tensors not aligned to 16 bytes), splits_keys (of few queries, among thread blocks
    of a GPU), fp8_kv (of a GPU's: k and v are float8_e4m3fn; a CPU's kernels take both), tile_m,
    tile_n (queries, keys), available (whether this machine runs it). ``explain`` says which of them
    a call gets.
    """
    return _bindings.kernels()


def build_info() -> dict[str, Any]:
    """What this build is and uses.

    Keys: version, compiler, cpu_isas (instruction sets built in, slowest first), cpu_isa (the one
    in use; FLASHSDK_CPU_ISA names the fastest to use), cpu_head_dim (the largest on a CPU), cuda
    (built with CUDA), cuda_archs, nvtx (calls are ranges of NVTX, which profilers show),
    num_threads. Raises Error if FLASHSDK_CPU_ISA names one that this build or processor lacks.
    """
    return _bindings.build_info()


def set_num_threads(n: int) -> None:
    """Threads a CPU call may use from now on, the caller's included: 1 to 4096, else Error."""
    _bindings.set_num_threads(n)


def get_num_threads() -> int:
    """Threads a CPU call may use.

    At first FLASHSDK_NUM_THREADS, else OMP_NUM_THREADS, else the processors of this process. Calls
    through ``flashsdk.torch`` use torch.get_num_threads() unless FLASHSDK_NUM_THREADS is set or
    ``set_num_threads`` was called.
    """
    return _bindings.get_num_threads()
