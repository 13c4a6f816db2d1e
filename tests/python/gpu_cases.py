"""What the tests of GPUs share: arrays that live there, and calls of them."""

import flashsdk as fs
import pytest

torch = pytest.importorskip("torch")

BF16 = torch.bfloat16


def qkv(seqlen=150, heads=2, dim=64, batch=2, dtype=BF16, device="cuda"):
    """q, k, v and dout."""
    shape = batch, seqlen, heads, dim
    return [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]


def both(x, **keywords):
    q, k, v, dout = x
    out, lse = fs.mha_fwd(q, k, v, **keywords)
    return out, lse, *fs.mha_bwd(dout, q, k, v, out, lse, **keywords)


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)
