"""How far a result may lie from the float64 reference: an error analysis, element by element.

The kernels compute in float32 and round to the storage dtype where they must: P and dS before they
enter a matrix product, and each output once. Every bound below is the sum of those roundings as
they reach one element. Errors that all terms of a sum share (that of a row's LSE, of its delta)
count as such; independent ones add up as a random walk, of which five standard deviations are
allowed. Equal numbers round alike: where scores are equal, so are the errors of P, and they add up
as the numbers themselves do. Nothing here is fitted to a kernel.
"""

from __future__ import annotations

import numpy as np

from ._naive import Matrices, finite_max
from ._reference import Array, Float64, Head

U32 = 2.0**-24  # unit roundoff of float32
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# What is smaller may become 0: subnormals of float32 and bfloat16, half the smallest of float16.
UNDERFLOW = {"float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
# P of the backward is exp(score - lse) up to this |lse|, and takes over its rounding; beyond, the
# sum of the row is taken anew.
TRUSTED_LSE = {"float32": 64.0, "float16": 1024.0, "bfloat16": 1024.0}
FLOAT32_NORMAL = 2.0**-126
# Whether forward and backward take the sum of a score in the same order, to the same last bit: the
# CPU kernels do. Those for GPUs, which have no float32, need not.
SAME_SCORES = {"float32": True, "float16": False, "bfloat16": False}
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


def _dot_error(a: Float64, b: Float64) -> Float64:
    """Largest errors (m, n) of the float32 dot products of rows a (m, d) and b (n, d)."""
    return _walk_error(a @ b.T, a**2 @ (b**2).T, np.abs(a) @ np.abs(b).T, a.shape[1])


def _walk_error(total: Float64, squares: Float64, absolute: Float64, terms: int) -> Float64:
    """Largest errors of float32 sums, given the sums of their terms, of squares and of sizes.

    Every addition rounds the sum so far. In an order that knows nothing of signs its square is
    total²/3 + squares/6 on average, and the roundings make a random walk: a variance of u²/3 times
    that each. Where the terms are few or of one sign, no sum so far is above ``absolute``.
    """
    walk = 3 * np.abs(total) + 5 * np.sqrt(terms / 3 * (total**2 / 3 + squares / 6))
    error: Float64 = np.minimum(U32 * walk, _sum_error(terms) * absolute)
    return error


def _reach(error: Float64, x: Float64) -> Float64:
    """What errors (m, n) of the left factor, alike or not, do to its product with x (n, d)."""
    walk = np.abs(error @ x) + 5 * np.sqrt(error**2 @ x**2)
    reached: Float64 = np.minimum(np.abs(error) @ np.abs(x), walk)
    return reached


def _reach_row(error: Float64) -> Float64:
    """What errors (m, n), alike or not, do to the sum of a row."""
    walk = np.abs(error.sum(1)) + 5 * np.sqrt((error**2).sum(1))
    reached: Float64 = np.minimum(np.abs(error).sum(1), walk)
    return reached


def _reach_mean(e_p: Float64, drop: Float64, x: Float64, mean: Float64) -> Float64:
    """What independent errors (m, n) of P do to mean (m, d) = P·(drop∘x) over the row sum of P.

    An error of one p moves the mean towards its x or away: with one key alone, or where all x are
    the same, not at all.
    """
    of_x = e_p * drop
    at_once = of_x @ np.abs(x) + np.abs(mean) * e_p.sum(1, keepdims=True)
    squares = of_x**2 @ x**2 - 2 * mean * ((of_x * e_p) @ x)
    squares += mean**2 * (e_p**2).sum(1, keepdims=True)
    moved: Float64 = np.minimum(at_once, 5 * np.sqrt(np.maximum(squares, 0)))
    return moved


def bounds(head: Head, m: Matrices, dtype: str) -> dict[str, Float64]:
    """Largest error of each element of one head's out, lse, dq, dk and dv that rounding explains.

    dk and dv without the rounding of the output: heads that share k and v add up first. ``m`` is
    in float64.
    """
    assert head.dout is not None
    u, underflow, exp_error = UNIT_ROUNDOFF[dtype], UNDERFLOW[dtype], EXP_ERROR[dtype]
    q, k, v, dout, scale = head.q, head.k, head.v, head.dout, abs(head.scale)
    seqlen_q, seqlen_k = m.score.shape

    # Score: the dot product, then a few operations on the result.
    size = np.where(np.isfinite(m.score), np.abs(m.score), 0)
    e_operations = 4 * U32 * size
    e_score = scale * _dot_error(q, k) * m.slope + e_operations + 8 * U32 * head.f.softcap
    e_score += 2 * U32 * abs(head.alibi_slope) * (seqlen_q + seqlen_k)
    e_scores = (m.p * e_score).sum(1, keepdims=True)  # what they do to the sum of a row
    e_sum = _sum_of_equals(seqlen_k)  # of taking that sum
    lse = np.abs(_logsumexp(m.score))
    e_lse = e_scores[:, 0] + exp_error + e_sum + 2 * U32 * lse

    # Forward: each P errs by itself, and all are divided by their sum. P is rounded for the
    # product: below the smallest number of the dtype it vanishes; the largest of a row is about 1.
    e_p = m.p * np.expm1(np.minimum(e_score + exp_error, 50))
    dropped = m.p * m.drop
    e_rounded = dropped * u + underflow * (m.p > 0) * m.drop
    out = dropped @ v
    e_stored = u * np.abs(out) + underflow + _sum_error(seqlen_k) * (dropped @ np.abs(v))
    e_out = e_stored + e_sum * np.abs(out)
    e_out += _reach_mean(e_p, m.drop, v, out) + _reach(e_rounded, v)

    # Backward: P is exp(score - lse), and in the lse is the same score with a weight of p. These
    # errors are relative.
    own = 1 - m.p if SAME_SCORES[dtype] else 1 + m.p
    e_own = np.expm1(np.minimum(own * e_score + e_operations + exp_error, 50))
    e_row = e_sum + 2 * exp_error + 2 * U32 * np.minimum(lse, TRUSTED_LSE[dtype])[:, None]
    e_others = e_scores - m.p * e_score + e_row
    # In dv and dk these are independent: each row has its own.
    e_dropped = dropped * (e_own + e_others) + e_rounded
    e_dv = _reach(e_dropped.T, dout) + _sum_error(seqlen_q) * (dropped.T @ np.abs(dout))

    d_dropped = dout @ v.T
    terms = dout * out
    dp, mean = m.drop * d_dropped, terms.sum(1)
    delta = mean - head.dlse
    e_delta = _reach_row(e_p * (dp - mean[:, None])) + e_sum * np.abs(mean)
    e_delta += _reach_row(e_rounded * d_dropped)
    e_delta += _reach_row(np.copysign(e_stored, out) * dout)
    e_delta += 4 * U32 * np.abs(delta)
    e_delta += _walk_error(mean, (terms**2).sum(1), np.abs(terms).sum(1), v.shape[1])
    gap = dp - delta[:, None]
    p = m.p * m.slope
    ds = p * gap
    e_ds = p * (e_own * np.abs(gap) + m.drop * _dot_error(dout, v))
    # dS is rounded, and may be made of the P that was: where another warpgroup takes it from.
    e_ds += (2 * u + 8 * U32) * np.abs(ds) + underflow * (m.p > 0) * (1 + m.slope * np.abs(gap))
    if head.f.softcap > 0:
        # The derivative 1 - tanh² moves with the score.
        tanh = np.sqrt(np.maximum(1 - m.slope, 0))
        e_ds += m.p * np.abs(gap) * 2 * tanh * (e_score / head.f.softcap + 4 * U32)
    dq = ds @ k
    e_dq = (u + e_scores + e_row) * np.abs(dq) + e_delta[:, None] * np.abs(p @ k)
    e_dq += _reach(np.copysign(e_ds + m.p * e_score * np.abs(ds), ds), k)
    e_dq += _sum_error(seqlen_k) * (np.abs(ds) @ np.abs(k))
    e_ds += e_others * np.abs(ds) + e_delta[:, None] * p
    e_dk = _reach(np.copysign(e_ds, ds).T, q) + _sum_error(seqlen_q) * (np.abs(ds).T @ np.abs(q))
    # The scale comes last: a sum below the normal numbers, which may become 0, is multiplied by it.
    seen = np.asarray(m.p > 0)
    e_dq += FLOAT32_NORMAL * seen.any(axis=1, keepdims=True)
    e_dk += FLOAT32_NORMAL * seen.any(axis=0, keepdims=True).T
    return {
        "out": e_out,
        "lse": e_lse,
        "dq": scale * e_dq + underflow,
        "dk": scale * e_dk,
        "dv": e_dv,
    }


def sizes(head: Head, m: Matrices) -> dict[str, Float64]:
    """One head's out, dq, dk and dv with nothing to cancel: every term of every sum positive.

    U32 of it is what taking the sums in float32 costs, however small the result.
    """
    assert head.dout is not None
    q, k, v, dout = (np.abs(x) for x in (head.q, head.k, head.v, head.dout))
    dropped = m.p * m.drop
    out = dropped @ v
    delta = (dout * out).sum(1) + np.abs(head.dlse)
    ds = abs(head.scale) * m.p * m.slope * (m.drop * (dout @ v.T) + delta[:, None])
    return {"out": out, "dq": ds @ k, "dk": ds.T @ q, "dv": dropped.T @ dout}


def _logsumexp(score: Array) -> Float64:
    """(seqlen_q,), 0 for rows that see nothing."""
    top = finite_max(score)
    total = np.exp(score - top).sum(axis=1)
    return np.where(total > 0, top[:, 0] + np.log(np.where(total > 0, total, 1)), 0)
