"""The commands that hold results to the definition: verify and demo."""

import dataclasses
import json
import signal
import time

import flashsdk as fs
import numpy as np
import pytest
from command_line import PNG, has_matplotlib, run, start
from flashsdk._commands import demo, exact, standard, verify
from flashsdk._testing import reference
from flashsdk._testing.problems import generate
from flashsdk._testing.verify import Report

# Of JAX, which other tests have imported: the child starts another program at once.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called")


# ---- verify: of fixed problems, so that what fails here was changed here


@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_verify_names_a_backend_that_runs_nowhere_here(backend):
    if any(kernel["available"] for kernel in fs.kernels() if kernel["backend"] == backend):
        pytest.skip("this machine runs it")
    for options in ([], ["--count", "2"], ["--seed", "5"], ["--framework", "torch"]):
        err = run("verify", "--backend", backend, *options, code=2)
        assert err.startswith(f"flashsdk verify: --backend: {backend}; ")
        assert len(err.strip().splitlines()) == 1


def test_verify_repeats_a_seed_exactly():
    out = run("verify", "--seed", "7")
    assert str(generate(7)).splitlines()[0] in out
    assert out.endswith("passed\n")
    assert out == run("verify", "--seed", "7")


def test_verify_stops_at_a_count():
    out = run("verify", "--count", "5", "--first-seed", "7")
    assert ", from seed 7 on\n" in out
    assert "\n5 problems in " in out
    assert out.endswith("no failure\n")


def test_verify_stops_at_a_time(monkeypatch, capsys):
    """At the first problem that would begin after it, by a clock that each problem moves by 1 s."""
    clock = 100.0

    def check(problem, *_):
        nonlocal clock
        clock += 1
        assert clock < 200, "it goes on for ever"
        return Report(problem, "cpu", [], {})

    monkeypatch.setattr(verify, "check", check)
    monkeypatch.setattr(verify.time, "monotonic", lambda: clock)
    for seconds, problems in ((2.5, 3), (3.0, 3), (None, verify.DEFAULT_SECONDS)):
        clock = 100.0
        code = verify.run(seconds=seconds, count=None, seed=None, backend="cpu", framework=None)
        assert code == 0
        out = capsys.readouterr().out
        assert f"\n{problems:.0f} problems in {problems:.0f} s" in out and "no failure" in out


def test_verify_ends_cleanly_on_ctrl_c():
    process = start("verify", "--seconds", "200", "--first-seed", "7")
    assert "from seed" in process.stdout.readline()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "problem" in out and "stopped by Ctrl-C; no failure" in out
    assert "Traceback" not in err


def test_verify_says_how_to_repeat_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(verify, "check", lambda p, *_: Report(p, "cpu", ["out: NaN"], {}))
    assert verify.run(seconds=None, count=3, seed=None, backend="cpu", framework=None) == 1
    out = capsys.readouterr().out
    assert "out: NaN" in out
    seed = int(out.split("--seed ")[1].split()[0])
    assert verify.run(seconds=None, count=None, seed=seed, backend="cpu", framework=None) == 1
    assert str(generate(seed)).splitlines()[0] in capsys.readouterr().out


def test_verify_reports_an_exception_as_a_failure(monkeypatch, capsys):
    def refuse(*_):
        raise fs.Error("q: no; yes")

    monkeypatch.setattr(verify, "check", refuse)
    assert verify.run(seconds=None, count=1, seed=None, backend="cpu", framework=None) == 1
    assert "InvalidArgument: q: no; yes" in capsys.readouterr().out


@pytest.mark.parametrize("given", [{"count": 2}, {"seed": 3}])
def test_verify_that_ran_nothing_verifies_nothing(monkeypatch, given):
    def missing(*_):
        raise ModuleNotFoundError(name="ml_dtypes")

    monkeypatch.setattr(verify, "check", missing)
    given = {"seconds": None, "count": None, "seed": None} | given
    with pytest.raises(fs.Error, match="run"):
        verify.run(**given, backend="cpu", framework=None)


# ---- demo


@pytest.fixture
def small_demo(monkeypatch):
    small = [dataclasses.replace(s, seqlen=s.seqlen // 8) for s in demo.SHAPES]
    monkeypatch.setattr(demo, "SHAPES", tuple(s for s in small if s.seqlen <= 256))


@pytest.fixture
def smallest_demo(small_demo, monkeypatch):
    """One shape, for what goes wrong with each alike."""
    monkeypatch.setattr(demo, "SHAPES", demo.SHAPES[:1])


@has_matplotlib
def test_demo_draws_and_records(small_demo, tmp_path, capsys):
    picture, record = tmp_path / "demo.png", tmp_path / "demo.json"
    assert demo.run(str(picture), str(record)) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("GPT-2 small", "BERT-large", "Llama-3-8B", str(picture)))
    assert picture.read_bytes().startswith(PNG)
    data = json.loads(record.read_text())
    assert all(row["ok"] and 0 < row["error_out"] < 1e-5 for row in data["rows"])
    assert demo.describe(data) in out
    for row, part in zip(data["rows"], (1, 20 / 32, 1 / 2**14), strict=False):
        row["measured_part"] = part
    assert "measured on 1/16384 and 5/8 of" in demo.describe(data)


def test_demo_fails_when_a_result_is_wrong(smallest_demo, tmp_path, monkeypatch, capsys):
    forward = fs.mha_fwd

    def wrong(*args, **kwargs):
        out, lse = forward(*args, **kwargs)
        out[0, 3] += 1e-3
        return out, lse

    monkeypatch.setattr(fs, "mha_fwd", wrong)
    assert demo.run(str(tmp_path / "demo.png"), None) == 1
    assert "error bound missed" in capsys.readouterr().out


def test_demo_fails_on_nan(smallest_demo, tmp_path, monkeypatch):
    backward = fs.mha_bwd

    def wrong(*args, **kwargs):
        dq, dk, dv = backward(*args, **kwargs)
        dk[...] = np.nan
        return dq, dk, dv

    monkeypatch.setattr(fs, "mha_bwd", wrong)
    assert demo.run(str(tmp_path / "demo.png"), None) == 1


MASKS = {
    "none": fs.Dense(),
    "causal": fs.Causal(),
    "blocks": fs.layouts.random(96, 96, 16, density=0.4, seed=1),
    "causal blocks": fs.BlockMask.from_dense(np.ones((6, 6), bool), 16, band=fs.Causal()),
}


def random_inputs(seqlen: int, heads: int, heads_kv: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = [heads, heads_kv, heads_kv, heads]
    return [rng.standard_normal((1, seqlen, n, 16), dtype=np.float32) for n in shapes]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_exact_attention_is_the_definition(mask, monkeypatch):
    monkeypatch.setattr(exact, "ROWS", 40)
    q, k, v, dout = random_inputs(96, 3, 1)
    seen = exact.Visibility.of(mask)
    got = exact.attention(q[0], k[0, :, 0], v[0, :, 0], dout[0], seen, np.float64)
    out, _ = reference.forward(q, k, v, mask=mask)
    dq, dk, dv = reference.backward(dout, q, k, v, mask=mask)
    pairs = ((got.out, out[0]), (got.dq, dq[0]), (got.dk, dk[0, :, 0]), (got.dv, dv[0, :, 0]))
    for ours, want in pairs:
        np.testing.assert_allclose(ours, want, rtol=0, atol=1e-12 * np.abs(want).max())


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_exact_attention_may_leave_gradients_out(mask, monkeypatch):
    monkeypatch.setattr(exact, "ROWS", 16)
    q, k, v, dout = random_inputs(96, 1, 1)
    seen = exact.Visibility.of(mask)
    args = (q[0], k[0, :, 0], v[0, :, 0], dout[0], seen, np.float64)
    every, some = exact.attention(*args), exact.attention(*args, every=3)
    wanted = np.arange(96) // 16 % 3 == 0
    np.testing.assert_array_equal(some.out, every.out)
    for name in ("dq", "dk", "dv"):
        left, right = getattr(some, name), getattr(every, name)
        np.testing.assert_allclose(left[wanted], right[wanted], rtol=0, atol=1e-13)
        assert np.isnan(left[~wanted]).all()


@pytest.mark.parametrize("kind", ["NumpyAttention", "TorchAttention"])
@pytest.mark.parametrize("mask", [fs.Dense(), fs.Causal()], ids=["none", "causal"])
def test_standard_attention_is_the_definition(kind, mask):
    if kind == "TorchAttention":
        pytest.importorskip("torch")
    q, k, v, dout = random_inputs(32, 4, 2)
    hidden = exact.Visibility.of(mask).hidden(0, 32, 32, 32)
    attention = getattr(standard, kind)(q, k, v, dout, hidden, 2)
    out, grads = attention.forward(), attention.backward()
    want = (
        reference.forward(q, k, v, mask=mask)[0],
        *reference.backward(dout, q, k, v, mask=mask),
    )
    for ours, exactly in zip((out, *grads), want, strict=True):
        ours = np.asarray(ours.detach() if hasattr(ours, "detach") else ours)
        np.testing.assert_allclose(ours.swapaxes(1, 2), exactly, rtol=0, atol=2e-5)
    attention.backward(keep=False)
