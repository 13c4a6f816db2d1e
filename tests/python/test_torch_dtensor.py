"""DTensors over batch and heads: two processes compute what one does, and nothing is gathered."""

import contextlib
import copy
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
import flashsdk.torch as ft  # noqa: E402
from flashsdk import _torch_eager  # noqa: E402
from flashsdk.integrations import torch_sdpa  # noqa: E402
from processes import spawn  # noqa: E402
from standard_attention import assert_close  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

distributed = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="no gloo"
)
PAGE = Path(__file__).parents[2] / "docs" / "attention.md"


def gradients(call, leaves):
    out = call(*leaves)
    return out, *torch.autograd.grad(out.square().sum(), leaves)


def compare(call, tensors, placed, kept, of_sink=()):
    """``call`` of whole tensors, and of DTensors: results, and that those stay where they are.

    ``of_sink`` says where the gradient of the last tensor is, if that is a sink.
    """
    leaves = [x.detach().requires_grad_() for x in tensors]
    want = gradients(call, leaves)
    got = gradients(call, [x.detach().requires_grad_() for x in placed])
    places = [kept] * (len(want) - len(of_sink)) + [(x,) for x in of_sink]
    for one, other, place in zip(got, want, places, strict=True):
        assert one.placements == place, (one.placements, place)
        if place[0].is_partial():  # added up in another order
            torch.testing.assert_close(one.full_tensor(), other)
        else:
            assert torch.equal(one.full_tensor(), other)


def check_all(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 20, 4, 16), torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 16)
    bias, slopes = torch.randn(2, 4, 20, 20), torch.rand(4)
    # Before all others: what torch.compile traces finds the operators' sharding as well.
    compiled = torch.compile(ft.flash_attn_func, backend="eager", fullgraph=True)
    placed = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    out = compiled(*placed)
    assert out.placements == (Shard(2),)
    assert torch.equal(out.full_tensor(), ft.flash_attn_func(q, k, v))

    for dim in (0, 2):
        placed = [distribute_tensor(x, mesh, [Shard(dim)]) for x in (q, k, v)]
        beside = {
            bias: distribute_tensor(bias, mesh, [Shard(0 if dim == 0 else 1)]),
            slopes: distribute_tensor(slopes, mesh, [Replicate() if dim == 0 else Shard(0)]),
        }

        def call(q, k, v, beside=beside):
            plain = type(q) is torch.Tensor
            b, a = (x if plain else beside[x] for x in (bias, slopes))
            return ft.attention(q, k, v, mask=fs.Causal(), bias=b, alibi_slopes=a)

        compare(call, (q, k, v), placed, (Shard(dim),))
        compare(lambda *x: ft.flash_attn_func(*x, causal=True), (q, k, v), placed, (Shard(dim),))

        def first(q, k, v):
            x = (t.transpose(1, 2) for t in (q, k, v))
            return ft.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True).transpose(
                1, 2
            )

        compare(first, (q, k, v), placed, (Shard(dim),))

    # Over the sequence, or heads of keys that cannot be dealt out: every device gets all.
    placed = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    compare(lambda *x: ft.flash_attn_func(*x), (q, k, v), placed, (Replicate(),))
    one = k[:, :, :1]
    placed = [distribute_tensor(q, mesh, [Shard(2)])]
    placed += [distribute_tensor(x, mesh, [Replicate()]) for x in (one, one)]
    compare(lambda *x: ft.flash_attn_func(*x), (q, one, one), placed, (Replicate(),))

    # Packed sequences, over heads.
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    placed = [distribute_tensor(x, mesh, [Shard(1)]) for x in packed]
    lengths = torch.tensor([0, 13, 40], dtype=torch.int32)
    whole = distribute_tensor(lengths, mesh, [Replicate()])

    def varlen(*x):
        cu = lengths if type(x[0]) is torch.Tensor else whole
        return ft.varlen_attention(*x, cu, cu, 27, 27, mask=fs.Causal())

    compare(varlen, packed, placed, (Shard(1),))

    with pytest.raises(fs.Unsupported, match=r"^dropout_p: 0\.1; 0, as a DTensor's"):
        x = distribute_tensor(q, mesh, [Shard(0)])
        ft.attention(x, x, x, dropout_p=0.1)

    seed = distribute_tensor(torch.tensor([7, 0]), mesh, [Replicate()])
    x = [distribute_tensor(t, mesh, [Replicate()]) for t in (q, k, v)]
    cu = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 27, "max_seqlen_k": 27}
    beside = distribute_tensor(bias, mesh, [Replicate()])
    drops = {"dropout_p": 0.1, "seed": seed}
    for line, call in {
        "seed: a DTensor; a plain tensor, as q is": lambda: ft.attention(q, k, v, **drops),
        "k: a plain tensor; a DTensor, as q is": lambda: ft.attention(x[0], k, v),
        "v: a DTensor; a plain tensor, as q is": lambda: ft.attention(q, k, x[2]),
        "bias: a plain tensor; a DTensor, as q is": lambda: ft.attention(*x, bias=bias),
        "mask: a DTensor; a plain tensor, as q is": lambda: fs.attention(q, k, v, mask=beside > 0),
        "attn_mask: a DTensor; a plain tensor, as query is": lambda: (
            ft.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (q, k, v)), beside, enable_gqa=True
            )
        ),
        "cu_seqlens_q: a plain tensor; a DTensor, as q is": lambda: ft.varlen_attention(
            *(t.flatten(0, 1) for t in x), **cu
        ),
    }.items():
        with pytest.raises(fs.InvalidArgument) as caught:
            call()
        assert str(caught.value) == line
    # Nobody reads a seed without dropout, and who asks for replication gets it.
    assert torch.equal(ft.attention(q, k, v, seed=seed), ft.attention(q, k, v))
    with implicit_replication():
        assert torch.equal(ft.attention(x[0], k, v).full_tensor(), ft.attention(q, k, v))


def check_sinks_and_lengths(mesh):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 20, 4, 16), torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 16)
    sink = torch.randn(4)
    lengths = {
        "seqused_q": torch.tensor([20, 7], dtype=torch.int32),
        "seqused_k": torch.tensor([13, 20], dtype=torch.int32),
    }

    def distributed_over(place, *tensors):
        return [distribute_tensor(x, mesh, [place]) for x in tensors]

    def call_of(options, dim):
        """``attention`` with ``options``, of DTensors sharded as q's dimension ``dim`` is."""
        place = Shard(0) if dim == 0 else Replicate()
        placed = dict(zip(options, distributed_over(place, *options.values()), strict=True))

        def call(q, k, v, sink):
            given = options if type(q) is torch.Tensor else placed
            return ft.attention(q, k, v, mask=fs.Causal(), sink=sink, **given)

        return call

    # One length of each kind has to be told from the other: of the sequence all are gathered.
    for dim, of_q, of_one, of_sink in (
        (0, Shard(0), Replicate(), Partial()),
        (2, Shard(2), Shard(0), Shard(0)),
        (1, Shard(0), Replicate(), Partial()),
    ):
        placed = [*distributed_over(Shard(dim), q, k, v), *distributed_over(of_one, sink)]
        for names in (["seqused_q", "seqused_k"], ["seqused_q"], ["seqused_k"], []):
            options = {name: lengths[name] for name in names}
            kept = of_q if dim != 1 or names else Replicate()
            of_one_sink = of_sink if dim != 1 or names else Replicate()
            call = call_of(options, 0 if dim == 1 else dim)
            compare(call, (q, k, v, sink), placed, (kept,), [of_one_sink])

    placed = [*distributed_over(Shard(2), q, k, v), *distributed_over(Shard(0), sink)]
    compiled = torch.compile(call_of(lengths, 2), backend="aot_eager", fullgraph=True)
    compare(compiled, (q, k, v, sink), placed, (Shard(2),), [Shard(0)])

    # Heads of keys that cannot be dealt out.
    one = k[:, :, :1]
    placed = [*distributed_over(Shard(2), q), *distributed_over(Replicate(), one, one)]
    placed += distributed_over(Shard(0), sink)
    compare(call_of(lengths, 2), (q, one, one, sink), placed, (Replicate(),), [Replicate()])

    packed = [x.flatten(0, 1) for x in (q, k, v)]
    offsets = torch.tensor([0, 13, 40], dtype=torch.int32)
    (whole,) = distributed_over(Replicate(), offsets)

    def varlen(*x, sink):
        cu = offsets if type(x[0]) is torch.Tensor else whole
        return ft.varlen_attention(*x, cu, cu, 27, 27, mask=fs.Causal(), sink=sink)

    placed = [*distributed_over(Shard(1), *packed), *distributed_over(Shard(0), sink)]
    compare(lambda *x: varlen(*x[:3], sink=x[3]), (*packed, sink), placed, (Shard(1),), [Shard(0)])

    # Pages belong to no sequence.
    k_pages, v_pages = torch.randn(2, 5, 8, 2, 16)
    table = torch.tensor([[4, 0, 2], [1, 3, 0]], dtype=torch.int32)
    used = lengths["seqused_k"]
    want = ft.attention(q, k_pages, v_pages, seqused_k=used, block_table=table)
    for dim, of_pages, of_table in ((0, Replicate(), Shard(0)), (2, Shard(2), Replicate())):
        x = [*distributed_over(Shard(dim), q), *distributed_over(of_pages, k_pages, v_pages)]
        seqused_k, block_table = distributed_over(of_table, used, table)
        out = ft.attention(*x, seqused_k=seqused_k, block_table=block_table)
        assert out.placements == (Shard(dim),)
        assert torch.equal(out.full_tensor(), want)

    # Keys of 8 bits, and descales that differ where these do, or not.
    narrow = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    descales = [torch.rand(2, 2) + 0.1, torch.rand(1, 1) + 0.1]
    names = ("k_descale", "v_descale")
    want = ft.attention(q.half(), *narrow, **dict(zip(names, descales, strict=True)))
    for dim in (0, 2):
        x = distributed_over(Shard(dim), q.half(), k, v)  # gloo sends no 8 bits
        x[1:] = (t.to(torch.float8_e4m3fn) for t in x[1:])
        differ = distributed_over(Shard(dim // 2), descales[0])
        alike = distributed_over(Replicate(), descales[1])
        out = ft.attention(*x, k_descale=differ[0], v_descale=alike[0])
        assert out.placements == (Shard(dim),)
        assert torch.equal(out.full_tensor(), want)

    x = distributed_over(Shard(0), q, k, v)
    (n,) = distributed_over(Shard(0), used)
    for line, options in {
        "dropout_p: 0.1; 0, as a DTensor's dropout would be another on each device": {
            "dropout_p": 0.1,
            "seqused_k": n,
        },
        "sink: a plain tensor; a DTensor, as q is": {"sink": sink},
        "seqused_k: a plain tensor; a DTensor, as q is": {"seqused_k": used},
    }.items():
        with pytest.raises(fs.Error) as caught:
            ft.attention(*x, **options)
        assert str(caught.value) == line
    with pytest.raises(fs.Unsupported, match=r"^k_cache: a DTensor; the part of this process, its"):
        ft.kv_append(x[1], x[2], x[1], x[2], n)


# ---- tensor parallel and FSDP2


def of_the_page():
    """The names of the page's example, which parallelizes a module over both processes."""
    text = PAGE.read_text("utf-8").partition("## Tensor parallel and FSDP2")[2]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def by_pytorch(q, k, v, mask):
    assert mask == fs.Causal()
    x = (t.transpose(1, 2) for t in (q, k, v))
    return sdpa(*x, is_causal=True, enable_gqa=True).transpose(1, 2)


def ways():
    """Each with whether its tensors are DTensors, which PyTorch's own function takes on no CPU."""
    yield "sdpa", by_pytorch, contextlib.nullcontext, False
    for parts in (False, True):
        yield f"flashsdk, {parts}", ft.attention, contextlib.nullcontext, parts
        if _torch_eager.native is not _torch_eager.InPython:
            yield f"enable, {parts}", by_pytorch, torch_sdpa.enable, parts


def trained(model, x, weight):
    """out, the gradients of sum(weight * out), and how often each collective ran."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as watched:
        out = model(x)
        (out * weight).sum().backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in
             model.parameters()]  # fmt: skip
    return [out.detach(), *grads], dict(watched.get_comm_counts())


def check_modules():
    """A module in both wrappers: what the whole one gives, by the collectives that sdpa takes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel

    page = of_the_page()
    weight = page["model"].q.weight
    assert isinstance(weight, DTensor) and weight.grad.full_tensor().abs().sum() > 0
    torch.manual_seed(0)
    whole = page["Attention"](64, 8, 2, 16)
    x, weight = torch.randn(2, 4, 50, 64).unbind(0)
    page["attention"] = by_pytorch
    exact, _ = trained(copy.deepcopy(whole).double(), x.double(), weight.double())
    plain, _ = trained(copy.deepcopy(whole), x, weight)

    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        rank, size = mesh["dp"].get_local_rank(), shape[0]
        want = [[out.chunk(size)[rank], *grads] for out, *grads in (plain, exact)]
        counts = {}
        for name, attend, scope, as_dtensors in ways():
            seen = []

            def watched(q, k, v, mask, attend=attend, seen=seen):
                seen.append(isinstance(q, DTensor))
                return attend(q, k, v, mask=mask)

            page["attention"] = watched
            page["ColwiseParallel"] = functools.partial(
                ColwiseParallel, use_local_output=not as_dtensors
            )
            model = page["parallelized"](copy.deepcopy(whole), mesh)
            with scope():
                (out, *grads), counts[name] = trained(
                    model, *(t.chunk(size)[rank] for t in (x, weight))
                )
            assert seen == [as_dtensors]
            assert_close([out, *(size * g for g in grads)], *want)  # FSDP has averaged them
        assert sum(counts["sdpa"].values()) > 0
        assert all(found == counts["sdpa"] for found in counts.values()), counts


def check_layouts(mesh):
    """Every device has all lists of a layout; heads or sequences with lists of their own, too."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 40, 4, 16), torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)
    sink = torch.randn(4)
    lengths = torch.tensor([0, 33, 80], dtype=torch.int32)
    blocks = torch.rand(2, 4, 3, 3) < 0.6
    sizes = {"block_size": 16, "seqlen_q": 40, "seqlen_k": 40, "band": fs.Causal()}
    shared, of_heads, of_sequences, of_both = (
        fs.BlockMask.from_dense(x.numpy(), **sizes)
        for x in (blocks[0, 0], blocks[0], blocks[:, :1], blocks)
    )
    for mask, dim, kept in (
        (shared, 0, Shard(0)),
        (shared, 2, Shard(2)),
        (shared, 1, Replicate()),
        (of_heads, 0, Shard(0)),
        (of_heads, 2, Replicate()),
        (of_sequences, 0, Replicate()),
        (of_sequences, 2, Shard(2)),
        (of_both, 2, Replicate()),
    ):
        placed = [distribute_tensor(x, mesh, [Shard(dim)]) for x in (q, k, v)]

        def call(q, k, v, mask=mask):
            return ft.attention(q, k, v, mask=mask)

        compare(call, (q, k, v), placed, (kept,))
    placed = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    compare(lambda *x: compiled(*x, mask=shared), (q, k, v), placed, (Shard(2),))

    placed.append(distribute_tensor(sink, mesh, [Shard(0)]))
    compare(
        lambda q, k, v, sink: ft.attention(q, k, v, mask=shared, sink=sink),
        *((q, k, v, sink), placed, (Shard(2),), [Shard(0)]),
    )
    whole = distribute_tensor(lengths, mesh, [Replicate()])
    of_packed = fs.layouts.random(47, 47, 16, density=0.6, seed=1)

    def varlen(*x):
        cu = lengths if type(x[0]) is torch.Tensor else whole
        return ft.varlen_attention(*x, cu, cu, 47, 47, mask=of_packed)

    packed = [x.flatten(0, 1) for x in (q, k, v)]
    placed = [distribute_tensor(x, mesh, [Shard(1)]) for x in packed]
    compare(varlen, packed, placed, (Shard(1),))


def work(rank):
    distributed.init_process_group("gloo")
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    check_all(mesh)
    check_sinks_and_lengths(mesh)
    check_layouts(mesh)
    distributed.destroy_process_group()


def test_two_processes():
    spawn(work, 2)


def work_on_modules(rank):
    distributed.init_process_group("gloo")
    check_modules()
    distributed.destroy_process_group()


@pytest.mark.skipif(not PAGE.exists(), reason="not a checkout")
@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="PyTorch 2.6: fully_shard is for GPUs"
)
def test_modules_in_two_processes():
    spawn(work_on_modules, 2)


def test_dtensors_may_be_imported_first():
    lines = "import torch.distributed.tensor, flashsdk.torch, flashsdk._torch_sharding as sharding"
    lines += "\nassert sharding._registered"
    subprocess.run([sys.executable, "-c", lines], check=True)
