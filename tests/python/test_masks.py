"""Masks against their definitions, element by element, in plain loops."""

import copy
import dataclasses
import functools
import pickle
import re
import sys
import tracemalloc
from inspect import signature
from types import SimpleNamespace
from typing import get_args

import flashsdk as fs
import numpy as np
import pytest
from flashsdk._errors import Error
from flashsdk.masks import Band, BlockMask, Causal, Csr, Dense, SlidingWindow

BANDS = [
    Band(),
    Causal(),
    Causal("top_left"),
    SlidingWindow(20, 0),
    SlidingWindow(37, 5, "top_left"),
    SlidingWindow(-3, 40),
    SlidingWindow(None, -18),
    SlidingWindow(60, -30),
    SlidingWindow(-7, 2, "top_left"),  # sees nothing
    SlidingWindow(0, 0),
    SlidingWindow(11, None, "top_left"),
]
LENGTHS = [(64, 64), (1, 1), (1, 90), (90, 1), (33, 97), (97, 33), (80, 79), (16, 128)]


def sees(band, i, j, seqlen_q, seqlen_k):
    at = i + (seqlen_k - seqlen_q if band.alignment == "bottom_right" else 0)
    after_left = band.left is None or j >= at - band.left
    return after_left and (band.right is None or j <= at + band.right)


@functools.cache
def elements(band, seqlen_q, seqlen_k):
    """bool (seqlen_q, seqlen_k), by the definition."""
    rows = [
        [sees(band, i, j, seqlen_q, seqlen_k) for j in range(seqlen_k)] for i in range(seqlen_q)
    ]
    return np.array(rows, bool).reshape(seqlen_q, seqlen_k)


def pairs(lists: Csr):
    """The (batch, head, line, other) of every listed block, in the order of the list."""
    offsets, indices = lists
    found = []
    for b, h, line in np.ndindex(*offsets.shape[:2], offsets.shape[2] - 1):
        others = indices[offsets[b, h, line] : offsets[b, h, line + 1]].tolist()
        assert others == sorted(set(others)), "ascending, each once"
        found += [(b, h, line, other) for other in others]
    assert len(found) == indices.size
    return found


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


# ---- Dense and Band


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_band_is_its_definition(band, lengths):
    want = elements(band, *lengths)
    assert np.array_equal(band.to_dense(*lengths), want)
    assert band.visible_share(*lengths) == pytest.approx(want.mean(), abs=1e-12)


@pytest.mark.parametrize("size", [(16, 16), (16, 48), (32, 16), (1, 1), (7, 3)])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_band_blocks_are_classified_exactly(band, lengths, size):
    visible = elements(band, *lengths)
    touched, inside = band.blocks(*lengths, size)
    assert touched.shape == tuple(-(-n // block) for n, block in zip(lengths, size, strict=True))
    for r, c in np.ndindex(touched.shape):
        block = visible[r * size[0] : (r + 1) * size[0], c * size[1] : (c + 1) * size[1]]
        assert touched[r, c] == block.any()
        assert inside[r, c] == block.all()


def test_dense_sees_all():
    assert Dense().to_dense(3, 5).all() and Dense().to_dense(3, 5).shape == (3, 5)
    assert Dense().visible_share(3, 5) == 1
    assert Dense() == Dense() and hash(Dense()) == hash(Dense())


def test_empty_sequences_have_empty_matrices():
    for mask in (Dense(), Causal()):
        assert mask.to_dense(0, 7).shape == (0, 7)
        assert mask.to_dense(7, 0).shape == (7, 0)
        assert mask.visible_share(0, 7) == mask.visible_share(7, 0) == 0


def test_causal_and_sliding_window_are_bands():
    assert Causal() == Band(None, 0) == SlidingWindow(None, 0)
    assert Causal("top_left") == Band(None, 0, "top_left") != Causal()
    assert hash(Causal()) == hash(Band(None, 0))
    assert Causal().to_dense(2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert Causal("top_left").to_dense(2, 4).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
    ]


def test_far_limits_are_kept_within_int32():
    assert Band(sys.maxsize, 10**30) == Band()
    assert not Band(-(10**30), None).to_dense(9, 9).any()
    assert not Band(None, -sys.maxsize).to_dense(9, 9).any()
    assert Band(-(10**30), None).left == -(2**31) + 1
    assert Band(np.int64(3), np.uint8(0)) == Band(3, 0)
    assert type(Band(np.int64(2**40), np.int64(-(2**40))).right) is int


def test_bands_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Causal().right = 3
    assert pickle.loads(pickle.dumps(Causal("top_left"))) == Causal("top_left")


# ---- BlockMask


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


# ---- FlexAttention


def flex_blocks(mask_mod, batch, heads, seqlen_q, seqlen_k, size):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    return flex.create_block_mask(
        mask_mod, batch, heads, seqlen_q, seqlen_k, device="cpu", BLOCK_SIZE=size
    )


@pytest.mark.parametrize("lengths", [(256, 256), (96, 224), (200, 70), (50, 100)])
@pytest.mark.parametrize("size", [(32, 32), (16, 64), (64, 32)])
@pytest.mark.parametrize(
    "band", [Band(), Causal("top_left"), SlidingWindow(40, 9, "top_left")], ids=str
)
def test_from_flex_is_the_same_mask(band, size, lengths):
    low = -(10**6) if band.left is None else -band.left
    high = 10**6 if band.right is None else band.right

    def mask_mod(b, h, q, k):
        return (k - q >= low) & (k - q <= high)

    theirs = flex_blocks(mask_mod, None, None, *lengths, size)
    mask = BlockMask.from_flex(theirs, band=band)
    assert (mask.seqlen_q, mask.seqlen_k) == lengths and mask.block_size == size
    assert np.array_equal(mask.to_dense()[0, 0], elements(band, *lengths))
    assert np.array_equal(mask.to_dense(block_level=True), theirs.to_dense().numpy() != 0)


def test_from_flex_per_batch_and_head():
    torch = pytest.importorskip("torch")
    blocks = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)) < 0.4

    def listed(b, h, q, k):
        return blocks[b, h, q // 16, k // 16]

    def listed_causal(b, h, q, k):
        return listed(b, h, q, k) & (q >= k)

    mask = BlockMask.from_flex(flex_blocks(listed, 2, 3, 128, 128, 16))
    assert mask == BlockMask.from_dense(blocks.numpy(), 16)
    theirs = flex_blocks(listed_causal, 2, 3, 128, 128, 16)
    mask = BlockMask.from_flex(theirs, band=Causal("top_left"))
    assert mask == BlockMask.from_dense(blocks.numpy(), 16, band=Causal("top_left"))
    assert BlockMask.from_flex(theirs) == mask
    theirs.mask_mod = None
    with pytest.raises(Error, match=r"^band: None; the Band that mask_mod stands for"):
        BlockMask.from_flex(theirs)


def documents(*lengths):
    """mask_mod and the element matrix of documents that lie behind one another."""
    torch = pytest.importorskip("torch")
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (lambda b, h, q, k: ids[q] == ids[k]), (ids[:, None] == ids).numpy()


@pytest.mark.parametrize(
    "band",
    [Band(), Causal("top_left"), Band(20, 5, "top_left"), Band(None, -3), Band(-4, None)],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(128, 128), (100, 70), (50, 90)])
def test_from_flex_finds_the_band(band, lengths):
    low, high = band._limits
    shift = band.shift(*lengths)

    def mask_mod(b, h, q, k):
        return (k - q - shift >= low) & (k - q - shift <= high)

    mask = BlockMask.from_flex(flex_blocks(mask_mod, None, None, *lengths, 16))
    assert np.array_equal(mask.to_dense()[0, 0], elements(band, *lengths))


def test_from_flex_asks_mask_mod():
    """What blocks and a band can say of documents is right, and what they cannot is refused."""
    mod, want = documents(32, 64, 32)
    mask = BlockMask.from_flex(flex_blocks(mod, None, None, 128, 128, 16))
    assert mask.band is None and np.array_equal(mask.to_dense()[0, 0], want)

    def causal(b, h, q, k):
        return mod(b, h, q, k) & (q >= k)

    mask = BlockMask.from_flex(flex_blocks(causal, None, None, 128, 128, 16))
    assert mask.band == Causal("top_left")
    assert np.array_equal(mask.to_dense()[0, 0], want & np.tri(128, dtype=bool))

    mod, want = documents(300, 724)
    theirs = flex_blocks(mod, None, None, 1024, 1024, 128)
    with pytest.raises(fs.Unsupported, match=r"^mask_mod: it hides query 0, key 300, which no b"):
        BlockMask.from_flex(theirs)
    with pytest.raises(fs.InvalidArgument, match=r"^band: Band\(.*; what mask_mod shows: it ") as e:
        BlockMask.from_flex(theirs, band=Causal())
    query, key = map(int, re.findall(r"query (\d+), key (\d+)", str(e.value))[0])
    assert want[query, key] != (key <= query) and ("shows" in str(e.value)) == want[query, key]


def test_from_flex_takes_a_wrong_band_for_no_excuse():
    def window(b, h, q, k):
        return (q - k <= 8) & (q >= k)

    theirs = flex_blocks(window, None, None, 64, 64, 16)
    with pytest.raises(Error, match=r"^band: .*it hides query 9, key 0$"):
        BlockMask.from_flex(theirs, band=Causal())
    assert BlockMask.from_flex(theirs, band=SlidingWindow(8)) == BlockMask.from_flex(
        theirs, band=SlidingWindow(8, 0)
    )


def test_from_flex_in_several_looks(monkeypatch):
    flex = pytest.importorskip("flashsdk._flex")
    mod, want = documents(16, 48, 32)
    theirs = flex_blocks(lambda b, h, q, k: mod(b, h, q, k) & (q >= k), 1, 1, 96, 96, 16)
    whole = BlockMask.from_flex(theirs)
    monkeypatch.setattr(flex, "ELEMENTS", 300)
    assert BlockMask.from_flex(theirs) == whole
    assert np.array_equal(whole.to_dense()[0, 0], want & np.tri(96, dtype=bool))


@pytest.mark.parametrize("axis", [0, 1])
def test_from_flex_of_a_layout_for_all_that_is_not_of_all(axis):
    torch = pytest.importorskip("torch")
    ends = torch.tensor([24, 40])
    what = ("batch", "head")[axis]
    theirs = flex_blocks(lambda b, h, q, k: k < ends[(b, h)[axis]], None, None, 64, 64, 16)
    with pytest.raises(fs.Unsupported, match=f"^mask_mod: another mask for each {what}; "):
        BlockMask.from_flex(theirs)
    alone = torch.tensor([32])  # of a batch of one there is no other
    theirs = flex_blocks(lambda b, h, q, k: k < alone[(b, h)[axis]], 1, 1, 64, 64, 16)
    assert BlockMask.from_flex(theirs).visible_share() == 0.5


def test_from_flex_of_a_mask_mod_that_cannot_be_asked():
    theirs = flex_blocks(lambda b, h, q, k: q >= k, None, None, 64, 64, 16)
    theirs.mask_mod = lambda b, h, q, k: q >= k if q > 3 else q < k
    with pytest.raises(fs.Unsupported, match=r"^mask_mod: .*; one that torch.vmap can ask$"):
        BlockMask.from_flex(theirs)


def test_from_flex_reads_fields_only():
    class Fields:
        BLOCK_SIZE = (16, 16)
        seq_lengths = (32, 48)
        kv_num_blocks = np.array([[[1, 0]]])
        kv_indices = np.array([[[[2, 7, 7], [7, 7, 7]]]])  # what is past the count is padding
        full_kv_num_blocks = None
        full_kv_indices = None

    mask = BlockMask.from_flex(Fields, band=Band())
    assert pairs(mask.row_full) == [(0, 0, 0, 2)]
    Fields.kv_num_blocks = np.array([[[2, 0]]])
    with pytest.raises(Error, match=r"^kv_indices: 2 to 7; 0 to 2$"):
        BlockMask.from_flex(Fields, band=Band())


def numbers(*shape, of=1):
    return np.full(shape, of)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"kv_num_blocks": numbers(1, 1, 2, of=3)}, "kv_num_blocks: 3 to 3; 0 to 2, the width of"),
        ({"kv_num_blocks": numbers(1, 1, 2, of=-1)}, "kv_num_blocks: -1 to -1; 0 to 2, the width"),
        ({"kv_num_blocks": numbers(1, 1, 2, of=2)}, "kv_indices: a block is listed twice; each b"),
        (
            {"kv_num_blocks": numbers(0, 1, 2), "kv_indices": numbers(0, 1, 2, 2)},
            "kv_num_blocks: shape (0, 1, 2); (batch, num_heads, rows), none of them 0",
        ),
        (
            {"full_kv_num_blocks": numbers(1, 1, 2), "full_kv_indices": numbers(1, 1, 2, 2)},
            "full_kv_indices: a block that kv_indices lists as well; each block once",
        ),
        (
            {"full_kv_num_blocks": numbers(1, 1, 3), "full_kv_indices": numbers(1, 1, 3, 2)},
            "full_kv_num_blocks: shape (1, 1, 3); that of kv_num_blocks, (1, 1, 2), up to a ",
        ),
        ({"seq_lengths": (2**31, 32)}, "seq_lengths: 2147483648; an integer >= 1, at most"),
    ],
)
def test_from_flex_of_fields_that_do_not_fit(fields, line):
    """None of them is cut to what would fit, and no block counts twice."""
    good = {
        "BLOCK_SIZE": (16, 16),
        "seq_lengths": (32, 32),
        "kv_num_blocks": numbers(1, 1, 2),
        "kv_indices": numbers(1, 1, 2, 2),
        "full_kv_num_blocks": None,
        "full_kv_indices": None,
    }
    assert BlockMask.from_flex(SimpleNamespace(**good), band=Band()).density == 0.5
    with pytest.raises(Error) as caught:
        BlockMask.from_flex(SimpleNamespace(**good | fields), band=Band())
    assert str(caught.value).startswith(line)


def test_lengths_may_be_tensors():
    n = pytest.importorskip("torch").tensor
    for band in BANDS:
        assert np.array_equal(band.to_dense(n(33), n(97)), elements(band, 33, 97))
        assert band.visible_share(n(33), n(97)) == band.visible_share(33, 97)


# ---- errors


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


def from_csr(offsets, indices, **kw):
    return BlockMask.from_csr(offsets, indices, 16, **{"seqlen_k": 32, **kw})


def from_dense(blocks=np.ones((2, 3), bool), size=16, **kw):  # noqa: B008 - never changed
    return BlockMask.from_dense(blocks, size, **kw)


def with_row_full(lists):
    return dataclasses.replace(from_dense(), row_full=lists)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: Band("a"), "left: 'a'; None or an integer"),
        (lambda: Band(0, 1.5), "right: 1.5; None or an integer"),
        (lambda: Band(True), "left: True; None or an integer"),
        (lambda: Causal("centre"), """alignment: 'centre'; "bottom_right" or "top_left\""""),
        (lambda: Causal().to_dense(-1, 2), "seqlen_q: -1; an integer >= 0"),
        (lambda: Causal().visible_share(1, 2.0), "seqlen_k: 2.0; an integer >= 0"),
        (lambda: Causal().blocks(-5, 40, (16, 16)), "seqlen_q: -5; an integer >= 0"),
        (
            lambda: Causal().blocks(40, 40, (7, -3)),
            "block_size: (7, -3); one or two integers from 1 to 16777216",
        ),
        (
            lambda: Causal().blocks(40, 40, (0, 16)),
            "block_size: (0, 16); one or two integers from 1 to",
        ),
        (lambda: from_dense(size=24), "block_size: 24; one or two positive multiples of 16"),
        (lambda: from_dense(size=(16, 0)), "block_size: (16, 0); one or two positive"),
        (lambda: from_dense(size=(16, 16, 16)), "block_size: (16, 16, 16); one or two"),
        (lambda: from_dense(size="16"), "block_size: '16'; one or two"),
        (lambda: from_dense(np.ones((2, 3))), "blocks: dtype float64; bool"),
        (lambda: from_dense(np.ones(3, bool)), "blocks: shape (3,); (rows, cols), (num_heads,"),
        (lambda: from_dense(np.ones((0, 3), bool)), "blocks: shape (0, 3); (rows, cols), (num_h"),
        (lambda: from_dense(seqlen_q=33), "seqlen_q: 33; 17 to 32, which 2 blocks of 16 hold"),
        (lambda: from_dense(seqlen_k=32), "seqlen_k: 32; 33 to 48, which 3 blocks of 16 hold"),
        (lambda: from_dense(seqlen_k=0), "seqlen_k: 0; an integer >= 1"),
        (lambda: from_dense(band="causal"), "band: 'causal'; a Band, Causal(), SlidingW"),
        (lambda: from_dense(full=np.ones((3, 2), bool)), "full: shape (3, 2); that of blocks, (2,"),
        (lambda: from_dense([[True], [True, False]]), "blocks: [[True], [True, False]]; an array"),
        (
            lambda: from_dense(full=[[True], [True, False]]),
            "full: [[True], [True, False]]; an arra",
        ),
        (lambda: from_csr([[0], [1, 2]], [0]), "offsets: [[0], [1, 2]]; an array, or lists"),
        (lambda: from_dense(size=np.ones((9, 9))), "block_size: array([[1., 1., 1., 1., "),
        (lambda: Band(np.ones((9, 9))), "left: array([[1., 1., 1., 1., "),
        (lambda: Causal(np.ones((9, 9))), "alignment: array([[1., 1., 1., 1., "),
        (lambda: BlockMask.from_flex(object()), "block_mask: <object object at 0x"),
        (lambda: from_csr([1, 2], [0, 1]), "offsets: [1 2]; 0 first, ascending, each head from"),
        (lambda: from_csr([0, 2, 1], [0]), "offsets: [0 2 1]; 0 first, ascending"),
        (lambda: from_csr([0, 1], [0, 1]), "offsets: [0 1]; 0 first, ascending, each head from "),
        (lambda: from_csr([[0, 1], [0, 1]], [0]), "offsets: [0 1 0 1]; 0 first, ascending, each "),
        (lambda: from_csr([0], []), "offsets: shape (1,); (rows + 1), (num_heads, rows + 1) or"),
        (lambda: from_csr([0.0, 1.0], [0]), "offsets: dtype float64; integers"),
        (lambda: from_csr([0, 1], [[0]]), "indices: shape (1, 1); (blocks,)"),
        (lambda: from_csr([0, 1], [2]), "indices: 2; block columns 0 to 1"),
        (
            lambda: from_csr([0, 1], np.array([2**64 - 1], np.uint64)),
            "indices: 18446744073709551615; integers up to",
        ),
        (lambda: from_dense(np.ma.array(np.eye(2) > 0, mask=np.eye(2))), "blocks: a masked array"),
        (lambda: with_row_full(None), "row_full: None; a tuple of offsets and indices"),
        (lambda: with_row_full((1,)), "row_full: (1,); a tuple of offsets and indices"),
        (lambda: with_row_full((1, 2, 3)), "row_full: (1, 2, 3); a tuple of offsets and indices"),
        (lambda: from_csr([0, 1], [-1]), "indices: -1; block columns 0 to 1"),
        (
            lambda: from_csr([0, 0, 2], [1, 1]),
            "indices: block (1, 1) is listed twice; each block o",
        ),
        (lambda: from_csr([0, 1], [0], seqlen_q=17), "seqlen_q: 17; 1 to 16, which 1 blocks of"),
        (lambda: from_dense().plot(head=1), "head: 1; 0 to 0"),
        (lambda: from_dense().plot(batch=-1), "batch: -1; 0 to 0"),
        (lambda: from_dense().plot(31), "seqlen_q: 31; 32, which the mask was made for, or None"),
        (lambda: from_dense().to_dense(32, 16), "seqlen_k: 16; 48, which the mask was made for"),
        (lambda: from_dense().to_dense("a"), "seqlen_q: 'a'; an integer"),
        (lambda: from_dense().to_dense(10**400), f"seqlen_q: 1{'0' * 78}…; 32, which the mask was"),
        (lambda: from_dense().to_dense(block_level="no"), "block_level: 'no'; True or False"),
        (lambda: from_dense(size=2**32), "block_size: 4294967296; one or two positive multiples"),
        (lambda: from_csr([0, 1], [0], seqlen_k=2**64), "seqlen_k: 18446744073709551616; an int"),
        (lambda: Causal().to_dense(2**64, 2), "seqlen_q: 18446744073709551616; an integer >= 0,"),
        (
            lambda: Causal().visible_share(2, 2**64),
            "seqlen_k: 18446744073709551616; an integer >= 0,",
        ),
    ],
)
def test_bad_input_is_one_line(call, line):
    with pytest.raises(Error) as caught:
        call()
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert caught.value.code == "invalid_argument"
    assert isinstance(caught.value, ValueError)


# ---- pictures


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"path": "x.exe"}, r"path: 'x.exe'; a path that ends in .png, .svg, .pdf"),
        ({"path": 5}, r"path: 5; a path that ends in"),
        ({"path": "/proc/nowhere/x.png"}, r"path: '/proc/nowhere/x.png'; a file that can be"),
        ({"ax": 3}, r"ax: 3; an Axes of matplotlib"),
    ],
    ids=str,
)
def test_plots_that_go_nowhere(keywords, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(Error, match=f"^{message}"):
        from_dense().plot(**keywords)


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    heads = BlockMask.from_dense(np.tri(6, dtype=bool)[None].repeat(5, 0), 16, band=Causal())
    draws = {
        "block": lambda path: from_dense().plot(path=path),
        "heads": lambda path: heads.plot(path=path),
        "head": lambda path: heads.plot(path=path, head=3),
        "band": lambda path: Causal().plot(1000, 700, path=path),
        "dense": lambda path: Dense().plot(3, 900, path=path),
    }
    # The same call for a mask of any kind.
    for kind in (Dense(), Causal(), from_dense()):
        draws[type(kind).__name__] = lambda path, mask=kind: mask.plot(32, 48, None, path)
        assert kind.to_dense(32, 48).shape[-2:] == (32, 48)
    for name, draw in draws.items():
        path = tmp_path / f"{name}.png"
        figure = draw(path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert len([ax for ax in figure.axes if ax.images]) == (5 if name == "heads" else 1)


def test_plot_shows_the_kinds_of_blocks():
    matplotlib = pytest.importorskip("matplotlib.figure")
    ax = matplotlib.Figure().subplots()
    blocks = np.array([[True, True, False], [False, True, True]])
    mask = BlockMask.from_dense(blocks, (16, 32), seqlen_q=30, seqlen_k=90, band=Causal("top_left"))
    assert mask.plot(ax=ax) is ax.figure
    assert ax.images[0].get_array().tolist() == [[1, 0, 0], [0, 0, 0]]
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 90), (30, 0))


def test_plot_without_matplotlib_names_the_extra(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Error, match=r"pip install 'flashsdk\[plot\]'") as caught:
        from_dense().plot()
    assert caught.value.code == "unsupported"


def test_causal_is_made_once():
    """It is asked for at most calls, and making one would be a tenth of a small one."""
    assert Causal() is Causal("bottom_right")
    assert Causal() == Band(None, 0)
    assert Causal("top_left") == Band(None, 0, "top_left")


@pytest.mark.parametrize("mask", [Causal(), Causal("top_left"), Band(None, 0), Band(right=0)])
def test_causal_is_a_type(mask):
    assert isinstance(mask, Causal) and isinstance(mask, Band)
    assert not isinstance(mask, SlidingWindow)
    assert mask == Band(None, 0, mask.alignment) and type(mask) is Band
    assert pickle.loads(pickle.dumps(mask)) == mask


def test_a_sliding_window_is_a_type():
    assert SlidingWindow(128) == Band(128, 0)
    for mask in (SlidingWindow(128), SlidingWindow(3, 4, "top_left"), Band(0, -1)):
        assert isinstance(mask, SlidingWindow) and not isinstance(mask, Causal)
    blocks = BlockMask.from_dense([[True]], 16, band=Causal())
    for mask in (Band(), Band(None, 1), Band(2, None), Dense(), None, blocks, Band):
        assert not isinstance(mask, (Causal, SlidingWindow))


@pytest.mark.parametrize("kind", [Causal, SlidingWindow])
def test_kinds_of_bands(kind):
    """No classes, and used as such: in hints, in copies, by name."""
    assert pickle.loads(pickle.dumps(kind)) is copy.deepcopy(kind) is kind
    assert get_args(kind | None) == (kind, type(None)) and get_args(None | kind)[1] is kind
    assert repr(kind) == f"flashsdk.masks.{kind.__name__}" and "alignment" in str(signature(kind))


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


def test_density_of_a_mask_without_blocks_has_another_name():
    for mask in (Causal(), Dense()):
        with pytest.warns(DeprecationWarning, match="visible_share") as caught:
            assert mask.density(3, 4) == mask.visible_share(3, 4)
        assert [w.filename for w in caught] == [__file__]
