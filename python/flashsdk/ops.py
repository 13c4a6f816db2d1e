"""Exact attention on arrays of NumPy, PyTorch, JAX, CuPy and other frameworks, without copies.

Forward and backward of FlashAttention (arXiv 2205.14135), for batches and for packed sequences.
The meaning of every argument is fixed in docs/semantics.md of the sources; this is the short form.

Shapes, batched and packed (varlen)::

    q, dq       (batch, seqlen_q, num_heads, head_dim)       (total_q, num_heads, head_dim)
    k, dk       (batch, seqlen_k, num_heads_kv, head_dim)    (total_k, num_heads_kv, head_dim)
    v, dv       (batch, seqlen_k, num_heads_kv, head_dim_v)  (total_k, num_heads_kv, head_dim_v)
    out, dout   (batch, seqlen_q, num_heads, head_dim_v)     (total_q, num_heads, head_dim_v)
    lse, dlse   (batch, num_heads, seqlen_q)                 (num_heads, total_q)

float32, bfloat16 or float16, all the same; lse and dlse are float32. In a forward k and v may be
float8_e4m3fn beside a q of bfloat16 or float16, whose dtype out has. head_dim and head_dim_v are 1
to 576, on a GPU of v and in the backward to 512; num_heads is a multiple of num_heads_kv. Any
strides, except that the last dimension is contiguous. Inputs may be read-only, and may share
memory, as with v = k[..., :512]. Autograd belongs to ``flashsdk.torch``: while PyTorch records, a
forward of q, k or v that requires a gradient is an Error, as its result would have none.
Those that results are written into count as changed, as after torch's own out=.

Keywords of all four functions::

    softmax_scale  factor of q·k; None is head_dim ** -0.5
    mask           Dense(), Causal(), SlidingWindow(), a Band or a BlockMask; None is Dense()
    bias           added to the scores, float32, bfloat16 or float16; or bool, True = attend.
                   (batch, num_heads, seqlen_q, seqlen_k), each of them or 1; for packed sequences
                   max_seqlen_q and max_seqlen_k, indexed from the start of each sequence
    alibi_slopes   float32 (num_heads,) or (batch, num_heads):
                   -slope * |i + seqlen_k - seqlen_q - j| is added to the scores
    sink           float32 (num_heads,): a logit that joins the softmax of each query and has no
                   value; lse counts it
    softcap        > 0: scores s become softcap * tanh(s / softcap), before bias; 0 is off
    dropout_p      probability to drop an element of softmax's result, 0 <= dropout_p < 1, rounded
                   to the nearest 1/256, at most 255/256
    seed, offset   what the dropout pattern is a function of; 0 to 2^64 - 1. Or seed is both, an
                   array int64 or uint64 (2,) where q is, read by the kernel, so that a CUDA graph
                   draws anew when it changes; (batch, 2) is one for each sequence, whose heads
                   then count from 0
    seqused_q      how many queries and keys of each sequence are used, int32 (batch,) where q is;
    seqused_k      of batches alone. Masks and positions count with these lengths. Keys behind them
                   are not read; queries behind have out 0 and lse -inf; gradients of both are 0
    block_table    forward, with seqused_k: int32 (batch, max_pages). k and v are then pages,
                   (num_pages, page_size, num_heads_kv, head_dim), and key j of sequence b is row
                   j % page_size of page block_table[b, j // page_size]
    k_descale      forward, of k and v in float8_e4m3fn: what they are multiplied with, float32
    v_descale      (batch, num_heads_kv), each of the two or 1; None is 1
    num_splits     forward: into how many parts the keys of a query may be cut, None as many as
                   pays. With 1 its bits depend on its own sequence alone, not on what shares the
                   batch; on a CPU they never depend on more
    deterministic  True: the same bits from run to run, or an Error; CPU kernels always are. None
                   does what torch.use_deterministic_algorithms says of PyTorch's tensors
    stream         address of a CUDA stream; None is the current one. None on a CPU
    backend        "cpu", "sm80" or "sm90"; None is the fastest that fits

A query that sees no key has out = 0, lse = -inf, or its sink, and gradients 0.

Every function raises ``Error``, one line "<argument>: <given>; <allowed>", before anything is
written. They release the GIL and may be called from several threads at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

from . import _bindings, _contents, _frameworks, _log
from ._bands import no_mask
from ._errors import Error, InvalidArgument, Unsupported, has, shown
from .masks import Band, BlockMask, Dense, Mask

__all__ = [
    "Backend",
    "Explanation",
    "explain",
    "mha_bwd",
    "mha_fwd",
    "mha_varlen_bwd",
    "mha_varlen_fwd",
]

Backend: TypeAlias = Literal["cpu", "sm80", "sm90"]
Array = TypeVar("Array")  # of any framework; results are of q's


class AttentionKeywords(TypedDict, total=False):
    """Those of ``flashsdk.attention`` and of JAX's, but return_lse and what dropout draws from.

    For type checkers.
    """

    mask: Mask | Any | None
    bias: Any
    alibi_slopes: Any
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    deterministic: bool | None
    backend: Backend | None


def mha_fwd(
    q: Array,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    mask: Mask | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: Any = 0,
    offset: int = 0,
    sink: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    block_table: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int | None = None,
    deterministic: bool | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    stream: int | None = None,
    backend: Backend | None = None,
) -> tuple[Array, Array]:
    """Attention: (out, lse), new arrays of q's framework unless given.

    q, k, v
        (batch, seqlen_q, num_heads, head_dim), (batch, seqlen_k, num_heads_kv, head_dim) and
        (batch, seqlen_k, num_heads_kv, head_dim_v).
    out, lse
        Where to write (batch, seqlen_q, num_heads, head_dim_v) and float32 (batch, num_heads,
        seqlen_q). lse is the natural logarithm of the sum of the exponentials of the final scores.

    The other keywords, dtypes, strides and errors: ``help(flashsdk.ops)``. Source: FlashAttention,
    arXiv 2205.14135, algorithm 1.
    """
    options = (softmax_scale, _mask(mask, q), bias, alibi_slopes, softcap, dropout_p,
               seed, offset, _deterministic(deterministic, q), stream, backend,
               seqused_q, seqused_k, sink, block_table, num_splits,
               k_descale, v_descale)  # fmt: skip
    return _forward(q, k, v, out, lse, (), options)


def mha_varlen_fwd(
    q: Array,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    mask: Mask | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: Any = 0,
    offset: int = 0,
    sink: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int | None = None,
    deterministic: bool | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    stream: int | None = None,
    backend: Backend | None = None,
) -> tuple[Array, Array]:
    """Attention on sequences of different lengths, packed one behind the other: (out, lse).

    q, k, v
        (total_q, num_heads, head_dim), (total_k, num_heads_kv, head_dim) and (total_k,
        num_heads_kv, head_dim_v).
    cu_seqlens_q, cu_seqlens_k
        int32 (batch + 1,): sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] - 1. From 0,
        ascending; sequences may be empty. Rows behind the last one see no key.
    max_seqlen_q, max_seqlen_k
        Upper bounds of the lengths, in tokens.
    out, lse
        Where to write (total_q, num_heads, head_dim_v) and float32 (num_heads, total_q).

    Masks and positions count from the start of each sequence; a BlockMask must be made for the two
    max_seqlens, and with a "top_left" band where sequences differ from these in seqlen_k -
    seqlen_q. The other keywords, dtypes, strides and errors: ``help(flashsdk.ops)``.
    Source: FlashAttention, arXiv 2205.14135, algorithm 1.
    """
    packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (softmax_scale, _mask(mask, q), bias, alibi_slopes, softcap, dropout_p,
               seed, offset, _deterministic(deterministic, q), stream, backend,
               None, None, sink, None, num_splits, k_descale, v_descale)  # fmt: skip
    return _forward(q, k, v, out, lse, packed, options)


def mha_bwd(
    dout: Any,
    q: Array,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    softmax_scale: float | None = None,
    mask: Mask | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: Any = 0,
    offset: int = 0,
    sink: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    deterministic: bool | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dsink: Array | None = None,
    stream: int | None = None,
    backend: Backend | None = None,
) -> tuple[Array, ...]:
    """Gradients of mha_fwd: (dq, dk, dv), and dsink behind them where there is a sink.

    New arrays of q's framework unless given.

    dout
        Gradient of out, same shape.
    q, k, v, out, lse
        What mha_fwd was given and gave; the keywords must be the same as there.
    dlse
        Gradient of lse, same shape; None is zero.
    dq, dk, dv, dsink
        Where to write the gradients, with the shapes of q, k, v and sink.

    The other keywords, dtypes, strides and errors: ``help(flashsdk.ops)``. Source: FlashAttention,
    arXiv 2205.14135, algorithm 4.
    """
    options = (softmax_scale, _mask(mask, q), bias, alibi_slopes, softcap, dropout_p,
               seed, offset, _deterministic(deterministic, q), stream, backend,
               seqused_q, seqused_k, sink, None, None, None, None)  # fmt: skip
    return _backward(dout, q, k, v, out, lse, dlse, (dq, dk, dv, dsink), (), options)


def mha_varlen_bwd(
    dout: Any,
    q: Array,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dlse: Any = None,
    softmax_scale: float | None = None,
    mask: Mask | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: Any = 0,
    offset: int = 0,
    sink: Any = None,
    deterministic: bool | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dsink: Array | None = None,
    stream: int | None = None,
    backend: Backend | None = None,
) -> tuple[Array, ...]:
    """Gradients of mha_varlen_fwd: (dq, dk, dv), and dsink behind them where there is a sink.

    New arrays of q's framework unless given.

    dout
        Gradient of out, same shape: (total_q, num_heads, head_dim_v).
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        What mha_varlen_fwd was given and gave; the keywords must be the same as there.
    dlse
        Gradient of lse, float32 (num_heads, total_q); None is zero.
    dq, dk, dv, dsink
        Where to write the gradients, with the shapes of q, k, v and sink.

    The other keywords, dtypes, strides and errors: ``help(flashsdk.ops)``. Source: FlashAttention,
    arXiv 2205.14135, algorithm 4.
    """
    packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (softmax_scale, _mask(mask, q), bias, alibi_slopes, softcap, dropout_p,
               seed, offset, _deterministic(deterministic, q), stream, backend,
               None, None, sink, None, None, None, None)  # fmt: skip
    return _backward(dout, q, k, v, out, lse, dlse, (dq, dk, dv, dsink), packed, options)


@dataclass(frozen=True)
class Explanation:
    """Which kernel a call takes, and why not those that come before it.

    ``kernel`` is its name, "" if none fits. ``refused`` are (name, reason) of the kernels for this
    dtype, head_dim and mask with a higher priority. ``packing`` says how query heads share a tile
    ("query heads packed: 4 rows a head of keys"), "" if they do not. ``tile`` is (queries, keys) of
    the kernel's tiles, (0, 0) if none fits. ``str()`` says the same for people.
    """

    kernel: str
    refused: list[tuple[str, str]] = field(default_factory=list)
    packing: str = ""
    tile: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        lines = ["no kernel fits"]
        if self.kernel:
            lines = [f"{self.kernel}, tiles of {self.tile[0]} queries x {self.tile[1]} keys"]
        lines += [f"  {self.packing}"] if self.packing else []
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.refused])


def explain(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    op: Literal["fwd", "bwd"] = "fwd",
    softmax_scale: float | None = None,
    mask: Mask | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: Any = 0,
    offset: int = 0,
    sink: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    block_table: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int | None = None,
    deterministic: bool | None = None,
    backend: Backend | None = None,
) -> Explanation:
    """The kernel that mha_fwd (mha_varlen_fwd with cu_seqlens) or, for "bwd", its gradient takes.

    Arguments are those of the forward call, also for "bwd", and none of its outputs or stream;
    nothing is computed.
    Raises Error like the call.
    """
    if not isinstance(op, str) or op not in ("fwd", "bwd"):
        raise InvalidArgument(f'op: {shown(op)}; "fwd" or "bwd"')
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    packed: Any = () if all(x is None for x in lengths) else lengths  # as a whole or not at all
    options = (softmax_scale, _mask(mask, q), bias, alibi_slopes, softcap, dropout_p,
               seed, offset, _deterministic(deterministic, q), None, backend,
               seqused_q, seqused_k, sink, block_table, num_splits,
               k_descale, v_descale)  # fmt: skip
    return Explanation(*_bindings.explain(op == "bwd", (q, k, v), packed, options))


# ---- from arguments to bindings

_SINK = 13  # its place among the options


@dataclass(frozen=True)
class PlacedLayout:
    """What a BlockMask says, with its lists where q is: a mask for adapters.

    On a CPU each call reads the lists of its direction.
    """

    block_size: tuple[int, int]
    seqlen_q: int
    seqlen_k: int
    band: Band  # unlimited where there are no partial blocks
    arrays: tuple[Any, ...]  # as BlockMask._arrays, where q is


def _forward(
    q: Any, k: Any, v: Any, out: Any, lse: Any, packed: _bindings.Packed, options: _bindings.Options
) -> tuple[Any, Any]:
    if _log.ON:
        _log.call("mha_varlen_fwd" if packed else "mha_fwd", False, (q, k, v), packed, options)
    if _contents.ON:
        _contents.check_call(q, k, packed, options)
    framework = _frameworks.of(q)
    if recorded := framework.first_recorded(q, k, v):
        raise _no_gradient(recorded, packed)
    for name, i in _TRAINABLE:
        if options[i] is not None and _frameworks.of(options[i]).recorded(options[i]):
            raise _no_gradient(name, packed)
    new_out, new_lse = out is None, lse is None
    try:
        if new_out:
            out = framework.new_out(q, v)
        else:
            _frameworks.own("out", out)
        if new_lse:
            *batch, rows, num_heads, _ = q.shape
            lse = framework.empty_float32(q, (*batch, num_heads, rows))
        else:
            _frameworks.own("lse", lse)
    except Exception:
        # Arguments that outputs cannot be made for are most likely wrong: that says more.
        _bindings.explain(False, (q, k, v), packed, options)
        _check_shapes(q=q, v=v)
        raise
    _bindings.forward((q, k, v, out, lse), packed, options)
    out = framework.finish(out) if new_out else _frameworks.written(out)
    return out, framework.finish(lse) if new_lse else _frameworks.written(lse)


# Of options those that may be parameters of a model.
_TRAINABLE = (("bias", 2), ("alibi_slopes", 3), ("sink", 13), ("k_descale", 16), ("v_descale", 17))


def _no_gradient(name: str, packed: _bindings.Packed) -> Error:
    function = "mha_varlen_fwd" if packed else "mha_fwd"
    ways = "one without"
    if name in ("q", "k", "v", "sink"):
        ways = "flashsdk.torch.varlen_attention" if packed else "flashsdk.torch.attention"
        ways += "" if packed else ", flashsdk.attention"
    given = f"requires a gradient, which {function} does not give"
    return Unsupported(f"{name}: {given}; {ways}, or torch.no_grad()")


def _check_shapes(**arrays: Any) -> None:
    """Of arrays that results are made like: what has __dlpack__ alone has none."""
    for name, x in arrays.items():
        if not has(x, "shape"):
            raise InvalidArgument(
                f"{name}: {shown(x)}; an array with a shape, or results to write to"
            )


def _backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, given: tuple[Any, ...],
    packed: _bindings.Packed, options: _bindings.Options,
) -> tuple[Any, ...]:  # fmt: skip
    """``given`` are dq, dk, dv and dsink, or None for those that are to be made."""
    if _log.ON:
        _log.call("mha_varlen_bwd" if packed else "mha_bwd", True, (q, k, v), packed, options)
    if _contents.ON:
        _contents.check_call(q, k, packed, options)
    framework = _frameworks.of(q)
    sink: Any = options[_SINK]
    dsink = given[3]
    try:
        gradients = [
            framework.empty_like(q, of) if array is None else _frameworks.own(name, array)
            for name, array, of in zip(("dq", "dk", "dv"), given, (q, k, v), strict=False)
        ]
        if dsink is not None:
            gradients.append(_frameworks.own("dsink", dsink))
        elif sink is not None:
            gradients.append(framework.empty_float32(q, tuple(sink.shape)))
    except Exception:
        _bindings.explain(True, (q, k, v), packed, options)
        _check_shapes(q=q, k=k, v=v)
        raise
    last = () if len(gradients) == 4 else (None,)
    _bindings.backward((q, k, v, dout, out, lse, dlse, *gradients, *last), packed, options)
    return tuple(
        framework.finish(new) if array is None else _frameworks.written(array)
        for new, array in zip(gradients, given, strict=False)
    )


def _deterministic(given: bool | None, q: Any) -> bool:
    return _frameworks.of(q).deterministic() if given is None else given


def _mask(mask: object, q: Any) -> _bindings.Mask:
    """A mask as the bindings take it: None, a band, or a layout with its lists, on q's device."""
    if mask is None or isinstance(mask, Dense):
        return None
    if isinstance(mask, Band):
        return mask.left, mask.right, mask.alignment == "top_left"
    if isinstance(mask, BlockMask):
        return _layout(mask, q)
    if isinstance(mask, PlacedLayout):
        return (*mask.block_size, mask.seqlen_q, mask.seqlen_k, _mask(mask.band, q), *mask.arrays)
    raise no_mask(mask)


def _layout(mask: BlockMask, q: Any) -> _bindings.LayoutFields:
    """A layout where q is. A CPU has its lists checked, and a GPU gets them, once for each mask."""
    framework = _frameworks.of(q)
    device = framework.device(q)
    layouts: dict[Any, _bindings.LayoutFields] = mask.__dict__.setdefault("_layouts", {})
    key = None if device is None else (type(framework), device)
    if key in layouts:
        return layouts[key]
    fields = (*mask.block_size, mask.seqlen_q, mask.seqlen_k, _mask(mask.band, q))
    if device is None:
        layouts[key] = (*fields, *_checked((*fields, *mask._arrays)))
        return layouts[key]
    placed = tuple(framework.to_device(array, q) for array in mask._arrays)
    if all(map(framework.lasting, placed)):
        layouts[key] = (*fields, *placed)
    return (*fields, *placed)


def _checked(fields: _bindings.LayoutFields) -> tuple[Any, ...]:
    """What stands for the lists: wrong ones themselves, for each call to say what is wrong."""
    try:
        return (_bindings.check_layout(fields),)
    except Error:
        return fields[5:]
