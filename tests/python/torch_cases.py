"""Tensors and masks that the tests of flashsdk.torch have in common."""

import flashsdk as fs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = tuple(int(x) for x in torch.__version__.split(".")[:2])
OFFSETS = torch.tensor([0, 30, 30, 70], dtype=torch.int32)
SINK = torch.linspace(-1, 1, 4)
USED = {
    "seqused_q": torch.tensor([70, 9], dtype=torch.int32),
    "seqused_k": torch.tensor([33, 70], dtype=torch.int32),
}


class Watching(TorchDispatchMode):
    """Looks on, and changes nothing: calls go through operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def qkv(
    batch=2, seqlen_q=70, seqlen_k=None, heads=4, heads_kv=None, dim=32, dim_v=None, dtype=None
):
    """q, k and v of the shapes that attention takes."""
    seqlen_k, heads_kv = seqlen_k or seqlen_q, heads_kv or heads
    shapes = ((seqlen_q, heads, dim), (seqlen_k, heads_kv, dim), (seqlen_k, heads_kv, dim_v or dim))
    return [torch.randn(batch, *shape).to(dtype or torch.float32) for shape in shapes]


def with_gradients(tensors):
    return [x.detach().requires_grad_() for x in tensors]


def rotated(x, cos, sin, positions, interleaved):
    """x (rows, heads, dim), turned by the rows of its positions."""
    cos, sin = cos[positions, None], sin[positions, None]
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((turned, rest), -1)


def block_mask(seqlen_q=70, seqlen_k=70, band=None):
    blocks = [[[True, False, True, False, True]] * 5, [[False, True, True, True, False]] * 5]
    blocks[1][2] = [False] * 5  # rows that see nothing
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return fs.BlockMask.from_dense([b for b in blocks for _ in (0, 1)], 16, **sizes, band=band)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Nothing here is large enough for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
