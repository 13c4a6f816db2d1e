"""What the tests of GPUs share: arrays that live there, and calls of them."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Place:
    """Where the tensors of a test lie, and of which backend the kernels of its calls are.

    No door lets its caller choose a backend. Where a card has sm90, tensors for sm80 begin one
    element behind a multiple of 16 bytes: sm90 takes no such address.
    """

    device: str
    backend: str
    shifted: bool = False

    @classmethod
    def of(cls, backend):
        if backend == "cpu":
            return cls("cpu", "cpu")
        others = any(k["available"] for k in fs.kernels() if k["backend"] == "sm90")
        return cls("cuda", backend, backend == "sm80" and others)

    def put(self, x):
        """x there; autograd goes through it."""
        x = x.to(self.device)
        if not self.shifted:
            return x
        room = x.new_empty(x.numel() + 1)
        room[1:] = x.flatten()
        return room[1:].view(x.shape)

    def randn(self, *shape, dtype):
        return self.put(torch.randn(shape).to(dtype))

    def ours(self, explanation):
        """That a call's kernel is of this backend."""
        assert explanation.kernel.startswith(f"{self.backend}_"), str(explanation)
