"""Every kernel test runs on every backend, and on the CPU with every instruction set it has."""

import os
import sys

# The reference multiplies a row at a time: threads of NumPy would only be in the way. Read by NumPy
# when it loads, so it has to come first.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# PyTorch's threads spin while they wait, on processors that other workers need, which costs several
# times what they compute. They sleep instead, and are as many. Read by PyTorch when it loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# JAX takes most of a GPU's memory: what tests it there is a process of its own.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# scripts/test_gpu.py names the GPUs that its workers share. Read by CUDA when it starts.
if cards := os.environ.get("FLASHSDK_TEST_GPUS"):
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = cards.split(",")[worker % len(cards.split(","))]

import pytest
from runner import Runner, Target, targets


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """Where a test runs varies fastest: its references are computed once, see runner.py."""
    if "runner" in metafunc.fixturenames:
        metafunc.parametrize("runner", targets(), ids=lambda target: target.name, indirect=True)
    if "torch_way" in metafunc.fixturenames:
        metafunc.parametrize("torch_way", ("native", "python"), indirect=True)


@pytest.fixture
def runner(request) -> Runner:
    """Where a problem runs: `runner.check(problem)`."""
    target = request.param
    if target.missing:
        pytest.skip(target.missing)
    runner = Runner.of(target)
    runner.ran = runner.refused = 0
    return runner


@pytest.fixture
def cpu(runner) -> Runner:
    """The same, for what CPU kernels alone promise."""
    if runner.backend != "cpu":
        pytest.skip("promised by CPU kernels alone")
    return runner


@pytest.fixture(
    params=[target for target in targets() if target.backend != "cpu"],
    ids=lambda target: target.name,
)
def backend(request) -> str:
    """Of a GPU, for what its calls promise besides what a runner checks."""
    if request.param.missing:
        pytest.skip(request.param.missing)
    return request.param.backend


@pytest.fixture(
    params=[Target("cpu"), *(target for target in targets() if target.backend != "cpu")],
    ids=lambda target: target.name,
)
def place(request):
    """A CPU or a GPU's backend, for what only differs in where its tensors lie: a Place."""
    from gpu_cases import Place

    if request.param.missing:
        pytest.skip(request.param.missing)
    return Place.of(request.param.backend)


@pytest.fixture(autouse=True)
def seeded():
    """PyTorch's generator, where a test has PyTorch: its numbers do not depend on other tests."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def torch_way(request, monkeypatch) -> str:
    """The two ways of eager calls of flashsdk.torch: for tests of what both have to do."""
    from flashsdk import _flash_attn_func, _flash_attn_kvcache, _torch_eager
    from flashsdk.torch import _attention, _sdpa

    if request.param == "python":
        for module in (_attention, _sdpa, _flash_attn_func, _flash_attn_kvcache):
            monkeypatch.setattr(module, "native", _torch_eager.InPython)
    elif _torch_eager.native is _torch_eager.InPython:
        pytest.skip("flashsdk._torch_native is not built for this PyTorch")
    return str(request.param)


@pytest.fixture(params=("native", "python"))
def sdpa_way(request, monkeypatch) -> str:
    """The two ways of torch_sdpa.enable(): for tests of what both have to do."""
    from flashsdk.integrations import _sdpa_kernels, torch_sdpa

    if not torch_sdpa._REGISTRY:
        pytest.skip("torch_sdpa.enable() is for PyTorch 2.11 or newer")
    if request.param == "python":
        monkeypatch.setattr(torch_sdpa, "_kernels", _sdpa_kernels)
    elif torch_sdpa._kernels is _sdpa_kernels:
        pytest.skip("flashsdk._torch_native is not built for this PyTorch")
    return str(request.param)


@pytest.fixture(autouse=True)
def same_threads():
    """Leaves the number of threads as it was."""
    import flashsdk as fs

    threads = fs.get_num_threads()
    yield
    if fs.get_num_threads() != threads:  # once set, calls through PyTorch follow it no longer
        fs.set_num_threads(threads)


@pytest.fixture(autouse=True)
def errors_are_one_line(monkeypatch):
    """Every Error that a test expects, whatever else the test asks of it."""
    raises = pytest.raises

    def raises_one_line(expected, *args, **options):
        context = raises(expected, *args, **options)
        return context if args else Checked(context)

    monkeypatch.setattr(pytest, "raises", raises_one_line)


class Checked:
    """The context of ``pytest.raises``, and a look at the Error that it caught."""

    def __init__(self, context):
        self.context = context

    def __enter__(self):
        self.info = self.context.__enter__()
        return self.info

    def __exit__(self, *raised):
        from flashsdk import Error

        caught = self.context.__exit__(*raised)
        if caught and isinstance(self.info.value, Error):
            # Behind it stands what torch.fx of PyTorch 2.6 adds to errors of what it runs.
            line = str(self.info.value).partition("\n\nWhile executing ")[0]
            assert len(line.splitlines()) == 1, line
            assert ": " in line and "; " in line, line
        return caught


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A test has not passed if its backend refused all that it asked: sm80 must refuse nothing."""
    report = (yield).get_result()
    runner = getattr(item, "funcargs", {}).get("runner")
    if report.when == "call" and report.passed and runner and runner.refused and not runner.ran:
        reason = f"{runner.backend} refuses all of it"
        if runner.backend == "sm90":
            report.outcome, (file, line, _) = "skipped", item.location
            report.longrepr = (file, line, f"Skipped: {reason}")
        else:
            report.outcome, report.longrepr = "failed", reason


def pytest_sessionfinish() -> None:
    Runner.close_all()


def pytest_terminal_summary(terminalreporter) -> None:
    """Not a failure: a machine with a GPU has to renew the record."""
    from flashsdk._commands import gpu_record

    if why := gpu_record.staleness():
        terminalreporter.section("THE GPU KERNELS ARE NOT THOSE THAT WERE TESTED", yellow=True)
        terminalreporter.write_line(why)
