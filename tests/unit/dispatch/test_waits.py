"""The account of what requests wait for."""

import pytest

from maitred.core.flow import FlowLevel
from maitred.core.request import WaitCause
from maitred.dispatch.policy.waits import WaitAccount

ACME, OTHER = FlowLevel("acme"), FlowLevel("other", 2.0)


def test_the_head_waits_for_places_and_the_others_for_their_turn():
    account = WaitAccount()
    mine, theirs = account.join(ACME, 0.0), account.join(OTHER, 0.0)
    account.set_blocked_head(0.0, ("acme", WaitCause.SLOTS))
    account.set_blocked_head(1.0, ("acme", WaitCause.KV_FULL))
    account.set_blocked_head(3.0, ("other", WaitCause.SLOTS))
    assert account.leave(mine, 4.0) == {
        "slots": pytest.approx(1000),
        "kv_full": pytest.approx(2000),
        "tenant_share": pytest.approx(1000),
    }
    assert account.weight == 2.0
    assert account.leave(theirs, 6.0) == {"slots": pytest.approx(3000), "tenant_share": pytest.approx(3000)}
    assert len(account) == 0
    assert account.weight == 0.0


def test_only_what_came_after_it_joined_counts():
    account = WaitAccount()
    account.join(ACME, 0.0)
    account.set_blocked_head(0.0, ("acme", WaitCause.SLOTS))
    late = account.join(ACME, 5.0)
    account.set_blocked_head(6.0, None)
    assert account.leave(late, 6.0) == {"slots": pytest.approx(1000)}
    assert account.has_waiting("acme")


def test_a_cold_start_is_everybodys():
    account = WaitAccount()
    mine = account.join(ACME, 0.0)
    account.set_blocked_head(0.0, ("", WaitCause.COLD_START))
    theirs = account.join(OTHER, 1.0)
    account.set_blocked_head(3.0, None)
    assert account.leave(mine, 3.0) == {"cold_start": pytest.approx(3000)}
    assert account.leave(theirs, 3.0) == {"cold_start": pytest.approx(2000)}


def test_who_does_not_wait_has_no_causes():
    account = WaitAccount()
    assert account.leave(account.join(ACME, 5.0), 5.0) == {}
