"""Attention to keys that go around a ring of processes (Liu et al. 2023, arXiv 2310.01889).

Every process keeps its queries. Keys and values move on by one process a step, and while the next
ones arrive, attention to those that are here is computed. Forwards are joined by their log-sum-exp.
A backward needs no forward again: with the out and lse of all keys each part's gradients are shares
of the whole. Those of keys travel with them, a step behind.

Where the mask is causal, a process has two chunks of the sequence, an early and a late one
(``distributed`` says which). Then all have the same work, and every part is one call: its own keys
causally, of earlier keys the early half, and later ones for the late half of its queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .._errors import Unsupported
from .._torch_checks import ONCE_IN_REVERSE
from .._torch_eager import Keywords, Tensors, recorded
from .._torch_ops import _mha, trusted_lse
from ..masks import Causal, Mask

Received = Callable[[], list[Tensor]]  # waits for them: the host on a CPU, the stream on a GPU


class Ring:
    """The processes of a group: each sends to the next."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._next, self._previous = (
            dist.get_global_rank(group, (self.rank + n) % self.size) for n in (1, -1)
        )

    def pass_on(self, *sent: Tensor) -> Received:
        """Begins to send these, and to receive as many of the same shapes."""
        received = [torch.empty_like(x) for x in sent]
        ops = []
        for tag, (one, other) in enumerate(zip(sent, received, strict=True)):
            ops.append(dist.P2POp(dist.isend, one, self._next, self.group, tag))
            ops.append(dist.P2POp(dist.irecv, other, self._previous, self.group, tag))
        works = dist.batch_isend_irecv(ops)

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            del ops[:]  # until now what is sent must stay
            return received

        return wait


class Call(NamedTuple):
    """Attention of some of the queries here to some of the keys of one process."""

    rows: slice
    keys: slice
    mask: Mask | None


_ALL = slice(None)


def _whole(causal: bool) -> Call:
    """Of a process's own keys: both chunks lie in order, so causal is causal."""
    return Call(_ALL, _ALL, Causal() if causal else None)


def _halves(seqlen_q: int, causal: bool) -> tuple[Call, Call]:
    """The same in two calls, so that one can come first and one last."""
    half = seqlen_q // 2
    early, late = slice(None, half), slice(half, None)
    if causal:
        return Call(early, slice(None, half), Causal()), Call(late, _ALL, Causal("bottom_right"))
    return Call(early, _ALL, None), Call(late, _ALL, None)


def _other(rank: int, owner: int, seqlen: int, causal: bool) -> Call:
    """Of the keys of another process."""
    half = seqlen // 2
    if not causal:
        return Call(_ALL, _ALL, None)
    if owner < rank:  # its early chunk is before both of ours, its late one behind
        return Call(_ALL, slice(None, half), None)
    return Call(slice(half, None), _ALL, None)  # its chunks lie between ours


def forward(
    q: Tensor, k: Tensor, v: Tensor, ring: Ring, causal: bool, keywords: Keywords
) -> tuple[Tensor, Tensor]:
    """out, lse."""

    def attend(call: Call, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        x = (q[:, call.rows], k[:, call.keys], v[:, call.keys])
        return _mha.attend(*x, (), {**keywords, "mask": call.mask})

    if ring.size == 1:
        return attend(_whole(causal), k, v)
    arriving = ring.pass_on(k, v)
    batch, seqlen, num_heads, _ = q.shape
    total = q.new_empty((batch, seqlen, num_heads, v.shape[-1]), dtype=torch.float32)
    lse = q.new_empty((batch, num_heads, seqlen), dtype=torch.float32)
    # A call may take all of a GPU until it ends, and what sends has to wait. So something short
    # always follows what was to be sent: here a part of the call, below the join of the last one.
    for call in _halves(seqlen, causal):
        total[:, call.rows], lse[:, :, call.rows] = attend(call, k, v)
    part: tuple[Tensor, ...] = ()
    for step in range(1, ring.size):
        k, v = arriving()
        if step + 1 < ring.size:
            arriving = ring.pass_on(k, v)
        if part:
            _join(*part)
        call = _other(ring.rank, (ring.rank - step) % ring.size, seqlen, causal)
        part = (total[:, call.rows], lse[:, :, call.rows], *attend(call, k, v))
    _join(*part)
    return total.to(q.dtype), lse


def _join(total: Tensor, lse: Tensor, out: Tensor, lse_of_out: Tensor) -> None:
    """``flashsdk.merge`` of two, in place and in few passes; ``total`` is float32."""
    share = torch.sigmoid(lse_of_out - lse)
    share = torch.where(lse_of_out == -float("inf"), 0.0, share)  # -inf - -inf is NaN
    total.lerp_(out.float(), share.transpose(1, 2).unsqueeze(-1))
    torch.logaddexp(lse, lse_of_out, out=lse)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Tensors, sums: Sums, ring: Ring, causal: bool,
    keywords: Keywords,
) -> Tensors:  # fmt: skip
    """dq, dk, dv. ``saved`` are q, k, v, out and lse."""
    q, k, v, out, lse = saved
    bias: Tensor | None = None

    def gradients(call: Call, k: Tensor, v: Tensor) -> Tensors:
        rows, keys = call.rows, call.keys
        of_rows = [None if x is None else x[:, :, rows] for x in (dlse, lse, bias)]
        x: Any = (q[:, rows], k[:, keys], v[:, keys], out[:, rows], of_rows[1])
        options = {**keywords, "mask": call.mask}
        if bias is not None:  # sm90's kernels take none of this kind, sm80's do
            options |= {"bias": of_rows[2], "backend": None}
        return _mha.gradients(dout[:, rows], of_rows[0], x, (), options)

    if ring.size == 1:
        return gradients(_whole(causal), k, v)
    first, last = _halves(q.shape[1], causal)
    arriving = ring.pass_on(k, v)
    lse, bias = sums.trusted(lse)
    dq, *totals = (torch.zeros_like(x, dtype=torch.float32) for x in saved[:3])
    # Half of what needs nobody else hides the keys' first way, the other half the gradients' last.
    own = gradients(first, k, v)
    dq[:, first.rows] += own[0]
    returning: Received | None = None
    for step in range(1, ring.size):
        k_here, v_here = arriving()
        if step + 1 < ring.size:
            arriving = ring.pass_on(k_here, v_here)
        call = _other(ring.rank, (ring.rank - step) % ring.size, q.shape[1], causal)
        parts = gradients(call, k_here, v_here)
        dq[:, call.rows] += parts[0]
        if returning is not None:
            totals = returning()
        _add(totals, call, parts)
        returning = ring.pass_on(*totals)
    parts = gradients(last, k, v)
    dq[:, last.rows] += parts[0]
    assert returning is not None  # there is a step
    totals = returning()
    _add(totals, first, own)
    _add(totals, last, parts)
    return tuple(total.to(x.dtype) for total, x in zip((dq, *totals), saved[:3], strict=True))


def _add(totals: list[Tensor], call: Call, parts: Tensors) -> None:
    """The gradients of keys and values, behind that of the queries, to their sums in float32."""
    for total, part in zip(totals, parts[1:], strict=True):
        total[:, call.keys] += part


class Sums:
    """Whether a backward may use lse as it is, known without waiting for a GPU.

    Beyond ``trusted_lse`` kernels take the sum of a row anew, here that of a part of the keys. A
    bias of -lse makes it 0, exactly.
    """

    def __init__(self, lse: Tensor, dtype: torch.dtype) -> None:
        self._large = (lse.abs() > trusted_lse(dtype)).any()  # also -inf, which costs time alone
        self._copied: torch.cuda.Event | None = None
        if lse.is_cuda:
            on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._large = on_host.copy_(self._large, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(lse.device))

    def trusted(self, lse: Tensor) -> tuple[Tensor, Tensor | None]:
        """The lse to use, and a bias (batch, num_heads, seqlen_q, 1) to use with it, if any."""
        if self._copied is not None:
            self._copied.synchronize()
        if not self._large:
            return lse, None
        bias = torch.where(lse.isfinite(), -lse, 0.0)
        return lse + bias, bias.unsqueeze(-1)


class ContextParallel(Function):
    """What autograd records of a call."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, causal: bool, keywords: Keywords
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # no dlse for those who do not use lse
        out, lse = forward(q, k, v, ring, causal, keywords)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = Sums(lse, q.dtype), ring, causal, keywords
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if recorded((q, k, v)):  # a backward that is to have one itself
            raise Unsupported(f"create_graph: True; False, {ONCE_IN_REVERSE}")
        if dout is None:  # only lse is used
            dout = torch.zeros_like(out)
        return *backward(dout, dlse, (q, k, v, out, lse), *ctx.rest), None, None, None
