"""Fails where the kernels' functions do not lie by size in the library (cmake/LinkOrder.cmake).

    python check_link_order.py [--nm NM] LIBRARY

Wheels are a quarter larger without that order, and nothing else would tell.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nm", default="nm")
    parser.add_argument("library")
    arguments = parser.parse_args()
    command = [arguments.nm, "--defined-only", "--print-size", "--numeric-sort", arguments.library]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    kernels = [row for row in rows if len(row) == 4 and "8flashsdk3cpu" in row[3]]
    sizes = [int(size, 16) for _, size, kind, _ in kernels if kind in "tTwW"]
    if len(sizes) < 50:
        sys.exit(f"{arguments.library}: {len(sizes)} functions of kernels; symbols are needed")
    # Some share a section with others, and lie ahead. In the order of their objects it is a half.
    rising = sum(a <= b for a, b in itertools.pairwise(sizes))
    print(f"{rising} of {len(sizes)} functions are no larger than the next one")
    return int(rising < 0.8 * len(sizes))


if __name__ == "__main__":
    sys.exit(main())
