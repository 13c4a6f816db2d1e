"""Dropout whose seed and offset are an array: of all sequences, (2,), or of each, (batch, 2)."""

import flashsdk as fs
import numpy as np
import pytest
from cases import assert_same_bits, both, packed, problem, qkv
from flashsdk._testing.problems import BandSpec

CAUSAL = BandSpec(None, 0, "bottom_right")
SEEDS = ((7, 0), (2**64 - 1, 2**40 + 9), (2**63, 2**64 - 5))
OFFSETS = np.array([0, 20, 20, 50], np.int32)  # a sequence without rows among them
P = {"dropout_p": 0.4}


def arrays(values):
    """The same bits, of every kind that holds them."""
    unsigned = np.array(values, np.uint64)
    wider = np.zeros((*unsigned.shape[:-1], 5), np.uint64)
    wider[..., 1:3] = unsigned
    found = {
        "uint64": unsigned,
        "int64": unsigned.view(np.int64),
        "of a wider array": wider[..., 1:3],
    }
    try:
        import torch
    except ImportError:
        return found
    return {**found, "torch": torch.from_numpy(unsigned.view(np.int64))}


def both_packed(q, k, v, dout, offsets, **keywords):
    lengths = (offsets, offsets, 50, 50)
    out, lse = fs.mha_varlen_fwd(q, k, v, *lengths, **keywords)
    return (out, lse, *fs.mha_varlen_bwd(dout, q, k, v, out, lse, *lengths, **keywords))


@pytest.mark.parametrize("seed, offset", SEEDS)
def test_an_array_is_as_good_as_two_numbers(seed, offset):
    batched = qkv(batch=3)
    rows = [x[0] for x in qkv(50, batch=1)]
    want = both(*batched, seed=seed, offset=offset, **P)
    want_packed = both_packed(*rows, OFFSETS, seed=seed, offset=offset, **P)
    for given in arrays((seed, offset)).values():
        assert_same_bits(both(*batched, seed=given, **P), want)
        assert_same_bits(both_packed(*rows, OFFSETS, seed=given, **P), want_packed)


def test_a_sequence_with_a_seed_of_its_own_drops_what_it_drops_alone():
    batched = qkv(batch=3)
    alone = [
        both(*(x[b : b + 1] for x in batched), seed=seed, offset=offset, **P)
        for b, (seed, offset) in enumerate(SEEDS)
    ]
    want = [np.concatenate(parts) for parts in zip(*alone, strict=True)]
    for given in arrays(SEEDS).values():
        assert_same_bits(both(*batched, seed=given, **P), want)


def test_a_packed_sequence_with_a_seed_of_its_own_drops_what_it_drops_alone():
    rows = [x[0] for x in qkv(50, batch=1)]
    got = both_packed(*rows, OFFSETS, seed=np.array(SEEDS, np.uint64), **P)
    for b, (seed, offset) in enumerate(SEEDS):
        own = slice(*OFFSETS[b : b + 2])
        want = both(*(x[None, own] for x in rows), seed=seed, offset=offset, **P)
        places = (own, (slice(None), own), own, own, own)
        parts = [x[place] for x, place in zip(got, places, strict=True)]
        assert_same_bits(parts, [x[0] for x in want])


def test_the_same_seed_of_each_drops_the_same_in_each():
    x = [np.repeat(t, 2, axis=0) for t in qkv(batch=1)]
    out = both(*x, seed=np.array([[3, 4], [3, 4]]), **P)[0]
    assert np.array_equal(out[0], out[1])
    out = both(*x, seed=np.array([3, 4]), **P)[0]
    assert not np.array_equal(out[0], out[1])


def test_the_definition(runner):
    """Against the float64 reference, forward and backward."""
    for dtype in runner.dtypes:
        for seeds in (SEEDS[1], SEEDS):
            changes = {"dropout_p": 0.3, "dropout_seeds": seeds, "dtype": dtype}
            runner.check(problem((50, 70), (4, 2), 32, batch=3, mask=CAUSAL, **changes))
            runner.check(packed(((40, 60), (0, 20), (33, 33)), (4, 2), 64, dlse=True, **changes))


BOTH = "; int64 or uint64"
CONTIGUOUS = "the last dimension contiguous (stride 1), as in a contiguous copy"


@pytest.mark.parametrize(
    "given, line",
    [
        (np.array([1, 2], np.int32), "seed: dtype int32" + BOTH),
        (np.array([1, 2], np.float32), "seed: dtype float32" + BOTH),
        (np.array([1.0, 2.0]), "seed: dtype float64" + BOTH),
        (np.array([1, 2, 3]), "seed: shape (3,); (seed and offset = 2)"),
        (np.zeros((2, 2), int), "seed: shape (2, 2); (batch 3, seed and offset = 2)"),
        (np.zeros((3, 3), int), "seed: shape (3, 3); (batch 3, seed and offset = 2)"),
        (np.zeros((1, 3, 2), int), "seed: shape (1, 3, 2); (batch 3, seed and offset = 2)"),
        (np.zeros(4, int)[::2], "seed: strides of elements (2,); " + CONTIGUOUS),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_arrays_are_refused(given, line):
    x = qkv(batch=3)
    out, lse = fs.mha_fwd(*x[:3])
    for call in (
        lambda: fs.mha_fwd(*x[:3], seed=given, **P),
        lambda: fs.mha_bwd(x[3], *x[:3], out, lse, seed=given, **P),
    ):
        with pytest.raises(fs.InvalidArgument) as caught:
            call()
        assert str(caught.value) == line


def test_an_offset_beside_an_array_is_refused():
    x = qkv()
    line = "^offset: 5; 0, as seed is an array with an offset of its own$"
    with pytest.raises(fs.InvalidArgument, match=line):
        fs.mha_fwd(*x[:3], seed=np.array([1, 2]), offset=5, **P)
    with pytest.raises(fs.InvalidArgument, match=r"^offset: -1; "):
        fs.mha_fwd(*x[:3], seed=np.array([1, 2]), offset=-1, **P)
