"""Host time of a call of flashsdk with torch tensors on a GPU, in microseconds: a line of JSON.

Calls are so small that the GPU keeps up; medians of many rounds of 200 calls.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import flashsdk as fs
import torch
from flashsdk.torch import attention


def microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Of each call, in turns: the first would else be timed while clocks still rise."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(30):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            times[name].append((time.perf_counter() - start) / 200 * 1e6)
    return {name: round(statistics.median(t), 1) for name, t in times.items()}


def main() -> None:
    shape = 1, 64, 1, 64
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = fs.mha_fwd(q, k, v)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = {
        "mha_fwd": lambda: fs.mha_fwd(q, k, v),
        "mha_fwd_into": lambda: fs.mha_fwd(q, k, v, out=out, lse=lse),
        "mha_fwd_causal": lambda: fs.mha_fwd(q, k, v, mask=fs.Causal()),
        "mha_bwd": lambda: fs.mha_bwd(dout, q, k, v, out, lse),
        "mha_bwd_into": lambda: fs.mha_bwd(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv),
        "torch_attention": lambda: attention(q, k, v),
        "torch_sdpa": lambda: sdpa(*heads_first),
        "torch_empty_twice": lambda: (torch.empty_like(q), torch.empty_like(q)),
    }
    print(json.dumps({"microseconds": microseconds(calls)}))


if __name__ == "__main__":
    main()
