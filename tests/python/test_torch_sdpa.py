"""scaled_dot_product_attention: what torch.nn.functional's gives, and what is refused."""

import contextlib
import inspect
import itertools

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
import flashsdk.torch as adapter  # noqa: E402
import torch.nn.functional as functional  # noqa: E402
from flashsdk import _torch_eager  # noqa: E402
from flashsdk.torch import _sdpa, scaled_dot_product_attention  # noqa: E402
from standard_attention import check  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_way")


def qkv(*batch, heads=4, heads_kv=None, seqlen_q=40, seqlen_k=50, dim=16, dim_v=16):
    heads_kv = heads_kv or heads
    shapes = ((heads, seqlen_q, dim), (heads_kv, seqlen_k, dim), (heads_kv, seqlen_k, dim_v))
    return [torch.randn(*batch, *shape) for shape in shapes]


def same_as_torch(inputs, *args, dtype=torch.float32, **options):
    """Outputs and gradients, by the error bound, from torch's plain implementation in float64."""

    def theirs(*x):
        rest = [_like(a, x[0]) for a in args]
        named = {name: _like(a, x[0]) for name, a in options.items()}
        with sdpa_kernel(SDPBackend.MATH), _in_its_own_dtype():
            return (functional.scaled_dot_product_attention(*x, *rest, **named),)

    def ours(*x):
        return (scaled_dot_product_attention(*x, *args, **options),)

    check(ours, [x.to(dtype) for x in inputs], theirs)


@contextlib.contextmanager
def _in_its_own_dtype():
    """Torch else computes bfloat16 and float16 in float32, which is no yardstick for them."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # CPU's as well
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _like(x, q):
    is_bias = isinstance(x, torch.Tensor) and type(x) is torch.Tensor and x.is_floating_point()
    return x.to(q.dtype) if is_bias else x


def test_signature():
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    signature = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
    assert signature == (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, "
        "enable_gqa=False)"
    )
    documented = " ".join(functional.scaled_dot_product_attention.__doc__.split())
    assert f"scaled_dot_product_attention{signature}" in documented


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_dtypes(dtype, is_causal):
    same_as_torch(qkv(2), dtype=dtype, is_causal=is_causal)


@pytest.mark.parametrize("batch", [(), (2,), (1,), (2, 3), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_leading_dimensions(batch, is_causal):
    same_as_torch(qkv(*batch, dim_v=8), is_causal=is_causal)


def test_without_heads():
    q, k, v = (x[0] for x in qkv())
    same_as_torch((q, k, v))
    assert scaled_dot_product_attention(q, k, v).shape == (40, 16)


@pytest.mark.parametrize("ranks", [r for r in itertools.product((2, 3, 4), repeat=3)], ids=str)
def test_ranks_may_differ(ranks):
    """(seqlen, head_dim), (1, seqlen, head_dim), (2, 1, seqlen, head_dim)"""
    shapes = [(2, 1)[4 - rank :] for rank in ranks]
    x = [torch.randn(*s, n, 16) for s, n in zip(shapes, (40, 50, 50), strict=True)]
    same_as_torch(x)


@pytest.mark.parametrize(
    "heads", [(1, 3, 3), (3, 1, 1), (3, 3, 1), (3, 1, 3), (1, 3, 1), (1, 1, 3)], ids=str
)
def test_heads_broadcast(heads):
    for batch in ((), (2,)):
        lengths = zip(heads, (40, 50, 50), strict=True)
        same_as_torch([torch.randn(*batch, h, n, 16) for h, n in lengths], is_causal=True)
    same_as_torch([torch.randn(40, 16), torch.randn(3, 50, 16), torch.randn(50, 16)])


def test_leading_dimensions_broadcast():
    q, k, v = qkv(2, 3)
    same_as_torch((q, k[:1], v[:, :1]))
    same_as_torch((q, k[0], v[0]))


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 50), (50, 1), (50, 40)])
def test_causal_is_top_left(seqlen_q, seqlen_k):
    same_as_torch(qkv(2, seqlen_q=seqlen_q, seqlen_k=seqlen_k), is_causal=True)


MASK_SHAPES = [
    shape[drop:]
    for shape in itertools.product((2, 1), (4, 1), (40, 1), (50, 1))
    for drop in range(4)
    if all(n == 1 for n in shape[:drop])
]


@pytest.mark.parametrize("shape", [*MASK_SHAPES, (50,)], ids=str)
def test_boolean_masks(shape):
    mask = torch.rand(shape) < 0.7
    mask[..., :2] = True  # every query sees a key: releases of torch differ otherwise
    same_as_torch(qkv(2), mask)


@pytest.mark.parametrize(
    "shape", [(2, 4, 40, 50), (1, 4, 1, 50), (40, 50), (50,), (40, 1)], ids=str
)
def test_float_masks(shape):
    same_as_torch(qkv(2), torch.randn(shape), scale=0.3)


@pytest.mark.parametrize("shape", [(2, 1, 40, 1), (1, 4, 1, 1)], ids=str)
def test_masks_expanded_over_keys(shape):
    """As one for padded queries is: without a copy of the size of the scores."""
    mask = torch.randn(shape).expand(2, 4, 40, 50)
    same_as_torch(qkv(2), mask)
    bias = _sdpa._bias(mask, torch.Size([2]), (4, 40, 50))
    assert bias.untyped_storage().nbytes() <= 2 * 4 * 40 * bias.element_size()


@pytest.mark.parametrize("shape", [(2, 3, 4, 40, 50), (3, 1, 40, 50), (2, 1, 1, 1, 50)], ids=str)
def test_masks_with_more_dimensions(shape):
    same_as_torch(qkv(2, 3), torch.randn(shape))


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_bias(bias):
    q, k, v = qkv(2)
    expected = functional.scaled_dot_product_attention(q, k, v, bias(40, 50))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, bias(40, 50)), expected)


def test_expanded_and_transposed_masks():
    q, k, v = qkv(2)
    for mask in (torch.randn(40, 1).expand(40, 50), torch.randn(50, 40).T):
        expected = functional.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), expected)


def test_grouped_heads():
    same_as_torch(qkv(2, heads=6, heads_kv=2), enable_gqa=True)
    same_as_torch(qkv(2, heads=6, heads_kv=1), enable_gqa=True, is_causal=True)
    same_as_torch(qkv(2), enable_gqa=True)


def test_a_query_that_sees_nothing():
    q, k, v = (x.requires_grad_() for x in qkv(2))
    mask = torch.ones(40, 50, dtype=torch.bool)
    mask[3] = False
    out = scaled_dot_product_attention(q, k, v, mask)
    assert not out[:, :, 3].any() and out.isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()
    infinite = torch.zeros(40, 50).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, infinite), out)


def test_layout_is_that_of_a_transformer():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, seqlen_k=40))
    out = scaled_dot_product_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()  # so that merging the heads copies nothing


def test_last_dimension_not_contiguous():
    inputs = qkv(2)
    strided = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs]
    assert torch.equal(
        scaled_dot_product_attention(*strided), scaled_dot_product_attention(*inputs)
    )


def test_dropout():
    q, k, v = qkv(2)
    outs = []
    for _ in range(2):
        torch.manual_seed(4)
        outs.append(scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert torch.equal(*outs) and not torch.equal(outs[0], scaled_dot_product_attention(q, k, v))


def test_swapped_under_a_model(monkeypatch):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train()
    x = torch.randn(2, 20, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(20)
    expected = layer(x, src_mask=mask)
    calls = []

    def swapped(*args, **options):
        calls.append(options)
        return scaled_dot_product_attention(*args, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", swapped)
    torch.testing.assert_close(layer(x, src_mask=mask), expected)
    assert calls


def refused(match, *inputs, code="invalid_argument", **options):
    with pytest.raises(fs.Error, match=match) as info:
        scaled_dot_product_attention(*inputs, **options)
    assert code in (None, info.value.code)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_refusals():
    q, k, v = qkv(2)
    mask = torch.zeros(40, 50)
    refused("^is_causal: True with an attn_mask", q, k, v, attn_mask=mask, is_causal=True)
    refused("^is_causal: True with an attn_mask", q, k, v, attn_mask=causal_upper_left(40, 50),
            is_causal=True)  # fmt: skip
    refused("^attn_mask: a tensor that requires a gradient", q, k, v, code="unsupported",
            attn_mask=mask.clone().requires_grad_())  # fmt: skip
    refused(r"^attn_mask: shape \(40, 40\)", q, k, v, attn_mask=mask[:, :40])
    refused(r"^attn_mask: shape \(3, 1, 40, 50\)", q, k, v, attn_mask=mask.expand(3, 1, 40, 50))
    refused(r"^attn_mask: shape \(1, 1, 1, 40, 50\)", q, k, v, attn_mask=mask[None, None, None])
    refused(r"^attn_mask: shape \(30, 50\)", q, k, v, attn_mask=causal_lower_right(30, 50))
    refused("^key: 2 heads; query's 4, or enable_gqa", q, k[:, :2], v[:, :2])
    refused("^key: 3 heads; a divisor of query's 4", q, k[:, :3], v[:, :3], enable_gqa=True)
    refused("^value: 2 heads; 4, or 1", q, k, v[:, :2])
    refused(r"^key: shape \(2, 4, 50, 8\); \(..., head_dim 16\)", q, k[..., :8], v)
    refused(r"^value: shape \(2, 4, 9, 16\); \(..., seqlen_k 50, head_dim_v\)", q, k, v[:, :, :9])
    refused(
        r"^key: shape \(3, 4, 50, 16\); leading dim.* with \(2,\)", q, k[:1].expand(3, 4, 50, 16), v
    )
    refused(r"^value: shape \(3, 4, 50, 16\); leading dim", q, k, v[:1].expand(3, 4, 50, 16))
    refused("^key: dtype float16; float32, the dtype of query", q, k.half(), v)
    refused("^query: dtype float64", q.double(), k.double(), v.double())
    refused("^attn_mask: dtype int32; float32", q, k, v, mask.int())
    refused("^scale: nan; a finite number", q, k, v, scale=float("nan"))
    wide = torch.zeros(1, 1, 4, 600)
    refused("^query: head_dim 600; 1 to 576", wide, wide, wide, code="unsupported")
    refused(r"^query: shape \(16,\)", q[0, 0, 0], k, v)
    refused("^dropout_p", q, k, v, dropout_p=1.5)
    nested = torch.nested.nested_tensor([torch.randn(4, 5, 16), torch.randn(4, 7, 16)])
    refused("^query: a nested tensor", nested, nested, nested, code="unsupported")


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 5, 8), (0, 3, 5, 8)], ids=str)
def test_nothing_to_attend(shape):
    """The first dimension of three is torch's batch."""
    x = torch.empty(shape, requires_grad=True)
    out = scaled_dot_product_attention(x, x, x)
    assert out.shape == shape  # PyTorch's own may divide by no heads, which ends the process
    out.sum().backward()
    assert x.grad.shape == shape
    for mask in (torch.ones(5, 5, dtype=torch.bool), torch.zeros(*shape[:-2], 5, 5)):
        options = {"attn_mask": mask, "dropout_p": 0.5, "scale": 0.3}
        assert scaled_dot_product_attention(x, x, x, **options).shape == out.shape
    assert scaled_dot_product_attention(x, x, x, is_causal=True).shape == out.shape
    wide = x.detach()[..., None].expand(*shape, 3).flatten(-2)  # value's head_dim is out's
    assert scaled_dot_product_attention(x, x, wide).shape == (*shape[:-1], 24)


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 5, 8), (0, 3, 5, 8)], ids=str)
def test_refusals_where_there_is_nothing_to_attend(shape):
    """As anywhere else: the size of a batch is no reason to take what the next one would not."""
    x = torch.empty(shape)
    refused("^scale: 'a'; a number", x, x, x, scale="a")
    refused("^scale: nan; a finite number", x, x, x, scale=float("nan"))
    refused("^dropout_p: 2; 0 <= dropout_p < 1", x, x, x, dropout_p=2)
    refused("^is_causal: 'no'; True or False", x, x, x, is_causal="no")
    refused("^attn_mask: 'a'; a tensor", x, x, x, attn_mask="a")
    refused(r"^attn_mask: shape \(4, 4\); one that broadcasts", x, x, x, torch.zeros(4, 4))
    refused("^attn_mask: dtype int32", x, x, x, torch.zeros(5, 5, dtype=torch.int32))
    refused("^is_causal: True with an attn_mask", x, x, x, torch.zeros(5, 5), is_causal=True)
    refused("^query: dtype float64", x.double(), x.double(), x.double())


# ---- masks that repeat along leading dimensions


LEADING = [
    ((2, 3), (2, 1)),
    ((2, 3), (1, 3)),
    ((2, 3), (1, 1)),
    ((2, 3), (3,)),
    ((2, 3), (2, 3)),
    ((2, 3, 4), (2, 1, 4)),
    ((2, 3, 4), (1, 3, 1)),
    ((3, 1), (3, 1)),
    ((2, 0), (2, 1)),
]


@pytest.mark.parametrize("batch, leading", LEADING)
@pytest.mark.parametrize("expanded", [False, True])
def test_mask_repeats_along_leading_dimensions(batch, leading, expanded):
    mask = torch.randn(*leading, 1, 10, 12)
    if expanded:
        mask = mask.expand(*batch, 2, 10, 12)
    inputs = qkv(*batch, heads=2, seqlen_q=10, seqlen_k=12, dim=8, dim_v=8)
    if 0 in batch:
        assert scaled_dot_product_attention(*inputs, mask).shape == (*batch, 2, 10, 8)
    else:
        same_as_torch(inputs, mask)
        same_as_torch([inputs[0], inputs[1][:1], inputs[2]], mask > 0)


@pytest.mark.parametrize("batch, leading", LEADING)
@pytest.mark.parametrize("expanded", [False, True])
def test_mask_is_not_copied(batch, leading, expanded, monkeypatch):
    """Not even once where it repeats (case 3): what attention gets is the caller's memory."""
    monkeypatch.setattr(_sdpa, "native", _torch_eager.InPython)
    given = []

    def attend(*tensors, bias=None, **options):
        given.append(bias)
        return original(*tensors, bias=bias, **options)

    original = _sdpa.attend
    monkeypatch.setattr(_sdpa, "attend", attend)
    mask = torch.randn(*leading, 1, 10, 12)
    wide = mask.expand(*batch, 2, 10, 12) if expanded else mask
    inputs = qkv(*batch, heads=2, seqlen_q=10, seqlen_k=12, dim=8, dim_v=8)
    scaled_dot_product_attention(*inputs, wide)
    assert given
    if 0 not in batch:
        begin, end = mask.data_ptr(), mask.data_ptr() + mask.nbytes
        assert all(begin <= bias.data_ptr() < end for bias in given)


# ---- who looks on


class Named(torch.Tensor):
    """A subclass that does nothing of its own."""


CALLS = {
    "scaled_dot_product_attention": lambda q, k, v: scaled_dot_product_attention(q, k, v),
    "attention": lambda q, k, v: adapter.attention(q, k, v, mask=fs.Causal()),
    "varlen_attention": lambda q, k, v: adapter.varlen_attention(
        *(x.flatten(0, 1) for x in (q, k, v)), *[torch.tensor([0, 40, 80]).int()] * 2, 40, 40
    ),
    "flash_attn_func": lambda q, k, v: adapter.flash_attn_func(q, k, v, causal=True),
    "flash_attn_qkvpacked_func": lambda q, k, v: adapter.flash_attn_qkvpacked_func(
        torch.stack((q, k, v), 2)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_function(name):
    """Modes, subclasses and torch.fx see our functions, as they see PyTorch's (case 21)."""
    inputs = [x.transpose(1, 2) for x in qkv(2, seqlen_k=40)]
    want = CALLS[name](*inputs)
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        assert torch.equal(CALLS[name](*inputs), want)
    assert getattr(adapter, name) in seen

    out = CALLS[name](*(x.as_subclass(Named) for x in inputs))
    assert type(out) is Named and torch.equal(out, want)

    def program(q, k, v):
        return CALLS[name](q, k, v) * 1

    traced = torch.fx.symbolic_trace(program)
    assert getattr(adapter, name) in [node.target for node in traced.graph.nodes]
    assert torch.equal(traced(*inputs), want)


def test_causal_bias_made_for_the_longest_sequence():
    """Of the upper left one PyTorch asks no shape (case 22)."""
    for n, m in ((5, 5), (5, 9), (12, 7)):
        inputs = qkv(2, seqlen_q=n, seqlen_k=m)
        want = scaled_dot_product_attention(*inputs, is_causal=True)
        out = scaled_dot_product_attention(*inputs, causal_upper_left(9, 9))
        assert type(out) is torch.Tensor and torch.equal(out, want)


def test_layout_of_the_result():
    """Heads of a token join without a copy, whatever query's strides are (case 24)."""
    for turn in (False, True):
        q, k, v = qkv(2)
        if turn:
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
        out = scaled_dot_product_attention(q, k, v)
        assert out.transpose(1, 2).is_contiguous()


def test_math_is_pytorchs():
    """What sdpa_kernel asks for, with its second derivative (case 23)."""
    inputs = [
        x.double().requires_grad_() for x in qkv(1, heads=1, seqlen_q=3, seqlen_k=4, dim=4, dim_v=4)
    ]
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(scaled_dot_product_attention, inputs)
        x = [t.detach().float() for t in inputs]
        want = functional.scaled_dot_product_attention(*x)
        assert torch.equal(scaled_dot_product_attention(*x), want)
        compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="eager")
        assert torch.equal(compiled(*x), want)
    refused = pytest.raises(fs.Error, match=r"^query: dtype float64; ")
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]), refused:
        scaled_dot_product_attention(*inputs)
