"""Attention as whole matrices, with the rounding of a dtype: the yardstick of errors.

``standard`` rounds like a chain of framework operators, ``flash_backward`` like FlashAttention.
With storage float64 nothing is rounded: a second opinion on reference.py. There is no third one in
Python: ``dense``, ``_commands.exact``, and the tests of PyTorch are all made of what is here.

What ``xp`` is an argument of takes PyTorch's tensors too, with ``xp=torch`` and any dimensions
before the two of a head. PyTorch can differentiate ``attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .reference import Array, Features, Head

Round = Callable[[Array], Array]


def rounding(storage: Any) -> Round:
    """x to the nearest values of ``storage``, held as float32 (float64 for float64)."""
    storage = np.dtype(storage)
    held = np.float64 if storage == np.float64 else np.float32

    def round_to(x: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(x, held).astype(storage, copy=False).astype(held, copy=False)

    return round_to


@dataclass(frozen=True)
class Heads:
    """What these formulas and those of _tolerance ask of a Head, of any number of heads."""

    f: Features
    q: Any
    k: Any
    v: Any
    dout: Any
    dlse: Any
    scale: float
    alibi_slope: float = 0.0
    sink: Any = -np.inf  # or of each head: (heads, 1, 1)


@dataclass(frozen=True)
class Matrices:
    """S, P and what the backward needs of them: each (seqlen_q, seqlen_k)."""

    score: Array
    p: Array
    drop: Any  # 0 or the scale of dropout; 1.0 without
    slope: Any  # d(score) / d(softmax_scale·q·k); 1.0 without softcap
    p_sink: Any = 0.0  # (seqlen_q,), what a sink takes of P


def matrices(head: Head, round_to: Round) -> Matrices:
    """Of a head whose q and k are rounded."""
    score = round_to(head.q @ head.k.T)
    added = None if head.added is None else head.added.astype(score.dtype, copy=False)
    drop = head.drop.astype(score.dtype, copy=False) if head.f.dropout_threshold() else None
    return from_products(head, score, added, head.visible, drop, round_to)


def attention(
    head: Any,
    added: Array | None = None,  # bias and ALiBi
    visible: Array | None = None,
    drop: Array | None = None,
    round_to: Round = lambda x: x,
    xp: Any = np,
) -> tuple[Array, Array]:
    """out (..., seqlen_q, head_dim_v), lse (..., seqlen_q); of the head q, k, v, scale, softcap."""
    m = from_products(
        head, round_to(head.q @ transposed(head.k)), added, visible, drop, round_to, xp
    )
    lse = log_sum_exp(m.score, xp)
    if has_sink(head):
        lse = xp.logaddexp(lse, sink_beside(lse[..., None], head, xp)[..., 0])
    return round_to(round_to(m.p * m.drop) @ head.v), round_to(lse)


def from_products(
    head: Any,
    qk: Array,
    added: Array | None,  # bias and ALiBi
    visible: Array | None,
    drop: Array | None,
    round_to: Round = lambda x: x,
    xp: Any = np,
) -> Matrices:
    """S and P from q·k; of the head only its scale, softcap and sink."""
    score = round_to(qk * head.scale)
    slope: Any = 1.0
    if head.f.softcap > 0:
        softcap = float(np.float32(head.f.softcap))
        tanh = round_to(xp.tanh(round_to(score / softcap)))
        score, slope = round_to(softcap * tanh), round_to(1 - tanh**2)
    if added is not None:
        score = round_to(score + added)
    if visible is not None:
        score = xp.where(visible, score, -np.inf)
    top = finite_max(score, xp)
    e, p_sink = xp.exp(score - top), 0.0
    # The largest e is 1, and all are 0 where no key is seen: no row has the bound itself, where the
    # gradient of clip is another with each release of PyTorch.
    total = xp.clip(e.sum(-1), 0.5, None)
    if has_sink(head):
        blind = xp.isneginf(score).all(-1)[..., None]
        sink = sink_beside(top, head, xp)
        top = constant(xp.maximum(xp.where(blind, -np.inf, top), sink))
        with np.errstate(invalid="ignore"):  # float16 may overflow
            e, of_sink = xp.exp(score - top), xp.exp(sink - top)[..., 0]
        total = e.sum(-1) + of_sink
        p_sink = of_sink / total
    p = round_to(e / total[..., None])
    return Matrices(score, p, 1.0 if drop is None else drop, slope, p_sink)


def has_sink(head: Any) -> bool:
    return not isinstance(head.sink, float) or head.sink != -np.inf


def sink_beside(rows: Array, head: Any, xp: Any = np) -> Array:
    """A head's sink for each of its rows (..., seqlen_q, 1), of their type."""
    sinks: Array = xp.zeros_like(rows) + head.sink
    return sinks


def log_sum_exp(score: Array, xp: Any = np) -> Array:
    """Of each row (..., seqlen_q), -inf where it sees no key. There its gradient is 0, not NaN."""
    top = finite_max(score, xp)
    total = xp.exp(score - top).sum(-1)
    lse: Array = xp.where(total > 0, xp.log(xp.clip(total, 0.5, None)) + top[..., 0], -np.inf)
    return lse


def finite_max(score: Array, xp: Any = np) -> Array:
    """The largest score (..., seqlen_q, 1) of each row, 0 where it sees no key.

    To PyTorch a constant: what it is subtracted from for safety does not depend on it.
    """
    if score.shape[-1] == 0:
        zeros: Array = score.sum(-1)[..., None]
        return zeros
    top = xp.amax(constant(score), -1)[..., None]
    finite: Array = xp.where(xp.isneginf(top), xp.zeros_like(top), top)
    return finite


def constant(x: Any) -> Any:
    """x, through which PyTorch shall not differentiate."""
    return x.detach() if hasattr(x, "detach") else x


def transposed(x: Any) -> Any:
    return x.swapaxes(-1, -2)


def standard(head: Head, storage: Any) -> dict[str, Array]:
    """out, dq, dk, dv by matrix products and softmax, every tensor rounded to ``storage``.

    Inside an operation sums are float32. dk and dv are this head's part alone. Without dout: out.
    """
    round_to = rounding(storage)

    def times(x: Array, factor: Any) -> Array:
        """Rounded, as x is."""
        return x if isinstance(factor, float) and factor == 1 else round_to(x * factor)

    given: Any = {name: round_to(getattr(head, name)) for name in ("q", "k", "v")}
    q, k, v = given.values()
    m = matrices(replace(head, **given), round_to)
    dropped = times(m.p, m.drop)
    if head.dout is None:
        with np.errstate(invalid="ignore"):  # float16 may overflow
            return {"out": round_to(dropped @ v)}
    dout = round_to(head.dout)
    dp = times(round_to(dout @ v.T), m.drop)
    with np.errstate(invalid="ignore"):  # float16 may overflow
        ds = m.p * (dp - (m.p * dp).sum(axis=1, keepdims=True))
        ds = round_to(ds + m.p * head.dlse[:, None].astype(ds.dtype))
        ds = round_to(times(ds, m.slope) * ds.dtype.type(head.scale))
        return {
            "out": round_to(dropped @ v),
            "dq": round_to(ds @ k),
            "dk": round_to(ds.T @ q),
            "dv": round_to(dropped.T @ dout),
        }


def flash_backward(head: Head, storage: Any, lag: float = 0.0) -> dict[str, Array]:
    """dq, dk, dv as FlashAttention's backward has to: from a rounded out.

    Float32 throughout, but for P and dS in the products. Standard attention, which sums P∘dP, can
    be luckier. ``lag`` is how far (in log2) the running maximum lies below the final one while P is
    rounded for the forward's product: kernels differ in it, and so does out in its last bit.
    """
    assert head.dout is not None
    round_to, to32 = rounding(storage), rounding(np.float32)
    given: Any = {name: to32(getattr(head, name)) for name in ("q", "k", "v", "dout", "dlse")}
    head = replace(head, **given)
    m = matrices(head, to32)
    top = finite_max(m.score)
    e = np.exp(m.score - top)
    total = np.clip(e.sum(axis=1, keepdims=True), 1, None)
    with np.errstate(over="ignore"):  # beside such a sink keys count for nothing
        total = total + np.exp(head.sink - top)
    several = np.isfinite(m.score).sum(axis=1, keepdims=True) > 1  # a single key is its own maximum
    raised = np.where(several, np.float32(2**lag), np.float32(1))
    out = round_to(round_to(e * raised) * m.drop @ head.v / (total * raised))
    return gradients(head, m, out, round_to)


def gradients(
    head: Any, m: Matrices, out: Array, round_to: Round = lambda x: x
) -> dict[str, Array]:
    """dq, dk and dv, of a head with q, k, v, dout, dlse and scale: dk and dv are its part alone."""
    dp = m.drop * (head.dout @ transposed(head.v))
    delta = (head.dout * out).sum(-1) - head.dlse
    ds = head.scale * round_to(m.p * m.slope * (dp - delta[..., None]))
    dropped = round_to(m.p) * m.drop
    return {"dq": ds @ head.k, "dk": transposed(ds) @ head.q, "dv": transposed(dropped) @ head.dout}
