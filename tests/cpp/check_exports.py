"""Fails when libflashsdk.so shows other names than exported_symbols.txt has.

    python check_exports.py [--nm NM] [--write] LIBRARY LIST...

A name that is gone breaks programs that were linked before. One too many is the library's inside,
which then may meet another library's, and which somebody will call. --write makes the last list
anew. A build for GPUs has a second one: what kernels of one's own call.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

# As compilers and their libraries spell the same.
STRING = "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >"
SPELLINGS = {STRING: "std::string", "[abi:cxx11]": ""}


def exported(nm: str, library: str) -> set[str]:
    listing = subprocess.run(
        [nm, "--dynamic", "--demangle", "--defined-only", library],
        check=True,
        capture_output=True,
        text=True,
    )
    names = set()
    for line in listing.stdout.splitlines():
        name = line.split(maxsplit=2)[2]
        for spelling, plain in SPELLINGS.items():
            name = name.replace(spelling, plain)
        names.add(name)
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("library")
    parser.add_argument("lists", type=Path, nargs="+")
    arguments = parser.parse_args()
    there = exported(arguments.nm, arguments.library)
    *others, last = arguments.lists
    listed = {name for path in others for name in path.read_text().splitlines()}
    if arguments.write:
        last.write_text("".join(f"{name}\n" for name in sorted(there - listed)))
        return 0
    listed |= set(last.read_text().splitlines())
    for name in sorted(there - listed):
        print(f"{arguments.library}: shows {name}, which no list has")
    for name in sorted(listed - there):
        print(f"{arguments.library}: lacks {name}, which a list has")
    if there == listed:
        print(f"{len(there)} names, as listed")
    return there != listed


if __name__ == "__main__":
    sys.exit(main())
