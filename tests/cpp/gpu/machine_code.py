"""What ptxas made of each kernel: registers, tensor core instructions, local memory, by its place.

python machine_code.py LIBRARY [--jobs N] [--against OLD.csv] > kernels.csv

`code` is a hash of a kernel's machine code. With --against it names, on stderr, the kernels whose
code is not that of an earlier list, and exits with 1 if there are any: a step that should change no
kernel shows so.

Reads a library or extension with cuobjdump. Kernels are those that compute, and the joins of split
forwards, not the first and last passes of a backward, which have no products; one that two files
hold is there twice. Instructions are counted in all and, as `loop_…`, in the main loops: the
innermost loops with instructions of the tensor cores. `local` are loads from and stores to local
memory, where registers are spilled to. A loop is what its back edge closes, an edge to a block that
dominates the one it leaves (Aho, Sethi, Ullman, Compilers, 10.4). By addresses alone nearly all of
a kernel would be one, as ptxas puts the blocks that spin on a barrier behind all others.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNEL = re.compile(r"flashsdk.*(?:forward|backward|backward_cluster|join_parts)_kernel")
NAMED_BY = ("backend", "op", "dtype", "head_dim", "mask", "features", "tile", "more", "arch")
TENSOR_CORES = ("HGMMA", "HMMA")
COUNTED = {"hgmma": ("HGMMA",), "hmma": ("HMMA",), "local": ("LDL", "STL")}
POLICY = {
    "11DensePolicy": "dense",
    "10BandPolicy": "band",
    "17BlockSparsePolicy": "block_sparse",
}
# Of Features in features.h; another set is a KeyError.
FEATURES = {
    0: "none", 1: "dropout", 3: "capped", 4: "bias", 5: "bias and dropout", 8: "alibi", 15: "all"
}  # fmt: skip
# Traits that the build names (write_sources.cpp): head_dim, block_m, block_n.
NAMED = re.compile(r"Traits_sm90_forward_[a-z]+16_d(\d+(?:x\d+)?)_[A-Za-z]+_(\d+)x(\d+)")
# Of keys of another type than queries: bytes.
FP8_FEW_ROWS = re.compile(r"FewRowsTraitsIN7cutlass\d+[a-z]+\d*_tEh")


def described(name: str) -> dict[str, str]:
    """What a mangled name says: sm90, forward, bf16, 128, all masks, none, 128x128 and so on."""
    if "join_parts_kernel" in name:
        op = "join of a split forward"
    elif "8KeySplit" in name:
        op = "split forward"
    else:
        op = "forward" if "forward_kernel" in name else "backward"
    backend = "sm90" if "4sm90" in name else "sm80"
    fp8 = "Fp8" in name or FP8_FEW_ROWS.search(name)
    if named := NAMED.search(name):
        head_dim, m, n = named.groups()
        rest = []
    else:  # arguments of the traits: head_dim, maybe head_dim_v, block_m, block_n
        head_dim, *numbers = re.findall(r"L[ib](\d+)E", name.partition("Traits")[2])
        has_v = backend == "sm90" or "WideForwardTraits" in name
        if has_v and (head_dim_v := numbers.pop(0)) != head_dim:
            head_dim += f"x{head_dim_v}"
        m, n, *rest = numbers
        if "FewRowsTraits" in name:  # whose tile is that of a warp, which the next number counts
            n = str(int(n) * int(rest[0]))
    features = FEATURES[int(re.findall(r"FeaturesE(\d+)E", name)[0])]
    if backend == "sm90" and re.search(r"FeaturesE\d+ELb1E", name):
        features += " packed"  # the backward has kernels of its own for packed sequences
    return {
        "backend": backend,
        "op": op,
        "dtype": ("bf16" if "bfloat16" in name else "fp16") + (" fp8kv" if fp8 else ""),
        "head_dim": head_dim,
        "mask": next((short for long, short in POLICY.items() if long in name), "all masks"),
        "features": features,
        "tile": f"{m}x{n}",
        "more": "_".join(rest),  # of sm80's traits: warps, stages and so on, as in table/sm80.h
    }


@dataclass(frozen=True)
class Instruction:
    address: int
    predicated: bool
    op: str
    operands: str

    @classmethod
    def all_of(cls, text: str) -> list[Instruction]:
        line = r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)([^;]*);"
        found = re.findall(line, text, re.M)
        return [cls(int(at, 16), bool(when), op, operands) for at, when, op, operands in found]

    def is_of(self, kinds: tuple[str, ...]) -> bool:
        return self.op.partition(".")[0] in kinds

    def always_jumps(self) -> bool:
        """Not by a predicate of its own or among its operands, nor by whether lanes differ."""
        bare = not self.predicated and not re.search(r"\bU?P\d", self.operands)
        return self.is_of(JUMPS) and bare and self.op not in ("BRA.DIV", "BRA.CONV")

    def target(self) -> int | None:
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(found[1], 16) if found else None


JUMPS = ("BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "BSYNC", "EXIT", "RET")


class Code:
    """A kernel's blocks, which of them follow which, and its loops."""

    def __init__(self, instructions: list[Instruction]):
        self.instructions = instructions
        at = {x.address: i for i, x in enumerate(instructions)}
        meets = reconvergence(instructions)

        def places(x: Instruction) -> list[int]:
            """Those of a jump's targets that are told: a jump by a table has none here."""
            target = meets.get(x.address) if x.is_of(("BSYNC",)) else x.target()
            return [at[target]] if x.is_of(("BRA", "JMP", "BSYNC")) and target in at else []

        leaders = {0}
        for i, x in enumerate(instructions):
            if x.is_of(JUMPS):
                leaders |= {i + 1, *places(x)}
        first = sorted(i for i in leaders if i < len(instructions))
        self.blocks = list(itertools.pairwise([*first, len(instructions)]))
        block = {start: n for n, start in enumerate(first)}
        self.next: list[list[int]] = []
        for _, end in self.blocks:
            last = instructions[end - 1]
            follow = places(last)
            if not last.always_jumps() and end < len(instructions):
                follow.append(end)
            self.next.append(sorted({block[i] for i in follow}))

    @functools.cached_property
    def order(self) -> list[int]:
        """The blocks that are reached, each before those that follow it but for loops."""
        order: list[int] = []
        seen = {0}
        stack: list[tuple[int, Iterator[int]]] = [(0, iter(self.next[0]))]
        while stack:  # depth first, by hand: kernels have thousands of blocks
            here, rest = stack[-1]
            step = next((n for n in rest if n not in seen), None)
            if step is None:
                order.append(here)
                stack.pop()
            else:
                seen.add(step)
                stack.append((step, iter(self.next[step])))
        return order[::-1]

    def loops(self) -> list[set[int]]:
        """The blocks of each, those of one header together."""
        order = self.order
        place = {n: i for i, n in enumerate(order)}
        before: dict[int, list[int]] = {n: [] for n in order}
        for n in order:
            for m in self.next[n]:
                before[m].append(n)
        above = {0: 0}  # immediate dominators: Cooper, Harvey, Kennedy 2001

        def meet(a: int, b: int) -> int:
            while a != b:
                while place[a] > place[b]:
                    a = above[a]
                while place[b] > place[a]:
                    b = above[b]
            return a

        changed = True
        while changed:
            changed = False
            for n in order[1:]:
                known = [m for m in before[n] if m in above]
                found = known[0]
                for m in known[1:]:
                    found = meet(found, m)
                if above.get(n) != found:
                    above[n], changed = found, True
        loops: dict[int, set[int]] = {}
        for n in order:
            for header in self.next[n]:
                if place[header] <= place[n] and meet(header, n) == header:
                    loops.setdefault(header, {header})
                    todo = [n]
                    while todo:
                        m = todo.pop()
                        if m not in loops[header]:
                            loops[header].add(m)
                            todo += before[m]
        return list(loops.values())

    def blocks_with(self, kinds: tuple[str, ...]) -> dict[int, int]:
        """How many such instructions each block has that has any."""
        found: dict[int, int] = {}
        for n, (start, end) in enumerate(self.blocks):
            if count := sum(x.is_of(kinds) for x in self.instructions[start:end]):
                found[n] = count
        return found

    def main_loops(self) -> set[int]:
        """The blocks of the innermost loops with instructions of the tensor cores."""
        tensor = set(self.blocks_with(TENSOR_CORES))
        busy = [loop for loop in self.loops() if loop & tensor]
        inner = [loop for loop in busy if not any(other < loop for other in busy)]
        return set().union(*inner)


def reconvergence(instructions: list[Instruction]) -> dict[int, int]:
    """Where each BSYNC goes on: what the last BSSY of its barrier before it says."""
    said: dict[str, int] = {}
    found = {}
    for x in instructions:
        barrier = re.match(r"\s*(B\d+)", x.operands)
        if x.is_of(("BSSY",)) and barrier and (target := x.target()) is not None:
            said[barrier[1]] = target
        elif x.is_of(("BSYNC",)) and barrier and barrier[1] in said:
            found[x.address] = said[barrier[1]]
    return found


def counted(code: Code) -> dict[str, int]:
    """Instructions in all, and of the main loops.

    Jumps by a table (BRX, BRXU) do not say where they lead. What only they reach has no part in a
    loop, which would be wrong if it held instructions of the tensor cores.
    """
    main = code.main_loops()
    if unseen := set(code.blocks_with(TENSOR_CORES)) - set(code.order):
        places = ", ".join(hex(code.instructions[code.blocks[n][0]].address) for n in unseen)
        raise ValueError(f"tensor cores at {places}, which no jump that can be read leads to")
    found = {name: code.blocks_with(kinds) for name, kinds in COUNTED.items()}
    sizes = {"instructions": {n: end - start for n, (start, end) in enumerate(code.blocks)}}
    both = {**sizes, **found}.items()
    in_all = {name: sum(blocks.values()) for name, blocks in both}
    in_loops = {f"loop_{name}": sum(blocks.get(n, 0) for n in main) for name, blocks in both}
    return in_all | in_loops


def kernels_of(cubin: Path) -> list[dict[str, Any]]:
    arch = re.findall(r"sm_\w+", cubin.name)[-1]
    usage = cuobjdump("-res-usage", str(cubin))
    used = {
        name: {"registers": registers, "stack_bytes": stack}
        for name, registers, stack in re.findall(
            r"Function (\S+?):\s+REG:(\d+) STACK:(\d+) ", usage
        )
    }
    kernels = []
    for part in cuobjdump("-sass", str(cubin)).split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        name = name.strip()
        if KERNEL.search(name):
            code = Code(Instruction.all_of(body))
            kernels.append(
                {
                    **described(name), "arch": arch, **used[name], **counted(code),
                    "code": hash_of(body),
                }
            )  # fmt: skip
    return kernels


def hash_of(listing: str) -> str:
    """Of the encoded instructions of cuobjdump's listing."""
    encoded = re.findall(r"/\* (0x[0-9a-f]{16}) \*/", listing)
    return hashlib.sha256("".join(encoded).encode()).hexdigest()[:16]


def changed(kernels: list[dict[str, Any]], old: list[dict[str, str]]) -> list[str]:
    """Kernels that both lists have, with other code."""

    def codes(kernels: list[Any]) -> dict[str, list[str]]:
        by_name: dict[str, list[str]] = {}
        for kernel in kernels:
            name = " ".join(str(kernel[field]) for field in NAMED_BY)
            by_name.setdefault(name, []).append(kernel["code"])
        return by_name

    before = codes(old)
    if not before.keys() & codes(kernels).keys():
        sys.exit("machine_code: the lists have no kernel in common")
    return [n for n, c in codes(kernels).items() if n in before and sorted(c) != sorted(before[n])]


def cuobjdump(*arguments: str, cwd: str | None = None) -> str:
    """What it prints; it is taken from the path, else from where the toolkit is."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "cuobjdump")
    command = [shutil.which("cuobjdump") or str(toolkit), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--against", type=Path, metavar="OLD.csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        cuobjdump("-xelf", "all", str(args.library.resolve()), cwd=folder)
        cubins = sorted(Path(folder).glob("*.cubin"))
        kernels = [kernel for found in pool.map(kernels_of, cubins) for kernel in found]
    if not kernels:
        sys.exit(f"machine_code: {args.library} has no kernels of flashsdk")
    kernels.sort(key=lambda kernel: [str(value) for value in kernel.values()])
    writer = csv.DictWriter(sys.stdout, list(kernels[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(kernels)
    if args.against:
        with args.against.open(newline="") as file:
            other = changed(kernels, list(csv.DictReader(file)))
        sys.exit("".join(f"machine_code: changed: {name}\n" for name in other) or 0)


if __name__ == "__main__":
    main()
