"""Rotary position embeddings (RoFormer, arXiv 2104.09864): flash-attn's, in plain PyTorch.

Everything is computed in float32 and rounded to the input's dtype once. "In place" writes into the
tensor that is given and returns it; gradients are those of the rotation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashsdk import InvalidArgument, _contents
from flashsdk._contents import can_check, first_of, raise_first
from flashsdk._torch_eager import unwatched

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(-b, a) for the pairs (a, b) of the last dimension: its halves, or neighbours."""
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    if interleaved:
        return torch.stack((-b, a), -1).flatten(-2)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """x (batch, seqlen, num_heads, head_dim) by cos, sin (seqlen, rotary_dim / 2), or batched."""
    return _rotated(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first rotary_dim of each head by the angle of its position.

    x
        (batch, seqlen, num_heads, head_dim), or packed (total, num_heads, head_dim).
    cos, sin
        (positions, rotary_dim / 2), rotary_dim <= head_dim. Rows behind the last position stay as
        they are.
    interleaved
        Pairs are neighbours (GPT-J), not a dimension of each half (GPT-NeoX).
    inplace
        Write into x and return it.
    seqlen_offsets
        Position of the first row, 0 or more: one for all or integers (batch,).
    cu_seqlens, max_seqlen
        Of packed x: integers (batch + 1,); the second is not needed.
    """
    packed = cu_seqlens is not None
    if x.dim() != (3 if packed else 4):
        shape = "(total, num_heads, head_dim)" if packed else "(batch, seqlen, num_heads, head_dim)"
        raise InvalidArgument(f"x: shape {tuple(x.shape)}; {shape}")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[-1] > x.shape[-1]:
        allowed = f"two of (positions, rotary_dim / 2), rotary_dim <= {x.shape[-1]}"
        raise InvalidArgument(f"cos: shape {tuple(cos.shape)}, sin's {tuple(sin.shape)}; {allowed}")
    _check_begin("seqlen_offsets", seqlen_offsets)
    cos, sin = (
        table.unsqueeze(-2) for table in _at_positions(x, cos, sin, seqlen_offsets, cu_seqlens)
    )
    rotated = _rotated(x, cos, sin, interleaved)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k in place, in qkv (batch, seqlen, 3, num_heads, head_dim).

    Or (batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim) with ``num_heads_q``. k may have
    tables of its own. Returns qkv.
    """
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise InvalidArgument(
                f"qkv: shape {tuple(qkv.shape)}; (batch, seqlen, 3, num_heads, head_dim)"
            )
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        rest = None if num_heads_q is None or qkv.dim() != 4 else qkv.shape[2] - num_heads_q
        if num_heads_q is None or rest is None or rest < 0 or rest % 2 != 0:
            allowed = "(batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim) and num_heads_q"
            raise InvalidArgument(
                f"qkv: shape {tuple(qkv.shape)}, num_heads_q {num_heads_q}; {allowed}"
            )
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + rest // 2]
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotates k in place, in kv (batch, seqlen, 2, num_heads_kv, head_dim), and returns kv."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise InvalidArgument(
            f"kv: shape {tuple(kv.shape)}; (batch, seqlen, 2, num_heads_kv, head_dim)"
        )
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Tables of angles, as long as they are needed, and their rotation of q and k in place.

    dim
        rotary_dim.
    base
        Of the frequencies base ** (-i / dim), i = 0, 2, … dim - 2.
    interleaved
        As in ``apply_rotary_emb``.
    scale_base
        XPos (arXiv 2212.10554) where it is given; 512 is usual.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        scale = None if scale_base is None else self._scale(device)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _even(self, device: torch.device | str | None) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        return self.base ** (-self._even(device) / self.dim)

    def _scale(self, device: torch.device | str | None) -> Tensor:
        return (self._even(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        cached = self._cos_cached
        if (
            cached is not None
            and seqlen <= self._seq_len_cached
            and (cached.device, cached.dtype) == (device, dtype)
            and not (self.training and cached.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        # A model in 16 bits has rounded the buffers; positions and angles need float32.
        frequencies = self.inv_freq.to(device)
        if frequencies.dtype != torch.float32:
            frequencies = self._frequencies(device)
        angles = torch.outer(positions, frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._cos_k_cached = self._sin_k_cached = None
        if self.scale_base is not None:
            scale = self._scale(device) ** ((positions - seqlen // 2) / self.scale_base)[:, None]
            self._cos_k_cached, self._sin_k_cached = (
                (cos / scale).to(dtype),
                (sin / scale).to(dtype),
            )
            cos, sin = cos * scale, sin * scale
        self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place: qkv as in ``apply_rotary_emb_qkv_``, or q and kv where kv is given.

        seqlen_offset
            Position of the first row, 0 or more: one for all or integers (batch,); with these
            give ``max_seqlen``, the number of positions that are needed.
        """
        _check_begin("seqlen_offset", seqlen_offset)
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise InvalidArgument(
                "max_seqlen: None with a tensor as seqlen_offset; how many positions"
            )
        cos_k, sin_k = self._cos_k_cached, self._sin_k_cached
        where = (self.interleaved, seqlen_offset)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, *where, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, *where)


def _check_begin(name: str, begin: int | Tensor) -> None:
    """Refuses a row before the first position; on a GPU contents are the caller's word."""
    if isinstance(begin, int) and begin < 0:
        raise InvalidArgument(f"{name}: {begin}; 0 or more")
    if not isinstance(begin, Tensor) or not unwatched((begin,)):
        return
    if begin.is_cpu or (_contents.ON and can_check(begin)):
        raise_first(first_of(begin < 0, begin, lambda b, n, _: f"{name}: {n} at [{b}]; 0 or more"))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """By tables that broadcast with x but for the last dimension, rotary_dim / 2."""
    width = 2 * cos.shape[-1]
    if interleaved:
        cos, sin = (table.float().repeat_interleave(2, -1) for table in (cos, sin))
    else:
        cos, sin = (torch.cat((table, table), -1).float() for table in (cos, sin))
    part = x[..., :width].float()
    turned = (part * cos + rotate_half(part, interleaved) * sin).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


def _at_positions(
    x: Tensor, cos: Tensor, sin: Tensor, begin: int | Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rows of cos and sin of x's: (seqlen, …), (batch, seqlen, …) or (total, …)."""
    rows = x.shape[0] if cu_seqlens is not None else x.shape[1]
    if cu_seqlens is None and isinstance(begin, int) and begin + rows <= cos.shape[0]:
        return cos[begin : begin + rows], sin[begin : begin + rows]
    places = torch.arange(rows, device=x.device)
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].contiguous()
        sequence = torch.searchsorted(ends, places.to(ends.dtype), right=True)
        sequence = sequence.clamp(max=len(ends) - 1)
        places = places - cu_seqlens[:-1][sequence]
        places = places + (begin if isinstance(begin, int) else begin[sequence])
    else:
        places = places + (begin if isinstance(begin, int) else begin[:, None])
    there = (places < cos.shape[0])[..., None]
    places = places.clamp(max=cos.shape[0] - 1)
    return torch.where(there, cos[places], 1.0), torch.where(there, sin[places], 0.0)
