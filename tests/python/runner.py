"""Runs problems on one backend. An instruction set is chosen when the library loads, so each has
a process of its own, which computes; the reference is computed here, once for all of them.
"""

import faulthandler
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import flashsdk as fs
import numpy as np
import pytest
from flashsdk._testing import verify
from flashsdk._testing.problems import DTYPES, Problem, inputs


@dataclass(frozen=True)
class Target:
    backend: str
    isa: str = ""  # CPU instruction set
    missing: str = ""  # why it cannot run here

    @property
    def name(self) -> str:
        parts = (self.backend, self.isa, self.missing.replace(" ", "_"))
        return "-".join(part for part in parts if part)


def isas() -> list[str]:
    """The CPU instruction sets of this build that this machine has, slowest first."""
    here = {k["arch"] for k in fs.kernels() if k["backend"] == "cpu" and k["available"]}
    return [isa for isa in fs.build_info()["cpu_isas"] if isa in here]


def targets() -> list[Target]:
    gpus = [Target(backend, missing=_missing(backend)) for backend in ("sm80", "sm90")]
    reasons = {gpu.missing for gpu in gpus}
    if len(reasons) == 1 and "" not in reasons:
        gpus = [Target("gpu", missing=reasons.pop())]  # once is enough to say so
    return [Target("cpu", isa) for isa in isas()] + gpus


def _missing(backend: str) -> str:
    if not fs.build_info()["cuda"]:
        return "built without CUDA"
    if not any(kernel["backend"] == backend for kernel in fs.kernels()):
        return "no such kernels"
    try:
        import torch
    except ImportError:
        return "no PyTorch to make arrays"
    if not torch.cuda.is_available():
        return "no GPU"
    available = any(k["available"] for k in fs.kernels() if k["backend"] == backend)
    return "" if available else "not for this GPU"


class Runner:
    _open: ClassVar[dict[Target, "Runner"]] = {}

    def __init__(self, target: Target):
        self.target = target
        self.backend = target.backend
        self.dtypes = DTYPES["cpu" if target.backend == "cpu" else "gpu"]
        self.process: subprocess.Popen[bytes] | None = None
        self.ran = self.refused = 0  # problems of the test at hand

    @classmethod
    def of(cls, target: Target) -> "Runner":
        return cls._open.setdefault(target, cls(target))

    @classmethod
    def close_all(cls) -> None:
        for runner in cls._open.values():
            runner.close()

    def check(self, problem: Problem) -> None:
        """Fails unless every output is as close to the reference as its rounding allows.

        A GPU backend may refuse a problem; conftest.py says what becomes of tests of which it
        refused all.
        """
        report = self.report(problem)
        assert report.ok, report

    def report(self, problem: Problem) -> verify.Report:
        if self.backend != "cpu":
            report = verify.check(problem, self.backend)
            if report.refused:
                self.refused += 1
            else:
                self.ran += 1
            return report
        return _report(serving(self.target.isa, problem.dtype), pickle.dumps(problem))

    def call(self, function: str, *args: Any, **keywords: Any) -> Any:
        """What flashsdk.<function> returns for these arrays here, as NumPy arrays."""
        if self.backend != "cpu":
            return _on_gpu(self.backend, function, args, keywords)
        answer = self.ask(("call", function, args, keywords))
        assert not isinstance(answer, str), answer
        return answer

    def ask(self, question: Any) -> Any:
        """What the process with this instruction set answers, or how it failed."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "FLASHSDK_CPU_ISA": self.target.isa},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        try:
            pickle.dump(question, self.process.stdin)
            self.process.stdin.flush()
            return pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError):
            code = self.process.wait()
            self.process = None
            return f"the process died with {code} (a signal, where negative)"

    def close(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def _on_gpu(backend: str, function: str, args: Any, keywords: Any) -> list[np.ndarray]:
    def give(x: Any) -> Any:
        given = isinstance(x, np.ndarray)
        return verify.to_torch(np.ascontiguousarray(x), "cuda") if given else x

    try:
        answer = getattr(fs, function)(
            *map(give, args), **{k: give(v) for k, v in keywords.items()}, backend=backend
        )
    except fs.Error as e:
        if backend != "sm90" or e.code != "unsupported":
            raise
        pytest.skip(f"{backend}: {e}")
    return [verify.from_torch(x) for x in answer]


@functools.cache
def serving(isa: str, dtype: str) -> str:
    """The instruction set whose kernels calls of this dtype take: where one adds nothing for it
    (cpp/kernels/table/cpu.h), a slower one's. test_isas.py holds the library to it.
    """
    has = {k["arch"] for k in fs.kernels() if k["backend"] == "cpu" and k["dtype"] == dtype}
    slower = isas()[: isas().index(isa) + 1]
    return next(other for other in reversed(slower) if other in has)


# Both are larger than any test has problems: instruction sets share them.
@functools.lru_cache(maxsize=64)
def _report(isa: str, pickled: bytes) -> verify.Report:
    problem = pickle.loads(pickled)
    results = Runner.of(Target("cpu", isa)).ask(("problem", problem))
    assert isinstance(results, verify.Results), f"{problem}\n{results}"
    return verify.compare(problem, "cpu", results, _expected(pickled))


@functools.lru_cache(maxsize=64)
def _expected(pickled: bytes) -> verify.Expected:
    problem = pickle.loads(pickled)
    return verify.expected(problem, inputs(problem))


def answers(questions: Iterator[Any]) -> Iterator[Any]:
    for question in questions:
        faulthandler.dump_traceback_later(120, exit=True)  # no test waits for ever
        try:
            match question:
                case "isa":
                    yield fs.build_info()["cpu_isa"]
                case ("call", function, args, keywords):
                    yield getattr(fs, function)(*args, **keywords)
                case ("problem", problem):
                    yield verify.run(problem, inputs(problem), "cpu")
        except Exception as e:  # the test that asked shows it
            yield f"{type(e).__name__}: {e}"
        faulthandler.cancel_dump_traceback_later()


def _questions() -> Iterator[Any]:
    while True:
        try:
            yield pickle.load(sys.stdin.buffer)
        except EOFError:
            return


if __name__ == "__main__":
    reply = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up between the answers
    for answer in answers(_questions()):
        pickle.dump(answer, reply)
        reply.flush()
