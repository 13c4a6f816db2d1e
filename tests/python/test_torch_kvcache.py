"""flash_attn_with_kvcache against attention over each sequence's own keys."""

import inspect

import flashsdk as fs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashsdk.torch import attention, flash_attn_with_kvcache  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_cases import rotated  # noqa: E402

BATCH, ROOM, HEADS, HEADS_KV, DIM = 3, 40, 4, 2, 32
USED = torch.tensor([7, 0, 30], dtype=torch.int32)


def cache(rows=BATCH):
    k, v = (torch.randn(rows, ROOM, HEADS_KV, DIM) for _ in "kv")
    return k, v


def new(count):
    return torch.randn(BATCH, count, HEADS, DIM), *(
        torch.randn(BATCH, count, HEADS_KV, DIM) for _ in "kv"
    )


def expected(q, k_cache, v_cache, used, mask=None, first=None):
    """Of each sequence alone."""
    outs = []
    for b, n in enumerate(used.tolist()):
        keys = slice(0 if first is None else int(first[b]), n)
        outs.append(attention(q[b : b + 1], k_cache[b : b + 1, keys], v_cache[b : b + 1, keys],
                              mask=mask))  # fmt: skip
    return torch.cat(outs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_append_rotate_and_attend(count, causal):
    angles = torch.arange(ROOM)[:, None] / 2.0 ** torch.arange(5)
    cos, sin = angles.cos(), angles.sin()
    for interleaved in (True, False):
        q, k, v = new(count)
        k_cache, v_cache = cache()
        want_k, want_v, turned = k_cache.clone(), v_cache.clone(), []
        for b, n in enumerate(USED.tolist()):
            positions = torch.arange(n, n + count)
            want_k[b, n : n + count] = rotated(k[b], cos, sin, positions, interleaved)
            want_v[b, n : n + count] = v[b]
            of_q = positions if causal else torch.full((count,), n)
            turned.append(rotated(q[b], cos, sin, of_q, interleaved))
        out = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, USED, causal=causal, rotary_interleaved=interleaved
        )
        torch.testing.assert_close(k_cache, want_k)
        assert torch.equal(v_cache, want_v)
        mask = fs.Causal() if causal else None
        want = expected(torch.stack(turned), want_k, want_v, USED + count, mask)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_options_reach_the_kernel():
    q, _, _ = new(3)
    k_cache, v_cache = cache()
    slopes = torch.tensor([0.5, 0.2, 0.1, 0.0])
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=USED, softmax_scale=0.3, causal=True, window_size=(5, 2),
        softcap=2.0, alibi_slopes=slopes, num_splits=1, return_softmax_lse=True,
    )  # fmt: skip
    want = attention(
        q, k_cache, v_cache, seqused_k=USED, softmax_scale=0.3, mask=fs.Band(5, 0), softcap=2.0,
        alibi_slopes=slopes, return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])


def test_lengths_may_be_one_number_or_none():
    q, _, _ = new(1)
    k_cache, v_cache = cache()
    for given, used in ((None, ROOM), (9, 9)):
        out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=given)
        want = attention(q, k_cache[:, :used], v_cache[:, :used])
        assert torch.equal(out, want)


def test_rows_of_a_larger_cache():
    q, k, v = new(2)
    k_cache, v_cache = cache(5)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    own = k_cache[rows.long()].clone(), v_cache[rows.long()].clone()
    others = k_cache[[1, 3]].clone()
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, None, None, USED, rows)
    assert torch.equal(out, flash_attn_with_kvcache(q, *own, k, v, cache_seqlens=USED))
    assert torch.equal(k_cache[rows.long()], own[0])
    assert torch.equal(k_cache[[1, 3]], others)


@pytest.mark.parametrize("rows", [None, [2, 0, 1]])
def test_a_pad_on_the_left(rows):
    q, _, _ = new(2)
    k_cache, v_cache = cache()
    used = torch.tensor([20, 5, 40], dtype=torch.int32)
    first = torch.tensor([3, 5, 0], dtype=torch.int32)
    index = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=used, cache_leftpad=first, cache_batch_idx=index,
        causal=True,
    )  # fmt: skip
    own = (x if rows is None else x[rows] for x in (k_cache, v_cache))
    torch.testing.assert_close(out, expected(q, *own, used, fs.Causal(), first))


PARTS = {
    "whole": lambda x: x(BATCH, ROOM, HEADS_KV, DIM),
    "keys": lambda x: x(BATCH, 60, HEADS_KV, DIM)[:, 7 : 7 + ROOM],
    "rows and keys": lambda x: x(BATCH + 2, 60, HEADS_KV, DIM)[1:-1, 7 : 7 + ROOM],
    "heads outside": lambda x: x(BATCH, HEADS_KV, ROOM, DIM).transpose(1, 2),
    "k and v in one": lambda x: x(BATCH, ROOM, 2, HEADS_KV, DIM)[:, :, 1],
    "one for all": lambda x: x(1, ROOM, HEADS_KV, DIM).expand(BATCH, -1, -1, -1),
}
PAD = torch.tensor([3, 0, 30], dtype=torch.int32)


class Copies(TorchDispatchMode):
    """The copies that are made under it."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_):
            self.made.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("part", PARTS)
def test_a_pad_copies_no_cache(part):
    q, _, _ = new(2)
    caches = [PARTS[part](torch.randn) for _ in "kv"]
    used = torch.tensor([7, 0, 40], dtype=torch.int32)
    given = {"cache_seqlens": used, "cache_leftpad": PAD, "causal": True}
    with Copies() as copies:
        out = flash_attn_with_kvcache(q, *caches, **given)
    assert not copies.made
    alone = [x.contiguous() for x in caches]
    assert torch.equal(out, flash_attn_with_kvcache(q, *alone, **given))


@pytest.mark.parametrize("part", ["whole", "rows and keys", "heads outside"])
@pytest.mark.parametrize("count", [0, 2])
def test_a_pad_compiled(part, count):
    def step(q, k_cache, v_cache, k, v, used, pad):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=used, cache_leftpad=pad
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    q, *added = new(2)
    added = added if count else [None, None]
    used = torch.tensor([7, 0, 31], dtype=torch.int32)
    given, own = [], []
    for _ in "kv":
        given.append(PARTS[part](torch.randn))
        own.append(given[-1].clone())
    want = step(q, *own, *added, used, PAD)
    assert torch.equal(compiled(q, *given, *added, used, PAD), want)
    for x, y in zip(given, own, strict=True):
        assert torch.equal(x, y)
    for x in given:
        x.zero_()
    # No check sees these before the library does.
    wrong = ([38, 0, 31], [0, -1, 0]), ([41, 0, 31], [9, 0, 0]), ([7, 0, 31], [8, 0, 0])
    for used, pad in (*wrong, ([7, 0, 31], [12, 0, 0])):
        with pytest.raises(fs.Error):
            compiled(q, *given, *added, int32(*used), int32(*pad))
        assert not any(x.any() for x in given)


def test_a_pad_of_strides_that_no_page_has():
    q, _, _ = new(2)
    given = {"cache_seqlens": USED, "cache_leftpad": torch.zeros_like(USED)}
    whole, keys = PARTS["whole"](torch.zeros), PARTS["keys"](torch.zeros)
    odd = torch.zeros(BATCH, ROOM * 64 + 32).unfold(1, ROOM * 64, 1)[:, 0].unflatten(1, (ROOM, -1))
    odd = odd.unflatten(2, (HEADS_KV, DIM))
    far = torch.zeros(2, 2**31, HEADS_KV, DIM, device="meta")[:, :ROOM]
    on_meta = {name: x[:2].to("meta") for name, x in given.items()}
    for caches, options, line in (
        ((odd, odd), given, "k_cache: batch stride 2592; a multiple of the seqlen stride 64 with"),
        ((whole, odd), given, "v_cache: batch stride 2592; a multiple of the seqlen stride 64"),
        ((keys, whole), given, "v_cache: batch stride 2560; 3840, 60 times the seqlen stride 64"),
        ((whole[:, :1].expand(-1, ROOM, -1, -1),) * 2, given, "k_cache: batch stride 2560; a mul"),
        ((far, far), on_meta, "k_cache: 2147483688 keys from its first to its last; less than"),
    ):
        with pytest.raises(fs.Error) as caught:
            flash_attn_with_kvcache(q[: len(caches[0])].to(caches[0].device), *caches, **options)
        assert str(caught.value).startswith(line)


def test_pages():
    q, k, v = new(2)
    k_cache, v_cache = cache()
    table = torch.randperm(15).view(3, 5).to(torch.int32)
    pages = [torch.full((15, 8, HEADS_KV, DIM), torch.nan) for _ in "kv"]
    for paged, x in zip(pages, (k_cache, v_cache), strict=True):
        for b, n in enumerate(USED.tolist()):
            for j in range(n):
                paged[table[b, j // 8], j % 8] = x[b, j]
    out = flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=USED, block_table=table)
    assert torch.equal(out, flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=USED))


def apart(x):
    """The same with gaps between the elements of the last dimension, which flash-attn copies."""
    return x.transpose(-2, -1).contiguous().transpose(-2, -1)


@pytest.mark.parametrize("compiles", [False, True])
def test_what_is_not_contiguous_is_copied(compiles):
    step = flash_attn_with_kvcache
    if compiles:
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    q, k, v = new(2)
    table = torch.randperm(15).view(3, 5).to(torch.int32)
    pages = [torch.randn(15, 8, HEADS_KV, DIM) for _ in "kv"]
    own = [x.clone() for x in pages]
    given = [apart(x) for x in (q, k, v, table)]
    assert all(x.stride(-1) > 1 for x in given)
    out = step(given[0], *pages, *given[1:3], cache_seqlens=USED, block_table=given[3])
    want = flash_attn_with_kvcache(q, *own, k, v, cache_seqlens=USED, block_table=table)
    assert torch.equal(out, want)
    for x, y in zip(pages, own, strict=True):
        assert torch.equal(x, y)


def test_compile():
    def step(q, k_cache, v_cache, k, v, used):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used, causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for used in (USED, USED + 1):
        q, k, v = new(1)
        ours, theirs = cache(), cache()
        for x, y in zip(ours, theirs, strict=True):
            y.copy_(x)
        assert torch.equal(compiled(q, *ours, k, v, used), step(q, *theirs, k, v, used))
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x, y)


def test_signature():
    given = inspect.signature(flash_attn_with_kvcache).parameters
    assert list(given)[:5] == ["q", "k_cache", "v_cache", "k", "v"]
    assert given["rotary_interleaved"].default is True
    assert given["num_splits"].default == 0


ERRORS = {
    "no room": (
        {"cache_seqlens": 40},
        "cache_seqlens: 40 of sequence 0; 0 to 38, as the",
    ),
    "cache": (
        {"k_cache": torch.zeros(3, ROOM, DIM, 2).transpose(2, 3)},
        "k_cache: strides of elements (2560, 64, 1, 2); ",
    ),
    "a list of pages": ({"block_table": [[0]]}, "block_table: [[0]]; a tensor"),
    "parts": (
        {"num_splits": True},
        "num_splits: True; an integer, 0 (as many as pays) to 1073741824",
    ),
    "one of two": ({"v": None}, "k: given alone; k and v, or neither"),
    "no keys": ({"k": None, "v": None, "rotary_cos": torch.zeros(40, 4)}, "rotary_cos: given wit"),
    "beyond int32": (
        {"cache_seqlens": 2**31},
        "cache_seqlens: 2147483648; int32 (batch,) or an integer, 0 to the keys that",
    ),
    "below int32": (
        {"cache_seqlens": -(2**31) - 1},
        "cache_seqlens: -2147483649; int32 (batch,) o",
    ),
    "a list of lengths": ({"cache_seqlens": [1, 2, 3]}, "cache_seqlens: [1, 2, 3]; int32 (batch,)"),
    "row": ({"cache_batch_idx": USED}, "cache_batch_idx: 7 at [0]; 0 to 2, the rows of k_cache"),
    "both": (
        {"block_table": torch.zeros(3, 1, dtype=torch.int32), "cache_batch_idx": USED},
        "cache_batch_idx: given with block_table; None, as pages have neither",
    ),
    "table alone": (
        {"block_table": torch.zeros(3, 1, dtype=torch.int32), "cache_seqlens": None},
        "block_table: given; None without cache_seqlens, the lengths",
    ),
    "gradient": (
        {"q": torch.zeros(3, 2, 4, 32, requires_grad=True)},
        "q: a tensor that requires",
    ),
}


@pytest.mark.parametrize(("changes", "line"), ERRORS.values(), ids=ERRORS)
def test_errors(changes, line):
    q, k, v = new(2)
    k_cache, v_cache = cache()
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": USED}
    with pytest.raises(fs.Error) as caught:
        flash_attn_with_kvcache(**given | changes)
    assert str(caught.value).startswith(line)


# What attention refuses, behind an append that would be done by then.
ERRORS_OF_ATTENTION = {
    "scale": ({"softmax_scale": float("nan")}, "softmax_scale: nan; a finite number"),
    "scale of words": ({"softmax_scale": "1"}, "softmax_scale: '1'; a number"),
    "scale beyond float32": ({"softmax_scale": 1e39}, "softmax_scale: 1e+39; a number that"),
    "softcap": ({"softcap": float("inf")}, "softcap: inf; a finite number >= 0"),
    "softcap beyond float32": ({"softcap": 1e39}, "softcap: 1e+39; a number that float32"),
    "slopes in a list": ({"alibi_slopes": [1.0] * 4}, "alibi_slopes: [1.0, 1.0, 1.0, 1.0]; a "),
    "slopes of NumPy": ({"alibi_slopes": np.ones(4)}, "alibi_slopes: a numpy.ndarray; a tensor"),
    "parts": ({"num_splits": -1}, "num_splits: -1; an integer, 0 (as many as pays) to"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, "alibi_slopes: shape (3,); (num_heads 4)"),
    "slopes of 64 bits": ({"alibi_slopes": torch.ones(4).double()}, "alibi_slopes: dtype float64"),
    "slopes with a gradient": (
        {"alibi_slopes": torch.ones(4, requires_grad=True)},
        "alibi_slopes: a tensor that requires a gradient",
    ),
    "dtype": ({"q": torch.zeros(3, 2, 4, DIM).half()}, "k_cache: dtype float32; float16, the dty"),
    "heads": ({"q": torch.zeros(3, 2, 3, DIM)}, "k_cache: num_heads_kv 2; a divisor of num_heads"),
    "no heads": ({"q": torch.zeros(3, 2, 0, DIM)}, "q: num_heads 0; 1 to 1073741824"),
    "head_dim": ({"q": torch.zeros(3, 2, 4, DIM + 8)}, "k_cache: shape (3, 40, 2, 32); (batch 3"),
    "queries of four": ({"q": torch.zeros(4, 2, 4, DIM)}, "k_cache: shape (3, 40, 2, 32); (batch"),
    "elsewhere": ({"q": torch.zeros(3, 2, 4, DIM, device="meta")}, "k_cache: on cpu; meta, where"),
}


@pytest.mark.parametrize("pad", [None, torch.zeros_like(USED)], ids=["no pad", "pad"])
@pytest.mark.parametrize(("changes", "line"), ERRORS_OF_ATTENTION.values(), ids=ERRORS_OF_ATTENTION)
def test_a_call_that_is_refused_has_written_nothing(changes, line, pad):
    q, k, v = new(2)
    k_cache, v_cache = cache()
    before = k_cache.clone(), v_cache.clone()
    given = {"q": q, "k": k, "v": v, "cache_seqlens": USED, "cache_leftpad": pad} | changes
    with pytest.raises(fs.Error) as caught:
        flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **given)
    if pad is None or "q" not in changes:  # with one, the cache is looked at first
        assert str(caught.value).startswith(line)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


def test_no_column_of_values_is_refused_before_the_cache_is_written():
    q, k, v = new(2)
    k_cache, v_cache = cache()
    before = k_cache.clone()
    with pytest.raises(fs.Error, match=r"^v_cache: head_dim_v 0; 1 to 576$"):
        flash_attn_with_kvcache(q, k_cache, v_cache[..., :0], k, v[..., :0], cache_seqlens=USED)
    assert torch.equal(k_cache, before)


ASKED_ABOUT = {"slopes": {"alibi_slopes": torch.ones(4)}, "scale": {"softmax_scale": 1}}


@pytest.mark.parametrize("options", ASKED_ABOUT.values(), ids=ASKED_ABOUT)
def test_a_pad_beside_what_is_asked_about(options):
    """Lengths are those from the pad on, also where attention is asked before an append."""
    q, k, v = new(1)
    k_cache, v_cache = cache()
    given = {"cache_seqlens": int32(12, 9, 30), "cache_leftpad": int32(10, 3, 30)}
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **given, **options)
    given["cache_seqlens"] = given["cache_seqlens"] + 1
    assert torch.equal(out, flash_attn_with_kvcache(q, k_cache, v_cache, **given, **options))


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def test_a_row_that_is_not_there_is_refused_by_a_graph():
    """Counted in 32 bits, keys of row 2^28 would be those of row 0 again."""
    q, (k, v) = torch.randn(2, 1, 4, 8), torch.randn(2, 2, 16, 2, 8)

    def call(rows):
        pad = int32(0, 0)
        return flash_attn_with_kvcache(
            q, k, v, cache_seqlens=int32(3, 4), cache_leftpad=pad, cache_batch_idx=rows
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(int32(1, 0)), call(int32(1, 0)))
    with pytest.raises(fs.InvalidArgument, match=r"^block_table: -1 at \[1, 0\]; "):
        compiled(int32(0, 2**28))


def room(*shape):
    return torch.zeros(*shape, 2, 8)


LARGER = {"k_cache": room(3, 32), "v_cache": room(3, 32)}
# With a pad and without one.
ERRORS_OF_ROWS = {
    "index of floats": ({"cache_batch_idx": room(2)[:, 0, 0]}, "cache_batch_idx: dtype float32; i"),
    "index of int64": ({"cache_batch_idx": int32(0, 1).long()}, "cache_batch_idx: dtype int64; i"),
    "index of one": ({"cache_batch_idx": int32(0)}, "cache_batch_idx: shape (1,); (batch 2)"),
    "index of three": ({"cache_batch_idx": int32(0, 1, 0)}, "cache_batch_idx: shape (3,); (batch"),
    "index elsewhere": (
        {"cache_batch_idx": int32(0, 1).to("meta")},
        "cache_batch_idx: on meta; cpu, where q is",
    ),
    "v shorter": (
        {"v_cache": room(2, 31)},
        "v_cache: shape (2, 31, 2, 8); (batch 2, seqlen_k 32, num_heads_kv 2, head_dim_v 8)",
    ),
    "v of fewer rows": (
        {"v_cache": room(1, 32), "cache_batch_idx": int32(0, 1)},
        "v_cache: shape (1, 32, 2, 8); (",
    ),
    "k wider": ({"k_cache": torch.zeros(2, 32, 2, 16)}, "k_cache: shape (2, 32, 2, 16); (batch 2,"),
    "cache of three": (LARGER, "k_cache: shape (3, 32, 2, 8); (batch 2, seqlen_k 32, num_heads_kv"),
    "lengths of int64": ({"cache_seqlens": int32(5, 7).long()}, "cache_seqlens: dtype int64; int"),
    "one length": ({"cache_seqlens": int32(5)}, "cache_seqlens: shape (1,); (batch 2)"),
    "lengths elsewhere": ({"cache_seqlens": int32(5, 7).to("meta")}, "cache_seqlens: on meta; cpu"),
    "too long": ({"cache_seqlens": int32(40, 7)}, "cache_seqlens: 40 of sequence 0; 0 to seqlen_k"),
    "below 0": ({"cache_seqlens": int32(5, -1)}, "cache_seqlens: -1 of sequence 1; 0 to seqlen_k"),
}
ERRORS_OF_PADS = {
    "pad below 0": (
        {"cache_leftpad": int32(0, -1)},
        "cache_leftpad: -1 at [1]; 0 to cache_seqlens",
    ),
    "pad too long": ({"cache_leftpad": int32(6, 0)}, "cache_leftpad: 6 at [0]; 0 to cache_seqlens"),
    "pad elsewhere": ({"cache_leftpad": int32(0, 1).to("meta")}, "cache_leftpad: on meta; cpu, wh"),
    "pad of int64": ({"cache_leftpad": int32(0, 1).long()}, "cache_leftpad: dtype int64; int32"),
    "one pad": ({"cache_leftpad": int32(1)}, "cache_leftpad: shape (1,); (batch 2)"),
    "list of pads": ({"cache_leftpad": [0, 1]}, "cache_leftpad: [0, 1]; a tensor"),
    "row behind": (
        {"cache_batch_idx": int32(0, 2)},
        "cache_batch_idx: 2 at [1]; 0 to 1, the rows of k_cache",
    ),
    "row before": ({"cache_batch_idx": int32(-1, 0)}, "cache_batch_idx: -1 at [0]; 0 to 1, the r"),
    "no row": (
        {"k_cache": room(0, 32), "v_cache": room(0, 32), "cache_batch_idx": int32(0, 0)},
        "cache_batch_idx: 0 at [0]; no row, as k_cache has none",
    ),
}


def refused_of_two(changes):
    q = torch.zeros(2, 1, 2, 8)
    given = {"k_cache": room(2, 32), "v_cache": room(2, 32), "cache_seqlens": int32(5, 7)}
    with pytest.raises(fs.Error) as caught:
        flash_attn_with_kvcache(q, **given | changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("pad", [None, int32(0, 1)], ids=["no pad", "pad"])
@pytest.mark.parametrize(("changes", "line"), ERRORS_OF_ROWS.values(), ids=ERRORS_OF_ROWS)
def test_errors_with_a_pad_are_those_without(changes, line, pad):
    assert refused_of_two({"cache_leftpad": pad} | changes).startswith(line)


@pytest.mark.parametrize(("changes", "line"), ERRORS_OF_PADS.values(), ids=ERRORS_OF_PADS)
def test_errors_of_a_pad(changes, line):
    assert refused_of_two({"cache_leftpad": int32(0, 1)} | changes).startswith(line)


def test_a_refused_pad_leaves_the_cache():
    cache, added = room(2, 32), torch.ones(2, 1, 2, 8)
    refused_of_two({"k_cache": cache, "k": added, "v": added, "cache_leftpad": int32(0, 8)})
    assert not cache.any()
    line = refused_of_two({"k": added, "v": added, "cache_leftpad": int32(0, 0),
                           "cache_seqlens": int32(0, -1)})  # fmt: skip
    assert line.startswith("cache_seqlens: -1 of sequence 1; 0 to 31, as the cache has room for")


def test_a_pad_under_a_profiler():
    """Which the check of contents keeps away from; the library refuses the pages."""
    with torch.profiler.profile():
        line = refused_of_two({"cache_leftpad": int32(0, -1)})
    assert line.startswith("cache_leftpad: -1 at [1, 0]")
