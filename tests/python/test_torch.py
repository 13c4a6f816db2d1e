"""flashsdk.torch: values and gradients, and how they behave under autograd."""

import copy
import itertools
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
import flashsdk.torch as ft  # noqa: E402
from flashsdk.torch import attention, flash_attn_func, varlen_attention  # noqa: E402
from standard_attention import check, standard  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.utils import flop_counter  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_cases import TORCH, block_mask, qkv, with_gradients  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_way")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CAUSAL = fs.Causal()


# ---- values and gradients, against standard attention

FEATURES = {
    "dense": ({}, {}),
    "grouped": ({"heads_kv": 2}, {}),
    "one k and v head": ({"heads_kv": 1, "dim_v": 24}, {}),
    "causal": ({}, {"mask": CAUSAL}),
    "causal, more keys": ({"seqlen_k": 90}, {"mask": CAUSAL}),
    "causal, rows without keys": ({"seqlen_k": 40}, {"mask": CAUSAL}),
    "top left": ({"seqlen_k": 90}, {"mask": fs.Causal("top_left")}),
    "window": ({"heads_kv": 2}, {"mask": fs.SlidingWindow(9, 3)}),
    "blocks": ({}, {"mask": block_mask()}),
    "blocks and band": ({}, {"mask": block_mask(band=CAUSAL)}),
    "bias": ({}, {"bias": torch.linspace(-2, 2, 4 * 70 * 70).view(1, 4, 70, 70)}),
    "boolean bias": ({}, {"bias": torch.arange(140).view(2, 1, 1, 70) % 3 > 0}),
    "ALiBi": ({}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0])}),
    "softcap and scale": ({}, {"softcap": 3.0, "softmax_scale": 0.4, "mask": CAUSAL}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, options", FEATURES.values(), ids=FEATURES)
def test_agrees_with_standard_attention(shape, options, dtype):
    inputs = qkv(**shape, dtype=dtype)
    defined = {**options}
    if mask := defined.pop("mask", None):
        lengths = () if isinstance(mask, fs.BlockMask) else (70, shape.get("seqlen_k", 70))
        defined["visible"] = torch.from_numpy(mask.to_dense(*lengths))
    check(lambda *x: attention(*x, **options, return_lse=True), inputs, **defined)


@pytest.mark.parametrize("mask", [None, CAUSAL, fs.SlidingWindow(5, 5)], ids=str)
def test_packed_agrees_with_standard_attention(mask):
    lengths_q, lengths_k = (33, 0, 1, 40), (20, 7, 64, 40)
    offsets_q, offsets_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    q, k, v = (
        torch.randn(sum(lengths), heads, 16)
        for lengths, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )

    def one_by_one(q, k, v):
        parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
        outs, lses = [], []
        for a, b, c in parts:
            seen = None if mask is None else torch.from_numpy(mask.to_dense(len(a), len(b)))
            out, lse = standard(a[None], b[None], c[None], visible=seen)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1)

    def ours(q, k, v):
        return varlen_attention(q, k, v, offsets_q, offsets_k, 40, 64, mask=mask, return_lse=True)

    check(ours, (q, k, v), one_by_one)


def test_lse_alone_has_gradients():
    inputs = with_gradients(qkv())
    _, lse = attention(*inputs, return_lse=True)
    _, expected = standard(*inputs)
    ours = torch.autograd.grad(lse.sum(), inputs[:2], retain_graph=True)
    for a, b in zip(ours, torch.autograd.grad(expected.sum(), inputs[:2]), strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.autograd.grad(lse.sum(), inputs[2])[0].any()


# ---- dropout


def test_dropout_follows_manual_seed():
    q, k, v = qkv()
    torch.manual_seed(3)
    first, second = (attention(q, k, v, dropout_p=0.3) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, attention(q, k, v, dropout_p=0.3))


def test_dropout_leaves_the_generator_alone_without_need():
    q, k, v = qkv()
    before = torch.get_rng_state()
    attention(q, k, v)
    attention(q, k, v, dropout_p=0.3, seed=1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 - 1])
def test_dropout_with_a_seed_is_that_of_the_core(seed):
    q, k, v = qkv()
    expected, _ = fs.mha_fwd(q, k, v, dropout_p=0.3, seed=seed)
    assert torch.equal(attention(q, k, v, dropout_p=0.3, seed=seed), expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
@pytest.mark.parametrize("seeds", [[7, 2], [[7, 2], [3, 2**62]]], ids=["one", "each sequence's"])
def test_seeds_in_memory_are_those_of_the_core(seeds, dtype, compiled):
    q, k, v = qkv()
    expected, _ = fs.mha_fwd(q, k, v, dropout_p=0.3, seed=np.array(seeds))
    function = torch.compile(attention, backend="aot_eager") if compiled else attention
    q.requires_grad_()
    out = function(q, k, v, dropout_p=0.3, seed=torch.tensor(seeds, dtype=dtype))
    out.sum().backward()
    assert torch.equal(out, expected)


def test_backward_drops_what_forward_dropped():
    q, k, v = with_gradients(qkv())
    out = attention(q, k, v, dropout_p=0.4)
    dout = torch.randn_like(out)
    dv = torch.autograd.grad(out, v, dout)[0]
    # out is linear in v, so v·dv is dout·out with the same elements dropped.
    torch.testing.assert_close((v * dv).sum(), (dout * out).sum(), rtol=1e-4, atol=1e-3)


# ---- autograd


@pytest.mark.parametrize("needed", list(itertools.product((False, True), repeat=3))[1:])
def test_gradients_only_where_required(needed):
    inputs = qkv()
    everything = with_gradients(inputs)
    attention(*everything, mask=CAUSAL).sum().backward()
    some = [x.detach().requires_grad_(need) for x, need in zip(inputs, needed, strict=True)]
    attention(*some, mask=CAUSAL).sum().backward()
    for x, y, need in zip(some, everything, needed, strict=True):
        assert torch.equal(x.grad, y.grad) if need else x.grad is None


def test_one_tensor_as_q_k_and_v():
    x = torch.randn(2, 70, 4, 32)
    check(lambda x: attention(x, x, x, return_lse=True), [x], lambda x: standard(x, x, x))


def test_retained_graph_gives_the_same_again():
    inputs = with_gradients(qkv())
    loss = attention(*inputs, mask=CAUSAL).square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


def twice(loss, x):
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
    gradient.sum().backward()


SECOND_DERIVATIVES = {
    "backward twice": twice,
    "functional.hessian": torch.autograd.functional.hessian,
    "hessian": lambda loss, x: torch.func.hessian(loss)(x),
    "hessian in vmap": lambda loss, x: torch.func.vmap(torch.func.hessian(loss))(x[None]),
    "grad of grad": lambda loss, x: torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x),
    "jvp of grad": lambda loss, x: torch.func.jvp(torch.func.grad(loss), (x,), (x,)),
    "grad of jvp": lambda loss, x: torch.func.grad(lambda y: torch.func.jvp(loss, (y,), (x,))[1])(
        x
    ),
}


# Of torch, when it loads its forward-mode derivatives.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("derive", SECOND_DERIVATIVES.values(), ids=SECOND_DERIVATIVES)
def test_no_second_derivative(derive, name):
    inputs = dict(zip("qkv", qkv(seqlen_q=3, seqlen_k=3, batch=1, heads=1, dim=4), strict=True))

    def loss(x):
        return attention(**inputs | {name: x}).square().sum()

    with pytest.raises(fs.Error, match="as attention has no second derivative") as caught:
        derive(loss, inputs[name])
    assert caught.value.code == "unsupported"


def test_graph_free_modes():
    inputs = with_gradients(qkv())
    expected = attention(*inputs).detach()
    with torch.no_grad():
        out = attention(*inputs)
    assert torch.equal(out, expected) and not out.requires_grad
    with torch.inference_mode():
        out = attention(*(x.clone() for x in inputs))
        assert torch.equal(out, expected) and out.is_inference()


def test_meta_tensors():
    inputs = [x.to("meta").requires_grad_() for x in qkv(seqlen_k=90, dim_v=24)]
    out, lse = attention(*inputs, mask=block_mask(), dropout_p=0.1, return_lse=True)
    assert out.is_meta and out.shape == (2, 70, 4, 24)
    assert lse.is_meta and lse.shape == (2, 4, 70) and lse.dtype == torch.float32
    out.sum().backward()
    assert all(x.grad.shape == x.shape for x in inputs)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "seed"])
def test_meta_tensors_among_others(name):
    """Once the operators for meta tensors took such a call, and gave memory nobody had written."""
    tensors = dict(zip("qkv", qkv(), strict=True))
    tensors |= {"bias": torch.zeros(2, 4, 70, 70), "alibi_slopes": torch.zeros(4)}
    tensors["seed"] = torch.tensor([1, 2])
    tensors[name] = tensors[name].to("meta")
    first = "k: on cpu; meta, where q is" if name == "q" else f"{name}: on meta; cpu, where q is"
    for recorded in (False, True):
        tensors["k"] = tensors["k"].requires_grad_(recorded)
        with pytest.raises(fs.Error, match=f"^{first}$"):
            attention(**tensors, dropout_p=0.5)


def test_meta_lengths_among_others():
    q, k, v = (x[0] for x in qkv())
    offsets = torch.tensor([0, 70], dtype=torch.int32)
    with pytest.raises(fs.Error, match=r"^cu_seqlens_k: on meta; cpu, where q is$"):
        varlen_attention(q, k, v, offsets, offsets.to("meta"), 70, 70)


def flops(call, *tensors):
    """(of the forward, of its backward)"""
    with flop_counter.FlopCounterMode(display=False) as forward:
        out = call(*tensors)
    with flop_counter.FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_flops_are_counted():
    q, k, v = with_gradients(qkv(2, 48, 80, 4, 2, 32, 16))
    pairs = 2 * 4 * 48 * 80
    forward, backward = 2 * pairs * (32 + 16), 2 * pairs * (3 * 32 + 2 * 16)
    assert flops(attention, q, k, v) == (forward, backward)
    assert flops(lambda *x: attention(*x, mask=CAUSAL), q, k, v) == (forward, backward)
    mask = fs.layouts.random(48, 80, 16, density=0.4, num_heads=4, band=fs.SlidingWindow(20, 20))
    want = round(forward * mask.density), round(backward * mask.density)
    assert flops(lambda *x: attention(*x, mask=mask), q, k, v) == want
    theirs = flop_counter.sdpa_flop_count((2, 4, 48, 32), (2, 4, 80, 32), (2, 4, 80, 16))
    assert theirs == forward


def test_flops_of_a_cache_are_counted():
    """Those of unused keys as well, as those that a mask hides."""
    q, k, v = with_gradients(qkv(2, 48, 80, 4, 2, 32, 16))
    used, sink = torch.tensor([80, 3], dtype=torch.int32), torch.zeros(4)
    want = flops(attention, q, k, v)
    assert flops(lambda *x: attention(*x, sink=sink, seqused_k=used), q, k, v) == want
    pages, table = (x.detach().reshape(10, 16, 2, -1) for x in (k, v)), torch.zeros(2, 5).int()
    with flop_counter.FlopCounterMode(display=False) as counted:
        attention(q.detach(), *pages, seqused_k=used, block_table=table)
    assert counted.get_total_flops() == want[0]
    with flop_counter.FlopCounterMode(display=False) as by_name:
        schema = torch.ops.flashsdk.mha_fwd.default._schema
        given = dict.fromkeys((argument.name for argument in schema.arguments), None)
        numbers = {"mask": [], "softcap": 0.0, "dropout_p": 0.0, "deterministic": False}
        torch.ops.flashsdk.mha_fwd(**given | {"q": q, "k": k, "v": v, "backend": ""} | numbers)
    assert by_name.get_total_flops() == want[0]


def test_flops_of_packed_sequences_are_counted():
    x = torch.randn(30, 4, 32, requires_grad=True)
    offsets = torch.tensor([0, 10, 10, 27], dtype=torch.int32)

    def call(x):
        return varlen_attention(x, x, x, offsets, offsets, 20, 20)

    pairs = 4 * (10 * 10 + 17 * 17)
    assert flops(call, x) == (2 * pairs * 64, 2 * pairs * 160)
    with FakeTensorMode(allow_non_fake_inputs=True):  # whose lengths nobody knows
        assert flops(call, torch.empty(30, 4, 32, requires_grad=True))[0] == 2 * 4 * 3 * 400 * 64


def test_changing_an_input_before_backward_is_noticed():
    q, k, v = with_gradients(qkv())
    k = k * 1
    out = attention(q, k, v)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("layout", ["heads first", "fused", "reversed batch", "expanded"])
def test_strides(layout):
    q, k, v = qkv()
    if layout == "heads first":
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    elif layout == "fused":
        strided = list(torch.stack((q, k, v), 2).unbind(2))
    elif layout == "reversed batch":
        strided = [
            x.permute(3, 2, 1, 0).flip(3).contiguous().permute(3, 2, 1, 0) for x in (q, k, v)
        ]
        strided = [x.contiguous().transpose(0, 1).contiguous().transpose(0, 1) for x in strided]
    else:
        strided = [x[:1].expand(2, -1, -1, -1) for x in (q, k, v)]
    strided, dense = with_gradients(strided), with_gradients([x.contiguous() for x in strided])
    assert not any(x.is_contiguous() for x in strided)
    outs = [attention(*x, mask=CAUSAL) for x in (strided, dense)]
    assert torch.equal(*outs)
    dout = torch.randn(4, 2, 32, 70).permute(1, 3, 0, 2)  # the last dimension not contiguous
    for a, b in zip(
        torch.autograd.grad(outs[0], strided, dout),
        torch.autograd.grad(outs[1], dense, dout.contiguous()),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_saved_for_backward_is_linear_in_the_length():
    def saved(seqlen):
        sizes = {}

        def note(x):
            sizes[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            attention(*with_gradients(qkv(seqlen_q=seqlen)), mask=CAUSAL)
        return sum(sizes.values())

    batch, heads, dim = 2, 4, 32
    assert saved(64) == batch * 64 * heads * (4 * dim + 1)  # q, k, v, out and lse
    assert saved(128) == 2 * saved(64)


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    inputs = with_gradients(qkv())
    bias = torch.randn(1, 1, 70, 70)
    slopes = torch.rand(4)
    with torch.autocast("cpu", dtype):
        out, lse = attention(*inputs, bias=bias, alibi_slopes=slopes, return_lse=True)
        with torch.autocast("cpu", enabled=False):
            assert attention(*inputs).dtype == torch.float32
    assert out.dtype == dtype and lse.dtype == torch.float32
    cast = [x.to(dtype) for x in inputs]
    assert torch.equal(out, attention(*cast, bias=bias, alibi_slopes=slopes))
    dout = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, inputs, dout),
        torch.autograd.grad(attention(*cast, bias=bias, alibi_slopes=slopes), inputs, dout),
        strict=True,
    ):
        assert a.dtype == torch.float32 and torch.equal(a, b)


def test_autocast_leaves_float64_to_be_refused():
    refused = pytest.raises(fs.Error, match=r"^q: dtype float64; ")
    with torch.autocast("cpu", torch.bfloat16), refused:
        attention(*(x.double() for x in qkv()))


# ---- modules


class Layer(torch.nn.Module):
    def __init__(self, mask=None):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 3 * 32)
        self.mask = mask

    def forward(self, x):  # (batch, seqlen, 32)
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).unbind(2)
        return attention(q, k, v, mask=self.mask).flatten(2)


@pytest.mark.parametrize("mask", [CAUSAL, block_mask()], ids=["band", "blocks"])
def test_modules_can_be_copied_and_pickled(mask):
    layer, x = Layer(mask), torch.randn(2, 70, 32)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
    assert set(layer.state_dict()) == {"qkv.weight", "qkv.bias"}


def test_checkpointing_repeats_dropout():
    inputs = with_gradients(qkv())

    def run(*x):
        return attention(*x, dropout_p=0.5)

    torch.manual_seed(5)
    plain = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    torch.manual_seed(5)
    out = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.square().sum(), inputs), plain, strict=True):
        assert torch.equal(a, b)


# ---- functorch


def square_loss(q, k, v):
    return attention(q, k, v, mask=CAUSAL).square().sum()


def vmap_problem():
    """Stacked q, k, v, and the gradients of each of the three by a loop."""
    inputs = [torch.stack([x, -x, x + 1]) for x in qkv(seqlen_q=20)]
    rows = list(zip(*inputs, strict=True))
    looped = [torch.autograd.grad(square_loss(*x), x) for x in map(with_gradients, rows)]
    return inputs, tuple(torch.stack(x) for x in zip(*looped, strict=True))


@pytest.mark.skipif(TORCH < (2, 7), reason="PyTorch 2.6: vmap knows no gradients that are None")
def test_functorch_gradient_over_vmap():
    inputs, expected = vmap_problem()

    def summed(*x):
        return torch.func.vmap(square_loss)(*x).sum()

    over_all = torch.func.grad(summed, argnums=(0, 1, 2))(*inputs)
    torch.testing.assert_close(over_all, expected)


def test_functorch():
    inputs, expected = vmap_problem()
    gradient = torch.func.grad(square_loss, argnums=(0, 1, 2))
    torch.testing.assert_close(torch.func.vmap(gradient)(*inputs), expected)
    q, k, v = (x[0] for x in inputs)
    shared = torch.func.vmap(lambda q: attention(q, k, v), in_dims=1)(inputs[0].transpose(0, 1))
    assert torch.equal(shared[1], attention(inputs[0][1], k, v))
    jacobian = torch.func.jacrev(lambda q: attention(q, k, v)[0, 0, 0])(q)
    torch.testing.assert_close(
        jacobian.sum(0), torch.func.grad(lambda q: attention(q, k, v)[0, 0, 0].sum())(q)
    )


# ---- what is refused


def refused(match, *inputs, code="invalid_argument", **options):
    with pytest.raises(fs.Error, match=match) as info:
        attention(*inputs, **options)
    assert info.value.code == code


def test_refusals():
    q, k, v = qkv()
    refused(r"^q: shape \(70, 4, 32\); \(batch, seqlen", q[0], k[0], v[0])
    refused("^bias: a tensor that requires a gradient", q, k, v, code="unsupported",
            bias=torch.zeros(1, 1, 70, 70, requires_grad=True))  # fmt: skip
    refused("^alibi_slopes: a tensor that requires a gradient", q, k, v, code="unsupported",
            alibi_slopes=torch.zeros(4, requires_grad=True))  # fmt: skip
    refused("^mask: 'causal'; Dense", q, k, v, mask="causal")
    refused("^mask", q, k, v, mask=fs.layouts.causal(64, 64, 16))
    for seed in (-1, 1.5, 2**64):
        refused(f"^seed: {seed}; an integer", q, k, v, dropout_p=0.5, seed=seed)
    refused("^dropout_p: 1; 0 <= dropout_p < 1", q, k, v, dropout_p=1.0)
    refused("^dropout_p: -0.1; 0 <= dropout_p < 1", q, k, v, dropout_p=-0.1)
    refused('^backend: tpu; "cpu", ', q, k, v, backend="tpu")
    refused("^k: dtype float16; float32, the dtype of q", q, k.half(), v)
    apart = q.transpose(1, 3).contiguous().transpose(1, 3)
    refused(r"^q: strides .*; the last dimension contiguous", apart, k, v)
    refused("^q: dtype float64; float32, ", q.double(), k.double(), v.double())
    refused("^k: num_heads_kv 2; a divisor", q[:, :, :3], k[:, :, :2], v[:, :, :2])


def test_a_bias_that_requires_a_gradient_is_fine_where_none_is_recorded():
    q, k, v = qkv()
    with torch.no_grad():
        attention(q, k, v, bias=torch.zeros(1, 1, 70, 70, requires_grad=True))


class Backwards(TorchDispatchMode):
    """What operators of gradients are told to be: deterministic or not."""

    def __init__(self):
        super().__init__()
        self.deterministic = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = [argument.name for argument in function._schema.arguments]
        if function.name() == "flashsdk::mha_bwd":
            self.deterministic.append(args[names.index("deterministic")])
        return function(*args, **(kwargs or {}))


def test_deterministic_follows_torch():
    inputs = with_gradients(qkv())
    torch.use_deterministic_algorithms(True)
    try:
        outs = [attention(*inputs), attention(*inputs, deterministic=False)]
    finally:
        torch.use_deterministic_algorithms(False)
    outs += [attention(*inputs), attention(*inputs, deterministic=True)]
    with Backwards() as backwards:
        for out in outs:
            torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert backwards.deterministic == [True, False, False, True]


@pytest.mark.parametrize("way", [flash_attn_func, fs.mha_fwd])
def test_deterministic_means_the_same_everywhere(way, monkeypatch):
    """None is PyTorch's switch, False is not."""
    q, k, v = qkv()
    asked = []

    def explained(backward, tensors, packed, options):
        asked.append(options[8])
        return "", [], "", (0, 0)

    if way is not fs.mha_fwd:
        inputs = with_gradients([q, k, v])
        with Backwards() as backwards:
            for switch in (True, False):
                torch.use_deterministic_algorithms(switch)
                try:
                    outs = [way(*inputs, deterministic=x) for x in (None, False, True)]
                finally:
                    torch.use_deterministic_algorithms(False)
                for out in outs:
                    torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert backwards.deterministic == [True, False, True, False, False, True]
        return
    monkeypatch.setattr(fs.ops._bindings, "explain", explained)
    for switch in (True, False):
        torch.use_deterministic_algorithms(switch)
        try:
            for x in (None, False, True):
                fs.explain(q, k, v, deterministic=x)
            fs.explain(q.numpy(), k.numpy(), v.numpy())
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [True, False, True, False, False, False, True, False]


@pytest.mark.parametrize("name", ft.__all__)
def test_functions_are_pickled_by_reference(name):
    """Those of flashsdk.torch itself by that name, wherever in the package they are written."""
    function = getattr(ft, name)
    assert pickle.loads(pickle.dumps(function)) is function
    if name in ("attention", "varlen_attention", "scaled_dot_product_attention"):
        assert function.__module__ == "flashsdk.torch"
