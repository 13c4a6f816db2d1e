"""scripts/soak.py on a CPU: its problems, its definition and bounds, and that it finds faults."""

import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import flashsdk as fs
import numpy as np
import pytest
from flashsdk._testing import reference, verify
from flashsdk._testing.problems import Blocks, generate, inputs, mask_of

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from flashsdk._testing import dense  # noqa: E402

DTYPES = ["bfloat16", "float16"]
SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("soak_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak_script", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(script, monkeypatch):
    """Problems that a CPU is done with at once."""
    monkeypatch.setattr(script, "LARGEST", 8_000)
    monkeypatch.setattr(script, "MOST", 30_000)
    monkeypatch.setattr(script, "REPEATED", 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small operations: threads would only wait for each other
    yield script
    torch.set_num_threads(threads)


def not_empty(problems):
    return [p for p in problems if max(p.lengths_q) and max(p.lengths_k)]


# ---- problems


def test_problems_are_larger_and_valid(script):
    problems = not_empty(script.soaked(seed, 128, ["bfloat16"]) for seed in range(300))
    scores = [p.num_heads * p.batch * max(p.lengths_q) * max(p.lengths_k) for p in problems]
    assert script.LARGEST < max(scores) <= script.MOST
    assert np.mean([n > 200_000 for n in scores]) > 0.3
    assert np.mean([n > script.LARGEST for n in scores]) < 0.125
    # Tiles have up to 192 queries and 128 keys, an H200 132 multiprocessors.
    for lengths, rows in (("lengths_q", 192), ("lengths_k", 128)):
        tiles = [p.num_heads * sum(-(-n // rows) for n in getattr(p, lengths)) for p in problems]
        assert np.mean([n > 2 * 132 for n in tiles]) > 0.05
    for p in problems:
        assert p.dtype == "bfloat16" and p.head_dim % 8 == p.head_dim_v % 8 == 0
        assert 0 < p.head_dim <= 128 and not (p.alibi and p.bias)
        assert not (p.softcap and (p.alibi or p.bias)) and not (p.alibi and p.dropout_p)
        longest = p.max_seqlen
        assert all(n <= longest[0] for n in p.lengths_q) and max(p.lengths_k) <= longest[1]
        for lengths, heads in (("lengths_q", p.num_heads), ("lengths_k", p.num_heads_kv)):
            row = max(p.head_dim, p.head_dim_v) + script.LARGEST_GAP
            assert heads * sum(getattr(p, lengths)) * row <= script.POOL
        if np.ndim(p.dropout_seeds) == 2:
            assert len(p.dropout_seeds) == p.batch
        if isinstance(p.mask, Blocks):
            assert all(block % 128 == 0 for block in p.mask.block_size)
            mask_of(p)  # the grid is that of these lengths
    assert any(p.bias and p.dropout_p for p in problems)
    assert any(np.ndim(p.dropout_seeds) == 2 and p.batch > 100 for p in problems)  # crowded
    kinds = {type(p.mask).__name__ for p in problems}
    assert kinds == {"NoneType", "BandSpec", "Blocks"}
    features = "packed alibi bias softcap dropout_p dlse options used_q used_k"
    for feature in features.split():
        assert {bool(getattr(p, feature)) for p in problems} == {False, True}


# ---- what is right


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 17, 33), (1, 2, 40, 70)], ids=str)
def test_random_bytes(shape):
    seed, offset = 2**63 + 12345, 2**40 + 7
    got = dense.random_bytes(seed, offset, torch.zeros(shape)).numpy()
    for b, h, i in np.ndindex(shape[:3]):
        want = reference.random_bytes(seed, offset, b * shape[1] + h, i, shape[3])
        assert np.array_equal(got[b, h, i], want)


@pytest.mark.parametrize("seed", [*range(16), 74, 83, 189, 205])
def test_definition_and_bounds(seed):
    """All heads at once give what a walk over rows gives, and the bounds of single heads."""
    p = replace(generate(seed, "gpu"), negative_strides=False, sink=False, fp8=None)
    (p,) = not_empty([p]) or [replace(p, lengths_q=(3,), lengths_k=(4,), mask=None, packed=False)]
    placed = inputs(p)
    want = verify.expected(p, placed)
    x = {name: verify.to_torch(np.ascontiguousarray(a.view), "cpu") for name, a in placed.items()}
    exact, bound = dense.definition(p, x)
    for name in exact:
        got = exact[name].numpy()
        np.testing.assert_allclose(got, want.exact[name], rtol=1e-9, atol=1e-12)
        # Padded sums count more terms; where dS is 0 its sign, which a walk of errors has, is any.
        got = bound[name].numpy()
        assert (got >= 0.5 * want.bound[name]).all() and np.isfinite(got).all()
        assert (got <= 2 * want.bound[name] + 1e-300).all()


# ---- what is wrong


def soak(script, count=12):
    found = script.Soak("cpu", "cpu", "cpu", pool=1 << 20)
    for seed in range(count):
        found.run(found.problem(seed))
    found.settle()
    return found.tally


def test_kernels_of_the_cpu_pass(small):
    tally = soak(small)
    assert tally.failures == []
    assert tally.problems >= 6 and tally.repeated >= 4
    assert tally.launches == 2 * tally.problems + tally.repeated
    assert 0.05 < max(tally.shares["cpu from float64"].values()) <= 1


def faulty(script, monkeypatch, fault, *, again=False, count=6):
    """What is found by seed with a fault in what the fast backend gives, at first or ``again``."""
    launch, calls = script.launch, itertools.count()
    problems = len(not_empty(script.soaked(seed, 256, DTYPES) for seed in range(count)))

    def launched(*of):
        result, call = launch(*of), next(calls)
        # Each problem runs on the fast backend, then on the slow one; all of them before any again.
        if call >= 2 * problems if again else call < 2 * problems and call % 2 == 0:
            fault(result)
        return result

    monkeypatch.setattr(script, "launch", launched)
    tally = soak(script, count)
    assert tally.problems == problems
    found = {}
    for failure in tally.failures:
        found.setdefault(failure["seed"], []).append(failure["what"])
    return found, tally


def test_one_wrong_element_is_found(small, monkeypatch):
    def fault(result):
        flat = result.outputs["dk"].view(-1)
        flat[flat.abs().argmax()] *= 1.5

    found, tally = faulty(small, monkeypatch, fault)
    assert len(found) >= 0.7 * tally.problems
    assert any("dk of cpu from float64" in what[0] for what in found.values())


def test_a_place_that_is_not_written_is_found(small, monkeypatch):
    found, tally = faulty(small, monkeypatch, lambda r: r.outputs["dv"].view(-1)[:1].fill_(np.nan))
    assert len(found) == tally.problems
    assert all("dv of cpu from float64 is nan" in what[0] for what in found.values())


def test_a_write_outside_is_found(small, monkeypatch):
    found, tally = faulty(small, monkeypatch, lambda result: result.gaps[-1][:1].fill_(0))
    assert len(found) == tally.problems
    assert all(what == ["cpu wrote outside of its outputs"] for what in found.values())


def test_other_bits_are_found(small, monkeypatch):
    def fault(result):
        result.outputs["dq"].view(torch.int16).view(-1)[0] ^= 1

    found, tally = faulty(small, monkeypatch, fault, again=True)
    assert len(found) == tally.repeated // 2 > 0
    assert all(what == ["other bits when it ran again"] for what in found.values())


def test_what_a_backend_refuses_is_counted(small, monkeypatch):
    def refuse(*_):
        raise fs.Error("head_dim: 64; none", "unsupported")

    monkeypatch.setattr(small, "launch", refuse)
    tally = soak(small, 4)
    assert tally.launches == 0 and tally.refused > 0 and not tally.failures
