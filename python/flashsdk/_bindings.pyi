"""The compiled core. Use ``flashsdk.ops``: here arguments are positional and unexplained."""

from typing import Any, TypeAlias

__version__: str
MAX_THREADS: int  # that set_num_threads takes
core_api: object  # a capsule, for _torch_native and libflashsdk_jax

# () or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
Packed: TypeAlias = tuple[()] | tuple[Any, Any, int, int]
# (left, right, top_left)
BandFields: TypeAlias = tuple[int | None, int | None, bool]
# (block_q, block_k, seqlen_q, seqlen_k, band | None), and the arrays of BlockMask._arrays or, in
# their place, what check_layout has made of them
LayoutFields: TypeAlias = tuple[Any, ...]
Mask: TypeAlias = BandFields | LayoutFields | None
# (softmax_scale, mask, bias, alibi_slopes, softcap, dropout_p, seed, offset, deterministic,
#  stream, backend, seqused_q, seqused_k, sink, block_table, num_splits, k_descale, v_descale)
Options: TypeAlias = tuple[
    float | None, Mask, Any, Any, float, float, int, int, bool, int | None, str | None,
    Any, Any, Any, Any, int | None, Any, Any,
]  # fmt: skip

def forward(tensors: tuple[Any, Any, Any, Any, Any], packed: Packed, options: Options, /) -> None:
    """tensors: (q, k, v, out, lse)"""

def backward(tensors: tuple[Any, ...], packed: Packed, options: Options, /) -> None:
    """tensors: (q, k, v, dout, out, lse, dlse | None, dq, dk, dv, dsink | None)"""

def append(tensors: tuple[Any, ...], interleaved: bool, q_advances: bool, /) -> None:
    """tensors: (k_cache, v_cache, k, v, seqused_k, block_table | None, q | None, q_out | None,

    rotary_cos | None, rotary_sin | None, k_descale | None, v_descale | None)
    """

def explain(
    backward: bool, tensors: tuple[Any, Any, Any], packed: Packed, options: Options, /
) -> tuple[str, list[tuple[str, str]], str, tuple[int, int]]:
    """The kernel's name, (name, reason) of those refused, how query heads are packed, its tile.

    Validates all but the outputs.
    """

def check_layout(fields: LayoutFields, /) -> object:
    """Reads the arrays and keeps them: calls on a CPU take what it returns, and read none."""

def kernels() -> list[dict[str, Any]]: ...
def build_info() -> dict[str, Any]: ...
def set_num_threads(n: int, /) -> None: ...
def get_num_threads() -> int: ...
def use_threads(n: int, parallel_for: int, /) -> None:
    """Calls of this thread use n threads, of the C function at an address or, for 0, our own.

    n = 0 ends it.
    """

def measure_peak(kind: str, seconds: float, /) -> float:
    """GFLOP/s of the machine for "fp32" or "bf16_dot", with the threads and instructions in use."""

def empty(dtype: str, shape: tuple[int, ...], /) -> Any:
    """Uninitialised row-major CPU memory that speaks DLPack; float32, float16 or bfloat16."""

def gpu_view(dtype: str, shape: tuple[int, ...], address: int, device: int, /) -> Any:
    """Row-major memory of a GPU that somebody else keeps, as what speaks DLPack."""

def begin_range(name: str, /) -> None:
    """Of NVTX, on this thread, in the domain "flashsdk"; nothing where no profiler listens."""

def end_range() -> None: ...
