"""Dropout of flashsdk.torch: seeds that are tensors, and that the backward, whatever computes it
again, drops what the forward dropped."""

import contextlib
import functools
import itertools
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
import torch._functorch.config as functorch_config  # noqa: E402
from flashsdk.torch import (  # noqa: E402
    attention,
    flash_attn_func,
    scaled_dot_product_attention,
    varlen_attention,
)
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch_cases import TORCH, qkv, with_gradients  # noqa: E402

ONE = torch.tensor([7, 2**40 + 9])
EACH = torch.tensor([[7, 0], [-1, 2**40 + 9]])  # -1 is 2^64 - 1
P = {"dropout_p": 0.4}


def lengths():
    offsets = torch.tensor([0, 40, 70], dtype=torch.int32)
    return offsets, offsets, 40, 40


def batched(q, k, v, seed):
    return attention(q, k, v, seed=seed, **P)


def packed(q, k, v, seed):
    q, k, v = (x[0] for x in (q, k, v))
    return varlen_attention(q, k, v, *lengths(), seed=seed, **P)


def core(q, k, v, seed):
    """out, dq, dk and dv of the functions without autograd."""
    out, lse = fs.mha_fwd(q, k, v, seed=seed, **P)
    return out, *fs.mha_bwd(torch.ones_like(out), q, k, v, out, lse, seed=seed, **P)


def core_packed(q, k, v, seed):
    q, k, v = (x[0] for x in (q, k, v))
    rest = lengths()
    out, lse = fs.mha_varlen_fwd(q, k, v, *rest, seed=seed, **P)
    x = (torch.ones_like(out), q, k, v, out, lse)
    return out, *fs.mha_varlen_bwd(*x, *rest, seed=seed, **P)


CALLS = {"batched": (batched, core), "packed": (packed, core_packed)}
seeds = pytest.mark.parametrize("seed", [ONE, EACH], ids=["one", "each"])
calls = pytest.mark.parametrize("call, want", CALLS.values(), ids=CALLS)


def results(call, inputs, seed):
    """out, dq, dk and dv, of packed ones without the batch."""
    leaves = with_gradients(inputs)
    out = call(*leaves, seed)
    out.backward(torch.ones_like(out))
    return out, *(x.grad if out.dim() == 4 else x.grad[0] for x in leaves)


def same(a, b):
    assert all(map(torch.equal, a, b))


@pytest.fixture
def fresh():
    """Nothing compiled, and nothing that another process has."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


# ---- seeds that are tensors


@calls
@seeds
@pytest.mark.usefixtures("torch_way")
def test_a_tensor_is_the_seed_of_the_core(call, want, seed):
    inputs = qkv()
    same(results(call, inputs, seed), want(*inputs, seed))
    with torch.no_grad():
        same([call(*inputs, seed)], want(*inputs, seed)[:1])


@calls
@seeds
@pytest.mark.usefixtures("torch_way", "fresh")
def test_unsigned_numbers_are_the_same(call, want, seed):
    inputs, unsigned = qkv(), seed.view(torch.uint64)
    for way in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        same(results(way, inputs, unsigned), want(*inputs, seed))


@pytest.mark.usefixtures("torch_way")
@pytest.mark.parametrize(
    "seed, line",
    [
        (torch.tensor([1, 2, 3]), "seed: shape (3,); (seed and offset = 2)"),
        (torch.zeros(3, 2).long(), "seed: shape (3, 2); (batch 2, seed and offset = 2)"),
        (torch.zeros(2), "seed: dtype float32; int64 or uint64"),
        (torch.tensor([5]), "seed: shape (1,); an integer"),
        (torch.tensor(5), "seed: shape (); an integer"),
        (torch.zeros(2).long().to("meta"), "seed: on meta; cpu, where q is"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_other_tensors_are_refused(seed, line, requires_grad):
    inputs = with_gradients(qkv()) if requires_grad else qkv()
    for call in (batched, torch.func.grad(lambda *x: batched(*x).sum())):
        with pytest.raises(fs.Error) as caught:
            call(*inputs, seed)
        assert str(caught.value).startswith(line)


@pytest.mark.usefixtures("torch_way")
def test_a_seed_that_was_changed_before_the_backward_is_an_error():
    seed = ONE.clone()
    out = batched(*with_gradients(qkv()), seed)
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@calls
@seeds
@pytest.mark.usefixtures("torch_way")
def test_saved_seeds_pass_their_hooks(call, want, seed):
    inputs = qkv()
    with torch.autograd.graph.save_on_cpu():
        same(results(call, inputs, seed), want(*inputs, seed))


@calls
@seeds
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(call, want, seed, backend):
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    inputs = qkv()
    same(results(compiled, inputs, seed), want(*inputs, seed))
    same(results(compiled, inputs, seed + 1), want(*inputs, seed + 1))  # no constant of the graph


@calls
@seeds
def test_exported(call, want, seed):
    class Module(torch.nn.Module):
        def forward(self, *x):
            return call(*x)

    inputs = qkv()
    exported = torch.export.export(Module(), (*inputs, seed)).module()
    same([exported(*inputs, seed + 1)], want(*inputs, seed + 1)[:1])


@calls
def test_vmap_gives_each_call_its_own(call, want):
    inputs = [torch.stack((x, -x, x)) for x in qkv()]
    given = torch.tensor([[1, 0], [2, 0], [3, 2**50]])
    got = torch.func.vmap(call)(*inputs, given)
    for one, *rest in zip(got, *inputs, given, strict=True):
        same([one], want(*rest)[:1])
    q, k, v = (x[0] for x in inputs)
    got = torch.func.vmap(call, (None, None, None, 0))(q, k, v, given)
    for one, seed in zip(got, given, strict=True):
        same([one], want(q, k, v, seed)[:1])


@calls
@seeds
def test_gradients_of_torch_func(call, want, seed):
    inputs = qkv()
    got = torch.func.grad(lambda *x: call(*x).sum(), (0, 1, 2))(*inputs, seed)
    for a, b in zip(got, want(*inputs, seed)[1:], strict=True):
        assert torch.equal(a[0] if call is packed else a, b)


@calls
@seeds
def test_ahead_of_time_autograd(call, want, seed):
    from functorch.compile import aot_function, nop

    inputs = qkv()
    same(results(aot_function(call, nop), inputs, seed), want(*inputs, seed))


@seeds
def test_opcheck(seed):
    operators, options = torch.ops.flashsdk, (None, None, seed, None, [], None, 0.0, 0.4, False, "")
    q, k, v = with_gradients(qkv(seqlen_q=20))
    torch.library.opcheck(operators.mha_fwd.default, (q, k, v, *options))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = operators.mha_fwd(q, k, v, *options)
    dout = torch.ones_like(out)
    torch.library.opcheck(operators.mha_bwd.default, (dout, None, q, k, v, out, lse, *options))
    q, k, v = (x[0] for x in (q, k, v))
    offsets = torch.tensor([0, 5, 20], dtype=torch.int32)
    rest = (offsets, offsets, 15, 15, *options)
    torch.library.opcheck(operators.mha_varlen_fwd.default, (q, k, v, *rest))
    out, lse = operators.mha_varlen_fwd(q, k, v, *rest)
    arguments = (torch.ones_like(out), None, q, k, v, out, lse, *rest)
    torch.library.opcheck(operators.mha_varlen_bwd.default, arguments)


# ---- the backward drops what the forward dropped

HALF = {"dropout_p": 0.5}
SHAPE = (2, 64, 4, 32)


def scores_of_zero(x, w):
    """(2, 64, 4, 32) of zeros, for whose gradient a product has to be kept, or computed again."""
    for _ in range(2):
        x = torch.nn.functional.gelu(x @ w.sin())
    return (x @ w * 0).view(SHAPE)


def layer(x, w, v):
    q = scores_of_zero(x, w)
    return attention(q, q, v, **HALF)


def layer_heads_first(x, w, v):
    q, v = (x.transpose(1, 2) for x in (scores_of_zero(x, w), v))
    return scaled_dot_product_attention(q, q, v, **HALF)


def layer_packed(x, w, v):
    q, v = (x.flatten(0, 1) for x in (scores_of_zero(x, w), v))
    offsets = torch.tensor([0, 100, 128], dtype=torch.int32)
    return varlen_attention(q, q, v, offsets, offsets, 100, 100, **HALF)


def layer_flash_attn(x, w, v):
    q = scores_of_zero(x, w)
    return flash_attn_func(q, q, v, **HALF)


LAYERS = {
    "attention": layer,
    "sdpa": layer_heads_first,
    "packed": layer_packed,
    "flash_attn": layer_flash_attn,
}
layers = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


def step(function):
    """out of a value of ones and the gradient of its sum, which add up alike.

    All scores are equal, so that a row of out is the share that was kept.
    """
    x, w = torch.randn(128, 128), torch.randn(128, 128, requires_grad=True)
    v = torch.ones(SHAPE, requires_grad=True)
    out = function(x, w, v)
    out.sum().backward()
    return out.detach(), v.grad


def assert_dropped_alike(function, steps=3):
    """And other elements in each step."""
    outs = []
    for _ in range(steps):
        out, gradient = step(function)
        kept = out.double().sum()
        assert abs(kept - gradient.double().sum()) < 1e-4 * kept
        outs.append(out)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(outs))


def test_the_check_sees_what_was_dropped_anew():
    def forgetful(x, w, v):
        kept, anew = layer(x, w, v), layer(x, w, v)
        return anew + (kept - anew).detach()

    with pytest.raises(AssertionError):
        assert_dropped_alike(forgetful)


@layers
@pytest.mark.usefixtures("torch_way")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(layer, reentrant):
    assert_dropped_alike(layer)
    assert_dropped_alike(lambda *x: checkpoint(layer, *x, use_reentrant=reentrant))


def selective(function, saved):
    """A checkpoint that keeps what the operators ``saved`` give."""
    policies = {
        True: CheckpointPolicy.MUST_SAVE,
        False: CheckpointPolicy.PREFER_RECOMPUTE,
    }
    context = functools.partial(
        create_selective_checkpoint_contexts,
        lambda _, operator, *args, **keywords: policies[operator in saved],
    )
    return lambda *x: checkpoint(function, *x, use_reentrant=False, context_fn=context)


ATTENTION = (torch.ops.flashsdk.mha_fwd.default, torch.ops.flashsdk.mha_varlen_fwd.default)
SAVED = {"nothing": (), "products": (torch.ops.aten.mm.default,), "attention": ATTENTION}


@layers
@pytest.mark.usefixtures("torch_way")
@pytest.mark.parametrize("saved", SAVED.values(), ids=SAVED)
def test_selective_checkpoints(layer, saved):
    assert_dropped_alike(selective(layer, saved))


# What is kept and what is computed again is decided as for Inductor, in a tenth of the time: so it
# takes every case, and Inductor those that compute most again.
PARTITIONED = "aot_eager_decomp_partition"
compilers = pytest.mark.parametrize("backend", [PARTITIONED, "inductor"])


@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "name, backend, budget",
    [
        *itertools.product(LAYERS, [PARTITIONED], [1.0, 0.5, 0.3, 0.01, 0.0]),
        ("attention", "inductor", 0.3),
    ],
)
def test_a_budget_of_memory(name, backend, budget):
    layer = LAYERS[name]
    with functorch_config.patch(activation_memory_budget=budget):
        assert_dropped_alike(torch.compile(layer, fullgraph=True, backend=backend))


@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "kind, backend, budget",
    [
        *itertools.product(["plain", *SAVED], [PARTITIONED], [1.0, 0.0]),
        ("plain", "inductor", 1.0),
        ("attention", "inductor", 0.0),
    ],
)
def test_checkpoints_that_are_compiled(kind, backend, budget):
    recomputed = functools.partial(checkpoint, layer, use_reentrant=False)
    if kind != "plain":
        recomputed = selective(layer, SAVED[kind])
    with functorch_config.patch(activation_memory_budget=budget):
        assert_dropped_alike(torch.compile(recomputed, fullgraph=True, backend=backend))


@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "region_activation_memory_budget"),
    reason=f"PyTorch {torch.__version__} has no such regions",
)
@pytest.mark.parametrize(
    "backend, budget", [(PARTITIONED, 0.3), (PARTITIONED, 0.0), ("inductor", 0.0)]
)
def test_a_budget_of_memory_of_a_region(backend, budget):
    def region(*x):
        with torch.autograd.graph.region_activation_memory_budget(budget):
            return layer(*x)

    assert_dropped_alike(torch.compile(region, fullgraph=True, backend=backend))


@pytest.mark.parametrize("budget", [0.3, 0.0])
def test_a_budget_of_memory_without_dynamo(budget):
    from functorch.compile import aot_function, min_cut_rematerialization_partition, nop

    with functorch_config.patch(activation_memory_budget=budget):
        traced = aot_function(layer, nop, partition_fn=min_cut_rematerialization_partition)
        assert_dropped_alike(traced)


# ---- seeds that are drawn


@compilers
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_compiled_calls_draw_what_others_draw(backend, budget):
    inputs = qkv()
    torch.manual_seed(3)
    want = [attention(*inputs, **P) for _ in range(2)]
    with functorch_config.patch(activation_memory_budget=budget):
        compiled = torch.compile(lambda *x: attention(*x, **P), fullgraph=True, backend=backend)
        compiled(*with_gradients(inputs))
        torch.manual_seed(3)
        same([compiled(*with_gradients(inputs)) for _ in range(2)], want)


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_draws_as_its_randomness_says(randomness, compiled):
    torch._dynamo.reset()
    inputs = [torch.stack((x, x, x)) for x in qkv()]
    call = torch.func.vmap(lambda *x: attention(*x, **P), randomness=randomness)
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    refused = pytest.raises(Exception, match="randomness")
    with refused if randomness == "error" else contextlib.nullcontext():
        first, second, _ = call(*inputs)
        assert torch.equal(first, second) == (randomness == "same")


@pytest.mark.skipif(TORCH < (2, 7), reason="PyTorch 2.6: a strict export looks like compiling")
def test_exported_programs_draw_by_operators_of_pytorch():
    class Module(torch.nn.Module):
        def forward(self, *x):
            return attention(*x, **P)

    inputs = qkv()
    exported = torch.export.export(Module(), tuple(inputs))
    drawn = [node.target for node in exported.graph.nodes if "rand" in str(node.target)]
    assert len(drawn) == 1 and drawn[0].namespace == "aten"
    torch.manual_seed(3)
    want = attention(*inputs, **P)
    torch.manual_seed(3)
    assert torch.equal(exported.module()(*inputs), want)


def test_the_page():
    page = Path(__file__).parents[2] / "docs" / "dropout.md"
    names: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        exec(compile(example, str(page), "exec"), names)
    assert names["q"].grad is not None
