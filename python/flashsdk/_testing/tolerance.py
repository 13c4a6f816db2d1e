"""How far a result may lie from the float64 reference: an error analysis, element by element.

The kernels compute in float32 and round to the storage dtype where they must: P and dS before they
enter a matrix product, and each output once. Every bound below is the sum of those roundings as
they reach one element. Errors that all terms of a sum share (that of a row's LSE, of its delta)
count as such; independent ones add up as a random walk, of which five standard deviations are
allowed. Equal numbers round alike: where scores are equal, so are the errors of P, and they add up
as the numbers themselves do. Nothing here is fitted to a kernel.

A head's arrays are NumPy's and have two dimensions; with ``xp=torch`` they are tensors, and many
heads are done at once in any dimensions before those two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .naive import Matrices, finite_max, transposed
from .reference import Float64, Head

U32 = 2.0**-24  # unit roundoff of float32
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# What is smaller may become 0: subnormals of float32 and bfloat16, half the smallest of float16.
UNDERFLOW = {"float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
# P of the backward is exp(score - lse) up to this |lse|, and takes over its rounding; beyond, the
# sum of the row is taken anew.
TRUSTED_LSE = {"float32": 32.0, "float16": 1024.0, "bfloat16": 1024.0}
FLOAT32_NORMAL = 2.0**-126
# Whether forward and backward take the sum of a score in the same order, to the same last bit: the
# CPU kernels do. Those for GPUs, which have no float32, need not.
SAME_SCORES = {"float32": True, "float16": False, "bfloat16": False}
# What tensor cores lose of a score besides, as a part of U32·head_dim·|q·k|. They cut off what
# reaches some bits below float32's last of the largest term (Fasi et al. 2021, "Numerical behavior
# of NVIDIA tensor cores"), as products of float16, of 22 bits, do, and those of bfloat16, of 16,
# hardly. Of terms of one sign each loses half of such a bit of the sum so far, which on average is
# half of the whole: 1/8 to 1/4 where one bit more is kept than float32 has, half of it with two, as
# Hopper seems to; 1/8 is enough for both, as a sum's own roundings are allowed for besides.
CUT_OFF = {"float32": 0.0, "float16": 1 / 8, "bfloat16": 0.0}
# Relative error of exp: a polynomial as precise as the dtype of P asks for.
EXP_ERROR = {"float32": 2.0**-22, "float16": 2.0**-13, "bfloat16": 2.0**-13}


def _sum_error(terms: int) -> float:
    """Relative error of a float32 sum of so many terms."""
    return U32 * (3 + float(np.sqrt(terms)))


def _sum_of_equals(terms: int) -> float:
    """The same where all terms may be equal, and each addition then errs in the same direction.

    Kernels add up tiles, of no more than 512 keys.
    """
    return _sum_error(terms) + U32 * min(terms, 512) / 2


def _dot_error(a: Float64, b: Float64, xp: Any, cut_off: float = 0.0) -> Float64:
    """Largest errors (m, n) of the float32 dot products of rows a (m, d) and b (n, d)."""
    b = transposed(b)
    total, terms = a @ b, a.shape[-1]
    error = _walk_error(total, a**2 @ b**2, abs(a) @ abs(b), terms, xp)
    return error + cut_off * U32 * terms * abs(total) if cut_off else error


def _walk_error(
    total: Float64, squares: Float64, absolute: Float64, terms: int, xp: Any
) -> Float64:
    """Largest errors of float32 sums, given the sums of their terms, of squares and of sizes.

    Every addition rounds the sum so far. In an order that knows nothing of signs its square is
    total²/3 + squares/6 on average, and the roundings make a random walk: a variance of u²/3 times
    that each. Where the terms are few or of one sign, no sum so far is above ``absolute``.
    """
    walk = 3 * abs(total) + 5 * xp.sqrt(terms / 3 * (total**2 / 3 + squares / 6))
    error: Float64 = xp.minimum(U32 * walk, _sum_error(terms) * absolute)
    return error


def _reach(error: Float64, x: Float64, xp: Any) -> Float64:
    """What errors (m, n) of the left factor, alike or not, do to its product with x (n, d)."""
    walk = abs(error @ x) + 5 * xp.sqrt(error**2 @ x**2)
    reached: Float64 = xp.minimum(abs(error) @ abs(x), walk)
    return reached


def _reach_row(error: Float64, xp: Any) -> Float64:
    """What errors (m, n), alike or not, do to the sum of a row."""
    walk = abs(error.sum(-1)) + 5 * xp.sqrt((error**2).sum(-1))
    reached: Float64 = xp.minimum(abs(error).sum(-1), walk)
    return reached


def _reach_mean(e_p: Float64, drop: Float64, x: Float64, mean: Float64, xp: Any) -> Float64:
    """What independent errors (m, n) of P do to mean (m, d) = P·(drop∘x) over the row sum of P.

    An error of one p moves the mean towards its x or away: with one key alone, or where all x are
    the same, not at all.
    """
    of_x = e_p * drop
    at_once = of_x @ abs(x) + abs(mean) * e_p.sum(-1)[..., None]
    squares = of_x**2 @ x**2 - 2 * mean * ((of_x * e_p) @ x)
    squares += mean**2 * (e_p**2).sum(-1)[..., None]
    moved: Float64 = xp.minimum(at_once, 5 * xp.sqrt(xp.clip(squares, 0, None)))
    return moved


def bounds(head: Head, m: Matrices, dtype: str, xp: Any = np) -> dict[str, Float64]:
    """Largest error of each element of one head's out, lse, dq, dk and dv that rounding explains.

    And of dsink, where there is a sink. dk and dv without the rounding of the output: heads that
    share k and v add up first. ``m`` is in float64. Of a head without dout those of out and lse.
    """
    u, underflow, exp_error = UNIT_ROUNDOFF[dtype], UNDERFLOW[dtype], EXP_ERROR[dtype]
    q, k, v, dout, scale = head.q, head.k, head.v, head.dout, abs(head.scale)
    seqlen_q, seqlen_k = m.score.shape[-2:]

    # Score: the dot product, then a few operations on the result.
    size = xp.where(xp.isfinite(m.score), abs(m.score), 0)
    e_operations = 4 * U32 * size
    e_score = (
        scale * _dot_error(q, k, xp, CUT_OFF[dtype]) * m.slope
        + e_operations
        + 8 * U32 * head.f.softcap
    )
    e_score += 2 * U32 * abs(head.alibi_slope) * (seqlen_q + seqlen_k)
    e_scores = (m.p * e_score).sum(-1)[..., None]  # what they do to the sum of a row
    e_sum = _sum_of_equals(seqlen_k)  # of taking that sum
    lse = abs(_logsumexp(m.score, xp))
    if head.sink != -np.inf:
        lse = np.maximum(lse, abs(head.sink))
    e_lse = e_scores[..., 0] + exp_error + e_sum + 2 * U32 * lse

    # Forward: each P errs by itself, and all are divided by their sum. P is rounded for the
    # product: below the smallest number of the dtype it vanishes; the largest of a row is about 1.
    e_p = m.p * xp.expm1(xp.clip(e_score + exp_error, None, 50))
    dropped = m.p * m.drop
    e_rounded = dropped * u + underflow * (m.p > 0) * m.drop
    out = dropped @ v
    e_stored = u * abs(out) + underflow + _sum_error(seqlen_k) * (dropped @ abs(v))
    e_out = e_stored + e_sum * abs(out)
    e_out += _reach_mean(e_p, m.drop, v, out, xp) + _reach(e_rounded, v, xp)
    # Dropout's scale comes last: a product below the normal numbers may become 0 before it.
    e_lost = FLOAT32_NORMAL * (m.p > 0) * m.drop
    e_out += e_lost.sum(-1)[..., None]
    if dout is None:
        return {"out": e_out, "lse": e_lse}

    # Backward: P is exp(score - lse), and in the lse is the same score with a weight of p. These
    # errors are relative.
    own = 1 - m.p if SAME_SCORES[dtype] else 1 + m.p
    e_own = xp.expm1(xp.clip(own * e_score + e_operations + exp_error, None, 50))
    trusted = xp.clip(lse, None, TRUSTED_LSE[dtype])[..., None]
    e_row = e_sum + 2 * exp_error + 2 * U32 * trusted
    e_others = e_scores - m.p * e_score + e_row
    # In dv and dk these are independent: each row has its own.
    e_dropped = dropped * (e_own + e_others) + e_rounded
    e_dv = _reach(transposed(e_dropped), dout, xp)
    e_dv += _sum_error(seqlen_q) * (transposed(dropped) @ abs(dout)) + e_lost.sum(-2)[..., None]

    d_dropped = dout @ transposed(v)
    terms = dout * out
    dp, mean = m.drop * d_dropped, terms.sum(-1)
    delta = mean - head.dlse
    e_delta = _reach_row(e_p * (dp - mean[..., None]), xp) + e_sum * abs(mean)
    e_delta += _reach_row(e_rounded * d_dropped, xp)
    e_delta += _reach_row(xp.copysign(e_stored, out) * dout, xp)
    e_delta += 4 * U32 * abs(delta)
    e_delta += _walk_error(mean, (terms**2).sum(-1), abs(terms).sum(-1), v.shape[-1], xp)
    of_sink = {}
    if head.sink != -np.inf:
        e_sink = m.p_sink * (e_delta + abs(delta) * (e_scores[..., 0] + e_row[..., 0]))
        rounded = U32 * abs(m.p_sink * delta).sum() + UNDERFLOW["float32"]
        of_sink["dsink"] = e_sink.sum() + rounded + FLOAT32_NORMAL * abs(delta).sum()
    delta, e_delta = delta[..., None], e_delta[..., None]
    gap = dp - delta
    p = m.p * m.slope
    ds = p * gap
    e_dp = m.drop * _dot_error(dout, v, xp)
    e_ds = p * (e_own * abs(gap) + e_dp)
    if head.f.softcap > 0:
        # The derivative 1 - tanh² moves with the score, and multiplies dP - delta as they are.
        tanh = xp.sqrt(xp.clip(1 - m.slope, 0, None))
        e_slope = 2 * tanh * (e_score / head.f.softcap + 4 * U32)
        e_ds += m.p * e_slope * (abs(gap) + e_dp + e_delta)
    # dS is rounded as it comes, with its error and delta's, and may be made of the P that was:
    # where another warpgroup takes it from.
    seen: Any = m.p > 0
    e_ds += (2 * u + 8 * U32) * (abs(ds) + e_ds + e_delta * p)
    e_ds += underflow * seen * (1 + m.slope * abs(gap))
    dq = ds @ k
    e_dq = (u + e_scores + e_row) * abs(dq) + e_delta * abs(p @ k)
    e_dq += _reach(xp.copysign(e_ds + m.p * e_score * abs(ds), ds), k, xp)
    e_dq += _sum_error(seqlen_k) * (abs(ds) @ abs(k))
    e_ds += e_others * abs(ds) + e_delta * p
    e_dk = _reach(transposed(xp.copysign(e_ds, ds)), q, xp)
    e_dk += _sum_error(seqlen_q) * (transposed(abs(ds)) @ abs(q))
    # The scale comes last: a sum below the normal numbers, which may become 0, is multiplied by it.
    e_dq += FLOAT32_NORMAL * seen.any(-1)[..., None]
    e_dk += FLOAT32_NORMAL * seen.any(-2)[..., None]
    return {
        "out": e_out,
        "lse": e_lse,
        "dq": scale * e_dq + underflow,
        "dk": scale * e_dk,
        "dv": e_dv,
        **of_sink,
    }


def sizes(head: Head, m: Matrices) -> dict[str, Float64]:
    """One head's out, dq, dk and dv with nothing to cancel: every term of every sum positive.

    U32 of it is what taking the sums in float32 costs, however small the result. Without dout: out.
    """
    q, k, v = (np.abs(x) for x in (head.q, head.k, head.v))
    dropped = m.p * m.drop
    out = dropped @ v
    if head.dout is None:
        return {"out": out}
    dout = np.abs(head.dout)
    delta = (dout * out).sum(1) + np.abs(head.dlse)
    ds = abs(head.scale) * m.p * m.slope * (m.drop * (dout @ v.T) + delta[:, None])
    return {"out": out, "dq": ds @ k, "dk": ds.T @ q, "dv": dropped.T @ dout}


def _logsumexp(score: Float64, xp: Any) -> Float64:
    """(seqlen_q,), 0 for rows that see nothing."""
    top = finite_max(score, xp)
    total = xp.clip(xp.exp(score - top).sum(-1), 1, None)
    lse: Float64 = top[..., 0] + xp.log(total)
    return lse
