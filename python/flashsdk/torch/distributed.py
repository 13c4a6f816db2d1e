"""Attention to a sequence that is sharded over the processes of torch.distributed.

Every process holds two chunks of the sequence: of 2n equal ones, the process of rank r of n has the
r-th and the r-th from the end. Under a causal mask early queries see few keys and late ones many,
so all processes have the same work. ``shard_sequence`` cuts whole tensors so,
``unshard_sequence`` puts them together again, and ``positions`` says where each row stands.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from .._errors import Error, InvalidArgument, Unsupported, integer, real, shown, type_name
from .._torch_checks import check_rows, flag, no_tangent, shape_of, tensor
from .._torch_eager import Keywords, detached, last_contiguous, recorded
from .._torch_ops import _autocast, _checked
from .._untraced import untraced
from ..masks import Band, Causal, Dense, Mask
from ..ops import Backend
from ._ring import ContextParallel, Ring
from ._ring import forward as ring_forward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    Mesh: TypeAlias = DeviceMesh | dist.ProcessGroup | None

__all__ = ["context_parallel", "positions", "shard_sequence", "unshard_sequence"]


class _Keywords(TypedDict, total=False):
    """Those of ``context_parallel`` but return_lse, for type checkers."""

    mask: Mask | None
    softmax_scale: float | None
    softcap: float
    deterministic: bool | None
    backend: Backend | None
    bias: None
    alibi_slopes: None
    sink: None
    dropout_p: float


@overload
def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh = ...,
    *,
    return_lse: Literal[False] = ...,
    **keywords: Unpack[_Keywords],
) -> Tensor: ...
@overload
def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh = ...,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh = ...,
    *,
    return_lse: bool,
    **keywords: Unpack[_Keywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
@untraced
def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh = None,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: Backend | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this process's queries to the keys of all processes, exact and differentiable.

    All processes call it, and all run its backward. Keys and values go around a ring while
    attention to those that have come is computed; each process holds two others' at most.

    q
        (batch, seqlen_q, num_heads, head_dim), the rows of this process: as ``shard_sequence``
        cuts them, where the mask is causal. All processes have the same shapes and dtypes.
    k, v
        (batch, seqlen_k, num_heads_kv, head_dim) and (batch, seqlen_k, num_heads_kv, head_dim_v)
        likewise. Causal: seqlen_k is seqlen_q, and even.
    mesh
        A ``DeviceMesh`` of one dimension, as mesh["sequence"] is, or a process group; None is the
        default group.
    mask
        None, or ``flashsdk.Causal()`` of the whole sequence.
    softmax_scale, softcap, deterministic, backend
        Those of ``flashsdk.torch.attention``.
    return_lse
        Also return the logarithm of the sum of exp(scores), over all keys. It has a gradient.
    bias, alibi_slopes, sink, dropout_p
        Not supported: an Error unless None, or 0.

    Returns out (batch, seqlen_q, num_heads, head_dim_v), and lse float32 (batch, num_heads,
    seqlen_q) if asked for. Parts are joined in float32, always in the same order.

    Raises ``flashsdk.Error``, one line: on all processes, where one is refused or their arguments
    differ. On a GPU, which would have to be waited for, they are compared in the first call of each
    shape alone. Where they differ in a later one, processes wait for each other, without an Error.
    torch.compile leaves it as it is: it breaks the graph, which fullgraph=True refuses.
    """
    ring = Ring(_group(mesh))
    try:
        _refuse(bias=bias, alibi_slopes=alibi_slopes, sink=sink, dropout_p=dropout_p)
        causal = _is_causal(mask)
        wanted = flag("return_lse", return_lse)
        options = (softmax_scale, softcap, 0.0, 0, deterministic, backend)
        keywords = _checked(None, None, None, *options)
        for name in ("softmax_scale", "softcap"):  # an integer may be too large for a float
            keywords[name] = None if keywords[name] is None else real(name, keywords[name])
        call = _Call(*_checked_parts(q, k, v), causal, keywords)
    except Error:
        if ring.size > 1:
            _tell_of_refusal(ring, (q, k, v))
        raise
    _compare(ring, call)
    arguments = (call.q, call.k, call.v, ring, causal, call.keywords)
    if call.trained:
        out, lse = ContextParallel.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        out, lse = ring_forward(*arguments)
    return (out, lse) if wanted else out


def shard_sequence(x: Tensor, mesh: Mesh = None, *, dim: int = 1) -> Tensor:
    """The rows of this process, of a tensor that every process has whole.

    ``dim`` is that of the sequence; its length is a multiple of 2n, of n processes. ``mesh`` as in
    ``context_parallel``. Differentiable. Raises ``flashsdk.Error``.
    """
    ring = Ring(_group(mesh))
    dim = _checked_dim(x, dim)
    rows = _positions(x.shape[dim], ring.rank, ring.size)
    return x.index_select(dim, rows.to(x.device))


@untraced
def unshard_sequence(x: Tensor, mesh: Mesh = None, *, dim: int = 1) -> Tensor:
    """The inverse of ``shard_sequence``: the whole tensor, on every process.

    All processes call it, with the same shape. It has no gradient: a tensor that requires one is an
    Error.
    """
    ring = Ring(_group(mesh))
    dim = _checked_dim(x, dim)
    if recorded((x,)):
        raise Unsupported("x: a tensor that requires a gradient; x.detach(), as this has none")
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ring.size)]
    dist.all_gather(parts, x.contiguous(), group=ring.group)
    seqlen = x.shape[dim] * ring.size
    order = torch.cat([_positions(seqlen, rank, ring.size) for rank in range(ring.size)])
    return torch.cat(parts, dim).index_select(dim, order.argsort().to(x.device))


def positions(seqlen: int, mesh: Mesh = None) -> Tensor:
    """int64 (seqlen / n,), on the CPU: where in the whole sequence each row of this process stands.

    For what depends on it, as rotary embeddings do. ``seqlen`` is the whole sequence's, a multiple
    of 2n, of n processes. Raises ``flashsdk.Error``.
    """
    ring = Ring(_group(mesh))
    return _positions(integer("seqlen", seqlen, 0), ring.rank, ring.size)


def _positions(seqlen: int, rank: int, size: int) -> Tensor:
    if seqlen % (2 * size):
        allowed = f"a multiple of {2 * size}, two chunks for each of {size} processes"
        raise InvalidArgument(f"seqlen: {seqlen}; {allowed}")
    chunks = torch.arange(seqlen).chunk(2 * size) if seqlen else [torch.arange(0)] * 2 * size
    return torch.cat([chunks[rank], chunks[-1 - rank]])


# ---- checks


def _group(mesh: Mesh) -> dist.ProcessGroup:
    """The process group that ``mesh`` means, or an Error."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgument(
            "mesh: no process group; one, after torch.distributed.init_process_group()"
        )
    group: Any = dist.group.WORLD if mesh is None else mesh
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise InvalidArgument(
                f"mesh: a DeviceMesh of {group.ndim} dimensions; of one, as mesh[name] is"
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument("mesh: a group without this process; one that it is in")
    if not isinstance(group, dist.ProcessGroup):
        given = shown(mesh) if isinstance(mesh, (int, str)) else f"a {type_name(mesh)}"
        raise InvalidArgument(f"mesh: {given}; a DeviceMesh, a process group or None")
    return group


def _refuse(**given: Any) -> None:
    """What would have to know where in the sequence each part stands, or who has it."""
    for name, value in given.items():
        if value is not None and (isinstance(value, Tensor) or value != 0):
            what = "a tensor" if isinstance(value, Tensor) else shown(value)
            allowed = "0" if name == "dropout_p" else "None"
            raise Unsupported(f"{name}: {what}; {allowed}, over a sharded sequence")


def _is_causal(mask: object) -> bool:
    if mask is None or isinstance(mask, Dense):
        return False
    if isinstance(mask, Band) and (mask.left, mask.right) == (None, 0):
        return True
    given = "a tensor" if isinstance(mask, Tensor) else shown(mask)
    raise Unsupported(f"mask: {given}; Causal() or None, over a sharded sequence")


def _checked_dim(x: Tensor, dim: int) -> int:
    dims = tensor("x", x).dim()
    if dims == 0:
        raise InvalidArgument(f"x: {shape_of(x)}; one dimension or more")
    return integer("dim", dim, -dims, dims - 1)


def _checked_parts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as they are sent and received, or an Error."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rows(name, x, packed=False)
        if hasattr(x, "to_local"):
            raise InvalidArgument(f"{name}: a DTensor; the part that is here, {name}.to_local()")
        no_tangent(name, x)
    q, k, v = _autocast(q, k, v)
    return last_contiguous(q), k.contiguous(), v.contiguous()


@dataclass(frozen=True)
class _Call:
    """What was given here, as far as one process can check it."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    keywords: Keywords

    @property
    def trained(self) -> bool:
        return recorded((self.q, self.k, self.v))

    def check(self, ring: Ring) -> None:
        """Raises what attention to any of the parts, or its backward, would raise."""
        q, k, v = (detached(x) for x in (self.q, self.k, self.v))
        if k.dtype is torch.float8_e4m3fn:
            raise Unsupported(
                "k: dtype float8_e4m3fn; the dtype of q, as parts come without descales"
            )
        if self.causal and (q.shape[1] != k.shape[1] or q.shape[1] % 2):
            given = f"{k.shape[1]} keys and {q.shape[1]} queries here"
            raise InvalidArgument(f"k: {given}; as many, an even number, as mask is causal")
        masks: list[Mask | None] = [Causal()] if self.causal else [None]
        if self.causal and ring.size > 1:
            masks.append(None)  # of others' keys
        for mask in masks:
            keywords = {**self.keywords, "mask": mask}
            _check_kernel("fwd", q, k, v, keywords)
            if not self.trained:
                continue
            _check_kernel("bwd", q, k, v, keywords)
            if ring.size > 1:  # and as ``Sums`` may want it
                bias = q.new_empty((q.shape[0], q.shape[2], q.shape[1], 1), dtype=torch.float32)
                _check_kernel("bwd", q, k, v, {**keywords, "bias": bias, "backend": None})

    def numbers(self, refused: bool) -> list[int]:
        """Of all that has to be the same everywhere, exactly: ``_in_words`` reads them."""
        tensors = (self.q, self.k, self.v)
        scale, softcap = self.keywords["softmax_scale"], self.keywords["softcap"]
        return [
            _UNFIT if refused else _FIT,
            *(n for x in tensors for n in x.shape),
            *(_code(_DTYPES, x.dtype) for x in tensors),
            self.causal,
            self.trained,
            scale is not None,
            _bits(0.0 if scale is None else scale),
            _bits(softcap),
            self.keywords["deterministic"],
            _code(_BACKENDS, self.keywords["backend"]),
        ]


def _check_kernel(
    op: Literal["fwd", "bwd"], q: Tensor, k: Tensor, v: Tensor, keywords: Keywords
) -> None:
    why = ops.explain(q, k, v, op=op, **keywords)
    if not why.kernel:
        reasons = {reason: name for name, reason in why.refused}  # each once
        text = "; ".join(f"{name}: {reason}" for reason, name in reasons.items())
        allowed = "what flashsdk.kernels() lists" + (f" ({text})" if text else "")
        raise Unsupported(f"mha_{op}: no kernel for these arguments; {allowed}")


# ---- the same on all processes

# The first of the numbers that are gathered.
_REFUSED = 0  # the others say nothing: there was no ``_Call``
_UNFIT = 1  # ``_Call.check`` raised
_FIT = 2
_COUNT = 23  # of ``_Call.numbers``

# What calls on a GPU have compared so far. All processes forget it together, with the group.
_compared: WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, ...]]] = WeakKeyDictionary()


def _compare(ring: Ring, call: _Call) -> None:
    """Raises an Error on all processes, where one is refused or their arguments differ.

    Else one would wait for ever for what another does not send.
    """
    error: Error | None = None
    try:
        call.check(ring)
    except Error as e:
        error = e
    if ring.size > 1:
        _compare_numbers(ring, call.numbers(error is not None), call.q.device, error)
    elif error is not None:
        raise error


def _compare_numbers(
    ring: Ring, mine: list[int], device: torch.device, error: Error | None
) -> None:
    remembers = device.type != "cpu"  # there is nothing to wait for on a CPU
    if remembers and tuple(mine) in _compared.get(ring.group, ()):
        return
    everyone = [numbers.tolist() for numbers in _gathered(ring, mine, device)]
    _raise_of(everyone, _REFUSED)
    first, *others = (_in_words(numbers) for numbers in everyone)
    for rank, words in enumerate(others, 1):
        for name, text in words.items():
            if text != first[name]:
                raise InvalidArgument(f"{name}: {text} on rank {rank}; {first[name]}, as on rank 0")
    if error is not None:
        raise error
    _raise_of(everyone, _UNFIT)
    if remembers:
        _compared.setdefault(ring.group, set()).add(tuple(mine))


def _tell_of_refusal(ring: Ring, given: tuple[object, ...]) -> None:
    """Takes part in the comparison of the others, which raise then, too.

    It does not wait for a GPU: in a later call the others do not compare, and the Error is to come.
    """
    device = "cuda" if dist.get_backend(ring.group) == "nccl" else "cpu"
    where = next((x.device for x in given if isinstance(x, Tensor)), torch.device(device))
    _gathered(ring, [_REFUSED] * _COUNT, where)


def _gathered(ring: Ring, mine: list[int], device: torch.device) -> list[Tensor]:
    assert len(mine) == _COUNT
    numbers = torch.tensor(mine, device=device)
    gathered = [torch.empty_like(numbers) for _ in range(ring.size)]
    dist.all_gather(gathered, numbers, group=ring.group)
    return gathered


def _raise_of(everyone: list[list[int]], state: int) -> None:
    for rank, numbers in enumerate(everyone):
        if numbers[0] == state:
            raise InvalidArgument(f"mesh: rank {rank} was refused; its own message says why")


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BACKENDS = (None, *get_args(Backend))


def _code(known: tuple[Any, ...], value: Any) -> int:
    return known.index(value) if value in known else len(known)


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _number(bits: int) -> str:
    return str(struct.unpack("<d", struct.pack("<q", bits))[0])


def _in_words(numbers: list[int]) -> dict[str, str]:
    """What ``_Call.numbers`` are, by the names of arguments."""
    *_, causal, trained, has_scale, scale, softcap, deterministic, backend = numbers
    words = {
        "mask": "Causal()" if causal else "None",
        "requires_grad": str(bool(trained)),
        "softmax_scale": _number(scale) if has_scale else "None",
        "softcap": _number(softcap),
        "deterministic": str(bool(deterministic)),
        "backend": repr(_BACKENDS[backend]) if backend < len(_BACKENDS) else "another",
    }
    for i, name in enumerate("qkv"):
        code = numbers[13 + i]
        dtype = str(_DTYPES[code]) if code < len(_DTYPES) else "another dtype"
        words[name] = f"shape {tuple(numbers[4 * i + 1 : 4 * i + 5])} of {dtype}"
    return words
