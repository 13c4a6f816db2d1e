"""PyTorch's private names stand in one module, and each but two can be missing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import flashsdk
import pytest

torch = pytest.importorskip("torch")

PACKAGE = Path(flashsdk.__file__).parent
HOME = "_torch_private.py"
# A clock's own, which no call of a user needs.
EXEMPT = {("_commands/gpu_timing.py", "torch.cuda._sleep")}


def is_private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and p[:2] != "__" for p in parts)


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def private_names(source: str) -> Iterator[str]:
    """Of PyTorch: what is imported, and chains of attributes that begin with torch."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.Call) and dotted(node.func) == "getattr":
            owner, name, *_ = node.args
            if isinstance(name, ast.Constant):
                yield f"{dotted(owner)}.{name.value}"


def test_private_names_stand_in_one_module():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        where = str(file.relative_to(PACKAGE))
        if where == HOME:
            continue
        names = filter(is_private, private_names(file.read_text("utf-8")))
        found |= {(where, name) for name in names if "ops.aten" not in name}
    assert found == EXEMPT
    sample = "from torch._C import x; torch.nn._y.z; getattr(torch._C, 'x'); getattr(torch, '_w')"
    assert {*filter(is_private, private_names(sample))} > {"torch._C.x", "torch._w"}


# A PyTorch of which the package sees public names alone, and the two that it cannot do without.
PUBLIC_ALONE = """
import importlib, sys, types
import torch, torch.autograd.forward_ad

class Public(types.ModuleType):
    def __init__(self, module, *shown):
        super().__init__(module.__name__)
        self.__dict__.update(_of=module, _shown=shown)
    def __getattr__(self, name):
        if name.startswith("_") and name[:2] != "__" and name not in self._shown:
            raise AttributeError(name)
        return getattr(self._of, name)

ways = Public(torch)
ways.__dict__["_C"] = Public(torch._C, "_AutoDispatchBelowAutograd", "_after_autograd_keyset")
ways.__dict__["compiler"] = Public(torch.compiler)
real = importlib.import_module
def imported(name, *rest):
    if name.startswith("torch.") and "._" in name:
        raise ImportError(name)
    return real(name, *rest)

import flashsdk
sys.modules["torch"], importlib.import_module = ways, imported
import flashsdk._torch_private as private
sys.modules["torch"], importlib.import_module = torch, real
private.forward_ad = Public(torch.autograd.forward_ad)

assert private.is_watched() and private.in_forward_mode() and private.memory_budget() == 1
assert not private.is_tracing() and not private.is_exporting()
import flashsdk.torch as ft
x = [torch.randn(1, 9, 2, 8, dtype=torch.float32, requires_grad=True) for _ in range(3)]
def loss(f):
    return torch.autograd.grad(f(*x).square().sum(), x)
def plain(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
for ours, theirs in zip(loss(ft.attention), loss(plain)):
    assert torch.allclose(ours, theirs, atol=1e-5)
from flashsdk.integrations import torch_sdpa
if torch_sdpa._REGISTRY:
    theirs = loss(plain)
    with torch_sdpa.enable():
        ours = loss(plain)
    assert not torch.equal(ours[0], theirs[0]) and torch.allclose(ours[0], theirs[0], atol=1e-5)
    assert torch.equal(loss(plain)[0], theirs[0])
batched = torch.func.vmap(ft.attention)(*(t.detach()[None].expand(3, *t.shape) for t in x))
assert torch.allclose(batched[2], plain(*x), atol=1e-5)
assert ft.attention(*x, dropout_p=0.5).shape == x[0].shape
try:
    private.sdp_choice(*x, scale=None, enable_gqa=False)
except flashsdk.Unsupported as e:
    assert "torch: " in str(e)
else:
    raise AssertionError("a choice without the name that makes it")
"""


def test_public_ways_take_their_place():
    environment = {"FLASHSDK_TORCH_NATIVE": "0", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", PUBLIC_ALONE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
