"""Heads wider than 256 on a GPU, and latent attention (MLA): keys of 576 whose first 512 are v."""

import flashsdk as fs
import pytest
from flashsdk._testing import naive
from flashsdk._testing.reference import Features
from gpu_cases import BF16, assert_same, both, qkv

torch = pytest.importorskip("torch")

QK, V = 576, 512


@pytest.fixture(autouse=True)
def sm80(backend):
    if backend != "sm80":
        pytest.skip("sm80 has them")


def kernel(*x, **keywords):
    return fs.explain(*x, **keywords).kernel


def test_which_kernel_takes_a_call():
    q, k, v, _ = qkv(700, dim=512)
    assert "_d576x512_dense_" in kernel(q, k, v)
    assert "_d256_" in kernel(q[..., :256], k[..., :256], v[..., :256], backend="sm80")
    assert "_d512_dense_" in kernel(q, k, v, op="bwd")
    assert "unaligned" in kernel(q, k, v, softcap=2.0)
    assert "unaligned" in kernel(q[..., :511], k[..., :511], v)
    blocks = fs.layouts.dense(700, 700, 16)
    for op in ("fwd", "bwd"):
        assert "_16x16_" in kernel(q, k, v, mask=blocks, op=op)


def test_a_backward_ends_at_512():
    q, k, v, dout = (torch.zeros(1, 8, 1, d, device="cuda", dtype=BF16) for d in (QK, QK, V, V))
    out, lse = fs.mha_fwd(q, k, v)
    refusal = r"^q: head_dim 576; 1 to 512 in the backward on a GPU, to 576 on a CPU$"
    with pytest.raises(fs.Unsupported, match=refusal):
        fs.mha_bwd(dout, q, k, v, out, lse)
    wide = torch.zeros(1, 8, 1, QK, device="cuda", dtype=BF16)
    with pytest.raises(fs.Unsupported, match=r"^v: head_dim_v 576; 1 to 512 on a GPU"):
        fs.mha_fwd(wide, wide, wide)


def latent(batch, queries, heads, keys, dtype):
    """q, and the cache of one head of keys."""
    q = torch.randn(batch, queries, heads, QK, device="cuda", dtype=dtype)
    return q, torch.randn(batch, keys, 1, QK, device="cuda", dtype=dtype)


def definition(q, k, used):
    """out and lse in float64, causal from the bottom right."""
    outs, lses = [], []
    for b, n in enumerate(used):
        i, j = (torch.arange(rows, device=q.device) for rows in (q.shape[1], n))
        visible = j <= i[:, None] + n - q.shape[1]
        queries, keys = q[b].double().transpose(0, 1), k[b, :n, 0].double()  # keys: of every head
        head = naive.Heads(Features(), queries, keys, keys[:, :V], None, None, QK**-0.5)
        out, lse = naive.attention(head, visible=visible, xp=torch)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def assert_close(got, want):
    out, lse = got
    size = want[0].abs().amax().item()
    error = (out.double() - want[0]).abs().amax().item()
    assert error < (2**-7 if out.dtype == BF16 else 2**-10) * max(size, 0.1) * 1.5
    torch.testing.assert_close(lse.double(), want[1], atol=1e-4, rtol=1e-5)


def into_pages(k, used, page_size):
    """Pages in any order, NaN where nobody may read, and their table."""
    batch, keys = k.shape[:2]
    each = -(-keys // page_size)
    table = torch.randperm(batch * each + 3, device="cuda")[: batch * each]
    pages = torch.full((batch * each + 3, page_size, 1, QK), torch.nan, device="cuda").to(k.dtype)
    for b, n in enumerate(used):
        for page in range(-(-n // page_size)):
            rows = k[b, page * page_size : min((page + 1) * page_size, n)]
            pages[table[b * each + page], : len(rows)] = rows
    return pages, table.to(torch.int32).reshape(batch, each)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("batch", [1, 3, 70])
def test_latent_attention(batch, heads, queries, dtype):
    """v a view of k or a copy of it, keys in one piece or in pages, all used or not."""
    keys = 2100 if batch < 70 else 700
    q, k = latent(batch, queries, heads, keys, dtype)
    used = [keys, 1, 1337][:batch] if batch < 70 else [(37 * b * b) % keys for b in range(batch)]
    lengths = torch.tensor(used, dtype=torch.int32, device="cuda")
    want = definition(q, k, used)
    call = {"mask": fs.Causal()}
    assert "_split_32x32_" in kernel(q, k, k[..., :V], **call)
    assert_close(fs.mha_fwd(q, k, k[..., :V], seqused_k=lengths, **call), want)
    assert_close(fs.mha_fwd(q, k, k[..., :V].contiguous(), seqused_k=lengths, **call), want)
    for page_size in (7, 64):
        pages, table = into_pages(k, used, page_size)
        paged = {"seqused_k": lengths, "block_table": table, **call}
        got = fs.mha_fwd(q, pages, pages[..., :V], **paged)
        assert_close(got, want)
        assert_same(got, fs.mha_fwd(q, pages, pages[..., :V], **paged))
    if batch < 70:
        assert_close(fs.mha_fwd(q, k, k[..., :V], **call), definition(q, k, [keys] * batch))


@pytest.mark.parametrize("queries", [1, 3])
def test_latent_attention_of_packed_sequences(queries):
    used = [1500, 0, 64, 700]
    q, k = latent(4, queries, 16, 1500, BF16)
    want = definition(q, k, used)
    ends_q = torch.arange(5, dtype=torch.int32, device="cuda") * queries
    ends_k = torch.tensor([0, *used], device="cuda").cumsum(0).to(torch.int32)
    rows = torch.cat([k[b, :n] for b, n in enumerate(used)])
    out, lse = fs.mha_varlen_fwd(
        q.flatten(0, 1), rows, rows[..., :V], ends_q, ends_k, queries, 1500, mask=fs.Causal()
    )
    got = out.view(4, queries, 16, V), lse.view(16, 4, queries).transpose(0, 1)
    assert_close(got, want)


@pytest.mark.parametrize("v_of_its_own", [False, True])
def test_many_queries_of_latent_attention(v_of_its_own):
    """The kernels that do not split keys."""
    q, k = latent(2, 400, 4, 700, BF16)
    v = k[..., :V].contiguous() if v_of_its_own else k[..., :V]
    assert "split" not in kernel(q, k, v, mask=fs.Causal())
    assert_close(fs.mha_fwd(q, k, v, mask=fs.Causal()), definition(q, k, [700, 700]))


def test_a_view_that_is_not_the_first_columns():
    """Strides and heads as k's, but another address."""
    q, k = latent(2, 1, 16, 3000, BF16)
    v = k[..., QK - V :]
    want = fs.mha_fwd(q, k, v.contiguous())
    for ours, copy in zip(fs.mha_fwd(q, k, v), want, strict=True):
        torch.testing.assert_close(ours, copy, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("mask", [None, fs.Causal(), fs.layouts.dense(600, 600, 32)], ids=str)
def test_deterministic_gradients(mask):
    x = qkv(600, heads=3, dim=512)
    options = {"mask": mask, "backend": "sm80"}
    first = both(x, **options)
    q, k, v, dout = x
    repeat = [
        fs.mha_bwd(dout, q, k, v, *first[:2], deterministic=True, **options) for _ in range(2)
    ]
    assert_same(*repeat)
    for ours, want in zip(repeat[0], first[2:], strict=True):
        torch.testing.assert_close(ours, want, atol=0.02, rtol=0.02)
