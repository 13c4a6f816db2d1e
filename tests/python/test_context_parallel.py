"""flashsdk.torch.distributed: processes that share a sequence compute what one does of it."""

import importlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
from flashsdk.torch import attention  # noqa: E402
from processes import TIMEOUT, spawn  # noqa: E402
from standard_attention import assert_close, gradients, standard  # noqa: E402

dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="no gloo"
)

from flashsdk.torch.distributed import (  # noqa: E402
    context_parallel,
    positions,
    shard_sequence,
    unshard_sequence,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "context_parallel.md"
PROCESSES, SEQLEN = 4, 48
CAUSAL = fs.Causal()


def problem(dtype=torch.float32, *, spread=1.0):
    """q, k, v of grouped heads and another head_dim of values, and weights of out and lse.

    Their heads lie apart in memory, as those of a joint projection do.
    """
    torch.manual_seed(0)
    shapes = ((4, 16), (2, 16), (2, 24), (4, 24))
    q, *rest = (torch.randn(2, SEQLEN, n, 2 * d)[..., :d].to(dtype) for n, d in shapes)
    return [q * spread, *rest], torch.randn(2, 4, SEQLEN)


def check(mesh, dtype, mask, *, spread=1.0, **options):
    """out, lse and all gradients of the parts, put together, against those of the whole."""
    (*inputs, weight), of_lse = problem(dtype, spread=spread)
    visible = None if mask is None else torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    exact, plain = (
        gradients(
            lambda *x: standard(*x, visible=visible, **options),
            [x.to(t) for x in inputs],
            [weight.to(t), of_lse.to(t)],
        )
        for t in (torch.float64, dtype)
    )
    got = parallel(mesh, (*inputs, weight), of_lse, mask=mask, **options)
    assert_close(got, plain, exact)


def parallel(mesh, tensors, of_lse, **options):
    *parts, weight = (shard_sequence(x, mesh) for x in tensors)
    results = gradients(
        lambda *x: context_parallel(*x, mesh, return_lse=True, **options),
        parts,
        [weight, shard_sequence(of_lse, mesh, dim=2)],
    )
    return [unshard_sequence(x, mesh, dim=1 if x.dim() == 4 else 2) for x in results]


def check_results(mesh):
    for dtype in (torch.float32, torch.bfloat16):
        for mask in (CAUSAL, None):
            check(mesh, dtype, mask)
    check(mesh, torch.float32, fs.Causal("top_left"), softcap=2.0, softmax_scale=0.4)
    # Rows whose lse a backward does not trust, in some of the parts and in all.
    for dtype, spread in ((torch.float32, 30.0), (torch.bfloat16, 1000.0)):
        assert_beyond(dtype, spread)
        for mask in (CAUSAL, None):
            check(mesh, dtype, mask, spread=spread)


def assert_beyond(dtype, spread):
    (q, k, v, _), _ = problem(dtype, spread=spread)
    lse = attention(q, k, v, return_lse=True)[1]
    assert lse.abs().max() > (32 if dtype is torch.float32 else 1024)


def check_more(mesh):
    (*inputs, weight), of_lse = problem()
    tensors = (*inputs, weight)

    # The same bits again.
    first, second = (
        parallel(mesh, tensors, of_lse, mask=CAUSAL, deterministic=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))

    # out alone, lse alone; without gradients the same out.
    parts = [shard_sequence(x, mesh).requires_grad_() for x in inputs]
    out, lse = context_parallel(*parts, mesh, mask=CAUSAL, return_lse=True)
    alone = [torch.autograd.grad(x.sum(), parts, retain_graph=True) for x in (out, lse)]
    both = torch.autograd.grad(out.sum() + lse.sum(), parts)
    for one, other, total in zip(*alone, both, strict=True):
        torch.testing.assert_close(one + other, total)
    with torch.no_grad():
        assert torch.equal(context_parallel(*parts, mesh, mask=CAUSAL), out)
    out = context_parallel(*parts, mesh)
    with pytest.raises(fs.Error, match=r"^create_graph: True; False, as attention has no second"):
        torch.autograd.grad(out.sum(), parts, create_graph=True)

    # Queries of another number than keys: of each process its own, in any order.
    for rows in (0, 1, 5):
        few = [parts[0][:, :rows], *parts[1:]]
        whole = [torch.cat(gathered(x, mesh), 1) for x in few]
        got = torch.cat(gathered(context_parallel(*few, mesh), mesh), 1)
        torch.testing.assert_close(got, attention(*whole))
    none = [x[:, :0] for x in parts]
    assert context_parallel(*none, mesh, mask=CAUSAL).shape == (2, 0, 4, 24)
    assert not context_parallel(parts[0], *none[1:], mesh).any()

    with torch.autocast("cpu", torch.bfloat16):
        out = context_parallel(*parts, mesh)
    assert torch.equal(out, context_parallel(*(x.bfloat16() for x in parts), mesh))


def gathered(x, mesh):
    parts = [torch.empty(x.shape) for _ in range(mesh.size())]
    dist.all_gather(parts, x.detach().contiguous(), group=mesh.get_group())
    return parts


def check_work(mesh):
    """A causal mask: as many pairs of query and key for all, and none that nobody sees."""
    from flashsdk.torch import _ring

    calls, original = [], _ring._mha

    def attend(q, k, v, lengths, keywords):
        calls.append((q.shape[1], k.shape[1], keywords["mask"]))
        return original.attend(q, k, v, lengths, keywords)

    n, mine = mesh.size(), SEQLEN // mesh.size()
    parts = [shard_sequence(x, mesh) for x in problem()[0][:3]]
    _ring._mha = types.SimpleNamespace(attend=attend)
    try:
        context_parallel(*parts, mesh, mask=CAUSAL)
    finally:
        _ring._mha = original
    early, late, *others = calls
    assert early == (mine // 2, mine // 2, CAUSAL) and late == (mine // 2, mine, CAUSAL)
    assert len(others) == n - 1
    assert all(q * k == mine * mine // 2 and mask is None for q, k, mask in others)


def check_order(mesh):
    rank, n = mesh.get_local_rank(), mesh.size()
    where, size = positions(SEQLEN, mesh), SEQLEN // (2 * n)
    late = SEQLEN - (rank + 1) * size
    assert where.tolist() == [*range(rank * size, (rank + 1) * size), *range(late, late + size)]
    x = torch.arange(3 * SEQLEN).reshape(3, SEQLEN)
    assert torch.equal(shard_sequence(x, mesh), x[:, where])
    for dim, whole in ((1, x), (-1, x), (0, x.mT)):
        assert torch.equal(
            unshard_sequence(shard_sequence(whole, mesh, dim=dim), mesh, dim=dim), whole
        )


def refused(line, *args, **options):
    with pytest.raises(fs.Error, match=f"^{re.escape(line)}$"):
        context_parallel(*args, **options)


def check_errors(mesh):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank, n = mesh.get_local_rank(), mesh.size()
    q, k, v = (shard_sequence(x, mesh) for x in problem()[0][:3])
    mine = SEQLEN // n

    # What differs on the last rank is the same line on all.
    last, given = rank == n - 1, (2, mine, 2, 16)
    shorter = k[:, 1:] if last else k
    line = f"k: shape {(2, mine - 1, 2, 16)} of torch.float32 on rank {n - 1}; "
    refused(line + f"shape {given} of torch.float32, as on rank 0", q, shorter, v, mesh)
    other = v.bfloat16() if last else v
    line = f"v: shape {(2, mine, 2, 24)} of torch.bfloat16 on rank {n - 1}; "
    line += f"shape {(2, mine, 2, 24)} of torch.float32, as on rank 0"
    refused(line, q, k, other, mesh)
    line = f"mask: None on rank {n - 1}; Causal(), as on rank 0"
    refused(line, q, k, v, mesh, mask=None if last else CAUSAL)
    line = f"requires_grad: True on rank {n - 1}; False, as on rank 0"
    refused(line, q.clone().requires_grad_(last), k, v, mesh)

    # What does not fit together is refused before anything is sent.
    line = f"k: {mine} keys and {mine - 1} queries here; as many, an even number, as mask is causal"
    refused(line, q[:, 1:], k, v, mesh, mask=CAUSAL)
    odd = [x[:, 1:] for x in (q, k, v)]
    line = f"k: {mine - 1} keys and {mine - 1} queries here; "
    line += "as many, an even number, as mask is causal"
    refused(line, *odd, mesh, mask=CAUSAL)
    with pytest.raises(fs.Error, match=r"^q: dtype float64; "):
        context_parallel(q.double(), k.double(), v.double(), mesh)
    with pytest.raises(fs.Error, match=f"^seqlen: 47; a multiple of {2 * n}, "):
        shard_sequence(torch.zeros(2, 47), mesh)
    with pytest.raises(fs.Error, match=r"^x: a tensor that requires a gradient; x\.detach\(\)"):
        unshard_sequence(q.clone().requires_grad_(), mesh)
    for function in (shard_sequence, unshard_sequence):
        for dim, given in ((2, "2"), (-3, "-3"), ("a", "'a'"), (True, "True")):
            with pytest.raises(fs.Error, match=f"^dim: {given}; an integer >= -2, at most 1$"):
                function(torch.zeros(8, 8), mesh, dim=dim)
        with pytest.raises(fs.Error, match=r"^x: shape \(\); one dimension or more$"):
            function(torch.zeros(()), mesh)
    for given in ("x", -8, 8.0):
        with pytest.raises(fs.Error, match=f"^seqlen: {given!r}; an integer >= 0$"):
            positions(given, mesh)

    over = "over a sharded sequence"
    refused(f"bias: a tensor; None, {over}", q, k, v, mesh, bias=torch.zeros(1, 1, 1, 1))
    refused(f"alibi_slopes: a tensor; None, {over}", q, k, v, mesh, alibi_slopes=torch.zeros(4))
    refused(f"sink: a tensor; None, {over}", q, k, v, mesh, sink=torch.zeros(4))
    refused(f"dropout_p: 0.1; 0, {over}", q, k, v, mesh, dropout_p=0.1)
    window = fs.SlidingWindow(3, 0)
    refused(f"mask: {window!r}; Causal() or None, {over}", q, k, v, mesh, mask=window)
    seen = torch.ones(2, 2, dtype=torch.bool)
    refused(f"mask: a tensor; Causal() or None, {over}", q, k, v, mesh, mask=seen)

    placed = DTensor.from_local(q, mesh, [Shard(1)], run_check=False)
    line = "k: dtype float8_e4m3fn; the dtype of q, as parts come without descales"
    refused(line, q.half(), *(x.to(torch.float8_e4m3fn) for x in (k, v)), mesh)
    refused("q: a DTensor; the part that is here, q.to_local()", placed, k, v, mesh)
    refused("mesh: 'sequence'; a DeviceMesh, a process group or None", q, k, v, "sequence")
    two = init_device_mesh("cpu", (1, PROCESSES), mesh_dim_names=("batch", "sequence"))
    refused("mesh: a DeviceMesh of 2 dimensions; of one, as mesh[name] is", q, k, v, two)
    assert torch.equal(context_parallel(q, k, v, two["sequence"]), context_parallel(q, k, v, mesh))
    assert torch.equal(context_parallel(q, k, v), context_parallel(q, k, v, mesh))


def check_refused_alone(mesh):
    """Of what one rank is refused for, it says why, and the others say that it was."""
    from flashsdk.torch import distributed
    from torch.distributed.tensor import DTensor, Shard

    rank, n = mesh.get_local_rank(), mesh.size()
    last = rank == n - 1
    q, k, v = (shard_sequence(x, mesh) for x in problem()[0][:3])

    def alone(line, *args, **options):
        if not last:
            args, options = (), {}
            line = f"mesh: rank {n - 1} was refused; its own message says why"
        refused(line, *(args or (q, k, v)), mesh, **options)

    seen = torch.ones(2, 2, dtype=torch.bool)
    over = "over a sharded sequence"
    placed = DTensor.from_local(q, mesh, [Shard(1)], run_check=False)
    alone(f"q: shape {tuple(q[0].shape)}; (batch, seqlen_q, num_heads, head_dim)", q[0], k, v)
    alone("q: None; a tensor", None, None, None)
    alone("q: a DTensor; the part that is here, q.to_local()", placed, k, v)
    alone(f"dropout_p: 0.1; 0, {over}", dropout_p=0.1)
    alone(f"mask: a tensor; Causal() or None, {over}", mask=seen)
    alone("return_lse: 'no'; True or False", return_lse="no")
    alone("softcap: 'no'; a number that float32 can hold", softcap="no")
    huge = 10**400
    alone(f"softmax_scale: {str(huge)[:79]}…; a number that float32 can hold", softmax_scale=huge)
    alone('backend: 3; "cpu", "sm80", "sm90" or None', backend=3)

    # The kernel of one alone refuses what is the same on all; explain raises, or has none.
    original = distributed.ops
    for given, line in (
        (fs.Unsupported("q: this one; another"), "q: this one; another"),
        (
            fs.Explanation("", [("a", "no bias"), ("b", "no bias"), ("c", "small")]),
            "mha_bwd: no kernel for these arguments; "
            "what flashsdk.kernels() lists (b: no bias; c: small)",
        ),
    ):

        def explain(*args, op, given=given, **keywords):
            if op == "fwd":
                return original.explain(*args, op=op, **keywords)
            if isinstance(given, fs.Error):
                raise given
            return given

        if last:
            distributed.ops = types.SimpleNamespace(explain=explain)
        try:
            trained = (q.clone().requires_grad_(), k, v)
            assert context_parallel(q, k, v, mesh).shape == (*q.shape[:3], v.shape[-1])
            if not last:
                line = f"mesh: rank {n - 1} was refused; its own message says why"
            refused(line, *trained, mesh)
        finally:
            distributed.ops = original

    # What is allowed everywhere, but not the same.
    for name, here, there, said in (
        ("softmax_scale", 0.5, None, "0.5 on rank {}; None"),
        ("softmax_scale", 0.1, 0.1 + 2e-17, "0.1 on rank {}; 0.10000000000000002"),
        ("softcap", 2, 0.0, "2.0 on rank {}; 0.0"),
        ("deterministic", True, None, "True on rank {}; False"),
        ("backend", "cpu", None, "'cpu' on rank {}; None"),
    ):
        line = f"{name}: {said.format(n - 1)}, as on rank 0"
        refused(line, q, k, v, mesh, **{name: here if last else there})
    context_parallel(q, k, v, mesh)  # and all can go on
    assert not len(distributed._compared)  # which calls on a CPU have no use for


def check_compiled(group):
    """Of one process: a graph before the call and one behind it."""
    (q, k, v, _), _ = problem()

    def function(q, k, v):
        return context_parallel(q + 1, k, v, group, mask=CAUSAL) * 2

    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    want = attention(q + 1, k, v, mask=CAUSAL) * 2
    assert torch.equal(torch.compile(function, backend=backend)(q, k, v), want)
    assert len(graphs) == 2
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"torch\.compiler\.disable"):
        torch.compile(function, backend=backend, fullgraph=True)(q, k, v)


def run_page():
    """docs/context_parallel.md, as every process runs it; it makes the process group."""
    if not PAGE.exists():  # not a checkout
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    program = program.replace("init_process_group()", "init_process_group(timeout=TIMEOUT)")
    names: dict = {"TIMEOUT": TIMEOUT}
    exec(compile(program, PAGE.name, "exec"), names)
    assert "(timeout=TIMEOUT)" in program
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1024, n, 64) for n in (8, 2, 2))
    torch.testing.assert_close(names["whole"], attention(q, k, v, mask=CAUSAL))
    assert names["q"].grad.shape == names["out"].shape == (1, 1024 // PROCESSES, 8, 64)


def work(rank):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    run_page()
    from torch.distributed.device_mesh import DeviceMesh

    for size in (1, 2, PROCESSES):
        group = dist.new_group(list(range(size)), timeout=TIMEOUT)
        if rank < size:
            mesh = DeviceMesh.from_group(group, "cpu")
            check_results(mesh)
            check_order(mesh)
        else:
            refused(
                "mesh: a group without this process; one that it is in",
                *problem()[0][:3],
                group,
            )
        if size == 1 and rank == 0:
            check_compiled(group)
    check_more(mesh)
    check_work(mesh)
    check_errors(mesh)
    check_refused_alone(mesh)
    dist.destroy_process_group()


def test_one_two_and_four_processes():
    spawn(work, PROCESSES)


def test_without_a_process_group():
    q = torch.zeros(1, 2, 1, 8)
    line = "mesh: no process group; one, after torch.distributed.init_process_group()"
    refused(line, q, q, q)
    for call in (lambda: shard_sequence(q), lambda: unshard_sequence(q), lambda: positions(4)):
        with pytest.raises(fs.Error, match=f"^{re.escape(line)}$"):
            call()


def test_the_benchmark_runs(tmp_path, monkeypatch):
    """Its record, and what the page makes of it and of none."""
    program = ROOT / "benchmarks" / "context_parallel.py"
    if not program.exists():
        pytest.skip("not a checkout")
    path = tmp_path / "record.json"
    command = [sys.executable, str(program), "--smoke", "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert len(record["rows"]) == 6 and len(record["beside_one"]) == 8
    assert max(row["difference"] for row in record["beside_one"]) < 0.02
    for row in record["beside_float64"]:
        assert row["two"] < 2 * row["one"] + 2e-3
    monkeypatch.syspath_prepend(str(program.parent))
    tables = importlib.import_module("context_parallel_tables")
    text = tables.text([record])
    assert len(re.findall(r"^\| 16 \|.* ×", text, re.MULTILINE)) == 2
    assert tables.text([]) == "It has not been run on two GPUs yet."
