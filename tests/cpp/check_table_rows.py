"""Fails when a broken row of the kernel tables compiles, or when the message does not name it.

    python check_table_rows.py SOURCES COMPILER [FLAG...]

Each copy of cpp/kernels/table has one change. Of what the compiler says, the row's values have to
be a part, and the reason (table/check.h). Tables without a change compile.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# File, what of it changes to what, the check with the values of its row, and the reason.
BROKEN = (
    (
        "sm80.h",
        "{.head_dim = 64, .tile = {128, 128}, .warps = 4,",
        "{.head_dim = 64, .tile = {128, 120}, .warps = 4,",
        "CheckedSm80Forward<{{64, 64}, {128, 120}, 4,",
        "tile.n: not a multiple of 16",
    ),
    (
        "sm80.h",
        "{.head_dim = 192, .tile = {64, 64}, .warps = 4,",
        "{.head_dim = 192, .tile = {96, 64}, .warps = 4,",
        "CheckedSm80Forward<{{192, 192}, {96, 64}, 4,",
        "tile.m: not a multiple of 16 rows a warp",
    ),
    (
        "sm80.h",
        "{.head_dim = 64, .tile = {64, 128}, .warps = 4, .stages = 2",
        "{.head_dim = 64, .tile = {64, 128}, .warps = 4, .stages = 3",
        "CheckedSm80Forward<{{64, 64}, {64, 128}, 4, 3,",
        "stages: not 1 or 2",
    ),
    (
        "sm80.h",
        ".kernels = no_layout(kNone, kDropout, kAlibi)",
        ".kernels = no_layout(kNone, kCapped, kAlibi)",
        "CheckedSm80Forward<{{64, 64}, {128, 128}, 4,",
        "kernels: a set of features that sm80 has no code for",
    ),
    (
        "sm80.h",
        "{.head_dim = 64, .tile = {128, 64}, .warps = 4, .kernels = kernels_for(kDense, kAll)}",
        "{.head_dim = 64, .tile = {128, 128}, .warps = 4, .kernels = no_layout(kDropout)}",
        "CheckedAlone<{{64, 64}, {128, 128}, 4,",
        "tile: another row has it, with a set of features of this one",
    ),
    (
        "sm80.h",
        "{{.head_dim = 128, .tile = {16, 128}, .warps = 4, .stages = 2,",
        "{{.head_dim = 128, .tile = {16, 128}, .warps = 4, .stages = 4,",
        "CheckedSm80Fp8SplitForward<{{{128, 128}, {16, 128}, 4, 4,",
        "stages: more shared memory than some GPUs have",
    ),
    (
        "sm80.h",
        "{.head_dim = 128, .tile = {64, 128}, .warps = 8,",
        "{.head_dim = 128, .tile = {64, 120}, .warps = 8,",
        "CheckedSm80Backward<{{128, 128}, {64, 120}, 8,",
        "tile: not a multiple of 16",
    ),
    (
        "sm90.h",
        "{.head_dim = 64, .tile = {192, 128}, .stages_k = 4, .stages_v = 4,",
        "{.head_dim = 64, .tile = {160, 128}, .stages_k = 4, .stages_v = 4,",
        "CheckedSm90Forward<{{64, 64}, {160, 128}, 4, 4,",
        "tile.m: not a multiple of 64 rows a warpgroup",
    ),
    (
        "sm90.h",
        "{.head_dim = 128, .tile = {128, 128}, .stages_k = 3, .stages_v = 2,",
        "{.head_dim = 128, .tile = {128, 128}, .stages_k = 3, .stages_v = 3,",
        "CheckedSm90Forward<{{128, 128}, {128, 128}, 3, 3,",
        "stages: more shared memory than a CTA has",
    ),
    (
        "sm90.h",
        "{.head_dim = 256, .tile = {128, 80},",
        "{.head_dim = 256, .tile = {128, 48},",
        "CheckedSm90Forward<{{256, 256}, {128, 48},",
        "tile: choose_forward_tile() gives it to no call",
    ),
    (
        "sm90.h",
        "{.head_dim = 256, .tile = {128, 80},",
        "{.head_dim = 256, .tile = {128, 48},",
        "CheckedSm90Calls<256, 256>",
        "choose_forward_tile(): gives calls of these head_dims a tile that no row has",
    ),
    (
        "sm80.h",
        "{{.head_dim = 256, .tile = {16, 16},",
        "{{.head_dim = 256, .tile = {16, 32},",
        "CheckedSm80Calls<256>",
        "kSm80Fp8Forward: no kernel for calls that no other takes",
    ),
    (
        "sm80.h",
        "{.head_dim = 512, .tile = {16, 16}, .warps = 4,",
        "{.head_dim = 512, .tile = {64, 16}, .warps = 4,",
        "CheckedSm80Calls<576>",
        "kSm80Backward: no kernel for calls that no other takes",
    ),
    (
        "cpu.h",
        "return head_dim <= 256 || features == kAll;",
        "return head_dim <= 256;",
        "CheckedCpuHeadDim<576>",
        "head_dim: no kernel of it takes some calls",
    ),
    (
        "sm90.h",
        "{.head_dim = 96, .tile = {64, 128}, .stages_do = 2,",
        "{.head_dim = 96, .tile = {96, 128}, .stages_do = 2,",
        "CheckedSm90Backward<{{96, 96}, {96, 128}, 2,",
        "tile: not a multiple of 64",
    ),
    (
        "cpu.h",
        "kCpuHeadDims[] = {128, 256, 576}",
        "kCpuHeadDims[] = {128, 200, 576}",
        "CheckedCpuHeadDim<200>",
        "head_dim: not a multiple of 64",
    ),
    (
        "cpu.h",
        "kCpuHeadDims[] = {128, 256, 576}",
        "kCpuHeadDims[] = {256, 128, 576}",
        "CheckedCpuHeadDims<256, 128>",
        "head_dim: not larger than the one before",
    ),
)


def messages(compiler: list[str], sources: Path, tables: Path) -> str:
    """What the compiler says of these tables, with values of a struct as {…}; "" if it compiles."""
    program = tables.parent / "tables.cpp"
    program.write_text('#include "table/check.h"\n')
    includes = [f"-I{path}" for path in (tables.parent, sources / "include", sources / "kernels")]
    command = [*compiler, "-std=c++20", "-fsyntax-only", *includes, str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    # Compilers differ in which of their types they name.
    return re.sub(r"[\w:]+ ?(?=\{)", "", done.stderr) or f"exit status {done.returncode}"


def main() -> int:
    sources, compiler = Path(sys.argv[1]), sys.argv[2:]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        tables = Path(folder) / "table"
        shutil.copytree(sources / "kernels" / "table", tables)
        if text := messages(compiler, sources, tables):
            print(f"tables without a change do not compile:\n{text}")
            return 1
        for file, old, new, row, reason in BROKEN:
            good = (tables / file).read_text("utf-8")
            assert old in good, f"{file} has no {old}"
            (tables / file).write_text(good.replace(old, new, 1), "utf-8")
            text = messages(compiler, sources, tables)
            (tables / file).write_text(good, "utf-8")
            for part in (row, reason):
                if part not in text:
                    wrong += 1
                    print(f"{file}, {new}: no word of {part} in:\n{text or 'it compiles'}\n")
    print(f"{len(BROKEN)} broken tables, {wrong} messages that lack something")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
