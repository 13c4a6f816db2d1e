"""What the tests of torch_sdpa.enable() share: inputs, and what PyTorch's function is held to."""

import contextlib

import pytest
import torch
import torch.nn.functional as functional
from flashsdk.integrations import torch_sdpa
from flashsdk.torch import scaled_dot_product_attention as ours_alone
from standard_attention import check, standard
from torch.nn.attention import SDPBackend, sdpa_kernel

BOTH_WAYS = pytest.mark.usefixtures("sdpa_way")
# For what does not depend on the way. That in Python is always there.
ONCE = pytest.mark.parametrize("sdpa_way", ["python"], indirect=True)
sdpa = functional.scaled_dot_product_attention


def qkv(batch=2, heads=4, heads_kv=None, seqlen_q=40, seqlen_k=None, dim=16, dtype=torch.float32):
    """Heads first, with gradients."""
    shapes = [(heads, seqlen_q), *[(heads_kv or heads, seqlen_k or seqlen_q)] * 2]
    return [torch.randn(batch, *s, dim, dtype=dtype, requires_grad=True) for s in shapes]


def gradients(function, inputs, *args, **options):
    """out, and the gradients of its sum of squares."""
    out = function(*inputs, *args, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, out.detach())


@contextlib.contextmanager
def in_its_own_dtype():
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # CPU's as well
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def same_as_math(inputs, mask=None, *, function=sdpa, **options):
    """By the error bound from PyTorch's plain implementation in float64, and bit by bit from ours.

    The second says that the kernels were ours indeed. ``function`` is what to call instead of
    PyTorch's own.
    """
    why = torch_sdpa.explain(*inputs, mask, **options)
    assert why.taken, str(why)

    def theirs(*x):
        given = mask.to(x[0].dtype) if mask is not None and mask.is_floating_point() else mask
        with sdpa_kernel(SDPBackend.MATH), in_its_own_dtype():
            return (sdpa(*x, given, **options),)

    check(lambda *x: (function(*x, mask, **options),), [x.detach() for x in inputs], theirs)
    as_ours = mask
    if mask is not None and mask.dtype == torch.bool:  # PyTorch hands on a float one
        as_ours = torch.zeros_like(mask, dtype=inputs[0].dtype).masked_fill(~mask, -torch.inf)
    mine = gradients(function, inputs, mask, **options)
    alone = gradients(ours_alone, inputs, as_ours, **options)
    same = 1 if inputs[0].is_cuda else 4  # a GPU sums gradients in any order
    for one, other in zip(mine[:same], alone[:same], strict=True):
        assert torch.equal(one, other)


# ---- sequences behind one another


def starts(lengths, device="cpu"):
    ends = torch.tensor(lengths).cumsum(0)
    return torch.tensor([0, *ends], dtype=torch.int32, device=device)


def rows(lengths, heads=4, dim=16, dtype=torch.float32):
    """(total, heads, dim)."""
    return torch.randn(sum(lengths), heads, dim, dtype=dtype)


def nested(x, offsets):
    """(batch, heads, ragged, dim), with the gradient of x."""
    return torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2)


def jagged(lengths_q, lengths_k, *, device="cpu", **options):
    """A function of packed rows that calls PyTorch's of nested tensors."""
    offsets_q = starts(lengths_q, device).long()
    offsets_k = offsets_q if lengths_k is lengths_q else starts(lengths_k, device).long()

    def call(q, k, v):
        q, k, v = nested(q, offsets_q), nested(k, offsets_k), nested(v, offsets_k)
        return (sdpa(q, k, v, **options).transpose(1, 2).values(),)

    return call


def each_alone(lengths_q, lengths_k, is_causal=False, scale=None):
    """The same by standard attention, a sequence at a time."""

    def call(q, k, v):
        parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
        out = []
        for one in parts:
            visible = None
            if is_causal:
                shape = len(one[0]), len(one[1])
                visible = torch.ones(shape, dtype=torch.bool, device=q.device).tril()
            first = (x[None] for x in one)
            out.append(standard(*first, visible=visible, softmax_scale=scale)[0][0])
        return (torch.cat(out),)

    return call
