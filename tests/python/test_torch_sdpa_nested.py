"""Nested tensors and torch.nn.attention.varlen, which come to aten::_flash_attention_forward."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
varlen = pytest.importorskip("torch.nn.attention.varlen", reason="PyTorch 2.10 has it")

import flashsdk as fs  # noqa: E402
import flashsdk.torch as ft  # noqa: E402
import torch.nn.functional as functional  # noqa: E402
from flashsdk.integrations import torch_sdpa  # noqa: E402
from sdpa_cases import BOTH_WAYS, each_alone, jagged, nested, rows, starts  # noqa: E402
from standard_attention import assert_close, gradients  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

pytestmark = [
    BOTH_WAYS,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
sdpa = functional.scaled_dot_product_attention
QUERIES, KEYS = (5, 9, 1), (7, 3, 40)


@pytest.fixture(autouse=True)
def off_again():
    yield
    torch_sdpa.disable()


@contextlib.contextmanager
def packed_calls():
    calls = []
    with torch.profiler.profile() as profile:
        yield calls
    calls += [e.name for e in profile.events() if "_flash_attention_" in e.name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths_k", [QUERIES, KEYS], ids=["self", "cross"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"is_causal": True}], ids=str)
def test_jagged(dtype, lengths_k, options):
    if options.get("is_causal") and lengths_k is KEYS:
        pytest.skip("PyTorch has no meaning for it on a CPU")
    inputs = [rows(n, dtype=dtype) for n in (QUERIES, lengths_k, lengths_k)]
    weights = [torch.randn(inputs[0].shape, dtype=torch.float64)]
    definition = each_alone(QUERIES, lengths_k, **options)
    exact = gradients(definition, [x.double() for x in inputs], weights)
    plain = gradients(definition, inputs, [w.to(dtype) for w in weights])
    with torch_sdpa.enable(), packed_calls() as calls:
        ours = gradients(
            jagged(QUERIES, lengths_k, **options), inputs, [w.to(dtype) for w in weights]
        )
    assert calls == ["aten::_flash_attention_forward", "aten::_flash_attention_backward"]
    assert_close(ours, plain, exact)


def test_explain():
    offsets = starts(QUERIES).long()
    q = nested(rows(QUERIES), offsets)
    with torch_sdpa.enable():
        why = torch_sdpa.explain(q, q, q, is_causal=True)
        assert (
            why.taken
            and why.kernel
            == fs.ops.explain(
                *[rows(QUERIES)] * 3, *[starts(QUERIES)] * 2, 9, 9, mask=fs.Causal()
            ).kernel
        )
        heads = torch.nested.nested_tensor_from_jagged(
            torch.randn(15, 4, 20, 16), offsets
        )  # a ragged batch of heads
        assert torch_sdpa.explain(heads, heads, heads).taken
    assert "not enabled" in str(torch_sdpa.explain(q, q, q))


def test_a_ragged_batch_of_heads():
    """PyTorch calls its function of the dense tensor that is in it."""
    offsets, inputs = starts(QUERIES).long(), [torch.randn(15, 4, 20, 16) for _ in range(3)]

    def call(*x):
        q, k, v = (torch.nested.nested_tensor_from_jagged(t, offsets) for t in x)
        return (sdpa(q, k, v).values(),)

    weights = [torch.randn(15, 4, 20, 16)]
    with torch_sdpa.enable():
        got = gradients(call, inputs, weights)
        want = gradients(lambda *x: (ft.scaled_dot_product_attention(*x),), inputs, weights)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_what_stays_pytorchs():
    offsets, other = starts(QUERIES).long(), starts((5, 8, 2)).long()
    q, x = nested(rows(QUERIES), offsets), nested(rows(QUERIES), other)
    narrow = nested(rows(QUERIES, dim=12), offsets)
    double = nested(rows(QUERIES, dtype=torch.float64), offsets)
    empty = nested(rows(QUERIES), starts((5, 0, 10)).long())
    strided = torch.nested.nested_tensor([torch.randn(4, n, 16) for n in QUERIES])
    holes = torch.nested.narrow(
        torch.randn(3, 9, 4, 16), 1, torch.zeros(3, dtype=torch.long), torch.tensor(QUERIES),
        layout=torch.jagged,
    ).transpose(1, 2)  # fmt: skip
    refused = [
        ((q, x, x), {"is_causal": True}, "is_causal, with other lengths"),
        ((q, q, x), {}, "value has other lengths"),
        ((q, q, q), {"dropout_p": 0.5}, "dropout_p is 0.5"),
        ((narrow,) * 3, {}, "head_dim 12 of query"),
        ((double,) * 3, {}, "query is float64"),
        ((empty,) * 3, {}, "query has an empty sequence"),
        ((strided,) * 3, {}, "query is strided; all three jagged"),
        ((holes,) * 3, {}, "query has holes"),
    ]
    with torch_sdpa.enable():
        for given, options, reason in refused:
            why = torch_sdpa.explain(*given, **options)
            assert not why.taken and reason in str(why)
        with packed_calls() as calls:
            sdpa(narrow, narrow, narrow)
            with sdpa_kernel(SDPBackend.MATH):
                sdpa(q, q, q)
                assert "turned off here" in str(torch_sdpa.explain(q, q, q))
        assert not calls
    with packed_calls() as calls:
        sdpa(q, q, q)
    assert not calls


# ---- torch.nn.attention.varlen


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 2)], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_varlen_attn(window, compiled):
    inputs = [rows(QUERIES), rows(KEYS, 2), rows(KEYS, 2)]
    lengths = starts(QUERIES), starts(KEYS), max(QUERIES), max(KEYS)
    weights = [torch.randn(sum(QUERIES), 4, 16)]

    def theirs(q, k, v):
        return (varlen.varlen_attn(q, k, v, *lengths, window_size=window, enable_gqa=True),)

    left, right = (None if side < 0 else side for side in window)

    def ours(q, k, v):
        return (ft.varlen_attention(q, k, v, *lengths, mask=fs.SlidingWindow(left, right)),)

    with torch_sdpa.enable():
        function = torch.compile(theirs, backend="aot_eager") if compiled else theirs
        got = gradients(function, inputs, weights)
    for one, other in zip(got, gradients(ours, inputs, weights), strict=True):
        assert torch.equal(one, other)


def test_varlen_attn_that_is_not_for_our_kernels():
    """PyTorch has no kernel for a CPU to go to."""
    q, cu = rows(QUERIES), starts(QUERIES)
    used = {"seqused_k": torch.tensor(QUERIES, dtype=torch.int32)}
    with torch_sdpa.enable():
        for x, options in ((q, used), (q.double(), {})):
            with pytest.raises(NotImplementedError, match="neither flashsdk nor PyTorch"):
                varlen.varlen_attn(x, x, x, cu, cu, 9, 9, **options)
    with pytest.raises(NotImplementedError, match="CPU"):
        varlen.varlen_attn(q, q, q, cu, cu, 9, 9)


def test_the_operator_of_dense_tensors():
    """aten::_flash_attention_forward without lengths: (batch, seqlen, heads, dim)."""
    q, k, v = torch.randn(2, 30, 4, 16), torch.randn(2, 50, 2, 16), torch.randn(2, 50, 2, 16)
    want, lse = ft.attention(q, k, v, mask=fs.Causal(), return_lse=True)
    with torch_sdpa.enable():
        out, sums, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, 30, 50, 0.0, True, False
        )
    assert torch.equal(out, want) and torch.equal(sums, lse)
