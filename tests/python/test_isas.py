"""FLASHSDK_CPU_ISA and FLASHSDK_NUM_THREADS, read when the library loads."""

import os
import subprocess
import sys

import flashsdk as fs
import numpy as np
import pytest
from cases import CPU_DTYPES
from flashsdk._testing.problems import numpy_dtype
from runner import Runner, Target, isas, serving

# Slowest first, on each architecture.
KNOWN = ("portable", "neon", "neon_bf16", "avx2", "avx512", "avx512_bf16", "avx512_amx")
CALL = "x = np.ones((1, 3, 1, 8), np.float32); fs.mha_fwd(x, x, x)"
THREADS = "print(fs.get_num_threads(), len(os.sched_getaffinity(0)))"


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    env = {
        k: v for k, v in os.environ.items() if k not in ("FLASHSDK_NUM_THREADS", "OMP_NUM_THREADS")
    }
    code = f"import os, numpy as np, flashsdk as fs\n{code}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**env, **environment}, capture_output=True, text=True)


def test_instruction_sets_are_known():
    built = fs.build_info()["cpu_isas"]
    assert built == [isa for isa in KNOWN if isa in built]
    assert "portable" in isas()


def test_one_of_the_fastest_is_chosen():
    """Not always the last: avx512_bf16 is no gain on every processor."""
    done = python("print(fs.build_info()['cpu_isa'])", FLASHSDK_CPU_ISA="")
    assert done.stdout.strip() in isas()[-2:]
    assert len(isas()) == 1 or done.stdout.strip() != "portable"


@pytest.mark.parametrize("isa", isas())
def test_forced(isa):
    assert Runner.of(Target("cpu", isa)).ask("isa") == isa


@pytest.mark.parametrize("op", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("isa", isas())
def test_whose_kernels_are_taken(isa, dtype, op):
    x = np.ones((1, 3, 1, 8), numpy_dtype(dtype))
    taken = Runner.of(Target("cpu", isa)).call("explain", x, x, x, op=op)
    assert taken.kernel.startswith(f"cpu_{serving(isa, dtype)}_"), taken


@pytest.mark.parametrize("isa", ["sse9", "AVX2", *(isa for isa in KNOWN if isa not in isas())])
def test_unknown_or_unsupported(isa):
    """One line, at the first use at the latest."""
    done = python(CALL, FLASHSDK_CPU_ISA=isa)
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert "FLASHSDK_CPU_ISA" in line
    assert isa in line
    assert all(known in line for known in isas())


@pytest.mark.parametrize("threads", ["1", "3"])
def test_number_of_threads(threads):
    assert python(THREADS, FLASHSDK_NUM_THREADS=threads).stdout.split()[0] == threads


def test_number_of_threads_is_that_of_the_processors():
    """Those this process may run on; a control group may allow fewer."""
    got, have = map(int, python(THREADS).stdout.split())
    assert 1 <= got <= have
    one = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    assert python(one + THREADS).stdout.split() == ["1", "1"]


@pytest.mark.parametrize("threads", ["0", "-1", "two", "3x", "2.5", "4097", "9" * 99, "1\n2"])
def test_no_number_of_threads(threads):
    done = python(CALL, FLASHSDK_NUM_THREADS=threads)
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("flashsdk._errors.InvalidArgument: FLASHSDK_NUM_THREADS: ")
    assert line.endswith("; 1 to 4096")


def test_empty_number_of_threads_is_not_given():
    assert python(THREADS, FLASHSDK_NUM_THREADS="").stdout == python(THREADS).stdout


@pytest.mark.parametrize("threads", ["0", "two"])
def test_number_of_threads_of_others_may_be_anything(threads):
    assert python(THREADS, OMP_NUM_THREADS=threads).stdout == python(THREADS).stdout
    assert python(THREADS, OMP_NUM_THREADS="1,4").stdout.split()[0] == "1"
