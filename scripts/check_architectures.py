"""Compiles files of GPU kernels for cards that nobody here has, and reads what ptxas says of them.

    python scripts/check_architectures.py [--architectures 86 89 100 103 120] [FILE...] [-- -D...]

FILE: names in build/architectures/generated/cuda, without .cu. Behind --: options of CMake, such as
FLASHSDK_CUTLASS_DIR. Needs nvcc, no GPU. A line a file and architecture: kernels, the most
registers of a thread, the most bytes that one spills, and of static shared memory. What a launch
asks for beside that is a tile's, which tests/cpp/test_small_gpus.cpp holds against the cards.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "architectures"
# The smallest and largest tiles of each kind, those for 99 KiB of shared memory among them.
FILES = (
    "sm80_forward_d64_16x16",
    "sm80_few_rows_forward_d256_16x32",
    "sm80_fp8_split_forward_d256_16x64",
    "sm80_split_forward_d64_64x128",
    "sm80_forward_d256_64x64",
    "sm80_backward_d256_16x32",
    "sm80_backward_d128_64x128",
    "sm80_forward_d576x512_16x16",
    "sm80_backward_d512_16x16",
    "sm80_fp8_forward_d256_64x32",
)
KERNEL = re.compile(
    r"for '(sm_\w+)'\n(?:.*\n){1,3}?"
    r".*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*Used (\d+) registers(.*)"
)


def read(printed: str) -> dict[str, list[tuple[int, int, int]]]:
    """Of each architecture its kernels: registers, bytes spilled, bytes of static shared memory."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for architecture, _, stores, loads, registers, rest in KERNEL.findall(printed):
        shared = re.search(r"(\d+) bytes smem", rest)
        spilled = max(int(stores), int(loads))
        kernel = int(registers), spilled, int(shared[1]) if shared else 0
        found.setdefault(architecture, []).append(kernel)
    return found


def compiled(file: str) -> str:
    """What the compiler prints of a file, which is compiled anew."""
    name = f"CMakeFiles/flashsdk_cuda.dir/generated/cuda/{file}.cu.o"
    (BUILD / name).unlink(missing_ok=True)
    command = ["cmake", "--build", BUILD, "-j1", "--target", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    return done.stdout


def main() -> None:
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--architectures", nargs="+", default=["86", "89", "100", "103", "120"])
    parser.add_argument("files", nargs="*", default=FILES, metavar="FILE")
    args = parser.parse_args(given[:end])
    architectures = ";".join(f"{a}-real" for a in args.architectures)
    options = [f"-DCMAKE_CUDA_ARCHITECTURES={architectures}", "-DFLASHSDK_CUDA=ON"]
    options += ["-DFLASHSDK_BUILD_TORCH=OFF", "-DFLASHSDK_CPU_ISAS=portable"]
    options += ["-DFLASHSDK_CUDA_DTYPES=bfloat16", *given[end + 1 :]]  # float16 is much the same
    configure = ["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "--log-level=WARNING", *options]
    subprocess.run(configure, check=True)
    for file in args.files:
        found = read(compiled(file))
        missing = {f"sm_{a}" for a in args.architectures} - set(found)
        assert not missing, f"{file}: nothing of {missing}"
        for architecture, kernels in found.items():
            registers, spilled, shared = (max(values) for values in zip(*kernels))
            print(
                f"{file} {architecture}: {len(kernels)} kernels, {registers} registers, "
                f"{spilled} bytes spilled, {shared} bytes of static shared memory",
                flush=True,
            )


if __name__ == "__main__":
    main()
