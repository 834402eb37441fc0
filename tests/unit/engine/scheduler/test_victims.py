from types import SimpleNamespace

from maitred.engine.scheduler.sequence import MAX_PREEMPTIONS
from maitred.engine.scheduler.victims import choose_victim


def running(key, *, blocks=4, shared=0, computed=16, preemptions=0, tenant="a"):
    table = SimpleNamespace(blocks=[0] * blocks, shared_blocks=shared, block_tokens=4)
    account = SimpleNamespace(flow=tenant)
    return SimpleNamespace(key=key, table=table, computed=computed, preemptions=preemptions, account=account)


def choose(*candidates, **leads):
    victim = choose_victim(candidates, lambda tenant: leads.get(tenant, 0.0), service_unit=100.0)
    return victim and victim.key


def test_the_youngest_of_equals():
    assert choose(running(1), running(3), running(2)) == 3


def test_most_blocks_for_the_least_work():
    assert choose(running(1, blocks=10, computed=8), running(2, blocks=10, computed=40)) == 1


def test_blocks_that_others_hold_too_are_no_gain():
    assert choose(running(1), running(2, shared=4)) == 1


def test_of_similar_ones_that_of_the_tenant_which_leads():
    assert choose(running(1, tenant="a"), running(2, tenant="b"), a=50.0) == 1


def test_a_lead_does_not_outweigh_everything():
    lead = running(1, tenant="a", blocks=10, computed=40)
    assert choose(lead, running(2, tenant="b", blocks=10, computed=4), a=50.0) == 2


def test_those_that_were_preempted_often_enough_are_left_alone():
    assert choose(running(1), running(2, preemptions=MAX_PREEMPTIONS)) == 1
    assert choose(running(1, preemptions=MAX_PREEMPTIONS)) is None
