"""Sinks, used lengths, pages and splits through flashsdk.torch."""

import flashsdk as fs
import numpy as np
import pytest
from cases import assert_same_bits
from flashsdk._testing import reference

torch = pytest.importorskip("torch")

import flashsdk.torch as adapter  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch_cases import qkv, with_gradients  # noqa: E402

USED = {
    "seqused_q": torch.tensor([70, 9], dtype=torch.int32),
    "seqused_k": torch.tensor([33, 70], dtype=torch.int32),
}


def sink_of(heads=4):
    return torch.linspace(-1, 1, heads).requires_grad_()


def test_gradients_are_those_of_the_definition():
    q, k, v = with_gradients(qkv(heads_kv=2))
    sink = sink_of()
    out, lse = adapter.attention(q, k, v, sink=sink, mask=fs.Causal(), return_lse=True, **USED)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dlse[1, :, 9:] = 0  # of rows that are not used, whose lse is -inf
    got = torch.autograd.grad((out, lse), (q, k, v, sink), (dout, dlse))
    want = reference.backward(
        *(x.detach().numpy() for x in (dout, q, k, v)), dlse=dlse.numpy(), mask=fs.Causal(),
        sink=sink.detach().numpy(), **{name: x.numpy() for name, x in USED.items()},
    )  # fmt: skip
    for ours, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(ours.numpy(), exact, rtol=1e-4, atol=1e-5)


def test_packed_sequences_with_a_sink():
    q, k, v = (x[0].requires_grad_() for x in qkv(batch=1))
    offsets, sink = torch.tensor([0, 20, 70], dtype=torch.int32), sink_of()
    out = adapter.varlen_attention(q, k, v, offsets, offsets, 50, 50, sink=sink, mask=fs.Causal())
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v, sink), dout)
    arrays = (x.detach().numpy() for x in (dout, q, k, v))
    want = reference.varlen_backward(
        *arrays, offsets.numpy(), offsets.numpy(), mask=fs.Causal(), sink=sink.detach().numpy()
    )
    for ours, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(ours.numpy(), exact, rtol=1e-4, atol=1e-5)


def test_the_bits_are_those_of_numpy():
    q, k, v = qkv(heads_kv=2)
    more = {"sink": sink_of().detach(), "num_splits": 1, **USED}
    got = adapter.attention(q, k, v, return_lse=True, **more)
    arrays = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in more.items()}
    want = fs.mha_fwd(*(x.numpy() for x in (q, k, v)), **arrays)
    assert_same_bits([x.numpy() for x in got], want)
    through_any = fs.attention(q, k, v, return_lse=True, **more)
    assert_same_bits([x.numpy() for x in through_any], want)
    operator = torch.ops.flashsdk.attention_fwd.default
    with torch.profiler.profile() as profile:  # which looks on, so that the operator is called
        watched = adapter.attention(q, k, v, return_lse=True, **more)
    assert any(event.name == operator.name() for event in profile.events())
    assert_same_bits([x.numpy() for x in watched], want)


def test_pages():
    k, v = torch.randn(2, 6, 16, 2, 32)
    q, table = torch.randn(2, 1, 4, 32), torch.tensor([[5, 0], [1, 3]], dtype=torch.int32)
    used = torch.tensor([20, 32], dtype=torch.int32)
    pages = {"seqused_k": used, "block_table": table}
    got = adapter.attention(q, k, v, **pages)
    whole = (x[table.long()].reshape(2, 32, 2, 32) for x in (k, v))
    assert torch.equal(got, adapter.attention(q, *whole, seqused_k=used))
    q.requires_grad_()
    with pytest.raises(fs.Unsupported, match=r"^block_table: given; none, as pages have no backwa"):
        adapter.attention(q, k, v, **pages)
    with torch.no_grad():
        assert torch.equal(adapter.attention(q, k, v, **pages), got)


def options():
    q, k, v = with_gradients(qkv(seqlen_q=20))
    lengths = torch.tensor([3, 20], dtype=torch.int32)
    more = (sink_of(), lengths, lengths, None, None, None, 1, None, None, 0, 0)
    return q, k, v, (*more, None, None, None, None, [], None, 0.0, 0.0, False, "")


def test_opcheck():
    q, k, v, rest = options()
    torch.library.opcheck(torch.ops.flashsdk.attention_fwd.default, (q, k, v, *rest))
    q, k, v, *rest = (x.detach() if isinstance(x, torch.Tensor) else x for x in (q, k, v, *rest))
    out, lse = torch.ops.flashsdk.attention_fwd(q, k, v, *rest)
    arguments = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *rest)
    torch.library.opcheck(torch.ops.flashsdk.attention_bwd.default, arguments)


def test_compile():
    """One graph for every step of a cache: lengths are tensors."""

    def step(q, k, v, used, sink):
        return adapter.attention(q, k, v, mask=fs.Causal(), seqused_k=used, sink=sink)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    q, k, v = with_gradients(qkv(seqlen_q=1, seqlen_k=70, heads_kv=2))
    sink = sink_of()
    for used in ([1, 5], [2, 6], [70, 0]):
        lengths = torch.tensor(used, dtype=torch.int32)
        results = []
        for run in (step, compiled):
            out = run(q, k, v, lengths, sink)
            gradients = torch.autograd.grad(out.square().sum(), (q, k, v, sink))
            results.append((out, *gradients))
        for ours, eager in zip(*results, strict=True):
            assert torch.equal(ours, eager)
    assert counter.frame_count == 1


def test_vmap():
    q, k, v = qkv(batch=6)
    q, k, v = (x.unflatten(0, (3, 2)) for x in (q, k, v))
    used = torch.tensor([[3, 70], [0, 1], [50, 6]], dtype=torch.int32)
    mapped = torch.vmap(lambda q, k, v, n: adapter.attention(q, k, v, seqused_k=n))(q, k, v, used)
    each = [adapter.attention(*x, seqused_k=n) for *x, n in zip(q, k, v, used, strict=True)]
    assert torch.equal(mapped, torch.stack(each))


def test_transforms_of_a_sink():
    q, k, v = qkv()
    weights, sinks = torch.linspace(-1, 1, 32), torch.stack([sink_of().detach(), torch.ones(4)])

    def loss(sink):
        return (adapter.attention(q, k, v, sink=sink, **USED) * weights).sum()

    got = torch.vmap(torch.func.grad(loss))(sinks)
    for sink, gradient in zip(sinks, got, strict=True):
        leaf = sink.clone().requires_grad_()
        (want,) = torch.autograd.grad(loss(leaf), leaf)
        assert want.any()
        assert torch.equal(gradient, want)


def test_explain():
    q, k, v = qkv(seqlen_q=1, seqlen_k=9, heads_kv=2)
    why = adapter.explain(adapter.attention, q, k, v, seqused_k=torch.zeros(2, dtype=torch.int32))
    assert why.packing


ERRORS = {
    "no tensor": ({"seqused_k": [1, 2]}, "seqused_k: [1, 2]; a tensor"),
    "above": (
        {"seqused_k": torch.tensor([71, 0], dtype=torch.int32)},
        "seqused_k: 71 of sequence 0; 0 to seqlen_k, which is 70",
    ),
    "dtype": ({"sink": torch.zeros(4).double()}, "sink: dtype float64; float32"),
    "splits": ({"num_splits": 0}, "num_splits: 0; an integer from 1 to 1073741824, or None"),
}


@pytest.mark.parametrize(("given", "line"), ERRORS.values(), ids=ERRORS)
def test_errors(given, line):
    q, k, v = qkv()
    with pytest.raises(fs.Error) as caught:
        adapter.attention(q, k, v, **given)
    assert str(caught.value) == line


# ---- merge


def parts_of(q, k, v, ends, **keywords):
    """out and lse of each part of the keys."""
    results = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        part = (x[:, begin:end] for x in (k, v))
        results.append(adapter.attention(q, *part, return_lse=True, **keywords))
    return zip(*results, strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge(dtype):
    q, k, v = with_gradients(qkv(dtype=dtype, heads_kv=2))
    whole = adapter.attention(q, k, v, return_lse=True)
    merged = fs.merge(*parts_of(q, k, v, [11, 11, 40, 70]))
    tolerance = dict.fromkeys(("rtol", "atol"), 1e-5 if dtype == torch.float32 else 2e-2)
    grads = []
    for out, lse in (whole, merged):
        assert out.dtype == dtype
        torch.manual_seed(0)
        given = (torch.randn_like(out), torch.randn_like(lse))
        grads.append(torch.autograd.grad((out, lse), (q, k, v), given))
    for ours, exact in zip((*merged, *grads[1]), (*whole, *grads[0]), strict=True):
        torch.testing.assert_close(ours, exact, **tolerance)


def test_merge_of_rows_that_see_nothing():
    q, k, v = with_gradients(qkv(seqlen_q=3))
    outs, lses = map(list, parts_of(q, k, v, [20, 70]))
    blind = adapter.attention(q, k[:, :0], v[:, :0], return_lse=True)
    out, lse = fs.merge([blind[0], *outs], [blind[1], *lses])
    torch.testing.assert_close(out, adapter.attention(q, k, v))
    out, lse = fs.merge([blind[0]] * 2, [blind[1]] * 2)
    assert not out.any()
    assert (lse == -torch.inf).all()
    for x in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not x.any()


def test_merge_compiles():
    q, k, v = qkv()
    outs, lses = map(list, parts_of(q, k, v, [20, 70]))
    compiled = torch.compile(fs.merge, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(compiled(outs, lses), fs.merge(outs, lses), strict=True):
        torch.testing.assert_close(ours, eager)
