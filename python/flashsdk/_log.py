"""``FLASHSDK_LOG=1``: a line on stderr for each distinct call, with its kernel, or why it has none.

Distinct are calls of other shapes, dtype, device, mask or features. Imports no framework.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from . import _bindings, _frameworks
from ._errors import Error, dtype_name, in_short, switch

ON = switch("FLASHSDK_LOG")
MOST = 10_000  # lines; a decoder that grows by a token a call would go on for ever

_seen: dict[str, object] = {}


def call(
    op: str,
    backward: bool,
    qkv: tuple[Any, Any, Any],
    packed: _bindings.Packed,
    options: _bindings.Options,
    *,
    later: str = "",
) -> None:
    """One line, if there was none for such a call.

    ``later`` stands for the kernel where only the run can tell it.
    """
    try:
        text = f"{op} {_arrays(*qkv)}{_features(packed, options)}"
    except Exception:  # of what is no array: the call itself says so
        text = op
    if not _is_new(text):
        return
    try:
        kernel, refused, _, _ = _bindings.explain(backward, qkv, packed, options)
        outcome = later or "; ".join(
            [kernel or "no kernel", *(f"not {name}: {reason}" for name, reason in refused)]
        )
    except Error as e:
        outcome = f"refused: {e}"
    _write(f"flashsdk: {text}: {outcome}\n")


def append(
    k_cache: Any, v_cache: Any, k: Any, q: Any, block_table: Any, rotary: tuple[Any, bool],
    descales: tuple[Any, Any],
) -> None:  # fmt: skip
    """The same of ``kv_append``, which one kernel does on every device."""
    try:
        text = f"kv_append {_shapes(k_cache=k_cache, v_cache=v_cache, k=k, q=q)} {_where(k)}"
        if dtype_name(k_cache) != dtype_name(k):
            text += f", {dtype_name(k_cache)} cache"
        text += ", block_table" * (block_table is not None)
        rotary_cos, interleaved = rotary
        if rotary_cos is not None:
            pairs = "neighbours" if interleaved else "halves"
            text += f", rotary of {2 * rotary_cos.shape[1]} in {pairs}"
        for name, x in zip(("k_descale", "v_descale"), descales, strict=True):
            text += f", {name}" * (x is not None)
    except Exception:  # of what is no array: the call itself says so
        text = "kv_append"
    if _is_new(text):
        _write(f"flashsdk: {text}\n")


def _is_new(text: str) -> bool:
    """Without a lock, which a child would wait for if another thread held it at the fork."""
    mine = object()
    return len(_seen) < MOST and _seen.setdefault(text, mine) is mine


def _write(line: str) -> None:
    """As a whole, so that lines of several threads do not mix. No call fails for its log."""
    with contextlib.suppress(Exception):  # no stderr, a closed one, whatever stands in its place
        sys.stderr.write(line)
        sys.stderr.flush()


def _arrays(q: Any, k: Any, v: Any) -> str:
    same = tuple(k.shape) == tuple(v.shape)
    text = f"{_shapes(q=q, k=k, v=None if same else v)} {_where(q)}"
    return text if dtype_name(k) == dtype_name(q) else f"{text}, {dtype_name(k)} keys"


def _shapes(**arrays: Any) -> str:
    """Of those that are there."""
    given = {name: x for name, x in arrays.items() if x is not None}
    return " ".join(f"{name} {tuple(x.shape)}".replace(", ", ",") for name, x in given.items())


def _where(x: Any) -> str:
    device = _frameworks.of(x).device(x)
    return f"{dtype_name(x)} on {'cpu' if device is None else in_short(str(device))}"


# The last of the options, by their names.
_GIVEN = (
    "seqused_q", "seqused_k", "sink", "block_table", "num_splits", "k_descale", "v_descale",
)  # fmt: skip


def _features(packed: _bindings.Packed, options: _bindings.Options) -> str:
    _, mask, bias, slopes, softcap, dropout_p, _, _, deterministic, _, backend, *given = options
    found = [_mask(mask)]
    if packed:
        found.append(f"{packed[0].shape[0] - 1} sequences of at most {packed[2]} and {packed[3]}")
    if bias is not None:
        found.append(f"{dtype_name(bias)} bias {tuple(bias.shape)}")
    found += ["ALiBi"] * (slopes is not None) + [f"softcap {softcap:g}"] * bool(softcap)
    found += [f"dropout {dropout_p:g}"] * bool(dropout_p)
    found += [name for name, x in zip(_GIVEN, given, strict=True) if x is not None]
    found += ["deterministic"] * bool(deterministic) + [f"backend {backend}"] * bool(backend)
    return "".join(f", {x}" for x in found if x)


def _mask(mask: _bindings.Mask) -> str:
    if mask is None:
        return ""
    if len(mask) != 3:
        block_q, block_k, _, _, band, *_ = mask
        return f"blocks of {block_q} x {block_k}" + (f", {_mask(band)} inside" if band else "")
    left, right, top_left = mask
    kind = "causal" if (left, right) == (None, 0) else f"band ({left}, {right})"
    return kind + (", top-left" if top_left else "")
