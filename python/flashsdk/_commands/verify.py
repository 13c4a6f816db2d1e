"""``verify``: random problems against the float64 reference until a time or a count is reached."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field

import flashsdk as fs
from flashsdk._commands import INTERRUPTED
from flashsdk._commands.progress import Progress
from flashsdk._errors import InvalidArgument, Unsupported
from flashsdk._testing.problems import generate
from flashsdk._testing.verify import Report, check

DEFAULT_SECONDS = 30.0


@dataclass
class Tally:
    problems: Counter[str] = field(default_factory=Counter)  # by dtype
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    # Largest error as a part of what is allowed, and where.
    closest: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        if report.refused:
            self.refused[report.refused] += 1
            return
        self.problems[report.problem.dtype] += 1
        for name, (error, limit) in report.errors.items():
            part = (error / limit if limit else 0.0, report.problem.seed)
            self.closest[name] = max(part, self.closest.get(name, part))

    @property
    def count(self) -> int:
        return sum(self.problems.values())

    def describe(self, seconds: float) -> str:
        count = self.count
        dtypes = ", ".join(f"{n} {dtype}" for dtype, n in sorted(self.problems.items()))
        lines = [
            f"{count} problem{'s' * (count != 1)} in {seconds:.0f} s"
            + (f": {dtypes}" if dtypes else "")
        ]
        if self.closest:
            parts = [f"{name} {part:.0%}" for name, (part, _) in self.closest.items()]
            lines.append(f"largest error as a part of what is allowed: {', '.join(parts)}")
        lines += [f"{n} not run: {why}" for why, n in self.refused.items()]
        return "\n".join(lines)


def run(
    *,
    seconds: float | None,
    count: int | None,
    seed: int | None,
    first_seed: int | None = None,
    backend: str,
    framework: str | None,
) -> int:
    """0 when nothing was found, 1 at the first failure, 2 if none ran, 130 after Ctrl-C."""
    check_backend(backend, framework)
    if seed is not None:
        for option, value in (("count", count), ("seconds", seconds), ("first-seed", first_seed)):
            if value is not None:
                raise InvalidArgument(
                    f"--{option}: {value}; none with --seed, which is one problem"
                )
        return repeat(seed, backend, framework)
    if seconds is None and count is None:
        seconds = DEFAULT_SECONDS
    first = secrets.randbelow(1 << 31) if first_seed is None else first_seed
    where = f"{backend}, {fs.build_info()['cpu_isa']}" if backend == "cpu" else backend
    print(f"random problems on {where}, from seed {first} on", flush=True)
    tally, failure, interrupted = Tally(), None, False
    start = time.monotonic()
    try:
        with Progress("verify", float(count or seconds or 0)) as progress:
            for done in range(count) if count is not None else itertools.count():
                elapsed = time.monotonic() - start
                if seconds is not None and elapsed >= seconds:
                    break
                so_far = f"{tally.count} problems, none failed"
                progress.update(elapsed if count is None else done, so_far)
                report = attempt(first + done, backend, framework)
                if not report.ok:
                    failure = report
                    break
                tally.add(report)
    except KeyboardInterrupt:
        interrupted = True
    print(tally.describe(time.monotonic() - start))
    if failure is not None:
        print(f"FAILED: {failure}")
        return 1
    if interrupted:
        print("stopped by Ctrl-C; no failure until then")
        return INTERRUPTED
    if not tally.problems:
        raise Unsupported("problems: none was run; at least one, to verify anything")
    print("no failure")
    return 0


def check_backend(backend: str, framework: str | None) -> None:
    """A GPU backend needs a kernel that runs here, and arrays on a GPU, which NumPy's never are."""
    if backend == "cpu":
        return
    if framework == "numpy":
        raise InvalidArgument(f"--framework: numpy; torch, as --backend is {backend}")
    kernels = [kernel for kernel in fs.kernels() if kernel["backend"] == backend]
    if not any(kernel["available"] for kernel in kernels):
        why = "no GPU here runs it" if kernels else "this build has no such kernels"
        raise Unsupported(f"--backend: {backend}; cpu, as {why}")


def repeat(seed: int, backend: str, framework: str | None) -> int:
    """One problem, with all that there is to say about it."""
    report = attempt(seed, backend, framework)
    print(report)
    for name, (error, limit) in report.errors.items():
        print(f"  {name}: largest error {error:.2e}, allowed {limit:.2e}")
    if report.refused:
        raise Unsupported(f"--seed: {seed}, not run as {report.refused}; one that can be run")
    print("passed" if report.ok else "FAILED")
    return 0 if report.ok else 1


def attempt(seed: int, backend: str, framework: str | None) -> Report:
    """A call that raises is a failure like a wrong number, and reported in the same way."""
    problem = generate(seed, backend)
    try:
        return check(problem, backend, framework)
    except ModuleNotFoundError as e:
        why = f"{e.name} is not installed (pip install {e.name})"
        return Report(problem, backend, [], {}, refused=why)
    except Exception as e:
        return Report(problem, backend, [f"{type(e).__name__}: {e}"], {})
