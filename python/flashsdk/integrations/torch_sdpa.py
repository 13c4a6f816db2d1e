"""PyTorch's own ``torch.nn.functional.scaled_dot_product_attention`` on our kernels.

``enable()`` puts them where PyTorch calls its flash attention, on a CPU and on a GPU, and on a GPU
where it calls its memory-efficient attention, which has masks; forward and backward. Everything
above stays PyTorch's: which backend a call takes, ``sdpa_kernel``, autocast, torch.compile,
autograd. So a call that PyTorch gives to its math goes where it went before. What comes to our
kernels and is not for them goes to PyTorch's kernel of that place: on Hopper cuDNN would have had
it, but ``enable`` has flash and memory-efficient attention asked first. ``explain`` says who takes
a call, and why. Operators:
``aten::_scaled_dot_product_flash_attention_for_cpu``, and on a GPU
``aten::_scaled_dot_product_flash_attention`` and ``aten::_scaled_dot_product_efficient_attention``,
each with its backward.

PyTorch knows them as the flash attention implementation "flashsdk" as well, as soon as this module
is imported: ``torch.nn.attention.activate_flash_attention_impl("flashsdk")``.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
import torch.nn.attention as torch_attention
from torch import Tensor
from torch.nn.attention import SDPBackend

from .. import Causal, _log, build_info, ops
from .._errors import Error, Unsupported, renamed
from .._torch_checks import flag, shape_of, tensor
from .._torch_eager import InPython, built
from .._torch_private import sdp_choice, sdp_order, set_sdp_order, when_cuda_starts
from . import _sdpa_dtensor, _sdpa_kernels, _sdpa_nested
from ._sdpa_kernels import as_bias, options_of

__all__ = ["Enabled", "Explanation", "disable", "enable", "enabled", "explain"]

_NAME = "flashsdk"
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "softmax_scale": "scale"}
# Of PyTorch 2.11 and newer: 2.10 has no way back. Each impl's kernels give way to the next one's.
_REGISTRY = hasattr(torch_attention, "restore_flash_attention_impl")
# What puts ours in the place of aten's: compiled for the PyTorch at hand, or in Python.
_kernels: Any = _sdpa_kernels if built is InPython else built
_switching = threading.Lock()  # two threads that enable at once would put ours on top of ours


_MASK_ROW = 8  # what PyTorch pads rows of a mask to for its memory-efficient attention
# PyTorch's choices that come to our kernels; the second on a GPU alone.
_OURS = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


# ---- on and off


class _OursFirst:
    """On a GPU PyTorch asks what is ours first, from ``wish`` to ``leave``.

    That is flash attention, then memory-efficient attention. On Hopper it would ask cuDNN first. It
    decides so in the first call on a GPU, and then keeps what it is told: so this waits for CUDA,
    and makes a choice before it says its own.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waits = self._wished = False
        self._before: list[int] | None = None
        self._said: list[int] = []

    def wish(self) -> None:
        with self._lock:
            self._wished = True
            first, self._waits = not self._waits, True  # of the process
        if first:  # not under the lock: PyTorch has one of its own
            when_cuda_starts(self._say)
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._say()

    def leave(self) -> None:
        with self._lock:
            self._wished = False
            if self._before is not None and sdp_order() == self._said:  # else others said another
                set_sdp_order(self._before)
            self._before = None

    def _say(self) -> None:
        with self._lock:
            if not self._wished or self._before is not None or not _pytorch_has_chosen():
                return
            self._before = sdp_order()
            ours = [int(one.value) for one in _OURS]
            self._said = [*ours, *(one for one in self._before or [] if one not in ours)]
            if self._before is not None:
                set_sdp_order(self._said)


def _pytorch_has_chosen() -> bool:
    """Makes PyTorch choose a backend of a GPU. False where it cannot: CUDA is to start even so."""
    try:
        x = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
        sdp_choice(x, x, x, None, 0.0, False, scale=None, enable_gqa=False)
    except RuntimeError:
        return False
    return True


_ours_first = _OursFirst()


class _Overrides:
    """Our kernels in the place of aten's, until ``remove``."""

    def __init__(self) -> None:
        with ExitStack() as undo:  # all of it, or nothing
            undo.callback(_kernels.restore_sdpa)
            _kernels.override_sdpa("for_cpu", "CPU")
            _kernels.override_sdpa("packed", "CPU")
            if build_info()["cuda"] and torch.version.cuda is not None:
                _kernels.override_sdpa("flash", "CUDA")
                _kernels.override_sdpa("efficient", "CUDA")
                _kernels.override_sdpa("packed", "CUDA")
                undo.callback(_ours_first.leave)
                _ours_first.wish()
            if _log.ON:
                _kernels.watch_sdpa(_logged)
            undo.callback(_sdpa_nested.Choice().remove)
            _sdpa_dtensor.prepare(enabled)
            self._undo = undo.pop_all()

    def remove(self) -> None:
        self._undo.close()


def _logged(
    backward: bool, taken: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    band: tuple[int | None, int | None, bool] | None, scale: float | None, dropout_p: float,
    packed: tuple[Any, ...] | None,
) -> None:  # fmt: skip
    """A line of FLASHSDK_LOG for a call that came to the place of aten's kernels."""
    options = options_of(scale, band, as_bias(mask), dropout_p)
    op = f"torch_sdpa_{'bwd' if backward else 'fwd'}"
    # Mostly the library refuses, which is told instead.
    later = "" if taken else "PyTorch's kernel"
    _log.call(op, backward, (q, k, v), packed or (), options, later=later)


if _REGISTRY:
    torch_attention.register_flash_attention_impl(_NAME, register_fn=_Overrides)


def _current() -> str | None:
    """The flash attention implementation in use, None for PyTorch's own."""
    return torch_attention.current_flash_attention_impl() if _REGISTRY else None


def _switch_to(name: str | None) -> None:
    """The caller holds ``_switching``."""
    if name == _current():
        return
    if not _REGISTRY:
        raise Unsupported(f"torch: {torch.__version__}; 2.11 or newer")
    if name is None:
        torch_attention.restore_flash_attention_impl()
    else:
        torch_attention.activate_flash_attention_impl(name)


class Enabled:
    """What ``enable`` returns: a context whose end brings back what was there before it."""

    def __init__(self, before: str | None) -> None:
        self._before = before

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _switching:
            _switch_to(self._before)


def enable() -> Enabled:
    """Gives torch.nn.functional.scaled_dot_product_attention our kernels, in the whole process.

    A call, or a context: ``with enable(): ...``. What is compiled by torch.compile takes the
    kernels that are in place when it runs. Raises Error for a PyTorch older than 2.11.
    """
    with _switching:
        before = _current()
        _switch_to(_NAME)
        _sdpa_dtensor.prepare(enabled)  # again: DTensors may have been imported since
    return Enabled(before)


def disable() -> None:
    """Gives it back to PyTorch's kernels. Nothing happens where ours are not in place."""
    with _switching:
        if enabled():
            _switch_to(None)


def enabled() -> bool:
    """Whether our kernels are in place."""
    return _current() == _NAME


# ---- who takes a call


@dataclass(frozen=True)
class Explanation:
    """Who computes a call of scaled_dot_product_attention.

    ``taken`` is whether we do, ``kernel`` the name of our kernel then. ``backend`` is which one of
    PyTorch's SDPBackend the call is given to: ours stand at FLASH_ATTENTION, on a GPU also at
    EFFICIENT_ATTENTION, where masks and what else flash attention leaves out go. ``reason`` says
    why it is not ours. ``str()`` says the same for people.
    """

    taken: bool
    backend: str
    kernel: str = ""
    reason: str = ""

    def __str__(self) -> str:
        if self.taken:
            return f"flashsdk: {self.kernel}"
        return f"PyTorch's {self.backend or 'own'}: {self.reason}"


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    op: Literal["fwd", "bwd"] = "fwd",
) -> Explanation:
    """Who computes scaled_dot_product_attention of these arguments here and now, and why.

    Under the sdpa_kernel, autocast and ``enable`` of the caller; ``op="bwd"`` asks about the
    gradient. Arguments as torch.nn.functional's function has them; raises Error where they are no
    tensors. Nothing is computed.
    """
    if not all(isinstance(x, Tensor) for x in (query, key, value)):
        for name, x in (("query", query), ("key", key), ("value", value)):
            tensor(name, x)  # raises for the first that is none
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (
            x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
            for x in (query, key, value)
        )
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if query.is_nested:
        return _explain_nested(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, op
        )
    choice: Any = SDPBackend(
        sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    )
    given = query, key, value, attn_mask, dropout_p
    if choice not in _OURS or not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return Explanation(False, choice.name, reason=_not_flash(*given))
    if not enabled():
        return Explanation(False, choice.name, reason="flashsdk is not enabled")
    if dropout_p != 0:
        return Explanation(False, choice.name, reason=f"dropout_p is {dropout_p}")
    if attn_mask is not None and choice == SDPBackend.EFFICIENT_ATTENTION:
        if attn_mask.requires_grad:
            return Explanation(False, choice.name, reason="attn_mask requires a gradient")
        attn_mask = _as_handed_on(attn_mask, query.dtype)
    causal = Causal("top_left") if flag("is_causal", is_causal) else None
    # PyTorch 2.14 adds a batch of one to three dimensions, on a CPU.
    four = (x[None] if x.dim() == 3 else x for x in (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in four)
    bias = as_bias(attn_mask)
    return _kernel_of(choice.name, q, k, v, op=op, mask=causal, bias=bias, softmax_scale=scale)


def _as_handed_on(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as PyTorch gives it to its memory-efficient attention, without its values.

    It makes a float one of a bool one, and rows where vectors can be read: of a multiple of 8.
    """
    handed_on = mask
    if mask.dtype == torch.bool:
        handed_on = torch.empty_like(_unexpanded(mask), dtype=dtype)
    *strides, last = handed_on.stride()
    if last == 1 and all(n % _MASK_ROW == 0 for n in strides):
        return handed_on
    *shape, keys = _unexpanded(handed_on).shape
    padded = keys + _MASK_ROW - keys % _MASK_ROW
    return torch.empty((*shape, padded), dtype=handed_on.dtype, device=mask.device)[..., :keys]


def _unexpanded(mask: Tensor) -> Tensor:
    """Without the copies of an expanded one: as a whole it may be larger than the memory is."""
    for d, n in enumerate(mask.stride()[:-1]):
        if n == 0:
            mask = mask.narrow(d, 0, min(1, mask.shape[d]))
    return mask


def _explain_nested(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    op: Literal["fwd", "bwd"],
) -> Explanation:
    tensors = query, key, value
    if all(x.is_nested and x.layout == torch.jagged and x._ragged_idx == 1 for x in tensors):
        # A ragged batch of heads and sequences: PyTorch calls the function of what is in it.
        q, k, v = (x.values() for x in tensors)
        return explain(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, op=op)
    if why := _sdpa_nested.why_not(*tensors, attn_mask, dropout_p, is_causal):
        return Explanation(False, "", reason=why)
    if not enabled():
        return Explanation(False, SDPBackend.MATH.name, reason="flashsdk is not enabled")
    causal = Causal() if flag("is_causal", is_causal) else None
    q, k, v = (x.transpose(1, 2).values() for x in tensors)
    offsets = (x.offsets().to(torch.int32) for x in (query, key))
    longest = (x._get_max_seqlen() for x in (query, key))
    flash = SDPBackend.FLASH_ATTENTION.name
    return _kernel_of(flash, q, k, v, *offsets, *longest, op=op, mask=causal, softmax_scale=scale)


def _kernel_of(backend: str, *args: Any, **options: Any) -> Explanation:
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    try:
        answer = ops.explain(*args, **options)
    except Error as e:
        return Explanation(False, backend, reason=str(renamed(e, _NAMES)))
    if not answer.kernel:
        return Explanation(False, backend, reason=str(answer))
    return Explanation(True, backend, answer.kernel)


def _not_flash(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float
) -> str:
    """Why PyTorch does not give a call to its flash attention, as far as we know its rules."""
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return "flash attention is turned off here, as sdpa_kernel does"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            return f"{name} has {shape_of(x)}, and PyTorch's flash attention takes 4 dimensions"
        if x.stride(-1) != 1:
            return f"the last dimension of {name} is not contiguous"
        if 0 in x.shape:
            return f"{name} has {shape_of(x)}"
    other = ""
    if query.shape[-1] != value.shape[-1]:
        other = f"head_dim {query.shape[-1]} of query is not {value.shape[-1]} of value"
    if query.device.type == "cpu":
        if other:
            return other
        if dropout_p > 0:
            return f"dropout_p is {dropout_p}, and PyTorch's flash attention on a CPU has none"
        if attn_mask is not None and attn_mask.requires_grad:
            return "attn_mask requires a gradient"
    elif attn_mask is not None or other:
        other = other or "there is an attn_mask"
        if torch.backends.cuda.mem_efficient_sdp_enabled():  # type: ignore[no-untyped-call]
            return f"{other}, and PyTorch's memory-efficient attention does not take it"
        return f"{other}, and memory-efficient attention is turned off here"
    return "PyTorch's rules for flash attention leave it out (torch.backends.cuda.SDPAParams)"
