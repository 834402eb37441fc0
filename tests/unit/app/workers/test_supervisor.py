"""When the processes of a gateway are started again."""

import pytest

from maitred.app.workers.supervisor import restart_delay_s


@pytest.mark.parametrize("deaths", [1, 5, 1000])
def test_who_has_lived_for_a_while_is_started_again_at_once(deaths):
    assert restart_delay_s(deaths, lived_s=5.0) == 0.0


def test_who_dies_at_every_start_is_started_ever_more_seldom():
    waits = [restart_delay_s(deaths, lived_s=0.0) for deaths in range(1, 20)]
    assert waits == sorted(waits)
    assert 0.0 < waits[0] < 0.5
    assert waits[-1] == 5.0


def test_it_is_the_starts_that_are_kept_apart():
    """What a start has taken is not waited for on top of it."""
    assert restart_delay_s(20, lived_s=1.5) == 3.5
