"""Standard attention in PyTorch, and how far from it the adapter may be (docs/numerics.md).

A result may be as far from float64 as twice what standard attention in the same dtype is, plus
1e-5. Both come from the same few lines, differentiated by autograd.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def standard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, num_heads, head_dim_v), lse (batch, num_heads, seqlen_q)."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    s = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if bias is not None and bias.dtype != torch.bool:
        s = s + bias.to(s.dtype)
    elif bias is not None:
        seen = seen & bias
    if alibi_slopes is not None:
        i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
        slopes = alibi_slopes.reshape(-1, alibi_slopes.shape[-1], 1, 1).to(s.dtype)
        s = s - slopes * (i + seqlen_k - seqlen_q - j).abs()
    if visible is not None:
        seen = seen & visible
    lowest = torch.finfo(s.dtype).min
    some = seen.any(-1, keepdim=True)
    s = s.masked_fill(~seen, lowest)
    p = torch.softmax(s, -1) * some
    lse = torch.logsumexp(s, -1).masked_fill(~some.expand(*s.shape[:-1], 1)[..., 0], -torch.inf)
    return (p @ v).transpose(1, 2), lse


def gradients(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """The outputs, and the gradients of sum(weight * output) with respect to the inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    loss = sum(
        (torch.where(y.isfinite(), y, 0).to(w.dtype) * w).sum()
        for y, w in zip(outputs, weights, strict=True)
    )
    return [*(y.detach() for y in outputs), *torch.autograd.grad(loss, inputs)]


def assert_close(ours: Sequence[Tensor], naive: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """The bound, for every tensor; what is not finite must be equal."""
    for a, b, c in zip(ours, naive, exact, strict=True):
        assert a.shape == c.shape
        finite = c.isfinite()
        assert torch.equal(a.isfinite(), finite)
        assert torch.equal(a[~finite].double(), c[~finite])
        error, allowed = ((x.double() - c)[finite].abs().amax() if c.numel() else 0 for x in (a, b))
        assert error <= 2 * allowed + 1e-5, f"error {error:.3g}, standard attention {allowed:.3g}"


def check(
    ours: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    definition: Callable[..., tuple[Tensor, ...]] = standard,
    **options: Any,
) -> None:
    """``ours(q, k, v)`` against ``definition(q, k, v, **options)``, outputs and gradients."""

    def defined(*x: Tensor) -> tuple[Tensor, ...]:
        return definition(*x, **options)

    double = [x.double() for x in inputs]
    with torch.no_grad():
        weights = [torch.randn(y.shape, dtype=torch.float64) for y in defined(*double)]
    exact = gradients(defined, double, weights)
    naive = gradients(defined, inputs, [w.to(inputs[0].dtype) for w in weights])
    mine = gradients(ours, inputs, [w.to(inputs[0].dtype) for w in weights])
    assert_close(mine, naive, exact)
