"""Where results go: checked before the work, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from flashsdk._errors import InvalidArgument


def writable_folder(option: str, folder: Path) -> Path:
    """Makes it where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InvalidArgument(
            f"{option}: {str(folder)!r}; a folder that can be made ({e.strerror})"
        ) from e
    if not os.access(folder, os.W_OK):
        raise InvalidArgument(f"{option}: {str(folder)!r}; a folder that may be written to")
    return folder


def writable_file(option: str, path: Path) -> Path:
    writable_folder(option, path.parent)
    if path.is_dir():
        raise InvalidArgument(f"{option}: {str(path)!r}, a folder; a file")
    return path
