"""flashsdk.torch.kv_append: the bytes of flashsdk.kv_append, where torch.compile sees it."""

import flashsdk as fs
import pytest
from cases import assert_same_bits
from flashsdk import _bindings
from flashsdk._testing import verify

torch = pytest.importorskip("torch")

from flashsdk.torch import kv_append  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

FP8 = torch.float8_e4m3fn

BATCH, ROOM, HEADS, HEADS_KV, DIM, ADDED = 3, 40, 4, 2, 32, 4
USED = torch.tensor([7, 0, 30], dtype=torch.int32)
TABLE = torch.arange(14, -1, -1, dtype=torch.int32).view(3, 5)
ANGLES = torch.arange(ROOM)[:, None] / 2.0 ** torch.arange(5)
ROTARY = {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin()}


def new():
    q = torch.randn(BATCH, ADDED, HEADS, DIM)
    return q, *(torch.randn(BATCH, ADDED, HEADS_KV, DIM) for _ in "kv")


def caches(pages=False):
    shape = (15, 8) if pages else (BATCH, ROOM)
    k, v = torch.randn(2, *shape, HEADS_KV, DIM)
    return k, v


def arrays(*tensors):
    return [x.numpy() for x in tensors]


OPTIONS = {
    "no q": {},
    "rotary": ROTARY,
    "pages": {"block_table": TABLE, **ROTARY},
    "neighbours": {**ROTARY, "rotary_interleaved": True, "q_advances": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_bytes_are_those_of_numpy(options):
    q, k, v = new()
    ours = caches("block_table" in options)
    theirs = [x.copy() for x in arrays(*ours)]
    options = options and {"q": q, **options}
    plain = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    turned = kv_append(*ours, k, v, USED, **options)
    want = fs.kv_append(*theirs, *arrays(k, v, USED), **plain)
    assert_same_bits(arrays(*ours), theirs)
    if options:
        assert_same_bits([turned.numpy()], [want])
    else:
        assert turned is None is want


SCALED = {"k_descale": torch.rand(BATCH, HEADS_KV) + 0.01, "v_descale": torch.rand(BATCH, 1) + 0.01}


def of_cache(dtype=torch.bfloat16, pages=False):
    """A cache of 8 bits, and q, k and v of 16."""
    return [x.to(FP8) for x in caches(pages)], [x.to(dtype) for x in new()]


def codes(*tensors):
    return [x.view(torch.uint8).numpy() for x in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("scaled", [SCALED, {}], ids=["descales", "none"])
def test_8_bits_are_those_of_numpy(scaled, pages, dtype):
    pytest.importorskip("ml_dtypes")
    ours, (q, k, v) = of_cache(dtype, pages)
    theirs = [verify.from_torch(x.clone()) for x in ours]
    again = [x.clone() for x in ours]
    options = {"q": q, **ROTARY, **scaled, **({"block_table": TABLE} if pages else {})}
    plain = {n: verify.from_torch(x) for n, x in options.items()}
    turned = kv_append(*ours, k, v, USED, **options)
    want = fs.kv_append(*theirs, *map(verify.from_torch, (k, v, USED)), **plain)
    assert_same_bits(codes(*ours, turned), [x.view("uint8") for x in (*theirs, want)])
    with torch.inference_mode():
        in_place = fs.kv_append(*again, k, v, USED, **options)
    assert_same_bits(codes(*again, in_place), codes(*ours, turned))


def test_compile_with_8_bits():
    """One graph for every step, whose descales are tensors, too."""

    def step(k_cache, v_cache, k, v, used, k_descale, v_descale):
        scaled = {"k_descale": k_descale, "v_descale": v_descale}
        return kv_append(k_cache, v_cache, k, v, used, q=k, **ROTARY, **scaled)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    ours, _ = of_cache()
    theirs = [x.clone() for x in ours]
    before = codes(*(x.clone() for x in ours))
    for used, factor in ((USED, 1), (USED + ADDED, 3)):
        _, (_, k, v) = of_cache()
        scaled = [x * factor for x in SCALED.values()]
        got = compiled(*ours, k, v, used, *scaled)
        assert got.dtype is k.dtype
        assert torch.equal(got, step(*theirs, k, v, used, *scaled))
        assert_same_bits(codes(*ours), codes(*theirs))
    assert counter.frame_count == 1
    assert all((x != y).any() for x, y in zip(codes(*ours), before, strict=True))


def test_opcheck_with_8_bits():
    ours, (q, k, v) = of_cache()
    given = (*ours, k, v, USED, None, q, *ROTARY.values(), False, True, *SCALED.values())
    torch.library.opcheck(
        torch.ops.flashsdk.kv_append.default,
        given,
        test_utils="test_faketensor",  # the others compute with 8 bits, which PyTorch does not
    )


def test_a_watched_call_is_the_operator():
    ours, (_, k, v) = of_cache()
    again = [x.clone() for x in ours]
    with torch.profiler.profile() as profile:
        kv_append(*ours, k, v, USED, **SCALED)
    assert any(event.name == "flashsdk::kv_append" for event in profile.events())
    kv_append(*again, k, v, USED, **SCALED)
    assert_same_bits(codes(*ours), codes(*again))
    with pytest.raises(fs.Unsupported, match=r"^k_descale: a tensor that requires a gradient; one"):
        kv_append(*ours, k, v, USED, k_descale=SCALED["k_descale"].clone().requires_grad_())


def test_runs_on_the_threads_of_pytorch(monkeypatch):
    asked = []
    use = _bindings.use_threads
    monkeypatch.setattr(_bindings, "use_threads", lambda *x: asked.append(x[0]) or use(*x))
    _, k, v = new()
    kv_append(*caches(), k, v, USED)
    assert asked == [torch.get_num_threads(), 0]


@pytest.mark.parametrize("rotates", [False, True])
def test_compile(rotates):
    """One graph for every step, which writes what the eager call writes."""

    def step(k_cache, v_cache, k, v, used, q):
        options = {"q": q, **ROTARY} if rotates else {}
        turned = kv_append(k_cache, v_cache, k, v, used, **options)
        return q if turned is None else turned

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    ours = caches()
    theirs = [x.clone() for x in ours]
    for used in (USED, USED + ADDED):
        q, k, v = new()
        assert torch.equal(compiled(*ours, k, v, used, q), step(*theirs, k, v, used, q))
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x, y)
    assert counter.frame_count == 1


def test_opcheck():
    q, k, v = new()
    for rest in ((None, None, None, None), (TABLE, q, *ROTARY.values())):
        given = (*caches(rest[0] is not None), k, v, USED, *rest, False, True)
        torch.library.opcheck(torch.ops.flashsdk.kv_append.default, given)


def test_no_gradient_is_lost():
    q, k, v = new()
    given = dict(zip(("k_cache", "v_cache", "k", "v", "q"), (*caches(), k, v, q), strict=True))
    for name, x in given.items():
        trained = {**given, name: x.clone().requires_grad_()}
        with pytest.raises(fs.Unsupported) as caught:
            kv_append(**trained, seqused_k=USED, **ROTARY)
        allowed = "one without, or torch.no_grad(), as a cache has no backward"
        assert str(caught.value) == f"{name}: a tensor that requires a gradient; {allowed}"
        with torch.no_grad():
            turned = kv_append(**trained, seqused_k=USED, **ROTARY)
        assert not turned.requires_grad


ERRORS = {
    "missing": ({"k": None}, "k: None; a tensor"),
    "no tensor": ({"seqused_k": [7, 0, 30]}, "seqused_k: [7, 0, 30]; a tensor"),
    "flag": ({"q_advances": 1}, "q_advances: 1; True or False"),
    "no descale": ({"v_descale": 0.5}, "v_descale: 0.5; a tensor"),
    "descale of 32 bits": (
        {"v_descale": SCALED["v_descale"]},
        "v_descale: given; none, as k_cache is float32 and no float8_e4m3fn",
    ),
    "no room": ({"seqused_k": USED + 7}, "seqused_k: 37 of sequence 2; 0 to 36, as the "),
    "lengths elsewhere": ({"seqused_k": USED.to("meta")}, "seqused_k: on meta; cpu, where k is"),
    "table elsewhere": (
        {"block_table": torch.zeros(3, 1, dtype=torch.int32, device="meta")},
        "block_table: on meta; cpu, where k is",
    ),
    "cosines elsewhere": (
        {"rotary_cos": torch.ones(40, 4, device="meta"), "rotary_sin": torch.ones(40, 4)},
        "rotary_cos: on meta; cpu, where k is",
    ),
}


@pytest.mark.parametrize(("changes", "line"), ERRORS.values(), ids=ERRORS)
def test_errors(changes, line):
    _, k, v = new()
    k_cache, v_cache = caches()
    before = k_cache.clone()
    given = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "seqused_k": USED}
    with pytest.raises(fs.Error) as caught:
        kv_append(**given | changes)
    assert str(caught.value).startswith(line)
    assert torch.equal(k_cache, before)


def test_a_cache_that_is_yet_to_be_negated():
    """PyTorch would copy it for the operator, and what was written would be lost."""
    _, k, v = new()
    k_cache, v_cache = caches()
    before = v_cache.clone()
    negative = torch.zeros(k_cache.shape, dtype=torch.complex64).conj().imag
    with pytest.raises(fs.InvalidArgument, match=r"^k_cache: a view with is_neg\(\); resolve_neg"):
        kv_append(negative, v_cache, k, v, USED)
    assert torch.equal(v_cache, before)
