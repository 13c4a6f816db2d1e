"""flashsdk.io: its bytes are those that an algorithm moves, counted while it runs."""

import re
from pathlib import Path

import flashsdk as fs
import numpy as np
import pytest
from flashsdk import io, layouts
from flashsdk._testing import naive
from flashsdk._testing.reference import Features

ROOT = Path(__file__).parents[2]
SMALL = io.Problem(batch=2, seqlen_q=70, seqlen_k=90, num_heads=4, head_dim=8, element_bytes=4)
GROUPED = io.Problem(
    2, 70, 90, num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=4, element_bytes=4
)
MASKS = [None, fs.Causal(), fs.SlidingWindow(10, 3)]


class Memory:
    """Arrays of a slow memory, and the bytes that a program has moved from and to it."""

    def __init__(self):
        self.read = self.written = 0

    def load(self, array):
        self.read += array.nbytes
        return array.copy()

    def store(self, array, values):
        array[...] = values
        self.written += array.nbytes


def arrays(problem):
    rng = np.random.default_rng(0)
    group = problem.num_heads // problem.kv

    def make(heads, length, dim):
        return rng.standard_normal((problem.batch, heads, length, dim), dtype=np.float32)

    q = make(problem.num_heads, problem.seqlen_q, problem.head_dim)
    k = make(problem.kv, problem.seqlen_k, problem.head_dim)
    v = make(problem.kv, problem.seqlen_k, problem.dim_v)
    return q, k, v, group


def visible(mask, problem):
    shape = (problem.seqlen_q, problem.seqlen_k)
    if mask is None:
        return np.ones(shape, bool)
    return np.asarray(mask.to_dense(*shape))


def flash_forward(problem, tile, mask, memory):
    """FlashAttention-2's forward in NumPy; what it loads and stores goes through ``memory``."""
    q, k, v, group = arrays(problem)
    out = np.zeros((*q.shape[:3], problem.dim_v), np.float32)
    lse = np.zeros(q.shape[:3], np.float32)
    seen = visible(mask, problem)
    for b, h in np.ndindex(q.shape[:2]):
        for i in range(0, problem.seqlen_q, tile[0]):
            rows = slice(i, i + tile[0])
            mine = memory.load(q[b, h, rows])
            top = np.full(len(mine), -np.inf)
            total = np.zeros(len(mine))
            sums = np.zeros((len(mine), problem.dim_v))
            for j in range(0, problem.seqlen_k, tile[1]):
                columns = slice(j, j + tile[1])
                if not seen[rows, columns].any():
                    continue
                s = mine @ memory.load(k[b, h // group, columns]).T * problem.head_dim**-0.5
                s[~seen[rows, columns]] = -np.inf
                new = np.maximum(top, s.max(1))
                base = np.where(np.isfinite(new), new, 0)
                p = np.exp(s - base[:, None])
                shrink = np.exp(top - base)
                total = total * shrink + p.sum(1)
                sums = sums * shrink[:, None] + p @ memory.load(v[b, h // group, columns])
                top = new
            with np.errstate(divide="ignore"):
                memory.store(lse[b, h, rows], top + np.log(total))
            memory.store(out[b, h, rows], sums / np.where(total, total, 1)[:, None])
    return out, lse


@pytest.mark.parametrize("problem", [SMALL, GROUPED], ids=["heads", "grouped"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("tile", [(16, 32), (48, 16), (128, 128)])
def test_tiled_forward_counts_what_the_algorithm_moves(problem, mask, tile):
    memory = Memory()
    out, _ = flash_forward(problem, tile, mask, memory)
    q, k, v, group = arrays(problem)
    k, v = (np.repeat(x, group, 1) for x in (k, v))
    head = naive.Heads(Features(), q, k, v, None, None, problem.head_dim**-0.5)
    expected, _ = naive.attention(head, visible=visible(mask, problem))
    np.testing.assert_allclose(out, expected, atol=1e-5)  # it is attention that was counted
    traffic = io.tiled_forward(problem, tile, mask=mask)
    assert (traffic.read, traffic.written) == (memory.read, memory.written)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("tile", [(16, 32), (128, 128)])
def test_tiled_backward_counts_what_the_algorithm_moves(mask, tile):
    problem = SMALL
    q, k, v, _ = arrays(problem)
    scale = problem.head_dim**-0.5
    out, lse = flash_forward(problem, tile, mask, Memory())
    dout = np.random.default_rng(1).standard_normal(out.shape, dtype=np.float32)
    seen = visible(mask, problem)
    memory = Memory()
    delta = np.zeros_like(lse)
    memory.store(delta, (memory.load(dout) * memory.load(out)).sum(-1))
    sums = np.empty(q.shape, np.float32)
    memory.store(sums, 0)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    for b, h in np.ndindex(q.shape[:2]):
        for j in range(0, problem.seqlen_k, tile[1]):
            columns = slice(j, j + tile[1])
            key, value = memory.load(k[b, h, columns]), memory.load(v[b, h, columns])
            mine_k, mine_v = np.zeros_like(key), np.zeros_like(value)
            for i in range(0, problem.seqlen_q, tile[0]):
                rows = slice(i, i + tile[0])
                if not seen[rows, columns].any():
                    continue
                query, grad = memory.load(q[b, h, rows]), memory.load(dout[b, h, rows])
                base = memory.load(lse[b, h, rows])
                s = np.where(seen[rows, columns], query @ key.T * scale, -np.inf)
                p = np.exp(s - np.where(np.isfinite(base), base, 0)[:, None])
                mine_v += p.T @ grad
                ds = p * (grad @ value.T - memory.load(delta[b, h, rows])[:, None]) * scale
                mine_k += ds.T @ query
                memory.store(sums[b, h, rows], memory.load(sums[b, h, rows]) + ds @ key)
            memory.store(dk[b, h, columns], mine_k)
            memory.store(dv[b, h, columns], mine_v)
    memory.store(dq, memory.load(sums))
    traffic = io.tiled_backward(problem, tile, mask=mask)
    assert (traffic.read, traffic.written) == (memory.read, memory.written)
    # It is attention's gradient that was counted.
    given = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (dout, q, k, v, out)]
    for mine, library in zip((dq, dk, dv), fs.mha_bwd(*given, lse, mask=mask or fs.Dense())):
        np.testing.assert_allclose(mine, library.swapaxes(1, 2), atol=1e-4)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_standard_counts_what_pytorch_moves(masked, dropout):
    """Every operation that PyTorch runs, with the bytes of its tensors."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        read = written = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            if name in ("bmm", "mul", "masked_fill", "_softmax", "native_dropout") or name in (
                "_softmax_backward_data",
                "native_dropout_backward",
            ):
                tensors = [a for a in args if isinstance(a, torch.Tensor) and a.dim()]
                given = result if isinstance(result, tuple) else (result,)
                # An expanded mask has the bytes of what is stored.
                self.read += sum(t.numel() * t.element_size() for t in tensors)
                self.written += sum(t.numel() * t.element_size() for t in given)
            return result

    shape = (SMALL.batch, SMALL.num_heads)
    q = torch.randn(*shape, SMALL.seqlen_q, SMALL.head_dim, requires_grad=True)
    k, v = (
        torch.randn(*shape, SMALL.seqlen_k, SMALL.head_dim, requires_grad=True) for _ in range(2)
    )
    hidden = torch.ones(SMALL.seqlen_q, SMALL.seqlen_k, dtype=torch.bool).triu(1)
    forward, backward = Counter(), Counter()
    with forward:
        p = q @ k.mT * SMALL.head_dim**-0.5
        if masked:
            p = p.masked_fill(hidden, -torch.inf)
        p = p.softmax(-1)
        if dropout:
            p, _ = torch.native_dropout(p, 0.1, True)
        out = p @ v
    dout = torch.randn_like(out)
    with backward:
        torch.autograd.grad(out, (q, k, v), dout)
    options = {"mask": masked, "dropout": dropout}
    for counter, traffic in (
        (forward, io.standard_forward(SMALL, **options)),
        (backward, io.standard_backward(SMALL, **options)),
    ):
        assert (traffic.read, traffic.written) == (counter.read, counter.written)


def test_a_layout_reads_its_blocks_alone():
    problem = io.Problem(1, 1024, 1024, num_heads=2, head_dim=64)
    layout = layouts.butterfly(1024, 1024, 128)
    share = layout.to_dense(block_level=True).mean()
    dense, sparse = (io.tiled_forward(problem, (128, 128), mask=m) for m in (None, layout))
    assert sparse.steps[1].read == round(dense.steps[1].read * share)
    with pytest.raises(fs.Error, match="block_size"):
        io.tiled_forward(problem, (64, 128), mask=layout)


def test_cache():
    """Keys come once while the heads in flight fit, and more often where they do not."""
    problem = io.Problem(4, 4096, 4096, num_heads=8, head_dim=64)
    asked = io.tiled_forward(problem, (128, 128)).steps[1].read
    once = problem.k + problem.v
    assert asked == 32 * once
    roomy, none = io.Cache(50 << 20, 132), io.Cache(0, 8)
    assert io.tiled_forward(problem, (128, 128), cache=roomy).steps[1].read == once
    assert io.tiled_forward(problem, (128, 128), cache=none).steps[1].read == 4 * once
    cached = io.tiled_backward(problem, (128, 128), cache=roomy)
    assert cached.total < io.tiled_backward(problem, (128, 128)).total


def test_what_is_refused():
    with pytest.raises(fs.Error, match="num_heads_kv"):
        io.Problem(1, 8, 8, num_heads=4, num_heads_kv=3, head_dim=8)
    with pytest.raises(fs.Error, match="num_heads_kv") as caught:
        io.standard_forward(GROUPED)
    assert caught.value.code == "unsupported"
    with pytest.raises(fs.Error, match="seqlen_q"):
        io.Problem(1, 0, 8, num_heads=4, head_dim=8)
    for name in ("num_heads_kv", "head_dim_v"):
        with pytest.raises(fs.Error, match=rf"^{name}: 0; "):
            io.Problem(1, 8, 8, num_heads=4, head_dim=8, **{name: 0})
    for tile in (128, (128,), (128, 128, 128), (0, 128)):
        with pytest.raises(fs.Error, match=r"^tile: "):
            io.tiled_forward(SMALL, tile)
    with pytest.raises(fs.Error, match="on_chip"):
        io.paper_tile(100, 64)
    for tile in (128, (128,)):
        with pytest.raises(fs.Error, match=r"^tile: .*; \(queries, keys\), two integers"):
            io.tiled_forward(io.Problem(1, 8, 8, num_heads=4, head_dim=8), tile)
    with pytest.raises(fs.Error, match=r"^cache: 1024; "):
        io.tiled_forward(io.Problem(1, 8, 8, num_heads=4, head_dim=8), (8, 8), cache=1024)
    assert io.paper_tile(192 << 10, 64) == (64, 384)


def test_page(capsys):
    """docs/io.md: its example runs, and prints what the page shows."""
    page = (ROOT / "docs" / "io.md").read_text("utf-8")
    code, shown = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", page, re.DOTALL).groups()
    exec(code, {})
    assert capsys.readouterr().out == shown
