"""Caches on a GPU: what test_kv_append.py says of NumPy's, and what a loop that serves needs."""

import flashsdk as fs
import pytest
from gpu_cases import BF16

torch = pytest.importorskip("torch")

F16 = torch.float16
HEADS, HEADS_KV, DIM = 8, 2, 64


def rotary(positions, pairs, dtype=torch.float32):
    angles = torch.arange(positions)[:, None] / 100.0 ** (torch.arange(pairs) / pairs)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def paged(batch, pages_each, page_size, dtype=BF16, dim=DIM):
    """k and v of pages that hold NaN, and a table of all of them in any order."""
    pages = batch * pages_each
    shape = pages, page_size, HEADS_KV, dim
    caches = [torch.full(shape, torch.nan, device="cuda", dtype=dtype) for _ in "kv"]
    table = torch.randperm(pages, device="cuda").to(torch.int32).reshape(batch, pages_each)
    return *caches, table


def lengths(*values):
    return torch.tensor(values, device="cuda", dtype=torch.int32)


class Append:
    """New keys and values of 40 and 24 numbers for three caches of 48 keys, or for their pages."""

    def __init__(self, page_size, interleaved, advances):
        self.batch, self.room, self.added = 3, 48, 5
        self.shape = (self.batch, self.room)
        self.table = None
        if page_size is not None:
            self.shape = (self.batch * self.room // page_size, page_size)
            self.table = torch.randperm(self.shape[0]).to(torch.int32).reshape(self.batch, -1)
        self.used = torch.tensor([0, 7, 43], dtype=torch.int32)
        self.rotary = rotary(60, 12)
        self.how = {"rotary_interleaved": interleaved, "q_advances": advances}

    def random(self, heads, dim, dtype):
        return torch.randn(self.batch, self.added, heads, dim).to(dtype)

    def on(self, device, filled, dtype, new, q, scales=(None, None)):
        """The caches, full of one number before, and q rotated; as bytes on a CPU."""
        caches = [
            torch.full((*self.shape, HEADS_KV, d), filled, device=device).to(dtype)
            for d in (40, 24)
        ]
        cos, sin, k_descale, v_descale, table = (
            None if x is None else x.to(device) for x in (*self.rotary, *scales, self.table)
        )
        turned = fs.kv_append(
            *caches,
            *(x.to(device) for x in (*new, self.used)),
            block_table=table,
            q=q.to(device),
            rotary_cos=cos,
            rotary_sin=sin,
            k_descale=k_descale,
            v_descale=v_descale,
            **self.how,
        )
        return [x.cpu().view(torch.uint8) for x in (*caches, turned)]


@pytest.mark.parametrize("page_size", [None, 1, 3, 16])
@pytest.mark.parametrize("interleaved, advances", [(False, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, F16, BF16], ids=str)
def test_append_is_that_of_a_cpu(backend, dtype, interleaved, advances, page_size):
    """To the bit: no product is fused with a sum."""
    if backend != "sm80":
        pytest.skip("one kernel appends on every GPU")
    append = Append(page_size, interleaved, advances)
    new = [append.random(HEADS_KV, d, dtype) for d in (40, 24)]
    q = append.random(HEADS, 40, dtype)
    results = [append.on(device, 7.0, dtype, new, q) for device in ("cpu", "cuda")]
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("page_size", [None, 3, 16])
@pytest.mark.parametrize("interleaved, advances", [(False, True), (True, False)])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_append_of_8_bits_is_that_of_a_cpu(backend, dtype, interleaved, advances, page_size):
    """To the bit, with descales of every shape, and numbers of every kind."""
    if backend != "sm80":
        pytest.skip("one kernel appends on every GPU")
    append = Append(page_size, interleaved, advances)
    new = [30 * append.random(HEADS_KV, d, dtype) for d in (40, 24)]
    for x in new:
        x[0, 0, 0, :7] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-5, 6e4])
    q = append.random(HEADS, 40, dtype)
    batch = append.batch
    wide = torch.rand(2 * batch, 2 * HEADS_KV) + 0.01
    factors = {
        "all": (wide[::2, ::2], wide[1::2, 1::2]),
        "broadcast": (wide[:1, :1], wide[:batch, :1].expand(-1, HEADS_KV)),
        "zero": (torch.zeros(1, 1), torch.full((1, HEADS_KV), torch.inf)),
        "none": (None, None),
    }
    for name, scales in factors.items():
        results = [
            append.on(device, 0.0, torch.float8_e4m3fn, new, q, scales)
            for device in ("cpu", "cuda")
        ]
        assert results[0][0].any(), name
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_number_of_16_bits_as_8(backend, dtype):
    """All of them, with factors that make middles of them, as a CPU rounds them."""
    if backend != "sm80":
        pytest.skip("one kernel appends on every GPU")
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).reshape(1, 256, 1, 256)
    for factor in (None, 3.0, 41.0, -0.07, 1e-30, 1e30):
        results = []
        for device in ("cpu", "cuda"):
            caches = [torch.zeros(x.shape, device=device).to(torch.float8_e4m3fn) for _ in "kv"]
            scale = None if factor is None else torch.full((1, 1), factor, device=device)
            new, used = x.to(device), torch.zeros(1, dtype=torch.int32, device=device)
            fs.kv_append(*caches, new, new, used, k_descale=scale, v_descale=scale)
            results.append([cache.cpu().view(torch.uint8) for cache in caches])
        assert torch.equal(results[0][0], results[0][1])
        if factor is None:
            assert len(results[0][0].unique()) == 255  # all but a NaN with a sign
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs), factor


@pytest.mark.parametrize("page_size", [3, 16, 128])
def test_a_prompt_and_then_tokens(backend, page_size):
    """A cache that is filled step by step attends as all keys at once."""
    if backend == "sm90" and page_size % 8 != 0:
        pytest.skip("sm90 takes pages of a multiple of 8 keys")
    total = 300
    q = torch.randn(2, total, HEADS, DIM, device="cuda", dtype=BF16)
    k, v = (torch.randn(2, total, HEADS_KV, DIM, device="cuda", dtype=BF16) for _ in "kv")
    want, _ = fs.mha_fwd(q, k, v, mask=fs.Causal())
    k_cache, v_cache, table = paged(2, -(-total // page_size) + 1, page_size)
    used = lengths(0, 0)
    for rows in (slice(0, 200), slice(200, 290), *(slice(n, n + 1) for n in range(290, total))):
        fs.kv_append(k_cache, v_cache, k[:, rows], v[:, rows], used, block_table=table)
        used += rows.stop - rows.start
        out, _ = fs.mha_fwd(
            q[:, rows].contiguous(), k_cache, v_cache, mask=fs.Causal(), seqused_k=used,
            block_table=table, backend=backend,
        )  # fmt: skip
        assert (out - want[:, rows]).abs().max() < 0.02


@pytest.mark.parametrize("pages", [False, True])
def test_one_graph_serves_every_step(backend, pages):
    """Lengths and tables are read when it is replayed."""
    steps, room, page_size = 6, 4096, 64  # so long that a kernel of sm80 plans the parts
    k, v = (torch.randn(2, room, HEADS_KV, DIM, device="cuda", dtype=BF16) for _ in "kv")
    q = torch.randn(2, room, HEADS, DIM, device="cuda", dtype=BF16)
    if pages:
        k_cache, v_cache, table = paged(2, room // page_size, page_size)
    else:
        k_cache, v_cache = (torch.full_like(k, torch.nan) for _ in "kv")
        table = None
    used = lengths(3000, 5)
    for b, n in enumerate((3000, 5)):
        one = slice(b, b + 1)
        at = used[one] * 0
        caches = (k_cache, v_cache) if pages else (k_cache[one], v_cache[one])
        tables = None if table is None else table[one]
        fs.kv_append(*caches, k[one, :n], v[one, :n], at, block_table=tables)
    token = [torch.empty_like(x[:, :1]) for x in (q, k, v)]

    def step():
        fs.kv_append(k_cache, v_cache, token[1], token[2], used, block_table=table)
        used.add_(1)
        return fs.mha_fwd(
            token[0], k_cache, v_cache, seqused_k=used, block_table=table, backend=backend
        )[0]

    for x in token:
        x.zero_()
    before = used.clone()
    step()  # kernels are loaded
    used.copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    used.copy_(before)
    for n in range(steps):
        at = [3000 + n, 5 + n]
        for x, whole in zip(token, (q, k, v), strict=True):
            x.copy_(torch.stack([whole[b, at[b]] for b in range(2)])[:, None])
        graph.replay()
        for b in range(2):
            one = slice(b, b + 1)
            keys = slice(0, at[b] + 1)
            want, _ = fs.mha_fwd(token[0][one], k[one, keys], v[one, keys])
            assert (out[one] - want).abs().max() < 0.02, (n, b)


@pytest.mark.parametrize("seqlen_q", [1, 4, 200])
def test_bits_do_not_depend_on_what_shares_the_batch(backend, seqlen_q):
    """num_splits=1 keeps the keys of a query together."""
    q = torch.randn(6, seqlen_q, HEADS, DIM, device="cuda", dtype=BF16)
    k, v = (torch.randn(6, 5000, HEADS_KV, DIM, device="cuda", dtype=BF16) for _ in "kv")
    used = lengths(4400, 3, 0, 5000, 2000, 777)
    call = {"num_splits": 1, "mask": fs.Causal(), "backend": backend}
    alone = fs.mha_fwd(q[:1], k[:1], v[:1], seqused_k=used[:1], **call)
    for count in (2, 6):
        among = fs.mha_fwd(q[:count], k[:count], v[:count], seqused_k=used[:count], **call)
        for x, y in zip(among, alone, strict=True):
            assert torch.equal(x[:1], y)


def test_splits_of_a_query(backend):
    """At most as many as are asked for, and the same attention."""
    if backend != "sm80":
        pytest.skip("sm80 alone splits keys")
    k, v = (torch.randn(1, 20000, HEADS_KV, DIM, device="cuda", dtype=BF16) for _ in "kv")
    for queries in (1, 40):
        q = torch.randn(1, queries, HEADS, DIM, device="cuda", dtype=BF16)
        want, _ = fs.mha_fwd(q, k, v, num_splits=1)
        for splits in (None, 2, 7, 1000):
            assert "split" in fs.explain(q, k, v, num_splits=splits).kernel
            out, _ = fs.mha_fwd(q, k, v, num_splits=splits)
            assert (out - want).abs().max() < 0.01


def test_one_graph_for_lengths_that_change(backend):
    """The thread block that ends last joins the parts of a sequence: its counter is in memory that
    held anything, and is ready for the next launch."""
    if backend != "sm80":
        pytest.skip("sm80 alone splits keys")
    q = torch.randn(5, 2, HEADS, DIM, device="cuda", dtype=BF16)
    k, v = (torch.randn(5, 9000, HEADS_KV, DIM, device="cuda", dtype=BF16) for _ in "kv")
    used = torch.full((5,), 9000, dtype=torch.int32, device="cuda")
    call = {"seqused_k": used, "mask": fs.Causal()}
    fs.mha_fwd(q, k, v, **call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fs.mha_fwd(q, k, v, **call)
    for step in range(20):
        used.copy_(torch.randint(0, 9001, (5,)))
        used[step % 5] = (0, 1, 9000)[step % 3]
        graph.replay()
        alone, alone_lse = fs.mha_fwd(q, k, v, num_splits=1, **call)
        assert (out - alone).abs().max() < 0.01
        torch.testing.assert_close(lse, alone_lse, atol=1e-3, rtol=0)
        again, again_lse = fs.mha_fwd(q, k, v, **call)
        assert torch.equal(out, again)
        assert torch.equal(lse, again_lse)


def test_merge_joins_parts(backend):
    q, k, v = (torch.randn(2, 100, 4, DIM, device="cuda", dtype=BF16) for _ in "qkv")
    want, want_lse = fs.mha_fwd(q, k, v, backend=backend)
    halves = [
        fs.mha_fwd(q, k[:, s], v[:, s], backend=backend) for s in (slice(60), slice(60, None))
    ]
    out, lse = fs.merge(*zip(*halves, strict=True))
    assert (out - want).abs().max() < 0.02
    assert (lse - want_lse).abs().max() < 1e-3


def test_sinks_are_differentiated_by_torch(backend):
    from flashsdk.torch import attention
    from standard_attention import standard

    q, k, v = (
        torch.randn(2, 70, 4, DIM, device="cuda", dtype=BF16, requires_grad=True) for _ in "qkv"
    )
    sink = torch.randn(4, device="cuda", requires_grad=True)
    dout = torch.randn(2, 70, 4, DIM, device="cuda", dtype=BF16)
    attention(q, k, v, sink=sink, mask=fs.Causal(), backend=backend).backward(dout)
    got = [x.grad.float() for x in (q, k, v, sink)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, sink)]
    visible = torch.ones(70, 70, device="cuda", dtype=torch.bool).tril()
    standard(*exact[:3], visible=visible, sink=exact[3])[0].backward(dout.double())
    for ours, theirs in zip(got, (x.grad for x in exact), strict=True):
        assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max() + 0.02
