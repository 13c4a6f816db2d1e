"""flash_attn's module and torch_sdpa.enable() on a GPU, and by the same tests on a CPU."""

import functools

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
from flashsdk import _contents  # noqa: E402
from flashsdk._torch_private import sdp_order  # noqa: E402
from flashsdk.integrations import flash_attn as door  # noqa: E402
from flashsdk.integrations import torch_sdpa  # noqa: E402
from flashsdk.torch import explain, varlen_attention  # noqa: E402
from flashsdk.torch import scaled_dot_product_attention as ours_alone  # noqa: E402
from sdpa_cases import (  # noqa: E402
    BOTH_WAYS,
    each_alone,
    gradients,
    jagged,
    same_as_math,
    sdpa,
    starts,
)
from standard_attention import assert_close, check, standard  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch_cases import one_thread, rotated, with_gradients  # noqa: E402, F401

BF16, F16 = torch.bfloat16, torch.float16
QUERIES, KEYS = (50, 9, 141), (70, 3, 400)


@pytest.fixture(params=[BF16, F16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


# ---- flash_attn


@pytest.fixture
def flash_attn():
    """What ``import flash_attn`` finds, also where the real one is installed."""
    yield door.install(force=True)
    door.uninstall()


SLOPES = torch.tensor([0.5, 0.2, 0.1, 0.0])
CALLS = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (20, 0), "softcap": 3.0},
    "alibi": {"softmax_scale": 0.3, "alibi_slopes": SLOPES},
}


@pytest.mark.parametrize("name", CALLS)
def test_flash_attn_func(place, dtype, flash_attn, name):
    options = {
        k: x.to(place.device) if isinstance(x, torch.Tensor) else x for k, x in CALLS[name].items()
    }
    q = place.randn(2, 140, 4, 64, dtype=dtype)
    k, v = (place.randn(2, 200, 2, 64, dtype=dtype) for _ in "kv")
    place.ours(explain(flash_attn.flash_attn_func, q, k, v, **options))
    scores = {k: x for k, x in options.items() if k not in ("causal", "window_size")}
    visible = None
    if "causal" in options:
        visible = torch.ones(140, 200, dtype=torch.bool, device=place.device).tril(60)
        visible = visible.triu(60 - options.get("window_size", (200,))[0])
    check(
        lambda *x: flash_attn.flash_attn_func(*x, **options, return_attn_probs=True)[:2],
        (q, k, v),
        visible=visible,
        **scores,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_varlen_func(place, dtype, flash_attn, causal):
    lengths_k = QUERIES if causal else KEYS
    q, k, v = (place.randn(sum(n), 4, 64, dtype=dtype) for n in (QUERIES, lengths_k, lengths_k))
    lengths = [starts(n, place.device) for n in (QUERIES, lengths_k)]
    lengths += [max(QUERIES), max(lengths_k)]
    call = functools.partial(flash_attn.flash_attn_varlen_func, causal=causal)
    place.ours(explain(call, q, k, v, *lengths))
    definition = each_alone(QUERIES, lengths_k, is_causal=causal)
    check(lambda *x: (call(*x, *lengths),), (q, k, v), definition)


def test_padding_is_taken_out_and_put_back(place, dtype, flash_attn):
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

    q, k, v = (place.randn(3, 150, 4, 64, dtype=dtype) for _ in "qkv")
    mask = torch.arange(150) < torch.tensor([150, 80, 7])[:, None]
    mask = mask.to(place.device)

    def unpadded(q, k, v):
        rows, indices, cu_seqlens, longest, _ = unpad_input(q, mask)
        k, v = (index_first_axis(x.flatten(0, 1), indices) for x in (k, v))
        out = flash_attn.flash_attn_varlen_func(
            *map(place.put, (rows, k, v)),
            *(cu_seqlens, cu_seqlens, longest, longest),
            causal=True,
        )
        return (pad_input(out, indices, 3, 150),)

    visible = mask[:, None, None] & torch.ones_like(mask[0]).expand(150, 150).tril()

    def padded(q, k, v):
        return (standard(q, k, v, visible=visible)[0] * mask[..., None, None],)

    place.ours(explain(lambda *x: unpadded(*x)[0], q, k, v))
    check(unpadded, (q, k, v), padded)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_flash_attn_with_kvcache(place, dtype, flash_attn, interleaved, count, page_size):
    """New keys are rotated and written behind the used ones, and all are attended to."""
    batch, room, used = 3, 96, [70, 0, 31]
    q = place.randn(batch, count, 4, 64, dtype=dtype)
    k, v = (place.randn(batch, count, 2, 64, dtype=dtype) for _ in "kv")
    caches = [torch.randn(batch, room, 2, 64).to(place.device, dtype) for _ in "kv"]
    angles = torch.arange(room)[:, None] / 2.0 ** torch.arange(12)
    cos, sin = (x.to(place.device) for x in (angles.cos(), angles.sin()))

    def attended(at):
        """By the definition, in this dtype; tables are rounded as float32."""
        held, outs = torch.promote_types(at, torch.float32), []
        for b, n in enumerate(used):
            turn = cos.to(held), sin.to(held), torch.arange(n, n + count, device=place.device)
            turned = [rotated(x[b].to(held), *turn, interleaved).to(at) for x in (q, k)]
            keys = torch.cat((caches[0][b, :n].to(at), turned[1]))[None]
            values = torch.cat((caches[1][b, :n], v[b])).to(at)[None]
            visible = torch.ones(count, n + count, dtype=torch.bool, device=place.device).tril(n)
            outs.append(standard(turned[0][None], keys, values, visible=visible)[0])
        return torch.cat(outs)

    plain, exact = attended(dtype), attended(torch.float64)
    given, table = [x.clone() for x in caches], None
    if page_size is not None:  # in any order
        order = torch.randperm(batch * room // page_size)
        table = order.argsort().to(place.device, torch.int32).view(batch, -1)
        pages = (x.unflatten(1, (-1, page_size)).flatten(0, 1) for x in caches)
        given = [x[order.to(place.device)] for x in pages]
    lengths = torch.tensor(used, dtype=torch.int32, device=place.device)
    out = flash_attn.flash_attn_with_kvcache(
        q, *given, k, v, cos, sin, lengths, block_table=table, causal=True,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    assert_close([out], [plain], [exact])
    if table is not None:
        given = [x[table.long()].flatten(1, 2) for x in given]
    for b, n in enumerate(used):
        assert torch.equal(given[1][b, n : n + count], v[b])
        for written, before in zip(given, caches, strict=True):
            assert torch.equal(written[b, :n], before[b, :n])
            assert torch.equal(written[b, n + count :], before[b, n + count :])


def test_flash_attn_with_a_pad(place, dtype, flash_attn, monkeypatch):
    """In a part of a larger cache; contents are checked on a GPU where FLASHSDK_CHECK says so."""
    used, pads = [70, 5, 31], [3, 5, 0]
    q = place.randn(3, 2, 4, 64, dtype=dtype)
    caches = [place.randn(5, 200, 2, 64, dtype=dtype)[1:4, 50:130] for _ in "kv"]
    lengths, pad = (torch.tensor(x, dtype=torch.int32, device=place.device) for x in (used, pads))

    def attended(at):
        outs = []
        for b, (begin, end) in enumerate(zip(pads, used, strict=True)):
            keys, values = (x[b : b + 1, begin:end].to(at) for x in caches)
            visible = torch.ones(2, end - begin, dtype=torch.bool, device=place.device)
            outs.append(standard(q[b : b + 1].to(at), keys, values, visible=visible)[0])
        return torch.cat(outs)

    def step():
        return flash_attn.flash_attn_with_kvcache(
            q, *caches, cache_seqlens=lengths, cache_leftpad=pad
        )

    with torch.no_grad():
        out = step()
        assert_close([out], [attended(dtype)], [attended(torch.float64)])
        if place.device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step()
            graph.replay()
            assert torch.equal(captured, out)
        monkeypatch.setattr(_contents, "ON", True)
        assert torch.equal(step(), out)
        pad[1] = -1
        with pytest.raises(fs.Error, match=r"^cache_leftpad: -1 at \[1\]; 0 to cache_seqlens$"):
            step()


# ---- PyTorch's own function


@pytest.fixture
def enabled():
    """And nothing else: on Hopper PyTorch's own first choice is cuDNN."""
    with torch_sdpa.enable():
        yield
    torch._dynamo.reset()


def heads_first(place, dtype, seqlen_q=140, seqlen_k=None, heads_kv=4, dim=64, dim_v=None):
    keys = heads_kv, seqlen_k or seqlen_q
    shapes = (4, seqlen_q, dim), (*keys, dim), (*keys, dim_v or dim)
    return with_gradients([place.randn(2, *s, dtype=dtype) for s in shapes])


@BOTH_WAYS
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(140, 140), (11, 300), (300, 11)])
def test_sdpa(place, dtype, enabled, seqlen_q, seqlen_k):
    inputs = heads_first(place, dtype, seqlen_q, seqlen_k)
    for op in ("fwd", "bwd"):
        place.ours(torch_sdpa.explain(*inputs, op=op))
    same_as_math(inputs)
    same_as_math(inputs, scale=0.3)


@BOTH_WAYS
@pytest.mark.parametrize("dim, dim_v", [(64, 128), (128, 64), (320, 320), (512, 512)])
def test_head_dims_that_flash_attention_leaves_out(place, dtype, enabled, dim, dim_v):
    """On a GPU: they come by way of memory-efficient attention."""
    if place.device == "cpu" and dim != dim_v:
        pytest.skip("PyTorch's math has it")
    inputs = heads_first(place, dtype, dim=dim, dim_v=dim_v)
    for op in ("fwd", "bwd"):
        why = torch_sdpa.explain(*inputs, op=op)
        assert why.taken, str(why)
    if place.device == "cuda":
        assert why.backend == "EFFICIENT_ATTENTION"
    for is_causal in (False, True):
        same_as_math(inputs, is_causal=is_causal)


@BOTH_WAYS
def test_the_order_of_pytorchs_backends_comes_back(place, dtype):
    inputs = heads_first(place, dtype)
    choice = torch_sdpa.explain(*inputs).backend  # PyTorch makes its order with the first call
    before = sdp_order()
    with torch_sdpa.enable():
        assert torch_sdpa.explain(*inputs).backend == "FLASH_ATTENTION"
    assert sdp_order() == before
    assert torch_sdpa.explain(*inputs).backend == choice


@BOTH_WAYS
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_causal_and_grouped_heads(place, dtype, enabled, heads_kv):
    inputs = heads_first(place, dtype, heads_kv=heads_kv)
    options = {"is_causal": True, "enable_gqa": heads_kv != 4}
    place.ours(torch_sdpa.explain(*inputs, **options))
    same_as_math(inputs, **options)


def some_keys(place, *shape):
    """True for what is seen: half of the keys, the first always."""
    mask = torch.rand(shape, device=place.device) < 0.5
    mask[..., 0] = True
    return mask


@BOTH_WAYS
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("shape", [(140, 304), (2, 1, 1, 304), (1, 4, 1, 304), (2, 4, 140, 304)])
def test_masks(place, dtype, enabled, shape, as_float):
    inputs, mask = heads_first(place, dtype, 140, 304), some_keys(place, *shape)
    if as_float:
        mask = torch.randn(shape, device=place.device).to(dtype).masked_fill(~mask, -torch.inf)
    for op in ("fwd", "bwd"):
        place.ours(torch_sdpa.explain(*inputs, mask, op=op))
    same_as_math(inputs, mask, scale=0.2)
    with torch.no_grad():  # no log-sum-exp is asked for
        assert torch.equal(sdpa(*inputs, mask), ours_alone(*inputs, as_pytorch_has_it(mask, dtype)))


def as_pytorch_has_it(mask, dtype):
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


@BOTH_WAYS
def test_masks_of_odd_lengths_and_queries_that_see_nothing(place, dtype, enabled):
    """PyTorch pads rows of a mask; which kernel is taken depends on that."""
    inputs, mask = heads_first(place, dtype, 45, 301), some_keys(place, 2, 1, 45, 301)
    mask[:, :, 7:11] = False
    assert torch_sdpa.explain(*inputs, mask).taken

    def theirs(*x):
        return (standard(*(y.transpose(1, 2) for y in x), visible=mask)[0].transpose(1, 2),)

    check(lambda *x: (sdpa(*x, mask),), [x.detach() for x in inputs], theirs)


@BOTH_WAYS
def test_a_backward_behind_the_end(place, dtype):
    """PyTorch's own then, which reads our log-sum-exp: of queries that see nothing, too."""
    if place.shifted:
        pytest.skip("PyTorch's own kernel takes no such address")
    inputs, mask = heads_first(place, dtype, 45, 304), some_keys(place, 2, 1, 45, 304)
    mask[:, :, 7:11] = False
    with torch_sdpa.enable():
        out = sdpa(*inputs, mask)
    behind = torch.autograd.grad(out, inputs, torch.ones_like(out))
    with torch_sdpa.enable():
        want = torch.autograd.grad(sdpa(*inputs, mask), inputs, torch.ones_like(out))
    for one, other in zip(behind, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@BOTH_WAYS
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_a_mask_is_pytorchs(place, dtype, enabled, compiled):
    """In compiled code the forward does not know of it, and its results are theirs to read."""
    if place.shifted:
        pytest.skip("PyTorch's own kernel takes no such address")
    inputs = heads_first(place, dtype, 48, 304)
    mask = place.randn(48, 304, dtype=dtype).requires_grad_()
    assert not torch_sdpa.explain(*inputs, mask).taken
    function = torch.compile(sdpa, backend="aot_eager") if compiled else sdpa
    got = torch.autograd.grad(function(*inputs, mask).sum(), (*inputs, mask))
    with sdpa_kernel(SDPBackend.MATH):
        want = torch.autograd.grad(sdpa(*inputs, mask).sum(), (*inputs, mask))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@BOTH_WAYS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_sdpa_under_compile(place, dtype, enabled, backend):
    if backend == "inductor" and (place.device == "cpu" or place.shifted):
        pytest.skip("test_torch_sdpa_integration.py has a CPU's; its code aligns tensors for sm90")

    def attend(q, k, v, mask, is_causal):
        return sdpa(q, k, v, mask, is_causal=is_causal)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    same_as_math(heads_first(place, dtype), function=compiled, is_causal=True)
    inputs, mask = heads_first(place, dtype, 140, 304), some_keys(place, 140, 304)
    same_as_math(inputs, mask, function=compiled, is_causal=False)


@BOTH_WAYS
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_in_cuda_graphs_of_compiled_code(place, dtype, enabled, masked):
    """Such code asks where each result lies, and whose memory it is.

    Dropout's state lies in that of lse without a mask, and with one in memory of its own.
    """
    if place.device == "cpu" or place.shifted:
        pytest.skip("CUDA graphs; compiled code aligns tensors for sm90")
    mask = some_keys(place, 140, 304) if masked else None
    causal = not masked
    compiled = torch.compile(functools.partial(sdpa, is_causal=causal), mode="reduce-overhead")
    for _ in range(4):  # warm up, record, replay
        inputs = heads_first(place, dtype, 140, 304 if masked else 140)
        same_as_math(inputs, mask, function=compiled, is_causal=causal)


@BOTH_WAYS
def test_what_the_backward_needs_may_be_moved(place, dtype, enabled):
    inputs = heads_first(place, dtype)
    with torch.autograd.graph.save_on_cpu():
        out = sdpa(*inputs, is_causal=True)
    got = torch.autograd.grad(out, inputs, torch.ones_like(out))
    want = torch.autograd.grad(sdpa(*inputs, is_causal=True), inputs, torch.ones_like(out))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@BOTH_WAYS
def test_sdpa_under_autocast(place, dtype, enabled):
    """Float32 before and after, as a model's parameters are."""
    inputs = heads_first(place, torch.float32)
    cast = [x.detach().to(dtype).requires_grad_() for x in inputs]
    if place.shifted:
        pytest.skip("what autocast copies is where sm90 takes it")
    with torch.autocast(place.device, dtype):
        place.ours(torch_sdpa.explain(*inputs))
        got = gradients(sdpa, inputs)
    want = gradients(ours_alone, cast)
    assert got[0].dtype == dtype and torch.equal(got[0], want[0])
    for one, other in zip(got[1:], want[1:], strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.to(dtype), other)


@BOTH_WAYS
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_causal", [False, True])
def test_nested_tensors(place, dtype, enabled, is_causal):
    """By the definition, and bit by bit our own of the same rows."""
    lengths_k = QUERIES if is_causal else KEYS
    inputs = [place.randn(sum(n), 4, 64, dtype=dtype) for n in (QUERIES, lengths_k, lengths_k)]
    call = jagged(QUERIES, lengths_k, device=place.device, is_causal=is_causal)
    definition = each_alone(QUERIES, lengths_k, is_causal=is_causal)
    check(call, inputs, definition)
    lengths = [starts(n, place.device) for n in (QUERIES, lengths_k)]
    lengths += [max(QUERIES), max(lengths_k)]
    mask = fs.Causal() if is_causal else None
    place.ours(explain(varlen_attention, *inputs, *lengths, mask=mask))
    assert torch.equal(call(*inputs)[0], varlen_attention(*inputs, *lengths, mask=mask))
