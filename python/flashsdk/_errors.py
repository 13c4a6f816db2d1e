"""The one exception of the package, and the checks of numbers that most of it shares."""

from __future__ import annotations

import operator
from typing import Any, Literal

import numpy as np

Code = Literal["invalid_argument", "unsupported", "runtime"]
REAL = "a number that float32 can hold"


class Error(ValueError):
    """A call that was refused before anything ran: one line, "<argument>: <given>; <allowed>".

    ``code`` is "invalid_argument" (the value is wrong), "unsupported" (it is right, but nothing
    here can do it) or "runtime" (the machine failed).
    """

    code: Code

    def __init__(self, message: str, code: Code = "invalid_argument") -> None:
        self.args = (message,)  # as ValueError does, whose __init__ torch.compile cannot trace
        self.code = code


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


def has(value: object, attribute: str) -> bool:
    """Whether it has one that is not None; whatever else asking for it raises, it has not."""
    try:
        return getattr(value, attribute, None) is not None
    except Exception:  # of the caller's type
        return False


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
        number = None if _no_number(value) else operator.index(value)  # type: ignore[arg-type]
    except Exception:  # of the caller's type
        number = None
    if number is not None:
        least, most = (number if limit is None else limit for limit in (minimum, maximum))
        if least <= number <= most:
            return number
    raise Error(f"{name}: {shown(value)}; {allowed}")


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
    raise Error(f"{name}: {shown(value)}; {allowed}")


def _no_number(value: object) -> bool:
    """A bool, also a tensor of one, which is an integer to ``operator.index``, or a masked one."""
    if isinstance(value, np.ma.MaskedArray):
        return bool(np.ma.is_masked(value))
    # NumPy's refuse bools themselves, and torch.compile cannot read their dtype.
    if isinstance(value, (int, np.generic, np.ndarray)):
        return isinstance(value, bool)
    return str(getattr(value, "dtype", "")).rpartition(".")[2] == "bool"  # torch.bool


def truth(name: str, value: object, *, allowed: str = "True or False") -> bool:
    """``value`` as a bool. NumPy's too; nothing that is merely true or false, as "no" is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise Error(f"{name}: {shown(value)}; {allowed}")
