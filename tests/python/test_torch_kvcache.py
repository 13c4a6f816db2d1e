"""flash_attn_with_kvcache against attention over each sequence's own keys."""

import inspect

import flashsdk as fs
import pytest

torch = pytest.importorskip("torch")

from flashsdk.torch import attention, flash_attn_with_kvcache  # noqa: E402
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
    "one of two": ({"v": None}, "k: given alone; k and v, or neither"),
    "no keys": ({"k": None, "v": None, "rotary_cos": torch.zeros(40, 4)}, "rotary_cos: given wit"),
    "leftpad": (
        {"cache_leftpad": torch.zeros(2, dtype=torch.int32)},
        "cache_leftpad: shape (2,), dtype torch.int32; (batch 3,), torch.int32",
    ),
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
