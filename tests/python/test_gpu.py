"""What a GPU adds: streams, graphs, devices, and the arrays of frameworks that live there.

What attention computes there is tested by all tests with the fixture ``runner``, and which kernels
compute it by test_gpu_kernels.py.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

import flashsdk as fs
import pytest
from gpu_cases import BF16, assert_same, both, qkv

torch = pytest.importorskip("torch")

SLEEP = 200_000_000  # cycles: some 100 ms, while every call here takes far less than one


@pytest.fixture
def two_gpus(backend) -> str:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return backend


def outputs(x):
    q, k, v, dout = x
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, dtype=torch.float32)
    return {"out": torch.full_like(dout, torch.nan), "lse": lse}, {
        f"d{name}": torch.full_like(t, torch.nan) for name, t in zip("qkv", (q, k, v))
    }


def looked_on():
    """By a mode, so that calls go through operators. Not by PyTorch's profiler: 2.11's may abort a
    process of several GPUs as it ends, even where it looks at the CPU alone.
    """
    from torch_cases import Watching

    return Watching()


# dq is summed in the order in which thread blocks arrive, unless a call asks for its own.
FIXED = {"deterministic": True}


def test_kernels_are_listed_as_available(backend):
    assert all(k["available"] for k in fs.kernels() if k["backend"] in ("cpu", backend))


# ---- streams


def test_calls_return_before_the_gpu_is_done(backend):
    """Forward and backward, and nothing that they allocate through torch, wait for the device."""
    x = qkv()
    want = both(x, backend=backend, **FIXED)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    got = both(x, backend=backend, **FIXED)
    assert not torch.cuda.current_stream().query()
    assert_same(got, want)


def test_work_goes_to_the_current_stream(backend):
    """Inputs that are still being written on it are waited for, other streams are not."""
    x = qkv()
    want = both(x, backend=backend, **FIXED)
    late = [torch.full_like(t, torch.nan) for t in x]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)  # on the default stream
    busy = torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for a, b in zip(late, x):
            a.copy_(b)
        got = both(late, backend=backend, **FIXED)
    stream.synchronize()
    assert not busy.query()
    assert_same(got, want)


def test_a_stream_that_is_given(backend):
    x = qkv()
    want = both(x, backend=backend, **FIXED)
    (out, lse), grads = outputs(x)[0].values(), outputs(x)[1]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    busy = torch.cuda.current_stream()
    keywords = {"backend": backend, "stream": stream.cuda_stream, **FIXED}
    fs.mha_fwd(*x[:3], out=out, lse=lse, **keywords)
    fs.mha_bwd(x[3], *x[:3], out, lse, **grads, **keywords)
    stream.synchronize()
    assert not busy.query()
    assert_same((out, lse, *grads.values()), want)


GRAPH = """
import sys
import torch
import flashsdk as fs

backend, dropout, block = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
q, k, v, dout = (torch.randn(2, 256, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
mask = fs.Causal() if not block else fs.layouts.bigbird(256, 256, block)
options = {"mask": mask, "backend": backend, "deterministic": True, "dropout_p": dropout, "seed": 3}
if block:  # a layout goes to the GPU on its first call
    fs.explain(q, k, v, mask=mask)

def step():
    out, lse = fs.mha_fwd(q, k, v, **options)
    return out, lse, *fs.mha_bwd(dout, q, k, v, out, lse, **options)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # the first calls of the process: kernels are loaded inside
    captured = step()
for scale in (1, 0.5):
    for x in (q, k, v, dout):
        x.copy_(torch.randn_like(x) * scale)
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)
print("same")
"""


@pytest.mark.parametrize("dropout, block", [(0, 0), (0.2, 0), (0, 128)])
def test_graphs(backend, dropout, block):
    """First calls of a process are captured, and replayed on other data."""
    arguments = [sys.executable, "-c", GRAPH, backend, str(dropout), str(block)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.stdout == "same\n", done.stderr


def test_memory_of_the_device_is_left_alone(backend):
    """Into given outputs a forward takes nothing, not even from torch."""
    x = qkv()
    given = outputs(x)[0]
    fs.mha_fwd(*x[:3], backend=backend, **given)
    torch.cuda.synchronize()
    free, allocations = torch.cuda.mem_get_info()[0], torch.cuda.memory_stats()["num_alloc_retries"]
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(100):
        fs.mha_fwd(*x[:3], backend=backend, **given)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.cuda.memory_stats()["num_alloc_retries"] == allocations


def test_extra_memory_is_linear(backend):
    """At 32K one head's S would be 2 GiB; dq in float32, lse and delta are 8.3 MiB a head."""
    seqlen, heads = 32768, 4
    x = qkv(seqlen, heads, batch=1)
    forward, grads = outputs(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fs.mha_fwd(*x[:3], mask=fs.Causal(), backend=backend, **forward)
    assert torch.cuda.max_memory_allocated() <= before + 4096
    out, lse = forward.values()
    fs.mha_bwd(x[3], *x[:3], out, lse, mask=fs.Causal(), backend=backend, **grads)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= heads * seqlen * (64 * 4 + 2 * 4) * 1.02 + (1 << 20)


# ---- bits


@pytest.mark.parametrize("mask", [None, fs.Causal(), "blocks"], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_bits_repeat(backend, dim, mask):
    """The forward always, the backward where it is asked to."""
    mask = fs.layouts.bigbird(1100, 1100, 128) if mask == "blocks" else mask
    x = qkv(1100, 6, dim)
    if max(k["head_dim"] for k in fs.kernels() if k["backend"] == backend) < dim:
        pytest.skip("head_dim is not in this build")
    want = both(x, mask=mask, backend=backend, **FIXED)
    for _ in range(5):
        assert_same(both(x, mask=mask, backend=backend, **FIXED), want)
        assert_same(both(x, mask=mask, backend=backend)[:2], want[:2])


@pytest.mark.parametrize("seqlen", [64, 500])
def test_dropout_drops_what_the_cpu_drops(backend, seqlen):
    """With q = 0 all keys weigh the same; v, one of the last a column, shows which were kept."""
    q, v = torch.zeros(1, seqlen, 3, 64), torch.zeros(1, seqlen, 1, 64)
    v[0, -64:, 0] = torch.eye(64)
    k = torch.ones(1, seqlen, 1, 64)
    x = [t.to(BF16) for t in (q, k, v)]
    for seed, offset, p in ((1, 0, 0.3), (2**63 + 7, 2**40 + 1, 0.9)):
        options = {"dropout_p": p, "seed": seed, "offset": offset}
        cpu, _ = fs.mha_fwd(*x, **options)
        gpu, _ = fs.mha_fwd(*(t.cuda() for t in x), backend=backend, **options)
        assert 0.5 * p < (cpu == 0).float().mean() < min(1, 1.5 * p)
        assert torch.equal(gpu.cpu() == 0, cpu == 0)


# ---- sizes


def test_strides_beyond_two_to_the_31(backend):
    """Rows, heads and batches 2^31 elements and more apart."""
    step = 2**31 + 64
    x = qkv(dim=64, seqlen=3, heads=1, batch=1)
    want = both(x, backend=backend, **FIXED)
    size = 2 * (2 * step + 64)
    if torch.cuda.mem_get_info()[0] < size + (1 << 30):
        pytest.skip("too little memory")
    buffer = torch.empty(size // 2, device="cuda", dtype=BF16)
    for i in range(4):
        far = torch.as_strided(buffer, x[i].shape, (3 * step, step, 64, 1))
        far.copy_(x[i])
        assert_same(both([far if j == i else t for j, t in enumerate(x)], backend=backend), want)
    forward, grads = outputs(x)
    for name in ("out", "dq", "dk", "dv"):
        far = torch.as_strided(buffer, x[0].shape, (3 * step, step, 64, 1))
        given = {**forward, **grads, name: far.fill_(torch.nan)}
        fs.mha_fwd(*x[:3], out=given["out"], lse=given["lse"], backend=backend, **FIXED)
        few = {n: given[n] for n in ("dq", "dk", "dv")}
        fs.mha_bwd(x[3], *x[:3], given["out"], given["lse"], backend=backend, **few, **FIXED)
        assert_same(given.values(), want)


def test_tensors_above_two_to_the_31_elements(backend):
    """The last heads of a window of 64 over 262144 tokens, forward and backward."""
    seqlen, heads, dim = 2**18, 132, 64
    torch.cuda.empty_cache()  # of the other backend's turn
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    q, k, v, dout = (torch.empty(1, seqlen, heads, dim, device="cuda", dtype=BF16) for _ in "qkvd")
    assert q.numel() > 2**31
    for t in (q, k, v, dout):
        t.normal_()
    options = {"mask": fs.SlidingWindow(63, 0), "backend": backend, **FIXED}
    out, lse = fs.mha_fwd(q, k, v, **options)
    dq, dk, dv = fs.mha_bwd(dout, q, k, v, out, lse, **options)
    # Rows in the middle of the slice see the same keys, and their keys the same queries.
    last = slice(seqlen - 512, seqlen), slice(heads - 2, heads)
    few = [t[:, last[0], last[1]].contiguous() for t in (q, k, v, dout)]
    want = both(few, **options)
    got = [t[:, last[0], last[1]] for t in (out, dq, dk, dv)]
    inner = slice(128, 512)
    for a, b in zip(got, (want[0], *want[2:]), strict=True):
        error = (a[:, inner].float() - b[:, inner].float()).abs().max()
        assert error < 0.02 * b.float().abs().max()
    assert (lse[:, last[1], last[0]] - want[1])[..., inner].abs().max() < 1e-5


def test_many_sequences_and_heads(backend):
    """More than the 65535 that two of a grid's dimensions hold."""
    for shape in ((70_000, 8, 1, 16), (1, 8, 70_000, 16)):
        x = [torch.randn(shape, device="cuda", dtype=BF16) for _ in range(4)]
        got = both(x, backend=backend, **FIXED)
        last = [t[-1:, :, -1:].contiguous() for t in x]
        want = both(last, backend=backend, **FIXED)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[-1:, -1:] if a.dim() == 3 else a[-1:, :, -1:], b)


# ---- bad input


def test_devices_may_not_be_mixed(backend):
    q, k, v, _ = qkv()
    with pytest.raises(fs.Error, match=r"^k: on cpu; cuda:0, where q is$"):
        fs.mha_fwd(q, k.cpu(), v)
    with pytest.raises(fs.Error, match=r"^k: on cuda:0; cpu, where q is$"):
        fs.mha_fwd(q.cpu(), k, v.cpu())
    with pytest.raises(fs.Error, match=r"^bias: on cpu; cuda:0, where q is$"):
        fs.mha_fwd(q, k, v, bias=torch.zeros(1, 1, 1, 1))
    with pytest.raises(fs.Error, match=r"^backend: cpu; sm80 or sm90, as q is on cuda:0$"):
        fs.mha_fwd(q, k, v, backend="cpu")


def test_float32_is_for_cpus(backend):
    with pytest.raises(fs.Error, match=r"^mha_fwd: no kernel for float32.*on cuda:0; ") as caught:
        fs.mha_fwd(*qkv(dtype=torch.float32)[:3])
    assert caught.value.code == "unsupported"


def test_outputs_are_untouched_by_bad_calls(backend):
    x = qkv()
    given = outputs(x)[0]
    for bad in ({"dropout_p": 1.0}, {"softmax_scale": float("nan")}, {"stream": "x"}):
        with pytest.raises(fs.Error, match=f"^{next(iter(bad))}: "):
            fs.mha_fwd(*x[:3], **given, backend=backend, **bad)
    torch.cuda.synchronize()
    assert all(t.isnan().all() for t in given.values())


def test_a_thread_that_has_not_called_cuda_yet(backend):
    """Nothing of it has given the thread a context, as memory comes out of PyTorch's cache."""
    x = qkv()
    out, grads = outputs(x)
    want = both(x, backend=backend, **FIXED)  # what workspaces need is in the cache now
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream
    raised = []

    def call():
        try:
            common = {"backend": backend, "stream": stream}
            fs.mha_fwd(*x[:3], **out, **common)
            fs.mha_bwd(x[3], *x[:3], *out.values(), **grads, **common, **FIXED)
        except Exception as e:
            raised.append(e)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert not raised
    assert_same((*out.values(), *grads.values()), want)


# ---- two GPUs


def test_another_device_than_the_current_one(two_gpus):
    x = qkv(1100, device="cuda:1")
    mask = fs.layouts.bigbird(1100, 1100, 128)
    for options in ({}, {"mask": mask}):
        got = both(x, backend=two_gpus, **options, **FIXED)
        assert torch.cuda.current_device() == 0
        want = both([t.to("cuda:0") for t in x], backend=two_gpus, **options, **FIXED)
        assert all(t.device.index == 1 for t in got)
        assert_same([t.to("cuda:0") for t in got], want)


def test_a_stream_of_another_device(two_gpus):
    stream = torch.cuda.Stream("cuda:0").cuda_stream
    with pytest.raises(fs.Error, match=r"^stream: on cuda:0; one on cuda:1, where q is$"):
        fs.mha_fwd(*qkv(device="cuda:1")[:3], stream=stream)


def test_arrays_of_jax_over_four_gpus(backend):
    """The program of test_jax.py, in bf16, with the kernels that are chosen there."""
    pytest.importorskip("jax")
    if torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    if backend == "sm80" and any(k["available"] for k in fs.kernels() if k["backend"] == "sm90"):
        pytest.skip("once is enough, with the kernels that are chosen")
    command = [sys.executable, "jax_sharding.py", "gpu"]
    here = Path(__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=here)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["checks"] >= 15 and not result["wrong"], result["wrong"]


# ---- other frameworks


@pytest.fixture
def cupy(backend):
    return pytest.importorskip("cupy")


def test_cupy(backend, cupy):
    """Arrays of CuPy in and out, on its current stream; new ones and given ones."""
    x = qkv(dtype=torch.float16)
    want = both(x, backend=backend, **FIXED)
    q, k, v, dout = (cupy.from_dlpack(t) for t in x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:  # compiles CuPy's kernel for copies, and takes memory
        both((q.copy(), k, v, dout), backend=backend, **FIXED)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    with stream:
        got = both((q.copy(), k, v, dout), backend=backend, **FIXED)
        stream.synchronize()
    assert not torch.cuda.current_stream().query()
    assert all(isinstance(a, cupy.ndarray) for a in got)
    assert_same([torch.from_dlpack(a) for a in got], want)
    out = cupy.full_like(q, cupy.nan)
    result = fs.mha_fwd(q, k, v, out=out, backend=backend)
    assert result[0] is out
    assert torch.equal(torch.from_dlpack(out), want[0])


def test_cupy_layouts(backend, cupy):
    x = qkv(1100, dtype=torch.float16)
    mask = fs.layouts.bigbird(1100, 1100, 128)
    want = both(x, mask=mask, backend=backend, **FIXED)
    got = both([cupy.from_dlpack(t) for t in x], mask=mask, backend=backend, **FIXED)
    assert_same([torch.from_dlpack(a) for a in got], want)


def test_frameworks_may_be_mixed(backend, cupy):
    """CuPy's work on its stream is waited for by torch's."""
    x = qkv(dtype=torch.float16)
    want = both(x, backend=backend, **FIXED)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        k = cupy.zeros(x[1].shape, cupy.float16)
        late = cupy.from_dlpack(x[1])
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(SLEEP)
        k[...] = late
        got = both((x[0], k, x[2], x[3]), backend=backend, **FIXED)
    assert_same(got, want)


JAX = """
import json, sys
import jax, jax.numpy as jnp
import numpy as np
import flashsdk as fs

backend, block = sys.argv[1], int(sys.argv[2])
if jax.default_backend() != "gpu":
    print(json.dumps({"skip": "JAX has no GPU"}))
    sys.exit()
keys = jax.random.split(jax.random.key(0), 4)
x = [jax.random.normal(key, (2, 1100, 2, 64), jnp.bfloat16) for key in keys]
mask = fs.layouts.bigbird(1100, 1100, block) if block else fs.Causal()

def both(q, k, v, dout, **options):
    out, lse = fs.mha_fwd(q, k, v, mask=mask, **options)
    return out, lse, *fs.mha_bwd(dout, q, k, v, out, lse, mask=mask, **options)

want = both(*(np.asarray(a) for a in x))
for _ in range(20):  # JAX's own work is in flight before, and its arrays die after
    got = both(*(a + jnp.zeros_like(a) for a in x), backend=backend)
    assert all(isinstance(a, jax.Array) and a.devices() == x[0].devices() for a in got)
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a * 1).astype(np.float32), b.astype(np.float32)
        assert np.abs(a - b).max() < 0.02 * max(1, np.abs(b).max()), (np.abs(a - b).max(), a.shape)
print(json.dumps({"same": True}))
"""


@pytest.mark.parametrize("block", [0, 128])
def test_jax(backend, block):
    """Arrays of JAX in and out; in a process of its own, as JAX takes most of a GPU's memory."""
    pytest.importorskip("jax")
    import os

    environment = {
        **os.environ, "JAX_PLATFORMS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"
    }  # fmt: skip
    arguments = [sys.executable, "-c", JAX, backend, str(block)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    if "skip" in result:
        pytest.skip(result["skip"])


# ---- flashsdk.torch


@pytest.mark.usefixtures("torch_way")
def test_adapter_agrees_with_sdpa(backend):
    from flashsdk.torch import attention

    x = [t.requires_grad_() for t in qkv(dim=64)[:3]]
    dout = torch.randn_like(x[0])
    out = attention(*x, mask=fs.Causal(), backend=backend)
    grads = torch.autograd.grad(out, x, dout)
    heads_first = [t.detach().double().transpose(1, 2).requires_grad_() for t in x]
    exact = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    exact_grads = torch.autograd.grad(exact, heads_first, dout.double().transpose(1, 2))
    for a, b in zip((out, *grads), (exact, *exact_grads), strict=True):
        b = b.transpose(1, 2)
        assert (a.double() - b).abs().max() < 0.02 * b.abs().max()


def trained(call, tensors, dout):
    """out of a call of flashsdk.torch, and the gradients."""
    inputs = [x.detach().requires_grad_() for x in tensors]
    torch.manual_seed(4)
    out = call(*inputs)
    return out, *torch.autograd.grad(out, inputs, dout)


def test_compiled_training_asks_nothing_of_python(backend, monkeypatch):
    from flashsdk import _torch_eager, _torch_ops
    from flashsdk.torch import attention

    if _torch_eager.native is _torch_eager.InPython:
        pytest.skip("flashsdk._torch_native is not built for this PyTorch")
    *x, dout = qkv(dim=64)

    def call(q, k, v):
        return attention(q, k, v, mask=fs.Causal(), backend=backend, **FIXED)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    want, _ = trained(call, x, dout), trained(compiled, x, dout)
    asked = []
    monkeypatch.setattr(_torch_ops, "recorded", lambda tensors: asked.append(1) or True)
    for a, b in zip(trained(compiled, x, dout), want, strict=True):
        assert torch.equal(a, b)
    assert not asked


def test_both_ways_of_the_adapter_are_the_same(backend, monkeypatch):
    """Also with few queries of many keys, whose parts a workspace holds."""
    from flashsdk import _torch_eager
    from flashsdk import torch as adapter
    from flashsdk.torch import _attention

    def attend(**options):
        return lambda *x: adapter.attention(*x, backend=backend, **options, **FIXED)

    *x, dout = qkv()
    few = [x[0][:, :1].contiguous(), *(t.repeat(1, 30, 1, 1) for t in x[1:])]
    bias = torch.randn(1, 2, 150, 152, device="cuda")
    if backend == "sm90":  # which takes none but q's type, by rows of 16-byte multiples
        bias = bias.to(BF16)
    problems = [
        (attend(mask=fs.Causal()), x, dout),
        (attend(dropout_p=0.3, softcap=5.0), x, dout),
        (attend(bias=bias[..., :150]), x, dout),
        (attend(), few, dout[:, :1]),
    ]
    native = [trained(*problem) for problem in problems]
    monkeypatch.setattr(_attention, "native", _torch_eager.InPython)
    for problem, got in zip(problems, native, strict=True):
        assert_same(got, trained(*problem))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("contiguous", [True, False])
def test_both_ways_of_heads_first_are_the_same(monkeypatch, contiguous):
    from flashsdk import _torch_eager
    from flashsdk import torch as adapter
    from flashsdk.torch import _sdpa

    x = [t.transpose(1, 2) for t in qkv()]
    *x, dout = [t.contiguous() for t in x] if contiguous else x

    def call(*x):
        return adapter.scaled_dot_product_attention(*x, is_causal=True)

    torch.use_deterministic_algorithms(True)
    try:
        native = trained(call, x, dout)
        monkeypatch.setattr(_sdpa, "native", _torch_eager.InPython)
        assert_same(native, trained(call, x, dout))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("torch_way")
def test_adapter_works_on_the_current_stream(backend):
    """The backward too, which autograd runs on the stream of the forward in a thread of its own."""
    from flashsdk.torch import attention

    def call(*x):
        return attention(*x, backend=backend, **FIXED)

    *x, dout = qkv()
    want = trained(call, x, dout)
    late = [torch.full_like(t, torch.nan) for t in (*x, dout)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)  # on the default stream
    busy = torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for a, b in zip(late, (*x, dout), strict=True):
            a.copy_(b)
        got = trained(call, late[:3], late[3])
    stream.synchronize()
    assert not busy.query()
    assert_same(got, want)


def test_adapter_passes_opcheck(backend):
    from flashsdk._torch_ops import encode_mask

    x = [t.requires_grad_() for t in qkv(seqlen=40, dim=32)[:3]]
    none, seed, (causal, _) = None, torch.tensor([5]), encode_mask(fs.Causal())
    for options in (
        (none, none, none, none, [], none, 0.0, 0.0, True, backend),
        (none, none, seed, none, causal, 0.3, 0.0, 0.25, True, backend),
    ):
        torch.library.opcheck(torch.ops.flashsdk.mha_fwd.default, (*x, *options))


def test_adapter_compiles_without_a_graph_break(backend):
    from flashsdk.torch import attention

    def layer(q, k, v):
        return attention(q * 1.5, k, v, mask=fs.Causal(), backend=backend).sin()

    x = [t.requires_grad_() for t in qkv()[:3]]
    want = layer(*x)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*x)
    assert torch.equal(got, want)
    dout = torch.randn_like(want)
    want, got = (torch.autograd.grad(y, x, dout) for y in (want, got))
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 2**-6 * b.abs().max()


@pytest.mark.usefixtures("torch_way")
def test_adapter_follows_autocast(backend):
    from flashsdk.torch import attention

    x = qkv(dtype=torch.float32)[:3]
    with torch.autocast("cuda", torch.float16):
        assert attention(*x, backend=backend).dtype == torch.float16


@pytest.mark.usefixtures("torch_way")
def test_adapter_draws_seeds_without_waiting(backend):
    """With dropout and no seed: by the generator of the GPU, and nothing is synchronised."""
    from flashsdk.torch import attention

    x = qkv()[:3]
    attention(*x, dropout_p=0.5, backend=backend)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    torch.manual_seed(1)
    a = attention(*x, dropout_p=0.5, backend=backend)
    torch.manual_seed(1)
    b = attention(*x, dropout_p=0.5, backend=backend)
    c = attention(*x, dropout_p=0.5, backend=backend)
    assert not torch.cuda.current_stream().query()
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_layouts_outlive_calls_that_failed(backend):
    """What a transform or a fake tensor left behind is not taken for a layout's lists."""
    from flashsdk.torch import attention
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = qkv(seqlen=256)[:3]

    def transformed(mask):
        torch.func.grad(lambda q: fs.mha_fwd(q, *x[1:], mask=mask)[0].sum())(x[0])

    def faked(mask):
        with FakeTensorMode() as mode:
            fs.mha_fwd(*map(mode.from_tensor, x), mask=mask)

    for fails in (transformed, faked):
        mask = fs.layouts.bigbird(256, 256, 128)
        with pytest.raises(fs.Error):
            fails(mask)
        out, _ = fs.mha_fwd(*x, mask=mask, backend=backend)
        assert torch.equal(attention(*x, mask=mask, backend=backend), out)

    mask = fs.layouts.bigbird(256, 256, 128)
    torch.func.grad(lambda q: attention(q, *x[1:], mask=mask, backend=backend).float().sum())(x[0])
    with looked_on():  # through the operator
        assert torch.equal(attention(*x, mask=mask, backend=backend), out)


def test_layouts_may_be_trained_with_after_inference(backend):
    from flashsdk.torch import attention

    q, k, v, _ = qkv(seqlen=256)
    mask = fs.layouts.bigbird(256, 256, 128)
    with torch.inference_mode(), looked_on():  # through the operator
        want = attention(q, k, v, mask=mask, backend=backend)
    with looked_on():
        got = attention(q.requires_grad_(), k, v, mask=mask, backend=backend)
        got.sum().backward()
    assert torch.equal(got, want) and q.grad is not None


def test_adapter_layouts_do_not_wait(backend):
    """A layout's lists go to the GPU once, and are not read back."""
    from flashsdk.torch import attention

    x = qkv(seqlen=256)[:3]
    mask = fs.layouts.bigbird(256, 256, 128)
    want = attention(*x, mask=mask, backend=backend)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    got = attention(*x, mask=mask, backend=backend)
    assert not torch.cuda.current_stream().query()
    assert torch.equal(got, want)
