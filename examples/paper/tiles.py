"""Time and bytes against the size of a tile: the forward of GPT-2 medium's attention.

The claim (FlashAttention, arXiv 2205.14135, figure 2): with larger blocks the forward moves fewer
bytes, and takes less time until something else bounds it.

    python examples/paper/tiles.py            # needs a GPU, nvcc and CUTLASS's headers
    python examples/paper/tiles.py --smoke    # the counts alone: seconds, no GPU

A tile of B queries stays on the chip while all keys stream past it, so that a head of N queries
asks for its keys N / B times (docs/io.md). tiles.cu makes the forward of the sm80 kernels with
tiles of 16 to 256 queries, by flashsdk's headers: nvcc compiles it in about a minute, once. Every
tile is checked against float64, and timed in turns with the others. "asked_of_l2" counts what it
reads from L2, "moved" what comes from memory and goes there. Where Nsight Compute (ncu) may read
its counters, they stand beside the counts, under the names of traffic.py.

flashsdk is what pip has installed, or with ``--prefix`` what ``cmake --install`` has. CUTLASS is
looked for in third_party/cutlass/cutlass, in the package nvidia-cutlass, and in build/, where pip's
build of flashsdk with its GPU kernels has it; or it is ``--cutlass``.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import shutil
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import attention
import common
import torch
import traffic
from attention import Problem
from common import Clock, Record, Row
from flashsdk import io
from torch import Tensor

SOURCE = Path(__file__).with_name("tiles.cu")
PROBLEM = Problem(attention.GPT2_MEDIUM.name, 64, 1024, heads=16)
SIZES, KEYS = (16, 32, 64, 128, 256), 64  # queries of a tile, and its keys: those of tiles.cu
ERROR = 0.005  # of out in bfloat16, whose elements are below 1/2

# ---- compiled


def library(prefix: Path | None, cutlass: Path | None, out: Path) -> Path:
    """tiles.cu for this GPU, compiled where it was not yet."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        sys.exit("nvcc: not found; it comes with CUDA")
    include, shared = installed(prefix)
    capability = "{}{}".format(*torch.cuda.get_device_capability())
    command = [nvcc, "-shared", "-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    command += ["--expt-relaxed-constexpr", "--expt-extended-lambda"]
    command += [f"-gencode=arch=compute_{capability},code=sm_{capability}"]
    command += [f"-I{path}" for path in (include, include / "flashsdk/kernels", headers(cutlass))]
    # By its name: nvcc does not know what a file is whose name ends with a version.
    command += [str(SOURCE), f"-L{shared.parent}", f"-Xlinker=-l:{shared.name}"]
    command += [f"-Xlinker=-rpath={shared.parent}"]
    made_of = hashlib.sha256("\n".join([*command, SOURCE.read_text()]).encode())
    made_of.update(shared.read_bytes())  # another flashsdk has other headers as well
    made = (out / f"libtiles-{made_of.hexdigest()[:16]}.so").resolve()
    if not made.exists():
        print("compiling tiles.cu: about a minute", file=sys.stderr)

        def compiled(path: Path) -> None:
            done = subprocess.run([*command, "-o", path], capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.splitlines() or [f"nvcc: {done.returncode}"]
                sys.exit(next((x for x in lines if "error" in x or "fatal" in x), lines[-1]))

        common.write(made, compiled)
    return made


def installed(prefix: Path | None) -> tuple[Path, Path]:
    """The folder of flashsdk's headers, and its shared library."""
    if prefix is not None:
        prefix = prefix.resolve()
        return prefix / "include", prefix / "lib" / "libflashsdk.so"
    command = [sys.executable, "-m", "flashsdk", "config"]
    found = []
    for option in ("--include", "--library"):
        done = subprocess.run([*command, option], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stderr.strip()}; or --prefix")
        found.append(Path(done.stdout.strip()))
    return found[0], found[1]


def headers(cutlass: Path | None) -> Path:
    """CUTLASS's include folder."""
    package = importlib.util.find_spec("cutlass_library")
    root, places = SOURCE.parents[2], []
    if cutlass:
        places.append(cutlass)
    else:
        places.append(root / "third_party" / "cutlass" / "cutlass")
        if package and package.origin:
            places.append(Path(package.origin).parent / "source")
        places += sorted(root.glob("build/*/cutlass/cutlass_library/source"))
    for place in places:
        if (place / "include" / "cutlass").is_dir():
            return place / "include"
    sys.exit(f"CUTLASS: no include/cutlass in {', '.join(map(str, places))}; --cutlass")


# ---- run


class Tiles:
    """The kernels of all sizes, on one problem."""

    def __init__(self, path: Path, problem: Problem):
        self.door, self.problem = ctypes.CDLL(str(path)), problem
        self.door.tiles_forward.restype = ctypes.c_char_p
        sizes = tuple(self.door.tiles_queries(i) for i in range(self.door.tiles_count()))
        assert (sizes, self.door.tiles_keys()) == (SIZES, KEYS), "tiles.cu has other tiles"
        shape = (problem.batch, problem.seqlen, problem.heads, problem.head_dim)
        generator = torch.Generator("cuda").manual_seed(0)
        self.qkv = [
            torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(3)
        ]
        self.out = torch.empty_like(self.qkv[0])
        self.lse = torch.empty(problem.batch, problem.heads, problem.seqlen, device="cuda")

    def forward(self, size: int) -> Tensor:
        tensors = (*self.qkv, self.out, self.lse)
        wrong = self.door.tiles_forward(
            SIZES.index(size),
            (ctypes.c_void_p * 5)(*(x.data_ptr() for x in tensors)),
            self.problem.batch,
            self.problem.seqlen,
            self.problem.heads,
            self.out.device.index,
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if wrong:
            raise RuntimeError(f"{size} queries: {wrong.decode()}")
        return self.out

    def error(self, size: int) -> float:
        """The largest of the first and the last sequence, by the definition in float64."""
        self.out.fill_(torch.nan)
        out = self.forward(size)
        largest = 0.0
        for b in (0, -1):
            q, k, v = (x[b].transpose(0, 1).double() for x in self.qkv)
            want = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
            apart = (out[b].transpose(0, 1).double() - want).abs().max().item()
            largest = max(largest, apart) if apart == apart else float("inf")
        return largest


def counted(size: int, device: str) -> Row:
    """Bytes that the tiles read from L2, and that memory moves."""
    shapes = traffic.shapes(PROBLEM)
    asked = traffic.asked(io.tiled_forward(shapes, (size, KEYS)))
    moved = io.tiled_forward(shapes, (size, KEYS), cache=traffic.cache(device)).total
    return {"asked_of_l2": asked, "moved": moved}


def child(path: Path) -> None:
    """Every size once, behind a mark, under ncu."""
    tiles = Tiles(path, PROBLEM)
    for size in SIZES:
        tiles.forward(size)
        traffic.marked(partial(tiles.forward, size))
    print(traffic.DONE, flush=True)


def measure(record: Record, path: Path, clock: Clock, out: Path) -> None:
    tiles = Tiles(path, PROBLEM)
    for size in SIZES:
        if (error := tiles.error(size)) > ERROR:
            sys.exit(f"{size} queries: out is {error:.3g} from the definition, above {ERROR}")
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(5):
        for size in SIZES:
            times[size] += common.measure(partial(tiles.forward, size), "cuda", seconds=0.1)
    seen: list[Row] = []
    if (ncu := traffic.profiler()) and not clock.over(reserve=5):
        program = [__file__, "--child", str(path)]
        seen = traffic.measured(ncu, program, len(SIZES), out / "ncu.log", clock)
    if not seen and any(row.get("l2") for row in record.rows):
        print("as it was: the record has counters, which this run could not read", file=sys.stderr)
        return
    record.rows.clear()
    for size, counters in zip(SIZES, seen or [{} for _ in SIZES]):
        row: Row = {"queries": size, "keys": KEYS, **counted(size, "cuda")}
        row["seconds"] = statistics.median(times[size])
        record.row(**row, **traffic.seen_of(counters))
        print(
            f"{size:4} queries: {1e6 * row['seconds']:7.1f} us, {row['asked_of_l2'] / 1e6:.0f} MB"
        )


def summary(rows: list[Row]) -> str:
    first, last = rows[0], rows[-1]
    asked = first["asked_of_l2"] / last["asked_of_l2"]
    text = f"tiles of {last['queries']} in place of {first['queries']} queries read {asked:.1f}× "
    text += "fewer bytes from L2 by the counts"
    if last.get("received"):
        text += f", {first['received'] / last['received']:.1f}× by the counter"
    if last.get("seconds"):
        best = min(rows, key=lambda row: row["seconds"])
        text += f"; {first['seconds'] / last['seconds']:.2f}× as fast"
        if best is not last:
            faster = first["seconds"] / best["seconds"]
            text += f", and {faster:.2f}× with {best['queries']}, the fastest"
    return text


def picture(rows: list[Row], path: Path) -> None:
    shown = {"bytes, counted": "asked_of_l2", "bytes, received": "received", "time": "seconds"}
    sizes = [row["queries"] for row in rows]
    common.plot(
        path,
        {
            name: (sizes, [row[key] / rows[0][key] for row in rows])
            for name, key in shown.items()
            if rows[0].get(key)
        },
        title=f"{PROBLEM.name}'s attention, forward, beside tiles of {sizes[0]} queries",
        x="queries of a tile",
        y="share",
        log="xy",
    )


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--prefix", type=Path, help="where cmake --install put flashsdk")
    parser.add_argument("--cutlass", type=Path, help="a checkout of CUTLASS")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    clock = Clock(options.minutes)
    out = common.folder(options.out, "tiles", options.smoke)
    settings = {"device": common.device_name(options.device)}
    record = Record.of(options, out, "tiles", settings)
    if torch.device(options.device).type == "cuda" and not options.smoke:
        measure(record, library(options.prefix, options.cutlass, out), clock, out)
    else:
        print("the counts alone", file=sys.stderr)
        record.rows.clear()
        for size in SIZES:
            record.row(queries=size, keys=KEYS, **counted(size, options.device))
    record.result["summary"] = summary(record.rows)
    print(record.result["summary"])
    record.save()
    picture(record.rows, out / "tiles.png")


if __name__ == "__main__":
    common.entry(main)
