"""Block masks: their lists and matrices against plain loops."""

import copy
import dataclasses
import pickle
import tracemalloc

import flashsdk as fs
import numpy as np
import pytest
from flashsdk._errors import Error
from flashsdk.masks import Band, BlockMask, Causal, Csr, SlidingWindow
from mask_cases import BANDS, elements, pairs


def transposed(blocks):
    return sorted((b, h, col, row) for b, h, row, col in blocks)


def random_mask(seed):
    """A layout with odd sizes, its visited and always-full blocks, and its band."""
    rng = np.random.default_rng(seed)
    size = tuple(int(n) for n in rng.choice([16, 32, 48], 2))
    seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, 130, 2))
    shape = (
        rng.integers(1, 3),
        rng.integers(1, 3),
        -(-seqlen_q // size[0]),
        -(-seqlen_k // size[1]),
    )
    blocks = rng.random(shape) < rng.choice([0.0, 0.3, 0.7, 1.0])
    full = rng.random(shape) < rng.choice([0.0, 0.2])
    band = None if seed % 7 == 0 else BANDS[seed % len(BANDS)]
    mask = BlockMask.from_dense(
        blocks, size, seqlen_q=seqlen_q, seqlen_k=seqlen_k, band=band, full=full
    )
    return mask, blocks, full, band


@pytest.mark.parametrize("seed", range(77))
def test_lists_and_matrix_agree_with_loops(seed):
    mask, blocks, always, band = random_mask(seed)
    (block_q, block_k), seqlen_q, seqlen_k = mask.block_size, mask.seqlen_q, mask.seqlen_k
    visible = elements(band or Band(), seqlen_q, seqlen_k)

    want = np.zeros((*blocks.shape[:2], seqlen_q, seqlen_k), bool)
    full, partial = [], []
    for b, h, r, c in np.ndindex(blocks.shape):
        at = (slice(r * block_q, (r + 1) * block_q), slice(c * block_k, (c + 1) * block_k))
        if always[b, h, r, c] or (blocks[b, h, r, c] and visible[at].all()):
            full.append((b, h, r, c))
            want[b, h][at] = True
        elif blocks[b, h, r, c] and visible[at].any():
            partial.append((b, h, r, c))
            want[b, h][at] = visible[at]

    assert pairs(mask.row_full) == full
    assert pairs(mask.row_partial) == partial
    assert pairs(mask.col_full) == transposed(full)
    assert pairs(mask.col_partial) == transposed(partial)
    assert mask.band == (band if partial else None)
    assert mask.density == pytest.approx((len(full) + len(partial)) / blocks.size)
    assert np.array_equal(mask.to_dense(), want)
    visited = mask.to_dense(block_level=True)
    assert visited.shape == blocks.shape
    assert list(zip(*(i.tolist() for i in np.nonzero(visited)), strict=True)) == sorted(
        full + partial
    )


@pytest.mark.parametrize("seed", range(0, 77, 5))
def test_csr_round_trip(seed):
    mask, blocks, _, band = random_mask(seed)
    lengths = {"seqlen_q": mask.seqlen_q, "seqlen_k": mask.seqlen_k}
    plain = BlockMask.from_dense(blocks, mask.block_size, **lengths)
    offsets, indices = plain.row_full
    again = BlockMask.from_csr(offsets, indices, mask.block_size, **lengths, band=band)
    assert again == BlockMask.from_dense(blocks, mask.block_size, **lengths, band=band)


def test_csr_by_hand():
    mask = BlockMask.from_csr([0, 2, 2, 3], [2, 0, 1], (16, 32), seqlen_k=96)
    assert (mask.seqlen_q, mask.seqlen_k) == (48, 96)
    assert mask.row_full.offsets.tolist() == [[[0, 2, 2, 3]]]
    assert mask.row_full.indices.tolist() == [0, 2, 1]
    assert mask.col_full.offsets.tolist() == [[[0, 1, 2, 3]]]
    assert mask.col_full.indices.tolist() == [0, 2, 0]
    assert mask.density == 3 / 9
    heads = BlockMask.from_csr([[0, 1, 1], [1, 1, 3]], [0, 0, 1], 16, seqlen_k=32)
    assert (heads.batch, heads.num_heads) == (1, 2)
    assert heads.row_full.offsets.tolist() == [[[0, 1, 1], [1, 1, 3]]]
    empty = BlockMask.from_csr([0, 0], [], 16, seqlen_k=32)
    assert empty.density == 0 and not empty.to_dense().any()


def test_shapes_share_layouts():
    blocks = np.ones((3, 2), bool)
    assert (BlockMask.from_dense(blocks, 16).batch, BlockMask.from_dense(blocks, 16).num_heads) == (
        1,
        1,
    )
    many = BlockMask.from_dense(np.ones((4, 5, 3, 2), bool), (32, 16))
    assert (many.batch, many.num_heads, many.seqlen_q, many.seqlen_k) == (4, 5, 96, 32)
    shared = BlockMask.from_dense(np.zeros((5, 3, 2), bool), 16, full=np.ones((4, 1, 3, 2), bool))
    assert (shared.batch, shared.num_heads, shared.density) == (4, 5, 1)


def test_prefix_under_a_causal_band():
    full = np.zeros((4, 4), bool)
    full[:, :2] = True
    mask = BlockMask.from_dense(np.ones((4, 4), bool), 16, band=Causal(), full=full)
    i, j = np.indices((64, 64))
    assert np.array_equal(mask.to_dense()[0, 0], (j <= i) | (j < 32))


def test_arrays_are_ready_for_the_bindings():
    mask, *_ = random_mask(3)
    arrays = mask._arrays
    assert arrays is mask._arrays
    lists = (mask.row_partial, mask.row_full, mask.col_partial, mask.col_full)
    assert all(a is b for a, b in zip(arrays, (a for pair in lists for a in pair), strict=True))
    for array in arrays:
        assert array.dtype == np.int32 and array.flags.c_contiguous and array.flags.aligned
        assert not array.flags.writeable


def test_masks_cannot_be_changed():
    mask, blocks, *_ = random_mask(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.seqlen_q = 3
    with pytest.raises(ValueError, match="read-only"):
        mask.row_full.offsets[...] = 0
    before = mask.to_dense()
    blocks[...] = ~blocks
    assert np.array_equal(mask.to_dense(), before)


def test_csr_arrays_given_stay_the_callers():
    offsets, indices = np.array([0, 1], np.int32), np.array([0], np.int32)
    BlockMask.from_csr(offsets, indices, 16, seqlen_k=16)
    offsets[0] = indices[0] = 5  # still writable


def test_equality_and_hash():
    make = lambda **kw: BlockMask.from_dense(np.ones((2, 2), bool), 16, **kw)  # noqa: E731
    mask = make(band=Causal())
    assert mask == make(band=Causal()) and hash(mask) == hash(make(band=Causal()))
    assert len({mask, make(band=Causal()), make(), make(seqlen_k=30)}) == 3
    assert mask != make() != make(seqlen_k=30)
    assert mask != make(band=SlidingWindow(25, 0))
    assert make() == make(band=Band()), "a band that hides nothing is none"
    assert mask != Causal() and mask != "mask"


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_are_equal_and_read_only(again):
    mask, *_ = random_mask(12)
    other = again(mask)
    assert other == mask and hash(other) == hash(mask)
    assert not any(array.flags.writeable for array in other._arrays)


def test_repr_is_one_line():
    text = repr(BlockMask.from_dense(np.eye(4, dtype=bool), (16, 32)))
    assert text == (
        "BlockMask(seqlen_q=64, seqlen_k=128, block_size=(16, 32), batch=1, num_heads=1, "
        "density=0.25, band=None)"
    )


def test_a_long_layout_never_makes_elements():
    blocks = np.ones((2, 512, 512), bool)
    tracemalloc.start()
    mask = BlockMask.from_dense(blocks, 128, band=Causal())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert mask.density == pytest.approx(0.5 + 0.5 / 512)
    assert peak < 40 << 20  # the elements would be 8 GiB


@pytest.mark.parametrize("lengths", [(100, 130), (130, 100), (96, 96), (1, 77)])
@pytest.mark.parametrize("band", [Causal(), Band(20, 3), Band(-5, 40, "top_left"), None])
def test_visible_share_of_blocks_is_that_of_the_elements(lengths, band):
    rng = np.random.default_rng(0)
    rows, cols = (-(-n // size) for n, size in zip(lengths, (32, 16)))
    blocks = rng.random((2, 3, rows, cols)) < 0.7
    q, k = lengths
    mask = BlockMask.from_dense(blocks, (32, 16), seqlen_q=q, seqlen_k=k, band=band, full=~blocks)
    assert mask.visible_share() == mask.visible_share(q, k) == pytest.approx(mask.to_dense().mean())
    with pytest.raises(Error, match=r"^seqlen_k: 7; "):
        mask.visible_share(q, 7)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"block_size": ("a", 16)}, "block_size: ('a', 16); one or two positive multiples of 16"),
        ({"block_size": (2**31, 16)}, "block_size: (2147483648, 16); one or two positive mult"),
        ({"seqlen_q": None}, "seqlen_q: None; an integer >= 1, at most 1073741824"),
        ({"seqlen_k": 2**70}, "seqlen_k: 1180591620717411303424; an integer >= 1, at most"),
        ({"band": 3}, "band: 3; a Band, Causal(), SlidingWindow() or None"),
        ({"row_full": Csr([[[0.0, 1.0]]], [0])}, "row_full: dtype float64; integers"),
        ({"row_full": Csr([[[0, 2**32]]], [0])}, "row_full: 0 to 4294967296; 0 to 2147483647"),
        ({"row_full": Csr([0, 1], [0])}, "row_full.offsets: shape (2,); (batch, num_heads, lines"),
        ({"col_full": Csr([[[0, 1]]], [[0]])}, "col_full.indices: shape (1, 1); (blocks,)"),
    ],
)
def test_the_constructor_refuses_what_is_no_field(fields, line):
    with pytest.raises(Error) as caught:
        dataclasses.replace(BlockMask.from_dense([[True]], 16), **fields)
    assert str(caught.value).startswith(line)


def test_the_lists_of_a_mask_are_read_once():
    mask = BlockMask.from_dense(np.tril(np.ones((4, 4), bool)), 16)
    q = np.ones((1, 64, 1, 8), np.float32)
    fs.mha_fwd(q, q, q, mask=mask)
    # Behind the mask's back, and in reach: a list that is read must ascend.
    mask._flat[np.flatnonzero(mask._flat == 1)] = 0
    for op in ("fwd", "bwd"):
        assert fs.explain(q, q, q, op=op, mask=mask).kernel
    with pytest.raises(Error, match=r"^mask\.row_full\.indices: 0 before 0; "):
        fs.explain(q, q, q, mask=copy.copy(mask))  # a mask of its own


def test_what_is_wrong_with_lists_is_said_by_each_call_that_reads_them():
    rows = Csr([[[0, 1, 2]]], [0, 1])
    none = Csr([[[0, 0, 0]]], [])
    mask = BlockMask((16, 16), 32, 32, None, none, rows, none, Csr([[[0, 1, 2]]], [1, 0]))
    q = np.ones((1, 32, 1, 8), np.float32)
    for _ in range(2):
        out, lse = fs.mha_fwd(q, q, q, mask=mask)  # which reads no columns
        with pytest.raises(Error, match=r"^mask\.col_full\.indices: no block 0 in column 0; "):
            fs.mha_bwd(q, q, q, q, out, lse, mask=mask)
