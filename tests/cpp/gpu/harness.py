"""Drives single GPU kernels through harness.cpp on PyTorch tensors."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.bool: 4, FP8: 7}
UNLIMITED = 1 << 40
MASK_KINDS = {"dense": 0, "band": 1, "block_sparse": 2}


@dataclasses.dataclass
class Mask:
    kind: str = "dense"
    left: int = UNLIMITED
    right: int = UNLIMITED
    top_left: bool = False
    block: tuple[int, int] = (0, 0)
    blocks: np.ndarray | None = (
        None  # (batch | 1, heads | 1, rows, cols): 0 skip, 1 full, 2 partial
    )
    lists: list | None = None

    def upload(self, device):
        """CSR lists of row_partial, row_full, col_partial, col_full on the device."""
        if self.kind != "block_sparse" or self.lists is not None:
            return
        self.lists = []
        for transpose in (False, True):
            grid = self.blocks.swapaxes(2, 3) if transpose else self.blocks
            for value in (2, 1):
                hit = grid == value
                b, h, lines, _ = hit.shape
                counts = hit.sum(-1).reshape(-1)
                ends = np.cumsum(counts)
                offsets = np.zeros((b, h, lines + 1), np.int32)
                starts = np.concatenate([[0], ends[:-1]]).reshape(b, h, lines)
                offsets[..., :-1] = starts
                offsets[..., -1] = ends.reshape(b, h, lines)[..., -1]
                indices = np.nonzero(hit.reshape(-1, hit.shape[-1]))[1].astype(np.int32)
                indices = np.append(indices, 0).astype(np.int32)  # never an empty tensor
                self.lists.append(
                    (torch.from_numpy(offsets).to(device), torch.from_numpy(indices).to(device))
                )

    def visible(self, b, h, seqlen_q, seqlen_k, device):
        """(seqlen_q, seqlen_k) bool."""
        i = torch.arange(seqlen_q, device=device)[:, None]
        j = torch.arange(seqlen_k, device=device)[None]
        d = j - i - (0 if self.top_left else seqlen_k - seqlen_q)
        band = (d >= -self.left) & (d <= self.right)
        if self.kind == "dense":
            return torch.ones_like(band)
        if self.kind == "band":
            return band
        grid = torch.from_numpy(
            self.blocks[min(b, self.blocks.shape[0] - 1), min(h, self.blocks.shape[1] - 1)]
        ).to(device)
        cell = grid[
            (i // self.block[0]).expand(seqlen_q, seqlen_k),
            (j // self.block[1]).expand(seqlen_q, seqlen_k),
        ]
        return (cell == 1) | ((cell == 2) & band)


@dataclasses.dataclass
class Problem:
    q: torch.Tensor  # (batch, seqlen_q, heads, head_dim) or packed (total_q, heads, head_dim)
    k: torch.Tensor
    v: torch.Tensor
    mask: Mask = dataclasses.field(default_factory=Mask)
    softmax_scale: float | None = None
    softcap: float = 0.0
    bias: torch.Tensor | None = None  # 4-d, broadcast by size 1
    alibi: torch.Tensor | None = None  # (heads) or (batch, heads)
    threshold: int = 0
    seed: int = 0
    offset: int = 0
    # int64 {seed, offset}, (2) of all sequences or (batch, 2) of each; in place of the two
    state: torch.Tensor | None = None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    used_q: torch.Tensor | None = None  # int32 (batch), of a batched problem
    used_k: torch.Tensor | None = None
    sink: torch.Tensor | None = None  # (heads)
    table: torch.Tensor | None = None  # int32 (batch, pages each): k and v are pages
    deterministic: bool = False
    k_descale: torch.Tensor | None = None  # (batch, heads of keys), of k and v in float8_e4m3fn
    v_descale: torch.Tensor | None = None

    def widened(self):
        """The same problem with the keys and values that fp8 stands for, in float64."""
        factors = [
            self.descale_of_rows(x, d)
            for x, d in ((self.k, self.k_descale), (self.v, self.v_descale))
        ]
        k, v = (x.double() * f for x, f in zip((self.k, self.v), factors, strict=True))
        return dataclasses.replace(self, k=k, v=v, k_descale=None, v_descale=None)

    def descale_of_rows(self, x, descale):
        """What broadcasts to x, whose keys are not in pages."""
        if descale is None:
            return torch.ones((), device=x.device, dtype=torch.float64)
        if not self.packed:
            return descale.double()[:, None, :, None]
        each = descale.double().repeat_interleave(self.cu_k.diff(), 0)
        behind = each.new_ones(x.shape[0] - each.shape[0], each.shape[1])
        return torch.cat([each, behind])[..., None]

    @property
    def packed(self):
        return self.cu_q is not None

    @property
    def scale(self):
        return self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def features(self):
        return bool(
            self.softcap > 0
            or self.bias is not None
            or self.alibi is not None
            or self.threshold > 0
        )

    def dropout_of(self, b, h):
        """seed, offset, and the number that a head of a sequence has for dropout."""
        heads = self.q.shape[-2]
        if self.state is None:
            return self.seed, self.offset, b * heads + h
        if self.state.dim() == 1:
            return *self.state.tolist(), b * heads + h
        return *self.state[b].tolist(), h

    def sequences(self):
        """(batch index, slice of q rows, slice of k rows)"""
        if not self.packed:
            return [(b, slice(None), slice(None)) for b in range(self.q.shape[0])]
        cq, ck = self.cu_q.tolist(), self.cu_k.tolist()
        return [(b, slice(cq[b], cq[b + 1]), slice(ck[b], ck[b + 1])) for b in range(len(cq) - 1)]


class Harness:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.harness_refusal.restype = ctypes.c_char_p
        self.lib.harness_architecture.restype = ctypes.c_char_p
        self.lib.harness_launch.restype = ctypes.c_char_p
        self.lib.harness_workspace.restype = ctypes.c_int64
        self.entries = []
        for i in range(self.lib.harness_count()):
            out = (ctypes.c_int * 10)()
            self.lib.harness_describe(i, out)
            self.entries.append(tuple(out))

    def backend(self, index):
        """The library's name of what a kernel belongs to: "sm80" or "sm90"."""
        return self.lib.harness_architecture(index).decode().rstrip("a").replace("_", "")

    def words(
        self, p: Problem, out, lse, dout=None, dq=None, dk=None, dv=None, dlse=None, dsink=None
    ):
        p.mask.upload(p.q.device)
        packed = p.packed
        words = [DTYPES[p.q.dtype], p.q.device.index or 0]
        heads, kv = p.q.shape[-2], p.k.shape[-2]
        if packed:
            lengths_q, lengths_k = p.cu_q.cpu().diff(), p.cu_k.cpu().diff()
            batch = len(p.cu_q) - 1
            sizes = [int(lengths_q.max()), int(lengths_k.max()), p.q.shape[0], p.k.shape[0]]
        else:
            batch = p.q.shape[0]
            keys = p.k.shape[1] * (1 if p.table is None else p.table.shape[1])
            sizes = [p.q.shape[1], keys, p.q.shape[1], keys]
        words += [batch, heads, kv, p.q.shape[-1], p.v.shape[-1], *sizes]
        words += [p.cu_q.data_ptr(), p.cu_k.data_ptr()] if packed else [0, 0]
        words.append(int(p.deterministic))
        for t in (p.q, p.k, p.v, out, dout, dq, dk, dv, lse, dlse):
            if t is None:
                words += [0] * 4
            elif packed:
                words += [t.data_ptr(), 0, t.stride(0), t.stride(1)]
            else:
                words += [t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)]
        m = p.mask
        words += [MASK_KINDS[m.kind], m.left, m.right, int(m.top_left), *m.block]
        for i in range(4):
            if m.lists is None:
                words += [0] * 4
                continue
            offsets, indices = m.lists[i]
            words += [offsets.data_ptr(), indices.data_ptr()]
            words += [offsets.stride(d) if offsets.shape[d] > 1 else 0 for d in (0, 1)]
        if p.bias is None:
            words += [0] * 6
        else:
            words += [p.bias.data_ptr(), DTYPES[p.bias.dtype]]
            words += [p.bias.stride(d) if p.bias.shape[d] > 1 else 0 for d in range(4)]
        if p.alibi is None:
            words += [0, 0]
        else:
            words += [p.alibi.data_ptr(), p.alibi.stride(0) if p.alibi.dim() == 2 else 0]
        words += [p.threshold, p.seed, p.offset]
        if p.state is None:
            words += [0, 0]
        else:
            words += [p.state.data_ptr(), p.state.stride(0) if p.state.dim() == 2 else 0]
        for t in (p.used_q, p.used_k, p.sink, dsink, p.table):
            words.append(0 if t is None else t.data_ptr())
        pages = [0, 0, 0] if p.table is None else [p.table.stride(0), p.k.shape[1], p.k.shape[0]]
        words += [*pages, DTYPES[p.k.dtype]]
        for t in (p.k_descale, p.v_descale):
            words += [0] * 3 if t is None else [t.data_ptr(), t.stride(0), t.stride(1)]
        return (ctypes.c_int64 * len(words))(*words)

    def pick(self, op, p: Problem, words, all_fitting=False):
        # As the library selects: those that split keys, then the smallest head_dim, then features.
        found = []
        order = sorted(
            range(len(self.entries)),
            key=lambda i: (-self.entries[i][7], self.entries[i][2], self.entries[i][4], i),
        )
        for i in order:
            e_op, dtype, _, mask, features, *_ = self.entries[i]
            if (e_op, dtype, mask) != (op, DTYPES[p.q.dtype], MASK_KINDS[p.mask.kind]) or (
                p.features and not features
            ):
                continue
            if (
                self.lib.harness_refusal(
                    i, words, ctypes.c_double(p.scale), ctypes.c_double(p.softcap)
                )
                is None
            ):
                found.append(i)
                if not all_fitting:
                    break
        if not found:
            raise LookupError(
                f"no kernel for op {op}, head_dim {p.q.shape[-1]}, {p.mask.kind}, "
                f"features {p.features}"
            )
        return found if all_fitting else found[0]

    def launch(self, index, p, words, workspace=None):
        message = self.lib.harness_launch(
            index,
            words,
            ctypes.c_double(p.scale),
            ctypes.c_double(p.softcap),
            ctypes.c_void_p(workspace.data_ptr() if workspace is not None else 0),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if message is not None:
            raise RuntimeError(message.decode())

    def outputs(self, p):
        """out and lse, poisoned."""
        out = torch.full(
            (*p.q.shape[:-1], p.v.shape[-1]), math.nan, dtype=p.q.dtype, device=p.q.device
        )
        shape = (
            (p.q.shape[1], p.q.shape[0]) if p.packed else (p.q.shape[0], p.q.shape[2], p.q.shape[1])
        )
        return out, torch.full(shape, math.nan, dtype=torch.float32, device=p.q.device)

    def forward(self, p, index=None):
        out, lse = self.outputs(p)
        words = self.words(p, out, lse)
        index = self.pick(0, p, words) if index is None else index
        self.launch(index, p, words, self.workspace(index, p, words))
        return out, lse

    def workspace(self, index, p, words):
        """Poisoned."""
        size = self.lib.harness_workspace(index, words)
        return torch.full((size,), 0xFF, dtype=torch.uint8, device=p.q.device)

    def backward(self, p, out, lse, dout, dlse=None, index=None):
        grads = [torch.full_like(t, math.nan) for t in (p.q, p.k, p.v)]
        words = self.words(p, out, lse, dout, *grads, dlse)
        index = self.pick(1, p, words) if index is None else index
        self.launch(index, p, words, self.workspace(index, p, words))
        return grads
