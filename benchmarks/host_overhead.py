"""Host time of small calls of flashsdk and of PyTorch's own attention, in microseconds: JSON.

    python benchmarks/host_overhead.py [--device cpu|cuda] [--shape BATCH HEADS SEQLEN HEAD_DIM]

Calls are so small that they are all host: on a GPU it keeps up, on a CPU its kernels take about a
microsecond. All calls go in turns, so that each meets the same clocks. "<name>" is a forward that
records nothing, "<name>_train" a forward and its backward by torch.autograd.grad. Of each call the
median of all rounds is given, and the rounds' 10th and 90th percentile. "<name>_compiled" is
a program of LAYERS layers, forward and backward, that torch.compile made: the time of one layer.
--eager leaves that out. "sdpa" is our function, "torch_sdpa" PyTorch's own, and "sdpa_enabled" that
one with torch_sdpa.enable() on: our kernels. PyTorch 2.11 or newer. FLASHSDK_TORCH_NATIVE=0:
without what is compiled for one series of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import flashsdk as fs
import torch
from flashsdk import _torch_eager
from flashsdk.integrations import torch_sdpa
from flashsdk.torch import attention, flash_attn_func, scaled_dot_product_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], object]
COMPILED = "_compiled"
LAYERS = 8
ENABLED = "sdpa_enabled"  # and with "_train" behind it


def measure(
    calls: dict[str, Call], settle: Call, rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Microseconds of every call in every round; ``settle`` waits for what was launched."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(rounds + 1):
        for name, call in calls.items():
            with enabled() if name.startswith(ENABLED) else nullcontext():
                settle()
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                seconds = time.perf_counter() - start
            if n > 0:  # the first round warms up
                layers = LAYERS if name.endswith(COMPILED) else 1
                times[name].append(seconds / repeats / layers * 1e6)
    return times


@contextmanager
def enabled() -> Iterator[None]:
    """With flash attention alone: a GPU's first choice may be cuDNN, which is not ours."""
    with torch_sdpa.enable(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield


def training(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> Call:
    """Forward and backward of one small step."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    dout = torch.ones_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*leaves), leaves, dout)


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Layer upon layer, each of what the one before it gave."""

    def layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            q = function(q, k, v)
        return q

    return torch.compile(layers, dynamic=False)


def calls_of(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], *, eager: bool
) -> dict[str, Call]:
    heads_first = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
    q, k, v = (x.transpose(1, 2).contiguous() for x in heads_first)
    dout, causal = torch.randn_like(q), fs.Causal()
    out, lse = fs.mha_fwd(q, k, v)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    functions: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
        "flash_attn_func": (flash_attn_func, [q, k, v]),
        "attention": (attention, [q, k, v]),
        "attention_causal": (lambda *x: attention(*x, mask=causal), [q, k, v]),
        "sdpa": (scaled_dot_product_attention, heads_first),
        "torch_sdpa": (sdpa, heads_first),
    }
    with enabled():
        why = torch_sdpa.explain(*heads_first)
    if not why.taken:
        sys.exit(f"host_overhead: {why}")
    functions[ENABLED] = sdpa, heads_first
    calls: dict[str, Call] = {}
    for name, (function, inputs) in functions.items():
        calls[name] = lambda f=function, x=inputs: f(*x)  # type: ignore[misc]
        with enabled() if name == ENABLED else nullcontext():
            calls[f"{name}_train"] = training(function, inputs)
    for name in () if eager else ("attention", "torch_sdpa"):
        function, inputs = functions[name]
        calls[name + COMPILED] = training(compiled(function), inputs)
    return calls | {
        "mha_fwd": lambda: fs.mha_fwd(q, k, v),
        "mha_fwd_into": lambda: fs.mha_fwd(q, k, v, out=out, lse=lse),
        "mha_fwd_causal": lambda: fs.mha_fwd(q, k, v, mask=causal),
        "mha_bwd": lambda: fs.mha_bwd(dout, q, k, v, out, lse),
        "mha_bwd_into": lambda: fs.mha_bwd(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv),
        "torch_empty_twice": lambda: (torch.empty_like(q), torch.empty_like(q)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--shape", type=int, nargs=4, default=None)
    parser.add_argument("--dtype", default=None, help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=200, help="calls of a round")
    parser.add_argument("--eager", action="store_true", help="nothing that has to be compiled")
    given = parser.parse_args()
    cuda = torch.device(given.device).type == "cuda"
    shape = tuple(given.shape or ((1, 1, 64, 64) if cuda else (1, 4, 1, 64)))
    dtype = getattr(torch, given.dtype or ("bfloat16" if cuda else "float32"))
    calls = calls_of(given.device, dtype, shape, eager=given.eager)
    settle: Call = torch.cuda.synchronize if cuda else lambda: None
    times = measure(calls, settle, given.rounds, given.repeats)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "native": _torch_eager.native is not _torch_eager.InPython,
        "shape": shape,
        "dtype": str(dtype).partition(".")[2],
        "microseconds": {name: round(statistics.median(t), 1) for name, t in times.items()},
        "spread": {
            name: [round(t, 1) for t in (tenths[0], tenths[-1])]
            for name, tenths in (
                (n, statistics.quantiles(t, n=10, method="inclusive")) for n, t in times.items()
            )
        },
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
