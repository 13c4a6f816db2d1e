"""Few results that sum over much: a CPU cuts the sum into parts, and joins them in order."""

import time

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, both, packed, problem, qkv
from flashsdk._testing.problems import BandSpec, Blocks

CAUSAL = BandSpec(None, 0, "bottom_right")
# Keys in parts, queries in parts, or queries of a whole group of heads.
CUT = [
    ((1, 5000), 1), ((4, 4200), (4, 2)), ((20, 4200), 1), ((70, 4300), 1), ((130, 4100), 1),
    ((5000, 1), 1), ((4200, 77), 1), ((4100, 200), 2), ((520, 150), (16, 2)),
]  # fmt: skip
MASKS = [None, CAUSAL, BandSpec(4150, -40, "bottom_right"), BandSpec(40, 4150, "top_left")]


def blocks(seqlen_q, seqlen_k, size, density=0.5):
    rows, columns = (-(-n // s) for n, s in zip((seqlen_q, seqlen_k), size, strict=True))
    full, partial = np.random.default_rng(0).random((2, 1, 2, rows, columns)) < density
    return Blocks(partial & ~full, full, size, CAUSAL)


@pytest.mark.parametrize("seqlen, heads", CUT, ids=str)
def test_parts(cpu, seqlen, heads):
    for i, mask in enumerate(MASKS):
        dtype = cpu.dtypes[i % len(cpu.dtypes)]
        values = {"values": "huge"} if i == 1 else {"dlse": True}
        cpu.check(problem(seqlen, heads, (40, 24), dtype=dtype, mask=mask, **values))


@pytest.mark.parametrize("size", [(16, 16), (64, 48), (128, 1024)], ids=str)
def test_parts_of_layouts(cpu, size):
    """A part may begin inside a block of the layout."""
    for seqlen in ((4, 4300), (40, 4300), (4300, 90)):
        mask = blocks(*seqlen, size)
        cpu.check(problem(seqlen, 2, 40, dtype=cpu.dtypes[0], mask=mask, seed=size[1]))


@pytest.mark.parametrize("seqlen", [(3, 4200), (25, 4200), (4200, 25)], ids=str)
def test_parts_with_features(cpu, seqlen):
    for i, features in enumerate(
        (
            {"bias": ("float32", (1, 1, *seqlen)), "dropout_p": 0.3},
            {"bias": ("bool", (1, 1, 1, seqlen[1])), "mask": CAUSAL},
            {"bias": ("bfloat16", (1, 1, seqlen[0], 1)), "softcap": 5.0},
            {"alibi": "heads", "softcap": 6.0, "dropout_p": 0.2},
        )
    ):
        cpu.check(problem(seqlen, 1, 40, dtype=cpu.dtypes[i % len(cpu.dtypes)], **features))


@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_parts_of_packed_sequences(cpu, mask):
    """Only some are long enough; more sequences than can be, and fewer."""
    few = ((1, 4200), (0, 70), (3, 0), (33, 4100))
    many = ((1, 1),) * 5 + ((4200, 30), (1, 4300), (2, 4100)) + ((3, 2),) * 6 + ((4300, 9),)
    for lengths in (few, many):
        cpu.check(packed(lengths, (4, 2), 40, dtype=cpu.dtypes[0], mask=mask, tail=(3, 4)))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("seqlen, heads", CUT, ids=str)
def test_threads_and_batches_do_not_change_a_bit(dtype, seqlen, heads):
    x = qkv(seqlen, heads, 40, dtype=dtype)
    for mask in (None, fs.Causal(), fs.layouts.causal(*seqlen, 32)):
        fs.set_num_threads(1)
        want = both(*x, mask=mask)
        for threads in (2, 3, 8, 2):
            fs.set_num_threads(threads)
            assert_same_bits(both(*x, mask=mask), want)
        assert_same_bits(both(*(t[1:] for t in x), mask=mask), (t[1:] for t in want))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("seqlen, heads", [((3, 4200), 2), ((40, 4200), 2), ((4200, 40), (2, 1))])
def test_packed_is_batched(dtype, seqlen, heads):
    q, k, v, dout = qkv(seqlen, heads, 40, dtype=dtype, batch=3)
    want = both(q, k, v, dout, mask=fs.Causal())
    q, k, v, dout = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, dout))
    bounds = [np.arange(4, dtype=np.int32) * n for n in seqlen] + list(seqlen)
    out, lse = fs.mha_varlen_fwd(q, k, v, *bounds, mask=fs.Causal())
    grads = fs.mha_varlen_bwd(dout, q, k, v, out, lse, *bounds, mask=fs.Causal())
    got = [x.reshape(y.shape) for x, y in zip((out, *grads), (want[0], *want[2:]), strict=True)]
    assert_same_bits(got, (want[0], *want[2:]))
    assert_same_bits([lse.reshape(2, 3, -1).transpose(1, 0, 2)], [want[1]])


def least_times(calls, enough, seconds=10):
    """The least time of each call, in turns, until they are `enough` or the time is over.

    It is the caller's own time, in which others do not count; what they do to its caches does,
    and passes.
    """
    fs.set_num_threads(1)
    least = dict.fromkeys(calls, float("inf"))
    end = time.monotonic() + seconds
    while True:
        for _ in range(7):
            for name, call in calls.items():
                begin = time.thread_time()
                call()
                least[name] = min(least[name], time.thread_time() - begin)
        if enough(least) or time.monotonic() > end:
            return least


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_time_goes_with_the_queries(op):
    """As far as whole vectors do, of which a panel has up to four."""
    calls = {}
    for queries in (1, 17, 33, 64):
        q, k, v, dout = qkv((queries, 2000), 2, 128, batch=1)
        out, lse = fs.mha_fwd(q, k, v)
        calls[queries] = {
            "fwd": lambda a=(q, k, v): fs.mha_fwd(*a),
            "bwd": lambda a=(dout, q, k, v, out, lse): fs.mha_bwd(*a),
        }[op]
    shares = {1: 0.6, 17: 0.85, 33: 0.95}

    def enough(spent):
        return all(spent[n] < share * spent[64] for n, share in shares.items())

    spent = least_times(calls, enough)
    assert enough(spent), spent


@pytest.mark.parametrize("kind", [bool, np.float32], ids=["bool", "float32"])
@pytest.mark.parametrize("queries", [1, 512])
def test_a_bias_costs_little(kind, queries):
    """It is read a vector at a time."""
    q, k, v, _ = qkv((queries, 4096 // min(queries, 8)), 4, 64, batch=1)
    bias = (np.random.default_rng(0).random((1, 1, queries, k.shape[1])) < 0.7).astype(kind)
    calls = {
        "without": lambda: fs.mha_fwd(q, k, v),
        "with": lambda: fs.mha_fwd(q, k, v, bias=bias),
    }

    def enough(spent):
        return spent["with"] < 1.7 * spent["without"]

    spent = least_times(calls, enough)
    assert enough(spent), spent
