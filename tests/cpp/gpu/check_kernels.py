"""Every GPU kernel family against float64 on random problems.

python check_kernels.py HARNESS.so [--count N] [--seconds T] [--seed S]

Prints one line per failure with the command that repeats it, and the largest error ratios seen.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from harness import FP8, Harness, Mask, Problem

# Not through flashsdk, which this needs no build of.
sys.path.insert(0, str(Path(__file__).parents[3] / "python" / "flashsdk"))
from _testing import naive, philox
from _testing.reference import Features

DEVICE = "cuda"


def standard_attention(p: Problem, dtype):
    """out, lse of standard attention in `dtype`, differentiable, and its q, k, v leaves."""
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (p.q, p.k, p.v))
    held = torch.promote_types(dtype, torch.float32)
    group = q.shape[-2] // k.shape[-2]
    outs, lses = [], []
    for b, rows_q, rows_k in p.sequences():
        qs, ks, vs = (
            (t[rows] if p.packed else t[b]).transpose(0, 1)  # (heads, rows, width)
            for t, rows in ((q, rows_q), (k, rows_k), (v, rows_k))
        )
        ks, vs = (t.repeat_interleave(group, 0) for t in (ks, vs))
        scale, softcap = p.scale, Features(softcap=p.softcap)
        head = naive.Heads(softcap, *(t.to(held) for t in (qs, ks, vs)), None, None, scale)
        out, lse = naive.attention(
            head, *scores(p, b, qs.shape[1], ks.shape[1], held),
            round_to=lambda t: t.to(dtype).to(held), xp=torch,
        )  # fmt: skip
        outs.append(out.to(dtype).transpose(0, 1))
        lses.append(lse.to(dtype))
    if p.packed:
        return torch.cat(outs), torch.cat(lses, 1), (q, k, v)
    return torch.stack(outs), torch.stack(lses), (q, k, v)


def scores(p: Problem, b, nq, nk, dtype):
    """Of all heads of sequence b what is added to scores, visible, and dropout's factor."""
    heads = range(p.q.shape[-2])
    visible = torch.stack([p.mask.visible(b, h, nq, nk, DEVICE) for h in heads])
    added = drop = None
    if p.bias is not None:
        bias = p.bias[min(b, p.bias.shape[0] - 1)]
        bias = bias[:, : nq if bias.shape[1] > 1 else 1, : nk if bias.shape[2] > 1 else 1]
        if bias.dtype == torch.bool:
            visible = visible & bias
        else:
            added = bias.to(dtype)
    if p.alibi is not None:
        slopes = (p.alibi[b] if p.alibi.dim() == 2 else p.alibi)[:, None, None]
        i, j = (torch.arange(n, device=DEVICE) for n in (nq, nk))
        alibi = -slopes.to(dtype) * (i[:, None] + nk - nq - j).abs()
        added = alibi if added is None else added + alibi
    if p.threshold > 0:
        seeds, offsets, places = zip(*(p.dropout_of(b, h) for h in heads), strict=True)
        places = torch.tensor(places, device=DEVICE)[:, None, None]
        byte = philox.random_bytes(seeds[0], offsets[0], places, nq, nk)
        drop = (byte >= p.threshold).to(dtype) * (256 / (256 - p.threshold))
    return added, visible, drop


def gradients(p, dtype, dout, dlse):
    out, lse, leaves = standard_attention(p, dtype)
    target = (out * dout.to(dtype)).sum()
    if dlse is not None:
        target = target + torch.where(lse > -math.inf, lse * dlse.to(dtype), 0.0).sum()
    grads = torch.autograd.grad(target, leaves, allow_unused=True)
    grads = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]
    return [out.detach(), *grads], lse.detach()


def synchronize(name, index):
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise RuntimeError(f"{name} kernel {index}: {str(error).splitlines()[0]}") from None


def check(harness: Harness, p: Problem, generator, with_dlse, rng):
    """{name: error ratio}; above 1 is a failure."""
    if p.k.dtype == FP8:
        return check_fp8(harness, p, rng)
    dout = torch.randn(*p.q.shape[:-1], p.v.shape[-1], device=DEVICE, generator=generator).to(
        p.q.dtype
    )
    words = harness.words(p, p.q, None, dout, p.q, p.k, p.v)  # strides that results will have
    fitting = [harness.pick(op, p, words, all_fitting=True) for op in (0, 1)]
    forward, backward = (int(rng.choice(f)) for f in fitting)
    out, lse = harness.forward(p, forward)
    synchronize("forward", forward)
    dlse = torch.randn(lse.shape, device=DEVICE, generator=generator) if with_dlse else None
    grads = harness.backward(p, out, lse, dout, dlse, backward)
    synchronize("backward", backward)
    ratios = {"kernels": (forward, backward)}
    if p.deterministic:
        again = harness.backward(p, out, lse, dout, dlse, backward)
        for a, b in zip(grads, again, strict=True):
            if not torch.equal(a, b):
                ratios["deterministic"] = math.inf
    exact, exact_lse = gradients(p, torch.float64, dout, dlse)
    naive, _ = gradients(p, p.q.dtype, dout, dlse)
    # out is rounded before delta = rowsum(dout * out): an error that textbook attention does not
    # make. It reaches the gradients as that of an lse gradient would.
    roundoff = 2.0**-8 if p.q.dtype == torch.bfloat16 else 2.0**-11
    e_delta = (roundoff * (exact[0] * dout.double()).abs().sum(-1)).movedim(-1, -2)
    from_delta, _ = gradients(p, torch.float64, torch.zeros_like(dout), e_delta)
    names = ("out", "dq", "dk", "dv")
    for name, ours, good, rough, extra in zip(
        names, [out, *grads], exact, naive, from_delta, strict=True
    ):
        if ours.numel() == 0:
            continue
        error = (ours.double() - good).abs().max().item()
        bound = 2 * (rough.double() - good).abs().nan_to_num(0).max().item() + 1e-5
        if name in ("dq", "dk"):
            bound += extra.abs().max().item()
        ratios[name] = math.inf if math.isnan(error) else error / bound
    if lse.numel():
        ratios["lse"] = lse_ratio(out, lse, exact_lse)
    return ratios


def lse_ratio(out, lse, exact):
    empty = exact == -math.inf
    error = (lse.double() - exact)[~empty].abs()
    magnitude = exact[~empty].abs().clamp(min=1)
    if not torch.equal(lse == -math.inf, empty) or lse.isnan().any() or out.isnan().any():
        return math.inf
    return (error / magnitude).max().item() / 2e-5 if error.numel() else 0.0


def check_fp8(harness: Harness, p: Problem, rng):
    """As check(), of the forward, which is all that there is."""
    fitting = harness.pick(0, p, harness.words(p, p.q, None), all_fitting=True)
    index = int(rng.choice(fitting))
    out, lse = harness.forward(p, index)
    synchronize("forward", index)
    wide = p.widened()
    exact, exact_lse, _ = standard_attention(wide, torch.float64)
    rough, _, _ = standard_attention(wide, p.q.dtype)
    ratios = {"kernels": (index,)}
    if out.numel():
        error = (out.double() - exact).abs().max().item()
        bound = 2 * (rough.double() - exact).abs().nan_to_num(0).max().item() + 1e-5
        ratios["fp8 out"] = math.inf if math.isnan(error) else error / bound
        ratios["fp8 lse"] = lse_ratio(out, lse, exact_lse)
    return ratios


def random_problem(rng: np.random.Generator, generator, head_dims, dtypes, fp8=False):
    """fp8: some have keys and values in fp8."""
    pick = lambda *choices: choices[rng.integers(len(choices))]  # noqa: E731
    dtype = pick(*dtypes)
    head_dim = pick(*head_dims)
    d = head_dim if rng.random() < 0.6 else int(rng.integers(1, head_dim // 8 + 1)) * 8
    dv = d if rng.random() < 0.7 else int(rng.integers(1, head_dim // 8 + 1)) * 8
    kv = pick(1, 2, 3)
    heads = kv * pick(1, 1, 2, 4)
    batch = pick(1, 2, 3)
    nq = pick(1, int(rng.integers(1, 65)), int(rng.integers(65, 400)), 128, 256)
    nk = pick(nq, nq, 1, int(rng.integers(1, 65)), int(rng.integers(65, 500)), 256)
    if nq < 65 and rng.random() < 0.3:
        nk = int(rng.integers(1000, 5000))  # split among thread blocks
    kind = pick("dense", "band", "block_sparse")
    mask = Mask(kind)
    if kind == "band" or (kind == "block_sparse" and rng.random() < 0.6):
        style = rng.integers(4)
        if style == 0:
            mask.right = 0
        elif style == 1:
            mask.left, mask.right = int(rng.integers(-20, 200)), int(rng.integers(-20, 100))
        elif style == 2:
            mask.left = int(rng.integers(-20, 200))
        else:
            mask.right = int(rng.integers(-100, 100))
        mask.top_left = bool(rng.random() < 0.3)
    packed = rng.random() < 0.3
    if packed:
        lengths_q = rng.integers(0, nq + 1, batch)
        lengths_k = lengths_q if rng.random() < 0.5 else rng.integers(0, nk + 1, batch)
        lengths_q[0], lengths_k[0] = max(lengths_q[0], 1), max(lengths_k[0], 1)
        nq, nk = int(lengths_q.max()), int(lengths_k.max())
    if kind == "block_sparse":
        mask.block = (16 * pick(1, 2, 4, 8, 8, 16), 16 * pick(1, 2, 4, 8, 8, 16))
        rows, cols = -(-nq // mask.block[0]), -(-nk // mask.block[1])
        values = [0, 1] if mask.left == mask.right == 1 << 40 else [0, 1, 2]
        mask.blocks = rng.choice(values, (pick(1, batch), pick(1, heads), rows, cols))

    def tensor(rows, n_heads, width):
        shape = (int(sum(rows)), n_heads, width) if packed else (batch, rows, n_heads, width)
        if rng.random() < 0.3:  # heads before rows in memory
            axes = (1, 0, 2) if packed else (0, 2, 1, 3)
            return (
                torch.randn([shape[a] for a in axes], device=DEVICE, generator=generator)
                .to(dtype)
                .permute(axes)
            )
        return torch.randn(shape, device=DEVICE, generator=generator).to(dtype)

    gain = pick(1.0, 1.0, 1.0, 8.0)
    p = Problem(
        tensor(lengths_q if packed else nq, heads, d) * gain,
        tensor(lengths_k if packed else nk, kv, d),
        tensor(lengths_k if packed else nk, kv, dv),
        mask,
    )
    if packed:

        def ends(lengths):
            return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(DEVICE)

        p.cu_q, p.cu_k = ends(lengths_q), ends(lengths_k)
    p.deterministic = bool(rng.random() < 0.25)
    if fp8 and head_dim <= 256 and rng.random() < 0.3:
        p.k, p.v = p.k.to(FP8), p.v.to(FP8)
        if rng.random() < 0.8:
            p.k_descale, p.v_descale = (
                torch.rand(batch, kv, device=DEVICE, generator=generator) * 2 for _ in range(2)
            )
    if rng.random() < 0.1:
        p.softmax_scale = float(rng.normal() * 0.2)
    if rng.random() < 0.5:
        return p
    if rng.random() < 0.3:
        p.softcap = float(rng.uniform(1, 30))
    if rng.random() < 0.4:
        shape = [pick(1, n) for n in (batch, heads, nq, nk)]
        in_memory = (*shape[:3], shape[3] + pick(0, -shape[3] % 16))  # rows of whole vectors or not
        p.bias = torch.randn(in_memory, device=DEVICE, generator=generator)
        p.bias = (
            p.bias > -0.5
            if rng.random() < 0.4
            else p.bias.to(pick(torch.float32, torch.float16, torch.bfloat16))
        )[..., : shape[3]]
    if rng.random() < 0.3:
        p.alibi = torch.rand(
            (heads,) if rng.random() < 0.5 else (batch, heads), device=DEVICE, generator=generator
        )
    if rng.random() < 0.5:
        p.threshold = int(rng.integers(1, 200))
        p.seed, p.offset = int(rng.integers(1 << 62)), int(rng.integers(1 << 40))
        if rng.random() < 0.5:  # on the device: of all sequences, or of each
            shape = (2,) if rng.random() < 0.5 else (batch, 2)
            p.state = torch.from_numpy(rng.integers(1 << 62, size=shape)).to(DEVICE)
    return p


def describe(p: Problem):
    parts = [
        str(p.q.dtype)[6:] + (" fp8" if p.k.dtype == FP8 else ""),
        f"q{tuple(p.q.shape)}",
        f"k{tuple(p.k.shape)}",
        f"dv{p.v.shape[-1]}",
        p.mask.kind,
    ]
    m = dataclasses.replace(p.mask, blocks=None, lists=None)
    parts.append(str(m))
    for name in ("softmax_scale", "softcap", "threshold", "deterministic"):
        if getattr(p, name):
            parts.append(f"{name}={getattr(p, name)}")
    if p.bias is not None:
        parts.append(f"bias{tuple(p.bias.shape)}{p.bias.dtype}")
    if p.alibi is not None:
        parts.append("alibi")
    if p.packed:
        parts.append(f"cu_q={p.cu_q.tolist()} cu_k={p.cu_k.tolist()}")
    return " ".join(parts)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0, help="first seed; problem i is seed + i")
    args = parser.parse_args()
    harness = Harness(args.library)
    head_dims = sorted({e[2] for e in harness.entries})
    codes = {e[1] for e in harness.entries}
    dtypes = [t for t, code in ((torch.float16, 1), (torch.bfloat16, 2)) if code in codes]
    worst = collections.defaultdict(float)
    failures = skipped = 0
    start = time.time()
    done = 0
    for seed in range(args.seed, args.seed + args.count):
        if time.time() - start > args.seconds:
            break
        rng, generator = np.random.default_rng(seed), torch.Generator(DEVICE).manual_seed(seed)
        p = random_problem(rng, generator, head_dims, dtypes, any(e[9] for e in harness.entries))
        with_dlse = bool(rng.random() < 0.3)
        try:
            ratios = check(harness, p, generator, with_dlse, rng)
        except LookupError:
            skipped += 1
            continue
        except Exception as error:
            print(f"seed {seed}: {describe(p)}: {error}", flush=True)
            return 1
        done += 1
        kernels = ratios.pop("kernels")
        for name, value in ratios.items():
            worst[name] = max(worst[name], value)
        bad = {name: round(value, 3) for name, value in ratios.items() if not value <= 1}
        if bad:
            failures += 1
            if failures <= 40:
                print(
                    f"seed {seed}: {bad} dlse={with_dlse} kernels={kernels} {describe(p)}",
                    flush=True,
                )
                repeat = f"{sys.argv[0]} {args.library} --count 1 --seed {seed}"
                print(f"  repeat: python {repeat}")
    print(
        f"{done} problems, {failures} failed, {skipped} had no kernel, "
        f"{time.time() - start:.0f} s; "
        f"worst error / bound: { {k: round(v, 3) for k, v in worst.items()} }"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
