"""How far a result may lie from the float64 reference: an error analysis, element by element.

The kernels compute in float32 and round to the storage dtype where they must: P and dS before they
enter a matrix product, and each output once. Every bound below is the sum of those roundings as
they reach one element. Errors that all terms of a sum share (that of a row's LSE, of its delta)
count as such; independent ones add up as a random walk, of which five standard deviations are
allowed. Nothing here is fitted to a kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._naive import matrices
from ._reference import Array, Features, Float64, heads

U32 = 2.0**-24  # unit roundoff of float32
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# What is smaller may become 0: subnormals of float32 and bfloat16, half the smallest of float16.
UNDERFLOW = {"float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
# Relative error of exp: a polynomial as precise as the dtype of P asks for.
EXP_ERROR = {"float32": 2.0**-22, "float16": 2.0**-13, "bfloat16": 2.0**-13}


def _sum_error(terms: int) -> float:
    """Relative error of a float32 sum of so many terms."""
    return U32 * (3 + float(np.sqrt(terms)))


def _reach(error: Float64, x: Float64) -> Float64:
    """What independent errors (m, n) of the left factor do to its product with x (n, d)."""
    reached: Float64 = np.minimum(error @ np.abs(x), 5 * np.sqrt(error**2 @ x**2))
    return reached


def bounds(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    sequence: int | None = None,
    **features: Any,
) -> dict[str, Float64]:
    """Largest error of each element of out, lse, dq, dk, dv that rounding explains; batched."""
    f = Features(**features)
    dtype = q.dtype.name
    u, underflow, exp_error = UNIT_ROUNDOFF[dtype], UNDERFLOW[dtype], EXP_ERROR[dtype]
    dout, q, k, v = (np.asarray(x).astype(np.float64) for x in (dout, q, k, v))
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, head_dim_v = v.shape[1], v.shape[3]
    scale = f.scale(head_dim)
    e = {
        "out": np.zeros((batch, seqlen_q, num_heads, head_dim_v)),
        "lse": np.zeros((batch, num_heads, seqlen_q)),
        "dq": np.zeros(q.shape),
        "dk": np.zeros(k.shape),
        "dv": np.zeros(v.shape),
    }
    dk, dv = np.zeros(k.shape), np.zeros(v.shape)  # the exact ones, for their own rounding
    for b, h, h_kv, head in heads(q, k, f, sequence):
        m = matrices(head, np.asarray)
        qh, kh, vh, do = q[b, :, h], k[b, :, h_kv], v[b, :, h_kv], dout[b, :, h]

        # Score: the dot product, then a few operations on the result.
        size = np.where(np.isfinite(m.score), np.abs(m.score), 0)
        e_score = _sum_error(head_dim) * abs(scale) * (np.abs(qh) @ np.abs(kh).T) * m.slope
        e_score += U32 * (4 * size + 8 * abs(f.softcap))
        if f.alibi_slopes is not None:
            slopes = np.atleast_2d(f.alibi_slopes)
            slope = abs(float(slopes[min(head.sequence, len(slopes) - 1), h]))
            e_score += 2 * U32 * slope * (seqlen_q + seqlen_k)
        lse = _logsumexp(m.score)
        e_lse = (m.p * e_score).sum(1) + exp_error + _sum_error(seqlen_k) + 2 * U32 * np.abs(lse)
        e["lse"][b, h] = e_lse
        e_row = e_lse + exp_error  # relative error that all P of a row share

        # P: independent relative error, then the rounding for a product. What is smaller than the
        # smallest number of the dtype vanishes; the largest of a row is about 1.
        rho = np.expm1(np.minimum(e_score + exp_error, 50))
        dropped = m.p * m.drop
        e_dropped = dropped * (rho + u) + underflow * (m.p > 0) * m.drop
        out = dropped @ vh
        e_out = u * np.abs(out) + _reach(e_dropped, vh) + e_row[:, None] * np.abs(out)
        e_out += _sum_error(seqlen_k) * (dropped @ np.abs(vh)) + underflow
        e["out"][b, :, h] = e_out
        e_grad_v = e_dropped + e_row[:, None] * dropped  # rows are independent of each other
        e["dv"][b, :, h_kv] += _reach(e_grad_v.T, do) + _sum_error(seqlen_q) * (
            dropped.T @ np.abs(do)
        )
        dv[b, :, h_kv] += dropped.T @ do

        dp = m.drop * (do @ vh.T)
        delta = (do * out).sum(1)
        e_delta = _reach(e_out[:, None], do[..., None])[:, 0, 0] + _sum_error(head_dim_v) * np.abs(
            do * out
        ).sum(1)
        if dlse is not None:
            delta = delta - np.asarray(dlse[b, h], np.float64)
        e_delta += 4 * U32 * np.abs(delta)
        gap = np.abs(dp - delta[:, None])
        p = m.p * m.slope
        ds = p * (dp - delta[:, None])
        e_ds = p * (rho * gap + m.drop * _sum_error(head_dim_v) * (np.abs(do) @ np.abs(vh).T))
        e_ds += (u + 8 * U32) * np.abs(ds) + underflow * (m.p > 0)
        if f.softcap > 0:
            # The derivative 1 - tanh² moves with the score.
            tanh = np.sqrt(np.maximum(1 - m.slope, 0))
            e_ds += m.p * gap * 2 * tanh * (e_score / f.softcap + 4 * U32)
        dq = scale * ds @ kh
        shared = e_row[:, None] * np.abs(dq) + abs(scale) * e_delta[:, None] * np.abs(p @ kh)
        in_sum = abs(scale) * _sum_error(seqlen_k) * (np.abs(ds) @ np.abs(kh))
        e["dq"][b, :, h] = (
            u * np.abs(dq) + abs(scale) * _reach(e_ds, kh) + shared + in_sum + underflow
        )
        e_grad_k = e_ds + e_row[:, None] * np.abs(ds) + e_delta[:, None] * p
        in_sum = _sum_error(seqlen_q) * (np.abs(ds).T @ np.abs(qh))
        e["dk"][b, :, h_kv] += abs(scale) * (_reach(e_grad_k.T, qh) + in_sum)
        dk[b, :, h_kv] += scale * ds.T @ qh
    e["dk"] += u * np.abs(dk) + underflow
    e["dv"] += u * np.abs(dv) + underflow
    return {name: x * (1 + 4 * u) for name, x in e.items()}  # roundings of what is rounded already


def _logsumexp(score: Array) -> Float64:
    """0 for rows that see nothing."""
    top = score.max(axis=1, initial=-np.inf)
    hidden = np.isneginf(top)
    e = np.exp(score - np.where(hidden, 0, top)[:, None]).sum(axis=1)
    return np.where(hidden, 0, np.where(hidden, 0, top) + np.log(np.where(hidden, 1, e)))
