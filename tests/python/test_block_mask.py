"""Block-sparse attention over layouts of every kind."""

from types import SimpleNamespace

import flashsdk as fs
import numpy as np
import pytest
from cases import packed, problem, qkv
from flashsdk._testing import reference
from flashsdk._testing.problems import BandSpec, Blocks

CAUSAL = BandSpec(None, 0, "bottom_right")


def blocks(shape, density=0.5, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < density


def only_full(listed, block_size) -> Blocks:
    return Blocks(np.zeros_like(listed), listed, block_size)


SIZES = [(16, 16), (32, 16), (16, 64), (48, 80), (64, 64), (128, 128), (256, 32), (112, 176)]


@pytest.mark.parametrize("block_size", SIZES, ids=str)
def test_block_sizes(runner, block_size):
    seqlen = (250, 330)
    rows, cols = (-(-n // size) for n, size in zip(seqlen, block_size, strict=True))
    listed = blocks((1, 1, rows, cols))
    for dtype in runner.dtypes:
        runner.check(problem(seqlen, 1, 32, dtype=dtype, mask=only_full(listed, block_size)))
    mask = Blocks(listed, np.zeros_like(listed), block_size, CAUSAL)
    runner.check(problem(seqlen, 1, 32, dtype=runner.dtypes[0], mask=mask))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [1, 4])
def test_layouts_per_batch_and_head(runner, batch, heads):
    """Also with heads in groups: the layout belongs to the query head."""
    listed, full = blocks((batch, heads, 4, 5)), blocks((batch, heads, 4, 5), 0.3, seed=1)
    mask = Blocks(listed & ~full, full, (16, 16), BandSpec(20, 7, "top_left"))
    dtype = runner.dtypes[(batch + heads) % len(runner.dtypes)]
    runner.check(problem((60, 75), (4, 2), 24, batch=3, dtype=dtype, mask=mask))


@pytest.mark.parametrize(
    "band", [CAUSAL, BandSpec(40, -2, "bottom_right"), BandSpec(9, 9, "top_left")]
)
@pytest.mark.parametrize("seqlen", [(128, 128), (100, 130), (130, 100)])
def test_band_inside_blocks(runner, seqlen, band):
    listed = blocks((1, 2, -(-seqlen[0] // 32), -(-seqlen[1] // 16)), 0.7)
    mask = Blocks(listed, np.zeros_like(listed), (32, 16), band)
    for dtype in runner.dtypes:
        runner.check(problem(seqlen, 2, 16, dtype=dtype, mask=mask))


@pytest.mark.parametrize("density", [0.0, 0.03, 1.0])
def test_rows_and_columns_without_blocks(runner, density):
    mask = only_full(blocks((1, 2, 8, 9), density), (16, 16))
    for dtype in runner.dtypes:
        runner.check(problem((125, 130), 2, 16, dtype=dtype, mask=mask))


@pytest.mark.parametrize("with_band", [False, True])
def test_packed(runner, with_band):
    """The layout starts at each sequence's first row; shorter sequences use a part of it."""
    lengths = ((70, 90), (0, 20), (33, 0), (5, 65))
    partial, full = blocks((4, 2, 5, 6)), blocks((4, 2, 5, 6), 0.3, seed=1)
    mask = Blocks(partial & ~full, full, (16, 16), BandSpec(25, 3, "top_left"))
    if not with_band:
        mask = only_full(partial, (16, 16))
    for dtype in runner.dtypes:
        runner.check(packed(lengths, 2, 24, dtype=dtype, mask=mask))


def test_packed_with_the_diagonal_of_each_sequence(runner):
    """Partial blocks follow the band of the sequence they are applied to, full ones no band."""
    listed = blocks((1, 2, 5, 6), 0.8)
    mask = fs.BlockMask.from_dense(listed, 16, seqlen_q=70, seqlen_k=90, band=fs.Causal())
    runner.check(packed(((70, 90), (50, 90), (60, 31)), 2, 24, dtype=runner.dtypes[0], mask=mask))


def test_from_flex():
    """Partial and full lists in FlexAttention's form, a full block outside of the band included."""
    partial = np.tril(np.ones((4, 4), bool))[None, None]
    full = np.zeros_like(partial)
    full[..., 0, 3] = True
    flex = SimpleNamespace(BLOCK_SIZE=(32, 32), seq_lengths=(120, 128))
    for prefix, listed in (("", partial), ("full_", full)):
        indices = np.argsort(~listed, axis=-1, kind="stable")  # those listed come first
        setattr(flex, f"{prefix}kv_num_blocks", listed.sum(-1).astype(np.int32))
        setattr(flex, f"{prefix}kv_indices", indices.astype(np.int32))
    mask = fs.BlockMask.from_flex(flex, band=fs.Causal("top_left"))
    q, k, v, _ = qkv((120, 128), 2, 16)
    visible = np.arange(128) <= np.arange(120)[:, None]
    visible[:32, 96:] = True
    exact = reference.forward(q, k, v, mask=visible[None, None])
    for got, want in zip(fs.mha_fwd(q, k, v, mask=mask), exact, strict=True):
        assert np.abs(got - want).max() < 1e-5


def test_from_csr_in_any_order():
    listed = blocks((2, 4, 5))
    columns = [np.flatnonzero(row)[::-1] for head in listed for row in head]
    offsets = np.concatenate([[0], np.cumsum([len(c) for c in columns])])
    offsets = np.stack([offsets[:5], offsets[4:]])
    mask = fs.BlockMask.from_csr(
        offsets, np.concatenate(columns), (16, 16), seqlen_k=75, seqlen_q=60
    )
    q, k, v, _ = qkv((60, 75), 2, 16)
    visible = np.repeat(np.repeat(listed, 16, 1), 16, 2)[None, :, :60, :75]
    for a, b in zip(
        fs.mha_fwd(q, k, v, mask=mask), reference.forward(q, k, v, mask=visible), strict=True
    ):
        assert np.array_equal(np.isneginf(a), np.isneginf(b))
        assert np.abs(np.where(np.isneginf(a), 0, a) - np.where(np.isneginf(b), 0, b)).max() < 1e-5


LAYOUTS = {
    "causal": lambda n, m: fs.layouts.causal(n, m, 32),
    "sliding_window": lambda n, m: fs.layouts.sliding_window(n, m, 32, left=50, right=9),
    "strided": lambda n, m: fs.layouts.strided(n, m, 16, stride_blocks=3),
    "fixed": lambda n, m: fs.layouts.fixed(n, m, 16, stride_blocks=3),
    "butterfly": lambda n, m: fs.layouts.butterfly(n, m, 16),
    "bigbird": lambda n, m: fs.layouts.bigbird(n, m, 16),
    "longformer": lambda n, m: fs.layouts.longformer(n, m, 16, left=30, right=20),
    "dense": lambda n, m: fs.layouts.dense(n, m, 48),
    "random": lambda n, m: fs.layouts.random(n, m, 16, density=0.3, seed=3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(runner, name):
    """A layout computes what its own dense matrix says, and what its lists say."""
    mask = LAYOUTS[name](128, 128)
    lists = reference.Features(mask=mask).mask
    dense = mask.to_dense()
    rows = [reference.visible_keys(lists, 0, 0, i, 128, 128) for i in range(128)]
    assert np.array_equal(np.broadcast_to(dense, (1, dense.shape[1], 128, 128))[0, 0], rows)
    assert dense.any(axis=-1).all()  # no query is left alone
    heads = dense.shape[1] if dense.shape[1] > 1 else 2
    for dtype in runner.dtypes:
        runner.check(problem(128, heads, 16, dtype=dtype, mask=mask))


def test_heads_with_layouts_of_their_own(runner):
    mask = fs.layouts.stack_heads(
        [LAYOUTS[name](128, 128) for name in ("strided", "bigbird", "random")]
    )
    runner.check(problem(128, (3, 1), 16, dtype=runner.dtypes[0], mask=mask))


def test_skipped_blocks_are_not_read():
    """NaN in keys and values that no listed block holds changes nothing."""
    listed = np.ones((4, 5), bool)
    listed[:, 2] = False
    mask = fs.BlockMask.from_dense(listed, 16)
    q, k, v, dout = qkv((64, 80), 2, 16)
    clean = fs.mha_fwd(q, k, v, mask=mask)
    clean += fs.mha_bwd(dout, q, k, v, *clean, mask=mask)
    k[:, 32:48] = v[:, 32:48] = np.nan
    dirty = fs.mha_fwd(q, k, v, mask=mask)
    dirty += fs.mha_bwd(dout, q, k, v, *dirty, mask=mask)
    for a, b in zip(clean, dirty, strict=True):
        assert np.array_equal(a, b)
