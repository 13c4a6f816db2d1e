"""Hugging Face transformers, 5.6 or newer: a name for ``attn_implementation``.

    from flashsdk.integrations import transformers as door
    door.register()  # "fsdk"
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fsdk")

The name holds no "flash": transformers takes every name with it for a package of its own.

transformers makes the mask of a forward once, by ``make_mask``, and hands it to each layer's call
of ``attend``. What it describes by a function of positions becomes a band of the kernels (causal,
sliding window); padding and documents become packed sequences. Where a mask is neither, it is
what transformers gives to PyTorch's function: booleans (batch, 1, seqlen_q, seqlen_k).
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.generation import continuous_batching as batching
from transformers.modeling_utils import AttentionInterface

from .._errors import Error, InvalidArgument, Unsupported, renamed, shown
from .._torch_eager import last_contiguous
from ..masks import Band
from ..torch import attention, varlen_attention
from ._rows import put, take
from ._transformers_masks import Packed, Seen, begun_anew, is_lengths, make_mask

try:  # where transformers keeps what a model is to return beside its result
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:
    _collector = None

__all__ = ["NAME", "continuous_batching", "register"]

NAME = "fsdk"
OLDEST = "5.6"  # release of transformers

if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
    _version = importlib.metadata.version("transformers")
    raise Unsupported(f"transformers: {_version}; {OLDEST} or newer")

# What a model may ask of its attention and does not get, and why.
_REFUSED = {
    "sinks": "attention sinks",
    "head_mask": "a head mask",
    "layer_head_mask": "a head mask",
    "indices": "keys chosen one by one",
    "block_indices": "keys chosen by blocks",
    "block_table": "paged keys",
    "page_table": "paged keys",
}
# What flashsdk.torch calls the arguments.
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attention_mask"}
_NAMES |= {"softmax_scale": "scaling", "dropout_p": "dropout", "sink": "s_aux"}
_NAMES |= {f"cu_seqlens_{x}": f"cu_seq_lens_{x}" for x in "qk"}
_NAMES |= {f"max_seqlen_{x}": f"max_length_{x}" for x in "qk"}


def register(name: str = NAME) -> str:
    """Makes ``name`` valid for ``attn_implementation``, and returns it.

    A model takes it from then on at ``from_pretrained``, in its config, or later by
    ``set_attn_implementation``. Calling this again changes nothing.

    Raises ``Error`` for a name that transformers would take for something else: one with "flash",
    "/", ":", "|" or "@" in it, or one that another function has.
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f'name: {shown(name)}; a text, such as "{NAME}"')
    if "flash" in name.lower():
        allowed = 'one without "flash", which transformers takes for a package of its own'
        raise InvalidArgument(f'name: "{name}"; {allowed}, such as "{NAME}"')
    if any(c in name for c in "/:|@"):
        raise InvalidArgument(
            f'name: "{name}"; one without / : | @, which stand for kernels of a hub'
        )
    functions, masks = AttentionInterface(), masking_utils.AttentionMaskInterface()
    if name == "eager" or functions.get(name, attend) is not attend:
        raise InvalidArgument(f'name: "{name}", which is taken; another, such as "{NAME}"')
    functions.register(name, attend)
    masks.register(name, make_mask)
    return name


# To names with "flash" transformers' continuous batching gives packed sequences, and makes no mask.
_PACKED_NAME = f"{NAME}_flash"


@contextmanager
def continuous_batching(model: Any) -> Iterator[None]:
    """Within it ``model.generate_batch`` and the model's manager attend by flashsdk.

        with door.continuous_batching(model):
            outputs = model.generate_batch(prompts, max_new_tokens=100)

    The model keeps its own attention afterwards. transformers is 5.20 or newer, else an ``Error``:
    older ones hand over keys in another way.
    """
    if not hasattr(batching.ContinuousBatchingManager, "switch_to_cb_friendly_attn"):
        version = importlib.metadata.version("transformers")
        raise Unsupported(f"transformers: {version}; 5.20 or newer for continuous batching")
    AttentionInterface().register(_PACKED_NAME, _attend_packed)
    configs = [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]
    before = [None if config is None else config._attn_implementation for config in configs]
    # Not by set_attn_implementation, which imports a package of this name.
    model.config._attn_implementation = _PACKED_NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            if config is not None:
                config._attn_implementation = name


def _attend_packed(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """``attend`` to the keys of a ``PagedAttentionCache``, and not to the new ones alone."""
    cache = options.pop("cache", None)
    if cache is not None:  # models of transformers 5.24 and newer have filled and read it before
        key, value = cache.update(key, value, module.layer_idx, options)
    return attend(module, query, key, value, mask, **options)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Seen | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function of AttentionInterface, with the arguments that transformers' models pass.

    query (batch, num_heads, seqlen_q, head_dim); key and value (batch, num_heads_kv, seqlen_k,
    head_dim). Returns (batch, seqlen_q, num_heads, head_dim_v) and no weights.
    """
    _refuse(others)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "deterministic": deterministic,
    }
    if position_bias is not None and position_bias.requires_grad and torch.is_grad_enabled():
        allowed = 'one without (torch.no_grad), as it has none; attn_implementation="eager" trains'
        raise Unsupported(f"position_bias: a tensor that requires a gradient; {allowed}")
    sink = others.get("s_aux")
    if sink is not None:
        options["sink"] = sink.float()
    lengths = _given_lengths(others)
    if lengths is not None and position_bias is not None:
        raise InvalidArgument("position_bias: given with cu_seq_lens_q; None, or no cu_seq_lens_q")
    seen: Seen | None = None
    tensor: Tensor | None = None
    if isinstance(attention_mask, Seen):
        seen = attention_mask
        if seen.shape[2:] != (q.shape[1], k.shape[1]):
            given = f"of {seen.shape[2]} queries and {seen.shape[3]} keys"
            raise InvalidArgument(f"attention_mask: {given}; {q.shape[1]} and {k.shape[1]}")
        if lengths is None and position_bias is None:
            documents = begun_anew(seen, q, others.get("position_ids"))
            if documents is not None:
                lengths, k, v = documents, k[:, : seen.used], v[:, : seen.used]
        packed, alike = seen.packed, seen.shape[0] == q.shape[0]
        if not alike and seen.shape[0] != 1 and (packed is not None or seen.padding is not None):
            raise InvalidArgument(
                f"attention_mask: of a batch of {seen.shape[0]}; 1 or {q.shape[0]}"
            )
        # Of packed sequences a bias counts from the first row of each, and a batch is their own.
        shifted = position_bias is not None and packed is not None and not packed.from_start
        if not seen.known or shifted or (packed is not None and not alike):
            tensor = seen.tensor()
            seen = None
    else:
        tensor = attention_mask
    try:
        if seen is not None:
            out = _by_mask(q, k, v, seen, lengths, position_bias, options)
        elif tensor is not None and tensor.dtype == torch.int32 and is_lengths(tensor, q):
            used = tensor.reshape(-1).expand(q.shape[0]).contiguous()
            out = _rows(q, k, v, None, position_bias, {**options, "seqused_k": used})
        elif tensor is not None:
            if lengths is not None:
                raise InvalidArgument(
                    "cu_seq_lens_q: given with a mask; None, or no attention_mask"
                )
            out = _rows(q, k, v, None, _joined(tensor, position_bias), options)
        else:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            options["mask"] = _implied(bool(causal), sliding_window, q.shape[1], lengths)
            out = _rows(q, k, v, lengths, position_bias, options)
    except Error as e:
        raise renamed(e, _NAMES) from None
    return out, None


def _refuse(others: dict[str, Any]) -> None:
    for name, what in _REFUSED.items():
        if others.get(name) is not None:
            allowed = 'None, as they are not supported; attn_implementation="eager" has them'
            raise Unsupported(f"{name}: {what}; {allowed}")
    # Some models, such as GPT-2, do not hand it on to their layers.
    wanted = None if _collector is None or torch.compiler.is_compiling() else _collector.get()
    if others.get("output_attentions") or (wanted and any("attentions" in x for x in wanted)):
        allowed = 'False, as weights are never stored; attn_implementation="eager" has them'
        raise Unsupported(f"output_attentions: True; {allowed}")


def _given_lengths(others: dict[str, Any]) -> Packed | None:
    """Of packed sequences as the caller of a model may give them, in transformers' names."""
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    if others.get(names[0]) is None:
        return None
    for name in names:
        if others.get(name) is None:
            raise InvalidArgument(
                f"{name}: None with cu_seq_lens_q; all four of {', '.join(names)}"
            )
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = (others[name] for name in names)
    return Packed(cu_seqlens_q, cu_seqlens_k, int(longest_q), int(longest_k))


def _implied(
    causal: bool, sliding_window: int | None, q_length: int, lengths: Packed | None
) -> Band | None:
    """What no mask means: as for PyTorch's function, and a window as for flash-attn's.

    Of packed sequences the last query stands at the last key, as for flash-attn's too.
    """
    left = None if sliding_window is None else sliding_window - 1
    if not causal:
        return None if left is None else Band(left, left, "top_left")
    if lengths is not None:
        return Band(left, 0)
    if q_length == 1:  # the last of all
        return None if left is None else Band(left, 0)
    return Band(left, 0, "top_left")


def _joined(mask: Tensor | None, position_bias: Tensor | None) -> Tensor | None:
    """A mask of a model and a bias of a layer as one bias, or bool."""
    if position_bias is None:
        return mask
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, -torch.inf)
    return position_bias + mask


def _rows(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed | None, bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """out (batch, seqlen_q, num_heads, head_dim_v) of q, k and v that are batched, or packed."""
    bias = None if bias is None else last_contiguous(bias)  # T5's is a transpose
    out: Tensor
    if packed is None:
        out = attention(q, k, v, bias=bias, **options)
        return out
    batch, seqlen_q = q.shape[:2]
    q = q.flatten(0, 1) if packed.queries is None else take(q, packed.queries)
    k, v = (x.flatten(0, 1) if packed.keys is None else take(x, packed.keys) for x in (k, v))
    if bias is not None:
        bias = bias[..., : packed.max_seqlen_q, : packed.max_seqlen_k]
    out = varlen_attention(q, k, v, *packed[:4], bias=bias, **options)
    if packed.queries is None:
        return out.unflatten(0, (batch, seqlen_q))  # type: ignore[no-untyped-call, no-any-return]
    return put(out, packed.queries, (batch, seqlen_q))


def _by_mask(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, lengths: Packed | None, bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    packed = seen.packed
    if lengths is not None:
        if seen.padding is not None or (packed is not None and packed.keys is not None):
            raise InvalidArgument("cu_seq_lens_q: given with padding; None, or no attention_mask")
        packed = lengths
    if seen.used < k.shape[1] and packed is None:
        k, v = k[:, : seen.used], v[:, : seen.used]
        bias = None if bias is None else bias[..., : seen.used]
    if seen.padding is not None:
        bias = _joined(seen.padding[:, None, None], bias)
    return _rows(q, k, v, packed, bias, {**options, "mask": seen.band})
