"""The operators under ``flashsdk.torch``: attention and its gradients for torch's dispatcher.

torch.ops.flashsdk.mha_fwd, mha_bwd, mha_varlen_fwd and mha_varlen_bwd are ``flashsdk.ops`` with
what autograd, torch.compile and functorch ask of an operator: a schema, shapes on fake tensors, a
gradient and a batching rule. An operator takes tensors and numbers only, so a mask crosses as
``Options.mask``, a list of integers, and ``Options.blocks``, all its block lists in one tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from . import _bindings, _frameworks, _torch_flops, ops
from ._bands import no_mask
from ._block_lists import INT32_MAX, LISTS, boolean_mask, check_rank, of_mask
from ._errors import PROBABILITY, Error, InvalidArgument, Unsupported, integer, shown
from ._torch_checks import (
    ONCE_IN_REVERSE,
    SEED,
    check_constant,
    check_rows,
    checked_seed,
    flag,
    length,
    no_gradient_of_fp8,
    no_tangent,
    number,
    tensor,
)
from ._torch_eager import (
    Keywords,
    Operation,
    constant,
    detached,
    last_contiguous,
    native,
    recorded,
)
from ._torch_private import (
    SingleLevelFunction,
    below_autograd,
    has_schema,
    in_forward_mode,
    single_level,
    with_forward_mode,
)
from ._torch_seed import draw_watched_seed
from ._torch_sharding import replicated
from ._torch_threads import on_torch_threads
from .masks import Band, BlockMask, Dense, Mask

Operator: TypeAlias = Callable[..., Any]

_UINT64 = 2**64


class Options(NamedTuple):
    """What every operator takes last, in the order of its schema."""

    bias: Tensor | None
    alibi_slopes: Tensor | None
    # int64, the bits of unsigned numbers: one element, on the CPU; or seed and offset where q is,
    # (2,) or (batch, 2)
    seed: Tensor | None
    blocks: Tensor | None  # int32, flat: offsets and indices of each of LISTS
    mask: Sequence[int]  # of encode_mask
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    deterministic: bool
    backend: str  # "" is the best that fits

    def keywords(self) -> dict[str, Any]:
        """The keywords of ``flashsdk.ops``."""
        keywords = {
            "mask": decode_mask(self.mask, self.blocks),
            "bias": self.bias,
            "alibi_slopes": self.alibi_slopes,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
            "seed": _seed_of(self.seed),
            "deterministic": self.deterministic,
            "backend": self.backend or None,
        }
        return constant(keywords)


# The operators by their names, which cpp/torch has from the same file.
_SCHEMAS = {
    line.partition("(")[0]: line
    for line in Path(__file__).with_name("_torch_schemas.txt").read_text().splitlines()
}


# ---- masks as integers

_BAND, _LAYOUT = 3, 3 + 4 + 4 * len(LISTS)  # how many


def encode_mask(mask: Mask | None, like: Tensor | None = None) -> tuple[list[int], Tensor | None]:
    """A mask as (integers, block lists where ``like`` is); ``decode_mask`` is the inverse.

    Nothing for Dense; left, right, alignment for a Band, where INT32_MAX is unlimited; for a
    BlockMask also block_q, block_k, seqlen_q, seqlen_k and, for each of its four lists, the shape
    of offsets (batch, num_heads, lines + 1) and the number of indices.
    """
    return _integers(mask), _blocks(mask, like)


def _integers(mask: Mask | None) -> list[int]:
    if mask is None or isinstance(mask, Dense):
        return []
    if isinstance(mask, Band):
        return _encode_band(mask)
    code = _encode_band(mask.band or Band())
    code += [*mask.block_size, mask.seqlen_q, mask.seqlen_k]
    # Not the arrays themselves: torch.compile would make an input of each.
    code += mask._sizes
    return code


def _blocks(mask: Mask | None, like: Tensor | None) -> Tensor | None:
    """All lists of a layout in one tensor, beside a DTensor as one."""
    if not isinstance(mask, BlockMask):
        return None
    return replicated(_lists(mask, like), like)


def _lists(mask: BlockMask, like: Tensor | None) -> Tensor:
    """A GPU gets them once for each mask."""
    if like is None or not like.is_cuda:
        return torch.from_numpy(mask._flat)
    if torch.compiler.is_compiling():
        return torch.from_numpy(mask._flat).to(like.device)
    copies: dict[torch.device, Tensor] = mask.__dict__.setdefault("_blocks_on_gpu", {})
    if like.device in copies:
        return copies[like.device]
    with torch.inference_mode(False):  # training may come later, and cannot save those of inference
        copy = torch.from_numpy(mask._flat).to(like.device)
    if _frameworks.of(copy).lasting(copy):
        copies[like.device] = copy
    return copy


def _encode_band(band: Band) -> list[int]:
    left = INT32_MAX if band.left is None else band.left
    right = INT32_MAX if band.right is None else band.right
    return [left, right, int(band.alignment == "top_left")]


def decode_mask(code: Sequence[int], blocks: Tensor | None) -> Dense | Band | ops.PlacedLayout:
    """The mask of ``encode_mask``; its arrays are views of ``blocks``, and are not read."""
    if len(code) not in (0, _BAND, _LAYOUT):
        raise InvalidArgument(f"mask: {len(code)} integers; those of encode_mask")
    if blocks is not None and len(code) != _LAYOUT:
        raise InvalidArgument("blocks: given; none, as mask is no layout")
    if blocks is None and len(code) == _LAYOUT:
        raise InvalidArgument("blocks: not given; the lists of the layout that mask is")
    if not code:
        return Dense()
    left, right, top_left, *rest = code
    band = Band(left, right, "top_left" if top_left else "bottom_right")
    if blocks is None:
        return band
    block_q, block_k, seqlen_q, seqlen_k, *sizes = rest
    # No BlockMask: all lists of one are checked, and this one would be for a single call.
    flat: Any = blocks if blocks.is_cuda else blocks.numpy()  # whose views take less time
    placed = []
    for _ in LISTS:
        batch, num_heads, ends, listed, *sizes = sizes
        begin, end = batch * num_heads * ends, batch * num_heads * ends + listed
        placed += [flat[:begin].reshape(batch, num_heads, ends), flat[begin:end]]
        flat = flat[end:]
    return ops.PlacedLayout((block_q, block_k), seqlen_q, seqlen_k, band, tuple(placed))


# ---- operators

# Not torch.library.custom_op: its first call imports the compiler, which takes seconds.
_library: Any = torch.library.Library("flashsdk", "DEF")  # type: ignore[no-untyped-call]
# libflashsdk_torch was loaded before: operators and their kernels are its own.
_in_cpp = hasattr(torch.ops.flashsdk, "mha_fwd")


def _define(
    name: str,  # "mha" or "mha_varlen"
    run_forward: Callable[..., Any],  # of flashsdk.ops
    run_backward: Callable[..., Any],
    packed: int,  # arguments between the tensors and the options, of packed sequences: 0 or 4
) -> Operation:
    """Makes torch.ops.flashsdk.<name>_fwd and <name>_bwd, and returns how to call them.

    Packed tensors have no batch dimension, lse is then (num_heads, total_q).
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        tensors, options = map(detached, (q, k, v)), Options(*rest[packed:])
        with torch.no_grad():  # the operator is what autograd records
            out, lse = run_forward(*tensors, *rest[:packed], **options.keywords())
        return out, lse

    def fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        options = Options(*rest[packed:])
        _check_devices(q, k=k, v=v, bias=options.bias, alibi_slopes=options.alibi_slopes)
        if options.seed is not None and options.seed.numel() != 1:  # one element is on the CPU
            _check_devices(q, seed=options.seed)
        if packed:
            _check_devices(q, cu_seqlens_q=rest[0], cu_seqlens_k=rest[1])
        *batch, seqlen, num_heads, _ = q.shape
        out = q.new_empty((*batch, seqlen, num_heads, v.shape[-1]))
        return out, q.new_empty((*batch, num_heads, seqlen), dtype=torch.float32)

    def backward(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        # Autograd's gradients are often expanded or transposed: that of out.sum() has strides 0.
        dlse = None if dlse is None else last_contiguous(detached(dlse))
        tensors = map(detached, (last_contiguous(dout), *rest[:5]))
        options = Options(*rest[5 + packed :]).keywords()
        dq, dk, dv = run_backward(*tensors, *rest[5 : 5 + packed], dlse=dlse, **options)
        return dq, dk, dv

    def fake_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        return dq, dk, dv

    def gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments, rest = _saved(ctx, dout, dlse)
        return *gradients(*arguments, *rest), *([None] * len(rest))

    gradients = _operator(f"{name}_bwd", backward, fake_backward, _save_nothing, _refuse)
    differentiable = _operator(f"{name}_fwd", forward, fake_forward, _save, gradient)
    _torch_flops.register(name)
    return Operation(differentiable, gradients, run_forward, run_backward, _encoded, _beside)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # no dlse for those who do not use lse
    tensors = [x if isinstance(x, Tensor) else None for x in inputs[3:]]
    ctx.save_for_backward(*inputs[:3], *output, *tensors)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs[3:]]


def _saved(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None
) -> tuple[tuple[Tensor | None, ...], list[Any]]:
    """What a backward takes: dout, dlse, q, k, v, out, lse, and the forward's other arguments."""
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    if dout is None:  # only lse is used
        dout = torch.zeros_like(out)
    rest = [n if x is None else x for x, n in zip(tensors, ctx.numbers, strict=True)]
    return (dout, dlse, q, k, v, out, lse), rest


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise Unsupported(f"create_graph: True; False, {ONCE_IN_REVERSE}")


def _check_devices(q: Tensor, **others: Tensor | None) -> None:
    check_devices("q", q, others)


def check_devices(first: str, like: Tensor, others: dict[str, Tensor | None]) -> None:
    """As the library does, which is not asked where one tensor of many is on meta."""
    for name, x in others.items():
        if x is not None and x.device != like.device:
            raise InvalidArgument(f"{name}: on {x.device}; {like.device}, where {first} is")


def _operator(
    name: str,
    kernel: Operator,
    fake: Operator,
    save: Operator,
    gradient: Operator,
) -> Operator:
    """Defines an operator with a gradient and a batching rule; returns it."""
    if not _in_cpp:
        _library.define(_SCHEMAS[name])
    operator = getattr(torch.ops.flashsdk, name).default
    if not has_schema(operator, f"flashsdk::{_SCHEMAS[name]}"):
        raise ImportError(f"libflashsdk_torch: another version; {_bindings.__version__}, as here")
    names = [argument.name for argument in operator._schema.arguments]
    constants = [names.index(name) for name in ("bias", "alibi_slopes")]

    def forward(keys: Any, *inputs: Any) -> Any:
        # A Function turns both off, and so for the transforms of torch.func that lie below.
        with torch.enable_grad(), with_forward_mode():
            return below_autograd(operator, keys, inputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        save(ctx, inputs[1:], output)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradient(ctx, *grads)

    methods = (forward, setup_context, backward)
    members = {method.__name__: staticmethod(method) for method in methods}
    function: Any = type(name, (SingleLevelFunction,), members)

    def differentiable(keys: Any, *inputs: Any) -> Any:
        if in_forward_mode():
            for argument, x in zip(names, inputs, strict=True):
                no_tangent(argument, x)
        # Again: what vmap and functionalize wrap says that it requires none until it comes here.
        for i in constants:
            if inputs[i] is not None:
                check_constant(names[i], inputs[i])
        if not recorded(x for x in inputs if isinstance(x, Tensor)):
            return below_autograd(operator, keys, inputs)
        no_gradient_of_fp8(inputs[names.index("k")])
        # Not Function.apply, which goes through the transforms of torch.func: the dispatcher does
        # so itself, and comes here once for each.
        with single_level():
            return function.apply(keys, *inputs)

    _library.impl(name, kernel, "CompositeExplicitAutograd")
    # Not torch.library.register_autograd: it knows neither torch.func nor tangents, and loses them.
    _library.impl(name, differentiable, "Autograd", with_keyset=True)
    native.skip_autograd(name)
    torch.library.register_fake(operator, fake, lib=_library)
    batched = functools.partial(_one_by_one, operator)
    torch.library.register_vmap(operator, batched, lib=_library)
    return operator  # type: ignore[no-any-return]


def _one_by_one(operator: Operator, info: Any, dims: Sequence[Any], *args: Any) -> Any:
    """The batching rule of torch.vmap: a loop, as each call is parallel in itself."""
    size = info.batch_size
    batched = [isinstance(d, int) for d in dims]  # or None, or a list of it for a list of numbers
    if size == 0:  # one call tells the shapes
        one = [
            x.new_zeros(x.movedim(d, 0).shape[1:]) if b else x
            for x, d, b in zip(args, dims, batched, strict=True)
        ]
        results = operator(*one)
        return tuple(r.new_empty((0, *r.shape)) for r in results), (0,) * len(results)
    given = [x.unbind(d) if b else [x] * size for x, d, b in zip(args, dims, batched, strict=True)]
    results = zip(*(operator(*one) for one in zip(*given, strict=True)), strict=True)
    stacked = tuple(torch.stack(result) for result in results)
    return stacked, (0,) * len(stacked)


# ---- what the public functions share


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: tuple[Tensor, Tensor, int, int] | None = None,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    backend: ops.Backend | None = None,
    more: Any = None,
    copy: bool = False,
) -> tuple[Tensor, Tensor]:
    """out, lse of ``flashsdk.torch.attention``, or of ``varlen_attention`` if ``packed``.

    ``more`` is of ``_torch_more``, for what few calls have. ``copy`` copies q, k and v where their
    last dimension is not contiguous. Everything is checked here, or is the library's to check; what
    the dispatcher refuses is no ``Error``.
    """
    given = mask
    boolean = isinstance(mask, Tensor)
    if boolean:
        check_constant("mask", tensor("mask", mask))
        mask, bias = None, boolean_mask(mask, bias)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rows(name, x, packed=packed is not None)
    lengths: tuple[Any, ...] = ()
    if packed is not None:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packed
        lengths = (
            tensor("cu_seqlens_q", cu_seqlens_q),
            tensor("cu_seqlens_k", cu_seqlens_k),
            length("max_seqlen_q", max_seqlen_q),
            length("max_seqlen_k", max_seqlen_k),
        )
    keywords = _checked(
        mask, bias, alibi_slopes, softmax_scale, softcap, dropout_p, seed, deterministic, backend
    )
    if copy:
        q, k, v = map(last_contiguous, (q, k, v))
    q, k, v = _autocast(q, k, v)
    operation = _mha if packed is None else _mha_varlen
    try:
        if more is not None:
            return more.attend(q, k, v, lengths, keywords)  # type: ignore[no-any-return]
        return operation.attend(q, k, v, lengths, keywords)
    except Error as e:
        if not boolean:
            raise
        raise of_mask(e, given) from None


def trusted_lse(dtype: torch.dtype) -> float:
    """Up to which |lse| a backward relies on it; beyond, it takes the sum of the row anew.

    One that is given a part of the keys must not: it would take that part's sum for the whole.
    """
    return 32.0 if dtype == torch.float32 else 1024.0  # docs/numerics.md of the sources


def _checked(
    mask: object,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    seed: int | Tensor | None,
    deterministic: bool | None,
    backend: ops.Backend | None,
) -> Keywords:
    """The keywords of a call as ``flashsdk.ops`` takes them, or an Error."""
    if not (mask is None or isinstance(mask, (Dense, Band, BlockMask))):
        raise no_mask(mask)
    if bias is not None:
        check_constant("bias", tensor("bias", bias))
        check_rank(bias)
    if alibi_slopes is not None:
        check_constant("alibi_slopes", tensor("alibi_slopes", alibi_slopes))
    if isinstance(seed, Tensor):
        seed = checked_seed(seed)
    elif seed is not None:
        seed = integer("seed", seed, 0, _UINT64 - 1, allowed=SEED)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if backend is not None and (not isinstance(backend, str) or not backend):
        raise InvalidArgument(f'backend: {shown(backend)}; "cpu", "sm80", "sm90" or None')
    return {
        "mask": mask,
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "softmax_scale": None if softmax_scale is None else number("softmax_scale", softmax_scale),
        "softcap": number("softcap", softcap),
        "dropout_p": number("dropout_p", dropout_p, allowed=PROBABILITY),
        "seed": seed,
        "deterministic": flag("deterministic", deterministic),
        "backend": backend,
    }


def _encoded(keywords: Keywords, like: Tensor) -> Options:
    """Keywords of ``flashsdk.ops`` as an operator takes them."""
    _, _, seed, blocks = _beside(keywords, like)
    mask, backend = _integers(keywords["mask"]), keywords["backend"] or ""
    return Options(**{**keywords, "mask": mask, "blocks": blocks, "seed": seed, "backend": backend})


def _beside(keywords: Keywords, like: Tensor) -> tuple[Tensor | None, ...]:
    """The tensors among the Options, in their order."""
    seed = _seed(keywords["seed"], like) if keywords["dropout_p"] != 0 else None
    return keywords["bias"], keywords["alibi_slopes"], seed, _blocks(keywords["mask"], like)


def _seed(seed: int | Tensor | None, like: Tensor) -> Tensor:
    """As ``Options`` have it."""
    if seed is None:
        return draw_watched_seed(like)
    if isinstance(seed, Tensor):
        return seed
    return torch.full((1,), seed - _UINT64 * (seed >= 2**63), dtype=torch.int64, device="cpu")


def _seed_of(seed: Tensor | None) -> int | Tensor:
    """The inverse of ``_seed``."""
    if seed is None:
        return 0
    return int(seed) % _UINT64 if seed.numel() == 1 else seed


def _autocast(*tensors: Tensor) -> Iterator[Tensor]:
    """What torch.autocast does for scaled_dot_product_attention."""
    device = tensors[0].device.type
    # Dynamo of PyTorch 2.11 and older cannot trace torch.amp.is_autocast_available.
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return iter(tensors)
    dtype = torch.get_autocast_dtype(device)
    keep = (torch.float64, torch.float8_e4m3fn)
    return (x.to(dtype) if x.is_floating_point() and x.dtype not in keep else x for x in tensors)


_mha = _define("mha", on_torch_threads(ops.mha_fwd), on_torch_threads(ops.mha_bwd), 0)
_mha_varlen = _define(
    "mha_varlen", on_torch_threads(ops.mha_varlen_fwd), on_torch_threads(ops.mha_varlen_bwd), 4
)
if not _in_cpp:
    native.register_operators()
