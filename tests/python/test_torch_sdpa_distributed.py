"""PyTorch's own function on DTensors of a CPU: over batch and heads, and context_parallel."""

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
import torch.nn.functional as functional  # noqa: E402
from flashsdk.integrations import _sdpa_kernels, torch_sdpa  # noqa: E402
from processes import TIMEOUT, spawn  # noqa: E402
from standard_attention import assert_close, gradients, standard  # noqa: E402

distributed = pytest.importorskip("torch.distributed")
pytestmark = [
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()), reason="no gloo"
    ),
    pytest.mark.skipif(
        not torch_sdpa._REGISTRY, reason="torch_sdpa.enable() is for PyTorch 2.11 or newer"
    ),
]
PROCESSES, SEQUENCE = 4, 2


def sdpa(*args, **options):
    """Looked up anew, as context_parallel puts another function in its place."""
    return functional.scaled_dot_product_attention(*args, **options)


def exact_and_plain(inputs, weight, is_causal):
    """out and gradients of standard attention: in float64, and in the dtype of the inputs."""
    seqlen = inputs[0].shape[SEQUENCE]
    visible = torch.ones(seqlen, seqlen, dtype=torch.bool).tril() if is_causal else None

    def plain(*x):
        first = (t.transpose(1, 2) for t in x)
        return (standard(*first, visible=visible)[0].transpose(1, 2),)

    return [gradients(plain, [x.to(t) for x in inputs], [weight.to(t)])
            for t in (torch.float64, inputs[0].dtype)]  # fmt: skip


# ---- context_parallel


def over_the_sequence(mesh, inputs, weight, is_causal):
    """out and gradients, gathered, of each process's part of the sequence."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    parts = [x.clone() for x in (*inputs, weight)]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[SEQUENCE] * 4):
        leaves = [x.clone().requires_grad_() for x in parts[:3]]
        assert leaves[0].shape[SEQUENCE] * PROCESSES == inputs[0].shape[SEQUENCE]
        out = sdpa(*leaves, is_causal=is_causal)
        results = [out.detach(), *torch.autograd.grad(out, leaves, parts[3])]
        return context_parallel_unshard(mesh, results, [SEQUENCE] * 4)


def check_ring(mesh):
    from torch.distributed.tensor.experimental import _attention as ring

    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        inputs = [torch.randn(2, 3, 64, 16, dtype=dtype) for _ in range(3)]
        weight = torch.randn(2, 3, 64, 16, dtype=dtype)
        for is_causal, rotated in ((True, "allgather"), (True, "alltoall"), (False, "allgather")):
            ring.set_rotate_method(rotated)
            ring._cp_options.enable_load_balance = is_causal  # PyTorch has it for causal alone
            with torch_sdpa.enable():
                got = over_the_sequence(mesh, inputs, weight, is_causal)
            exact, plain = exact_and_plain(inputs, weight, is_causal)
            assert_close(got, plain, exact)

    # The parts are computed by ours: PyTorch's own kernels give other bits.
    inputs = [x.float() for x in inputs]
    ring._cp_options.enable_load_balance = True
    theirs = over_the_sequence(mesh, inputs, weight.float(), True)
    with torch_sdpa.enable():
        ours = over_the_sequence(mesh, inputs, weight.float(), True)
    assert not all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))

    # Beyond, ours would take a part's sum for that of all keys, and PyTorch's kernels do not.
    large = [30 * inputs[0], *inputs[1:]]
    with torch_sdpa.enable(), pytest.raises(fs.Error, match=r"^logsumexp: up to .*; at most 32"):
        over_the_sequence(mesh, large, weight.float(), True)
    # On all, also where one alone has such rows. Processes have chunks r and -1 - r.
    one = inputs[0].clone()
    one[:, :, :8] *= 30
    with torch_sdpa.enable(), pytest.raises(fs.Error, match=r"^logsumexp: up to .*; at most 32"):
        over_the_sequence(mesh, [one, *inputs[1:]], weight.float(), True)
    exact, _ = exact_and_plain(large, weight.float(), True)
    for one, other in zip(over_the_sequence(mesh, large, weight.float(), True), exact, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-3, atol=1e-3)

    with torch_sdpa.enable(), pytest.raises(fs.Error, match="attn_mask: given; None under"):
        from torch.distributed.tensor.experimental import context_parallel

        x = inputs[0].clone()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[SEQUENCE]):
            sdpa(x, x, x, torch.zeros(2, 3, 16, 64))


def check_ring_of_a_gpu(mesh):
    """The operators that context_parallel calls on a GPU, with our kernels at a CPU's key."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import _attention as ring

    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 64, 16) for _ in range(3)]
    weight = torch.randn(2, 3, 64, 16)
    mine = [x.chunk(PROCESSES, SEQUENCE)[mesh.get_local_rank()] for x in (*inputs, weight)]
    q, k, v, dout = (DTensor.from_local(x, mesh, [Shard(SEQUENCE)]) for x in mine)
    aten = torch.ops.aten
    torch_sdpa._kernels.override_sdpa("flash", "CPU")
    ring._enable_context_parallel_dispatcher()
    ring._cp_options.enable_load_balance = False
    try:
        out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        cu_q, cu_k, max_q, max_k, seed, offset, _ = rest
        grads = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, True, seed, offset
        )
    finally:
        ring._disable_context_parallel_dispatcher()
        torch_sdpa._kernels.restore_sdpa()
    exact, plain = exact_and_plain(inputs, weight, True)
    assert_close([x.full_tensor() for x in (out, *grads)], plain, exact)


# ---- batch and heads


def check_batch_and_heads(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    q, k, v = torch.randn(4, 8, 20, 16), torch.randn(4, 4, 20, 16), torch.randn(4, 4, 20, 16)
    masks = [None, torch.randn(20, 20), torch.randn(4, 1, 1, 20), torch.randn(1, 8, 20, 20)]
    with torch_sdpa.enable():
        for dim in (0, 1):
            for mask in masks:
                beside = mask
                if mask is not None:
                    own = mask.dim() == 4 and mask.shape[dim] != 1
                    beside = distribute_tensor(mask, mesh, [Shard(dim) if own else Replicate()])
                whole = [x.clone().requires_grad_() for x in (q, k, v)]
                placed = [
                    distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x in (q, k, v)
                ]
                want, got = (
                    (out, *torch.autograd.grad(out.square().sum(), leaves))
                    for leaves, m in ((whole, mask), (placed, beside))
                    for out in [sdpa(*leaves, m, enable_gqa=True)]
                )
                for one, other in zip(got, want, strict=True):
                    assert one.placements == (Shard(dim),)
                    assert torch.equal(one.full_tensor(), other)


# ---- the processes


def work(rank):
    distributed.init_process_group("gloo", timeout=TIMEOUT)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (PROCESSES,))
    check_ring(mesh)
    for way in (torch_sdpa._kernels, _sdpa_kernels):  # the same where nothing was built
        torch_sdpa._kernels = way
        check_ring_of_a_gpu(mesh)
        check_batch_and_heads(mesh)
    distributed.destroy_process_group()


def test_four_processes():
    spawn(work, PROCESSES)
