"""How far a result may lie from the float64 reference: an error analysis, element by element.

The kernels compute in float32 and round to the storage dtype where they must: P and dS before they
enter a matrix product, and each output once. Every bound below is the sum of those roundings as
they reach one element. Errors that all terms of a sum share (that of a row's LSE, of its delta)
count as such; independent ones add up as a random walk, of which five standard deviations are
allowed. Nothing here is fitted to a kernel.
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
# CPU kernels take the sum of the row anew. Those for GPUs, which have no float32, always use it.
TRUSTED_LSE = {"float32": 64.0, "float16": np.inf, "bfloat16": np.inf}
FLOAT32_NORMAL = 2.0**-126
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


def _reach(error: Float64, x: Float64) -> Float64:
    """What independent errors (m, n) of the left factor do to its product with x (n, d)."""
    reached: Float64 = np.minimum(error @ np.abs(x), 5 * np.sqrt(error**2 @ x**2))
    return reached


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
    e_score = _sum_error(q.shape[1]) * scale * (np.abs(q) @ np.abs(k).T) * m.slope
    e_score += U32 * (4 * size + 8 * head.f.softcap)
    e_score += 2 * U32 * abs(head.alibi_slope) * (seqlen_q + seqlen_k)
    e_sum = (m.p * e_score).sum(1) + exp_error + _sum_of_equals(seqlen_k)
    lse = np.abs(_logsumexp(m.score))
    e_lse = e_sum + 2 * U32 * lse
    e_row = (e_sum + exp_error)[:, None]  # relative error that all P of a row share

    # P: independent relative error, then the rounding for a product. What is smaller than the
    # smallest number of the dtype vanishes; the largest of a row is about 1.
    rho = np.expm1(np.minimum(e_score + exp_error, 50))
    dropped = m.p * m.drop
    e_dropped = dropped * (rho + u) + underflow * (m.p > 0) * m.drop
    out = dropped @ v
    e_out = (u + e_row) * np.abs(out) + _reach(e_dropped, v) + underflow
    e_out += _sum_error(seqlen_k) * (dropped @ np.abs(v))
    e_row += 2 * U32 * np.minimum(lse, TRUSTED_LSE[dtype])[:, None]
    e_dropped += e_row * dropped  # in dv these are independent: each row has its own
    e_dv = _reach(e_dropped.T, dout) + _sum_error(seqlen_q) * (dropped.T @ np.abs(dout))

    dp = m.drop * (dout @ v.T)
    delta = (dout * out).sum(1) - head.dlse
    e_delta = _reach(e_out[:, None], dout[..., None])[:, 0, 0] + 4 * U32 * np.abs(delta)
    e_delta += _sum_error(v.shape[1]) * np.abs(dout * out).sum(1)
    gap = dp - delta[:, None]
    p = m.p * m.slope
    ds = p * gap
    e_ds = p * (rho * np.abs(gap) + m.drop * _sum_error(v.shape[1]) * (np.abs(dout) @ np.abs(v).T))
    e_ds += (u + 8 * U32) * np.abs(ds) + underflow * (m.p > 0) * (1 + m.slope * np.abs(gap))
    if head.f.softcap > 0:
        # The derivative 1 - tanh² moves with the score.
        tanh = np.sqrt(np.maximum(1 - m.slope, 0))
        e_ds += m.p * np.abs(gap) * 2 * tanh * (e_score / head.f.softcap + 4 * U32)
    dq = ds @ k
    e_dq = (u + e_row) * np.abs(dq) + _reach(e_ds, k) + e_delta[:, None] * np.abs(p @ k)
    e_dq += _sum_error(seqlen_k) * (np.abs(ds) @ np.abs(k))
    e_ds += e_row * np.abs(ds) + e_delta[:, None] * p
    e_dk = _reach(e_ds.T, q) + _sum_error(seqlen_q) * (np.abs(ds).T @ np.abs(q))
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


def _logsumexp(score: Array) -> Float64:
    """(seqlen_q,), 0 for rows that see nothing."""
    top = finite_max(score)
    total = np.exp(score - top).sum(axis=1)
    return np.where(total > 0, top[:, 0] + np.log(np.where(total > 0, total, 1)), 0)
