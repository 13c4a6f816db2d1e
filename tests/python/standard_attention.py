"""Standard attention in PyTorch, and how far from it the adapter may be (docs/numerics.md).

A result may be as far from float64 as twice what standard attention in the same dtype is, plus
1e-5. Both are the package's second definition, ``_testing.naive``, differentiated by autograd.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from flashsdk._testing import naive
from flashsdk._testing.reference import Features
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
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, num_heads, head_dim_v), lse (batch, num_heads, seqlen_q).

    Every tensor is rounded to the dtype of q, and so is its gradient; sums inside an operation are
    float32.
    """
    dtype, device, group = q.dtype, q.device, q.shape[2] // k.shape[2]
    held = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    f = Features(softmax_scale, softcap=softcap)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    head = naive.Heads(f, *(x.to(held) for x in (q, k, v)), None, None, scale)
    if sink is not None:
        head = replace(head, sink=sink.to(held)[:, None, None])
    added = None
    if bias is not None and bias.dtype == torch.bool:
        visible = bias if visible is None else bias & visible
    elif bias is not None:
        added = bias.to(held)
    if alibi_slopes is not None:
        i, j = (torch.arange(n, device=device) for n in (seqlen_q, seqlen_k))
        distance = (i[:, None] + seqlen_k - seqlen_q - j).abs()
        alibi = -alibi_slopes.reshape(-1, alibi_slopes.shape[-1], 1, 1).to(held) * distance
        added = alibi if added is None else added + alibi
    out, lse = naive.attention(
        head, added, visible, round_to=lambda x: x.to(dtype).to(held), xp=torch
    )
    return out.to(dtype).transpose(1, 2), lse.to(dtype)


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
        weights = [torch.randn_like(y) for y in defined(*double)]
    exact = gradients(defined, double, weights)
    naive = gradients(defined, inputs, [w.to(inputs[0].dtype) for w in weights])
    mine = gradients(ours, inputs, [w.to(inputs[0].dtype) for w in weights])
    assert_close(mine, naive, exact)
