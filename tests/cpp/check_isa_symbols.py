"""Fails when code for one instruction set could run on a machine that does not have it.

    python check_isa_symbols.py [--nm NM] ISA OBJECT...

The linker keeps one definition of each weak symbol (inline functions, templates). Were that the
AVX-512 version of, say, std::vector's growth, a machine without AVX-512 would crash in code that
has nothing to do with kernels. Symbols inside the instruction set's own namespace are safe: nobody
else defines them. Static initialisers would run on every machine, so there must be none either.
"""

from __future__ import annotations

import argparse
import subprocess
import sys


def dangerous_symbols(nm: str, isa: str, path: str) -> list[str]:
    listing = subprocess.run(
        [nm, "--defined-only", path], check=True, capture_output=True, text=True
    )
    own = f"{len(isa)}{isa}"  # how the Itanium ABI spells a namespace
    found = []
    for line in listing.stdout.splitlines():
        *_, kind, symbol = line.split()
        if kind in "WVu" and own not in symbol:
            found.append(f"weak symbol outside namespace {isa}: {symbol}")
        if symbol.startswith(("_GLOBAL__sub_I", "_Z41__static_initialization")):
            found.append(f"static initialiser: {symbol}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nm", default="nm")
    parser.add_argument("isa")
    parser.add_argument("objects", nargs="+")
    arguments = parser.parse_args()
    failed = False
    for path in arguments.objects:
        for problem in dangerous_symbols(arguments.nm, arguments.isa, path):
            print(f"{path}: {problem}")
            failed = True
    if not failed:
        print(
            f"{arguments.isa}: no weak symbols or initialisers in {len(arguments.objects)} objects"
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
