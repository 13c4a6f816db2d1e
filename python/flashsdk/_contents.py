"""``FLASHSDK_CHECK=1``: the values of lengths and tables are checked before a call runs.

On a CPU the library checks them itself. On a GPU the host does not read them, and a wrong one makes
a kernel read, or ``kv_append`` write, where it must not. With the variable PyTorch looks at those
of its tensors where they lie, and the host waits for the answer once a call. What is wrong with a
dtype, a shape or a device is left to the library. Imports no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import Any, TypeAlias

from . import _bindings
from ._errors import InvalidArgument, switch

ON = switch("FLASHSDK_CHECK")

# Of one rule: an int64 tensor where the call's are, (is it broken, at which place first, two
# numbers from there), and the error's text as a function of the last three.
Finding: TypeAlias = tuple[Any, Callable[[int, int, int], str]]


def check_call(q: Any, k: Any, packed: _bindings.Packed, options: _bindings.Options) -> None:
    """Raises ``Error`` for lengths or pages of a forward or a backward."""
    if not can_check(q, k):
        return
    if packed:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packed
        findings = [
            *_packed("q", q, q, cu_seqlens_q, max_seqlen_q),
            *_packed("k", q, k, cu_seqlens_k, max_seqlen_k),
        ]
    else:
        seqused_q, seqused_k, _, block_table = options[11:15]
        findings = list(_batched(q, k, seqused_q, seqused_k, block_table))
    raise_first(findings)


def check_append(
    k_cache: Any, k: Any, seqused_k: Any, block_table: Any, rotary_cos: Any, q: Any,
    q_advances: bool,
) -> None:  # fmt: skip
    """The same of ``kv_append``, for its arguments."""
    if not can_check(k_cache, k) or not k.dim() == k_cache.dim() == 4:
        return
    queries = 0
    if _is_tensor(q, 4):
        queries = q.shape[1] if q_advances else 1
    raise_first(_append(k_cache, k, seqused_k, block_table, rotary_cos, queries))


def can_check(*tensors: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not all(isinstance(x, torch.Tensor) for x in tensors):
        return False
    # What is captured has no values yet, and waiting would end the capture.
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def raise_first(findings: Iterable[Finding]) -> None:
    numbers, texts = [], []
    for number, text in findings:
        numbers.append(number)
        texts.append(text)
    if not numbers:
        return
    answer = sys.modules["torch"].stack(numbers).tolist()  # the one time that the host waits
    for (broken, *found), text in zip(answer, texts, strict=True):
        if broken:
            raise InvalidArgument(text(*found))


# ---- the rules, in the order and the words of cpp/src/validate.cpp and kv_append.cpp


def _batched(q: Any, k: Any, seqused_q: Any, seqused_k: Any, block_table: Any) -> Iterator[Finding]:
    if q.dim() != 4 or k.dim() != 4:
        return
    batch, seqlen_q = q.shape[:2]
    if _fits(seqused_q, q, batch):
        yield from used_lengths("seqused_q", seqused_q, "seqlen_q", seqlen_q)
    if not _fits(seqused_k, q, batch):
        return
    if block_table is None:
        yield from used_lengths("seqused_k", seqused_k, "seqlen_k", k.shape[1])
    elif _fits(block_table, q, batch, None):
        pages, page_size = k.shape[:2]
        yield from used_lengths(
            "seqused_k", seqused_k, "seqlen_k", block_table.shape[1] * page_size
        )
        allowed = f"0 to {pages - 1}, the pages of k" if pages else "no page, as k has none"
        begin = seqused_k.new_zeros(batch)
        yield from _pages(block_table, begin, seqused_k, page_size, pages, allowed)


def _packed(side: str, q: Any, x: Any, cu_seqlens: Any, max_seqlen: Any) -> Iterator[Finding]:
    name = f"cu_seqlens_{side}"
    if not _fits(cu_seqlens, q, None) or cu_seqlens.shape[0] == 0 or x.dim() != 3:
        return
    total, first, last = x.shape[0], cu_seqlens[:1], cu_seqlens[-1:]
    before, after = cu_seqlens[:-1], cu_seqlens[1:]
    yield from first_of(first != 0, first, lambda _, n, __: f"{name}: begins with {n}; 0")
    ascending = lambda _, a, b: f"{name}: {a} before {b}; ascending"  # noqa: E731
    yield from first_of(after < before, before, ascending, after)
    allowed = f"at most total_{side} {total}"
    yield from first_of(last > total, last, lambda _, n, __: f"{name}: ends with {n}; {allowed}")
    if before.numel() and isinstance(max_seqlen, Integral):
        most = min(max(int(max_seqlen), -1), total)  # none is longer than all together
        given = f"max_seqlen_{side}: {max_seqlen}; at least the longest sequence"
        longest = (after - before).max()[None]
        yield from first_of(longest > most, longest, lambda _, n, __: f"{given}, {n}")


def _append(
    k_cache: Any, k: Any, seqused_k: Any, block_table: Any, rotary_cos: Any, queries: int
) -> Iterator[Finding]:
    batch, added = k.shape[:2]
    pages, room = k_cache.shape[:2]
    if not _fits(seqused_k, k, batch):
        return
    if block_table is not None:
        if not _fits(block_table, k, batch, None):
            return
        room *= block_table.shape[1]
    allowed = f"0 to {room - added}, as the cache has room for {room} keys"
    yield from first_of(
        (seqused_k < 0) | (seqused_k > room - added),
        seqused_k,
        lambda b, n, _: f"seqused_k: {n} of sequence {b}; {allowed}",
    )
    if _is_tensor(rotary_cos, 2):
        positions, end = rotary_cos.shape[0], seqused_k + max(added, queries)
        given = f"rotary_cos: {positions} positions"
        yield from first_of(
            end > positions,
            end,
            lambda b, n, _: f"{given}; at least {n}, as sequence {b} goes so far",
        )
    if block_table is not None and added:
        page_size = k_cache.shape[1]
        allowed = f"a page of k_cache, of which there are {pages}"
        end = seqused_k + added
        yield from _pages(block_table, seqused_k, end, page_size, pages, allowed)


def used_lengths(name: str, used: Any, of: str, seqlen: int) -> Iterator[Finding]:
    allowed = f"0 to {of}, which is {seqlen}"
    yield from first_of(
        (used < 0) | (used > seqlen),
        used,
        lambda b, n, _: f"{name}: {n} of sequence {b}; {allowed}",
    )


def _pages(
    table: Any, begin: Any, end: Any, page_size: int, pages: int, allowed: str
) -> Iterator[Finding]:
    """Of those that hold the keys from ``begin`` up to ``end`` of each sequence."""
    columns = table.shape[1]
    first_key = page_size * sys.modules["torch"].arange(columns, device=table.device)
    in_use = (first_key + page_size > begin[:, None]) & (first_key < end[:, None])
    yield from first_of(
        in_use & ((table < 0) | (table >= pages)),
        table,
        lambda at, n, _: f"block_table: {n} at [{at // columns}, {at % columns}]; {allowed}",
    )


def _is_tensor(x: Any, rank: int) -> bool:
    return isinstance(x, sys.modules["torch"].Tensor) and x.dim() == rank


def _fits(x: Any, like: Any, *shape: int | None) -> bool:
    """Whether ``x`` is int32, where ``like`` is and of this shape, in which None is any number."""
    if not _is_tensor(x, len(shape)):
        return False
    if x.dtype != sys.modules["torch"].int32 or x.device != like.device:
        return False
    return all(n is None or m == n for m, n in zip(x.shape, shape, strict=True))


def first_of(
    broken: Any, value: Any, text: Callable[[int, int, int], str], other: Any = None
) -> Iterator[Finding]:
    """The first place where a rule is broken, with the values there; nothing without places."""
    if broken.numel():
        place = broken.flatten().int().argmax()
        # take(), as indexing by one number would make the host wait for it.
        values = [x.take(place) for x in (value, value if other is None else other)]
        found = (broken.any(), place, *values)
        yield sys.modules["torch"].stack([x.long() for x in found]), text
