from maitred.core.flow import Flow, FlowLevel
from maitred.engine.config import KVShareConfig
from maitred.engine.scheduler.kv_shares import KVShares


def flow(*path):
    return Flow(tuple(FlowLevel(name) for name in path))


def residency(total=100, **shares):
    return KVShares({name: KVShareConfig(floor=low, ceiling=high) for name, (low, high) in shares.items()}, total)


def test_without_shares_everything_idle_is_for_everybody():
    books = residency()
    assert books.available_blocks(flow("acme"), 60) == 60
    assert books.reserved_blocks(flow("acme"), 60) == 0
    assert books.most(flow("acme")) == 100


def test_others_leave_a_guaranteed_share_to_a_tenant_that_waits():
    books = residency(acme=(0.3, 1.0))
    assert books.available_blocks(flow("beta"), 100) == 100
    books.on_join(flow("acme"))
    assert books.available_blocks(flow("beta"), 100) == 70
    assert books.reserved_blocks(flow("beta"), 100) == 30
    assert books.available_blocks(flow("acme"), 100) == 100


def test_a_guaranteed_share_that_nobody_waits_for_is_lent():
    books = residency(acme=(0.3, 1.0))
    books.on_join(flow("acme"))
    books.on_dequeue(flow("acme"))
    assert books.available_blocks(flow("beta"), 100) == 100


def test_a_guaranteed_share_that_is_used_reserves_nothing_more():
    books = residency(acme=(0.3, 1.0))
    books.on_join(flow("acme"))
    books.hold(flow("acme"), range(20))
    assert books.available_blocks(flow("beta"), 80) == 70
    books.hold(flow("acme"), range(20, 40))
    assert books.available_blocks(flow("beta"), 60) == 60


def test_a_tenant_gets_its_guaranteed_share_even_when_others_are_owed_more_than_is_idle():
    books = residency(acme=(0.3, 1.0), beta=(0.5, 1.0))
    books.on_join(flow("acme"))
    books.on_join(flow("beta"))
    assert books.available_blocks(flow("acme"), 40) == 30
    assert books.available_blocks(flow("beta"), 40) == 40
    assert books.available_blocks(flow("gamma"), 40) == 0


def test_a_ceiling_holds_on_an_idle_machine():
    books = residency(acme=(0.0, 0.25))
    assert books.available_blocks(flow("acme"), 100) == 25
    books.hold(flow("acme"), range(20))
    assert books.available_blocks(flow("acme"), 80) == 5
    assert books.reserved_blocks(flow("acme"), 80) == 75
    assert books.most(flow("acme")) == 25


def test_what_two_sequences_of_a_tenant_share_counts_once():
    books = residency(acme=(0.0, 0.25))
    books.hold(flow("acme"), range(20))
    books.hold(flow("acme"), range(20))
    assert books.held_blocks("acme") == 20
    books.release(flow("acme"), range(20))
    assert books.held_blocks("acme") == 20
    books.release(flow("acme"), range(20))
    assert books.held_blocks("acme") == 0


def test_a_team_is_bound_by_its_organisation_as_well():
    books = residency(acme=(0.0, 0.5), red=(0.0, 0.4))
    books.hold(flow("acme", "blue"), range(30))
    assert books.available_blocks(flow("acme", "red"), 70) == 20
    assert books.available_blocks(flow("acme", "blue"), 70) == 20
    assert books.available_blocks(flow("beta"), 70) == 70
    assert books.most(flow("acme", "red")) == 40


def test_a_guaranteed_share_of_the_organisation_serves_its_teams():
    books = residency(acme=(0.3, 1.0))
    books.on_join(flow("acme", "red"))
    assert books.is_entitled(flow("acme", "blue"), 30)
    assert not books.is_entitled(flow("acme", "blue"), 31)
    assert not books.is_entitled(flow("beta"), 1)


def test_nobody_can_ever_hold_what_is_promised_to_others():
    books = residency(acme=(0.3, 1.0), beta=(0.2, 1.0))
    assert books.most(flow("acme")) == 80
    assert books.most(flow("gamma")) == 50


def test_the_smallest_ceiling_is_a_block():
    assert residency(total=3, acme=(0.0, 0.01)).most(flow("acme")) == 1
