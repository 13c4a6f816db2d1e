"""Keys and values in float8_e4m3fn through flashsdk.torch: forward alone, by every way there is."""

import flashsdk as fs
import numpy as np
import pytest
from cases import assert_same_bits
from flashsdk._testing import verify

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import flashsdk.torch as adapter  # noqa: E402
from torch_cases import qkv  # noqa: E402

FP8 = torch.float8_e4m3fn
NO_BACKWARD = "the dtype of q, as float8_e4m3fn has no backward and a tensor requires a gradient"


def of_8_bits(dtype=torch.bfloat16, seqlen_q=5, **sizes):
    """q, k, v and the descales."""
    q, k, v = qkv(seqlen_q=seqlen_q, seqlen_k=70, heads_kv=2, **sizes)
    scaled = {name: torch.rand(2, 2) / 4 + 0.1 for name in ("k_descale", "v_descale")}
    return q.to(dtype), (4 * k).to(FP8), (4 * v).to(FP8), scaled


def core(q, k, v, *packed, **keywords):
    """out and lse by NumPy's door, as tensors."""
    given = {
        n: verify.from_torch(x) if isinstance(x, torch.Tensor) else x for n, x in keywords.items()
    }
    packed = [verify.from_torch(x) if isinstance(x, torch.Tensor) else x for x in packed]
    call = fs.mha_varlen_fwd if packed else fs.mha_fwd
    return [
        verify.to_torch(x, "cpu")
        for x in call(*map(verify.from_torch, (q, k, v)), *packed, **given)
    ]


def same(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_the_bits_are_those_of_numpy(torch_way, seqlen_q, dtype):
    q, k, v, scaled = of_8_bits(dtype, seqlen_q)
    for given in (scaled, {}, {"k_descale": scaled["k_descale"][:1]}):
        more = {"mask": fs.Causal(), "seqused_k": lengths(70, 33)}
        want = core(q, k, v, **given, **more)
        same(adapter.attention(q, k, v, return_lse=True, **given, **more), want)
        same(fs.attention(q, k, v, return_lse=True, **given, **more), want)
        same(fs.mha_fwd(q, k, v, **given, **more), want)
        # Which looks on, so that the operator is called.
        with torch.profiler.profile() as profile:
            watched = adapter.attention(q, k, v, return_lse=True, **given, **more)
        assert any(event.name == "flashsdk::attention_fwd" for event in profile.events())
        same(watched, want)


def test_packed_sequences(torch_way):
    q, k, v, scaled = of_8_bits(seqlen_q=70)
    cu = (lengths(0, 30, 140), lengths(0, 61, 140), 110, 79)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    for given in (scaled, {}):
        want = core(*rows, *cu, **given)
        same(adapter.varlen_attention(*rows, *cu, return_lse=True, **given), want)
        same(fs.mha_varlen_fwd(*rows, *cu, **given), want)


def test_pages(torch_way):
    q, k, v, scaled = of_8_bits()
    used, table = lengths(70, 20), torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    pages = [torch.full((4, 40, 2, 32), torch.nan).to(FP8) for _ in "kv"]
    for paged, x in zip(pages, (k, v), strict=True):
        paged[3], paged[0, :30], paged[1, :20] = x[0, :40], x[0, 40:], x[1, :20]
    got = adapter.attention(q, *pages, seqused_k=used, block_table=table, **scaled)
    assert torch.equal(got, adapter.attention(q, k, v, seqused_k=used, **scaled))


def test_flash_attn_with_kvcache(torch_way):
    """Of flash-attn 3 the names of the descales."""
    q, k, v, scaled = of_8_bits(seqlen_q=3)
    used = lengths(70, 20)
    given = {"mask": fs.Causal(), "seqused_k": used}
    for descales in (scaled, {}):
        want = adapter.attention(q, k, v, return_lse=True, **given, **descales)
        got = adapter.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, causal=True, return_softmax_lse=True, **descales
        )
        same(got, want)
    with pytest.raises(
        fs.InvalidArgument, match=r"^k_cache: dtype float8_e4m3fn; float32, the dty"
    ):
        adapter.flash_attn_with_kvcache(q.float(), k, v, cache_seqlens=used)
    with pytest.raises(fs.InvalidArgument, match=r"^k_descale: shape \(2,\); \(1 or batch 2, "):
        adapter.flash_attn_with_kvcache(q, k, v, k_descale=scaled["k_descale"][0])


@pytest.mark.parametrize("rows", [None, [1, 0]], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_with_kvcache_appends(torch_way, causal, rows):
    """As kv_append and attention do, one after the other."""
    q, k_cache, v_cache, scaled = of_8_bits(seqlen_q=3)
    new = [torch.randn(2, 3, 2, 32).to(q.dtype) for _ in "kv"]
    angles = torch.arange(70)[:, None] / 2.0 ** torch.arange(5)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": True}
    used = lengths(60, 20)
    index = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    table = None if index is None else index[:, None]
    want_k, want_v = k_cache.clone(), v_cache.clone()
    for descales in (scaled, {}):
        turned = adapter.kv_append(
            *(want_k, want_v, *new, used), block_table=table, q=q, q_advances=causal, **rotary,
            **descales,
        )  # fmt: skip
        mask = fs.Causal() if causal else None
        want = adapter.attention(
            *(turned, want_k, want_v), seqused_k=used + 3, block_table=table, mask=mask, **descales
        )
        got = adapter.flash_attn_with_kvcache(
            *(q, k_cache, v_cache, *new), cache_seqlens=used, cache_batch_idx=index, causal=causal,
            **rotary, **descales,
        )  # fmt: skip
        same([got], [want])
        for ours, theirs in ((k_cache, want_k), (v_cache, want_v)):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    before = k_cache.view(torch.uint8).clone()
    with pytest.raises(fs.InvalidArgument, match=r"^k_descale: shape \(3, 1\); \(1 or batch 2, "):
        adapter.flash_attn_with_kvcache(
            *(q, k_cache, v_cache, *new), cache_seqlens=used, k_descale=torch.ones(3, 1)
        )
    assert torch.equal(k_cache.view(torch.uint8), before)


def test_autocast_leaves_them_alone(torch_way):
    q, k, v, scaled = of_8_bits()
    for given in (scaled, {}):
        want = adapter.attention(q, k, v, **given)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(adapter.attention(q.float(), k, v, **given), want)


def test_there_is_no_gradient(torch_way):
    q, k, v, scaled = of_8_bits()
    sink = torch.zeros(4, requires_grad=True)
    leaf = q.clone().requires_grad_()
    for given in ({}, scaled):
        for call in (
            lambda: adapter.attention(leaf, k, v, **given),  # noqa: B023
            lambda: adapter.attention(q, k.clone().requires_grad_(), v, **given),  # noqa: B023
            lambda: adapter.attention(q, k, v, sink=sink, **given),  # noqa: B023
            lambda: adapter.flash_attn_func(leaf, k, v),
            lambda: torch.func.grad(
                lambda x: adapter.attention(x, k, v, **given).float().sum()  # noqa: B023
            )(q),
            lambda: torch.compile(adapter.attention, backend="eager")(leaf, k, v, **given),  # noqa: B023
        ):
            with pytest.raises(fs.Unsupported) as caught:
                call()
            assert str(caught.value).splitlines()[0] == f"k: dtype float8_e4m3fn; {NO_BACKWARD}"
        with torch.no_grad():
            got = adapter.attention(leaf, k, v, **given)
        assert torch.equal(got, adapter.attention(q, k, v, **given))
    with pytest.raises(fs.Unsupported, match=r"^k_descale: a tensor that requires a gradient; one"):
        adapter.attention(q, k, v, k_descale=scaled["k_descale"].requires_grad_())


def test_compile():
    """One graph for every step of a cache."""

    def step(q, k, v, used, k_descale, v_descale):
        return adapter.attention(q, k, v, seqused_k=used, k_descale=k_descale, v_descale=v_descale)

    q, k, v, scaled = of_8_bits(seqlen_q=1)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for used in (lengths(3, 70), lengths(70, 0)):
        got = compiled(q, k, v, used, *scaled.values())
        assert torch.equal(got, step(q, k, v, used, *scaled.values()))


def test_opcheck():
    q, k, v, scaled = of_8_bits()
    more = (None, None, lengths(70, 20), None, *scaled.values(), 0, None, None, 0, 0)
    rest = (None, None, None, None, [], None, 0.0, 0.0, False, "")
    torch.library.opcheck(
        torch.ops.flashsdk.attention_fwd.default,
        (q, k, v, *more, *rest),
        test_utils="test_faketensor",  # the others compute with 8 bits, which PyTorch does not
    )


def test_vmap():
    q, k, v, scaled = of_8_bits()
    one = lambda q, k, v, a, b: adapter.attention(  # noqa: E731
        *(x[None] for x in (q, k, v)), k_descale=a[None], v_descale=b[None]
    )[0]
    got = torch.vmap(one)(q, k, v, *scaled.values())
    assert torch.equal(got, adapter.attention(q, k, v, **scaled))


def test_explain():
    q, k, v, scaled = of_8_bits()
    told = adapter.explain(adapter.attention, q, k, v, **scaled)
    assert told == fs.explain(q, k, v, **scaled)
    with pytest.raises(fs.Unsupported, match=r"^k: dtype float8_e4m3fn; the dtype of q, as float8"):
        adapter.explain(adapter.attention, q, k, v, op="bwd", **scaled)


def test_descales_are_of_8_bits_alone(torch_way):
    q, k, v, scaled = of_8_bits()
    with pytest.raises(
        fs.InvalidArgument, match=r"^v_descale: given; none, as k is bfloat16 and n"
    ):
        adapter.attention(q, k.to(q.dtype), v.to(q.dtype), v_descale=scaled["v_descale"])


# ---- a cache is quantised, on a CPU and on a GPU


def test_a_quantised_cache(place):
    """As docs/serving.md does it: errors are those of e4m3, of three bits behind the point.

    And the bytes are those of PyTorch's own cast.
    """
    q, k, v = (
        place.put(x) for x in qkv(seqlen_q=4, seqlen_k=300, heads_kv=2, dtype=torch.bfloat16)
    )
    scaled, narrow = {}, []
    for name, x in (("k_descale", k), ("v_descale", v)):
        scaled[name] = x.abs().amax((1, 3)).float() / torch.finfo(FP8).max
        narrow.append(place.put((x / scaled[name][:, None, :, None]).to(FP8)))
    written = [place.put(torch.zeros(x.shape).to(FP8)) for x in narrow]
    adapter.kv_append(*written, k, v, place.put(lengths(0, 0)), **scaled)
    for ours, theirs in zip(written, narrow, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    want = adapter.attention(q, k, v)
    got = adapter.attention(q, *narrow, **scaled)
    if place.backend != "sm90":  # which leaves them to sm80
        place.ours(fs.explain(q, *narrow, **scaled))
    assert (got - want).abs().max() < 0.1 * want.abs().max()
    plain = [x.float() * s[:, None, :, None] for x, s in zip(narrow, scaled.values(), strict=True)]
    torch.testing.assert_close(
        got.float().cpu(), adapter.attention(q.float().cpu(), *(x.cpu() for x in plain)),
        rtol=2e-2, atol=2e-3,
    )  # fmt: skip
    assert_same_bits(
        [got.view(torch.int16).cpu().numpy()],
        [adapter.attention(q, *narrow, **scaled).view(torch.int16).cpu().numpy()],
    )
    assert np.isfinite(got.float().cpu().numpy()).all()
