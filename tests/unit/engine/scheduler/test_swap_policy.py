import math
from types import SimpleNamespace

import pytest

from maitred.core.replica import StepTimes
from maitred.engine.scheduler.victims import SwapPolicy

MEASURED = StepTimes(token_s=0.001)


def sequence(computed):
    return SimpleNamespace(computed=computed, table=SimpleNamespace(block_tokens=16))


@pytest.mark.parametrize(
    ("block_copy_s", "times", "computed", "pays"),
    [
        (0.007, MEASURED, 160, True),  # 14 ms there and back for what takes 16 ms to compute
        (0.009, MEASURED, 160, False),
        (0.009, StepTimes(token_s=0.001, pair_s=1e-4), 160, True),  # late tokens attend to more
        (0.0, MEASURED, 15, False),  # no whole block
        (0.001, StepTimes(), 160, False),  # nothing was measured yet
        (math.inf, MEASURED, 160, False),
    ],
)
def test_what_is_faster(block_copy_s, times, computed, pays):
    assert SwapPolicy(block_copy_s, lambda: times).pays(sequence(computed)) is pays
