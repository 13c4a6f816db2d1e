"""``flashsdk.kv_append``: new keys and values behind the used ones of a cache."""

from __future__ import annotations

from typing import Any

from . import _bindings, _contents, _frameworks, _log
from ._errors import InvalidArgument, Unsupported, has, shown, truth

NO_BACKWARD = (
    "a tensor that requires a gradient; one without, or torch.no_grad(), as a cache has no backward"
)


def kv_append(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    seqused_k: Any,
    *,
    block_table: Any = None,
    q: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    q_advances: bool = True,
    k_descale: Any = None,
    v_descale: Any = None,
) -> Any:
    """Writes k and v into a cache behind its used keys; returns q rotated, or None without q.

    k_cache, v_cache
        Written: (batch, seqlen_k, num_heads_kv, head_dim) and (..., head_dim_v), or with
        block_table pages, (num_pages, page_size, num_heads_kv, ...).
    k, v
        (batch, seqlen_new, num_heads_kv, head_dim) and (..., head_dim_v), of the cache's dtype, or
        bfloat16 or float16 for a cache in float8_e4m3fn.
    seqused_k
        int32 (batch,): new key j of sequence b becomes key seqused_k[b] + j. It stays as it is:
        ``mha_fwd`` is given seqused_k + seqlen_new.
    block_table
        int32 (batch, max_pages), as in ``mha_fwd``.
    q
        (batch, seqlen_q, num_heads, head_dim); query i is rotated to position seqused_k[b] + i, or
        with q_advances=False to seqused_k[b].
    rotary_cos, rotary_sin
        (positions, rotary_dim / 2), float32 or k's dtype, rotary_dim at most head_dim. Key j and
        q are turned by the row of their position, in float32; None turns nothing.
    rotary_interleaved
        Pairs are neighbours, (0, 1), (2, 3), ... (GPT-J); False: (0, rotary_dim / 2), ...
        (GPT-NeoX, Llama).
    k_descale, v_descale
        float32 (batch | 1, num_heads_kv | 1), as in ``mha_fwd``: a cache in float8_e4m3fn gets
        k, once rotated, and v, divided by them in float32 and rounded once. What lies beyond
        448 becomes ±448.

    On a GPU it runs on the stream that k's framework works on; lengths and tables are read there,
    and what they contain is the caller's word. ``flashsdk.torch.kv_append`` is the same on
    PyTorch's threads, and known to torch.compile. A cache has no backward: tensors that require a
    gradient are refused, except under ``torch.no_grad()``. Raises ``Error``, one line, before
    anything is written.
    """
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache is None:
            raise InvalidArgument(f"{name}: None; an array")
        if _frameworks.name((cache,)) == "jax":
            raise InvalidArgument(
                f"{name}: an immutable array of JAX; flashsdk.jax.kv_append, which returns new ones"
            )
        _frameworks.own(name, cache)
    turning = (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin))
    scales = (("k_descale", k_descale), ("v_descale", v_descale))
    for name, given in (("k", k), ("v", v), ("q", q), *turning, *scales):
        # The attribute first: each call pays for what is asked here.
        if getattr(given, "requires_grad", False) and _frameworks.of(given).recorded(given):
            raise Unsupported(f"{name}: {NO_BACKWARD}")
    how = (truth("rotary_interleaved", rotary_interleaved), truth("q_advances", q_advances))
    if _log.ON:
        rotary = (rotary_cos, rotary_interleaved)
        _log.append(k_cache, v_cache, k, q, block_table, rotary, (k_descale, v_descale))
    if _contents.ON:
        _contents.check_append(k_cache, k, seqused_k, block_table, rotary_cos, q, q_advances)
    turned = None
    if q is not None:
        if not has(q, "shape"):
            raise InvalidArgument(f"q: {shown(q)}; an array with a shape")
        framework = _frameworks.of(q)
        turned = framework.empty_like(q, q)
    tensors = (
        k_cache, v_cache, k, v, seqused_k, block_table, q, turned, rotary_cos, rotary_sin,
        k_descale, v_descale,
    )  # fmt: skip
    _bindings.append(tensors, *how)
    _frameworks.written(k_cache)
    _frameworks.written(v_cache)
    return None if q is None else framework.finish(turned)
