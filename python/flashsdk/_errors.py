"""The one exception of the package, and the check for whole numbers that most of it shares."""

from __future__ import annotations

import operator
from typing import Literal

Code = Literal["invalid_argument", "unsupported", "runtime"]


class Error(ValueError):
    """A call that was refused before anything ran: one line, "<argument>: <given>; <allowed>".

    ``code`` is "invalid_argument" (the value is wrong), "unsupported" (it is right, but nothing
    here can do it) or "runtime" (the machine failed).
    """

    code: Code

    def __init__(self, message: str, code: Code = "invalid_argument") -> None:
        super().__init__(message)
        self.code = code


def integer(
    name: str, value: object, minimum: int | None = None, *, allowed: str = "an integer"
) -> int:
    """``value`` as an int. NumPy's too; no bool, no float, none below ``minimum``."""
    if minimum is not None:
        allowed += f" >= {minimum}"
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
        else:
            if minimum is None or number >= minimum:
                return number
    raise Error(f"{name}: {value!r}; {allowed}")
