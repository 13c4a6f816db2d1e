"""Problems of the kernels' own tests through flashsdk.jax, under jax.jit and jax.vjp.

As a program, for a GPU, of whose memory JAX takes most: `jax_problems.py BACKEND` runs PROBLEMS and
prints, as JSON, the names of those that ran, and why others were refused or are wrong.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import flashsdk as fs
import jax
import jax.numpy as jnp
import numpy as np
from cases import packed, problem
from flashsdk._testing import verify
from flashsdk._testing.problems import BandSpec, Problem, generate, inputs, mask_of
from flashsdk.jax import attention, varlen_attention

KEY = jax.random.key(5)


def layout(seqlen_q: int, seqlen_k: int, heads: int = 1, band: Any = None, seed: int = 0) -> Any:
    """A BlockMask of blocks of 16, about half of them."""
    shape = (heads, -(-seqlen_q // 16), -(-seqlen_k // 16))
    blocks = np.random.default_rng(seed).random(shape) < 0.5
    return fs.BlockMask.from_dense(blocks, 16, seqlen_q=seqlen_q, seqlen_k=seqlen_k, band=band)


def _blocks(**changes: Any) -> Problem:
    """A random problem of one layout a head, under a band."""
    for seed in range(100, 1000):
        p = generate(seed)
        if not p.packed and getattr(p.mask, "band", None) and p.mask.full.shape[1] > 1:
            plain = {"strides": False, "bias": None, "dropout_p": 0.0, "sink": False, "fp8": None}
            return replace(p, used_q=(), used_k=(), **plain, **changes)
    raise AssertionError


CAUSAL = BandSpec(None, 0, "bottom_right")
LENGTHS = ((30, 20), (0, 7), (1, 33), (40, 40))
PROBLEMS = {
    "dense": problem(batch=2),
    "grouped, dlse": problem(heads=(4, 2), batch=2, dlse=True),
    "one head of keys": problem(heads=(4, 1), head_dim=(32, 16)),
    "causal": problem(mask=CAUSAL, batch=2, heads=(4, 2)),
    "causal, rows without keys": problem((70, 50), mask=CAUSAL, dlse=True),
    "window": problem(mask=BandSpec(9, 3, "top_left"), heads=3),
    "blocks": _blocks(dtype="float32"),
    "bias": problem(bias=("float32", (1, 2, 50, 70)), batch=2),
    "bool bias": problem(bias=("bool", (2, 1, 1, 70)), batch=2),
    "ALiBi": problem(alibi="heads", mask=CAUSAL, batch=2),
    "ALiBi of each sequence": problem(alibi="batch", batch=2),
    "softcap and scale": problem(softcap=3.0, softmax_scale=0.4, mask=CAUSAL),
    "one query": problem((1, 200), (4, 2)),
    "no queries": problem((0, 20)),
    "packed": packed(LENGTHS, (4, 2), mask=CAUSAL, dlse=True, tail=(3, 5), slack=(2, 0)),
    "packed, bias": packed(LENGTHS, bias=("float32", (4, 1, 40, 40)), alibi="batch"),
    "deterministic": problem(options={"deterministic": True}),
    "bfloat16": problem(dtype="bfloat16", head_dim=64, mask=CAUSAL, heads=(4, 2), dlse=True),
    "float16": problem(dtype="float16", head_dim=64, mask=CAUSAL, heads=(4, 2)),
    "dropout": problem(dropout_p=0.3, heads=(4, 2), dlse=True),
    "packed, dropout": packed(LENGTHS, dropout_p=0.3, mask=CAUSAL),
    "sink": problem(heads=(4, 2), batch=2, mask=CAUSAL, sink=True, dlse=True),
    "packed, sink": packed(LENGTHS, (4, 2), mask=CAUSAL, sink=True),
    # What lies behind is NaN.
    "used keys": problem(heads=(4, 2), batch=3, mask=CAUSAL, used_k=(70, 0, 31)),
    "used queries and keys": problem(
        heads=(4, 2), batch=3, used_q=(1, 50, 0), used_k=(9, 70, 3), sink=True, dlse=True,
        alibi="batch", dropout_p=0.2, bias=("float32", (3, 1, 50, 70)),
    ),
    "keys of 8 bits": problem(
        dtype="bfloat16", heads=(4, 2), batch=2, mask=CAUSAL, fp8=((2, 2), (1, 2)), sink=True
    ),
    "keys of 8 bits, without descales": problem((1, 70), dtype="float16", fp8=(None, None)),
    "packed, keys of 8 bits": packed(LENGTHS, (4, 2), dtype="float16", fp8=((4, 2), (4, 1))),
    "used keys of 8 bits": problem(
        dtype="bfloat16", heads=(4, 2), batch=3, used_k=(70, 0, 31), fp8=((3, 1), (1, 1))
    ),
}  # fmt: skip


def results(p: Problem, backend: str | None = None) -> tuple[Problem, verify.Results]:
    """Outputs and gradients, under jit; the problem with the seed that the key stands for.

    Of keys of 8 bits the outputs alone.
    """
    if p.dropout_p:
        low, high = (int(word) for word in jax.random.bits(KEY, (2,), jnp.uint32))
        seed = low | high << 32
        # Of sequence b the offset is b; packed ones share a seed.
        seeds: Any = (seed, 0) if p.packed else tuple((seed, b) for b in range(p.batch))
        p = replace(p, dropout_seeds=seeds)
    x = {name: jnp.asarray(placed.view) for name, placed in inputs(p).items() if name != "seed"}
    mask = mask_of(p)
    options: dict[str, Any] = {"softmax_scale": p.softmax_scale, "softcap": p.softcap}
    options |= {"dropout_p": p.dropout_p, "backend": backend, "return_lse": True, **p.options}
    names = ("bias", "alibi_slopes", "seqused_q", "seqused_k", "k_descale", "v_descale")
    rest = {n: x[n] for n in (*names, "cu_seqlens_q", "cu_seqlens_k") if n in x}
    wanted = ["q", "k", "v"] + ["sink"] * p.sink

    def ours(q: Any, k: Any, v: Any, sink: Any, mask: Any, key: Any, rest: Any) -> Any:
        keywords = {**options, "mask": mask, "dropout_key": key, "sink": sink}
        keywords |= {n: rest[n] for n in names if n in rest}
        if not p.packed:
            return attention(q, k, v, **keywords)
        cu = (rest["cu_seqlens_q"], rest["cu_seqlens_k"])
        return varlen_attention(q, k, v, *cu, *p.max_seqlen, **keywords)

    @jax.jit
    def both(arrays: Any, dout: Any, dlse: Any, *others: Any) -> Any:
        def attend(*of: Any) -> Any:
            return ours(*(of if p.sink else (*of, None)), *others)

        if p.fp8 is not None:
            return attend(*arrays)
        (out, lse), pull = jax.vjp(attend, *arrays)
        return out, lse, *pull((dout, jnp.zeros_like(lse) if dlse is None else dlse))

    of = [x[name] for name in wanted]
    arrays = both(of, x["dout"], x.get("dlse"), mask, KEY, rest)
    made = verify.outputs_of(p)
    return p, verify.Results(dict(zip(made, map(np.asarray, arrays), strict=True)))


def report(p: Problem, backend: str | None = None) -> verify.Report:
    """Against the float64 reference, within the bounds of docs/numerics.md."""
    p, got = results(p, backend)
    return verify.compare(p, backend or "cpu", got, verify.expected(p, inputs(p)))


def on_gpu(backend: str) -> dict[str, Any]:
    assert jax.default_backend() == "gpu", "JAX has no GPU"
    ran: list[str] = []
    refused: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for name, p in PROBLEMS.items():
        if p.dtype == "float32":
            p = replace(p, dtype="bfloat16", head_dim=64, head_dim_v=64, aligned=True)
        try:
            result = report(p, backend)
        except Exception as e:
            line = str(e).splitlines()[0]
            may = "UNIMPLEMENTED" in line and backend == "sm90"  # which leaves the rest to sm80
            (refused if may else wrong)[name] = line
            continue
        ran.append(name)
        if not result.ok:
            wrong[name] = str(result)
    # Behind work of XLA's own on its stream, in a loop, under vmap: the same bits.
    q, k, v = (
        jax.random.normal(key, (4, 300, 2, 64), jnp.bfloat16) for key in jax.random.split(KEY, 3)
    )
    want = attention(q, k, v, backend=backend)

    @jax.jit
    def step(q: Any) -> Any:
        late = q + 0 * (q.reshape(600, 256).T @ q.reshape(600, 256)).sum()
        return jax.vmap(lambda *x: attention(*(a[None] for a in x), backend=backend)[0])(late, k, v)

    for _ in range(20):
        got = step(q)
    if not (np.asarray(got) == np.asarray(want)).all():
        wrong["stream"] = "other bits behind other work"
    return {"ran": ran, "refused": refused, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(on_gpu(sys.argv[1])))
