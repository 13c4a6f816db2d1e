"""The exceptions of the package, and the checks of numbers that most of it shares."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

Code = Literal["invalid_argument", "unsupported", "runtime"]
REAL = "a number that float32 can hold"
PROBABILITY = "a number, 0 <= dropout_p < 1"


class Error(ValueError):
    """A call that was refused before anything ran: one line, "<argument>: <given>; <allowed>".

    Every one is an ``InvalidArgument``, an ``Unsupported`` or a ``DeviceError``, and ``code`` says
    the same: "invalid_argument", "unsupported" or "runtime". All three are ValueErrors until 0.3.
    """

    code: Code = "invalid_argument"

    def __init__(self, message: str, code: Code | None = None) -> None:
        self.args = (message,)  # as ValueError does, whose __init__ torch.compile cannot trace
        # Of this class itself a message and a code make the one that the code says, for callers in
        # C++. Not by __new__, which torch.compile cannot trace either.
        if type(self) is Error:
            self.__class__ = _CLASSES[code or "invalid_argument"]

    @property
    def argument(self) -> str:
        """Name of the argument, or of the environment variable, that the call was refused for."""
        return str(self).partition(": ")[0]

    @property
    def given(self) -> str:
        """What was given, in words or as its repr."""
        return self._parts()[0]

    @property
    def allowed(self) -> str:
        """What is allowed, in words."""
        return self._parts()[1]

    def _parts(self) -> tuple[str, str]:
        rest = str(self).partition(": ")[2]
        if found := _GIVEN.match(rest):  # a text that was given may hold "; " itself
            return found[0], rest[found.end() + 2 :]
        given, _, allowed = rest.partition("; ")
        return given, allowed


# Up to the first "; " outside of quotes, which no word ends with: "query's 8" has none.
_QUOTED = r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_GIVEN = re.compile(rf"""(?:{_QUOTED}|(?<=\w)['"]|[^;'"]|;(?! ))*(?=; )""")


class InvalidArgument(Error):
    """The call can never work: a wrong shape, stride, dtype, device or value."""


class Unsupported(Error, NotImplementedError):
    """The call is right, but no kernel of this build, or nothing here, can do it."""

    code = "unsupported"


class DeviceError(Error, RuntimeError):
    """The machine failed: out of memory, or an error of CUDA. Outputs may hold anything."""

    code = "runtime"


_CLASSES: dict[Code, type[Error]] = {
    "invalid_argument": InvalidArgument,
    "unsupported": Unsupported,
    "runtime": DeviceError,
}


def renamed(error: Error, names: Mapping[str, str]) -> Error:
    """``error`` with the names that the arguments have for the caller."""
    argument, _, rest = str(error).partition(": ")
    rest = re.sub(r"\bq\b", names.get("q", "q"), rest)  # "the dtype of q"
    return type(error)(f"{names.get(argument, argument)}: {rest}")


def shown(value: object) -> str:
    """``value`` for a message: its repr on one line, of at most 80 characters.

    The extension asks here too; the library's own ``shown`` does the same for what it is given.
    """
    try:
        text = in_short(repr(value))
    except Exception:  # of the caller's type
        text = ""
    return text or f"a {type_name(value)}"


def type_name(value: object) -> str:
    """Of its type, for a message: "list", "torch.Tensor"."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return in_short(f"{module}{kind.__name__}")


def first_line(value: object) -> str:
    """The first line of ``str(value)``, for a message; the extension asks for it."""
    try:
        return in_short((str(value).splitlines() or [""])[0], 200)
    except Exception:  # of the caller's type
        return "(its text cannot be had)"


def in_short(text: str, longest: int = 80) -> str:
    """``text`` on one line, without what cannot be printed, of at most so many characters."""
    text = text[: 5 * longest]  # it may be the data of an array; spaces are to be joined
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def switch(name: str) -> bool:
    """An environment variable that turns something on."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise InvalidArgument(f"{name}: {in_short(value)}; 0 or 1")
    return value == "1"


def has(value: object, attribute: str) -> bool:
    """Whether it has one that is not None; whatever else asking for it raises, it has not."""
    try:
        return getattr(value, attribute, None) is not None
    except Exception:  # of the caller's type
        return False


def never() -> bool:
    return False


# Whether torch.compile is tracing: flashsdk.torch sets it.
tracing: Callable[[], bool] = never


def integer(
    name: str,
    value: object,
    minimum: int | None = None,
    maximum: int | None = None,
    *,
    allowed: str = "",
) -> int:
    """``value`` as an int. NumPy's too; no bool, no float, none outside of the two limits."""
    if not allowed:
        allowed = "an integer" if minimum is None else f"an integer >= {minimum}"
        allowed += "" if maximum is None else f", at most {maximum}"
    try:
        # Dynamo of PyTorch 2.11 knows item() of NumPy's numbers, and neither their index nor their
        # dtype; that of 2.15 does not know the index of what item() gave. Times and objects have an
        # item(), too.
        alone = isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0
        alone = alone and (tracing() or value.dtype.kind in "iu")  # type: ignore[attr-defined]
        plain: Any = value.item() if alone else value  # type: ignore[attr-defined]
        if _no_number(value) or _no_number(plain):
            number = None
        elif alone and isinstance(plain, int):
            number = int(plain)
        else:
            number = operator.index(plain)
    except Exception:  # of the caller's type
        number = None
    if number is not None:
        least, most = (number if limit is None else limit for limit in (minimum, maximum))
        if least <= number <= most:
            return number
    raise InvalidArgument(f"{name}: {shown(value)}; {allowed}")


def real(name: str, value: Any, *, allowed: str = REAL) -> float:
    """``value`` as a float. NumPy's too, and arrays of one number; no text, no bool, no time."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        kind = getattr(getattr(value, "dtype", None), "kind", None)
        if kind in ("m", "M") or isinstance(plain, (np.timedelta64, np.datetime64)):
            raise TypeError("a time is an integer, but no number without its unit")
        # Without either of the two, float() reads text, and buffers as such.
        reads = hasattr(plain, "__float__") or hasattr(plain, "__index__")
        if reads and not _no_number(plain) and not _no_number(value):
            return float(plain)
    except Exception:
        pass
    raise InvalidArgument(f"{name}: {shown(value)}; {allowed}")


def dtype_name(x: object) -> str:
    """The dtype of an array of any framework as NumPy says it, not torch.bool. "" of none."""
    return str(getattr(x, "dtype", "")).rpartition(".")[2]


def _no_number(value: object) -> bool:
    """A bool, also a tensor of one, which is an integer to ``operator.index``, or a masked one."""
    if isinstance(value, np.ma.MaskedArray):
        return bool(np.ma.is_masked(value))
    # NumPy 1.26 takes its own bools for integers, with a warning. torch.compile cannot read the
    # dtype of NumPy's numbers.
    if isinstance(value, (int, np.generic, np.ndarray)):
        return isinstance(value, (bool, np.bool_))
    return dtype_name(value) == "bool"


def truth(name: str, value: object, *, allowed: str = "True or False") -> bool:
    """``value`` as a bool. NumPy's too; nothing that is merely true or false, as "no" is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise InvalidArgument(f"{name}: {shown(value)}; {allowed}")
