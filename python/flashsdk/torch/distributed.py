"""Attention to a sequence that is sharded over the processes of torch.distributed.

Every process holds two chunks of the sequence: of 2n equal ones, the process of rank r of n has the
r-th and the r-th from the end. Under a causal mask early queries see few keys and late ones many,
so all processes have the same work. ``shard_sequence`` cuts whole tensors so,
``unshard_sequence`` puts them together again, and ``positions`` says where each row stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from .._errors import InvalidArgument, Unsupported, shown, type_name
from .._torch_checks import check_rows, flag, no_tangent, tensor
from .._torch_eager import detached, last_contiguous, recorded
from .._torch_ops import _autocast, _checked
from .._untraced import untraced
from ..masks import Band, Causal, Dense, Mask
from ..ops import Backend
from ._ring import ContextParallel, Ring, forward

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

    Raises ``flashsdk.Error``, one line: on all processes where their shapes differ. On a GPU, which
    would have to be waited for, they are compared in the first call of each shape alone.
    torch.compile leaves it as it is: it breaks the graph, which fullgraph=True refuses.
    """
    ring = Ring(_group(mesh))
    _refuse(bias=bias, alibi_slopes=alibi_slopes, sink=sink, dropout_p=dropout_p)
    causal = _is_causal(mask)
    wanted = flag("return_lse", return_lse)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rows(name, x, packed=False)
        if hasattr(x, "to_local"):
            raise InvalidArgument(f"{name}: a DTensor; the part that is here, {name}.to_local()")
        no_tangent(name, x)
    keywords = _checked(*(None, None, None, softmax_scale, softcap, 0.0, 0, deterministic, backend))
    q, k, v = _autocast(q, k, v)
    trained = recorded((q, k, v))
    _compare(ring, q, k, v, causal, trained)
    if causal and (q.shape[1] != k.shape[1] or q.shape[1] % 2):
        given = f"{k.shape[1]} keys and {q.shape[1]} queries here"
        raise InvalidArgument(f"k: {given}; as many, an even number, as mask is causal")
    # What is sent and received is contiguous; and nothing is sent of what a kernel refuses.
    q, k, v = last_contiguous(q), k.contiguous(), v.contiguous()
    known = {**keywords, "mask": Causal() if causal else None}
    ops.explain(detached(q), detached(k), detached(v), **known)
    if trained:
        out, lse = ContextParallel.apply(q, k, v, ring, causal, keywords)  # type: ignore[no-untyped-call]
    else:
        out, lse = forward(q, k, v, ring, causal, keywords)
    return (out, lse) if wanted else out


def shard_sequence(x: Tensor, mesh: Mesh = None, *, dim: int = 1) -> Tensor:
    """The rows of this process, of a tensor that every process has whole.

    ``dim`` is that of the sequence; its length is a multiple of 2n, of n processes. ``mesh`` as in
    ``context_parallel``. Differentiable. Raises ``flashsdk.Error``.
    """
    ring = Ring(_group(mesh))
    rows = _positions(tensor("x", x).shape[dim], ring.rank, ring.size)
    return x.index_select(dim, rows.to(x.device))


@untraced
def unshard_sequence(x: Tensor, mesh: Mesh = None, *, dim: int = 1) -> Tensor:
    """The inverse of ``shard_sequence``: the whole tensor, on every process.

    All processes call it, with the same shape. It has no gradient: a tensor that requires one is an
    Error.
    """
    ring = Ring(_group(mesh))
    if recorded((tensor("x", x),)):
        raise Unsupported("x: a tensor that requires a gradient; x.detach(), as this has none")
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ring.size)]
    dist.all_gather(parts, x.contiguous(), group=ring.group)
    seqlen = x.shape[dim] * ring.size
    order = torch.cat([_positions(seqlen, rank, ring.size) for rank in range(ring.size)])
    return torch.cat(parts, dim).index_select(dim, order.argsort().to(x.device))


def positions(seqlen: int, mesh: Mesh = None) -> Tensor:
    """int64 (seqlen / n,), on the CPU: where in the whole sequence each row of this process stands.

    For what depends on it, as rotary embeddings do. ``seqlen`` is the whole sequence's, a multiple
    of 2n, of n processes.
    """
    ring = Ring(_group(mesh))
    return _positions(seqlen, ring.rank, ring.size)


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


_compared: set[tuple[Any, ...]] = set()  # by calls on a GPU, so far


def _compare(ring: Ring, q: Tensor, k: Tensor, v: Tensor, causal: bool, trained: bool) -> None:
    """Raises the same Error on all processes where they were given what does not fit together.

    Else one would wait for ever for what another does not send.
    """
    here = [*q.shape, *k.shape, *v.shape, *(_code(x.dtype) for x in (q, k, v)), causal, trained]
    known = (ring.group.group_name, *here)
    if ring.size == 1 or (q.device.type != "cpu" and known in _compared):
        return
    mine = torch.tensor(here, device=q.device)
    gathered = [torch.empty_like(mine) for _ in range(ring.size)]
    dist.all_gather(gathered, mine, group=ring.group)
    first, *others = (_in_words(numbers.tolist()) for numbers in gathered)
    for rank, words in enumerate(others, 1):
        for name, text in words.items():
            if text != first[name]:
                raise InvalidArgument(f"{name}: {text} on rank {rank}; {first[name]}, as on rank 0")
    _compared.add(known)


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _code(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)


def _in_words(numbers: list[int]) -> dict[str, str]:
    """What ``_compare`` gathers, by the names of arguments."""
    *_, causal, trained = numbers
    words = {"mask": "Causal()" if causal else "None", "requires_grad": str(bool(trained))}
    for i, name in enumerate("qkv"):
        code = numbers[12 + i]
        dtype = str(_DTYPES[code]) if code < len(_DTYPES) else "another dtype"
        words[name] = f"shape {tuple(numbers[4 * i : 4 * i + 4])} of {dtype}"
    return words
