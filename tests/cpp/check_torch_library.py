"""libflashsdk_torch as a program without the Python package has it: operators, and AOTInductor.

    python check_torch_library.py libflashsdk_torch.so

Prints "ok". One process exports and compiles with flashsdk.torch; this one, which loads the library
and torch alone, runs what that one has written.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).resolve().parent.parent.parent / "python"
COMPILE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import flashsdk as fs
from flashsdk.torch import attention

class Block(torch.nn.Module):
    def forward(self, q, k, v):
        return 2 * attention(q, k, v, mask=fs.Causal())

inputs = tuple(torch.load(sys.argv[2]))
exported = torch.export.export(Block(), inputs)
torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[3])
# Beside the package the library defines nothing, as what it defines is there.
torch.ops.load_library(sys.argv[4])
assert torch.equal(exported.module()(*inputs), Block()(*inputs))
"""
NOTHING = (None,) * 4  # bias, alibi_slopes, seed, blocks
CAUSAL = [2**31 - 1, 0, 0]  # left, right, alignment


def forward(q, k, v, mask, scale=None):
    rest = *NOTHING, mask, scale, 0.0, 0.0, False, ""
    return torch.ops.flashsdk.mha_fwd(q, k, v, *rest)


def standard(q, k, v, causal):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads_first, is_causal=causal).transpose(1, 2)


def main() -> None:
    # PyTorch keeps its kernels, so that nobody may unload it.
    command = ["readelf", "--dynamic", "--wide", sys.argv[1]]
    assert "NODELETE" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    torch.ops.load_library(sys.argv[1])
    assert not any(name.startswith("flashsdk") for name in sys.modules)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, 4, 32) for _ in range(3))
    for causal in (False, True):
        mask = CAUSAL if causal else []
        out, lse = forward(q, k, v, mask)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        want = standard(*inputs, causal)
        torch.testing.assert_close(out, want)
        dout = torch.randn_like(out)
        rest = *NOTHING, mask, None, 0.0, 0.0, False, ""
        gradients = torch.ops.flashsdk.mha_bwd(dout, None, q, k, v, out, lse, *rest)
        for a, b in zip(gradients, torch.autograd.grad(want, inputs, dout), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    offsets = torch.tensor([0, 40, 80], dtype=torch.int32)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    lengths = offsets, offsets, 40, 40
    rest = *NOTHING, CAUSAL, None, 0.0, 0.0, False, ""
    packed, _ = torch.ops.flashsdk.mha_varlen_fwd(*flat, *lengths, *rest)
    assert torch.equal(packed, out.flatten(0, 1))
    with_a_cache(q, k, v)
    try:
        forward(q, k[:, :, :3], v[:, :, :3], [])
        raise AssertionError("3 heads of keys for 4 of queries were taken")
    except RuntimeError as error:
        assert "k: num_heads_kv 3; a divisor of num_heads, which is 4" in str(error)
    with tempfile.TemporaryDirectory() as folder:
        inputs, package = Path(folder, "inputs.pt"), Path(folder, "attention.pt2")
        torch.save([q, k, v], inputs)
        command = [sys.executable, "-c", COMPILE, str(SOURCES), str(inputs), str(package)]
        done = subprocess.run([*command, sys.argv[1]], capture_output=True, text=True)
        assert done.returncode == 0 and "egister" not in done.stderr, done.stderr
        compiled = torch._inductor.aoti_load_package(str(package))
        torch.testing.assert_close(compiled(q, k, v), 2 * standard(q, k, v, True))
    beside_the_package(q, k, v, compiled(q, k, v))
    print("ok")


def with_a_cache(q, k, v):
    """Used keys and a sink of no weight: attention to the first keys alone, and their gradients."""
    used, sink = torch.tensor([7, 40], dtype=torch.int32), torch.full((4,), -torch.inf)
    more = sink, None, used, None, None, None, 0, None, None, 0, 0
    rest = *more, *NOTHING, [], None, 0.0, 0.0, False, ""
    out, lse = torch.ops.flashsdk.attention_fwd(q, k, v, *rest)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    sequences = zip(*(x.split(1) for x in inputs), used, strict=True)
    want = torch.cat([standard(q, k[:, :n], v[:, :n], False) for q, k, v, n in sequences])
    torch.testing.assert_close(out, want)
    dout = torch.randn_like(out)
    *gradients, dsink = torch.ops.flashsdk.attention_bwd(dout, None, q, k, v, out, lse, *rest)
    for a, b in zip(gradients, torch.autograd.grad(want, inputs, dout), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch.equal(dsink, torch.zeros(4))


def beside_the_package(q, k, v, want):
    """Python's operators on top of those that the library has defined: gradients, shapes."""
    sys.path.insert(0, str(SOURCES))
    import flashsdk as fs
    from flashsdk.torch import attention

    assert torch.equal(2 * attention(q, k, v, mask=fs.Causal()), want)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    traced = torch.compile(attention, backend="aot_eager", fullgraph=True)
    out = traced(*inputs, mask=fs.Causal())
    out.sum().backward()
    gradients = torch.autograd.grad(standard(*inputs, True).sum(), inputs)
    for x, gradient in zip(inputs, gradients, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
