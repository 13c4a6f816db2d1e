"""Random problems over the product of all features: flashsdk._problems says which."""

import pytest
from flashsdk._problems import generate

SEEDS = 240


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_problem(runner, seed):
    runner.check(generate(seed, runner.backend))
