"""Runs random problems and holds the results against the float64 reference.

problem = generate(seed, backend)
report = check(problem, backend)      # report.failures is empty, or says what is wrong
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from . import naive, reference, tolerance
from .problems import Placed, Problem, generate, inputs, mask_of, numpy_dtype, place
from .reference import Array

GIVEN = (
    "bias",
    "alibi_slopes",
    "sink",
    "seqused_q",
    "seqused_k",
    "k_descale",
    "v_descale",
)  # keywords of arrays, by their names
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
FEW = 512  # elements whose bound is the largest, or more with less
FEW_ROWS = 32  # and rows: one rounding, that of an lse, reaches whole rows of a gradient
ORDERS = 3  # of summation and rounding, in which the errors of plain attention are measured


def outputs_of(problem: Problem) -> tuple[str, ...]:
    """Those that a backend computes, the first of what the reference does."""
    return OUTPUTS[:2] if _forward_only(problem) else _all_outputs(problem)


def _forward_only(problem: Problem) -> bool:
    """Whether there is no backward: of keys of 8 bits, and of some wide heads."""
    return problem.forward_only or problem.fp8 is not None


def _all_outputs(problem: Problem) -> tuple[str, ...]:
    return (*OUTPUTS, "dsink") if problem.sink else OUTPUTS


def repeat_command(seed: int, backend: str) -> str:
    isa = os.environ.get("FLASHSDK_CPU_ISA")
    prefix = f"FLASHSDK_CPU_ISA={isa} " if isa and backend == "cpu" else ""
    return f"{prefix}python -m flashsdk verify --seed {seed} --backend {backend}"


@dataclass
class Results:
    """What a backend gave back, and what it did that it must not do."""

    arrays: dict[str, Array]  # of outputs_of
    faults: list[str] = field(default_factory=list)


@dataclass
class Expected:
    """Of every output the reference, how far plain attention is off, each element's bound."""

    exact: dict[str, Array]
    plain_error: dict[str, float]
    size: dict[str, float]  # of the largest element, if nothing cancelled in it
    unit_roundoff: float
    bound: dict[str, Array]

    def limit(self, name: str) -> float:
        """Twice the largest error of standard attention, or of plain FlashAttention if worse.

        Plain attention can be right by luck where large terms cancel, as with one key all of dS
        does. What their float32 sums err by in any other order is allowed as well.
        """
        rounding = self.unit_roundoff * _largest(self.exact[name])
        sums = tolerance.U32 * self.size[name]
        limit = 2 * max(self.plain_error[name], rounding, sums) + 1e-5
        # The largest of a few errors is a matter of luck: there each element's bound stands alone.
        # Few as well where few elements can err as the worst does: among huge logits those of the
        # rows in which more than one key counts.
        largest = _largest(self.bound[name])
        rows = self.bound[name].max(axis=-1, initial=0)
        few = self.bound[name].sum() < FEW * largest or rows.sum() < FEW_ROWS * largest
        return max(limit, largest) if few else limit


@dataclass
class Report:
    problem: Problem
    backend: str
    failures: list[str]
    errors: dict[str, tuple[float, float]]  # output: largest error, and the largest it may be
    refused: str = ""  # why the backend does not take this problem
    framework: str = "numpy"

    @property
    def ok(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        lines = [f"{self.problem}", *self.failures]
        if self.failures and str(generate(self.problem.seed, self.backend)) == str(self.problem):
            command = repeat_command(self.problem.seed, self.backend)
            if self.backend == "cpu" and self.framework != "numpy":
                command += f" --framework {self.framework}"
            lines.append(f"repeat: {command}")
        return "\n  ".join(lines)


def check(problem: Problem, backend: str = "cpu", framework: str | None = None) -> Report:
    """Runs one problem forward and backward on ``backend`` and compares with the reference.

    ``framework``, "numpy" or "torch", is what the arrays are; None is what the backend needs.
    """
    framework = framework or ("numpy" if backend == "cpu" else "torch")
    if framework == "torch":
        problem = replace(problem, negative_strides=False)  # which torch has not
    placed = inputs(problem)
    try:
        results = run(problem, placed, backend, framework)
    except ValueError as e:
        if backend != "cpu" and getattr(e, "code", "") == "unsupported":
            return Report(problem, backend, [], {}, refused=str(e))
        raise
    report = compare(problem, backend, results, expected(problem, placed))
    report.framework = framework
    return report


def run(
    problem: Problem, placed: dict[str, Placed], backend: str, framework: str = "numpy"
) -> Results:
    """Forward and backward into outputs that hold NaN, in the strides the problem asks for.

    Of a problem that has no backward the forward.
    """
    import flashsdk as fs

    given = _Given(framework, "cpu" if backend == "cpu" else "cuda")
    rng = np.random.default_rng([problem.seed, 2]) if problem.strides else None
    x = {name: p.view for name, p in placed.items()}
    dtype = numpy_dtype(problem.dtype)
    shapes = {
        "out": ((*x["q"].shape[:-1], problem.head_dim_v), dtype),
        "lse": (_lse_shape(problem, x["q"]), np.dtype(np.float32)),
        **{f"d{name}": (x[name].shape, dtype) for name in "qkv"},
        **({"dsink": (x["sink"].shape, np.dtype(np.float32))} if problem.sink else {}),
    }
    shapes = {name: shapes[name] for name in outputs_of(problem)}
    outputs = {
        name: place(
            np.full(shape, np.nan, of),
            rng,
            negative=problem.negative_strides,
            aligned=problem.aligned,
        )
        for name, (shape, of) in shapes.items()
    }
    t = {name: given.take(name, p) for name, p in (placed | outputs).items()}
    before = {name: given.memory(name).copy() for name in placed}

    call: dict[str, Any] = {
        "mask": mask_of(problem),
        "softcap": problem.softcap,
        "backend": backend,
        **problem.options,
    }
    call |= {name: t[name] for name in GIVEN if name in t}
    call |= {"softmax_scale": problem.softmax_scale, "dropout_p": problem.dropout_p}
    call |= {"seed": t["seed"]} if "seed" in t else _seed_and_offset(problem)
    packed = (t["cu_seqlens_q"], t["cu_seqlens_k"], *problem.max_seqlen) if problem.packed else ()
    forward: Any
    backward: Any
    forward, backward = (
        (fs.mha_varlen_fwd, fs.mha_varlen_bwd) if problem.packed else (fs.mha_fwd, fs.mha_bwd)
    )
    qkv = (t["q"], t["k"], t["v"])
    returned: tuple[Any, ...] = forward(*qkv, *packed, out=t["out"], lse=t["lse"], **call)
    grads = {name: t[name] for name in outputs_of(problem)[2:]}
    if problem.dlse:
        grads["dlse"] = t["dlse"]
    if not _forward_only(problem):
        returned += backward(t["dout"], *qkv, t["out"], t["lse"], *packed, **grads, **call)

    faults = []
    arrays = {}
    for name, r in zip(outputs_of(problem), returned, strict=True):
        if r is not t[name]:
            faults.append(f"{name}: the array given as {name}= was not the one returned")
        arrays[name] = given.read(name, outputs[name])
        if not given.only_wrote_inside(outputs[name]):
            faults.append(f"{name}: memory outside of the array was written")
    faults += [
        f"{n}: an input was changed"
        for n, m in before.items()
        if not _same_bits(given.memory(n), m)
    ]
    return Results(arrays, faults)


def _lse_shape(p: Problem, q: Array) -> tuple[int, ...]:
    return (p.num_heads, q.shape[0]) if p.packed else (p.batch, p.num_heads, q.shape[1])


def _same_bits(a: Array, b: Array) -> bool:
    return bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))


def to_torch(x: Array, device: str) -> Any:
    """A copy as a tensor. torch cannot take all dtypes from NumPy: the bits travel as integers."""
    import torch

    holds = {1: np.uint8, 2: np.int16}.get(x.itemsize, x.dtype)
    bits = torch.from_numpy(x.view(holds))
    return bits.to(device, copy=True).view(getattr(torch, x.dtype.name))


def from_torch(x: Any) -> Array:
    """A copy of a tensor, by its bits as well."""
    import torch

    holds = {1: torch.uint8, 2: torch.int16}.get(x.itemsize, x.dtype)
    bits = x.view(holds).cpu().numpy()
    array: Array = bits.view(numpy_dtype(str(x.dtype).removeprefix("torch."))).copy()
    return array


class _Given:
    """The arrays of one call as the framework sees them, and their memory afterwards."""

    def __init__(self, framework: str, device: str):
        self.framework, self.device = framework, device
        self.buffers: dict[str, Any] = {}

    def take(self, name: str, p: Placed) -> Any:
        if self.framework == "numpy":
            self.buffers[name] = p.buffer
            return p.view
        import torch

        buffer = self.buffers[name] = to_torch(p.buffer, self.device)
        size = p.buffer.itemsize
        start = (
            p.view.__array_interface__["data"][0] - p.buffer.__array_interface__["data"][0]
        ) // size
        return torch.as_strided(buffer, p.view.shape, [s // size for s in p.view.strides], start)

    def memory(self, name: str) -> Array:
        buffer = self.buffers[name]
        if self.framework == "numpy":
            return np.asarray(buffer)
        import torch

        return np.asarray(buffer.view(torch.uint8).cpu().numpy())

    def read(self, name: str, p: Placed) -> Array:
        if self.framework != "numpy":
            p.buffer.view(np.uint8)[...] = self.memory(name)
        copied: Array = p.view.copy()
        return copied

    def only_wrote_inside(self, p: Placed) -> bool:
        """After read(): what is not the array still holds NaN."""
        p.view[...] = np.nan
        return bool(np.isnan(p.buffer.astype(np.float32)).all())


def _seed_and_offset(problem: Problem) -> dict[str, int]:
    return {"seed": problem.dropout_seed, "offset": problem.dropout_offset}


def expected(problem: Problem, placed: dict[str, Placed]) -> Expected:
    x = {name: p.view for name, p in placed.items()}
    features = {
        "softmax_scale": problem.softmax_scale,
        "mask": problem.mask,
        "softcap": problem.softcap,
        "dropout_p": problem.dropout_p,
        **({"seed": x["seed"]} if "seed" in x else _seed_and_offset(problem)),
        **{name: x.get(name) for name in GIVEN},
    }
    q, k, v = x["q"], x["k"], x["v"]
    cu_seqlens = (x["cu_seqlens_q"], x["cu_seqlens_k"]) if problem.packed else None
    keywords = {"cu_seqlens": cu_seqlens, **features}
    dout, dlse = None, None
    of_all: tuple[Array, ...]
    if _forward_only(problem):
        of_all = reference.forward(q, k, v, **keywords)
    else:
        dout, dlse = x["dout"], x.get("dlse")
        of_all = reference.forward_backward(dout, q, k, v, dlse=dlse, **keywords)
    exact = dict(zip(outputs_of(problem), of_all, strict=True))

    f = reference.Features(**features)
    orders = [_Order.of(n, q.shape[-1], v.shape[-1]) for n in range(ORDERS)]
    round_to = naive.rounding(q.dtype)
    bound = {name: np.zeros(e.shape) for name, e in exact.items()}
    size = {name: 0.0 for name in exact if name != "lse"}
    plain_error = {name: 0.0 for name in exact if name not in ("lse", "dsink")}

    def of_heads() -> OfHeads:
        for head in reference.heads(f, q, k, v, dout, dlse, cu_seqlens):
            m = naive.matrices(head, np.asarray)
            plain = (way for order in orders for way in order.plain(head, q.dtype))
            yield head, [tolerance.bounds(head, m, problem.dtype), tolerance.sizes(head, m), *plain]

    for way, name, where, total in _totals(of_heads()):
        if way == 0:
            bound[name][where] += total
        elif way == 1:
            size[name] = max(size[name], _largest(total))
        else:
            error = _largest(round_to(total) - exact[name][where])
            plain_error[name] = max(plain_error[name], error)
    unit = tolerance.UNIT_ROUNDOFF[problem.dtype]
    for name in bound.keys() & {"dk", "dv"}:
        bound[name] += unit * np.abs(exact[name]) + tolerance.UNDERFLOW[problem.dtype]
    for each in bound.values():
        each *= 1 + 4 * unit  # roundings of what is rounded already
    return Expected(exact, plain_error, size, unit, bound)


def _where(head: reference.Head, name: str) -> Any:
    """The head's place in an output; heads that share k and v add up there."""
    at = {"lse": head.at_lse, "out": head.at_q, "dq": head.at_q, "dsink": head.head}
    return at.get(name, head.at_k)


@dataclass(frozen=True)
class _Order:
    """Of summation and rounding, in which standard attention and plain FlashAttention err.

    It shuffles head_dim and lets the running maximum lag: other sums, other roundings. One row
    that depends on a single rounding can decide the largest error, so one measure is no bound.
    """

    lag: float
    columns: dict[str, Array] | None  # of each array; None: as they lie

    @staticmethod
    def of(number: int, head_dim: int, head_dim_v: int) -> _Order:
        if number == 0:
            return _Order(0.0, None)
        rng = np.random.default_rng(number)
        lag = float(rng.uniform(0, 8))
        qk, vo = rng.permutation(head_dim), rng.permutation(head_dim_v)
        return _Order(lag, {"q": qk, "k": qk, "v": vo, "dout": vo})

    def plain(self, head: reference.Head, dtype: np.dtype[Any]) -> list[dict[str, Array]]:
        """The head's outputs by both; of a head without dout, that of the forward."""
        of = self.columns
        if of is not None:
            arrays = {name: getattr(head, name) for name in of}
            given = {name: x for name, x in arrays.items() if x is not None}
            taken: Any = {name: x.take(of[name], axis=-1) for name, x in given.items()}
            head = replace(head, **taken)
        ways = [naive.standard(head, dtype)]
        if head.dout is not None:
            ways.append(naive.flash_backward(head, dtype, self.lag))
        if of is None:
            return ways
        back = {name: np.argsort(of[name.removeprefix("d")]) for name in ("dq", "dk", "dv")}
        back["out"] = back["dv"]
        return [{name: x.take(back[name], axis=-1) for name, x in way.items()} for way in ways]


# Of each head its outputs, in one or more ways.
OfHeads: TypeAlias = Iterator[tuple[reference.Head, list[dict[str, Array]]]]


def _totals(of_heads: OfHeads) -> Iterator[tuple[int, str, Any, Array]]:
    """The number of the way, an output's name, the place of a head in it, and what is there.

    dk and dv are those of all heads that share keys, which follow each other.
    """

    def of_keys() -> Iterator[tuple[int, str, Any, Array]]:
        for (way, name), total in shared.items():
            yield way, name, at_k, total

    at_k: Any = None
    shared: dict[tuple[int, str], Array] = {}
    for head, ways in of_heads:
        if head.at_k != at_k:
            yield from of_keys()
            at_k, shared = head.at_k, {}
        for way, parts in enumerate(ways):
            for name, part in parts.items():
                if name in ("dk", "dv"):
                    before = shared.get((way, name), 0.0)
                    shared[way, name] = before + part.astype(np.float64)
                else:
                    yield way, name, _where(head, name), part
    yield from of_keys()


def _largest(x: Array) -> float:
    """Of what is finite: standard attention in float16 may overflow."""
    size = np.abs(x)
    largest = float(size.max(initial=0))
    return largest if np.isfinite(largest) else float(size[np.isfinite(size)].max(initial=0))


def compare(problem: Problem, backend: str, results: Results, want: Expected) -> Report:
    failures = list(results.faults)
    errors = {}
    for name in outputs_of(problem):
        ours, exact = results.arrays[name].astype(np.float64), want.exact[name]
        bound = want.bound[name]
        limit = _largest(bound) if name in ("lse", "dsink") else want.limit(name)
        with np.errstate(invalid="ignore"):
            error = np.where(ours == exact, 0, np.abs(ours - exact))  # -inf of the LSE is exact
        errors[name] = (_largest(error), limit)
        if errors[name][0] > limit:
            failures.append(f"{name}: largest error {errors[name][0]:.3g}, above {limit:.3g}")

        faults = {"error above its bound": ~(error <= bound), "NaN": np.isnan(ours)}
        if name == "lse":
            faults["-inf on one side only"] = np.isneginf(ours) != np.isneginf(exact)
        else:
            # Rows that see no key, keys that no row sees.
            unseen = (exact == 0) & (bound < 2 * tolerance.UNDERFLOW[problem.dtype])
            faults["not 0"] = unseen & (ours != 0)
        for what, where in faults.items():
            if where.any():
                worst = np.argmax(np.where(where, np.nan_to_num(error / (bound + 1e-300)), -1))
                i = tuple(int(n) for n in np.unravel_index(worst, where.shape))
                failures.append(
                    f"{name}: {what} at {where.sum()} of {where.size} places, worst {i}: "
                    f"{ours[i]:.9g} where {exact[i]:.9g} is right, within {bound[i]:.3g}"
                )
    return Report(problem, backend, failures, errors)
