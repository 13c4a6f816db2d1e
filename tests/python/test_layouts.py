"""Layouts against the papers' definitions, block by block, in plain loops."""

import math
import sys
from types import ModuleType

import numpy as np
import pytest
from flashsdk import layouts
from flashsdk._errors import Error
from flashsdk.masks import Band, BlockMask, Causal, SlidingWindow

N = 16  # key blocks of most tests here
B = 16  # tokens in a block


def blocks_of(mask):
    """bool (num_heads, rows, cols): visited."""
    return mask.to_dense(block_level=True)[0]


def by_loop(visited, n=N):
    """bool (n, n): visited(r, c)."""
    return np.array([[bool(visited(r, c)) for c in range(n)] for r in range(n)])


# One of each, as a function of lengths and block size.
ALL = {
    "dense": layouts.dense,
    "causal": layouts.causal,
    "sliding_window": lambda *a: layouts.sliding_window(*a, left=40, right=9),
    "strided": lambda *a: layouts.strided(*a, stride_blocks=4),
    "fixed": lambda *a: layouts.fixed(*a, stride_blocks=4),
    "butterfly": lambda *a: layouts.butterfly(*a, global_blocks=1),
    "longformer": lambda *a: layouts.longformer(*a, left=40, right=40),
    "longformer causal": lambda *a: layouts.longformer(*a, left=40, right=0),
    "bigbird": lambda *a: layouts.bigbird(*a, num_heads=2),
    "random": lambda *a: layouts.random(*a, density=0.3, num_heads=2),
}


# ---- what holds for all of them


@pytest.mark.parametrize("size", [16, (16, 48), (64, 16)])
@pytest.mark.parametrize("lengths", [(256, 256), (100, 250), (250, 100), (1, 77), (77, 1)])
@pytest.mark.parametrize("name", ALL)
def test_any_lengths_and_block_sizes(name, lengths, size):
    mask = ALL[name](*lengths, size)
    block_q, block_k = (size, size) if isinstance(size, int) else size
    assert (mask.seqlen_q, mask.seqlen_k) == lengths
    assert mask.block_size == (block_q, block_k)
    assert blocks_of(mask).shape[1:] == (-(-lengths[0] // block_q), -(-lengths[1] // block_k))
    assert mask.to_dense().shape[2:] == lengths
    assert mask == ALL[name](*lengths, size), "the same arguments give the same layout"


@pytest.mark.parametrize("name", ALL)
def test_every_query_that_may_sees_a_key(name):
    seen = ALL[name](200, 300, 32).to_dense().any(axis=3)
    assert seen.all()


@pytest.mark.parametrize("name", [name for name in ALL if name != "random"])
def test_last_queries_have_the_last_rows(name):
    whole, last = ALL[name](256, 256, 16), ALL[name](96, 256, 16)
    assert np.array_equal(last.to_dense(), whole.to_dense()[:, :, -96:])


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("random", "bigbird")])
def test_wide_query_blocks_follow_all_their_keys(name):
    narrow, wide = (blocks_of(ALL[name](256, 256, (q, 16))) for q in (16, 64))
    assert np.array_equal(wide, narrow.reshape(-1, 4, 4, 16).any(axis=2))


def test_alignment_comes_from_the_band():
    whole = layouts.strided(256, 256, 16, stride_blocks=4, band=Causal("top_left"))
    first = layouts.strided(96, 256, 16, stride_blocks=4, band=Causal("top_left"))
    assert np.array_equal(first.to_dense(), whole.to_dense()[:, :, :96])


# ---- dense, causal, sliding_window: the bands themselves


@pytest.mark.parametrize("lengths", [(64, 64), (100, 37), (37, 100)])
def test_bands_as_blocks(lengths):
    made = {
        Band(): layouts.dense(*lengths, (32, 16)),
        Causal(): layouts.causal(*lengths, (32, 16)),
        Causal("top_left"): layouts.causal(*lengths, (32, 16), alignment="top_left"),
        SlidingWindow(20, 3): layouts.sliding_window(*lengths, (32, 16), left=20, right=3),
        SlidingWindow(None, -4, "top_left"): layouts.sliding_window(
            *lengths, (32, 16), left=None, right=-4, alignment="top_left"
        ),
    }
    for band, mask in made.items():
        assert np.array_equal(mask.to_dense()[0, 0], band.to_dense(*lengths))


def test_densities():
    assert layouts.dense(1024, 4096).density == 1
    assert layouts.causal(1024, 1024).density == (8 * 9 / 2) / 64
    assert layouts.causal(1024, 4096).density == (24 * 8 + 8 * 9 / 2) / 256
    assert layouts.sliding_window(1024, 1024, left=128, right=0).density == (8 + 7) / 64


# ---- Sparse Transformers


@pytest.mark.parametrize("stride", [1, 3, 4, 40])
def test_strided(stride):
    want = by_loop(lambda r, c: c <= r and (r - c < stride or (r - c) % stride == 0))
    mask = layouts.strided(N * B, N * B, B, stride_blocks=stride)
    assert np.array_equal(blocks_of(mask)[0], want)
    assert mask.band == Causal()
    both = layouts.strided(N * B, N * B, B, stride_blocks=stride, band=None)
    assert np.array_equal(blocks_of(both)[0], want | want.T)


@pytest.mark.parametrize(("stride", "summary"), [(1, 1), (4, 1), (4, 4), (5, 2), (40, 3)])
def test_fixed(stride, summary):
    def visited(r, c):
        return r // stride == c // stride or c % stride in range(stride - summary, stride)

    mask = layouts.fixed(N * B, N * B, B, stride_blocks=stride, summary_blocks=summary)
    assert np.array_equal(blocks_of(mask)[0], by_loop(lambda r, c: c <= r and visited(r, c)))
    both = layouts.fixed(N * B, N * B, B, stride_blocks=stride, summary_blocks=summary, band=None)
    assert np.array_equal(blocks_of(both)[0], by_loop(visited))


# ---- Pixelated Butterfly


@pytest.mark.parametrize("stride", [1, 2, 8, 16, None])
def test_butterfly_is_the_union_of_its_factors(stride):
    def factor(s):  # block-diagonal, s x s, four diagonals half a block apart
        return by_loop(lambda r, c: r // s == c // s and abs(r - c) in (0, s // 2))

    want = np.eye(N, dtype=bool)
    for s in (2, 4, 8, 16):
        if s <= (stride or N):
            want |= factor(s)
    mask = layouts.butterfly(N * B, N * B, B, max_stride_blocks=stride)
    assert np.array_equal(blocks_of(mask)[0], want)
    assert (want.sum(axis=1) == 1 + math.log2(stride or N)).all()
    assert mask.band is None

    want[:2] = want[:, :2] = True
    mask = layouts.butterfly(N * B, N * B, B, max_stride_blocks=stride, global_blocks=2)
    assert np.array_equal(blocks_of(mask)[0], want)


def test_butterfly_factors_reach_every_block():
    blocks = blocks_of(layouts.butterfly(N * B, N * B, B))[0].astype(int)
    assert (np.linalg.matrix_power(blocks, int(math.log2(N))) > 0).all()


# ---- Longformer


def test_longformer_window_is_exact():
    n = N * B
    mask = layouts.longformer(n, n, B, left=40, right=23, global_blocks=2)
    i, j = np.indices((n, n))
    assert np.array_equal(
        mask.to_dense()[0, 0], ((i - j <= 40) & (j - i <= 23)) | (i < 2 * B) | (j < 2 * B)
    )


def test_longformer_autoregressive():
    n = N * B
    mask = layouts.longformer(n, n, B, left=40, right=0)
    i, j = np.indices((n, n))
    want = (j <= i) & ((i - j <= 40) | (j < B))
    assert np.array_equal(mask.to_dense()[0, 0], want)
    ahead = layouts.longformer(n, n, B, left=4, right=-2, global_blocks=3).to_dense()[0, 0]
    assert not ahead[j > i - 2].any()
    without_window = layouts.longformer(n, n, B, left=0, right=-1).to_dense()[0, 0]
    assert without_window.any() and not without_window[j > i - 1].any()


def test_longformer_without_global_blocks_is_a_window():
    assert layouts.longformer(
        300, 200, left=70, right=5, global_blocks=0
    ) == layouts.sliding_window(300, 200, left=70, right=5)


# ---- BigBird


@pytest.mark.parametrize("band", [None, Causal()])
def test_bigbird(band):
    n, heads = 32, 6
    mask = layouts.bigbird(n * B, n * B, B, num_heads=heads, band=band)
    blocks = blocks_of(mask)
    chosen = by_loop(lambda r, c: abs(r - c) <= 1 or r < 2 or c < 2, n)
    shown = by_loop(lambda r, c: band is None or c <= r, n)
    assert blocks.shape == (heads, n, n)
    assert blocks[:, chosen & shown].all() and not blocks[:, ~shown].any()
    extra = (blocks & ~chosen).sum(axis=2)
    assert (extra == np.minimum(3, (shown & ~chosen).sum(axis=1))).all()
    assert len({head.tobytes() for head in blocks}) == heads


def test_bigbird_seed_and_defaults():
    def make(**kw):
        return layouts.bigbird(1024, 1024, B, **kw)

    assert make() == make(seed=0) != make(seed=1)
    one, two = make(num_heads=1), make(num_heads=2)
    assert np.array_equal(blocks_of(one)[0], blocks_of(two)[0])
    assert make(random_blocks=0, num_heads=4).num_heads == 1
    assert make(random_blocks=100).density == 1
    band = make(random_blocks=0, global_blocks=0, window_blocks=5)
    assert np.array_equal(blocks_of(band)[0], by_loop(lambda r, c: abs(r - c) <= 2, 64))


# ---- random


@pytest.mark.parametrize("density", [0, 0.1, 0.37, 1])
@pytest.mark.parametrize("band", [None, Causal()])
def test_random_density(density, band):
    n = 32
    mask = layouts.random(n * B, n * B, B, density=density, num_heads=3, band=band)
    shown = n * n if band is None else n * (n + 1) // 2
    for head in blocks_of(mask):
        assert head.sum() == max(round(density * shown), n)
        assert head.diagonal().all()
    assert mask == layouts.random(n * B, n * B, B, density=density, num_heads=3, band=band)
    if density in (0.1, 0.37):
        assert len({head.tobytes() for head in blocks_of(mask)}) == 3
        assert mask != layouts.random(
            n * B, n * B, B, density=density, num_heads=3, band=band, seed=5
        )


# ---- stack_heads


def test_stack_heads_keeps_each_head():
    n = N * B
    parts = [
        layouts.causal(n, n, B),
        layouts.strided(n, n, B, stride_blocks=4),
        layouts.bigbird(n, n, B, num_heads=3),
        layouts.dense(n, n, B),
    ]
    mask = layouts.stack_heads(parts)
    assert mask.num_heads == 6 and mask.batch == 1
    assert mask.band == Causal()
    assert np.array_equal(mask.to_dense(), np.concatenate([p.to_dense() for p in parts], axis=1))
    assert mask.density == pytest.approx(
        np.average([p.density for p in parts], weights=[1, 1, 3, 1])
    )
    assert layouts.stack_heads([mask]) == mask


def test_stack_heads_takes_what_can_be_gone_through():
    masks = [layouts.causal(40, 40, 16), layouts.dense(40, 40, 16)]
    assert layouts.stack_heads(mask for mask in masks) == layouts.stack_heads(masks)


def test_density_may_be_numpys():
    assert layouts.random(80, 80, 16, density=np.float32(0.5)) == layouts.random(
        80, 80, 16, density=0.5
    )


def test_while_another_thread_imports_the_compiler(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    assert layouts.dense(64, 64, 16).density == 1


def test_stack_heads_of_a_generator():
    """What goes wrong in it is said as it is, and not that there are no masks."""
    two = layouts.stack_heads(layouts.dense(64, 64, 16) for _ in range(2))
    assert two.num_heads == 2
    with pytest.raises(Error, match=r"^block_size: 'a'; "):
        layouts.stack_heads(layouts.dense(64, 64, size) for size in (16, "a"))


@pytest.mark.parametrize("name", ALL)
def test_lengths_may_be_tensors(name):
    """As the longest of a batch is, where its lengths are one."""
    torch = pytest.importorskip("torch")
    of = ALL[name](100, 250, 16)
    assert ALL[name](torch.tensor(100), np.uint16(250), torch.tensor(16)) == of
    for n in (of.seqlen_q, of.seqlen_k, *of.block_size):
        assert type(n) is int


def test_other_numbers_may_be_tensors():
    n = pytest.importorskip("torch").tensor
    for layout, numbers in (
        (layouts.strided, {"stride_blocks": 4}),
        (layouts.fixed, {"stride_blocks": 4, "summary_blocks": 2}),
        (layouts.butterfly, {"max_stride_blocks": 4, "global_blocks": 1}),
        (layouts.longformer, {"left": 40, "right": 0, "global_blocks": 2}),
        (
            layouts.bigbird,
            {"window_blocks": 5, "global_blocks": 1, "random_blocks": 2, "num_heads": 2, "seed": 3},
        ),
        (layouts.random, {"density": 0.25, "num_heads": 2, "seed": 3}),
    ):
        as_tensors = {name: n(number) for name, number in numbers.items()}
        assert layout(100, 250, 16, **as_tensors) == layout(100, 250, 16, **numbers), layout


def test_stack_heads_shares_the_batch():
    many = BlockMask.from_dense(np.random.default_rng(0).random((3, 2, 4, 4)) < 0.5, B)
    mask = layouts.stack_heads([layouts.dense(64, 64, B), many])
    assert (mask.batch, mask.num_heads) == (3, 3)
    assert mask.to_dense()[:, 0].all()
    assert np.array_equal(mask.to_dense()[:, 1:], many.to_dense())


# ---- from_matrix


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("lengths", [(128, 128), (70, 133)])
def test_from_matrix_gives_the_elements_back(name, lengths):
    mask = ALL[name](*lengths, (16, 32))
    again = layouts.from_matrix(mask.to_dense(), (16, 32), band=mask.band)
    assert again == mask


def test_from_matrix_keeps_full_blocks_across_the_band():
    matrix = np.tri(64, dtype=bool)
    matrix[:16, :32] = True
    mask = layouts.from_matrix(matrix, 16, band=Causal())
    assert np.array_equal(mask.to_dense()[0, 0], matrix)
    assert mask.row_full.indices[:2].tolist() == [0, 1]


def test_from_matrix_names_the_first_mixed_block():
    matrix = np.zeros((2, 40, 48), bool)
    matrix[1, 32, 33] = True
    with pytest.raises(
        Error, match=r"^matrix: block \(2, 2\) of batch 0, head 1 is mixed; one value"
    ):
        layouts.from_matrix(matrix, 16)
    with pytest.raises(Error, match=r"is mixed; one value throughout, or that of Band\(left=None"):
        layouts.from_matrix(matrix, 16, band=Causal())


# ---- errors


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: layouts.dense(0, 5), "seqlen_q: 0; an integer >= 1"),
        (lambda: layouts.causal(5, 2.5), "seqlen_k: 2.5; an integer >= 1"),
        (lambda: layouts.dense(5, 5, 20), "block_size: 20; one or two positive multiples of 16"),
        (lambda: layouts.causal(5, 5, alignment="left"), "alignment: 'left'; "),
        (lambda: layouts.sliding_window(5, 5, left=1.5, right=0), "left: 1.5; None or an integer"),
        (lambda: layouts.strided(5, 5, stride_blocks=0), "stride_blocks: 0; an integer >= 1"),
        (lambda: layouts.strided(5, 5, stride_blocks=1, band=3), "band: 3; a Band, Causal(), S"),
        (lambda: layouts.fixed(5, 5, stride_blocks=2.0), "stride_blocks: 2.0; an integer >= 1"),
        (
            lambda: layouts.fixed(5, 5, stride_blocks=2, summary_blocks=3),
            "summary_blocks: 3; 1 to stride_blocks = 2",
        ),
        (
            lambda: layouts.butterfly(5, 5, max_stride_blocks=6),
            "max_stride_blocks: 6; a power of t",
        ),
        (lambda: layouts.butterfly(5, 5, global_blocks=-1), "global_blocks: -1; an integer >= 0"),
        (lambda: layouts.longformer(5, 5, left=None, right=0), "left: None; an integer"),
        (lambda: layouts.bigbird(5, 5, window_blocks=2), "window_blocks: 2; an odd number"),
        (lambda: layouts.bigbird(5, 5, random_blocks=-1), "random_blocks: -1; an integer >= 0"),
        (lambda: layouts.bigbird(5, 5, num_heads=0), "num_heads: 0; an integer >= 1"),
        (
            lambda: layouts.bigbird(5, 5, band=Causal),
            "band: flashsdk.masks.Causal; a Band",
        ),
        (lambda: layouts.random(5, 5, density=1.5), "density: 1.5; a number from 0 to 1"),
        (lambda: layouts.random(5, 5, density=math.nan), "density: nan; a number from 0 to 1"),
        (lambda: layouts.random(5, 5, density=0.5, seed=-1), "seed: -1; an integer >= 0"),
        (lambda: layouts.stack_heads([]), "masks: []; one or more BlockMasks"),
        (
            lambda: layouts.stack_heads([Causal()]),
            "masks: (Band(left=None, right=0, alignment='bottom_right'),); one or more BlockMasks",
        ),
        (lambda: layouts.stack_heads(5), "masks: 5; one or more BlockMasks"),
        (lambda: layouts.stack_heads(m for m in ()), "masks: <generator object"),
        (lambda: layouts.random(5, 5, density="0.5"), "density: '0.5'; a number from 0 to 1"),
        (lambda: layouts.random(5, 5, density=np.ones((9, 9))), "density: array([[1., 1., 1., "),
        (lambda: layouts.from_matrix([[True], [True, False]]), "matrix: [[True], [True, False]]; "),
        (
            lambda: layouts.stack_heads([layouts.dense(5, 5), layouts.dense(5, 6)]),
            "masks: seqlen_k [5, 6]; one seqlen_k for all",
        ),
        (
            lambda: layouts.stack_heads(
                [layouts.causal(5, 5), layouts.sliding_window(5, 5, left=1, right=1)]
            ),
            "masks: 2 bands, [",
        ),
        (
            lambda: layouts.stack_heads(
                [BlockMask.from_dense(np.ones((b, 1, 1, 1), bool), 16) for b in (2, 3)]
            ),
            "masks: batch [2, 3]; one batch for all, or 1",
        ),
        (lambda: layouts.from_matrix(np.ones((4, 4))), "matrix: dtype float64; bool"),
        (lambda: layouts.from_matrix(np.tri(32, dtype=bool), 16, band=3), "band: 3; a Band"),
        (lambda: layouts.from_matrix(np.ones((32, 32), bool), 16, band=3), "band: 3; a Band"),
        (
            lambda: layouts.from_matrix(np.ma.array(np.eye(2) > 0, mask=np.eye(2))),
            "matrix: a masked",
        ),
        (lambda: layouts.stack_heads(np.array(1.0)), "masks: array(1.); one or more BlockMasks"),
        # numbers that NumPy, or the library, has no room for
        (lambda: layouts.dense(2**64, 5), "seqlen_q: 18446744073709551616; an integer >= 1, at m"),
        (lambda: layouts.strided(5, 2**30 + 1, stride_blocks=1), "seqlen_k: 1073741825; an int"),
        (lambda: layouts.bigbird(5, 10**99), "seqlen_k: 1000"),
        (lambda: layouts.causal(5, 5, 2**24 + 16), "block_size: 16777232; one or two positive mul"),
        (lambda: layouts.strided(5, 5, 2**63, stride_blocks=1), "block_size: 9223372036854775808"),
        (lambda: layouts.strided(5, 5, stride_blocks=2**63), "stride_blocks: 9223372036854775808"),
        (lambda: layouts.fixed(5, 5, stride_blocks=2**63), "stride_blocks: 9223372036854775808; "),
        (
            lambda: layouts.fixed(5, 5, stride_blocks=2, summary_blocks=10**400),
            f"summary_blocks: 1{'0' * 78}…; 1 to stride_blocks = 2",
        ),
        (
            lambda: layouts.butterfly(5, 5, max_stride_blocks=10**400),
            f"max_stride_blocks: 1{'0' * 78}…; a power of two or None",
        ),
        (lambda: layouts.bigbird(5, 5, num_heads=2**64), "num_heads: 18446744073709551616; an in"),
    ],
)
def test_bad_input_is_one_line(call, line):
    with pytest.raises(Error) as caught:
        call()
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
