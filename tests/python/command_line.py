"""The command line as a process, for the tests of it."""

import signal
import subprocess
import sys

import pytest
from flashsdk._commands import machine

PNG = b"\x89PNG"
has_matplotlib = pytest.mark.skipif(
    machine.version("matplotlib") is None, reason="matplotlib is not installed"
)


def start(*args: str, **kwargs) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flashsdk", *args]
    pipe = subprocess.PIPE

    def take_ctrl_c() -> None:  # which jobs in the background of a shell ignore, and their children
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, preexec_fn=take_ctrl_c, **kwargs
    )


def run(*args: str, code: int = 0, **kwargs) -> str:
    """Output of a command that must end with `code`; of errors what it says about them."""
    process = start(*args, **kwargs)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out if code in (0, 1) else err
