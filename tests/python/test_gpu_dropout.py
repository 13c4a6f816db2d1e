"""Dropout whose seed lies on a GPU: CUDA graphs, torch.compile's among them, and recomputation."""

import itertools

import pytest
from gpu_cases import assert_same, both, qkv

torch = pytest.importorskip("torch")

from flashsdk.torch import attention, explain  # noqa: E402
from torch_cases import TORCH  # noqa: E402

FIXED = {"deterministic": True}  # dq is else summed in the order in which thread blocks arrive


def dropped(x, **keywords):
    """Which of (batch, seqlen_q, num_heads, seqlen_k) are not dropped, by a value of ones."""
    q, k, _, _ = x
    eye = torch.eye(k.shape[1], 64, device="cuda", dtype=k.dtype)
    v = eye[None, :, None].expand(k.shape[0], -1, k.shape[2], -1).contiguous()
    return attention(torch.zeros_like(q), k, v, dropout_p=0.5, **keywords) > 0


def test_dropout_in_a_graph_draws_anew(backend):
    """Every replay, forward and backward alike, and torch.manual_seed repeats it."""
    x = qkv(seqlen=64)
    q, k, v = (t.detach().requires_grad_() for t in x[:3])

    def step():
        out = attention(q, k, v, dropout_p=0.5, backend=backend, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), x[3])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as PyTorch's documentation asks for before a capture
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = (*step(), dropped(x, backend=backend))

    def replays():
        torch.cuda.manual_seed(3)
        found = []
        for _ in range(3):
            graph.replay()
            found.append([t.clone() for t in static])
        return found

    first, again = replays(), replays()
    for a, b in zip(first, again, strict=True):
        assert_same(a, b)
    for a, b in ((0, 1), (1, 2), (0, 2)):
        for s, t in zip(first[a], first[b], strict=True):
            assert not torch.equal(s, t)
    # Rows that dropout leaves something of: forward and backward dropped the same.
    kept = first[0][-1].float().mean().item()
    assert abs(kept - 0.5) < 0.02


def test_seeds_on_the_device_drop_what_numbers_drop(backend):
    x = qkv(batch=3)
    call = {"dropout_p": 0.4, "backend": backend, **FIXED}
    seeds = torch.tensor([7, 2**40 + 9], device="cuda")
    assert_same(both(x, seed=seeds, **call), both(x, seed=7, offset=2**40 + 9, **call))
    each = torch.tensor([[7, 0], [8, 1], [-1, 2]], device="cuda")
    got = both(x, seed=each, **call)
    for b, (seed, offset) in enumerate(((7, 0), (8, 1), (2**64 - 1, 2))):
        one = both([t[b : b + 1] for t in x], seed=seed, offset=offset, **call)
        assert_same([t[b : b + 1] for t in got], one)


def test_dropout_under_reduce_overhead(backend):
    """CUDA graphs of torch.compile: each step draws anew, and gradients are of what was kept."""
    x = qkv(seqlen=64)
    q, k = x[:2]

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def step(q, k, v):
        return attention(q * 1, k, v, dropout_p=0.5, backend=backend)

    outs = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        v = torch.ones_like(x[2]).requires_grad_()
        out = step(torch.zeros_like(q), k, v)
        # Of equal scores: out is the share that was kept, and so is what the gradient of v sums to.
        out.sum().backward()
        kept, summed = out.detach().double().sum(), v.grad.double().sum()
        assert abs(kept - summed) / kept < 1e-3
        outs.append(out.detach().clone())
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(outs))


def test_explain_draws_nothing(backend):
    q, k, v, _ = qkv(seqlen=64)
    before = torch.cuda.get_rng_state()
    assert explain(attention, q, k, v, dropout_p=0.5, backend=backend).kernel
    assert torch.equal(torch.cuda.get_rng_state(), before)


NOTHING_SAVED = pytest.mark.skipif(
    TORCH < (2, 13), reason="with a budget of 0 its own dropout drops something else as well"
)


@pytest.mark.parametrize("budget", [0.3, pytest.param(0.0, marks=NOTHING_SAVED)])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_budget_of_memory_on_a_gpu(backend, budget, mode):
    """What torch.compile computes again in the backward drops what the forward dropped."""
    w = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)

    @torch.compile(mode=mode, fullgraph=True)
    def step(x, v):
        q = torch.nn.functional.gelu(x @ w.sin()) @ w * 0
        return attention(q, q, v, dropout_p=0.5, backend=backend)

    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(2, 64, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
            v = torch.ones_like(x).requires_grad_()
            out = step(x, v)
            out.sum().backward()
            # A row of out is the share that was kept, and so is what the gradient of v sums to.
            kept, summed = out.detach().double().sum(), v.grad.double().sum()
            assert abs(kept - summed) / kept < 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_on_a_gpu_drops_again_what_it_dropped(backend, reentrant):
    x = qkv(seqlen=64)
    leaves = [t.detach().requires_grad_() for t in x[:3]]

    def run(*x):
        return attention(*x, dropout_p=0.5, backend=backend, deterministic=True)

    torch.manual_seed(5)
    plain = torch.autograd.grad(run(*leaves), leaves, x[3])
    torch.manual_seed(5)
    out = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=reentrant)
    out.backward(x[3])
    assert_same([t.grad for t in leaves], plain)
