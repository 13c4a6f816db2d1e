"""``import flash_attn`` without flash-attn: somebody else's code by flashsdk's kernels.

    from flashsdk.integrations import flash_attn
    flash_attn.install()  # before the code that imports flash_attn

On a CPU and on a GPU, in float32 as well, and with the gradients of flashsdk.torch. ``uninstall()``
takes it away again. Both are of this process alone: another has to call ``install()`` itself.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from .._errors import InvalidArgument

__all__ = ["install", "uninstall"]

_NAME = "flash_attn"
_FOLDER = Path(__file__).with_name("_flash_attn_package")
_ANY = importlib.metadata.DistributionFinder.Context()
_replaced: dict[str, ModuleType] = {}  # modules of the real one that were loaded


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata knows of an installed flash-attn."""

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        if filename == "METADATA":
            version = sys.modules[_NAME].__version__
            return f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {version}\n"
        return f"{_NAME}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return _FOLDER.parent / path


class _Finder(importlib.metadata.DistributionFinder, MetaPathFinder):
    """Finds the metadata; modules are found by the path of the package that is installed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _ANY
    ) -> Iterable[importlib.metadata.Distribution]:
        wanted = None if context.name is None else context.name.lower().replace("-", "_")
        return [_Distribution()] if wanted in (None, _NAME) else []


_finder = _Finder()


def install(force: bool = False) -> ModuleType:
    """Makes ``import flash_attn`` find flashsdk, and returns that module.

    It has flash-attn 2.8's functions, ``flash_attn_interface``, ``bert_padding``,
    ``layers.rotary`` and ``__version__``; importlib.metadata knows it as flash-attn. Other parts,
    such as ``flash_attn.ops``, are not there. Calling this again changes nothing.

    Raises ``Error`` where flash-attn itself is installed, unless ``force`` is True: then it is out
    of sight for imports from now on, until ``uninstall()``.
    """
    if _finder in sys.meta_path:
        return sys.modules[_NAME]
    if not force and (found := _real()):
        raise InvalidArgument(f"{_NAME}: {found} is installed; uninstall it, or pass force=True")
    for name in _modules():
        _replaced[name] = sys.modules.pop(name)
    spec = importlib.util.spec_from_file_location(
        _NAME, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        _restore()
        raise
    sys.meta_path.insert(0, _finder)
    return module


def uninstall() -> None:
    """Undoes ``install()``; what was imported meanwhile keeps working. Else it does nothing."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        _restore()


def _real() -> str:
    """The flash-attn that is installed, as a text; empty if there is none."""
    try:
        return f"flash-attn {importlib.metadata.version('flash-attn')}"
    except importlib.metadata.PackageNotFoundError:
        pass
    if _NAME in sys.modules:
        place = getattr(sys.modules[_NAME], "__file__", None)
    elif spec := importlib.util.find_spec(_NAME):
        place = spec.origin
    else:
        return ""
    return f"a module {_NAME}{f' ({place})' if place else ''}"


def _modules() -> list[str]:
    return [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]


def _restore() -> None:
    for name in _modules():
        del sys.modules[name]
    sys.modules.update(_replaced)
    _replaced.clear()
