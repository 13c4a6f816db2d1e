"""FLASHSDK_CPU_ISA and FLASHSDK_NUM_THREADS, read when the library loads."""

import os
import subprocess
import sys

import flashsdk as fs
import pytest
from runner import Runner, Target

ISAS = ("portable", "avx2", "avx512", "avx512_bf16")


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_the_best_is_chosen():
    isas = fs.build_info()["cpu_isas"]
    assert isas
    assert set(isas) <= set(ISAS)
    done = python("import flashsdk as fs; print(fs.build_info()['cpu_isa'])", FLASHSDK_CPU_ISA="")
    assert done.stdout.strip() == max(isas, key=ISAS.index)


@pytest.mark.parametrize("isa", fs.build_info()["cpu_isas"])
def test_forced(isa):
    assert Runner.of(Target("cpu", isa)).ask("isa") == isa


@pytest.mark.parametrize(
    "isa", ["sse9", "AVX2", *(i for i in ISAS if i not in fs.build_info()["cpu_isas"])]
)
def test_unknown_or_unsupported(isa):
    """One clear line, at the first use at the latest."""
    code = "import numpy as np, flashsdk as fs; x = np.ones((1, 3, 1, 8), 'f'); fs.mha_fwd(x, x, x)"
    done = python(code, FLASHSDK_CPU_ISA=isa)
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert "FLASHSDK_CPU_ISA" in line
    assert isa in line
    assert all(known in line for known in fs.build_info()["cpu_isas"])


@pytest.mark.parametrize("threads", ["1", "3"])
def test_number_of_threads(threads):
    code = "import flashsdk as fs; print(fs.get_num_threads())"
    assert python(code, FLASHSDK_NUM_THREADS=threads).stdout.strip() == threads


def test_number_of_threads_is_that_of_the_processors():
    """Those this process may run on, not those of the machine."""
    code = "import os, flashsdk as fs; print(fs.get_num_threads(), len(os.sched_getaffinity(0)))"
    env = {k: v for k, v in os.environ.items() if k != "FLASHSDK_NUM_THREADS"}
    got, have = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    ).stdout.split()
    assert got == have
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});" + code
    assert subprocess.run(
        [sys.executable, "-c", one], env=env, capture_output=True, text=True
    ).stdout.split() == ["1", "1"]


@pytest.mark.parametrize("threads", ["0", "-1", "two", ""])
def test_bad_number_of_threads(threads):
    """Said in one line, or, when empty, taken as not given."""
    done = python(
        "import flashsdk as fs; print(fs.get_num_threads())", FLASHSDK_NUM_THREADS=threads
    )
    if threads:
        assert "FLASHSDK_NUM_THREADS" in done.stderr
    else:
        assert int(done.stdout) >= 1
