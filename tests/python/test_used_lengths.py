"""Used lengths: sequences in a batch of longer rows, of which nobody reads those behind."""

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, both, problem, qkv
from flashsdk._testing.problems import BandSpec, Blocks, generate

MASKS = {
    "dense": None,
    "causal": BandSpec(None, 0, "bottom_right"),
    "causal-top-left": BandSpec(None, 0, "top_left"),
    "window": BandSpec(10, 5, "bottom_right"),
}
# (capacities of q and k, used lengths of each sequence)
LENGTHS = {
    "ragged": ((70, 110), (17, 70, 0, 40), (30, 110, 50, 0)),
    "keys alone": ((20, 110), (), (1, 110, 64, 0)),
    "queries alone": ((70, 30), (1, 70, 16), ()),
    "one query": ((1, 200), (), (1, 0, 200, 90)),
    "one query, or none": ((1, 200), (1, 0, 1), (1, 9, 200)),
    "none": ((3, 5), (0, 0), (0, 0)),
}


def used_problem(lengths, heads=(4, 2), head_dim=32, **changes):
    capacity, used_q, used_k = lengths
    batch = len(used_q or used_k)
    return problem(capacity, heads, head_dim, batch=batch, used_q=used_q, used_k=used_k, **changes)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(runner, lengths, mask):
    for dtype in runner.dtypes:
        runner.check(used_problem(lengths, dtype=dtype, mask=mask))


FEATURES = {
    "bias": {"bias": ("float32", (4, 4, 70, 110))},
    "bias of keys": {"bias": ("bool", (4, 1, 1, 110))},
    "alibi": {"alibi": "batch"},
    "dropout": {"dropout_p": 0.3, "dlse": True},
    "strides": {"strides": True, "softcap": 5.0},
    "blocks": {
        "mask": Blocks(
            np.eye(3, 4, dtype=bool)[None, None],
            np.ones((3, 4), bool)[None, None] & ~np.eye(3, 4, dtype=bool),
            (32, 32),
            BandSpec(20, 5, "top_left"),
        )
    },
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features_count_with_used_lengths(runner, features):
    for dtype in runner.dtypes:
        runner.check(used_problem(LENGTHS["ragged"], dtype=dtype, **features))


@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
def test_long_sums_are_cut_by_the_used_keys(runner, seqlen_q):
    """Beside a sequence of three parts, one that is too short for two."""
    for dtype in runner.dtypes:
        runner.check(
            problem(
                (seqlen_q, 7000), (2, 1), 16, batch=3, dtype=dtype, used_k=(6500, 4000, 0),
                used_q=(seqlen_q, 1, seqlen_q),
            )
        )  # fmt: skip


def test_a_few_keys_and_many_queries(runner):
    """The backward cuts the queries of the first into parts."""
    lengths = ((4500, 40), (4500, 9, 4200), (30, 40, 0))
    for dtype in runner.dtypes:
        runner.check(used_problem(lengths, heads=1, head_dim=8, dtype=dtype))


def test_random_problems_use_them():
    problems = [generate(seed) for seed in range(60)]
    assert sum(bool(p.used_q) for p in problems) > 5
    assert sum(bool(p.used_k) for p in problems) > 5


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_the_bits_are_those_of_the_slices(dtype):
    """Of each sequence alone, with the rows that it uses; whatever shares the batch."""
    q, k, v, dout = qkv((60, 5000), (4, 2), 32, batch=3, dtype=dtype)
    used_q, used_k = np.array([60, 33, 2], np.int32), np.array([4500, 700, 5000], np.int32)
    together = both(q, k, v, dout, seqused_q=used_q, seqused_k=used_k, mask=fs.Causal())
    for b in range(3):
        i, j = slice(used_q[b]), slice(used_k[b])
        one = slice(b, b + 1)
        alone = both(q[one, i], k[one, j], v[one, j], dout[one, i], mask=fs.Causal())
        rows = (i, (slice(None), i), i, j, j)
        for ours, theirs, at in zip(together, alone, rows, strict=True):
            assert_same_bits([ours[b][at]], [theirs[0]])


@pytest.mark.parametrize("seqlen_q", [1, 7, 300])
def test_bits_do_not_depend_on_what_shares_the_batch(seqlen_q):
    """num_splits=1 asks for it, and on a CPU nothing takes it away."""
    q, k, v, _ = qkv((seqlen_q, 9000), (4, 2), 32, batch=5)
    used = np.array([4400, 3, 0, 9000, 2000], np.int32)
    alone = fs.mha_fwd(q[:1], k[:1], v[:1], seqused_k=used[:1], num_splits=1)
    for count in (2, 5):
        for splits in (None, 1, 8):
            among = fs.mha_fwd(q[:count], k[:count], v[:count], seqused_k=used[:count],
                               num_splits=splits)  # fmt: skip
            assert_same_bits([x[:1] for x in among], alone)


def test_num_splits_is_a_number_from_1_on():
    q, k, v, _ = qkv()
    for given, shown in ((0, "0"), (-1, "-1"), (2.5, "2.5"), (True, "True")):
        line = rf"^num_splits: {shown}; an integer from 1 to 1073741824, or None$"
        with pytest.raises(fs.InvalidArgument, match=line):
            fs.mha_fwd(q, k, v, num_splits=given)


def test_lengths_that_use_all_change_no_bit():
    q, k, v, dout = qkv((1, 90), (4, 2), 32, batch=2)
    full = {"seqused_k": np.full(2, 90, np.int32)}
    assert_same_bits(both(q, k, v, dout, **full), both(q, k, v, dout))


def test_heads_share_a_row_of_keys_in_decoding():
    q, k, v, _ = qkv((1, 90), (4, 2), 32, batch=2)
    used = np.array([90, 3], np.int32)
    for mask in (None, fs.Causal()):
        assert fs.explain(q, k, v, mask=mask, seqused_k=used).packing
    # Each sequence has a window of its own, and each query may be there or not.
    assert not fs.explain(q, k, v, mask=fs.SlidingWindow(5), seqused_k=used).packing
    one = np.array([1, 0], np.int32)
    assert not fs.explain(q, k, v, seqused_q=one).packing


ERRORS = {
    "above": ({"seqused_k": [70, 71]}, "seqused_k: 71 of sequence 1; 0 to seqlen_k, which is 70"),
    "negative": ({"seqused_q": [-1, 0]}, "seqused_q: -1 of sequence 0; 0 to seqlen_q, which is 50"),
    "shape": ({"seqused_k": [1, 2, 3]}, "seqused_k: shape (3,); (batch 2)"),
    "rank": ({"seqused_q": [[1, 2]]}, "seqused_q: shape (1, 2); (batch 2)"),
}


@pytest.mark.parametrize(("given", "line"), ERRORS.values(), ids=ERRORS)
def test_errors(given, line):
    q, k, v, dout = qkv()
    out, lse = fs.mha_fwd(q, k, v)
    given = {name: np.array(x, np.int32) for name, x in given.items()}
    for call in (
        lambda: fs.mha_fwd(q, k, v, **given),
        lambda: fs.mha_bwd(dout, q, k, v, out, lse, **given),
        lambda: fs.explain(q, k, v, op="bwd", **given),
    ):
        with pytest.raises(fs.InvalidArgument) as caught:
            call()
        assert str(caught.value) == line


def test_a_wrong_dtype_is_an_error():
    q, k, v, _ = qkv()
    with pytest.raises(fs.InvalidArgument, match=r"^seqused_k: dtype int64; int32$"):
        fs.mha_fwd(q, k, v, seqused_k=np.array([1, 2]))
    with pytest.raises(fs.InvalidArgument, match=r"^seqused_k: list; an array"):
        fs.mha_fwd(q, k, v, seqused_k=[1, 2])


def test_packed_sequences_have_lengths_already():
    q, k, v, _ = (x[0] for x in qkv(batch=1))
    cu_q, cu_k, used = (np.array(x, np.int32) for x in ([0, 50], [0, 70], [3]))
    line = "seqused_k: given; none, as the lengths of packed sequences are in cu_seqlens_k"
    with pytest.raises(fs.InvalidArgument) as caught:
        fs.explain(q, k, v, cu_q, cu_k, 50, 70, seqused_k=used)
    assert str(caught.value) == line
