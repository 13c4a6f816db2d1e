"""Masks against their definitions, and what is no mask: one line."""

import copy
import dataclasses
import pickle
import sys
from inspect import signature
from typing import get_args

import numpy as np
import pytest
from flashsdk._errors import Error
from flashsdk.masks import Band, BlockMask, Causal, Dense, SlidingWindow
from mask_cases import BANDS, LENGTHS, elements

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


def test_lengths_may_be_tensors():
    n = pytest.importorskip("torch").tensor
    for band in BANDS:
        assert np.array_equal(band.to_dense(n(33), n(97)), elements(band, 33, 97))
        assert band.visible_share(n(33), n(97)) == band.visible_share(33, 97)


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


def test_density_of_a_mask_without_blocks_has_another_name():
    for mask in (Causal(), Dense()):
        with pytest.warns(DeprecationWarning, match="visible_share") as caught:
            assert mask.density(3, 4) == mask.visible_share(3, 4)
        assert [w.filename for w in caught] == [__file__]


# ---- errors


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
        # flash-attn's way to say "no window", which would show nothing to anybody.
        (lambda: SlidingWindow(-1, -1), "left: -1, beside right -1; left + right >= 0"),
        (lambda: SlidingWindow(-1), "left: -1, beside right 0; left + right >= 0"),
        (lambda: SlidingWindow(3, -4), "left: 3, beside right -4; left + right >= 0"),
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
