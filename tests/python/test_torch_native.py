"""Eager calls of flashsdk.torch in C++: which take that way, and that both ways give the same."""

import contextlib
import weakref

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
from flashsdk import _flash_attn_func, _flash_attn_kvcache, _torch_eager, _torch_ops  # noqa: E402
from flashsdk import torch as adapter  # noqa: E402
from flashsdk._torch_eager import recorded  # noqa: E402
from flashsdk.integrations import _sdpa_kernels  # noqa: E402
from flashsdk.torch import _attention, _sdpa  # noqa: E402
from torch_cases import (  # noqa: E402
    OFFSETS,
    SINK,
    USED,
    Watching,
    block_mask,
    qkv,
    with_gradients,
)

built = _torch_eager.native is not _torch_eager.InPython
ADAPTERS = (_attention, _sdpa, _flash_attn_func, _flash_attn_kvcache)
needs_native = pytest.mark.skipif(not built, reason="flashsdk._torch_native is not built")

CAUSAL, TOP_LEFT = fs.Causal(), fs.Causal("top_left")
LENGTHS = (OFFSETS, OFFSETS, 40, 40)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])
BIAS = torch.linspace(-2, 2, 4 * 70 * 70).view(1, 4, 70, 70)
SEEN = torch.arange(140).view(2, 1, 1, 70) % 3 > 0


def heads_first(tensors):
    return [x.transpose(1, 2).contiguous() for x in tensors]


def sdpa(**options):
    return lambda *x: adapter.scaled_dot_product_attention(*x, **options)


def attention(**options):
    return lambda *x: adapter.attention(*x, **options)


def with_sink(**options):
    return lambda q, k, v, sink: adapter.attention(q, k, v, sink=sink, **options)


def flash(**options):
    return lambda *x: adapter.flash_attn_func(*x, **options)


def fused(function, *rest):
    """Of one tensor made of q, k and v, or of k and v."""
    if "qkv" in function.__name__:
        return lambda q, k, v: function(torch.stack((q, k, v), -3), *rest)
    return lambda q, k, v: function(q, torch.stack((k, v), -3), *rest)


BATCHES = {
    "attention": attention(),
    "causal": attention(mask=CAUSAL),
    "dense, by its class": attention(mask=fs.Dense()),
    "window": attention(mask=fs.SlidingWindow(9, 3)),
    "top left": attention(mask=TOP_LEFT),
    "without the diagonal": attention(mask=fs.Band(None, -1)),
    "lse": attention(return_lse=True, mask=CAUSAL),
    "bias": attention(bias=BIAS),
    "boolean bias": attention(bias=SEEN),
    "ALiBi": attention(alibi_slopes=SLOPES, mask=CAUSAL),
    "softcap and scale": attention(softcap=3.0, softmax_scale=0.4),
    "integers for numbers": attention(softcap=3, softmax_scale=1),
    "dropout": attention(dropout_p=0.3),
    "dropout of nearly all": attention(dropout_p=1 - 1e-12),
    "dropout of a seed": attention(dropout_p=0.3, seed=2**64 - 1, return_lse=True),
    "deterministic, on a backend": attention(deterministic=True, backend="cpu"),
    "used lengths": attention(**USED),
    "used keys": attention(mask=CAUSAL, return_lse=True, seqused_k=USED["seqused_k"]),
    "a constant sink": attention(sink=SINK),
    "splits": attention(num_splits=1, bias=BIAS),
    "flash_attn": flash(),
    "flash_attn, causal": flash(causal=True, softcap=-1.0),
    "flash_attn, window": flash(window_size=(7, 2), alibi_slopes=SLOPES),
    "flash_attn, causal window": flash(window_size=(7, 2**40), causal=True, softmax_scale=0.3),
    "flash_attn, right": flash(window_size=(-1, 4), softcap=2.0, deterministic=True),
    "flash_attn, dropout": flash(dropout_p=0.3),
    "flash_attn, probs": flash(return_attn_probs=True),
    "qkvpacked": fused(adapter.flash_attn_qkvpacked_func),
    "kvpacked": fused(adapter.flash_attn_kvpacked_func, 0.0, None, True),
}
PACKED = {
    "varlen": lambda *x: adapter.varlen_attention(*x, *LENGTHS, mask=CAUSAL),
    "varlen, lse": lambda *x: adapter.varlen_attention(
        *x, *LENGTHS, return_lse=True, alibi_slopes=SLOPES, dropout_p=0.2
    ),
    "flash_attn_varlen": lambda *x: adapter.flash_attn_varlen_func(*x, *LENGTHS, causal=True),
    "varlen, splits": lambda *x: adapter.varlen_attention(*x, *LENGTHS, num_splits=3),
    "varlen_qkvpacked": fused(adapter.flash_attn_varlen_qkvpacked_func, OFFSETS, 40),
    "varlen_kvpacked": fused(adapter.flash_attn_varlen_kvpacked_func, *LENGTHS),
}
HEADS_FIRST = {
    "sdpa": sdpa(),
    "sdpa, causal": sdpa(is_causal=True, scale=0.3),
    "sdpa, dropout": sdpa(dropout_p=0.3),
    "sdpa, bias": sdpa(attn_mask=BIAS),
    "sdpa, boolean bias": sdpa(attn_mask=SEEN),
    "sdpa, bias of two dimensions": sdpa(attn_mask=BIAS[0, 0]),
}
TAKEN = {name: (call, qkv()) for name, call in BATCHES.items()}
TAKEN |= {name: (call, [x[0] for x in qkv()]) for name, call in PACKED.items()}
TAKEN |= {name: (call, heads_first(qkv())) for name, call in HEADS_FIRST.items()}
GROUPED, ONE = heads_first(qkv(heads_kv=2)), heads_first(qkv(heads_kv=1, seqlen_k=90, dim_v=24))
TAKEN["sdpa, grouped"] = sdpa(enable_gqa=True), GROUPED
TAKEN["sdpa, one head of keys"] = sdpa(is_causal=True), ONE
TAKEN["sdpa of views"] = sdpa(), [x.transpose(1, 2) for x in qkv()]
TAKEN["sdpa, expanded"] = sdpa(), [x[:1].expand(2, -1, -1, -1) for x in heads_first(qkv())]
TAKEN["sdpa, columns"] = sdpa(), [x.mT.contiguous().mT for x in heads_first(qkv())]
TAKEN["flash_attn, columns"] = flash(), [x.mT.contiguous().mT for x in qkv()]
TAKEN["grouped"] = attention(mask=CAUSAL), qkv(heads_kv=2, seqlen_k=90, dim_v=24)
TAKEN["bfloat16"] = attention(), qkv(dtype=torch.bfloat16)
TAKEN["float16"] = sdpa(is_causal=True), heads_first(qkv(dtype=torch.float16))
TAKEN["sink"] = with_sink(mask=CAUSAL, return_lse=True), [*qkv(heads_kv=2), SINK]
TAKEN["sink and lengths"] = with_sink(num_splits=2, softcap=3.0, **USED), [*qkv(), SINK]
TAKEN["sink and dropout"] = with_sink(dropout_p=0.3, **USED), [*qkv(), SINK]
TAKEN["varlen, sink"] = (
    lambda q, k, v, sink: adapter.varlen_attention(q, k, v, *LENGTHS, sink=sink, return_lse=True),
    [*(x[0] for x in qkv()), SINK],
)
TAKEN["no query"] = attention(), [x[:, :n] for x, n in zip(qkv(), (0, 70, 70), strict=True)]


def no_way_in_python(monkeypatch):
    def called(*_, **__):
        raise AssertionError("the way in Python was taken")

    for module in ADAPTERS:
        monkeypatch.setattr(module, "attend", called)


def in_python(monkeypatch):
    for module in ADAPTERS:
        monkeypatch.setattr(module, "native", _torch_eager.InPython)


def results(call, inputs, seed=3):
    """Outputs of a call, and the gradients of all that have one."""
    inputs = with_gradients(inputs)
    torch.manual_seed(seed)
    with torch.no_grad():
        alone = call(*inputs)
    torch.manual_seed(seed)
    given = call(*inputs)
    alone, outs = ((x,) if isinstance(x, torch.Tensor) else x for x in (alone, given))
    for x, y in zip(alone, outs, strict=True):
        assert torch.equal(x, y) and not x.requires_grad
    roots = [x for x in outs if x.requires_grad]
    weights = [torch.linspace(-1, 2, x.numel()).view(x.shape).to(x.dtype) for x in roots]
    return [*outs, *torch.autograd.grad(roots, inputs, weights)]


@needs_native
@pytest.mark.parametrize("call, inputs", TAKEN.values(), ids=TAKEN)
def test_takes_ordinary_calls_and_gives_the_same(monkeypatch, call, inputs):
    with monkeypatch.context() as m:
        no_way_in_python(m)
        native = results(call, inputs)
    in_python(monkeypatch)
    python = results(call, inputs)
    for a, b in zip(native, python, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_takes_autocast(monkeypatch, dtype):
    inputs, first = qkv(), heads_first(qkv())
    with torch.autocast("cpu", dtype):
        with monkeypatch.context() as m:
            no_way_in_python(m)
            native = [*results(attention(bias=BIAS), inputs), *results(sdpa(), first)]
        in_python(monkeypatch)
        python = [*results(attention(bias=BIAS), inputs), *results(sdpa(), first)]
    assert native[0].dtype == dtype and native[1].dtype == torch.float32
    assert all(map(torch.equal, native, python))


OTHER_HEADS = [qkv()[0], *(x[:, :, :3] for x in qkv()[1:])]
REFUSED_DROPOUT = {
    "softcap: 1e-300": (attention(dropout_p=0.3, softcap=1e-300), qkv()),
    "softmax_scale: ": (flash(dropout_p=0.3, softmax_scale=1e300), qkv()),
    "scale: ": (sdpa(dropout_p=0.3, scale=1e300), heads_first(qkv())),
    "dropout_p: 1.5": (attention(dropout_p=1.5), qkv()),
    "k: num_heads_kv 3": (attention(dropout_p=0.3), OTHER_HEADS),
    "cu_seqlens_k: ": (PACKED["varlen, lse"], [qkv()[0][0], *(x[0, :50] for x in qkv()[1:])]),
}


@pytest.mark.usefixtures("torch_way")
@pytest.mark.parametrize("line", REFUSED_DROPOUT)
def test_a_refused_call_draws_no_seed(line):
    call, inputs = REFUSED_DROPOUT[line]
    for given in (inputs, with_gradients(inputs)):
        state = torch.get_rng_state()
        with pytest.raises(fs.Error, match=f"^{line}"):
            call(*given)
        assert torch.equal(torch.get_rng_state(), state)


class Wrapper(torch.Tensor):
    """A subclass that looks at functions."""


NOT_TAKEN = {
    "a layout of blocks": lambda *x: adapter.attention(*x, mask=fs.layouts.causal(70, 70, 16)),
    "a subclass": lambda q, k, v: adapter.attention(q.as_subclass(Wrapper), k, v),
    "a negated view": lambda q, k, v: adapter.attention(q._neg_view(), k, v),
    "a sink of a subclass": lambda *x: adapter.attention(
        *x, sink=torch.zeros(70).as_subclass(Wrapper)
    ),
    "a sink of torch.func": lambda *x: torch.func.grad(
        lambda sink: adapter.attention(*x, sink=sink).sum()
    )(torch.zeros(70)),
    "negated lengths": lambda *x: adapter.attention(*x, seqused_k=(-USED["seqused_k"])._neg_view()),
    "splits in a tensor": lambda *x: adapter.attention(*x, num_splits=OFFSETS[1]),
    "vmap": lambda *x: torch.func.vmap(adapter.attention)(*(y[None] for y in x)),
    "meta": lambda *x: adapter.attention(*(y.to("meta") for y in x)),
    "a scale of NumPy's": lambda *x: adapter.attention(*x, softmax_scale=OFFSETS.numpy()[1]),
    "a window in a list": lambda *x: adapter.flash_attn_func(*x, window_size=[3, 3]),
    "a broadcast batch": lambda q, k, v: adapter.scaled_dot_product_attention(q[0], k, v),
    "few heads of queries": lambda q, k, v: adapter.scaled_dot_product_attention(q[:, :1], k, v),
    "a mask of columns": lambda *x: adapter.scaled_dot_product_attention(
        *x, attn_mask=torch.zeros(70, 70).mT
    ),
}


@needs_native
@pytest.mark.parametrize("call", NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_leaves_the_rest_to_python(monkeypatch, call):
    inputs = qkv(seqlen_q=70, heads=70, dim=8)
    call(*inputs)
    no_way_in_python(monkeypatch)
    with pytest.raises(AssertionError, match="the way in Python"):
        call(*inputs)


@needs_native
def test_an_error_is_no_call_for_python():
    """It arrives as it is: None and an error at once would be a SystemError."""
    band = fs.SlidingWindow(9, 3)
    object.__delattr__(band, "left")
    q, k, v = qkv()
    with pytest.raises(AttributeError, match="left"):
        _torch_eager.native.attention(
            *(q, k, v, band, None, None, None, 0.0, 0.0, None, False, None, None),
            *(None, None, None, None, None),
        )


@needs_native
@pytest.mark.parametrize(
    "name, counts",
    [("attention", (18, 22)), ("flash_attn", (12,)), ("scaled_dot_product_attention", (8,))],
)
def test_entries_count_their_arguments(name, counts):
    entry = getattr(_torch_eager.native, name)
    for n in range(25):
        if n in counts:
            assert entry(*[None] * n) is None
        else:
            with pytest.raises(TypeError, match=rf"{name}\(\) takes .* arguments; {n} were given"):
                entry(*[None] * n)


@needs_native
@pytest.mark.parametrize("lengths", [(), LENGTHS[:3], [*LENGTHS], (*LENGTHS, 1), 3])
def test_flash_attn_takes_a_tuple_of_four(lengths):
    rest = 0.0, None, False, (-1, -1), 0.0, None, False, False
    with pytest.raises(TypeError, match="a tuple of four"):
        _torch_eager.native.flash_attn(*(x[0] for x in qkv()), lengths, *rest)


def test_a_graph_ends_with_its_outputs():
    """None of what it has saved holds it; a leaf lives as long as the graph."""
    for call, inputs in ((attention(return_lse=True), qkv()), (sdpa(), heads_first(qkv()))):
        leaves = with_gradients(inputs)
        outs = call(*leaves)
        leaf = weakref.ref(leaves[0])
        del leaves
        assert leaf() is not None
        del outs
        assert leaf() is None


CHECKPOINTED = {
    "heads first, dropout": (sdpa(dropout_p=0.3), heads_first(qkv())),
    "heads first, bias": (sdpa(attn_mask=BIAS), heads_first(qkv())),
    "sink and dropout": TAKEN["sink and dropout"],
    "sink and lengths": TAKEN["sink and lengths"],
}


@pytest.mark.parametrize("watch", [contextlib.nullcontext, Watching, torch.profiler.profile])
@pytest.mark.parametrize("call, inputs", CHECKPOINTED.values(), ids=CHECKPOINTED)
@pytest.mark.usefixtures("torch_way")
def test_checkpointing(call, inputs, watch):
    """Also where somebody looks on at the first forward alone."""
    inputs = with_gradients(inputs)
    torch.manual_seed(5)
    want = torch.autograd.grad(call(*inputs).square().sum(), inputs)
    torch.manual_seed(5)
    with watch():
        out = torch.utils.checkpoint.checkpoint(call, *inputs, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.square().sum(), inputs), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("torch_way")
def test_hooks_leave_no_second_derivative():
    q, k, v = with_gradients(heads_first(qkv()))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        out = sdpa()(q, k, v)
    with pytest.raises(fs.Error, match="create_graph: True"):
        (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        gradient.sum().backward()


@pytest.mark.usefixtures("torch_way")
def test_a_sink_alone_is_trained():
    inputs, weights = [*qkv(), SINK], torch.linspace(-1, 1, 70 * 32).view(70, 1, 32)
    everything = with_gradients(inputs)
    want = torch.autograd.grad((with_sink()(*everything) * weights).sum(), everything)[3]
    sink = torch.nn.Parameter(SINK.clone())
    loss = (with_sink()(*inputs[:3], sink) * weights).sum()
    (gradient,) = torch.autograd.grad(loss, sink, retain_graph=True)
    assert torch.equal(gradient, want)
    with pytest.raises(fs.Error, match="create_graph: True"):
        (gradient,) = torch.autograd.grad(loss, sink, create_graph=True)
        gradient.sum().backward()


@pytest.mark.usefixtures("torch_way")
def test_lengths_that_changed_have_no_gradient():
    inputs, used = with_gradients(qkv()), USED["seqused_k"].clone()
    out = adapter.attention(*inputs, seqused_k=used)
    used += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@needs_native
def test_takes_a_cache(monkeypatch):
    """Pages as well, which have no backward, so that a call that autograd records is refused."""
    q, k, v = qkv(seqlen_q=1, seqlen_k=32, batch=4, heads_kv=2)
    used = USED["seqused_k"]  # in pages of 32 keys two and three
    table = torch.tensor([[3, 0, -1], [2, 1, 0]], dtype=torch.int32)
    pages, rows = {"seqused_k": used, "block_table": table}, torch.tensor([3, 1], dtype=torch.int32)

    def calls():
        yield adapter.attention(q[:2], k, v, mask=CAUSAL, num_splits=1, **pages)
        cache = {"cache_seqlens": rows, "causal": True, "return_softmax_lse": True}
        yield adapter.flash_attn_with_kvcache(q, k, v, cache_seqlens=5, softcap=-1)
        yield from adapter.flash_attn_with_kvcache(q[:2], k, v, cache_batch_idx=rows, **cache)
        yield adapter.flash_attn_with_kvcache(
            *(q[:2], k, v), cache_seqlens=used, block_table=table, window_size=(4, 0), num_splits=2
        )

    with monkeypatch.context() as m:
        no_way_in_python(m)
        native = list(calls())
    with monkeypatch.context() as m:
        in_python(m)
        assert all(map(torch.equal, native, calls()))
    for trained in ({"q": q[:2].clone().requires_grad_()}, {"sink": SINK.clone().requires_grad_()}):
        call = {"q": q[:2], "k": k, "v": v, **pages, **trained}
        with pytest.raises(fs.Unsupported, match=r"^block_table: given; none, as pages"):
            adapter.attention(**call).sum().backward()
        with torch.no_grad():
            no_gradient = adapter.attention(**call)
        assert not no_gradient.requires_grad


def seeds_are(change):
    """Hooks that give back another tensor for the seed."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: change(x) if x.dtype == torch.int64 else x
    )


@needs_native
@pytest.mark.parametrize(
    "change",
    [lambda x: x[:0], lambda x: x.repeat(2), lambda x: x.to("meta"), lambda x: x.float()],
    ids=["empty", "two", "meta", "float"],
)
@pytest.mark.parametrize("watch", [contextlib.nullcontext, Watching])
def test_a_seed_that_hooks_changed_is_refused(change, watch):
    for call, inputs in ((attention(dropout_p=0.3), qkv()), (sdpa(dropout_p=0.3), GROUPED)):
        q, k, v = with_gradients(inputs[:1] * 3)
        with seeds_are(change):
            out = call(q, k, v)
        with watch(), pytest.raises(fs.Error, match="seed: "):
            out.sum().backward()


@needs_native
def test_a_seed_that_hooks_copied_is_taken():
    inputs = with_gradients(qkv())
    call = attention(dropout_p=0.3, seed=2**64 - 5)
    want = torch.autograd.grad(call(*inputs).square().sum(), inputs)
    with seeds_are(lambda x: x.repeat(3)[1]):
        loss = call(*inputs).square().sum()
    assert all(map(torch.equal, torch.autograd.grad(loss, inputs), want))
    if torch.cuda.is_available():
        with seeds_are(torch.Tensor.cuda):
            loss = call(*inputs).square().sum()
        assert all(map(torch.equal, torch.autograd.grad(loss, inputs), want))


COMPILED = {
    "dropout": (attention(mask=CAUSAL, dropout_p=0.3), qkv()),
    "lse": (lambda *x: adapter.attention(*x, return_lse=True)[1], qkv()),
    "heads first": (sdpa(is_causal=True, scale=0.3), heads_first(qkv())),
    "packed": (PACKED["varlen"], [x[0] for x in qkv()]),
}


@pytest.mark.usefixtures("torch_way")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("call, inputs", COMPILED.values(), ids=COMPILED)
def test_compiled_autograd(call, inputs, dynamic):
    assert_compiled_autograd_agrees(call, inputs, dynamic=dynamic)


@pytest.mark.usefixtures("torch_way")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_autograd_of_operators():
    """Forwards that are watched, and some calls by themselves, record the operator's own node."""

    def watched(*x):
        with Watching():
            return adapter.attention(*x, mask=CAUSAL)

    assert_compiled_autograd_agrees(watched, qkv())
    assert_compiled_autograd_agrees(with_sink(mask=block_mask(), softmax_scale=0.2), [*qkv(), SINK])


@needs_native
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["sink", "sink and lengths", "varlen, sink", "used keys"])
def test_compiled_autograd_with_more_arguments(name):
    assert_compiled_autograd_agrees(*TAKEN[name])


def assert_compiled_autograd_agrees(call, inputs, dynamic=None):
    torch._dynamo.reset()
    inputs = with_gradients(inputs)
    outs = call(*inputs)
    loss = (outs if isinstance(outs, torch.Tensor) else outs[0]).square().sum()
    want = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
    compiler = torch.compile(backend="aot_eager", dynamic=dynamic)
    with torch._dynamo.compiled_autograd._enable(compiler):
        loss.backward()
    for x, y in zip(inputs, want, strict=True):
        torch.testing.assert_close(x.grad, y)


# ---- compiled code

PACKED_ROWS = [x[0] for x in qkv()]
COMPILED = {
    "attention": (attention(mask=CAUSAL, bias=BIAS), qkv()),
    "varlen": (lambda *x: adapter.varlen_attention(*x, *LENGTHS), PACKED_ROWS),
    "sink": (with_sink(return_lse=True), [*qkv(), SINK]),
}


@needs_native
@pytest.mark.parametrize("call, inputs", COMPILED.values(), ids=COMPILED)
def test_compiled_code_asks_nothing_of_python(monkeypatch, call, inputs):
    """The operators' kernels for autograd are Python's, and nothing is recorded there."""
    want = results(call, inputs)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    results(compiled, inputs)  # Python is asked while it is compiled
    asked = []
    monkeypatch.setattr(_torch_ops, "recorded", lambda x: asked.append(1) or recorded(x))
    for a, b in zip(results(compiled, inputs), want, strict=True):
        assert torch.equal(a, b)
    assert not asked
    results(lambda *x: torch.func.vmap(call)(*(t[None] for t in x)), [*inputs])
    assert asked  # so that the line above can fail


@needs_native
def test_every_function_has_both_ways():
    """What stands for the extension where it is missing has all that it has."""
    ways = _torch_eager.native, _torch_eager.InPython
    native, python = ({n for n, f in vars(way).items() if callable(f)} for way in ways)
    below_pytorch = {n for n in vars(_sdpa_kernels) if n.endswith("_sdpa")}
    assert native - {"__loader__"} == {n for n in python if not n.startswith("_")} | below_pytorch
