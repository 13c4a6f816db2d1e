"""flash-attn's functions: signatures, windows, packing and what is refused."""

import inspect

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
import flashsdk.torch as adapter  # noqa: E402
from standard_attention import check  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_way")

# Of flash-attn 2.8.3, flash_attn/flash_attn_interface.py, but for deterministic: False there, which
# here is not what torch.use_deterministic_algorithms says.
_TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=None, return_attn_probs=False"
)
_PACKED = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, {_TAIL})",
    "flash_attn_qkvpacked_func": f"(qkv, {_TAIL})",
    "flash_attn_kvpacked_func": f"(q, kv, {_TAIL})",
    "flash_attn_varlen_func": f"(q, k, v, {_PACKED}, {_TAIL}, block_table=None)",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {_TAIL})",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {_PACKED}, {_TAIL})",
}


def qkv(seqlen_q=40, seqlen_k=None, heads_kv=4):
    """q (2, seqlen_q, 4, 16), k and v (2, seqlen_k, heads_kv, 16)"""
    shape_k = (2, seqlen_k or seqlen_q, heads_kv, 16)
    return [torch.randn(shape) for shape in ((2, seqlen_q, 4, 16), shape_k, shape_k)]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    signature = inspect.signature(getattr(adapter, name))
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(parameters)) == SIGNATURES[name]


# flash-attn's own definition of a window, for query i of seqlen_q and key j of seqlen_k.
def window(seqlen_q, seqlen_k, causal, left, right):
    if causal:
        right = 0
    at = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    keys = torch.arange(seqlen_k)
    after = keys >= at - left if left >= 0 else torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    return after & (keys <= at + right) if right >= 0 else after


@pytest.mark.parametrize("lengths", [(40, 40), (20, 50), (50, 20)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [(-1, -1), (5, -1), (-1, 3), (5, 3), (0, 0), [7, 100]], ids=str)
def test_windows(size, causal, lengths):
    options = {"causal": causal, "window_size": size, "return_attn_probs": True}
    check(
        lambda *x: adapter.flash_attn_func(*x, **options)[:2],
        qkv(*lengths),
        visible=window(*lengths, causal, *size),
    )


def test_scores():
    slopes = torch.tensor([[0.5, 0.25, 0.125, 0.0], [0.1, 0.2, 0.3, 0.4]])
    options = {"softmax_scale": 0.3, "softcap": 2.0, "alibi_slopes": slopes}
    check(
        lambda *x: adapter.flash_attn_func(*x, **options, return_attn_probs=True)[:2],
        qkv(heads_kv=2),
        **options,
    )
    q, k, v = qkv()
    assert torch.equal(
        adapter.flash_attn_func(q, k, v, softcap=-1.0), adapter.flash_attn_func(q, k, v)
    )


def test_packed_tensors_are_the_same_attention():
    q, k, v = (x.requires_grad_() for x in qkv())
    dout = torch.randn(2, 40, 4, 16)
    offsets = torch.tensor([0, 40, 80], dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    expected = adapter.flash_attn_func(q, k, v, causal=True)
    packed = (offsets, offsets, 40, 40)
    others = (
        adapter.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True),
        adapter.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True),
        adapter.flash_attn_varlen_func(*flat, *packed, causal=True),
        adapter.flash_attn_varlen_qkvpacked_func(torch.stack(flat, 1), offsets, 40, causal=True),
        adapter.flash_attn_varlen_kvpacked_func(
            flat[0], torch.stack(flat[1:], 1), *packed, causal=True
        ),
    )
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    for out in others:
        torch.testing.assert_close(out.view(2, 40, 4, 16), expected)
        ours = torch.autograd.grad(out.view(2, 40, 4, 16), (q, k, v), dout)
        for a, b in zip(ours, gradients, strict=True):
            torch.testing.assert_close(a, b)


def test_positional_arguments():
    q, k, v = qkv()
    out = adapter.flash_attn_func(q, k, v, 0.0, 0.3, True, (5, 3), 2.0, None, True, False)
    options = {"mask": fs.Band(5, 0), "softmax_scale": 0.3, "softcap": 2.0}
    assert torch.equal(out, adapter.attention(q, k, v, **options))


def test_return_attn_probs():
    q, k, v = qkv()
    out, lse, probabilities = adapter.flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, adapter.flash_attn_func(q, k, v))
    assert lse.shape == (2, 4, 40) and lse.dtype == torch.float32
    assert probabilities.shape == (0,) and probabilities.dtype == q.dtype
    offsets = torch.tensor([0, 40, 80], dtype=torch.int32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    lse = adapter.flash_attn_varlen_func(*packed, offsets, offsets, 40, 40, return_attn_probs=True)[
        1
    ]
    assert lse.shape == (4, 80)


def test_last_dimension_not_contiguous():
    q, k, v = qkv()
    strided = [x.transpose(1, 3).contiguous().transpose(1, 3).requires_grad_() for x in (q, k, v)]
    out = adapter.flash_attn_func(*strided, causal=True)
    assert torch.equal(out, adapter.flash_attn_func(q, k, v, causal=True))
    out.sum().backward()
    assert all(x.grad is not None for x in strided)


def test_dropout_follows_manual_seed():
    q, k, v = qkv()
    outs = []
    for _ in range(2):
        torch.manual_seed(11)
        outs.append(adapter.flash_attn_func(q, k, v, 0.2))
    assert torch.equal(*outs) and not torch.equal(outs[0], adapter.flash_attn_func(q, k, v))


def refused(match, function, *args, code="invalid_argument", **options):
    with pytest.raises(fs.Error, match=match) as info:
        function(*args, **options)
    assert info.value.code == code


def test_refusals():
    q, k, v = qkv()
    offsets = torch.tensor([0, 40, 80], dtype=torch.int32)
    lengths = (offsets, offsets, 40, 40)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    plain, varlen = adapter.flash_attn_func, adapter.flash_attn_varlen_func
    table = torch.zeros(2, 1, dtype=torch.int32)
    match = (
        r"^block_table: shape \(2, 1\); None here, as flash_attn_with_kvcache and .* take pages$"
    )
    refused(match, varlen, *packed, *lengths, block_table=table, code="unsupported")
    match = "^return_attn_probs: True with dropout_p = 0.1"
    refused(match, plain, q, k, v, 0.1, return_attn_probs=True, code="unsupported")
    match = "^alibi_slopes: a tensor that requires a gradient"
    slopes = torch.zeros(4, requires_grad=True)
    refused(match, plain, q, k, v, alibi_slopes=slopes, code="unsupported")
    refused("^alibi_slopes", plain, q, k, v, alibi_slopes=torch.zeros(3))
    for window in (5, (1, 2, 3), (True, 0), (0.5, 0), {2, 1}, {1: 2, 3: 4}):
        refused("^window_size: .*two integers$", plain, q, k, v, window_size=window)
    refused("^cu_seqlens_q", varlen, *packed, offsets.long(), *lengths[1:])
    match = r"^qkv: shape \(2, 40, 4, 16\); \(batch, seqlen, 3, "
    refused(match, adapter.flash_attn_qkvpacked_func, q)
    match = r"^kv: shape .*; \(seqlen, 2, num_heads, head_dim\)"
    refused(match, adapter.flash_attn_varlen_kvpacked_func, packed[0], packed[1], *lengths)


def test_switches_may_be_0_and_1():
    """As flash-attn's own are, which configurations hold as integers."""
    q, k, v = qkv()
    want = adapter.flash_attn_func(q, k, v, causal=True, deterministic=True)
    assert torch.equal(adapter.flash_attn_func(q, k, v, causal=1, deterministic=1), want)
    assert torch.equal(adapter.flash_attn_func(q, k, v, causal=0), adapter.attention(q, k, v))
    for wrong in (2, -1, 0.0, 1.0, "1"):
        with pytest.raises(fs.Error, match=r"^causal: .*; True, False, 0 or 1$"):
            adapter.flash_attn_func(q, k, v, causal=wrong)
