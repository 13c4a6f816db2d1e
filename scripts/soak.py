"""Launches GPU kernels by the hundred thousand at random shapes, and checks every output of each.

    python3 scripts/soak.py [--launches N] [--seconds T] [--first-seed S]
    python3 scripts/soak.py --seed S       # one problem again, with all that there is to say

A problem is one of `flashsdk verify`, made larger and without what the fast kernels leave to
others; every eighth has its sequences many times over instead, so that most of these have more
tiles than there are multiprocessors, each of which then computes several. Forward and backward run
on the fast backend and on the slow one, out of and into memory of a GPU that holds NaN where
nothing was written, workspaces too. What an output may be off by comes from `_testing.tolerance`,
element by element: each backend may be so far from float64, and the two from each other by the sum.
Of every 50th problem the bits are kept, and some hundred problems later all of these run once more,
on several streams at a time and in another order.

The last line is a record in JSON. Any number of these processes may share a GPU, or have others
beside them; CUDA_VISIBLE_DEVICES picks one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import secrets
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import flashsdk as fs
import numpy as np
import torch
from flashsdk import _frameworks
from flashsdk._testing import dense
from flashsdk._testing.problems import BandSpec, Problem, generate, mask_of
from flashsdk._testing.reference import Blocks

OUTPUTS = ("out", "lse", "dq", "dk", "dv")
FACTORS = (1, 2, 4, 8, 16)  # by which lengths grow
LARGEST = 1_000_000  # scores of a problem: they bound the time that a definition takes
CROWDED = 8  # of so many problems one has
HEADS = 640  # of its sequences together, at most
MOST = 4_000_000  # scores of it, at most
BATCH = 256  # problems, after which the GPU is asked for what was found
REPEATED = 50  # of so many problems one is run again
STREAMS = 4
GAP = 64  # elements between outputs, which have to stay NaN
POOL = 1 << 25  # random numbers that tensors are views of
LARGEST_GAP = 24  # between rows of such a view


def soaked(seed: int, largest_head_dim: int, dtypes: list[str]) -> Problem:
    """The problem of this seed; a fast kernel takes nearly all of these."""
    p = generate(seed, "gpu")
    rng = np.random.default_rng([seed, 3])
    dims = (8 * int(rng.integers(1, largest_head_dim // 8 + 1)) if d > largest_head_dim else d
            for d in (p.head_dim, p.head_dim_v))  # fmt: skip
    head_dim, head_dim_v = (-(-d // 8) * 8 for d in dims)
    deterministic = bool(p.options) or seed % REPEATED == 0  # whose bits can be compared
    # ALiBi has fast kernels of its own, and a bias, alone or beside dropout, up to head_dim 128.
    dtype = p.dtype if p.dtype in dtypes else dtypes[0]
    alibi = None if p.softcap or p.dropout_p else p.alibi
    bias = p.bias and ("bool" if p.bias[0] == "bool" else dtype, p.bias[1])
    p = replace(
        p, bias=None if p.softcap or alibi or max(head_dim, head_dim_v) > 128 else bias,
        alibi=alibi, aligned=True,
        head_dim=head_dim, head_dim_v=head_dim_v,
        dtype=dtype,
        options={"deterministic": True} if deterministic else {},
    )  # fmt: skip
    crowd = seed % CROWDED == CROWDED - 2
    p = p if crowd and not isinstance(p.mask, Blocks) else grown(p, rng)
    p = crowded(p) if crowd else p
    if p.bias:
        shape = (p.batch, p.num_heads, *p.max_seqlen)
        rows = (n if of > 1 else 1 for n, of in zip(shape[:3], p.bias[1]))
        p = replace(p, bias=(p.bias[0], (*rows, shape[3])))
    used_q, used_k = (
        tuple(int(rng.integers(0, n + 1)) for n in lengths) if used else ()
        for lengths, used in ((p.lengths_q, p.used_q), (p.lengths_k, p.used_k))
    )
    return replace(p, used_q=used_q, used_k=used_k, sink=False, fp8=None)


def grown(p: Problem, rng: np.random.Generator) -> Problem:
    """Lengths, blocks and band some times as large, and lengths by less than that smaller again.

    Blocks become multiples of 128, which every tile divides; their grid stays as it was.
    """
    most = max(1, LARGEST // (p.num_heads * p.batch * max(1, math.prod(p.max_seqlen))))
    least = [1, 1]
    if isinstance(p.mask, Blocks):
        least = [128 // math.gcd(128, block) for block in p.mask.block_size]
        if math.prod(least) > most:
            p, least = replace(p, mask=p.mask.band), [1, 1]
    factors = [n * int(rng.choice(FACTORS)) for n in least]

    def too_large() -> bool:
        numbers = vectors(p, *factors) * max(p.head_dim, p.head_dim_v)
        return math.prod(factors) > most or numbers > POOL // 2  # and rows behind the last sequence

    while too_large() and factors != least:
        axis = 0 if factors[1] == least[1] or (factors[0] > least[0] and rng.random() < 0.5) else 1
        factors[axis] = max(least[axis], factors[axis] // 2)
    longest = [n * factor for n, factor in zip(p.max_seqlen, factors)]

    def scaled(lengths: tuple[int, ...], factor: int) -> tuple[int, ...]:
        less = rng.integers(0, factor, len(lengths) if p.packed else 1)
        less = np.broadcast_to(less, len(lengths))
        return tuple(n and n * factor - int(cut) for n, cut in zip(lengths, less))

    lengths_q, lengths_k = (
        scaled(lengths, factor) for lengths, factor in zip((p.lengths_q, p.lengths_k), factors)
    )
    # A layout is of the longest sequences that there may be, a batched one of those that there are.
    slack = (longest[0] - max(lengths_q), longest[1] - max(lengths_k)) if p.packed else (0, 0)
    reach = max(factors)

    def band(of: BandSpec | None) -> BandSpec | None:
        if of is None:
            return None
        left, right = (None if x is None else x * reach for x in (of.left, of.right))
        return replace(of, left=left, right=right)

    mask: Any = p.mask
    if isinstance(mask, Blocks):
        block_q, block_k = (b * f for b, f in zip(mask.block_size, factors))
        mask = replace(mask, block_size=(block_q, block_k), band=band(mask.band))
    elif isinstance(mask, BandSpec):
        mask = band(mask)
    return replace(p, lengths_q=lengths_q, lengths_k=lengths_k, slack=slack, mask=mask)


def vectors(p: Problem, factor_q: int = 1, factor_k: int = 1) -> int:
    """Rows of all heads of q or of k, whichever are more, with lengths so many times as large."""
    longest_q, longest_k = p.max_seqlen
    of_q, of_k = longest_q * factor_q * p.num_heads, longest_k * factor_k * p.num_heads_kv
    return p.batch * max(of_q, of_k)


def crowded(p: Problem) -> Problem:
    """Its sequences many times over, each with numbers of its own."""
    if isinstance(p.mask, Blocks) and p.mask.full.shape[0] > 1:  # the grid says how many there are
        return p
    times = min(
        HEADS // (p.batch * p.num_heads),
        MOST // max(1, p.batch * p.num_heads * math.prod(p.max_seqlen)),
        POOL // 2 // max(1, vectors(p) * (max(p.head_dim, p.head_dim_v) + LARGEST_GAP)),
    )
    times = max(1, times)
    seeds: Any = p.dropout_seeds
    if np.ndim(seeds) == 2:  # of each sequence
        seeds = tuple((seed ^ n, offset) for n in range(times) for seed, offset in seeds)
    return replace(
        p, lengths_q=p.lengths_q * times, lengths_k=p.lengths_k * times, dropout_seeds=seeds
    )


class Pool:
    """Random numbers, made once: the tensors of a problem are views of them."""

    def __init__(self, device: str, dtypes: list[str], size: int):
        normal = torch.randn(size, device=device)
        kept = torch.rand(size, device=device) < 0.05
        kinds = {"normal": normal, "tiny": 1e-4 * normal, "huge": 12 * normal}
        kinds["zeros"] = normal * kept
        self.of = {
            (dtype, kind): x.to(getattr(torch, dtype))
            for dtype in dtypes
            for kind, x in kinds.items()
        }
        self.float32 = normal
        hidden = torch.where(normal > 1, -torch.inf, normal)
        self.biases = {dtype: hidden.to(getattr(torch, dtype)) for dtype in dtypes}
        self.biases["bool"] = normal > -0.5

    def tensors(self, p: Problem, device: str) -> dict[str, Any]:
        """What the calls of a problem read."""
        rng = np.random.default_rng([p.seed, 4])
        total_q, total_k = sum(p.lengths_q) + p.tail[0], sum(p.lengths_k) + p.tail[1]
        of_q = (total_q,) if p.packed else (p.batch, p.lengths_q[0])
        of_k = (total_k,) if p.packed else (p.batch, p.lengths_k[0])
        of_lse = (p.num_heads, total_q) if p.packed else (p.batch, p.num_heads, p.lengths_q[0])
        shapes = {
            "q": (*of_q, p.num_heads, p.head_dim),
            "k": (*of_k, p.num_heads_kv, p.head_dim),
            "v": (*of_k, p.num_heads_kv, p.head_dim_v),
            "dout": (*of_q, p.num_heads, p.head_dim_v),
        }
        x = {}
        for name, shape in shapes.items():
            kind = "normal" if name == "dout" or (name, p.values) == ("v", "huge") else p.values
            x[name] = _view(self.of[p.dtype, kind], shape, rng, p.strides)
        if p.bias:
            of, (*rows, keys) = p.bias
            wide = (*rows, -(-keys // 16) * 16)  # of whole vectors of 16 bytes, also of bool
            x["bias"] = _view(self.biases[of], wide, rng, False, 16)[..., :keys]
        if p.alibi:
            heads = (p.batch, p.num_heads) if p.alibi == "batch" else (1, p.num_heads)
            slopes = _view(self.float32, heads, rng, False) / 8
            x["alibi_slopes"] = slopes if p.alibi == "batch" else slopes[0]
        if p.dlse:
            x["dlse"] = _view(self.float32, of_lse, rng, False)
        if p.packed:
            for name, lengths in (("cu_seqlens_q", p.lengths_q), ("cu_seqlens_k", p.lengths_k)):
                ends = np.cumsum([0, *lengths]).astype(np.int32)
                x[name] = torch.from_numpy(ends).to(device)
        for name, used in (("seqused_q", p.used_q), ("seqused_k", p.used_k)):
            if used:
                x[name] = torch.tensor(used, dtype=torch.int32, device=device)
        return x


def _view(
    pool: torch.Tensor, shape: tuple[int, ...], rng: np.random.Generator, strided: bool,
    unit: int = 8,
) -> torch.Tensor:  # fmt: skip
    """Somewhere in the pool, all strides multiples of 8: at times rows and heads change places."""
    order = list(range(len(shape) - 1))
    gap = 0
    if strided and rng.random() < 0.7:
        order = [int(i) for i in rng.permutation(len(order))]
        gap = int(rng.choice([0, 8, LARGEST_GAP]))
    strides, step = [1] * len(shape), shape[-1] + gap
    for i in reversed(order):
        strides[i], step = step, step * max(1, shape[i])
    if step > pool.numel():
        raise ValueError(f"{shape}: larger than the pool of random numbers")
    start = unit * int(rng.integers(0, (pool.numel() - step) // unit + 1))
    return pool.as_strided(shape, strides, start)


@dataclass
class Launched:
    """What one backend wrote, and whether it wrote anywhere else."""

    outputs: dict[str, torch.Tensor]
    gaps: list[torch.Tensor]

    def flat(self) -> torch.Tensor:
        return torch.cat([self.outputs[name].flatten().float() for name in OUTPUTS])

    def strayed(self) -> torch.Tensor:
        return ~torch.cat(self.gaps).isnan().all()


def launch(p: Problem, mask: Any, x: dict[str, Any], backend: str) -> Launched:
    """Forward and backward, into parts of one poisoned tensor."""
    shapes = {"out": x["dout"].shape, **{f"d{name}": x[name].shape for name in "qkv"}}
    # Each begins at a multiple of 8 elements, as the fast kernels need it.
    sizes = [-(-math.prod(shape) // 8) * 8 for shape in shapes.values()]
    memory = x["q"].new_full((sum(sizes) + GAP * (len(sizes) + 1),), torch.nan)
    outputs, gaps, at = {}, [memory[:GAP]], GAP
    for (name, shape), size in zip(shapes.items(), sizes):
        end = at + math.prod(shape)
        outputs[name] = memory[at:end].view(shape)
        at += size + GAP
        gaps.append(memory[end:at])
    *batch, rows, num_heads, _ = x["q"].shape
    lse_shape = (*batch, num_heads, rows)
    outputs["lse"] = memory.new_full(lse_shape, torch.nan, dtype=torch.float32)
    call = {
        "mask": mask, "softcap": p.softcap, "softmax_scale": p.softmax_scale, "backend": backend,
        "dropout_p": p.dropout_p, **p.options,
        "alibi_slopes": x.get("alibi_slopes"), "bias": x.get("bias"),
    }  # fmt: skip
    if not p.packed:
        call |= {"seqused_q": x.get("seqused_q"), "seqused_k": x.get("seqused_k")}
    if p.dropout_seeds:
        call["seed"] = torch.tensor(p.dropout_seeds, device=x["q"].device)
    else:
        call |= {"seed": p.dropout_seed, "offset": p.dropout_offset}
    packed = (x["cu_seqlens_q"], x["cu_seqlens_k"], *p.max_seqlen) if p.packed else ()
    forward, backward = (
        (fs.mha_varlen_fwd, fs.mha_varlen_bwd) if p.packed else (fs.mha_fwd, fs.mha_bwd)
    )
    out, lse = outputs["out"], outputs["lse"]
    qkv = x["q"], x["k"], x["v"]
    forward(*qkv, *packed, out=out, lse=lse, **call)
    grads = {name: outputs[name] for name in ("dq", "dk", "dv")}
    grads |= {"dlse": x["dlse"]} if "dlse" in x else {}
    backward(x["dout"], *qkv, out, lse, *packed, **grads, **call)
    return Launched(outputs, gaps)


def poison_workspaces() -> None:
    """What a call takes from PyTorch for its workspace holds NaN."""
    take = _frameworks.gpu_scratch

    def poisoned(q: Any, size: int, stream: int | None) -> Any:
        return take(q, size, stream).fill_(torch.nan)

    _frameworks.gpu_scratch = poisoned


@dataclass
class Tally:
    problems: int = 0
    launches: int = 0  # of the fast backend, each with every output checked
    repeated: int = 0  # of these, those that only had to give the same bits again
    refused: int = 0
    # Largest error as a part of what is allowed, by what it is from and the output.
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)  # seed, what


class Soak:
    """Problems in turn; what they gave is asked for from time to time."""

    def __init__(self, fast: str, slow: str, device: str, pool: int = POOL):
        self.fast, self.slow, self.device = fast, slow, device
        kernels = [k for k in fs.kernels() if k["backend"] == fast and k["available"]]
        if not kernels:
            sys.exit(f"soak: no kernels of {fast} that run here")
        of_device = "cpu" if device == "cpu" else "gpu"
        self.dtypes = sorted({k["dtype"] for k in kernels} - {"float32"})
        self.largest = max(k["head_dim"] for k in kernels)
        self.pool = Pool(device, self.dtypes, pool)
        self.streams = [torch.cuda.Stream() for _ in range(STREAMS)] if of_device == "gpu" else []
        self.tally = Tally()
        self.pairs = (f"{fast} from float64", f"{slow} from float64", f"{fast} from {slow}")
        self.found: list[tuple[int, torch.Tensor]] = []  # seed; shares, strayed
        self.kept: list[tuple[Problem, Any, dict[str, Any], Launched]] = []

    def problem(self, seed: int) -> Problem:
        return soaked(seed, self.largest, self.dtypes)

    def run(self, p: Problem) -> None:
        if not (max(p.lengths_q) and max(p.lengths_k)):
            return
        mask, x = mask_of(p), self.pool.tensors(p, self.device)
        try:
            fast, slow = (launch(p, mask, x, backend) for backend in (self.fast, self.slow))
        except fs.Error as e:
            if e.code != "unsupported":
                raise
            self.tally.refused += 1
            return
        exact, bound = dense.definition(p, x)
        sizes = [exact[name].numel() for name in OUTPUTS]
        exact, bound = (torch.cat([t[name].flatten() for name in OUTPUTS]) for t in (exact, bound))
        a, b = fast.flat(), slow.flat()
        shares = torch.stack(
            [
                dense.share(a, exact, bound),
                dense.share(b, exact, bound),
                dense.share(a, b.double(), 2 * bound),
            ]
        )
        largest = [part.amax(1) if part.numel() else part.sum(1) for part in shares.split(sizes, 1)]
        strayed = torch.stack([fast.strayed(), slow.strayed()]).double()
        self.found.append((p.seed, torch.cat([*largest, strayed])))
        self.tally.problems += 1
        self.tally.launches += 2
        if p.seed % REPEATED == 0:
            self.kept.append((p, mask, x, fast))
        if len(self.found) >= BATCH:
            self.settle()

    def settle(self) -> None:
        """Runs again what was kept, and reads what was found."""
        same = self.again()
        if self.found:
            table = torch.stack([row for _, row in self.found]).cpu().numpy()
            for (seed, _), row in zip(self.found, table):
                self.judge(seed, row)
        for (p, *_), equal in zip(self.kept, same):
            self.tally.launches += 2
            self.tally.repeated += 2
            if not bool(equal):
                self.fail(p.seed, "other bits when it ran again")
        self.found, self.kept = [], []

    def again(self) -> list[torch.Tensor]:
        """Whether each gave the same bits, launched while others are at work."""
        if not (self.streams and self.kept):
            return [_same(before, launch(*of, self.fast)) for *of, before in self.kept]
        current = torch.cuda.current_stream()
        same: list[torch.Tensor] = []
        for stream in self.streams:
            stream.wait_stream(current)
        for turn, (*of, before) in enumerate(reversed(self.kept)):
            with torch.cuda.stream(self.streams[turn % STREAMS]):
                same.append(_same(before, launch(*of, self.fast)))
        for stream in self.streams:
            current.wait_stream(stream)
        return same[::-1]

    def judge(self, seed: int, row: np.ndarray[Any, Any]) -> None:
        shares = row[: 3 * len(OUTPUTS)].reshape(len(OUTPUTS), 3)
        bad = []
        for i, pair in enumerate(self.pairs):
            largest = self.tally.shares.setdefault(pair, dict.fromkeys(OUTPUTS, 0.0))
            for name, value in zip(OUTPUTS, shares[:, i]):
                if not value <= 1:
                    bad.append(f"{name} of {pair} is {value:.3g} of what is allowed")
                else:
                    largest[name] = max(largest[name], float(value))
        for backend, strayed in zip((self.fast, self.slow), row[3 * len(OUTPUTS) :]):
            if strayed:
                bad.append(f"{backend} wrote outside of its outputs")
        if bad:
            self.fail(seed, "; ".join(bad))

    def fail(self, seed: int, what: str) -> None:
        self.tally.failures.append({"seed": seed, "what": what})
        print(f"FAILED: seed {seed}: {what}\n  {self.problem(seed)}", flush=True)
        print(f"  repeat: python3 scripts/soak.py --seed {seed}", flush=True)


def _same(before: Launched, after: Launched) -> torch.Tensor:
    """In bits: what would be NaN on both sides has failed already."""
    pairs = ((before.outputs[name], after.outputs[name]) for name in OUTPUTS)
    return torch.stack([(a == b).all() for a, b in pairs]).all()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--launches", type=int, default=200_000, help="of the fast backend, both directions"
    )
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--first-seed", type=int, help="problems have this one and those after it")
    parser.add_argument("--seed", type=int, help="of one problem")
    parser.add_argument("--backends", nargs=2, default=["sm90", "sm80"], metavar=("FAST", "SLOW"))
    args = parser.parse_args()
    device = "cpu" if args.backends[0] == "cpu" else "cuda"
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    poison_workspaces()
    soak = Soak(*args.backends, device)
    one = args.seed is not None
    first = args.seed if one else args.first_seed
    first = secrets.randbelow(1 << 31) if first is None else first
    start = time.monotonic()
    for seed in itertools.count(first):
        late = time.monotonic() - start > args.seconds
        if late or soak.tally.launches >= args.launches or (one and seed > first):
            break
        try:
            soak.run(soak.problem(seed))
        except Exception as e:  # of this launch, or of one since the last that was asked about
            soak.fail(seed, f"{type(e).__name__}: {e}")
            soak.found, soak.kept = [], []
            break
        if len(soak.tally.failures) >= 20:
            break
    soak.settle()
    record = {"first_seed": first, "seconds": time.monotonic() - start, **vars(soak.tally)}
    print(json.dumps(record))
    return 1 if soak.tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
