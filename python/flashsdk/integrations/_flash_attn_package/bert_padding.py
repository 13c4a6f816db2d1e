"""Rows of padded batches, packed and put back: flash-attn's functions, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from flashsdk._errors import InvalidArgument
from flashsdk.integrations._rows import offsets, put, take

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``, (rows, ...), of different indices."""
    return take(input, (indices,))


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with ``values`` (rows, ...) at ``indices`` and zeros elsewhere."""
    return put(values, (indices,), (first_axis_dim,))


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """``input[indices]`` and ``input`` itself; the gradients of both are added up."""
    return take(input, (indices,)), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens that a mask names, behind one another.

    hidden_states
        (batch, seqlen, ...).
    attention_mask
        (batch, seqlen), bool or 0 and 1: 1 is a token.
    unused_mask
        The same, of places that are kept as well but not used.

    Returns the tokens (total, ...), their int64 indices in (batch * seqlen), cu_seqlens int32
    (batch + 1,), the longest length, and the number of tokens used of each row, int32 (batch,).
    Raises Error for a mask of another shape.
    """
    _mask_fits("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _mask_fits("unused_mask", unused_mask, hidden_states)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    rows = take(hidden_states.flatten(0, 1), (indices,))
    return rows, indices, offsets(lengths), _longest(lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """``unpad_input`` where each row holds several sequences from its first place on.

    attention_mask_in_length
        (batch, seqlen), integers: the lengths of a row's sequences, then zeros.

    Returns the tokens (total, ...), their indices, cu_seqlens of all sequences, and the longest.
    """
    filled = attention_mask_in_length.sum(-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[-1], device=filled.device)
    indices = (places < filled).flatten().nonzero().flatten()
    every = attention_mask_in_length.flatten()
    lengths = every[every.nonzero().flatten()]
    rows = take(hidden_states.flatten(0, 1), (indices,))
    return rows, indices, offsets(lengths), _longest(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...) with the tokens of ``unpad_input`` where they were, zeros elsewhere."""
    padded = put(hidden_states, (indices,), (batch * seqlen,))
    return padded.reshape(batch, seqlen, *padded.shape[1:])


def _mask_fits(name: str, mask: Tensor, tokens: Tensor) -> None:
    """Another shape would take other tokens, without a word."""
    if mask.shape != tokens.shape[:2]:
        raise InvalidArgument(
            f"{name}: shape {tuple(mask.shape)}; (batch, seqlen) {tuple(tokens.shape[:2])}"
        )


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
