"""Random problems over the product of all features: flashsdk._problems says which."""

import pytest
from flashsdk._problems import generate
from flashsdk._verify import check

SEEDS = 240


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_problem(runner, seed):
    runner.check(generate(seed, runner.backend))


@pytest.mark.parametrize("seed", range(SEEDS, SEEDS + 30))
def test_random_problem_of_torch_tensors(seed):
    pytest.importorskip("torch")
    report = check(generate(seed), framework="torch")
    assert report.ok, report
