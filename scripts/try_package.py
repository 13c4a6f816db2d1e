"""What an installed package must do, with what is installed beside it.

    python try_package.py [--native]

Run by the Python of its environment, in a folder that has no sources. NumPy's arrays are always
tried, PyTorch's and JAX's where they are installed, with PyTorch 2.11 or newer its own function on
our kernels as well. --native: PyTorch was there when the package was built, so eager calls have to
be C++ throughout.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import flashsdk as fs
import numpy as np
from flashsdk._testing import reference

SHAPE = (1, 50, 2, 16)  # batch, seqlen, heads, head_dim


def definition(q: Any, k: Any, v: Any) -> Any:
    """Causal attention in double precision."""
    return reference.forward(q, k, v, mask=fs.Causal())[0]


def difference(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a, dtype=np.float64) - b).max())


def try_numpy(q: Any, k: Any, v: Any) -> None:
    for loaded in ("torch", "jax"):
        assert loaded not in sys.modules, f"import flashsdk has imported {loaded}"
    expected = definition(q, k, v)
    out, lse = fs.mha_fwd(q, k, v, mask=fs.Causal())
    assert difference(out, expected) < 1e-5
    dq, dk, dv = fs.mha_bwd(out, q, k, v, out, lse, mask=fs.Causal())
    # Of sum(out²) / 2 along q, by a central difference.
    step = 1e-3 * np.sign(dq)
    ahead, behind = (definition(q + s, k, v) for s in (step, -step))
    slope = ((ahead**2).sum() - (behind**2).sum()) / 4
    assert abs(slope - (dq * step).sum()) < 1e-3 * abs(slope)
    assert dk.shape == k.shape and dv.shape == v.shape
    try:
        fs.mha_fwd(q, k[:, :, :, :8], v)
    except fs.Error as e:
        assert isinstance(e, ValueError) and str(e).count("\n") == 0
    else:
        raise AssertionError("keys of another head_dim were taken")


def try_torch(q: Any, k: Any, v: Any, native: bool) -> None:
    import flashsdk.torch
    import torch

    x = [torch.from_numpy(a.copy()).requires_grad_() for a in (q, k, v)]
    out = flashsdk.torch.attention(*x, mask=fs.Causal())
    out.sum().backward()
    assert difference(out.detach(), definition(q, k, v)) < 1e-5
    assert x[0].grad is not None and x[0].grad.abs().max() > 0
    if native:
        assert out.grad_fn is not None and out.grad_fn.name() == "FlashsdkAttentionBackward"
    try_sdpa([t.detach().transpose(1, 2).requires_grad_() for t in x], definition(q, k, v))


def try_sdpa(x: list[Any], expected: Any) -> None:
    """PyTorch's own function on our kernels, by the way that this package has for it."""
    import torch
    from flashsdk.integrations import torch_sdpa

    def call() -> list[Any]:
        out = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]

    theirs = call()
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        try:
            torch_sdpa.enable()
        except fs.Unsupported as e:
            assert str(e).endswith("; 2.11 or newer")
        else:
            raise AssertionError(f"PyTorch {torch.__version__} was taken")
        return
    with torch_sdpa.enable():
        assert torch_sdpa.explain(*x, is_causal=True).taken
        ours = call()
    assert difference(ours[0].transpose(1, 2), expected) < 1e-5
    assert all(difference(a, b.numpy()) < 1e-4 for a, b in zip(ours, theirs, strict=True))


def try_jax(q: Any, k: Any, v: Any) -> None:
    import flashsdk.jax
    import jax

    out = jax.jit(lambda *x: flashsdk.jax.attention(*x, mask=fs.Causal()))(q, k, v)
    assert difference(out, definition(q, k, v)) < 1e-5
    gradient = jax.jit(jax.grad(lambda q: flashsdk.jax.attention(q, k, v).sum()))(q)
    assert gradient.shape == q.shape


def main() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(SHAPE, dtype=np.float32) for _ in range(3))
    try_numpy(q, k, v)
    tried = [f"NumPy {np.__version__}"]
    for name, attempt in (
        ("torch", lambda: try_torch(q, k, v, "--native" in sys.argv)),
        ("jax", lambda: try_jax(q, k, v)),
    ):
        if importlib.util.find_spec(name):
            attempt()
            tried.append(f"{name} {sys.modules[name].__version__}")
    isas = " ".join(fs.build_info()["cpu_isas"])
    python = sys.version.split()[0]
    print(f"flashsdk {fs.__version__} ({isas}) on Python {python}: {', '.join(tried)}: right")


if __name__ == "__main__":
    main()
