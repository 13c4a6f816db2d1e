"""The mask of a forward of transformers, as kernels take it: bands, lengths, packed sequences.

transformers asks ``make_mask`` once a forward and hands what it returns to each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from .._errors import InvalidArgument, Unsupported, has
from .._torch_private import is_tracing, is_wrapped
from ..masks import Band
from ._rows import Places, offsets

# So few queries read K and V hardly more often than packing them would.
_FEW_QUERIES = 16


class Packed(NamedTuple):
    """Sequences behind one another: the lengths of ``varlen_attention``, and where rows lie."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    queries: Places | None = None  # of (batch, seqlen_q); None: all rows, in order
    keys: Places | None = None
    from_start: bool = False  # of each row of the batch one sequence, from its first place on


@dataclass
class Seen:
    """Which keys each query sees, as kernels take it.

    Models hand it on as they would the 4-d tensor that PyTorch's function takes. To one that
    looks into it, or computes with it, it is that tensor, made when it is needed.
    """

    shape: tuple[int, ...]  # (batch, 1, seqlen_q, seqlen_k)
    known: bool = False  # all that follows says it; else only the tensor does
    band: Band | None = None
    used: int = 0  # keys from here on are seen by nobody
    padding: Tensor | None = None  # bool (batch, used), True = a key
    packed: Packed | None = None
    make: Callable[[], Tensor] = field(repr=False, default=lambda: torch.empty(0))
    made: Tensor | None = None
    looked: list[tuple[Tensor, Packed | None]] = field(repr=False, default_factory=list)

    ndim = 4
    dtype = torch.bool

    def tensor(self) -> Tensor:
        """bool (batch, 1, seqlen_q, seqlen_k), True = attend; made once for all layers."""
        if self.made is None:
            self.made = self.make()
        return self.made

    def dim(self) -> int:
        return self.ndim

    def to(self, *args: Any, **options: Any) -> Seen | Tensor:
        """On another device, or the 4-d tensor where more is asked for."""
        given = {type(x) for x in (*args, *options.values())}
        if not given <= {torch.device, str, int, bool} or "dtype" in options:
            return self.tensor().to(*args, **options)

        def moved(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(moved, x))
            return x.to(*args, **options) if isinstance(x, Tensor) else x

        packed = None if self.packed is None else Packed(*map(moved, self.packed))
        there = replace(self, padding=moved(self.padding), packed=packed, made=moved(self.made))
        there.make = lambda: self.tensor().to(*args, **options)
        return there

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for what nobody has
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Seen | Tensor:
        part = self.tensor()[index]
        return Seen(tuple(part.shape), make=lambda: part) if part.dim() == 4 else part

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "").strip("_") in ("add", "radd", "iadd"):
            allowed = 'one that calls AttentionInterface, or attn_implementation="eager"'
            raise Unsupported(f"attention_mask: added to scores by a model; {allowed}")

        def tensors(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return type(x)(map(tensors, x))
            return x.tensor() if isinstance(x, Seen) else x

        return function(*tensors(args), **{k: tensors(x) for k, x in (kwargs or {}).items()})


class _Pattern(NamedTuple):
    """-left <= key - query <= right, by their positions in the text; None is unlimited."""

    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None  # (batch, seqlen): the number of the document a token is of

    def __and__(self, other: _Pattern) -> _Pattern:
        lefts = [x for x in (self.left, other.left) if x is not None]
        rights = [x for x in (self.right, other.right) if x is not None]
        documents = self.documents if other.documents is None else other.documents
        return _Pattern(min(lefts, default=None), min(rights, default=None), documents)


def make_mask(**call: Any) -> Seen | Tensor:
    """The function of AttentionMaskInterface, with the arguments of transformers' own.

    For a step of decoding with a cache of one size, int32 (batch, 1, 1, 1): how many of its keys
    are used. Booleans (batch, 1, 1, seqlen_k), True = attend, for others of these and for
    a step with padding; else ``Seen``. On a GPU the host waits once where there may be padding, or
    where documents are packed, and never while torch.compile traces. Where neither was seen, the
    first layer that is given ``position_ids`` of several queries waits for these, once as well.

    Never None, as it might be for a causal mask: a model that computes its attention by itself
    would take that for no mask. With ``Seen`` it comes to an Error.
    """
    given: Tensor | Seen | None = call.get("attention_mask")
    if isinstance(given, Seen):  # made before, as generate does for some caches
        return given
    q_length, q_offset = call["q_length"], call.get("q_offset", 0)
    kv_length, kv_offset = call["kv_length"], call.get("kv_offset", 0)
    tracing = torch.compiler.is_compiling() or is_tracing()
    shape = (call["batch_size"], 1, q_length, kv_length)
    seen = Seen(shape, make=lambda: _dense(call))
    pattern = _traced_pattern(call) if tracing else _pattern(call)
    if q_length == 1 and not call.get("allow_is_causal_skip", True):
        # Of a cache of one size: the same shapes at each step.
        used = _used_keys(call, pattern, tracing)
        return _dense(call) if used is None else used
    if pattern is None or (tracing and isinstance(q_offset, Tensor)):
        return seen
    # Of rows and columns from here on, as the kernels count.
    shift = int(q_offset) - int(kv_offset)
    left = None if pattern.left is None else pattern.left - shift
    right = None if pattern.right is None else pattern.right + shift
    if left is not None and left >= q_length - 1:
        left = None
    if right is not None and right >= kv_length - 1:
        right = None
    used = kv_length if right is None else max(min(kv_length, right + q_length), 0)
    band = None if left is None and right is None else Band(left, right, "top_left")
    described = replace(seen, known=True, band=band, used=used)

    if pattern.documents is not None:
        if given is not None or shift != 0 or q_length != kv_length:
            return seen
        numbers = pattern.documents
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        return replace(described, packed=_documents(begins.cpu(), numbers.device))
    if given is not None:
        unread = tracing or is_wrapped(given)
        given = _of_rows(given, shape[0], tracing)
        described = _padded(described, given[:, kv_offset : kv_offset + used], shift, unread)
        if q_length == 1 and described.padding is not None:
            return _dense(call)
    return described


def _used_keys(call: dict[str, Any], pattern: _Pattern | None, tracing: bool) -> Tensor | None:
    """int32 (batch, 1, 1, 1): how many keys one query sees, from the first on; None of others.

    Four dimensions, as models may slice the last one.
    """
    kv_length, given = call["kv_length"], call.get("attention_mask")
    if pattern is None or pattern.right != 0 or pattern.documents is not None:
        return None
    if pattern.left is not None and pattern.left < kv_length - 1:  # the first one is not seen
        return None
    device = torch.device(call.get("device", "cpu"))
    kv_offset = call.get("kv_offset", 0)
    at = call.get("q_offset", 0)  # a number, or a tensor where the cache keeps one
    if isinstance(at, Tensor):
        used = at.to(device, torch.int32).reshape(1)
    else:
        used = torch.full((1,), at, dtype=torch.int32, device=device)
    used = (used + 1 - kv_offset).clamp(0, kv_length)
    if given is not None:
        if tracing or is_wrapped(given):
            return None
        keys = given[:, kv_offset:]
        unused = torch.arange(keys.shape[1], device=device) >= used
        if not bool((keys.bool() | unused).all()):  # the host waits, once a mask
            return None
    of_each: Tensor = used.reshape(1, 1, 1, 1).repeat(call["batch_size"], 1, 1, 1)
    return of_each


def is_lengths(mask: Tensor, q: Tensor) -> bool:
    """Whether it is what ``_used_keys`` makes, and not a caller's own mask of integers."""
    return q.shape[1] == 1 and mask.shape[1:] == (1, 1, 1)


def _dense(call: dict[str, Any]) -> Tensor:
    """What transformers makes for PyTorch's function: bool (batch, 1, seqlen_q, seqlen_k)."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor = masking_utils.AttentionMaskInterface()["sdpa"](**{**call, **skips})
    return mask


def _pattern(call: dict[str, Any]) -> _Pattern | None:
    """What a mask function of transformers says; None of one that is not known."""
    end = int(call["kv_length"]) + int(call.get("kv_offset", 0))
    by_document = False  # positions are those in a document

    def of(function: Any) -> _Pattern | None:
        if function is masking_utils.causal_mask_function:
            return _Pattern(right=0)
        if function is _own("bidirectional_mask_function"):
            return _Pattern()
        kind = _KINDS.get(getattr(function, "__code__", None))
        if kind is None:
            return None
        cells = function.__closure__ or ()
        held = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in cells)))
        if kind == "and_masks":
            found: _Pattern | None = _Pattern()
            for part in held["mask_functions"]:
                one = of(part)
                found = None if one is None or found is None else found & one
            return found
        if kind == "sliding_window_overlay":
            return _Pattern(left=held["sliding_window"] - 1)
        if kind == "sliding_window_bidirectional_overlay":
            return _Pattern(held["sliding_window"], held["sliding_window"])
        if kind == "packed_sequence_mask_function":
            return _Pattern(documents=held["packed_sequence_mask"])
        if kind == "remap_positions_for_packed_sequence":
            nonlocal by_document
            by_document = True  # in which they ascend one by one, as places in the row do
            return of(held["mask_function"])
        assert kind == "chunked_overlay"
        return _Pattern() if end <= held["chunk_size"] else None

    pattern = of(call["mask_function"])
    return None if by_document and pattern and pattern.documents is None else pattern


def _own(name: str) -> Any:
    """A function of transformers' masking_utils, None in a release without it."""
    return getattr(masking_utils, name, None)


# Their functions of positions are closures: which, is told by their code.
_KINDS: dict[Any, str] = {}
for _name, _arguments in (
    ("and_masks", ()),
    ("sliding_window_overlay", (1,)),
    ("sliding_window_bidirectional_overlay", (1,)),
    ("packed_sequence_mask_function", (None,)),
    ("remap_positions_for_packed_sequence", (None, None)),
    ("chunked_overlay", (1, None)),
):
    if _own(_name) is not None:
        _KINDS[_own(_name)(*_arguments).__code__] = _name


def _traced_pattern(call: dict[str, Any]) -> _Pattern | None:
    """The same while torch.compile traces, which cannot look into a closure.

    A window is told by its size; transformers forbids to skip a mask in which there is more.
    """
    function = call["mask_function"]
    if function is masking_utils.causal_mask_function:
        return _Pattern(right=0)
    if function is _own("bidirectional_mask_function"):
        return _Pattern()
    size = call.get("local_size")
    if size is None or has(call.get("config"), "attention_chunk_size"):
        return None
    if call.get("allow_is_causal_skip", True):
        return _Pattern(size - 1, 0)
    return _Pattern(size, size) if call.get("allow_is_bidirectional_skip", False) else None


def _of_rows(given: Tensor, batch: int, tracing: bool) -> Tensor:
    """A mask of padding with a row for each of the batch; one may stand for all."""
    # What is traced may have a batch of any size.
    if given.dim() != 2 or (not tracing and given.shape[0] not in (1, batch)):
        allowed = f"(batch {batch}, keys), or four dimensions"
        raise InvalidArgument(f"attention_mask: shape {tuple(given.shape)}; {allowed}")
    return given if tracing else given.expand(batch, -1)


def _padded(seen: Seen, padding: Tensor, shift: int, unread: bool) -> Seen:
    """With ``padding``, bool (batch, keys), True = a key: packed sequences where that is right.

    ``unread``: it has no values yet, as under torch.compile and torch.func.vmap.
    """
    batch, _, q_length, _ = seen.shape
    if padding.shape[1] < seen.used:
        padding = torch.nn.functional.pad(padding, (0, seen.used - padding.shape[1]))
    if unread:
        return replace(seen, padding=padding)
    if q_length <= _FEW_QUERIES:
        return seen if bool(padding.all()) else replace(seen, padding=padding)
    lengths = padding.sum(1)
    first = padding.int().argmax(1)
    last = seen.used - 1 - padding.flip(1).int().argmax(1)
    numbers = torch.stack((lengths, first, last)).tolist()  # the host waits, once a mask
    if all(n == seen.used for n in numbers[0]):
        return seen
    in_one_piece = all(n in (0, end + 1 - begin) for n, begin, end in zip(*numbers))
    # Under a band the queries are the keys, and those of padding are left out. Without one they
    # may be another text's, so all are kept.
    alike = shift == 0 and q_length == seen.used
    if not in_one_piece or (seen.band is not None and not alike):
        return replace(seen, padding=padding)
    total = sum(numbers[0])
    cu_seqlens_k = offsets(lengths)
    row = torch.repeat_interleave(lengths, output_size=total)
    column = torch.arange(total, device=row.device) + (first - cu_seqlens_k[:-1])[row]
    packed = Packed(
        cu_seqlens_k, cu_seqlens_k, max(numbers[0]), max(numbers[0]), (row, column), (row, column),
        not any(numbers[1]),
    )  # fmt: skip
    if seen.band is None:
        step = torch.arange(batch + 1, dtype=torch.int32, device=row.device) * q_length
        packed = packed._replace(cu_seqlens_q=step, max_seqlen_q=q_length, queries=None)
    return replace(seen, packed=packed)


def _documents(begins: Tensor, device: torch.device) -> Packed:
    """Of bool (batch, seqlen) on the host, True where one begins: rows of the batch share none."""
    places = begins.flatten().nonzero().flatten()
    ends = torch.cat((places, places.new_tensor([begins.numel()])))
    longest = int(ends.diff().max())
    cu_seqlens = ends.to(dtype=torch.int32, device=device)
    return Packed(cu_seqlens, cu_seqlens, longest, longest)


def begun_anew(seen: Seen, q: Tensor, positions: Any) -> Packed | None:
    """Documents, where ``positions`` of a row begin anew and the keys of a layer are its queries.

    transformers looks at positions only where it has neither a mask nor a cache. Under a mask of
    ones and with a new cache, which models make unless told otherwise, they mean the same.
    """
    batch, seqlen = q.shape[:2]
    if not (seen.known and seen.packed is None and seen.padding is None):
        return None
    alone = seen.band is not None and seen.band.right == 0 and seen.used == seqlen > 1
    if not alone or torch.compiler.is_compiling() or is_tracing():
        return None
    # One without values is of another type, or has no memory.
    if type(positions) is not Tensor or positions.is_meta or is_wrapped(positions):
        return None
    if positions.dim() != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != seqlen:
        return None
    if positions.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if not seen.looked or seen.looked[0][0] is not positions:
        at = positions.cpu()  # the host waits, once a mask
        begins = at == 0
        begins[:, 0] = True
        # Else tokens share positions, or leave some out: they tell of no documents.
        ascend = (at.diff() == 1) | begins[:, 1:]
        found = bool(begins[:, 1:].any() and ascend.all())
        packed = _documents(begins.expand(batch, -1), q.device) if found else None
        seen.looked[:] = [(positions, packed)]  # of all copies of it, as each layer may have one
    return seen.looked[0][1]
