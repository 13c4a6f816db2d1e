"""BlockMask.from_flex against what a mask_mod shows, element by element."""

import re
from types import SimpleNamespace

import flashsdk as fs
import numpy as np
import pytest
from cases import qkv
from flashsdk._errors import Error
from flashsdk._testing import reference
from flashsdk.masks import Band, BlockMask, Causal, SlidingWindow
from mask_cases import elements, pairs


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


def by_query_and_key(b, h, q, k):
    return q >= k


def aware_of(axis, ends):
    """mask_mod: keys before ``ends`` of this sequence, or of this head."""
    return lambda b, h, q, k: (k < ends[(b, h)[axis]]) & (q >= 0)


def partial_everywhere(mask_mod, seqlens, block_size, batch=1, heads=1):
    """A BlockMask whose blocks are all partial: mask_mod alone says what is visible."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    import torch

    rows, cols = (-(-n // block_size) for n in seqlens)
    counts = torch.full((batch, heads, rows), cols, dtype=torch.int32)
    indices = torch.arange(cols, dtype=torch.int32).expand(batch, heads, rows, cols).contiguous()
    return flex.BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=block_size, mask_mod=mask_mod, seq_lengths=seqlens
    )


@pytest.mark.parametrize("axis, name, letter", [(0, "batch", "b"), (1, "num_heads", "h")])
def test_a_mask_mod_that_reads_which_it_is_asked_for(axis, name, letter):
    """One layout for all does not say how many there are, and FlexAttention asks for each."""
    torch = pytest.importorskip("torch")
    mod = aware_of(axis, torch.tensor([32, 32, 48]))  # the first two are alike
    theirs = partial_everywhere(mod, (64, 64), 16)
    for one_layout in (theirs, flex_blocks(mod, None, None, 64, 64, 16)):
        with pytest.raises(fs.InvalidArgument) as caught:
            BlockMask.from_flex(one_layout)
        allowed = f"how many there are, as mask_mod reads {letter}"
        assert str(caught.value) == f"{name}: None with one layout for all; {allowed}"
        for count in (1, 2):
            mask = BlockMask.from_flex(one_layout, **{name: count})
            assert (mask.batch, mask.num_heads)[axis] == count and mask.visible_share() == 0.5
    mask = BlockMask.from_flex(theirs, **{name: 3})
    assert mask.batch * mask.num_heads == (mask.batch, mask.num_heads)[axis] == 3
    assert mask.to_dense().mean((2, 3)).ravel().tolist() == [0.5, 0.5, 0.75]


def test_one_layout_that_is_not_of_all():
    """create_block_mask asked of the first: kernels of FlexAttention skip what others show."""
    torch = pytest.importorskip("torch")
    mod = aware_of(1, torch.tensor([32, 32, 48]))
    theirs = flex_blocks(mod, None, None, 64, 64, 16)
    line = "^mask_mod: not the same for all at query 0, key 32 of batch 0, head 2, of a block "
    with pytest.raises(fs.Unsupported, match=line):
        BlockMask.from_flex(theirs, num_heads=3)
    each = BlockMask.from_flex(flex_blocks(mod, None, 3, 64, 64, 16))
    assert each.to_dense().mean((2, 3)).tolist() == [[0.5, 0.5, 0.75]]


@pytest.mark.parametrize("axis, words", [(1, "heads 0 and 2"), (0, "sequences 0 and 2")])
def test_bands_of_their_own(axis, words):
    """Each alone has a band; where one has none, that is what is said."""
    torch = pytest.importorskip("torch")
    ends = torch.tensor([8, 8, 24])

    def mod(b, h, q, k):
        return (q >= k) & (q - k < ends[(b, h)[axis]])

    counts = (3, None) if axis == 0 else (None, 3)
    line = rf"^mask_mod: {words} need different bands; one band for all, or BlockMask.from_dense\("
    with pytest.raises(fs.Unsupported, match=line):
        BlockMask.from_flex(flex_blocks(mod, *counts, 64, 64, 16))

    def none(b, h, q, k):
        return mod(b, h, q, k) & ((q + k) % 3 != 0)

    line = (
        r"which no band does; one .* partial block, or BlockMask.from_dense\(.* with a bool bias$"
    )
    with pytest.raises(fs.Unsupported, match=line):
        BlockMask.from_flex(flex_blocks(none, *counts, 64, 64, 16))


READ_NEITHER = {
    "causal": by_query_and_key,
    "and_masks": lambda flex: flex.and_masks(by_query_and_key, lambda b, h, q, k: q - k < 9),
    "or_masks": lambda flex: flex.or_masks(by_query_and_key, lambda b, h, q, k: k < 16),
    "noop": lambda flex: flex.noop_mask,
}


@pytest.mark.parametrize("name", READ_NEITHER)
def test_a_mask_mod_that_reads_neither_is_for_all(name):
    """PyTorch's own functions take dtype and device of b, and no value."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    make = READ_NEITHER[name]
    mod = make if make is by_query_and_key else make(flex)
    theirs = partial_everywhere(mod, (64, 64), 16)
    mask = BlockMask.from_flex(theirs)
    assert (mask.batch, mask.num_heads) == (1, 1)
    assert BlockMask.from_flex(theirs, batch=5, num_heads=3) == mask
    want = flex.create_mask(mod, None, None, 64, 64, device="cpu").numpy()
    assert np.array_equal(mask.to_dense(), want)


def test_what_a_mask_mod_reads_is_seen_through_its_operators():
    mod = pytest.importorskip("flashsdk._mask_mod")
    import torch

    def written(b, h, q, k):
        seen = torch.zeros_like(q) + k
        return seen.add_(h) >= q  # what it is made of reads no h

    rows = torch.tensor([[3, 5]])
    for mask_mod, reads in {
        by_query_and_key: (False, False),
        (lambda b, h, q, k: (q >= k) & (b >= 0)): (True, False),
        (lambda b, h, q, k: rows[0][h] + q >= k): (False, True),
        (lambda b, h, q, k: rows[b, h] + q >= k): (True, True),
        (lambda b, h, q, k: torch.where(k < 3, q + b, k) < 9): (True, False),
        (lambda b, h, q, k: h.new_ones((), dtype=torch.bool) & (k <= q)): (False, False),
        written: (False, True),
        torch.compile(by_query_and_key, backend="eager"): (True, True),  # cannot be looked into
    }.items():
        asked = mod.MaskMod(mask_mod, "cpu")
        assert (asked.reads(0), asked.reads(1)) == reads


@pytest.mark.parametrize("batch, heads", [(3, 4), (1, 4), (3, 1), (1, 1)])
def test_from_flex_of_every_sequence_and_head(batch, heads):
    """Windows that differ only from the third sequence, and the third head, on; in float64."""
    torch = pytest.importorskip("torch")
    begins, widths = torch.tensor([0, 0, 40]), torch.tensor([30, 30, 24, 8])

    def mod(b, h, q, k):
        whole = (k // 16 == 4) & (q // 16 == 0) & (h == 3)  # blocks that a band has no part in
        return ((q >= k) & (q - k < 24) & (k // 16 * 16 >= begins[b] // 16 * 16)) | whole

    theirs = partial_everywhere(mod, (90, 80), 16, batch, heads)
    mask = BlockMask.from_flex(theirs, batch=3, num_heads=4)
    flex = torch.nn.attention.flex_attention
    visible = flex.create_mask(mod, 3, 4, 90, 80, device="cpu").numpy()
    assert np.array_equal(np.broadcast_to(mask.to_dense(), visible.shape), visible)
    q, k, v, _ = qkv((90, 80), 4, 16, batch=3)
    exact = reference.forward(q, k, v, mask=visible)
    for got, want in zip(fs.mha_fwd(q, k, v, mask=mask), exact, strict=True):
        assert np.array_equal(np.isneginf(got), np.isneginf(want))
        both = np.isfinite(want)
        assert np.abs(got[both] - want[both]).max() < 1e-5

    def other(b, h, q, k):
        return (q >= k) & (q - k < widths[h])  # of another width for each head: no one band

    theirs = partial_everywhere(other, (90, 80), 16, batch, heads)
    with pytest.raises(fs.Unsupported, match=r"^mask_mod: heads 0 and 2 need different bands; "):
        BlockMask.from_flex(theirs, batch=3, num_heads=4)


@pytest.mark.parametrize(
    "given, line",
    [
        ({"batch": 3}, "batch: 3; 2, as many layouts block_mask has, or None"),
        ({"num_heads": 1}, "num_heads: 1; 2, as many layouts block_mask has, or None"),
        ({"batch": 0}, "batch: 0; an integer >= 1, at most 2147483647"),
        ({"num_heads": "4"}, "num_heads: '4'; an integer >= 1, at most 2147483647"),
    ],
    ids=str,
)
def test_from_flex_of_another_batch(given, line):
    theirs = partial_everywhere(by_query_and_key, (32, 32), 16, 2, 2)
    assert BlockMask.from_flex(theirs, batch=2, num_heads=2).batch == 2
    with pytest.raises(fs.InvalidArgument) as caught:
        BlockMask.from_flex(theirs, **given)
    assert str(caught.value) == line


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
