"""``config``: where the files are that programs compile and link with, in C or otherwise."""

from __future__ import annotations

import shlex
from pathlib import Path

from flashsdk import _bindings
from flashsdk._errors import Unsupported

FOLDER = Path(_bindings.__file__).resolve().parent
LIBRARY = "libflashsdk.so." + ".".join(_bindings.__version__.split(".")[:2])

# Of each option: the file or folder, and what --help says.
PATHS = {
    "cmake": ("lib/cmake/flashsdk", "folder of flashsdkConfig.cmake: flashsdk_DIR"),
    "include": ("include", "folder of the headers"),
    "library": (f"lib/{LIBRARY}", "the shared library"),
    "pkgconfig": ("lib/pkgconfig", "folder of flashsdk.pc: PKG_CONFIG_PATH"),
    "torch-library": ("lib/libflashsdk_torch.so", "PyTorch's operators, where they were built"),
}
FLAGS = {
    "cflags": "flags of a compiler, for a shell",
    "libs": "flags of a linker, for a shell, with the folder as rpath",
}
OPTIONS = {**{option: text for option, (_, text) in PATHS.items()}, **FLAGS}


def run(options: list[str]) -> int:
    """Prints what each option names, on one line, in the order given."""
    print(*(flags(option) if option in FLAGS else path(option, option) for option in options))
    return 0


def flags(option: str) -> str:
    if option == "cflags":
        return shlex.quote(f"-I{path(option, 'include')}")
    folder = str(Path(path(option, "library")).parent)
    return shlex.join([f"-L{folder}", f"-Wl,-rpath,{folder}", f"-l:{LIBRARY}"])


def path(option: str, name: str) -> str:
    found = FOLDER / PATHS[name][0]
    if not found.exists():
        build = "a build with PyTorch" if name == "torch-library" else "one that pip has installed"
        raise Unsupported(f"--{option}: this flashsdk has no {found}; {build}")
    return str(found)
