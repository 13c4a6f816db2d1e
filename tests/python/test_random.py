"""Random problems over the product of all features: flashsdk._problems says which."""

from dataclasses import replace

import pytest
from flashsdk._testing.problems import generate
from flashsdk._testing.verify import check

SEEDS = 240
# One key, in whose dS all cancels: what is left is rounding, and which is a matter of luck.
CANCELLED = (733809567, 1538945808, 1006070809)
# One rounding of an lse decides the largest error of dv.
ONE_ROUNDING = (2089958439,)
# Dropout's scale shows a product that bf16 dot products flush.
FLUSHED = (1389971535,)
# Sums over 512 head dimensions in one chain err by more than sums in several.
LONG_SUM = (100284,)
# Equal scores, so that all of a row's P round alike: of the problems for GPUs.
ALIKE = (1840125146, 1634766893)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_problem(runner, seed):
    runner.check(generate(seed, runner.backend))


@pytest.mark.parametrize("seed", (*CANCELLED, *ONE_ROUNDING, *FLUSHED, *LONG_SUM, *ALIKE))
def test_problem_that_was_found(runner, seed):
    """Without what random problems have had since."""
    found = generate(seed, runner.backend)
    runner.check(replace(found, used_q=(), used_k=(), sink=False, fp8=None))


@pytest.mark.parametrize("seed", range(SEEDS, SEEDS + 30))
def test_random_problem_of_torch_tensors(seed):
    pytest.importorskip("torch")
    report = check(generate(seed), framework="torch")
    assert report.ok, report
