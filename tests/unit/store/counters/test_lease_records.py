"""What a gateway can tell Redis again."""

from maitred.core.counters import CounterKind, CounterState, LimitClaim, Reservation
from maitred.store.counters.lease_records import LATE_SETTLE_S, TOTAL_RETENTION_S, LeaseRecords

BUDGET = LimitClaim("day", CounterKind.BUDGET, 1000, 10, per_output=2, ends_s=5000.0)
POOL = LimitClaim("pool", CounterKind.POOL, 10, 1)


def held_by(lease="a", now_s=0.0, *, reported=True, local=False):
    holdings = LeaseRecords()
    holdings.add(Reservation(lease, [BUDGET, POOL], 50, 1, 30.0), 40, now_s, reported=reported, from_slice=local)
    return holdings


def test_a_lease_is_reported_as_it_was_granted():
    assert held_by().leases["a"].to_entries() == [("day", "budget", 90, 0.0, 5000.0), ("pool", "pool", 1, 0.0, 0.0)]


def test_all_leases_are_reported_again_after_redis_was_away():
    holdings = held_by()
    assert holdings.unreported_leases(10) == []
    holdings.add(Reservation("b", [POOL], 0, 0, 30.0), 0, 0.0, reported=False, from_slice=True)
    assert holdings.unreported_leases(10) == ["b"]
    holdings.mark_unreported()
    assert holdings.unreported_leases(10) == ["a", "b"]
    assert holdings.unreported_leases(1) == ["a"]


def test_renewing_revives_nothing():
    holdings = held_by()
    holdings.renew(["a", "never-made"], 30.0, 20.0)
    assert holdings.leases["a"].expires_s == 50.0
    holdings.renew(["a"], 30.0, 50.0)
    assert holdings.leases["a"].expires_s == 50.0


def test_an_expired_lease_returns_to_the_slices_once_and_is_forgotten_late():
    holdings = held_by(local=True)
    assert holdings.expire(29.0) == []
    assert holdings.expire(30.0) == [holdings.leases["a"]]
    assert holdings.expire(31.0) == []
    assert "a" in holdings.leases
    holdings.expire(30.0 + LATE_SETTLE_S)
    assert holdings.leases == {}


def test_unreported_leases_are_not_forgotten():
    holdings = held_by(reported=False, local=True)
    holdings.expire(30.0 + 10 * LATE_SETTLE_S)
    assert holdings.unreported_leases(10) == ["a"]


def test_totals_never_go_backwards():
    holdings = LeaseRecords()
    assert holdings.last_total("day") == -1
    claims = [POOL, BUDGET]
    holdings.observe_states(claims, [CounterState(10, 9, 0.0, used=1), CounterState(1000, 900, 0.0, used=100)], 0.0)
    holdings.observe_states(claims, [CounterState(10, 9, 0.0, used=1), CounterState(1000, 910, 0.0, used=90)], 1.0)
    holdings.update_totals({"day": 120, "never-seen": 5})
    assert holdings.totals() == [("day", 120, 5000.0)]
    holdings.forget_totals(TOTAL_RETENTION_S)
    assert holdings.last_total("day") == 120
    holdings.forget_totals(TOTAL_RETENTION_S + 1.0)
    assert holdings.last_total("day") == -1
