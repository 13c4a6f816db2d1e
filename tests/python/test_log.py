"""FLASHSDK_LOG=1, flashsdk.torch.explain and docs/seeing.md: which kernel runs, or why none."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import flashsdk as fs
import numpy as np
import pytest
from flashsdk import cli

TWICE = """
import numpy as np, flashsdk as fs
q = np.zeros((1, 40, 4, 16), np.float32)
k = np.zeros((1, 40, 2, 16), np.float32)
for _ in range(3):
    out, lse = fs.mha_fwd(q, k, k, mask=fs.Causal())
    fs.mha_bwd(out, q, k, k, out, lse, mask=fs.Causal())
fs.mha_fwd(q, k, k, mask=fs.layouts.causal(40, 40, 16), softcap=2.0)
cu = np.array([0, 10, 40], np.int32)
fs.mha_varlen_fwd(q[0], k[0], k[0], cu, cu, 30, 30, bias=np.zeros((1, 1, 30, 30), bool))
for _ in range(2):
    try:
        fs.mha_fwd(q, k, k, softmax_scale=float("nan"))
    except fs.Error:
        pass
    try:
        fs.mha_fwd([1.0], k, k)
    except fs.Error:
        pass
"""
TORCH = """
import torch, flashsdk as fs, flashsdk.torch as fst
q = torch.zeros(1, 40, 4, 16, requires_grad=True)
for _ in range(2):
    fst.attention(q, q, q, mask=fs.SlidingWindow(8), dropout_p=0.5).sum().backward()
    fst.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3)
torch.compile(fst.attention, backend="aot_eager")(q[:, :20], q[:, :20], q[:, :20])
"""
JAX = """
import jax, jax.numpy as jnp, flashsdk as fs, flashsdk.jax as fsj
q = jnp.zeros((1, 40, 4, 16))
f = jax.jit(jax.grad(lambda q: fsj.attention(q, q, q, mask=fs.Causal()).sum()))
f(q), f(q)
"""

THREADS = """
import sys, threading, numpy as np, flashsdk as fs
sys.setswitchinterval(1e-6)
def work():
    for seqlen in range(1, 101):
        q = np.zeros((1, seqlen, 1, 8), np.float32)
        fs.mha_fwd(q, q, q)
threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
NOWHERE = """
import io, sys, numpy as np, flashsdk as fs
closed = io.StringIO()
closed.close()
for seqlen, stream in enumerate((None, closed, object()), 1):
    sys.stderr = stream
    q = np.zeros((1, seqlen, 1, 8), np.float32)
    fs.mha_fwd(q, q, q)
sys.stderr = sys.__stderr__
"""


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )


def lines(code, **environment):
    written = run(code, **environment).stderr.splitlines()
    return [x for x in written if x.startswith("flashsdk: ")]


def kernel(shape, **options):
    """As a line names it: with why not those before it, as on processors without all of them."""
    found = fs.explain(*(np.zeros(x, np.float32) for x in shape), **options)
    return "; not ".join([found.kernel, *(f"{name}: {why}" for name, why in found.refused)])


def test_a_line_for_each_distinct_call():
    q, k = (1, 40, 4, 16), (1, 40, 2, 16)
    found = lines(TWICE, FLASHSDK_LOG="1")
    shapes = "q (1,40,4,16) k (1,40,2,16) float32 on cpu"
    forward = kernel((q, k, k), mask=fs.Causal())
    assert found[0] == f"flashsdk: mha_fwd {shapes}, causal: {forward}"
    assert found[1].startswith(f"flashsdk: mha_bwd {shapes}, causal: cpu_")
    assert found[2].startswith(
        f"flashsdk: mha_fwd {shapes}, blocks of 16 x 16, causal inside, softcap 2: cpu_"
    )
    assert found[3].startswith(
        "flashsdk: mha_varlen_fwd q (40,4,16) k (40,2,16) float32 on cpu, 2 sequences of at most "
        "30 and 30, bool bias (1, 1, 30, 30): cpu_"
    )
    assert found[4] == f"flashsdk: mha_fwd {shapes}: refused: softmax_scale: nan; a finite number"
    assert found[5].startswith("flashsdk: mha_fwd: refused: q: ") and len(found) == 6


@pytest.mark.parametrize("value", ["", "0"])
def test_off(value):
    assert lines(TWICE, FLASHSDK_LOG=value) == []


@pytest.mark.parametrize("name", ["FLASHSDK_LOG", "FLASHSDK_CHECK"])
@pytest.mark.parametrize("value", ["off", "false", "2"])
def test_neither_on_nor_off(name, value):
    """What reads as off was on."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run("import flashsdk", **{name: value})
    assert caught.value.stderr.endswith(f"InvalidArgument: {name}: {value}; 0 or 1\n")


def test_threads_write_whole_lines():
    """A line was its text and then its end, and another thread's came between."""
    found = lines(THREADS, FLASHSDK_LOG="1")
    assert len(found) == len(set(found)) == 100
    assert all(line.count("flashsdk: ") == 1 for line in found)


def test_no_call_fails_where_stderr_takes_nothing():
    assert run(NOWHERE, FLASHSDK_LOG="1").stdout == ""


def test_pytorch():
    pytest.importorskip("torch")
    found = lines(TORCH, FLASHSDK_LOG="1")
    shapes = "q (1,40,4,16) k (1,40,4,16) float32 on cpu"
    starts = [
        f"mha_fwd {shapes}, band (8, 0), dropout 0.5: cpu_",
        f"mha_bwd {shapes}, band (8, 0), dropout 0.5: cpu_",
        f"mha_fwd {shapes}: cpu_",
        "mha_fwd q (1,20,4,16) k (1,20,4,16) float32 on cpu: cpu_",
    ]
    assert len(found) == len(starts), found
    for line, start in zip(found, starts, strict=True):
        assert line.startswith(f"flashsdk: {start}"), line


APPEND = """
import numpy as np, flashsdk as fs
cache, new = np.zeros((2, 30, 2, 16), np.float32), np.zeros((2, 3, 2, 16), np.float32)
q, used = np.zeros((2, 3, 4, 16), np.float32), np.zeros(2, np.int32)
cos = np.ones((30, 4), np.float32)
for _ in range(2):
    fs.kv_append(cache, cache.copy(), new, new, used)
    fs.kv_append(cache, cache.copy(), new, new, used, q=q, rotary_cos=cos, rotary_sin=cos)
try:
    fs.kv_append(cache, cache.copy(), 1.0, new, used)
except fs.Error:
    pass
"""


APPEND_8 = """
import ml_dtypes, numpy as np, flashsdk as fs
cache = np.zeros((2, 30, 2, 16), ml_dtypes.float8_e4m3fn)
new, used = np.zeros((2, 3, 2, 16), np.float16), np.zeros(2, np.int32)
for k_descale in (None, np.ones((1, 1), np.float32)):
    fs.kv_append(cache, cache.copy(), new, new, used, k_descale=k_descale)
"""


def test_kv_append_of_8_bits():
    pytest.importorskip("ml_dtypes")
    call = "flashsdk: kv_append k_cache (2,30,2,16) v_cache (2,30,2,16) k (2,3,2,16) float16 on cpu"
    assert lines(APPEND_8, FLASHSDK_LOG="1") == [
        f"{call}, float8_e4m3fn cache",
        f"{call}, float8_e4m3fn cache, k_descale",
    ]


def test_kv_append():
    shapes = "k_cache (2,30,2,16) v_cache (2,30,2,16) k (2,3,2,16)"
    assert lines(APPEND, FLASHSDK_LOG="1") == [
        f"flashsdk: kv_append {shapes} float32 on cpu",
        f"flashsdk: kv_append {shapes} q (2,3,4,16) float32 on cpu, rotary of 8 in halves",
        "flashsdk: kv_append",
    ]


SDPA = """
import torch, torch.nn.functional as F
from flashsdk.integrations import torch_sdpa
q = torch.randn(1, 2, 40, 16, requires_grad=True)
mask = torch.zeros(40, 40)
(want,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q)
torch_sdpa.enable()
for _ in range(2):
    (got,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q)
    F.scaled_dot_product_attention(q, q, q, is_causal=True)
    F.scaled_dot_product_attention(q, q, q, mask)
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)  # which PyTorch does not give away
    wide = torch.randn(1, 2, 40, 600)
    F.scaled_dot_product_attention(wide, wide, wide)
rows = torch.randn(15, 4, 16)
nested = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 5, 15])).transpose(1, 2)
F.scaled_dot_product_attention(nested, nested, nested)
dense = torch.randn(1, 30, 4, 16)
torch.ops.aten._flash_attention_forward(dense, dense, dense, None, None, 30, 30, 0.0, True, False)
both = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # which has no meaning to us
both(q[:, :, :20], q[:, :, :20], q[:, :, :20], 0.0, True, attn_mask=mask[:20, :20])
assert torch.allclose(got, want, atol=1e-5) and torch_sdpa.enabled()
"""


@pytest.mark.parametrize("native", ["1", "0"])
def test_pytorch_s_own_function(native):
    pytest.importorskip("torch")
    if not importlib.import_module("flashsdk.integrations.torch_sdpa")._REGISTRY:
        pytest.skip("torch_sdpa.enable() is for PyTorch 2.11 or newer")
    found = lines(SDPA, FLASHSDK_LOG="1", FLASHSDK_TORCH_NATIVE=native)
    shapes = "q (1,40,2,16) k (1,40,2,16) float32 on cpu"
    wide = "q (1,40,2,600) k (1,40,2,600) float32 on cpu"
    starts = [
        f"torch_sdpa_fwd {shapes}: cpu_",
        f"torch_sdpa_bwd {shapes}: cpu_",
        f"torch_sdpa_fwd {shapes}, causal, top-left: cpu_",
        f"torch_sdpa_fwd {shapes}, float32 bias (1, 1, 40, 40): cpu_",
        f"torch_sdpa_fwd {wide}: refused: q: head_dim 600; 1 to 576",
        "torch_sdpa_fwd q (15,4,16) k (15,4,16) float32 on cpu, 2 sequences of at most 10 and 10: ",
        "torch_sdpa_fwd q (1,30,4,16) k (1,30,4,16) float32 on cpu, causal: cpu_",
        "torch_sdpa_fwd q (1,20,2,16) k (1,20,2,16) float32 on cpu, causal, top-left, float32 bias "
        "(1, 1, 20, 20): PyTorch's kernel",
    ]
    assert len(found) == len(starts), found
    for line, start in zip(found, starts, strict=True):
        assert line.startswith(f"flashsdk: {start}"), line


def test_jax():
    pytest.importorskip("jax")
    found = lines(JAX, FLASHSDK_LOG="1", JAX_PLATFORMS="cpu")
    want = "flashsdk: jax.attention q (1,40,4,16) k (1,40,4,16) float32 on cpu, causal: cpu_"
    assert len(found) == 1 and found[0].startswith(want), found


# ---- explain for the functions of flashsdk.torch


def calls(torch, fst):
    q, k = torch.zeros(2, 40, 4, 16), torch.zeros(2, 40, 2, 16)
    cu = torch.tensor([0, 40, 80], dtype=torch.int32)
    flat = (q.reshape(80, 4, 16), k.reshape(80, 2, 16), k.reshape(80, 2, 16))
    heads = [x.transpose(1, 2) for x in (q, k, k)]
    bias = torch.ones(40, 40, dtype=torch.bool)
    as_bias = {"bias": bias[None, None]}
    causal = {"mask": fs.Causal()}
    lengths = (cu, cu, 40, 40)
    return {
        "attention": (fst.attention, (q, k, k), causal, (q, k, k), causal),
        "bool mask": (fst.attention, (q, k, k), {"mask": bias}, (q, k, k), as_bias),
        "dropout": (fst.attention, (q, k, k), {"dropout_p": 0.5}, (q, k, k), {"dropout_p": 0.5}),
        "varlen": (fst.varlen_attention, (*flat, *lengths), causal, (*flat, *lengths), causal),
        "sdpa": (
            fst.scaled_dot_product_attention,
            heads,
            {"is_causal": True, "enable_gqa": True},
            (q, k, k),
            {"mask": fs.Causal("top_left")},
        ),
        "flash_attn": (fst.flash_attn_func, (q, k, k), {"causal": True}, (q, k, k), causal),
        "packed": (fst.flash_attn_kvpacked_func, (q, torch.stack([k, k], 2)), {}, (q, k, k), {}),
    }


NAMES = ["attention", "bool mask", "dropout", "varlen", "sdpa", "flash_attn", "packed"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_explain_takes_the_function_s_own_arguments(name, op):
    torch = pytest.importorskip("torch")
    fst = importlib.import_module("flashsdk.torch")
    function, args, keywords, same, options = calls(torch, fst)[name]
    state = torch.get_rng_state()
    why = fst.explain(function, *args, op=op, **keywords)
    assert why == fs.explain(*same, op=op, **options) and why.kernel
    assert torch.equal(torch.get_rng_state(), state)
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in args[:2]] + list(args[2:])
    assert fst.explain(function, *inputs, op=op, **keywords) == why


def test_explain_of_a_module_and_of_what_is_none_of_ours():
    torch = pytest.importorskip("torch")
    fst = importlib.import_module("flashsdk.torch")

    class Layer(torch.nn.Module):
        def forward(self, x):
            return fst.attention(x, x, x, mask=fs.Causal()) * 2

    x = torch.zeros(1, 30, 2, 8)
    assert fst.explain(Layer(), x) == fs.explain(x, x, x, mask=fs.Causal())
    why = fst.explain(torch.add, x, x)
    assert (why.kernel, why.refused) == (
        "",
        [("flashsdk", "the call takes none of its operators")],
    )
    with pytest.raises(fs.Error, match=r"^q: head_dim 600; "):
        fst.explain(fst.attention, *[torch.zeros(1, 3, 2, 600)] * 3)
    with pytest.raises(fs.Error, match=r"^op: 'both'; "):
        fst.explain(fst.attention, x, x, x, op="both")
    with pytest.raises(fs.Error, match=r"^function: 3; a function"):
        fst.explain(3, x)


def test_the_variable_is_documented():
    page = Path(__file__).parents[2] / "docs" / "options.md"
    if not page.exists():
        pytest.skip("not a checkout")
    assert "| `FLASHSDK_LOG` |" in page.read_text("utf-8")


def test_the_page(capsys):
    """docs/seeing.md: its code runs, and flashsdk knows its commands."""
    page = Path(__file__).parents[2] / "docs" / "seeing.md"
    if not page.exists():
        pytest.skip("not a checkout")
    text = page.read_text("utf-8")
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(example, {})
    assert "_fwd, tiles of " in capsys.readouterr().out
    commands = re.findall(r"^flashsdk (bench .*)$", text, re.MULTILINE)
    parsed = [cli.parser().parse_args(command.split()) for command in commands]
    assert [args.backend for args in parsed] == ["cpu", "sm90"]
    assert parsed[0].out in text  # the folder


def test_keys_of_8_bits():
    pytest.importorskip("ml_dtypes")
    code = """
import ml_dtypes, numpy as np, flashsdk as fs
q = np.zeros((1, 1, 4, 16), np.float16)
k = np.zeros((1, 40, 2, 16), ml_dtypes.float8_e4m3fn)
fs.mha_fwd(q, k, k, v_descale=np.ones((1, 1), np.float32))
"""
    (line,) = run(code, FLASHSDK_LOG="1").stderr.splitlines()
    assert "float16 on cpu, float8_e4m3fn keys, v_descale: cpu_" in line
