"""``flashsdk.merge``: attention over parts of the keys becomes that over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _frameworks
from ._errors import InvalidArgument, dtype_name, has, shown, type_name


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """(out, lse) of attention over keys that were attended to in parts.

    outs
        Of each part (batch, seqlen_q, num_heads, head_dim_v), or packed (total_q, num_heads,
        head_dim_v): one or more arrays of NumPy, CuPy, PyTorch or JAX, of one dtype.
    lses
        Of each part float32 (batch, num_heads, seqlen_q), packed (num_heads, total_q). A row of
        -inf counts for nothing, whatever its out is.

    Computes in float32; out is of the dtype of the first. PyTorch and JAX differentiate it. Of
    parts with a sink one alone may have it. Raises ``Error``, one line.
    """
    outs, lses = _listed("outs", outs), _listed("lses", lses)
    if not outs or len(outs) != len(lses):
        raise InvalidArgument(f"lses: {len(lses)} of {len(outs)} outs; as many, at least one")
    _check_arrays("outs", outs, outs[0], _DTYPES)
    _check_arrays("lses", lses, outs[0], ("float32",))
    if len(outs[0].shape) not in (3, 4):
        allowed = "([batch,] seqlen_q, num_heads, head_dim_v)"
        raise InvalidArgument(f"outs: shape {tuple(outs[0].shape)}; {allowed}")
    *batch, rows, heads, _ = outs[0].shape
    if tuple(lses[0].shape) != (*batch, heads, rows):
        given = tuple(lses[0].shape)
        raise InvalidArgument(f"lses: shape {given}; {(*batch, heads, rows)}, as outs have it")
    xp, cast = _namespace(outs[0])
    stacked = xp.stack([cast(x, xp.float32) for x in lses])
    top = stacked.max(0)
    top = top[0] if isinstance(top, tuple) else top  # torch: values and indices
    top = xp.where(top == -float("inf"), xp.zeros_like(top), top)
    top = top.detach() if hasattr(top, "detach") else top
    weights = xp.exp(stacked - top)
    total = weights.sum(0)
    seen = total > 0
    shares = weights / xp.where(seen, total, xp.ones_like(total))
    # (parts, ..., rows, heads, 1), and in memory: out lies there as these do.
    shares = xp.stack([share.swapaxes(-1, -2) for share in shares])[..., None]
    # Of what counts for nothing not even NaN or infinity does, nor in a derivative.
    zero = xp.zeros_like(shares[0])
    out = sum(
        xp.where(share > 0, cast(x, xp.float32), zero) * share
        for x, share in zip(outs, shares, strict=True)
    )
    lse = xp.log(xp.where(seen, total, xp.ones_like(total))) + top
    lse = xp.where(seen, lse, xp.full_like(lse, -float("inf")))
    return cast(out, outs[0].dtype), lse


_DTYPES = ("float32", "float16", "bfloat16")


def _listed(name: str, arrays: Any) -> list[Any]:
    try:
        return list(arrays)
    except TypeError:
        raise InvalidArgument(f"{name}: {shown(arrays)}; a sequence of arrays") from None


def _check_arrays(name: str, arrays: list[Any], like: Any, dtypes: tuple[str, ...]) -> None:
    """Arrays of one shape, one dtype of those, and the framework of ``like``."""
    for x in arrays:
        if not (has(x, "shape") and has(x, "dtype")):
            raise InvalidArgument(f"{name}: {shown(x)} among them; arrays")
        if type(_frameworks.of(x)) is not type(_frameworks.of(like)):
            allowed = f"as outs[0], a {type_name(like)}"
            raise InvalidArgument(f"{name}: a {type_name(x)} among them; {allowed}")
        if tuple(x.shape) != tuple(arrays[0].shape):
            raise InvalidArgument(f"{name}: {tuple(x.shape)} among them; arrays of one shape")
        given, first = (dtype_name(a) for a in (x, arrays[0]))
        if given not in dtypes or given != first:
            allowed = first if first in dtypes else " or ".join(dtypes)
            raise InvalidArgument(f"{name}: dtype {given} among them; {allowed}")


def _namespace(x: Any) -> tuple[Any, Any]:
    """The functions of x's framework, and how it casts."""
    kind = _frameworks.name((x,))
    if kind == "torch":
        import torch

        return torch, lambda x, dtype: x.to(dtype)
    if kind == "jax":
        import jax.numpy

        return jax.numpy, lambda x, dtype: x.astype(dtype)
    import numpy

    namespace = numpy
    if hasattr(x, "__cuda_array_interface__"):
        import cupy

        namespace = cupy
    return namespace, lambda x, dtype: x.astype(dtype)
