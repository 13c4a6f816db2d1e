"""How fast the GPU kernels are: our backends beside PyTorch's FlashAttention-2 and cuDNN.

    python3 benchmarks/gpu_bench.py [--out benchmarks/results/gpu_bench] [--quick]
    python3 benchmarks/gpu_bench.py --only dense --head-dims 128 --ops bwd --libraries sm90 cudnn

`make bench-gpu` builds first, also the library of single kernels that `features_off` launches from.
Writes OUT.json, the record that docs/dev/benchmarks.md is made from, and OUT.csv, its dense cells.
How calls are made: gpu_calls.py; how they are timed: `flashsdk._commands.gpu_timing`. FLOPs:
forward 4·batch·heads·seqlen²·head_dim, half of it when causal; backward 2.5 forwards. A backward's
time holds all of its passes.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import torch
from flashsdk._commands import gpu_record, gpu_timing
from gpu_calls import second_build
from gpu_card import Meter, card, libraries, summary
from gpu_decode import caches, few_queries
from gpu_dense import dense, gqa, lengths, many_short
from gpu_features import alibi, bias, deterministic, features_off, gpt2_medium
from gpu_masks import packed, sparse, windows
from gpu_tables import OURS, PEERS
from gpu_wanted import KERNELS, OPS, Row, Wanted

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "gpu_bench"
PART = ROOT / "build" / "gpu_bench"  # where a run of a part goes: it must not replace the record
SECTIONS: dict[str, Callable[[Wanted], list[Row]]] = {
    "dense": dense,
    "lengths": lengths,
    "gqa": gqa,
    "many_short": many_short,
    "few_queries": few_queries,
    "caches": caches,
    "windows": windows,
    "packed": packed,
    "sparse": sparse,
    "gpt2_medium": gpt2_medium,
    "bias": bias,
    "alibi": alibi,
    "deterministic": deterministic,
    "features_off": features_off,
}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out",
        type=Path,
        help=f"without an ending; {_relative(RECORD)}, or of a part {_relative(PART)}",
    )
    parser.add_argument("--quick", action="store_true", help="few cells")
    parser.add_argument(
        "--only", type=_names, metavar="SECTION,…", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--head-dims", type=int, nargs="+")
    parser.add_argument(
        "--seqlens", type=int, nargs="+", help="of dense, lengths, gqa and deterministic"
    )
    parser.add_argument(
        "--ops", nargs="+", choices=OPS, help="of dense, lengths, gqa and many_short"
    )
    parser.add_argument("--libraries", nargs="+", choices=(*PEERS, *OURS))
    parser.add_argument(
        "--baseline", type=Path, metavar="BUILD",
        help="another build's python/flashsdk, or its extension, in turns with ours: dense, "
        "lengths, gqa",
    )  # fmt: skip
    parser.add_argument(
        "--kernels", type=Path, default=KERNELS, help="the library of single kernels"
    )
    args = parser.parse_args(arguments)
    parts = ("only", "head_dims", "seqlens", "ops", "libraries", "baseline")
    given = {name: getattr(args, name) for name in parts if getattr(args, name)}
    args.part = {n: str(x) if n == "baseline" else list(x) for n, x in given.items()}
    args.out = args.out or (PART if args.part or args.quick else RECORD)
    return args


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - SECTIONS.keys():
        raise argparse.ArgumentTypeError(f"no section {', '.join(sorted(unknown))}")
    return names


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def wanted_of(args: argparse.Namespace) -> Wanted:
    given: dict[str, Any] = {
        "dims": args.head_dims, "lengths": args.seqlens, "ops": args.ops,
        "libraries": args.libraries,
    }  # fmt: skip
    given = {name: tuple(values) for name, values in given.items() if values}
    if args.baseline:
        given["baseline"] = second_build(args.baseline)
    return Wanted(quick=args.quick, kernels=args.kernels, **given)


def main(arguments: list[str] | None = None) -> int:
    args = parsed(arguments)
    wanted = wanted_of(args)
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    record = gpu_record.header("gpu_bench", torch.cuda.get_device_name())
    record["versions"] |= libraries()
    record["card"] = card()
    record["timing"] = {"rounds": gpu_timing.ROUNDS, "sample_ms": gpu_timing.SAMPLE_MS}
    if args.part or args.quick:
        record["part"] = {**args.part, "quick": args.quick}
    failed = False
    with Meter() as meter:
        for name in args.only or SECTIONS:
            start, windows_before = time.monotonic(), len(gpu_timing.WINDOWS)
            try:
                record[name] = SECTIONS[name](wanted)
            except Exception:  # device time is short: one section must not cost the others
                traceback.print_exc()
                failed = True
            windows_of = gpu_timing.WINDOWS[windows_before:]
            record.setdefault("clocks", {})[name] = summary(meter.during(windows_of))
            record["timing"]["ways"] = ways(record)
            write(args.out, record)  # after every section: the machine may go
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"record: {args.out.with_suffix('.json')}")
    return 1 if failed else 0


def ways(record: dict[str, Any]) -> dict[str, int]:
    """In how many rows calls were captured in graphs, in how many queued one by one."""
    return dict(Counter(row["way"] for name in SECTIONS for row in record.get(name, [])))


def write(out: Path, record: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(_rounded(record), indent=1) + "\n")
    columns = ("op", "head_dim", "causal", "seqlen", "name", "ms", "ms_p10", "ms_p90", "tflops")
    with open(out.with_suffix(".csv"), "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(columns)
        for row in _rounded(record.get("dense", [])):
            writer.writerow([int(row[c]) if c == "causal" else row[c] for c in columns])


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.4g}")
    if isinstance(x, dict):
        return {key: _rounded(value) for key, value in x.items()}
    return [_rounded(value) for value in x] if isinstance(x, list) else x


if __name__ == "__main__":
    sys.exit(main())
