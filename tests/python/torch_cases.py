"""Tensors and masks that the tests of flashsdk.torch have in common."""

import flashsdk as fs
import torch

TORCH = tuple(int(x) for x in torch.__version__.split(".")[:2])
OFFSETS = torch.tensor([0, 30, 30, 70], dtype=torch.int32)
SINK = torch.linspace(-1, 1, 4)
USED = {
    "seqused_q": torch.tensor([70, 9], dtype=torch.int32),
    "seqused_k": torch.tensor([33, 70], dtype=torch.int32),
}


def qkv(
    batch=2, seqlen_q=70, seqlen_k=None, heads=4, heads_kv=None, dim=32, dim_v=None, dtype=None
):
    """q, k and v of the shapes that attention takes."""
    seqlen_k, heads_kv = seqlen_k or seqlen_q, heads_kv or heads
    shapes = ((seqlen_q, heads, dim), (seqlen_k, heads_kv, dim), (seqlen_k, heads_kv, dim_v or dim))
    return [torch.randn(batch, *shape).to(dtype or torch.float32) for shape in shapes]


def with_gradients(tensors):
    return [x.detach().requires_grad_() for x in tensors]


def block_mask(seqlen_q=70, seqlen_k=70, band=None):
    blocks = [[[True, False, True, False, True]] * 5, [[False, True, True, True, False]] * 5]
    blocks[1][2] = [False] * 5  # rows that see nothing
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return fs.BlockMask.from_dense([b for b in blocks for _ in (0, 1)], 16, **sizes, band=band)
