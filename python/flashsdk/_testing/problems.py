"""Random attention problems over every feature, each repeatable from one integer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from .reference import Array, Blocks

DTYPES = {"cpu": ("float32", "bfloat16", "float16"), "gpu": ("bfloat16", "float16")}
# (batch, head, query) rows and the keys they visit: they bound the time that the reference takes.
MAX_ROWS = 500
MAX_VISITS = 80_000
MAX_WIDE_ROWS = 300  # (head, query or key) of problems whose heads are wider than 256


FP8 = "float8_e4m3fn"
FP8_MAX = 448.0


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name in ("bfloat16", FP8):
        import ml_dtypes

        narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return narrow
    return np.dtype(name)


@dataclass(frozen=True)
class BandSpec:
    left: int | None
    right: int | None
    alignment: Literal["bottom_right", "top_left"]


@dataclass(frozen=True)
class Problem:
    """What one call computes. `values` picks the data, everything else is spelled out."""

    seed: int
    dtype: str
    lengths_q: tuple[int, ...]  # of each sequence; batched problems: all the same
    lengths_k: tuple[int, ...]
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    packed: bool = False
    slack: tuple[int, int] = (0, 0)  # packed: how far max_seqlen_q/k exceed the longest sequence
    tail: tuple[int, int] = (0, 0)  # packed: rows of q and of k, v behind the last sequence
    used_q: tuple[int, ...] = ()  # batched: how many rows of each sequence are used; (): all
    used_k: tuple[int, ...] = ()
    softmax_scale: float | None = None
    mask: Any = None  # BandSpec, Blocks, or a flashsdk mask
    bias: tuple[str, tuple[int, int, int, int]] | None = None  # dtype, shape
    alibi: str | None = None  # "heads", "batch"
    sink: bool = False
    # k and v in float8_e4m3fn, and the shapes of their descales; None: not given. A forward alone.
    fp8: tuple[tuple[int, int] | None, tuple[int, int] | None] | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_seed: int = 0
    dropout_offset: int = 0
    # In an array, in place of the two: (seed, offset) of all sequences, or one of each.
    dropout_seeds: tuple[int, int] | tuple[tuple[int, int], ...] = ()
    dlse: bool = False
    values: str = "normal"  # normal, tiny, huge (q and k), zeros (mostly), negative (all logits)
    magnitude: float = 1.0  # what q and k are multiplied with besides
    low_bias: float = 0.0  # what every third row of the bias and one key hold instead
    strides: bool = True  # odd strides and offsets; False: contiguous
    negative_strides: bool = True
    forward_only: bool = False  # a GPU has forwards of wider heads than backwards
    aligned: bool = False  # head dimensions, strides and addresses in multiples of 8 elements
    options: dict[str, Any] = field(default_factory=dict)  # further keywords of the calls

    @property
    def batch(self) -> int:
        return len(self.lengths_q)

    @property
    def max_seqlen(self) -> tuple[int, int]:
        return max(self.lengths_q) + self.slack[0], max(self.lengths_k) + self.slack[1]

    def __str__(self) -> str:
        seqlen = f"{list(self.lengths_q)} x {list(self.lengths_k)} packed"
        if not self.packed:
            seqlen = f"batch {self.batch}, seqlen {self.lengths_q[0]} x {self.lengths_k[0]}"
        heads = f"{self.num_heads}:{self.num_heads_kv} heads"
        head_dim = f"head_dim {self.head_dim}:{self.head_dim_v}"
        parts = [f"{self.dtype}, {seqlen}, {heads}, {head_dim}, {self.values} values"]
        if isinstance(self.mask, Blocks):
            shape = "x".join(map(str, self.mask.full.shape))
            parts.append(f"blocks {shape} of {self.mask.block_size}, band {self.mask.band}")
        elif self.mask is not None:
            parts.append(f"band {self.mask.left}, {self.mask.right}, {self.mask.alignment}")
        names = (
            "slack",
            "tail",
            "used_q",
            "used_k",
            "softmax_scale",
            "bias",
            "alibi",
            "softcap",
            "dropout_p",
            "dropout_seeds",
            "sink",
            "fp8",
            "dlse",
            "low_bias",
            "forward_only",
            "options",
        )
        parts += [
            f"{n} {x}"
            for n in names
            if (x := getattr(self, n)) not in ((0, 0), (), None, 0, {}, False)
        ]
        if self.magnitude != 1:
            parts.append(f"q and k times {self.magnitude:g}")
        return "; ".join(parts)


def generate(seed: int, backend: str = "cpu") -> Problem:
    """The problem of this seed. The same on every machine and every day."""
    rng = np.random.default_rng([seed, 0])

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    dtype = str(rng.choice(DTYPES["cpu" if backend == "cpu" else "gpu"]))
    packed = chance(0.3)
    batch = int(rng.integers(1, 5 if packed else 4))
    kv, group = int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 1, 2, 4]))
    if packed:
        lengths_q, lengths_k = (
            tuple(0 if chance(0.15) else _length(rng) for _ in range(batch)) for _ in "qk"
        )
    else:
        lengths_q, lengths_k = (_length(rng),) * batch, (_length(rng),) * batch
    if chance(0.3):
        lengths_k = lengths_q
    while batch > 1 and _too_long(lengths_q, lengths_k, kv * group):
        batch, lengths_q, lengths_k = batch - 1, lengths_q[1:], lengths_k[1:]
    while _too_long(lengths_q, lengths_k, kv * group):
        kv, group = (kv, group // 2) if group > 1 else (1, 1)
        if kv * group == 1 and _too_long(lengths_q, lengths_k, 1):
            lengths_q = tuple(n // 2 for n in lengths_q)
    num_heads = kv * group
    head_dim = _head_dim(rng)
    slack = (
        (int(rng.integers(0, 40)), int(rng.integers(0, 40))) if packed and chance(0.5) else (0, 0)
    )
    tail = (int(rng.integers(0, 9)), int(rng.integers(0, 9))) if packed and chance(0.3) else (0, 0)
    max_q, max_k = max(lengths_q) + slack[0], max(lengths_k) + slack[1]

    mask: BandSpec | Blocks | None = None
    if (kind := rng.random()) < 0.35:
        mask = _band(rng, max_q, max_k)
    elif kind < 0.6 and max_q > 0 and max_k > 0:
        mask = _blocks(rng, batch, num_heads, max_q, max_k, packed)
    bias = None
    if chance(0.2):
        of = str(rng.choice(["float32", "float16", "bfloat16", "bool"]))
        shape = (batch, num_heads, max(max_q, 1), max(max_k, 1))
        bias = (of, tuple(int(rng.choice([1, n])) for n in shape))
    problem = Problem(
        seed=seed,
        dtype=dtype,
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        num_heads=num_heads,
        num_heads_kv=kv,
        head_dim=head_dim,
        head_dim_v=head_dim if chance(0.6) else _head_dim(rng),
        packed=packed,
        slack=slack,
        tail=tail,
        softmax_scale=float(rng.choice([0.0, -0.3, 0.05, 0.5, 1.7])) if chance(0.15) else None,
        mask=mask,
        bias=bias,  # type: ignore[arg-type]
        alibi=str(rng.choice(["heads", "batch"])) if chance(0.15) else None,
        softcap=float(rng.choice([1.5, 15.0, 50.0])) if chance(0.15) else 0.0,
        dropout_p=float(rng.choice([0.004, 0.1, 0.33, 0.9, 0.97])) if chance(0.2) else 0.0,
        dropout_seed=int(rng.integers(0, 2**63)),
        dropout_offset=int(rng.integers(0, 2**63)) if chance(0.5) else 4,
        dlse=chance(0.25),
        values=str(rng.choice(["normal", "tiny", "huge", "zeros"], p=[0.82, 0.06, 0.06, 0.06])),
        strides=chance(0.6),
        negative_strides=backend == "cpu",
        options={"deterministic": True} if chance(0.2) else {},
    )
    own = np.random.default_rng([seed, 3])  # drawn later than the rest was: that stays as it is
    if problem.dropout_p and (kind := own.random()) < 0.6:
        words = [(int(s), int(o)) for s, o in own.integers(0, 2**63, (batch, 2))]
        problem = replace(problem, dropout_seeds=words[0] if kind < 0.3 else tuple(words))
    own = np.random.default_rng([seed, 4])
    problem = _used(problem, own) if not packed else problem
    problem = replace(problem, sink=bool(own.random() < 0.2))
    own = np.random.default_rng([seed, 6])
    if dtype != "float32" and own.random() < 0.2:
        problem = replace(problem, fp8=(_descale(own, batch, kv), _descale(own, batch, kv)))
    if backend == "cpu":
        problem = _widened(problem, np.random.default_rng([seed, 5]))
    elif backend == "sm80":
        problem = _fit_for_gpu(_widened(problem, np.random.default_rng([seed, 5])))
    # The fast kernels of a GPU take only what is aligned: most problems should be theirs.
    if backend == "cpu" or chance(0.25):
        return problem
    head_dim, head_dim_v = (-(-d // 8) * 8 for d in (problem.head_dim, problem.head_dim_v))
    return replace(problem, aligned=True, head_dim=head_dim, head_dim_v=head_dim_v)


def _widened(problem: Problem, rng: np.random.Generator) -> Problem:
    """Some of the small ones with heads wider than 256."""
    rows = problem.num_heads * max(sum(problem.lengths_q), sum(problem.lengths_k))
    if rows > MAX_WIDE_ROWS or rng.random() > 0.2:
        return problem
    head_dim, head_dim_v = (int(rng.choice([320, 512, 576, n])) for n in rng.integers(257, 577, 2))
    kind = rng.random()
    if kind < 0.4:
        return replace(problem, head_dim=head_dim, head_dim_v=head_dim)
    if kind < 0.6:
        return replace(problem, head_dim=576, head_dim_v=512)
    return replace(problem, head_dim=head_dim, head_dim_v=head_dim_v)


def _fit_for_gpu(problem: Problem) -> Problem:
    """The same with head dimensions that a GPU takes: of keys in fp8 up to 256."""
    problem = replace(problem, head_dim_v=min(problem.head_dim_v, 512))
    if max(problem.head_dim, problem.head_dim_v) > 256:
        problem = replace(problem, fp8=None)
    return replace(problem, forward_only=problem.head_dim > 512)


def _used(problem: Problem, rng: np.random.Generator) -> Problem:
    """The same with used lengths, or without."""

    def some(lengths: tuple[int, ...]) -> tuple[int, ...]:
        kinds = [(0, n, int(rng.integers(0, n + 1)))[int(rng.integers(0, 3))] for n in lengths]
        return tuple(kinds) if rng.random() < 0.35 else ()

    used_q, used_k = some(problem.lengths_q), some(problem.lengths_k)
    mask = problem.mask
    if (used_q or used_k) and isinstance(mask, Blocks) and mask.band is not None:
        # As for packed sequences: blocks are full or not by the shift of all rows.
        mask = replace(mask, band=replace(mask.band, alignment="top_left"))
    return replace(problem, used_q=used_q, used_k=used_k, mask=mask)


def _descale(rng: np.random.Generator, batch: int, heads: int) -> tuple[int, int] | None:
    shape = int(rng.choice([1, batch])), int(rng.choice([1, heads]))
    return shape if rng.random() < 0.8 else None


def _length(rng: np.random.Generator) -> int:
    kind = rng.random()
    if kind < 0.1:
        return 1
    if kind < 0.3:
        return int(rng.integers(2, 20))
    if kind < 0.5:
        return 16 * int(rng.integers(1, 17))
    return int(rng.integers(20, 200 if kind < 0.93 else 600))


def _too_long(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], num_heads: int) -> bool:
    visits = sum(q * k for q, k in zip(lengths_q, lengths_k, strict=True))
    return num_heads * sum(lengths_q) > MAX_ROWS or num_heads * visits > MAX_VISITS


def _head_dim(rng: np.random.Generator) -> int:
    if rng.random() < 0.5:
        return int(rng.choice([16, 32, 64, 80, 96, 128, 192, 256]))
    return int(rng.integers(1, 257 if rng.random() < 0.3 else 72))


def _band(rng: np.random.Generator, max_q: int, max_k: int) -> BandSpec:
    alignment: Literal["bottom_right", "top_left"]
    alignment = "bottom_right" if rng.random() < 0.5 else "top_left"
    if rng.random() < 0.4:
        return BandSpec(None, 0, alignment)
    reach = max(max_q, max_k) // int(rng.choice([1, 4])) + 2
    left, right = (int(rng.integers(-reach // 4, reach)) for _ in range(2))
    return BandSpec(
        left if rng.random() < 0.8 else None, right if rng.random() < 0.8 else None, alignment
    )


def _blocks(
    rng: np.random.Generator, batch: int, num_heads: int, max_q: int, max_k: int, packed: bool
) -> Blocks:
    block_size = (16 * int(rng.choice([1, 2, 3, 4, 8])), 16 * int(rng.choice([1, 2, 3, 4, 8])))
    rows, cols = -(-max_q // block_size[0]), -(-max_k // block_size[1])
    shape = (int(rng.choice([1, batch])), int(rng.choice([1, num_heads])), rows, cols)
    listed = rng.random(shape) < rng.choice([0.2, 0.5, 0.9])
    kind = rng.random()
    if kind < 0.4:
        return Blocks(np.zeros(shape, bool), listed, block_size)
    full = listed & (rng.random(shape) < 0.5) & (kind < 0.7)
    band = _band(rng, max_q, max_k)
    if packed:
        # A layout is made for the longest sequences: with the diagonal in the other corner,
        # blocks that are inside the band there are not in a shorter one.
        band = replace(band, alignment="top_left")
    return Blocks(listed & ~full, full, block_size, band)


@dataclass(frozen=True)
class Placed:
    """An array somewhere inside a larger buffer that is NaN elsewhere."""

    view: Array
    buffer: Array  # 1-d, owns the memory


def place(
    values: Array,
    rng: np.random.Generator | None,
    *,
    negative: bool = True,
    broadcast: bool = False,
    aligned: bool = False,
) -> Placed:
    """`values` in a buffer: with `rng` in odd strides (any but the last), else contiguous.

    With `broadcast` one dimension may get stride 0, and then holds what was its first element.
    `aligned` strides and offsets are multiples of 8 elements.
    """
    dtype, outer = values.dtype, values.ndim - 1
    guard = 8
    order, pad, start = list(range(outer)), [0] * values.ndim, 0
    flip: tuple[int, ...] = ()
    if rng is not None and rng.random() < 0.7:
        axis = int(rng.integers(outer)) if outer else 0
        if broadcast and values.shape[axis] > 1 and rng.random() < 0.15:
            placed = place(values.take([0], axis), rng, negative=negative, aligned=aligned)
            return Placed(np.broadcast_to(placed.view, values.shape), placed.buffer)
        order = [int(i) for i in rng.permutation(outer)]
        pad = [int(rng.choice([0, 0, 1, 3])) for _ in values.shape]
        flip = tuple(i for i in range(outer) if negative and rng.random() < 0.2)
        start = int(rng.integers(0, 9))
        if aligned:
            start, pad[-1] = 8 * start, -values.shape[-1] % 8 + 8 * pad[-1]
    shape = [n + p for n, p in zip(values.shape, pad, strict=True)]
    in_memory = [shape[i] for i in order] + [shape[-1]]
    size = int(np.prod(in_memory))
    poison = True if dtype.kind == "b" else np.nan
    buffer = np.full(start + size + guard, poison, dtype)
    view = buffer[start : start + size].reshape(in_memory)
    view = view.transpose([*np.argsort(order), outer]) if outer else view
    view = view[tuple(slice(0, n) for n in values.shape)]
    view = np.flip(view, flip) if flip else view
    view[...] = values
    return Placed(view, buffer)


def inputs(p: Problem) -> dict[str, Placed]:
    """q, k, v, dout and, where there are any, bias, alibi_slopes, dlse, lengths and seeds.

    Rows that are not used hold NaN.
    """
    rng = np.random.default_rng([p.seed, 1])
    dtype = numpy_dtype(p.dtype)
    total_q, total_k = sum(p.lengths_q) + p.tail[0], sum(p.lengths_k) + p.tail[1]
    of_q = (total_q,) if p.packed else (p.batch, p.lengths_q[0])
    of_k = (total_k,) if p.packed else (p.batch, p.lengths_k[0])
    of_lse = (p.num_heads, total_q) if p.packed else (p.batch, p.num_heads, p.lengths_q[0])
    values: dict[str, Array] = {
        "q": rng.standard_normal((*of_q, p.num_heads, p.head_dim)),
        "k": rng.standard_normal((*of_k, p.num_heads_kv, p.head_dim)),
        "v": rng.standard_normal((*of_k, p.num_heads_kv, p.head_dim_v)),
        "dout": rng.standard_normal((*of_q, p.num_heads, p.head_dim_v)),
    }
    for name in "qkv":
        if p.values == "tiny":
            values[name] *= 1e-4
        elif p.values == "huge" and name != "v":
            values[name] *= 12
        elif p.values == "zeros":
            values[name] *= rng.random(values[name].shape) < 0.05
        elif p.values == "negative" and name != "v":
            values[name] = (6 if name == "q" else -6) * np.abs(values[name])
        if name != "v":
            values[name] *= p.magnitude
    if p.fp8 is not None:
        own = np.random.default_rng([p.seed, 7])
        for name, descale in zip("kv", p.fp8, strict=True):
            values |= _quantised(name, values[name], descale, p, own)
    values = {name: x if x.itemsize < 8 else x.astype(dtype) for name, x in values.items()}
    if p.dlse:
        values["dlse"] = rng.standard_normal(of_lse).astype(np.float32)
    if p.alibi:
        shape = (p.num_heads,) if p.alibi == "heads" else (p.batch, p.num_heads)
        values["alibi_slopes"] = (rng.standard_normal(shape) / 8).astype(np.float32)
    if p.sink:
        values["sink"] = (3 * rng.standard_normal(p.num_heads)).astype(np.float32)
    if p.bias is not None:
        of, size = p.bias
        bias: Array = 2 * rng.standard_normal(size)
        if rng.random() < 0.5:
            bias[rng.random(size) < 0.2] = -np.inf
            bias[..., rng.random(size[2]) < 0.1, :] = -np.inf
        if p.low_bias:
            bias[..., ::3, :] = bias[..., size[3] // 2] = p.low_bias
        bias = bias > 0 if of == "bool" else bias.astype(numpy_dtype(of))
        values["bias"] = bias
    for name in ("q", "dout"):
        _poison(values[name], p.used_q)
    for name in "kv":
        _poison(values[name], p.used_k)
    placed = {
        name: place(
            x,
            rng if p.strides else None,
            negative=p.negative_strides,
            # A broadcast sequence would be the first, whose unused rows others may use.
            broadcast=name in ("q", "k", "v", "dout") and not (p.used_q or p.used_k),
            aligned=p.aligned,
        )
        for name, x in values.items()
    }
    if p.packed:
        for name, lengths in (("cu_seqlens_q", p.lengths_q), ("cu_seqlens_k", p.lengths_k)):
            cu = np.cumsum([0, *lengths]).astype(np.int32)
            placed[name] = Placed(cu, cu)
    for name, used in (("seqused_q", p.used_q), ("seqused_k", p.used_k)):
        if used:
            seqused = np.array(used, np.int32)
            placed[name] = Placed(seqused, seqused)
    if p.dropout_seeds:
        seeds = np.array(p.dropout_seeds, np.uint64).view(np.int64)
        placed["seed"] = Placed(seeds, seeds)
    return placed


def _quantised(
    name: str, x: Array, shape: tuple[int, int] | None, p: Problem, rng: np.random.Generator
) -> dict[str, Array]:
    """k or v in float8_e4m3fn, the largest a number of one to three digits, and its descale."""
    descale = np.ones((1, 1), np.float32)
    if shape is not None:
        largest = np.abs(x).max(initial=0) or 1
        descale = (largest / FP8_MAX * rng.uniform(1, 60, shape)).astype(np.float32)
    of_head = np.broadcast_to(descale, (p.batch, p.num_heads_kv)).astype(np.float64)
    if p.packed:
        row = np.repeat(range(p.batch), p.lengths_k)
        of_head = np.append(of_head[row], np.ones((p.tail[1], p.num_heads_kv)), 0)
    else:
        of_head = of_head[:, None]
    narrow = np.clip(x / of_head[..., None], -FP8_MAX, FP8_MAX).astype(numpy_dtype(FP8))
    return {name: narrow} if shape is None else {name: narrow, f"{name}_descale": descale}


def _poison(rows: Array, used: tuple[int, ...]) -> None:
    for sequence, n in zip(rows, used, strict=False):
        sequence[n:] = np.nan


def mask_of(p: Problem) -> Any:
    """The problem's mask as a flashsdk mask."""
    import flashsdk as fs

    def band_of(band: BandSpec | None) -> fs.Band | None:
        return None if band is None else fs.Band(band.left, band.right, band.alignment)

    if isinstance(p.mask, BandSpec):
        return band_of(p.mask)
    if isinstance(p.mask, Blocks):
        seqlen_q, seqlen_k = p.max_seqlen
        return fs.BlockMask.from_dense(
            p.mask.partial,
            p.mask.block_size,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            band=band_of(p.mask.band),
            full=p.mask.full,
        )
    return p.mask
