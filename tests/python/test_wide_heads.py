"""Heads wider than 256, and v in the memory of k, as latent attention (MLA) has it."""

import importlib
from dataclasses import replace

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES, assert_same_bits, both, into_pages, normal, packed, problem, qkv
from flashsdk._testing import reference
from flashsdk._testing.problems import BandSpec, Blocks, numpy_dtype

CAUSAL = BandSpec(None, 0, "bottom_right")
MLA = (576, 512)
HEAD_DIMS = (257, 288, 320, 384, 511, 512, MLA, (300, 570))


class Wide:
    """A backend's runner. A GPU has them by sm80 alone: a forward with values to 512 and keys to
    576, and a backward to 512."""

    def __init__(self, runner):
        self.runner = runner
        if runner.backend == "sm90":
            pytest.skip("sm80's")

    def fits(self, dtype, head_dim):
        head_dim_v = head_dim if isinstance(head_dim, int) else head_dim[1]
        if dtype not in self.runner.dtypes or (self.runner.backend == "sm80" and head_dim_v > 512):
            pytest.skip("a CPU's")

    def check(self, problem):
        on_gpu = self.runner.backend == "sm80"
        alone = problem.forward_only or (on_gpu and problem.head_dim > 512)
        self.runner.check(replace(problem, forward_only=alone))


@pytest.fixture
def wide(runner):
    return Wide(runner)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
def test_head_dims(wide, head_dim, dtype):
    wide.fits(dtype, head_dim)
    wide.check(problem((70, 110), (4, 2), head_dim, batch=2, dtype=dtype))
    wide.check(problem((150, 90), (3, 1), head_dim, dtype=dtype, mask=CAUSAL))
    wide.check(packed(((0, 9), (65, 130), (3, 0), (17, 17)), 2, head_dim, dtype=dtype, mask=CAUSAL))
    used = {"used_q": (70, 1), "used_k": (31, 110)}
    wide.check(problem((70, 110), (4, 2), head_dim, batch=2, dtype=dtype, mask=CAUSAL, **used))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("queries", [1, 2, 4, 5, 16, 17])
@pytest.mark.parametrize("head_dim", [257, 511, MLA], ids=str)
def test_few_queries(wide, head_dim, queries, dtype):
    wide.fits(dtype, head_dim)
    wide.check(problem((queries, 207), (4, 2), head_dim, dtype=dtype))
    wide.check(packed(((queries, 150), (1, 40), (2, 2)), 2, head_dim, dtype=dtype, mask=CAUSAL))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_one_query_of_many_keys(wide, dtype):
    """The heads of the group are the rows of one head, and the keys are cut into parts."""
    wide.fits(dtype, MLA)
    # float16's backward is the slowest to check, and a GPU has no other with so many keys.
    alone = wide.runner.backend == "cpu" and dtype == "float16"
    of = {"dtype": dtype, "forward_only": alone}
    wide.check(problem((1, 4500), (5, 1), MLA, **of))
    wide.check(problem((1, 4200), 1, 512, used_k=(4150,), **of))


FEATURES = {
    "bias": {"bias": ("float32", (1, 4, 70, 110))},
    "alibi": {"alibi": "heads", "softcap": 5.0},
    "dropout": {"dropout_p": 0.3, "dlse": True},
    "sink": {"sink": True, "strides": True},
    "blocks": {
        "mask": Blocks(
            np.eye(5, 7, dtype=bool)[None, None],
            np.eye(5, 7, 2, dtype=bool)[None, None],
            (16, 16),
            BandSpec(3, 5, "top_left"),
        )
    },
    "row sums taken anew": {"magnitude": 20.0, "mask": CAUSAL},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features(wide, features):
    dtypes = wide.runner.dtypes
    for i, head_dim in enumerate((MLA, 320, 512)):
        dtype = dtypes[i % len(dtypes)]
        wide.check(problem((70, 110), (4, 2), head_dim, dtype=dtype, **features))


@pytest.mark.parametrize("features", [{}, {"alibi": "heads", "softcap": 5.0}], ids=str)
def test_aligned_and_not(wide, features):
    """On a GPU kernels of other tiles take what is not."""
    for aligned in (False, True):
        where = {"strides": True, "aligned": aligned, "negative_strides": False}
        for dtype in wide.runner.dtypes:
            for head_dim in (512, (328, 64), (64, 328)):
                wide.check(problem((70, 110), 2, head_dim, dtype=dtype, **where, **features))


@pytest.mark.parametrize("queries", [1, 4, 70])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_pages_that_k_and_v_share(cpu, dtype, queries):
    """v is a view of k, and the bits are those of keys in one piece and of a v of its own."""
    used = np.array([333, 41], np.int32)
    q, k, _, _ = qkv((queries, 333), (6, 1), 576, dtype=dtype)
    pages, _, table = into_pages(k, k, used, 32)
    got = cpu.call(
        "mha_fwd", q, pages, pages[..., :512], seqused_k=used, block_table=table, mask=fs.Causal()
    )
    v = np.ascontiguousarray(k[..., :512])
    assert_same_bits(got, cpu.call("mha_fwd", q, k, v, seqused_k=used, mask=fs.Causal()))
    exact = reference.forward(q, k, v, seqused_k=used, mask=CAUSAL)
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    for ours, want in zip(got, exact, strict=True):
        np.testing.assert_allclose(ours.astype(float), want, atol=tolerance)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_gradients_where_k_and_v_share_memory(dtype):
    """Those of k and of v are apart: who shares the memory adds them."""
    q, k, _, _ = qkv((9, 50), (4, 1), 576, dtype=dtype)
    dout = normal((2, 9, 4, 512), dtype=dtype)[0]
    shared, own = k[..., :512], np.ascontiguousarray(k[..., :512])
    assert_same_bits(both(q, k, shared, dout), both(q, k, own, dout))


def latent(dtype="float32"):
    """q (2, 3, 8, 576) and k (2, 40, 1, 576), and what attention with v = k[..., :512] is."""
    q, k = normal((2, 3, 8, 576), (2, 40, 1, 576), dtype=dtype)
    return q, k, fs.mha_fwd(q, k, np.ascontiguousarray(k[..., :512]))[0]


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_attention_takes_v_as_a_view_of_k(framework):
    q, k, want = latent()
    if framework == "torch":
        q, k = map(pytest.importorskip("torch").from_numpy, (q, k))
    elif framework == "jax":
        q, k = map(pytest.importorskip("jax").numpy.asarray, (q, k))
    assert_same_bits([np.asarray(fs.attention(q, k, k[..., :512]))], [want])


def test_jax_under_jit():
    jax = pytest.importorskip("jax")
    attention = pytest.importorskip("flashsdk.jax").attention
    q, k, want = latent()

    @jax.jit
    def attend(q, k):
        return attention(q, k, k[..., :512])

    assert_same_bits([np.asarray(attend(q, k))], [want])
    grad = jax.grad(lambda k: attend(q, k).sum())(k)  # of both places where k is
    out, lse = fs.mha_fwd(q, k, k[..., :512])
    _, dk, dv = fs.mha_bwd(np.ones_like(out), q, k, k[..., :512], out, lse)
    dk[..., :512] += dv
    np.testing.assert_allclose(np.asarray(grad), dk, atol=1e-5)


def test_each_function_of_torch_takes_v_as_a_view_of_k():
    torch = pytest.importorskip("torch")
    fst = importlib.import_module("flashsdk.torch")
    q, k, want = latent()
    q, k, want = map(torch.from_numpy, (q, k, want))
    v = k[..., :512]
    compiled = torch.compile(lambda q, k: fst.attention(q, k, k[..., :512]), backend="aot_eager")
    offsets = [torch.arange(3, dtype=torch.int32) * n for n in (3, 40)]
    rows = [x.flatten(0, 1) for x in (q, k)]
    used = torch.full((2,), 40, dtype=torch.int32)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    outs = {
        "eager": fst.attention(q, k, v),
        "traced": compiled(q, k),
        "packed": fst.varlen_attention(*rows, rows[1][..., :512], *offsets, 3, 40).view_as(want),
        "used lengths": fst.attention(q, k, v, seqused_k=used),
        "sdpa": fst.scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2),
        "a cache": fst.flash_attn_with_kvcache(q, k, v, cache_seqlens=used),
    }
    for name, out in outs.items():
        assert torch.equal(out, want), name


def test_gradients_in_torch_are_added_where_k_and_v_share_memory():
    torch = pytest.importorskip("torch")
    attention = importlib.import_module("flashsdk.torch").attention
    standard = importlib.import_module("standard_attention").standard
    q, k, _ = latent()
    q, k = (torch.from_numpy(x).requires_grad_() for x in (q, k))
    out = attention(q, k, k[..., :512])
    got = torch.autograd.grad(out.square().sum(), (q, k))
    plain, _ = standard(q.double(), k.double(), k[..., :512].double())
    for ours, exact in zip(got, torch.autograd.grad(plain.square().sum(), (q, k)), strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)


def test_pytorchs_own_function_comes_to_our_kernels():
    torch = pytest.importorskip("torch")
    torch_sdpa = pytest.importorskip("flashsdk.integrations.torch_sdpa")
    x = torch.randn(3, 1, 2, 30, 512)
    jagged = torch.nested.nested_tensor_from_jagged(torch.randn(9, 2, 512), torch.tensor([0, 4, 9]))
    with torch_sdpa.enable():
        assert torch_sdpa.explain(*x).taken
        assert torch_sdpa.explain(*[jagged.transpose(1, 2)] * 3).taken
        ours = torch.nn.functional.scaled_dot_product_attention(*x)
    torch.testing.assert_close(ours, torch.nn.functional.scaled_dot_product_attention(*x))


def test_append_to_a_cache_of_wide_heads():
    cache, new = normal((1, 9, 1, 576), (1, 2, 1, 576))
    values, new_values = cache[..., :512].copy(), new[..., :512].copy()
    fs.kv_append(cache, values, new, new_values, np.array([4], np.int32))
    assert np.array_equal(cache[:, 4:6], new)
    assert np.array_equal(values[:, 4:6], new_values)
    wide = np.zeros((1, 1, 1, 577), numpy_dtype("float32"))
    with pytest.raises(fs.Unsupported, match=r"^k: head_dim 577; 1 to 576$"):
        fs.kv_append(wide, wide.copy(), wide.copy(), wide.copy(), np.zeros(1, np.int32))
