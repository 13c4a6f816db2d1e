"""flashsdk.torch without the dispatcher: who takes that way, and that both give the same."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
from flashsdk import _torch_eager, _torch_ops  # noqa: E402
from flashsdk.torch import attention, varlen_attention  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_cases import block_mask, qkv, with_gradients  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_way")

CAUSAL = fs.Causal()


def everything(q, k, v):
    """out, lse, dq, dk, dv of attention with every feature whose arguments have to be kept."""
    inputs = with_gradients((q, k, v))
    slopes, bias = torch.linspace(0, 1, 4), torch.linspace(-1, 1, 70 * 70).view(1, 1, 70, 70)
    options = {"bias": bias, "alibi_slopes": slopes, "dropout_p": 0.3, "softcap": 4.0}
    out, lse = attention(*inputs, mask=block_mask(band=CAUSAL), **options, return_lse=True)
    return out, lse, *torch.autograd.grad(out.square().sum() + lse[:, :, :32].sum(), inputs)


@pytest.mark.parametrize("lends_any", [False, _torch_eager._LENDS_ANY])
def test_ordinary_calls_do_without_the_dispatcher(monkeypatch, lends_any):
    def dispatched(*_):
        raise AssertionError("an operator was called")

    monkeypatch.setattr(
        _torch_ops, "_mha", replace(_torch_ops._mha, forward=dispatched, backward=dispatched)
    )
    monkeypatch.setattr(_torch_eager, "_LENDS_ANY", lends_any)
    q, k, v = qkv()
    everything(q, k, v)
    with torch.no_grad():
        attention(*with_gradients((q, k, v)))
    attention(torch.nn.Parameter(q), k, v).sum().backward()
    with TorchDispatchMode(), pytest.raises(AssertionError, match="an operator"):
        attention(q, k, v)


class Operators(TorchDispatchMode):
    """Their names, as those see them who look on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_both_ways_are_the_same_to_those_who_look_on():
    inputs = qkv()
    torch.manual_seed(7)
    want = everything(*inputs)
    torch.manual_seed(7)
    with Operators() as operators:
        seen = everything(*inputs)
    assert {"flashsdk.mha_fwd.default", "flashsdk.mha_bwd.default"} <= set(operators.seen)
    torch.manual_seed(7)
    with torch.profiler.profile() as profiler:
        profiled = everything(*inputs)
    names = {event.key for event in profiler.key_averages()}
    assert {"flashsdk::mha_fwd", "flashsdk::mha_bwd"} <= names
    for results in (seen, profiled):
        assert all(map(torch.equal, results, want))


def test_packed_sequences_the_short_way_and_the_long_one():
    q, k, v = with_gradients(x[0] for x in qkv())
    offsets = torch.tensor([0, 30, 30, 70], dtype=torch.int32)

    def gradients():
        out = varlen_attention(q, k, v, offsets, offsets, 40, 40, mask=CAUSAL)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    want = gradients()
    with Operators() as operators:
        seen = gradients()
    assert "flashsdk.mha_varlen_bwd.default" in operators.seen
    assert all(map(torch.equal, seen, want))


def test_saved_tensors_pass_their_hooks():
    """As they do for offloading and activation checkpointing: all that backward reads."""
    kept = []
    q, k, v = with_gradients(qkv())
    bias, slopes = torch.zeros(1, 1, 70, 70), torch.ones(4)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = attention(q, k, v, bias=bias, alibi_slopes=slopes)
    given = {x.data_ptr() for x in (q, k, v, out, bias, slopes)}
    assert given < {x.data_ptr() for x in kept}
    assert len(kept) == 7  # lse
    out = attention(q, k, v, bias=bias, alibi_slopes=slopes)
    bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("batch", [1, 3])
def test_batches_of_gradients(batch):
    inputs = with_gradients(qkv())
    out = attention(*inputs, mask=CAUSAL)
    douts = torch.randn(batch, *out.shape)
    batched = torch.autograd.grad(out, inputs, douts, is_grads_batched=True, retain_graph=True)
    looped = [torch.autograd.grad(out, inputs, dout, retain_graph=True) for dout in douts]
    for a, b in zip(batched, zip(*looped, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b))


def test_vectorized_jacobian():
    q, k, v = qkv(batch=1, seqlen_q=3, heads=1, dim=8)

    def function(q):
        return attention(q, k, v)

    want = torch.autograd.functional.jacobian(function, q)
    got = torch.autograd.functional.jacobian(function, q, vectorize=True)
    torch.testing.assert_close(got, want)


def test_gradients_that_nobody_has_written():
    inputs = with_gradients(qkv())
    out = attention(*inputs)
    for x in torch.autograd.grad(out, inputs, torch._efficientzerotensor(out.shape)):
        assert x.shape == inputs[0].shape and not x.any()


def test_functional_tensors():
    """Those of C++: no subclass, but what they wrap has the values."""
    q, k, v = qkv()
    want = attention(q, k, v)
    wrapped = [torch._to_functional_tensor(x) for x in (q, k, v)]
    out = attention(*wrapped)
    torch._sync(out)
    assert torch.equal(torch._from_functional_tensor(out), want)


def test_tracers_that_look_on_before_autograd():
    """They set their mode aside while a function runs, and a key alone says that they are there."""
    q, k, v = qkv()
    graph = make_fx(lambda *x: attention(*x), pre_dispatch=True)(q, k, v)
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets[0] == "flashsdk.mha_fwd.default"
    assert torch.equal(graph(k, v, q), attention(k, v, q))


OLD_TORCH = """
import torch
del torch.Tensor.__dlpack_c_exchange_api__  # as before it had one
import flashsdk as fs
from flashsdk.torch import attention
from torch.utils._python_dispatch import TorchDispatchMode

class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

q, k, v = torch.randn(3, 1, 20, 2, 16).unbind()
constants = {"bias": torch.randn(1, 2, 20, 20), "alibi_slopes": torch.rand(2)}

def results(recorded):
    given = {name: x.clone().requires_grad_(recorded) for name, x in constants.items()}
    with torch.no_grad():
        alone = attention(q, k, v, **given)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    kept = {name: x.clone() for name, x in constants.items()}
    out, lse = attention(*inputs, **kept, return_lse=True)
    for x in kept.values():
        x.requires_grad_(recorded)  # after the forward, which would refuse it
    grads = [torch.ones_like(x, requires_grad=recorded) for x in (out, lse)]
    return alone, out, *torch.autograd.grad((out, lse), inputs, grads)

want = results(False)
got = [results(True)]
with Nothing():
    got.append(results(True))
print(all(torch.equal(a, b) for way in got for a, b in zip(way, want, strict=True)))
"""


@pytest.mark.skipif(
    not _torch_eager._LENDS_ANY, reason=f"PyTorch {torch.__version__} is such a one by itself"
)
def test_tensors_that_require_a_gradient_where_dlpack_refuses_them(torch_way):
    env = {**os.environ, "FLASHSDK_TORCH_NATIVE": "" if torch_way == "native" else "0"}
    command = [sys.executable, "-c", OLD_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout == "True\n", done.stderr


def test_both_ways_save_the_same():
    """Checkpointing compares what a forward saved with what the repeated one does."""
    batches = with_gradients(qkv())
    packed = with_gradients(x[0] for x in qkv())
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32)
    bias, slopes = torch.zeros(1, 1, 70, 70), torch.ones(4)

    def saved(watch):
        kept = []
        torch.manual_seed(7)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            with watch():
                attention(*batches)
                attention(*batches, mask=block_mask(band=CAUSAL), bias=bias, dropout_p=0.3)
                attention(*batches, alibi_slopes=slopes, dropout_p=0.3, seed=2**64 - 1)
                lengths = offsets, offsets + 0, 40, 40
                varlen_attention(*packed, *lengths, alibi_slopes=slopes, dropout_p=0.3)
        return kept

    ordinary = saved(contextlib.nullcontext)
    for watch in (Operators, torch.profiler.profile):
        watched = saved(watch)
        assert len(watched) == len(ordinary)
        assert all(map(torch.equal, watched, ordinary))


@pytest.mark.parametrize("options", [{"dropout_p": 0.3}, {"mask": block_mask()}], ids=list)
def test_checkpointing_with_a_profiler_round_the_forward_alone(options):
    inputs = with_gradients(qkv())

    def run(*x):
        return attention(*x, **options)

    torch.manual_seed(5)
    want = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    torch.manual_seed(5)
    with torch.profiler.profile():
        out = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.square().sum(), inputs), want, strict=True):
        assert torch.equal(a, b)
