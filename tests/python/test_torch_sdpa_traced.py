"""PyTorch's own function on our kernels where it is traced: torch.compile's choice, fx, export."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
import flashsdk.torch as ft  # noqa: E402
import torch.nn.functional as functional  # noqa: E402
from flashsdk.integrations import torch_sdpa  # noqa: E402
from sdpa_cases import BOTH_WAYS  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

pytestmark = BOTH_WAYS
sdpa = functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch_sdpa.disable()
    torch._dynamo.reset()


def qkv():
    return [torch.randn(2, 4, 40, 16, requires_grad=True) for _ in range(3)]


def results(function, inputs):
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def attend(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def ours_alone(q, k, v):
    return ft.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_by_math(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, is_causal=True)


def of_each(function, inputs):
    """Without us and with; these differ in bits where ours ran."""
    torch_sdpa.disable()
    theirs = results(function, inputs)
    with torch_sdpa.enable():
        return theirs, results(function, inputs)


# ---- torch.compile


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_the_bits_tell_whose_kernels_ran():
    inputs = qkv()
    theirs, ours = of_each(compiled(attend), inputs)
    assert not same(theirs, ours)
    assert same(ours, results(ours_alone, inputs))


@pytest.mark.parametrize("when", ["inside", "around tracing"])
def test_math_that_was_asked_for_is_traced(when):
    inputs = qkv()
    function = compiled(attend_by_math if when == "inside" else attend)

    def call(*x):
        with sdpa_kernel(SDPBackend.MATH):
            return function(*x)

    theirs, ours = of_each(function if when == "inside" else call, inputs)
    assert same(theirs, ours)


def test_math_that_is_asked_for_after_tracing_is_not_ours():
    """PyTorch does not trace anew for sdpa_kernel: its own flash attention runs, as without us."""
    inputs = qkv()
    function = compiled(attend)

    def by_math():
        with sdpa_kernel(SDPBackend.MATH):
            return results(function, inputs)

    theirs = results(function, inputs)
    assert same(by_math(), theirs)
    with torch_sdpa.enable():
        ours = results(function, inputs)
        assert not same(ours, theirs)
        assert same(by_math(), theirs)
        assert same(results(function, inputs), ours)


# ---- fx and export, in this process and in another


class Block(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.project = torch.nn.Linear(16, 16)
        self.attention = attention

    def forward(self, q, k, v):
        return self.attention(self.project(q), k, v)


def flash_attention(q, k, v):
    return ft.attention(q, k, v, mask=fs.Causal(), softmax_scale=0.2)


FUNCTIONS = {"PyTorch's": attend, "sdpa": ft.scaled_dot_product_attention, "ours": flash_attention}
# Loads with what only a program of its own has imported.
LOAD = """
import sys, torch
import flashsdk.torch
from flashsdk.integrations import torch_sdpa
torch_sdpa.enable()
inputs, want = torch.load(sys.argv[1])
for file in sys.argv[2:]:
    load = torch.export.load if file.endswith("pt2") else torch.load
    module = load(file).module() if load is torch.export.load else load(file, weights_only=False)
    assert torch.equal(module(*inputs), want), file
"""


EACH = [*(("native", name) for name in FUNCTIONS), ("python", "PyTorch's")]


@pytest.mark.parametrize("sdpa_way, name", EACH, indirect=["sdpa_way"])
def test_traced_and_reloaded(sdpa_way, name, tmp_path):
    inputs = [x.detach() for x in qkv()]
    block = Block(FUNCTIONS[name])
    with torch_sdpa.enable():
        want = block(*inputs)
        traced = torch.fx.symbolic_trace(block)
        called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
        assert any("attention" in getattr(target, "__name__", "") for target in called)
        exported = torch.export.export(block, tuple(inputs))
        for module in (traced, exported.module()):
            assert torch.equal(module(*inputs), want)
        files = [str(tmp_path / f"module.{ending}") for ending in ("inputs", "fx", "pt2")]
        torch.save((inputs, want.detach()), files[0])
        torch.save(traced, files[1])
        torch.export.save(exported, files[2])
    env = {**os.environ, "FLASHSDK_TORCH_NATIVE": "" if sdpa_way == "native" else "0"}
    command = [sys.executable, "-c", LOAD, *files]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
