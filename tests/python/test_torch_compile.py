"""The operators under flashsdk.torch: torch.library.opcheck, torch.compile and torch.export."""

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
from flashsdk import _bindings  # noqa: E402
from flashsdk import torch as adapter  # noqa: E402
from flashsdk._block_lists import LISTS, Csr  # noqa: E402
from flashsdk._torch_ops import decode_mask, encode_mask  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch_cases import TORCH  # noqa: E402

CAUSAL = fs.Causal()
NUMPYS = (np.int64(8), np.int64(3))
BLOCKS = fs.layouts.bigbird(48, 48, 16, window_blocks=1, global_blocks=0, random_blocks=1)


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


def qkv(seqlen=48, heads=4, requires_grad=True):
    """(2, seqlen, 4 | heads | heads, 16)"""
    shapes = [(2, seqlen, h, 16) for h in (4, heads, heads)]
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]


def test_the_compiler_is_not_imported():
    """It takes seconds, and many programs never compile anything."""
    code = "import sys, flashsdk.torch; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


# ---- masks


@pytest.mark.parametrize(
    "mask",
    [
        fs.Dense(),
        fs.Band(),
        CAUSAL,
        fs.Band(-3, 7, "top_left"),
        fs.Band(2**31, None),
        BLOCKS,
        fs.layouts.causal(100, 70, (32, 16)),
        fs.layouts.stack_heads([fs.layouts.causal(64, 64, 16), fs.layouts.dense(64, 64, 16)]),
    ],
    ids=repr,
)
def test_masks_survive_the_boundary(mask):
    code, blocks = encode_mask(mask)
    assert all(type(n) is int for n in code)
    decoded = decode_mask(code, blocks)
    if blocks is not None:
        a = decoded.arrays
        lists = dict(zip(LISTS, map(Csr, a[::2], a[1::2]), strict=True))
        partial = lists["row_partial"].indices.size > 0
        band = decoded.band if partial else None
        decoded = fs.BlockMask(
            decoded.block_size, decoded.seqlen_q, decoded.seqlen_k, band, **lists
        )
    assert decoded == mask


def test_a_direction_reads_its_lists_alone(monkeypatch):
    """Operators know no mask from the call before; what checks all lists would do so each time."""
    checks, check = [], _bindings.check_layout
    monkeypatch.setattr(_bindings, "check_layout", lambda *x: checks.append(1) or check(*x))
    mask = fs.layouts.causal(64, 64, 16)
    q, k, v = (torch.randn(1, 64, 2, 16) for _ in "qkv")
    code, blocks = encode_mask(mask)
    rest = None, None, None, blocks, code, None, 0.0, 0.0, False, ""
    ops = torch.ops.flashsdk
    want = [adapter.attention(q, k, v, mask=mask) for _ in range(2)]
    assert len(checks) == 1
    out, lse = ops.mha_fwd(q, k, v, *rest)
    assert torch.equal(out, want[0])
    ops.mha_bwd(out, None, q, k, v, out, lse, *rest)
    assert len(checks) == 1
    blocks = blocks.clone()
    blocks[-1] = -1  # of col_full
    rest = None, None, None, blocks, code, None, 0.0, 0.0, False, ""
    assert torch.equal(ops.mha_fwd(q, k, v, *rest)[0], out)
    with pytest.raises(fs.Error, match=r"^mask.col_full.indices: -1; 0 to 3$"):
        ops.mha_bwd(out, None, q, k, v, out, lse, *rest)


# ---- opcheck


def options(mask=None, bias=None, slopes=None, seed=None, softcap=0.0):
    code, blocks = encode_mask(mask)
    seed_tensor = None if seed is None else torch.tensor([seed])
    dropout_p = 0.0 if seed is None else 0.2
    return bias, slopes, seed_tensor, blocks, code, None, softcap, dropout_p, False, ""


VARIANTS = {
    "dense": options(),
    "causal": options(CAUSAL),
    "blocks": options(BLOCKS),
    "all": options(
        CAUSAL, torch.zeros(1, 1, 48, 48), torch.tensor([0.5, 0.2, 0.1, 0.0]), 7, softcap=5.0
    ),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_opcheck(variant):
    q, k, v = qkv(heads=2)
    torch.library.opcheck(torch.ops.flashsdk.mha_fwd.default, (q, k, v, *variant))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = torch.ops.flashsdk.mha_fwd(q, k, v, *variant)
    dlse = None if variant is VARIANTS["dense"] else torch.randn_like(lse)
    arguments = (torch.randn_like(out), dlse, q, k, v, out, lse, *variant)
    torch.library.opcheck(torch.ops.flashsdk.mha_bwd.default, arguments)


def test_opcheck_packed():
    q, k, v = (torch.randn(50, 4, 16, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, 20, 20, 50], dtype=torch.int32)
    rest = (offsets, offsets, 30, 30, *options(CAUSAL))
    torch.library.opcheck(torch.ops.flashsdk.mha_varlen_fwd.default, (q, k, v, *rest))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = torch.ops.flashsdk.mha_varlen_fwd(q, k, v, *rest)
    arguments = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *rest)
    torch.library.opcheck(torch.ops.flashsdk.mha_varlen_bwd.default, arguments)


# ---- torch.compile


def same_as_eager(function, *inputs, compiled=None, backend="aot_eager", **how):
    """Outputs and gradients of a compiled function, which must have no graph break."""
    compiled = compiled or torch.compile(function, fullgraph=True, backend=backend, **how)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    results = []
    for run in (function, compiled):
        torch.manual_seed(1)
        out = run(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        loss = sum(x.float().square().sum() for x in outs)
        results.append((*outs, *torch.autograd.grad(loss, tensors)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    return compiled


def packed_attention(q, k, v):
    offsets = torch.tensor([0, 40, 96], dtype=torch.int32)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return adapter.varlen_attention(q, k, v, offsets, offsets, 56, 56, mask=CAUSAL)


def heads_first(q, k, v, **options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return adapter.scaled_dot_product_attention(q, k, v, **options)


FUNCTIONS = {
    "attention": lambda q, k, v: adapter.attention(q, k, v, mask=CAUSAL, return_lse=True),
    "softcap": lambda q, k, v: adapter.attention(q, k, v, softcap=4.0, softmax_scale=0.3),
    "blocks": lambda q, k, v: adapter.attention(q, k, v, mask=BLOCKS),
    "packed": packed_attention,
    "seed": lambda q, k, v: adapter.attention(q, k, v, dropout_p=0.2, seed=2**63 + 5),
    "dropout": lambda q, k, v: adapter.attention(q, k, v, dropout_p=0.2),
    "flash_attn_func": lambda q, k, v: adapter.flash_attn_func(
        q, k, v, causal=True, window_size=(8, 8), return_attn_probs=True
    )[:2],
    "numpy's integers": lambda q, k, v: adapter.flash_attn_func(q, k, v, window_size=NUMPYS),
    "numpy's seed": lambda q, k, v: adapter.attention(q, k, v, dropout_p=0.2, seed=NUMPYS[0]),
    "flash_attn_qkvpacked_func": lambda q, k, v: adapter.flash_attn_qkvpacked_func(
        torch.stack((q, k, v), 2), causal=True
    ),
    "is_causal": lambda q, k, v: heads_first(q, k, v, is_causal=True),
    "attn_mask": lambda q, k, v: heads_first(
        q, k, v, attn_mask=torch.ones(48, 48, dtype=torch.bool).tril(), scale=0.5
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles_into_one_graph(name):
    if name.startswith("numpy") and TORCH < (2, 11):
        pytest.skip("PyTorch before 2.11: the compiler knows no numbers of NumPy")
    same_as_eager(FUNCTIONS[name], *qkv())


@pytest.mark.filterwarnings("error:.*NumPy array is not writable")
def test_masks_as_arguments():
    def function(q, k, v, mask):
        return adapter.attention(q, k, v, mask=mask)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    inputs, graphs = qkv(), 0
    for seed in range(4):  # more blocks each time, in other places: the graph stays
        mask = fs.layouts.random(48, 48, 16, density=0.3 + 0.1 * seed, seed=seed)
        same_as_eager(function, *inputs, mask, compiled=compiled)
        graphs = graphs if seed else counter.frame_count
    assert counter.frame_count == graphs
    same_as_eager(function, *inputs, CAUSAL, compiled=compiled)
    same_as_eager(function, *inputs, None, compiled=compiled)


# They compute with NumPy, of which the compiler has an imitation: of butterfly's bits it gets some
# wrong.
MADE_INSIDE = {
    "causal": lambda n: fs.layouts.causal(n, n, 16),
    "butterfly": lambda n: fs.layouts.butterfly(n, n, 16),
    "bigbird": lambda n: fs.layouts.bigbird(n, n, 16, num_heads=4),
    "random": lambda n: fs.layouts.random(n, n, 16, density=0.4),
    "from_dense": lambda n: fs.BlockMask.from_dense(
        np.eye(-(-n // 16), dtype=bool), 16, seqlen_q=n, seqlen_k=n
    ),
}


@pytest.mark.parametrize("make", MADE_INSIDE.values(), ids=MADE_INSIDE)
def test_masks_made_inside_break_the_graph(make):
    def function(q, k, v):
        return adapter.attention(q, k, v, mask=make(q.shape[1]))

    compiled = torch.compile(function, backend="aot_eager", dynamic=True)
    for seqlen in (48, 90):
        same_as_eager(function, *qkv(seqlen), compiled=compiled)
    whole = torch.compile(function, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(*qkv())


@pytest.mark.parametrize(
    "make, want",
    [
        (lambda: fs.Causal(), fs.Band(None, 0)),
        (lambda: fs.Causal("top_left"), fs.Band(None, 0, "top_left")),
        (lambda: fs.SlidingWindow(5, 2), fs.Band(5, 2)),
    ],
)
def test_the_compiler_leaves_masks_as_they_are(make, want):
    """That of PyTorch 2.11 called Band's own __init__ on what Causal() shares."""
    x = qkv()

    def layer(*x):
        return adapter.attention(*x, mask=make())

    expected = adapter.attention(*x, mask=want)
    got = torch.compile(layer, backend="aot_eager")(*x)
    assert make() == want and fs.Causal() == fs.Band(None, 0)
    assert torch.equal(got, expected) and torch.equal(layer(*x), expected)


@pytest.mark.skipif(TORCH < (2, 13), reason="PyTorch before 2.13: other errors of the compiler")
def test_refusals_where_a_graph_may_not_break():
    """Our line is in the compiler's error, and code that catches it stays in the graph."""

    def function(q, k, v):
        return adapter.attention(q, k, v, softmax_scale="big")

    def caught(q, k, v):
        try:
            return function(q, k, v)
        except fs.Error:
            return adapter.attention(q, k, v)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"softmax_scale: 'big'; a number "):
        torch.compile(function, backend="aot_eager", fullgraph=True)(*qkv())
    with pytest.raises(fs.Error, match=r"^softmax_scale: 'big'; a number that float32 can hold$"):
        torch.compile(function, backend="aot_eager")(*qkv())
    same_as_eager(caught, *qkv())


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: adapter.attention(q, k, v, mask=CAUSAL),
        lambda q, k, v: heads_first(q, k, v, is_causal=True),
    ],
    ids=["attention", "heads first"],
)
def test_dynamic_shapes(function):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    same_as_eager(function, *qkv(48), compiled=compiled)
    graphs = counter.frame_count
    for seqlen in (31, 64):
        same_as_eager(function, *qkv(seqlen), compiled=compiled)
    assert counter.frame_count == graphs


def test_a_mask_of_fixed_size_among_dynamic_shapes():
    """A number and a symbol of the same value are the same size."""

    def function(q, k, v):
        return heads_first(q, k, v, attn_mask=torch.ones(48, 64, dtype=torch.bool).tril(3))

    q, _, _ = qkv(48)
    _, k, v = qkv(64)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    same_as_eager(function, q, k, v, compiled=compiled)
    with pytest.raises(fs.Error, match=r"^attn_mask: shape \(48, 64\); one that broadcasts to "):
        function(k, k, v)


def test_numbers_that_change():
    def function(q, k, v, softcap, scale):
        return adapter.attention(q, k, v, softcap=softcap, softmax_scale=scale)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = qkv()
    for softcap, scale in ((1.0, 0.5), (2.0, 0.25), (3.0, None)):
        same_as_eager(function, *inputs, softcap, scale, compiled=compiled)


def test_seeds_that_change():
    def function(q, k, v, seed):
        return adapter.attention(q, k, v, dropout_p=0.3, seed=seed)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = qkv()
    for seed in (1, 5, 2**40, 2**63 + 5):
        same_as_eager(function, *inputs, seed, compiled=compiled)


def test_autocast_is_compiled():
    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return adapter.attention(q, k, v)

    inputs = qkv()
    same_as_eager(function, *inputs)
    assert torch.compile(function, backend="aot_eager")(*inputs).dtype == torch.bfloat16


class Block(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.qkv, self.mask = torch.nn.Linear(64, 192), mask

    def forward(self, x):  # (batch, seqlen, 64)
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 16)).unbind(2)
        return x + adapter.attention(q, k, v, mask=self.mask).flatten(2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_inductor():
    block, x = Block(BLOCKS), torch.randn(2, 48, 64)
    compiled = torch.compile(block, fullgraph=True)
    compiled(x).sum().backward()
    gradient = block.qkv.weight.grad.clone()
    block.zero_grad()
    block(x).sum().backward()
    torch.testing.assert_close(gradient, block.qkv.weight.grad)


def loss(q, k, v):
    return adapter.attention(q, k, v, mask=CAUSAL).square().sum()


TRANSFORMED = {
    "grad": torch.func.grad(loss),
    "vmap of grad": lambda q, k, v: torch.func.vmap(torch.func.grad(loss))(
        q[:, None], k[:, None], v[:, None]
    ),
    "jacrev": torch.func.jacrev(lambda q, k, v: adapter.attention(q, k, v)[:, :2, 0, :2]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", TRANSFORMED.values(), ids=TRANSFORMED)
def test_gradients_of_torch_func(function, backend):
    inputs = qkv(seqlen=8, requires_grad=False)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize("mask", [CAUSAL, BLOCKS], ids=["band", "blocks"])
def test_export(mask):
    block, x = Block(mask), torch.randn(2, 48, 64)
    exported = torch.export.export(block, (x,), strict=False).module()  # newer defaults
    torch.testing.assert_close(exported(x), block(x))


# ---- torch.jit.trace


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_jit_trace(requires_grad):
    def function(q, k, v):
        return adapter.attention(q, k, v, mask=CAUSAL) + heads_first(q, k, v).transpose(1, 2)

    traced = torch.jit.trace(function, qkv(requires_grad=requires_grad))
    inputs = qkv(requires_grad=requires_grad)
    want = function(*inputs)
    assert torch.equal(traced(*inputs), want)
    if requires_grad:
        gradients = (torch.autograd.grad(f(*inputs).sum(), inputs) for f in (function, traced))
        assert all(map(torch.equal, *gradients))


def test_bands_of_compiled_lengths():
    """Where the diagonal lies is arithmetic, and one graph has it for all lengths."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def shifted(x):
        return x + fs.Causal().shift(*x.shape)

    for seqlen_k in (5, 7, 11):
        assert (shifted(torch.zeros(3, seqlen_k)) == seqlen_k - 3).all()
    assert counter.frame_count == 1


class KeepsSome(torch.nn.Module):
    """As many sequences as the data says (case 20)."""

    def forward(self, x, keep):
        x = x[keep]
        mask = torch.zeros(x.shape[0], 1, 1, 1)
        return adapter.scaled_dot_product_attention(x, x, x, mask)


def test_a_batch_whose_size_is_data():
    x, keep = torch.randn(6, 2, 8, 16), torch.tensor([True, False, True, True, False, True])
    want = KeepsSome()(x, keep)
    exported = torch.export.export(KeepsSome(), (x, keep)).module()
    assert torch.equal(exported(x, keep), want)
    assert torch.equal(exported(x, ~keep), KeepsSome()(x, ~keep))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(KeepsSome(), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, keep), want)
