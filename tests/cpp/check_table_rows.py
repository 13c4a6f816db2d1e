"""Fails when a broken row of the kernel tables compiles, or when the message does not name it.

    python check_table_rows.py SOURCES COMPILER [FLAG...]

Each copy of cpp/kernels/table has broken rows ahead of the others of a table, so that no case is
about what a row says today. Of what the compiler says, the row's values have to be a part, and its
first error the reason (table/check.h). Tables without a change compile.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# A file of cpp/kernels, and where in it something is put.
SM80 = "table/sm80.h", "kSm80Forward[] = {"
SM80_FP8_SPLIT = "table/sm80.h", "kSm80Fp8SplitForward[] = {"
SM80_FP8 = "table/sm80.h", "kSm80Fp8Forward[] = {"
SM80_BACKWARD = "table/sm80.h", "kSm80Backward[] = {"
SM90 = "table/sm90.h", "kSm90Forward[] = {"
SM90_BACKWARD = "table/sm90.h", "kSm90Backward[] = {"
CPU = "table/cpu.h", "kCpuHeadDims[] = {"
CPU_HAS = "table/cpu.h", "cpu_has(int head_dim, Features features) {"
CHOICE = "sm90/forward/tiles.h", "choose_forward_tile(const ForwardShape& s) {"


def sm90_row(head_dim: int, tile: str, features: str = "kNone") -> str:
    stages = ".stages_k = 2, .stages_v = 2, .stages_q = 1"
    return (
        f"{{.head_dim = {head_dim}, .tile = {tile}, {stages}, .kernels = every_mask({features})}},"
    )


# Where, what is put there, the check with the values of its row, and the reason.
BROKEN = (
    (
        SM80,
        "{.head_dim = 64, .tile = {128, 120}, .warps = 4, .kernels = no_layout(kNone)},",
        "CheckedSm80Forward<{{64, 64}, {128, 120}, 4,",
        "tile.n: not a multiple of 16",
    ),
    (
        SM80,
        "{.head_dim = 192, .tile = {96, 64}, .warps = 4, .kernels = no_layout(kNone)},",
        "CheckedSm80Forward<{{192, 192}, {96, 64}, 4,",
        "tile.m: not a multiple of 16 rows a warp",
    ),
    (
        SM80,
        "{.head_dim = 64, .tile = {64, 80}, .warps = 4, .stages = 3, .kernels = no_layout(kNone)},",
        "CheckedSm80Forward<{{64, 64}, {64, 80}, 4, 3,",
        "stages: not 1 or 2",
    ),
    (
        SM80,
        "{.head_dim = 64, .tile = {64, 80}, .warps = 4, .kernels = no_layout(kCapped)},",
        "CheckedSm80Forward<{{64, 64}, {64, 80}, 4,",
        "kernels: a set of features that sm80 has no code for",
    ),
    (
        SM80,
        "{.head_dim = 64, .tile = {64, 80}, .warps = 4, .kernels = no_layout(kNone, kDropout)},"
        "{.head_dim = 64, .tile = {64, 80}, .warps = 2, .kernels = no_layout(kDropout)},",
        "CheckedAlone<{{64, 64}, {64, 80}, 2,",
        "tile: another row has it, with a set of features of this one",
    ),
    (
        SM80_FP8_SPLIT,
        "{{{.head_dim = 128, .tile = {16, 128}, .warps = 4, .stages = 4,"
        " .kernels = no_layout(kNone)}}},",
        "CheckedSm80FewRows<{{{{128, 128}, {16, 128}, 4, 4,",
        "stages: more shared memory than some GPUs have",
    ),
    (
        SM80_BACKWARD,
        "{.head_dim = 128, .tile = {64, 120}, .warps = 8, .warps_s = 4, .warps_dk = 4,"
        " .warps_dq = 2, .kernels = no_layout(kNone)},",
        "CheckedSm80Backward<{{128, 128}, {64, 120}, 8,",
        "tile: not a multiple of 16",
    ),
    (
        SM90,
        sm90_row(64, "{160, 128}"),
        "CheckedSm90Forward<{{64, 64}, {160, 128}, 2, 2,",
        "tile.m: not a multiple of 64 rows a warpgroup",
    ),
    (
        SM90,
        sm90_row(256, "{128, 128}"),
        "CheckedSm90Forward<{{256, 256}, {128, 128}, 2, 2,",
        "stages: more shared memory than a CTA has",
    ),
    (
        SM90,
        sm90_row(64, "{256, 128}"),
        "CheckedSm90Forward<{{64, 64}, {256, 128}, 2, 2,",
        "tile.m: more warpgroups than there are registers for",
    ),
    (
        SM90,
        sm90_row(128, "{192, 128}"),
        "CheckedSm90Forward<{{128, 128}, {192, 128}, 2, 2,",
        "tile: S, P and the output fill a thread's registers",
    ),
    (
        SM90,
        sm90_row(256, "{128, 48}", "kCapped"),
        "CheckedSm90Forward<{{256, 256}, {128, 48}, 2, 2,",
        "tile.n: dropout is drawn for 32 keys at once",
    ),
    (
        SM90,
        sm90_row(256, "{128, 48}"),
        "CheckedSm90Forward<{{256, 256}, {128, 48}, 2, 2,",
        "tile: choose_forward_tile() gives it to no call",
    ),
    (
        CHOICE,
        "if (s.head_dim.qk == 120) return {128, 48};",
        "CheckedSm90Calls<120, 120>",
        "choose_forward_tile(): gives calls of these head_dims a tile that no row of theirs has",
    ),
    (  # head_dim 192 has such a row
        CHOICE,
        "if (s.head_dim.qk == 88) return {128, 64};",
        "CheckedSm90Calls<88, 88>",
        "choose_forward_tile(): gives calls of these head_dims a tile that no row of theirs has",
    ),
    (
        SM80_FP8,
        "{{.head_dim = 256, .tile = {64, 64}, .warps = 4, .kernels = no_layout(kNone)}}};"
        " inline constexpr Sm80Fp8Forward kOthers[] = {",
        "CheckedSm80Calls<256>",
        "kSm80Fp8Forward: no kernel for calls that no other takes",
    ),
    (
        SM80_BACKWARD,
        "{.head_dim = 128, .tile = {64, 128}, .warps = 8, .warps_s = 4, .warps_dk = 4,"
        " .warps_dq = 2, .kernels = no_layout(kNone)}};"
        " inline constexpr Sm80Backward kOthers[] = {",
        "CheckedSm80Calls<576>",
        "kSm80Backward: no kernel for calls that no other takes",
    ),
    (
        CPU_HAS,
        "if (head_dim > 256) return false;",
        "CheckedCpuHeadDim<576>",
        "head_dim: no kernel of it takes some calls",
    ),
    (
        SM90_BACKWARD,
        "{.head_dim = 96, .tile = {96, 128}, .stages_do = 2, .stages_k = 1,"
        " .kernels = every_mask(kNone)},",
        "CheckedSm90Backward<{{96, 96}, {96, 128}, 2,",
        "tile: not a multiple of 64",
    ),
    (
        CPU,
        "100, ",
        "CheckedCpuHeadDim<100>",
        "head_dim: not a multiple of 64",
    ),
    (
        CPU,
        "640, ",
        "CheckedCpuHeadDims<640, 128>",
        "head_dim: not larger than the one before",
    ),
)


def messages(compiler: list[str], sources: Path, copy: Path, *flags: str) -> str:
    """What the compiler says of a copy, with values of a struct as {…}; "" if it compiles."""
    program = copy / "tables.cpp"
    program.write_text('#include "table/check.h"\n')
    includes = [f"-I{path}" for path in (copy, sources / "include", sources / "kernels")]
    command = [*compiler, "-std=c++20", "-fsyntax-only", *flags, *includes, str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    # Compilers differ in which of their types they name.
    return re.sub(r"[\w:]+ ?(?=\{)", "", done.stderr) or f"exit status {done.returncode}"


def main() -> int:
    sources, compiler = Path(sys.argv[1]), sys.argv[2:]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("table", "sm90/forward"):
            shutil.copytree(sources / "kernels" / part, copy / part)
        if text := messages(compiler, sources, copy):
            print(f"tables without a change do not compile:\n{text}")
            return 1
        for (name, place), put, row, reason in BROKEN:
            file = copy / name
            good = file.read_text("utf-8")
            assert place in good, f"{name} has no {place}"
            file.write_text(good.replace(place, f"{place}\n{put}", 1), "utf-8")
            # Most say all with the first error, long before the rest of the tables is checked.
            text = messages(compiler, sources, copy, "-Wfatal-errors")
            if row not in text:
                text = messages(compiler, sources, copy)
            file.write_text(good, "utf-8")
            first = next((line for line in text.splitlines() if "error:" in line), "")
            for part, where in ((row, text), (reason, first)):
                if part not in where:
                    wrong += 1
                    print(f"{name}, {put}: no word of {part} in:\n{where or 'it compiles'}\n")
    print(f"{len(BROKEN)} broken tables, {wrong} messages that lack something")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
