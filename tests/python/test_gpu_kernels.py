"""Which kernel of a GPU takes a call, and what those compute that only some calls take."""

import itertools
import math

import flashsdk as fs
import numpy as np
import pytest
from cases import packed, problem
from flashsdk._testing.problems import BandSpec, mask_of
from flashsdk._testing.reference import Blocks
from gpu_cases import BF16, assert_same, both, qkv

torch = pytest.importorskip("torch")
dense = pytest.importorskip("flashsdk._testing.dense")  # needs PyTorch


@pytest.mark.parametrize("start, width", [(0, 64), (1, 64), (3, 40), (8, 33), (0, 1)])
def test_any_alignment_and_head_dimension(backend, start, width):
    """Slices of a wider tensor: what the fast kernels refuse, slower ones take."""
    x = [t[..., start : start + width] for t in qkv(dim=start + width + 5)]
    if backend == "sm90":
        with pytest.raises(fs.Error, match=r"^mha_fwd: no sm90 kernel for .* \(sm90_\w+: "):
            fs.mha_fwd(*x[:3], backend=backend)
        return  # it takes rows of 16-byte multiples alone
    copies = [torch.zeros_like(t).copy_(t) for t in x]
    want = both([t.float().cpu() for t in copies], backend="cpu")
    for a, b in zip(both(x, backend=backend), want, strict=True):
        assert (a.float().cpu() - b).abs().max() < 0.05 * max(1, b.abs().max())
    why = fs.explain(*x[:3], backend=backend)
    assert any("multiple" in reason for _, reason in why.refused)


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_explain_needs_no_outputs(backend, op):
    """Those that are not there yet are taken to be made as the call makes them."""
    q, k, v, _ = qkv()
    assert backend in fs.explain(q, k, v, op=op, backend=backend).kernel


def kernel_of(*x, **keywords) -> str:
    return fs.explain(*x, **keywords).kernel


def test_keys_are_split_where_queries_are_few(backend):
    """Whatever the fastest backend is: sm80 alone splits keys, and is asked first."""
    q, k, v, _ = qkv(8192, heads=4)
    few, one = q[:, :100], q[:, :1]
    assert "split" in kernel_of(one, k, v)
    assert "split" in kernel_of(few, k, v, mask=fs.Causal())
    assert "split" in kernel_of(one, k[:, :, :1], v[:, :, :1], softcap=5.0)
    ends = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (1, 8192)]
    assert "split" in kernel_of(one[0], k[0], v[0], *ends, 1, 8192)
    assert ("split" in kernel_of(one, k, v, backend=backend)) == (backend == "sm80")
    # A tile of 16 rows has a kernel of its own, split or not.
    narrow = fs.SlidingWindow(300, 0)
    assert "_split_16x" in kernel_of(q[:, :16], k, v, mask=narrow)
    assert "_split_16x" not in kernel_of(q[:, :17], k, v)
    for why, other in {
        "many queries": {"q": q},
        "few keys": {"k": k[:, :500], "v": v[:, :500]},
        "a narrow window": {"q": few, "mask": narrow},
        "a layout": {"q": few, "mask": fs.layouts.dense(100, 8192, 128)},
    }.items():
        call = {"q": one, "k": k, "v": v, **other}
        assert "split" not in kernel_of(**call), why


@pytest.mark.parametrize("op, dim, longest", [("fwd", 128, 32), ("fwd", 256, 32), ("bwd", 64, 64)])
def test_short_sequences_take_smaller_tiles(backend, op, dim, longest):
    """Those of sm80, on a GPU that has both; a call that names sm90 gets it all the same."""
    if backend != "sm90":
        pytest.skip("a choice on GPUs that have sm90")
    need_head_dim(backend, dim)
    short, longer = qkv(longest, dim=dim), qkv(longest + 1, dim=dim)
    why = fs.explain(*short[:3], op=op)
    assert why.kernel.startswith("sm80")
    assert "sm80 is faster for sequences so short" in [reason for _, reason in why.refused]
    assert kernel_of(*short[:3], op=op, backend=backend).startswith("sm90")
    assert kernel_of(*short[:3], op=op, softcap=9.0).startswith("sm90")
    assert kernel_of(*longer[:3], op=op).startswith("sm90")
    for a, b in zip(both(short), both([t.float().cpu() for t in short]), strict=True):
        torch.testing.assert_close(a.float().cpu(), b, rtol=0.02, atol=0.02)


def test_split_keys_twice_and_in_a_graph(backend):
    """The same bits each time, though parts end in any order; a graph sees what is there then."""
    if backend != "sm80":
        pytest.skip("sm80 alone splits keys")
    q, k, v, _ = qkv(8192, heads=4)
    q = q[:, :3].contiguous()
    mask = fs.Causal()
    want = fs.mha_fwd(q, k, v, mask=mask, backend=backend)
    assert_same(fs.mha_fwd(q, k, v, mask=mask, backend=backend), want)
    whole = fs.mha_fwd(q.float().cpu(), k.float().cpu(), v.float().cpu(), mask=mask)
    assert (want[0].float().cpu() - whole[0]).abs().max() < 0.01
    assert (want[1].cpu() - whole[1]).abs().max() < 1e-4
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fs.mha_fwd(q, k, v, mask=mask, backend=backend)
    for t in (q, k, v):
        t.copy_(torch.randn_like(t))
    want = fs.mha_fwd(q, k, v, mask=mask, backend=backend)
    graph.replay()
    assert_same((out, lse), want)


def test_split_keys_of_a_sequence_longer_than_said(backend):
    """On a GPU nobody checks that: what has no place in the workspace takes nobody else's."""
    if backend != "sm80":
        pytest.skip("sm80 alone splits keys")
    q, k, v, _ = qkv(8192, heads=4)
    q, k, v = q[0, :3], k[0], v[0]
    ends = [torch.tensor([0, *x], dtype=torch.int32, device="cuda") for x in ((2, 3), (4096, 8192))]
    assert "split" in kernel_of(q, k, v, *ends, 1, 4096)
    out, lse = fs.mha_varlen_fwd(q, k, v, *ends, 1, 4096)
    want, want_lse = fs.mha_fwd(q[None, 2:], k[None, 4096:], v[None, 4096:])
    assert (out[2] - want[0, 0]).abs().max() < 0.01
    assert (lse[:, 2] - want_lse[0, :, 0]).abs().max() < 1e-4


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("kind", ["of q's type", "of the other", "bool"])
def test_bias_by_vectors_or_by_elements(backend, kind, dim):
    """The same however it comes: copied by 16 bytes where rows are made of such vectors and begin
    at one, by kernels of its own where it is the only feature, else read where it is added."""
    if backend != "sm80":
        pytest.skip("sm80 alone takes a bias in all forms")
    dtype = BF16 if dim % 64 else torch.float16
    q, k, v, dout = qkv(203, dim=dim, dtype=dtype)
    values = torch.randn(2, 2, 203, 224, device="cuda")
    values[..., 100:103] = values[:, :, 150] = -math.inf
    values[..., 203:] = math.nan  # of the next row, as it were
    other = BF16 if dtype == torch.float16 else torch.float16
    wide = values > 0 if kind == "bool" else values.to(dtype if kind == "of q's type" else other)
    odd = torch.empty(wide.numel() + 1, dtype=wide.dtype, device="cuda")[1:].view(wide.shape)
    for mask in (None, fs.Causal(), fs.layouts.dense(203, 203, 128)):
        options = {"mask": mask, "backend": backend, "deterministic": True}
        for features in ({}, {"softcap": 20.0}):
            want = None
            alone = not features and not isinstance(mask, fs.BlockMask) and kind != "of the other"
            for of in (wide[..., :203].contiguous(), odd.copy_(wide), wide):
                call = {"bias": of[..., :203], **features}
                out, lse = fs.mha_fwd(q, k, v, mask=mask, backend=backend, **call)
                got = out, lse, *fs.mha_bwd(dout, q, k, v, out, lse, **call, **options)
                assert not any(t.isnan().any() for t in got)
                want = want or got
                if not (of is wide and alone):  # one kernel takes all forms
                    assert_same(got, want)
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a.float(), b.float(), rtol=0.01, atol=0.01)


def need_head_dim(backend, dim):
    if max(k["head_dim"] for k in fs.kernels() if k["backend"] == backend) < dim:
        pytest.skip("head_dim is not in this build")


def over_many_tiles(q, k, v, dout, **features):
    """Problems, and their tensors, whose diagonal is that of the tiles and is not, with and without
    a band on one side and on both."""
    masks = None, BandSpec(None, 0, "bottom_right"), BandSpec(300, 200, "top_left")
    shapes = (1100, 1100), (700, 1100), (1100, 700), (300, 1100)
    for (nq, nk), mask in itertools.product(shapes, masks):
        heads, dim = q.shape[2:]
        p = problem((nq, nk), heads, dim, batch=2, dtype="bfloat16", mask=mask, **features)
        yield p, {"q": q[:, :nq], "k": k[:, :nk], "v": v[:, :nk], "dout": dout[:, :nq]}


def by_blocks_and_packed(q, k, v, dout, **features):
    """The same of a layout, and of two packed sequences."""
    heads, dim = q.shape[2:]
    listed = np.random.default_rng(3).random((2, 2, heads, 9, 9)) < 0.4
    mask = Blocks(listed[0], listed[1], (128, 128), BandSpec(None, 0, "bottom_right"))
    p = problem((1100, 1100), heads, dim, batch=2, dtype="bfloat16", mask=mask, **features)
    yield p, {"q": q, "k": k, "v": v, "dout": dout}
    p = packed(((300, 750), (800, 350)), heads, dim, dtype="bfloat16", **features)
    yield p, {"q": q[0], "k": k[0], "v": v[0], "dout": dout[0]}


def forward_and_backward(p, x, backward=True, **options):
    """out, lse and, if asked for, the gradients."""
    lengths = ()
    if p.packed:
        ends = (np.cumsum([0, *of]).astype(np.int32) for of in (p.lengths_q, p.lengths_k))
        lengths = (*(torch.from_numpy(of).cuda() for of in ends), *p.max_seqlen)
    fwd, bwd = (fs.mha_varlen_fwd, fs.mha_varlen_bwd) if p.packed else (fs.mha_fwd, fs.mha_bwd)
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    out, lse = fwd(q, k, v, *lengths, **options)
    if not backward:
        return out, lse
    return out, lse, *bwd(dout, q, k, v, out, lse, *lengths, **options)


def assert_within_bounds(p, x, got, backward=True):
    exact, bound = dense.definition(p, x)
    names = ("out", "lse", "dq", "dk", "dv")[: 5 if backward else 2]
    for name, a in zip(names, got, strict=True):
        share = dense.share(a.double(), exact[name], bound[name])
        assert (share <= 1).all(), f"{name} of {p.max_seqlen} under {p.mask}: {share.max()}"


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["of q's type", "bool"])
def test_bias_without_softcap(backend, kind, dropout_p, dim):
    """By tiles in shared memory: -inf for rows, columns and all first keys, values beside which
    scores vanish, and NaN (bool: True) behind the ends of sequences, where vectors reach."""
    need_head_dim(backend, dim)
    if dropout_p and backend == "sm90" and dim > 128:
        pytest.skip("sm90 has no bias beside dropout above head_dim 128")
    dropout = {"dropout_p": dropout_p, "seed": 5, "offset": 7}
    q, k, v, dout = qkv(1100, heads=2, dim=dim)
    values = torch.randn(2, 2, 1100, 1104, device="cuda", dtype=BF16)
    values[0, 1, ::7] *= 200
    values[0, 1, ::9, ::2] = -3e38
    values[..., 300:400] = values[:, 0, 150] = values[1, :, 200:, :600] = -math.inf
    values[..., 1100:] = math.nan  # of the next row, as it were
    wide = values > 0 if kind == "bool" else values
    behind = True if kind == "bool" else math.nan  # what must not count
    of_problem = {f"dropout_{name.removeprefix('dropout_')}": x for name, x in dropout.items()}
    many = over_many_tiles(q, k, v, dout, **of_problem)
    for p, x in itertools.chain(many, by_blocks_and_packed(q, k, v, dout, **of_problem)):
        nq, nk = p.max_seqlen
        bias = torch.full_like(wide, behind)[:, :, :nq, :nk]
        for b, (n, m) in enumerate(zip(p.lengths_q, p.lengths_k, strict=True)):
            bias[b, :, :n, :m] = wide[b, :, :n, :m]
        options = {"mask": mask_of(p), "bias": bias, "backend": backend, **dropout}
        backward = backend == "sm80" or dim <= 128  # else it is sm80's
        got = forward_and_backward(p, x, backward, **options)
        assert_within_bounds(p, x | {"bias": bias}, got, backward)
    options = {"bias": wide[..., :1100], "backend": backend, **dropout}
    want = fs.mha_fwd(q, k, v, **options)
    k[:, 300:400] = math.nan  # what -inf hides, whatever its scores are
    for a, b in zip(fs.mha_fwd(q, k, v, **options), want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256, 512])
def test_alibi_over_many_tiles(backend, dim):
    """Scores that rise or fall from tile to tile by more than an exponential's range, on both sides
    of the diagonal, also where it is not that of the tiles."""
    need_head_dim(backend, dim)
    q, k, v, dout = qkv(1100, heads=4, dim=dim)
    slopes = torch.tensor([[2.0, 0.3, 0.01, 0.0], [-0.02, -1.0, 30.0, 1e-4]], device="cuda")
    for p, x in over_many_tiles(q, k, v, dout, alibi="batch"):
        options = {"mask": mask_of(p), "alibi_slopes": slopes, "backend": backend}
        got = both(x.values(), **options)
        assert_same(got[:2], both(x.values(), **options)[:2])
        assert_within_bounds(p, x | {"alibi_slopes": slopes}, got)


BANDS = [
    *[(1024, 0), (500, 500), (256, 0), (250, 3), (99, 0), (0, 0), (63, 63), (None, -300)],
    *[(500, -300), (-200, 450), (-900, None)],
]


@pytest.mark.parametrize("dim", [64, 128, 192, 256, 320])
@pytest.mark.parametrize("left, right", BANDS)
def test_bands_over_many_tiles(backend, left, right, dim):
    """From those that show many tiles of keys as a whole to those that hide all from some queries,
    with keys beside which those before them vanish."""
    need_head_dim(backend, dim)
    shapes = [(1300, 1300, "bottom_right")]
    shapes += [(*s, a) for s in ((700, 1300), (1300, 700)) for a in ("bottom_right", "top_left")]
    if dim == 256:  # whose tiles of 80 keys, the only ones to try there, begin with 2048
        shapes += [(300, 2100, "bottom_right"), (2100, 2100, "bottom_right")]
    for nq, nk, alignment in shapes:
        assert_band(backend, (nq, nk), 2, dim, BandSpec(left, right, alignment))


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("left, right", [(200, 0), (100, 100), (-200, 450)])
def test_bands_over_more_tiles_than_multiprocessors(backend, left, right, dim):
    """Where a block goes on from one tile of queries to the next."""
    need_head_dim(backend, dim)
    assert_band(backend, (1300, 1300), 16, dim, BandSpec(left, right, "bottom_right"))


def assert_band(backend, lengths, heads, dim, mask):
    nq, nk = lengths
    q, k, v, dout = qkv(max(lengths), heads=heads, dim=dim)
    k[:, ::119] *= 20
    p = problem(lengths, 2, dim, batch=2, dtype="bfloat16", mask=mask)
    x = {"q": q[:, :nq], "k": k[:, :nk], "v": v[:, :nk], "dout": dout[:, :nq]}
    got = forward_and_backward(p, x, mask=mask_of(p), backend=backend)
    for i in range(0, heads, 2):  # what float64 needs of memory
        of_two = slice(i, i + 2)
        out, lse, *gradients = got
        parts = out[:, :, of_two], lse[:, of_two], *(g[:, :, of_two] for g in gradients)
        assert_within_bounds(p, {name: t[:, :, of_two] for name, t in x.items()}, parts)


def test_alibi_and_a_bias_have_kernels_of_their_own(backend):
    q, k, v, _ = qkv(2048)
    slopes, bias = (
        torch.ones(2, device="cuda"),
        torch.zeros(1, 1, 1, 2048, device="cuda", dtype=BF16),
    )
    for op in ("fwd", "bwd"):
        options = {"op": op, "backend": backend}
        assert backend in kernel_of(q, k, v, alibi_slopes=slopes, **options)
        assert backend in kernel_of(q, k, v, bias=bias, **options)
        assert backend in kernel_of(q, k, v, bias=bias, dropout_p=0.1, **options)
        # Divided by such a scale slopes would be infinite: all features together do not divide.
        tiny = {"alibi_slopes": slopes, "softmax_scale": 1e-30}
        if backend == "sm80":
            for call, why in (
                (tiny, "between 2^-40 and 2^40"),
                ({"alibi_slopes": slopes, "bias": bias}, "ALiBi is not compiled in"),
                ({"bias": bias.float()}, "of another type than q"),
            ):
                found = fs.explain(q, k, v, **call, **options)
                assert found.kernel
                assert any(why in reason for _, reason in found.refused)
            continue
        for call, why in (
            (tiny, "between 2^-40 and 2^40"),
            ({"alibi_slopes": slopes, "softcap": 5.0}, "ALiBi is not compiled in"),
            ({"bias": bias, "softcap": 5.0}, "a bias is not compiled in"),
            ({"bias": bias.float()}, "of another type than q"),
        ):
            found = fs.explain(q, k, v, **call, **options)
            assert not found.kernel
            assert any(why in reason for _, reason in found.refused)


def test_layouts_of_small_blocks_without_features(backend):
    """Kernels with features have smaller tiles than those without, and run without them then."""
    if backend != "sm80":
        pytest.skip("sm80 alone has such tiles")
    for dim in (64, 128):
        x = qkv(300, dim=dim)
        mask = fs.layouts.dense(300, 300, 64)
        assert "features" in kernel_of(*x[:3], mask=mask, backend=backend)
        for a, b in zip(both(x, mask=mask, backend=backend), both(x, backend=backend), strict=True):
            assert (a.float() - b.float()).abs().max() < 0.02


def test_layouts_take_no_tiles_that_are_counted_from_the_end(backend):
    """Such a tile of 192 queries begins anywhere, also where the layout's blocks would suit it."""
    mask = fs.layouts.dense(768, 768, (192, 128))
    q, k, v, _ = qkv(768)
    refused = [why for kernel, why in fs.explain(q, k, v, mask=mask).refused if backend in kernel]
    reason = "tiles counted from the end of a sequence do not lie in the mask's blocks"
    assert (reason in refused) == (backend == "sm90")
