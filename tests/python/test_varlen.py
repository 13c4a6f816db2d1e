"""Packed sequences: every one on its own, whatever stands beside it."""

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, normal, packed, problem
from flashsdk._testing.problems import BandSpec

LENGTHS = {
    "ragged": ((17, 30), (65, 65), (1, 100), (40, 3)),
    "empty": ((0, 0), (5, 7), (0, 9), (12, 0), (33, 20), (0, 0)),
    "one row each": ((1, 1),) * 7,
    "one sequence": ((130, 70),),
    "nothing": ((0, 0), (0, 0)),
    "decode": ((1, 90), (1, 17), (1, 0), (1, 64)),
}
MASKS = [
    None,
    BandSpec(None, 0, "bottom_right"),
    BandSpec(None, 0, "top_left"),
    BandSpec(10, 5, "bottom_right"),
]


@pytest.mark.parametrize("mask", MASKS, ids=["dense", "causal", "causal-top-left", "window"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(runner, lengths, mask):
    for dtype in runner.dtypes:
        runner.check(packed(lengths, (4, 2), 32, dtype=dtype, mask=mask))


SHORT = {
    "dropout": (64, {"dropout_p": 0.3}),
    "deterministic": (64, {"options": {"deterministic": True}}),
    "head_dim 128": (128, {}),
    "head_dim 256": (256, {}),
    "alibi": (256, {"alibi": "batch"}),
}


@pytest.mark.parametrize(("head_dim", "features"), SHORT.values(), ids=SHORT)
@pytest.mark.parametrize("in_one_tensor", [True, False], ids=["packed", "batched"])
def test_many_short_sequences(runner, in_one_tensor, head_dim, features):
    """A GPU's backward takes some of them at a time: each sees its own rows, slopes and pattern."""
    common = {"dtype": runner.dtypes[0], "mask": BandSpec(None, 0, "bottom_right"), **features}
    count = 36 if runner.backend == "cpu" else 160
    if in_one_tensor:
        lengths = tuple((i % 4, i * 7 % 6) for i in range(count))
        runner.check(packed(lengths, (4, 2), head_dim, **common))
        # More keys than queries: at head_dim 256 an sm90 cluster takes them.
        longer = tuple((i % 3, 40 + i * 7 % 90) for i in range(count - 20))
        runner.check(packed(longer, (4, 2), head_dim, **common))
    else:
        runner.check(problem((2, 3), (4, 2), head_dim, batch=count, **common))


@pytest.mark.parametrize("slack", [(0, 0), (1, 1), (100, 1000)])
def test_max_seqlen_is_an_upper_bound(runner, slack):
    for mask in MASKS:
        dtype = runner.dtypes[0]
        runner.check(packed(LENGTHS["ragged"], 2, 32, dtype=dtype, mask=mask, slack=slack))


@pytest.mark.parametrize("tail", [(3, 0), (0, 5), (70, 70)])
def test_rows_behind_the_last_sequence(runner, tail):
    """They are in no sequence: 0 and -inf, whatever they hold."""
    dtype = runner.dtypes[0]
    runner.check(packed(LENGTHS["ragged"], (4, 2), 32, dtype=dtype, tail=tail))
    runner.check(packed(LENGTHS["nothing"], (4, 2), 32, dtype=dtype, tail=tail))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_neighbours_do_not_leak(dtype):
    """NaN in one sequence stays there, also in tiles that reach into the next one."""
    lengths = [(37, 41), (50, 29), (20, 77)]
    cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in zip(*lengths, strict=True))
    shapes = [(int(n), 2, 24) for n in (cu_q[-1], cu_k[-1], cu_k[-1], cu_q[-1])]
    q, k, v, dout = normal(*shapes, dtype=dtype)
    max_q, max_k = 50, 77
    clean = fs.mha_varlen_fwd(q, k, v, cu_q, cu_k, max_q, max_k)
    clean += fs.mha_varlen_bwd(dout, q, k, v, *clean, cu_q, cu_k, max_q, max_k)
    rows_q, rows_k = slice(cu_q[1], cu_q[2]), slice(cu_k[1], cu_k[2])
    for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k), (dout, rows_q)):
        x[rows] = np.nan
    out, lse = fs.mha_varlen_fwd(q, k, v, cu_q, cu_k, max_q, max_k)
    grads = fs.mha_varlen_bwd(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k)
    dirty = (out, lse, *grads)
    keep_q, keep_k = np.ones(len(q), bool), np.ones(len(k), bool)
    keep_q[rows_q], keep_k[rows_k] = False, False
    for a, b, keep in zip(clean, dirty, (keep_q, None, keep_q, keep_k, keep_k), strict=True):
        if keep is None:
            assert_same_bits([a[:, keep_q]], [b[:, keep_q]])
            assert np.isnan(b[:, ~keep_q]).all()
        else:
            assert_same_bits([a[keep]], [b[keep]])
            assert np.isnan(b[~keep].astype(float)).all()


def test_shapes_of_new_arrays():
    q, k, v, dout = normal((12, 4, 16), (20, 2, 16), (20, 2, 24), (12, 4, 24), dtype="float16")
    cu_q, cu_k = np.array([0, 5, 12], np.int32), np.array([0, 20, 20], np.int32)
    out, lse = fs.mha_varlen_fwd(q, k, v, cu_q, cu_k, 7, 20)
    assert (out.shape, out.dtype) == ((12, 4, 24), q.dtype)
    assert (lse.shape, lse.dtype) == ((4, 12), np.float32)
    assert np.isneginf(lse[:, 5:]).all()
    assert not out[5:].any()
    grads = fs.mha_varlen_bwd(dout, q, k, v, out, lse, cu_q, cu_k, 7, 20)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_alibi_of_sequences_longer_than_a_tile(runner, head_dim):
    """The tile that the end of a sequence cuts is not the last that a GPU kernel visits."""
    lengths = ((300, 300), (150, 340), (340, 150), (40, 270))
    masks = {64: BandSpec(130, 90, "top_left"), 128: None, 256: BandSpec(None, 0, "bottom_right")}
    for mask in [masks[head_dim]] if runner.backend == "cpu" else masks.values():
        changes = {"mask": mask, "alibi": "batch", "tail": (3, 5), "dtype": runner.dtypes[-1]}
        runner.check(packed(lengths, 2, head_dim, **changes))


@pytest.mark.parametrize("feature", ["bias", "alibi", "dropout_p"])
def test_features_are_local_to_the_sequence(runner, feature):
    """The second of two equal sequences gets its own bias, slopes and dropout pattern."""
    lengths = ((33, 45), (33, 45), (0, 3), (20, 50))
    changes = {
        "bias": [{"bias": ("float32", (b, 2, 33, 50))} for b in (1, 4)],
        "alibi": [{"alibi": kind} for kind in ("heads", "batch")],
        "dropout_p": [{"dropout_p": 0.3, "dropout_seed": 2**50 + 3, "dropout_offset": 2**33}],
    }[feature]
    for dtype in runner.dtypes:
        for change in changes:
            mask = BandSpec(None, 0, "bottom_right")
            runner.check(packed(lengths, 2, 32, dtype=dtype, mask=mask, **change))
