"""The reference, the bounds and the comparison themselves: a test is worth what its oracle is."""

from dataclasses import replace

import numpy as np
import pytest
from cases import packed, problem, qkv
from flashsdk._testing import naive, reference, verify
from flashsdk._testing.problems import BandSpec, Blocks, generate, inputs, numpy_dtype, place
from flashsdk.masks import Band


@pytest.mark.parametrize(
    "counter, key, rounds, words",
    [
        # The known answers of the Random123 distribution.
        ((0, 0, 0, 0), (0, 0), 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        ((0, 0, 0, 0), (0, 0), 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            7,
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_philox_known_answers(counter, key, rounds, words):
    got = reference.philox4x32(counter, key, rounds)
    assert " ".join(f"{int(word):08x}" for word in got) == words


def test_dropout_bytes_are_uniform_and_distinct_between_rows():
    rows = np.array([reference.random_bytes(5, 6, 3, i, 512) for i in range(128)])
    counts = np.bincount(rows.astype(int).ravel(), minlength=256)
    assert counts.min() > 150
    assert counts.max() < 400  # 256 expected, standard deviation 16
    assert len({row.tobytes() for row in rows}) == len(rows)
    # The 16 bytes of one call serve rows i and i + 8, columns c, c + 1, and those 8, 16, 24 on.
    assert len({int(x) for x in rows[0, [0, 1, 8, 9, 16, 17, 24, 25]]}) > 4


FEATURES = {
    "plain": {},
    "sink": {"sink": np.array([0.3, -1.0]), "mask": BandSpec(None, 0, "bottom_right")},
    "band": {"mask": BandSpec(9, 2, "bottom_right")},
    "everything": {
        "mask": BandSpec(30, 3, "top_left"),
        "softcap": 3.0,
        "dropout_p": 0.3,
        "seed": 2**40 + 1,
        "offset": 2**35,
        "softmax_scale": 0.4,
        "alibi_slopes": np.array([0.1, 0.3], np.float32),
        "bias": np.where(np.arange(9) == 4, -np.inf, np.arange(9) / 5)[None, None, None],
    },
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_gradients_are_those_of_the_forward(features):
    q, k, v, dout = (x.astype(np.float64) for x in qkv((7, 9), (2, 1), (4, 3), batch=1))
    dlse = np.linspace(-1, 1, 14).reshape(1, 2, 7)

    def loss(q, k, v, **changed):
        out, lse = reference.forward(q, k, v, **(features | changed))
        return (out * dout).sum() + (dlse * np.where(np.isfinite(lse), lse, 0)).sum()

    grads = reference.backward(dout, q, k, v, dlse=dlse, **features)
    step = 1e-5
    for h in range(2) if "sink" in features else ():
        moved = []
        for sign in (1, -1):
            sink = features["sink"].copy()
            sink[h] += sign * step
            moved.append(loss(q, k, v, sink=sink))
        assert abs((moved[0] - moved[1]) / (2 * step) - grads[3][h]) < 1e-7
    for n, (x, grad) in enumerate(zip((q, k, v), grads, strict=False)):
        for index in np.ndindex(x.shape):
            moved = [[a.copy() for a in (q, k, v)] for _ in range(2)]
            moved[0][n][index] += step
            moved[1][n][index] -= step
            slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
            assert abs(slope - grad[index]) < 1e-7, (n, index)


def _by_heads(p, placed, method):
    """out, dq, dk, dv of method(head), which are those of one head."""
    x = {name: placed.view for name, placed in placed.items()}
    f = reference.Features(
        softmax_scale=p.softmax_scale,
        mask=p.mask,
        softcap=p.softcap,
        dropout_p=p.dropout_p,
        seed=x.get("seed", p.dropout_seed),
        offset=p.dropout_offset,
        **{name: x.get(name) for name in verify.GIVEN},
    )
    cu_seqlens = (x["cu_seqlens_q"], x["cu_seqlens_k"]) if p.packed else None
    whole = {"out": (*x["q"].shape[:-1], p.head_dim_v), **{f"d{n}": x[n].shape for n in "qkv"}}
    got = {name: np.zeros(shape) for name, shape in whole.items()}
    for head in reference.heads(f, x["q"], x["k"], x["v"], x["dout"], x.get("dlse"), cu_seqlens):
        at = {"out": head.at_q, "dq": head.at_q, "dk": head.at_k, "dv": head.at_k}
        for name, part in method(head).items():
            got[name][at[name]] += part
    return got


@pytest.mark.parametrize("seed", range(16))
def test_standard_attention_in_float64_agrees(seed):
    p = generate(seed)
    placed = inputs(p)
    exact = verify.expected(p, placed).exact
    got = _by_heads(p, placed, lambda head: naive.standard(head, np.float64))
    for name in set(got) & set(exact):
        scale = 1 + np.abs(exact[name]).max(initial=0)
        assert np.abs(got[name] - exact[name]).max(initial=0) <= 1e-11 * scale


def test_packed_is_every_sequence_alone():
    q, k, v, dout = (x[0] for x in qkv((12, 20), 2, 8, batch=1))
    cu_q, cu_k = [0, 5, 5, 12], [0, 8, 11, 20]
    out, lse = reference.varlen_forward(q, k, v, cu_q, cu_k, mask=BandSpec(None, 0, "bottom_right"))
    grads = reference.varlen_backward(dout, q, k, v, cu_q, cu_k)
    for s in (0, 2):
        a, b = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        one = reference.forward(
            q[None, a], k[None, b], v[None, b], mask=BandSpec(None, 0, "bottom_right")
        )
        assert np.array_equal(one[0][0], out[a])
        assert np.array_equal(one[1][0], lse[:, a])
        one = reference.backward(dout[None, a], q[None, a], k[None, b], v[None, b])
        for got, want, rows in zip(grads, one, (a, b, b), strict=True):
            assert np.array_equal(got[rows], want[0])
    assert not grads[1][8:11].any()  # keys of the sequence without queries


def test_masks_row_by_row():
    band = BandSpec(2, 1, "bottom_right")
    seen = [reference.visible_keys(band, 0, 0, i, 3, 5).astype(int).tolist() for i in range(3)]
    assert seen == [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    band = BandSpec(0, 0, "top_left")
    seen = [reference.visible_keys(band, 0, 0, i, 3, 2).astype(int).tolist() for i in range(3)]
    assert seen == [[1, 0], [0, 1], [0, 0]]
    full, partial = np.array([[[[1, 0]], [[0, 0]]]], bool), np.array([[[[0, 1]], [[0, 0]]]], bool)
    blocks = Blocks(partial, full, (16, 16), BandSpec(None, 0, "top_left"))
    assert np.flatnonzero(reference.visible_keys(blocks, 0, 0, 3, 10, 30)).tolist() == [*range(16)]
    assert not reference.visible_keys(blocks, 0, 1, 3, 10, 30).any()


def _exact(p):
    """The results of a kernel that is exact up to the rounding of its outputs."""
    placed = inputs(p)
    want = verify.expected(p, placed)
    dtypes = {"lse": np.dtype(np.float32)}
    arrays = {n: x.astype(dtypes.get(n, numpy_dtype(p.dtype))) for n, x in want.exact.items()}
    return verify.Results(arrays), want


MUTATED = problem((20, 30), dtype="bfloat16", mask=BandSpec(4, 0, "bottom_right"))


@pytest.mark.parametrize("name", ["q", "dout"])
def test_a_query_that_is_no_number_reaches_the_keys_it_sees_alone(name):
    rng = np.random.default_rng(0)
    x = {n: rng.standard_normal((1, 4, 1, 8)) for n in ("q", "k", "v", "dout")}
    for row, mask, reached in ((0, Band(None, 0), [0]), (0, Band(None, -1), [])):
        given = {n: a.copy() for n, a in x.items()}
        given[name][0, row] = np.nan
        _, dk, dv = reference.backward(*(given[n] for n in ("dout", "q", "k", "v")), mask=mask)
        _, dk_else, dv_else = reference.backward(
            *(x[n] for n in ("dout", "q", "k", "v")), mask=mask
        )
        others = np.setdiff1d(np.arange(4), reached)
        assert np.isnan(dk[0, reached]).all()
        for found, want in ((dk, dk_else), (dv, dv_else)):
            assert np.isfinite(found[0, others]).all()
            # Its share is missing only where it was seen.
            assert np.allclose(found[0, others], want[0, others])


def test_exact_results_pass():
    report = verify.compare(MUTATED, "cpu", *_exact(MUTATED))
    assert report.ok, report


@pytest.mark.parametrize(
    "name, index, change, complaint",
    [
        ("out", (0, 3, 1, 5), lambda x: x + 0.05, "out: error above its bound at 1 of 1280"),
        ("out", (0, 3, 1, 5), lambda x: np.nan, "out: NaN at 1 of"),
        ("dq", (0, 0, 0, 0), lambda x: -x, "dq: error above its bound"),
        ("dv", (0, 2, 0, 0), lambda x: 1e-39, "dv: not 0 at 1 of"),  # no query sees key 2
        ("lse", (0, 0, 0), lambda x: x + 3e-4, "lse: error above its bound"),
        ("lse", (0, 1, 7), lambda x: -np.inf, "lse: -inf on one side only at 1 of 40"),
        ("dk", (0, 29, 0, 0), lambda x: np.inf, "dk: error above its bound"),
    ],
)
def test_one_wrong_element_is_found(name, index, change, complaint):
    results, want = _exact(MUTATED)
    results.arrays[name][index] = change(results.arrays[name][index])
    report = verify.compare(MUTATED, "cpu", results, want)
    assert complaint in str(report)


@pytest.mark.parametrize(
    "p",
    [
        problem((20, 30), dropout_p=0.5),
        problem((20, 30), softcap=2.0),
        problem((20, 30), heads=(4, 2), alibi="heads"),
        problem((20, 30), bias=("float32", (1, 1, 1, 30))),
        packed(((9, 9), (11, 21)), mask=BandSpec(None, 0, "bottom_right")),
    ],
    ids=str,
)
def test_a_forgotten_feature_is_found(p):
    results, _ = _exact(p)
    other = problem((20, 30), heads=(p.num_heads, p.num_heads_kv), packed=p.packed)
    if p.packed:
        other = packed(((9, 9), (11, 21)))
    report = verify.compare(other, "cpu", results, verify.expected(other, inputs(other)))
    wrong = {"out", "dq", "dk", "dv"} | (set() if p.dropout_p else {"lse"})
    assert {line.split(":")[0] for line in report.failures} == wrong


def test_a_wrong_p_is_found_where_all_else_cancels():
    """With one key P is 1 whatever the score is: its roundings excuse nothing."""
    p = problem((150, 1), head_dim=192, heads=1, dropout_p=0.9)
    results, want = _exact(p)
    assert verify.compare(p, "cpu", results, want).ok
    results.arrays["dv"] *= 1 + 3e-5
    report = verify.compare(p, "cpu", results, want)
    assert "dv: error above its bound" in str(report)


def _rounded_like_flash_attention(p, placed, lag=0.0):
    """In NumPy, P and dS rounded for the products: {gradient: (its errors, what is allowed)}."""
    want, of = verify.expected(p, placed), numpy_dtype(p.dtype)
    got = _by_heads(p, placed, lambda head: naive.flash_backward(head, of, lag=lag))
    return {
        name: (np.abs(naive.rounding(of)(got[name]) - want.exact[name]), want.bound[name])
        for name in ("dq", "dk", "dv")
    }


@pytest.mark.parametrize("seed", range(40))
def test_rounding_like_flash_attention_is_allowed(seed):
    """What any kernel may do."""
    p = replace(generate(seed, "gpu" if seed % 3 else "cpu"), fp8=None)
    for name, (error, bound) in _rounded_like_flash_attention(p, inputs(p), seed % 8).items():
        assert (error <= bound).all(), name


def test_ds_may_be_rounded_with_its_error():
    """Two keys with one value: dS is 0 but for delta's error, which p·k at times cancels in dQ."""
    p = problem((4000, 2), head_dim=64, heads=1, dtype="bfloat16", dropout_p=0.1, seed=3)
    placed = inputs(p)
    placed["q"].view[..., 1:] = 0  # the first feature makes P, the others are there for dQ
    placed["k"].view[0, :, 0, 0] = 2, -2
    placed["v"].view[:, 1] = placed["v"].view[:, 0]
    error, bound = _rounded_like_flash_attention(p, placed)["dq"]
    assert 0.2 < (error / bound).max() <= 1


def test_the_slope_of_softcap_multiplies_the_error_of_delta():
    """One key: dS is 0 but for delta's error, and 1 - tanh² as large as its own where it ends."""
    p = problem(
        (3000, 1), head_dim=64, heads=1, dtype="bfloat16", dropout_p=0.1, softcap=15.0,
        values="huge",
    )  # fmt: skip
    error, bound = _rounded_like_flash_attention(p, inputs(p))["dq"]
    assert 0.1 < (error / bound).max() <= 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tensor_cores_cut_off_what_they_add(dtype, head_dim):
    """Sixteen products at a time, of one sign, to a bit below the last of the largest."""
    p = problem((20, 30), head_dim=head_dim, heads=1, dtype=dtype, values="negative", magnitude=10)
    placed = inputs(p)
    q, k = (placed[name].view[0, :, 0].astype(float) for name in "qk")
    total = np.zeros((20, 30))
    for at in range(0, head_dim, 16):
        terms = [total, *(np.multiply.outer(q[:, i], k[:, i]) for i in range(at, at + 16))]
        unit = np.exp2(np.floor(np.log2(np.abs(terms).max(0))) - 24)
        total = sum(np.trunc(x / unit) * unit for x in terms)
        unit = np.exp2(np.floor(np.log2(np.abs(total))) - 23)
        total = np.trunc(total / unit) * unit
    exact = q @ k.T
    want = verify.expected(p, placed)
    score = total / np.sqrt(head_dim)
    lse = np.logaddexp.reduce(score, axis=1)
    share = np.abs(lse - want.exact["lse"][0, 0]) / want.bound["lse"][0, 0]
    assert (total >= exact).all()  # never rounded away from zero
    assert 0.05 < share.max() <= 1


@pytest.mark.parametrize("seed", range(40))
def test_places_hold_their_values(seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((3, 5, 2, 7)).astype(np.float32)
    placed = place(values, rng)
    assert placed.view.strides[-1] == 4
    assert np.array_equal(placed.view, values)
    assert np.isnan(placed.buffer).sum() == placed.buffer.size - values.size


def test_problems_cover_the_features():
    problems = [generate(seed) for seed in range(300)]
    assert {p.dtype for p in problems} == {"float32", "bfloat16", "float16"}
    for feature in ("packed", "mask", "bias", "alibi", "softcap", "dropout_p", "dlse", "strides"):
        have = sum(bool(getattr(p, feature)) for p in problems)
        assert 25 < have < 275, feature
    assert any(0 in p.lengths_q for p in problems)
    assert any(0 in p.lengths_k for p in problems)
    assert any(p.num_heads_kv < p.num_heads for p in problems)
    assert any(p.head_dim > 192 for p in problems)
    assert str(generate(7)) == str(problems[7])


STANDARD = {
    "plain": {},
    "band": {"mask": BandSpec(9, 2, "bottom_right")},
    "rows without keys": {"mask": BandSpec(0, 0, "top_left")},
    "bias": {"bias": np.where(np.arange(13) == 4, -np.inf, np.arange(13) / 5)[None, None, None]},
    "boolean bias": {"bias": (np.arange(52) % 3 > 0).reshape(2, 2, 1, 13)},
    "ALiBi and softcap": {"alibi_slopes": np.array([0.1, 0.3]), "softcap": 3.0},
    "scale": {"softmax_scale": 0.25},
    "sinks": {"sink": np.array([0.3, -1.0]), "mask": BandSpec(0, 0, "top_left")},
}


@pytest.mark.parametrize("features", STANDARD.values(), ids=STANDARD)
def test_pytorch_s_standard_attention_agrees(features):
    """With its gradients by autograd: the definition that the tests of flashsdk.torch go by."""
    torch = pytest.importorskip("torch")
    from standard_attention import gradients, standard

    q, k, v, dout = (x.astype(np.float64) for x in qkv((17, 13), (2, 1), (4, 3)))
    dlse = np.linspace(-1, 1, 68).reshape(2, 2, 17)
    want = reference.forward_backward(dout, q, k, v, dlse=dlse, **features)
    options = {n: torch.from_numpy(x) if n in ("bias", "alibi_slopes") else x
               for n, x in features.items() if n not in ("mask", "sink")}  # fmt: skip
    if band := features.get("mask"):
        rows = [reference.visible_keys(band, 0, 0, i, 17, 13) for i in range(17)]
        options["visible"] = torch.from_numpy(np.array(rows))
    arrays = {"q": q, "k": k, "v": v, **{n: features[n] for n in ("sink",) if n in features}}
    got = gradients(
        lambda *x: standard(**dict(zip(arrays, x, strict=True)), **options),
        [*map(torch.from_numpy, arrays.values())],
        [*map(torch.from_numpy, (dout, dlse))],
    )
    for ours, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(ours.numpy(), exact, rtol=1e-12, atol=1e-12)
