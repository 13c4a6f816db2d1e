"""Our kernels in the place of aten's fused attention operators, in Python.

What cpp/torch_eager/sdpa.cpp is, where ``_torch_native`` was not built for the PyTorch at hand: it
takes the same calls, gives the same bits, and hands on all others to the kernels that were there
before. test_torch_sdpa_python.py holds the two to each other over random calls.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _bindings
from .._errors import Error
from .._torch_eager import last_contiguous
from .._torch_private import not_compiled, remove_library, without_torch_function
from .._torch_threads import on_torch_threads

Given = dict[str, Any]  # the arguments of an operator, by their names
Results = tuple[Any, ...] | None  # None: the call is not for our kernels
Watcher = Callable[..., None]

_forward = on_torch_threads(_bindings.forward)
_backward = on_torch_threads(_bindings.backward)
_watcher: Watcher | None = None


class _Call(NamedTuple):
    """What the core is told of a call: ``Call`` of sdpa_call.h."""

    q: Tensor
    k: Tensor
    v: Tensor
    dropout_p: float
    band: _bindings.BandFields | None
    scale: float | None
    mask: Tensor | None = None
    heads_first: bool = True  # of (batch, heads, seqlen, dim); else (batch, seqlen, heads, dim)
    packed: _bindings.Packed = ()  # of (total, heads, dim)

    def rows_first(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self.heads_first and x.dim() == 4 else x


# ---- a call of the core


def forward(c: _Call, out: Tensor) -> Tensor | None:
    """lse, in rows of a head. None where this is not for our kernels; out is then as it was."""
    lse = None
    if (options := _options(c)) is not None:
        q, k, v = (c.rows_first(x) for x in (c.q, c.k, c.v))
        *batch, rows, heads, _ = q.shape
        lse = torch.empty((*batch, heads, rows), dtype=torch.float32, device=q.device)
        if not _runs(_forward, (q, k, v, c.rows_first(out), lse), c.packed, options):
            lse = None
    _tell(c, False, lse is not None)
    return lse


def backward(
    c: _Call, dout: Tensor, out: Tensor, lse: Tensor, gradients: tuple[Tensor, Tensor, Tensor]
) -> bool:
    """Whether it was for our kernels, which have written the gradients then."""
    taken = False
    if (options := _options(c)) is not None:
        inputs = map(c.rows_first, (c.q, c.k, c.v, last_contiguous(dout), out))
        tensors = *inputs, last_contiguous(lse), None, *map(c.rows_first, gradients), None
        taken = _runs(_backward, tensors, c.packed, options)
    _tell(c, True, taken)
    return taken


def _options(c: _Call) -> Any:
    """The options of ``_bindings``; None: not ours. What else is not, the core refuses."""
    if c.dropout_p != 0 or (c.band is not None and c.mask is not None):
        return None
    for x in (c.q, c.k, c.v):
        # The address is 0 without elements, and where the memory was taken away.
        if not x.data_ptr() or (c.heads_first and x.dim() != 4):
            return None
    if c.mask is not None and not 2 <= c.mask.dim() <= 4:
        return None
    deterministic = torch.are_deterministic_algorithms_enabled()
    return options_of(c.scale, c.band, as_bias(c.mask), deterministic=deterministic)


def options_of(
    scale: float | None, band: _bindings.BandFields | None, bias: Tensor | None,
    dropout_p: float = 0.0, deterministic: bool = False,
) -> _bindings.Options:  # fmt: skip
    """The options of ``_bindings`` for what aten's kernels have."""
    rest = (None,) * 7  # sinks, lengths, pages and what else these do not have
    return (scale, band, bias, None, 0.0, dropout_p, 0, 0, deterministic, None, None, *rest)


def as_bias(mask: Tensor | None) -> Tensor | None:
    """(batch, heads, seqlen_q, seqlen_k), with sizes of 1 where it broadcasts."""
    if mask is None:
        return None
    bias = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    return bias[..., :1] if bias.stride(-1) == 0 else bias


def _runs(call: Callable[..., None], *args: Any) -> bool:
    try:
        call(*args)
    except Error:
        return False
    return True


def _tell(c: _Call, is_backward: bool, taken: bool) -> None:
    if _watcher is not None:
        rest = c.mask, c.band, c.scale, c.dropout_p, c.packed or None
        with contextlib.suppress(Exception):  # no call fails for its log
            _watcher(is_backward, taken, *map(c.rows_first, (c.q, c.k, c.v)), *rest)


# ---- aten's operators. What is_causal stands for is unlike on a CPU and on a GPU

_TOP_LEFT: _bindings.BandFields = (None, 0, True)
_BOTTOM_RIGHT: _bindings.BandFields = (None, 0, False)


def _turned_off() -> bool:
    """What was compiled comes here even where sdpa_kernel has turned flash attention off since.

    Memory-efficient attention asks too: who allows that alone asks for PyTorch's own.
    """
    return not torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]


def _call_of(given: Given, causal: _bindings.BandFields) -> _Call:
    band = causal if given["is_causal"] else None
    q, k, v, dropout_p = (given[name] for name in ("query", "key", "value", "dropout_p"))
    mask = given.get("attn_mask", given.get("attn_bias"))
    return _Call(q, k, v, dropout_p, band, given["scale"], mask)


def _saved(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    return given["grad_out"], given["out"], given["logsumexp"]


def _for_cpu_forward(given: Given) -> Results:
    c = _call_of(given, _TOP_LEFT)
    if _turned_off() or c.v.shape[-1] != c.q.shape[-1]:
        return None
    out = torch.empty_like(c.q)
    lse = forward(c, out)
    if lse is None:
        return None
    if given.get("attn_mask") is not None:
        # Of queries that see no key: where PyTorch's backward comes instead of ours, such as behind
        # a `with` of enable(), it takes exp(-inf - lse), which would be NaN.
        lse.masked_fill_(lse == -math.inf, 0.0)
    # (batch, seqlen, heads) in memory, as PyTorch's has it: compiled code relies on that.
    if lse.shape[1] > 1 and lse.shape[2] > 1:
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse


def _for_cpu_backward(given: Given) -> Results:
    c = _call_of(given, _TOP_LEFT)
    if _turned_off() or not c.q.dim() == c.k.dim() == c.v.dim() == 4:
        return None
    gradients = _empty_rows_first(c.q), _empty_rows_first(c.k), _empty_rows_first(c.v)
    return gradients if backward(c, *_saved(given), gradients) else None


def _empty_rows_first(like: Tensor) -> Tensor:
    """In memory (batch, seqlen, heads, dim)."""
    _, heads, rows, dim = like.shape
    strides = heads * rows * dim, dim, heads * dim, 1
    return torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device)


def _flash_forward(given: Given) -> Results:
    c = _call_of(given, _BOTTOM_RIGHT)
    q, k, v = c.q, c.k, c.v
    if _turned_off() or given["return_debug_mask"] or q.dim() != 4 or v.shape[-1] != q.shape[-1]:
        return None
    out = torch.empty_like(q)
    lse = forward(c, out)
    if lse is None:
        return None
    return out, lse, None, None, q.shape[2], k.shape[2], *_without_dropout(q)


def _without_dropout(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The random state and the mask of a call that draws nothing, which nobody reads."""
    state, unused = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in ((2,), ()))
    return state, unused, torch.empty(0, dtype=q.dtype, device=q.device)


def _flash_backward(given: Given) -> Results:
    c = _call_of(given, _BOTTOM_RIGHT)
    offsets = given["cum_seq_q"]
    if _turned_off() or (offsets is not None and offsets.numel() != 0):
        return None
    gradients = torch.empty_like(c.q), torch.empty_like(c.k), torch.empty_like(c.v)
    return gradients if backward(c, *_saved(given), gradients) else None


# ---- PyTorch's memory-efficient attention on a GPU, which has masks

_LSE_ROWS = 32  # its log-sum-exps have so many rows, or a multiple


def _efficient_forward(given: Given) -> Results:
    c = _call_of(given, _TOP_LEFT)
    q, v, mask = c.q, c.v, c.mask
    if _turned_off() or not q.dim() == v.dim() == 4 or (mask is not None and mask.requires_grad):
        return None
    batch, heads, rows, _ = q.shape
    out = torch.empty((batch, rows, heads, v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = forward(c, out.transpose(1, 2))
    if lse is None:
        return None
    if not given["compute_log_sumexp"]:
        lse = lse.new_empty((batch, heads, 0))
    else:
        # Finite for queries that see no key, as on a CPU: without a mask there are none. What is
        # padded counts for nothing.
        if mask is not None:
            lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=0.0)
        if more := -rows % _LSE_ROWS:
            lse = torch.nn.functional.pad(lse, (0, more), value=math.inf)
    # The random state: where q is, as CUDA graphs of compiled code have it.
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in "so")
    return out.transpose(1, 2), lse, seed, offset


def _efficient_backward(given: Given) -> Results:
    c = _call_of(given, _TOP_LEFT)
    dout, out, lse = given["grad_out_"], given["out"], given["logsumexp"]
    if _turned_off() or given["grad_input_mask"][3] or not c.q.dim() == c.k.dim() == c.v.dim() == 4:
        return None
    gradients = _empty_rows_first(c.q), _empty_rows_first(c.k), _empty_rows_first(c.v)
    lse = lse[..., : c.q.shape[2]]
    return (*gradients, None) if backward(c, dout, out, lse, gradients) else None


# ---- packed sequences: nested tensors and torch.nn.attention.varlen

_PACKED = (
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p"),
    *("is_causal", "scale", "window_size_left", "window_size_right"),
)
_PACKED_FORWARD = {*_PACKED, "return_debug_mask"}
_PACKED_BACKWARD = {*_PACKED, "grad_out", "out", "logsumexp", "rng_state", "unused"}


def _packed_call(given: Given, known: set[str]) -> _Call | None:
    """None for what aten has to refuse, or to read in another way."""
    if any(x is not None for name, x in given.items() if name not in known):
        return None  # what releases of PyTorch add
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, scale, *sides = (
        given[name] for name in _PACKED
    )
    rank = 4 if cu_q is None else 3
    if (cu_q is None) != (cu_k is None) or not q.dim() == k.dim() == v.dim() == rank:
        return None
    if v.shape[-1] != q.shape[-1]:
        return None
    left, right = (None if side is None or side < 0 else side for side in sides)
    right = 0 if is_causal else right
    band = None if left is None and right is None else (left, right, False)
    packed = () if cu_q is None else (cu_q, cu_k, max_q, max_k)
    return _Call(q, k, v, dropout_p, band, scale, heads_first=False, packed=packed)


def _packed_forward(given: Given) -> Results:
    c = None if given["return_debug_mask"] else _packed_call(given, _PACKED_FORWARD)
    if c is None:
        return None
    out = torch.empty_like(c.q)
    lse = forward(c, out)
    return None if lse is None else (out, lse, *_without_dropout(c.q))


def _packed_backward(given: Given) -> Results:
    c = _packed_call(given, _PACKED_BACKWARD)
    if c is None:
        return None
    gradients = torch.empty_like(c.q), torch.empty_like(c.k), torch.empty_like(c.v)
    return gradients if backward(c, *_saved(given), gradients) else None


# ---- in aten's place

_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_FLASH = "_scaled_dot_product_flash_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_OPERATORS: dict[str, dict[str, Callable[[Given], Results]]] = {
    "for_cpu": {_FOR_CPU: _for_cpu_forward, f"{_FOR_CPU}_backward": _for_cpu_backward},
    "flash": {_FLASH: _flash_forward, f"{_FLASH}_backward": _flash_backward},
    "efficient": {_EFFICIENT: _efficient_forward, f"{_EFFICIENT}_backward": _efficient_backward},
    "packed": {
        "_flash_attention_forward": _packed_forward,
        "_flash_attention_backward": _packed_backward,
    },
}


class _Kernel:
    """Ours for an operator and a dispatch key, and the kernel that was there before."""

    def __init__(self, name: str, key: str, ours: Callable[[Given], Results]) -> None:
        self._name, self._ours = f"aten::{name}", ours
        self._before = _kernel_at(self._name, key)
        self._given = _defaults(name)

    def call(self, keys: Any, *args: Any, **keywords: Any) -> Any:
        # Modes and subclasses have seen the operator; this is inside of it.
        with without_torch_function():
            results = self._ours({**self._given, **dict(zip(self._given, args)), **keywords})
        if results is not None:
            return results
        if self._before is None:
            why = "neither flashsdk nor PyTorch has a kernel for this"
            raise NotImplementedError(f"{self._name}: {why}")
        return self._before.call_boxed(keys, *args, **keywords)


@functools.cache
def _defaults(name: str) -> Given:
    """All arguments in their order. A call leaves out what is as the schema has it."""
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    return {a.name: a.default_value for a in arguments}


def _kernel_at(operator: str, key: str) -> Any:
    try:
        return torch.library.get_kernel(operator, key)
    except RuntimeError:  # there is none
        return None


_libraries: dict[tuple[str, str], torch.library.Library] = {}
# Those of ours that were in place. As one goes, a call of another thread may be on its way to it,
# waiting for the lock that we hold. So many later none is.
_kept: deque[Any] = deque(maxlen=4000)


def override_sdpa(operators: str, key: str) -> None:
    """Ours in the place of a pair of aten's: "for_cpu", "flash", "efficient" or "packed"."""
    if (operators, key) in _libraries:
        return
    library = _libraries[operators, key] = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, ours in _OPERATORS[operators].items():
            kernel = not_compiled(_Kernel(name, key, ours).call)
            library.impl(name, kernel, with_keyset=True)  # type: ignore[no-untyped-call]
            _kept.append(_kernel_at(f"aten::{name}", key))


def restore_sdpa() -> None:
    """Gives all of them back."""
    while _libraries:
        _, library = _libraries.popitem()
        remove_library(library)


def watch_sdpa(watcher: Watcher) -> None:
    """``watcher`` is told of each call that comes, in a process from now on."""
    global _watcher
    _watcher = watcher
