"""What a grant writes into its lines about rates, so that they outlive the process."""

import asyncio
from contextlib import suppress

from maitred.core.context import Outcome
from maitred.core.errors import Draining, ReplicaLost, Unauthenticated
from maitred.core.request import Usage
from tests.support.admission_services import AdmissionSetup, limit

REQUESTS = "requests_per_minute|key:alice|*"
TOKENS = "tokens_per_minute|tenant:acme|*"
INPUT = "input_tokens_per_minute|*|*"
OUTPUT = "output_tokens_per_minute|*|tiny"


def make_setup():
    return AdmissionSetup(
        limit("key:alice", "requests_per_minute", 10),
        limit("tenant:acme", "tokens_per_minute", 10_000),
        limit("*", "input_tokens_per_minute", 10_000),
        limit("*", "output_tokens_per_minute", 10_000, model="tiny"),
        limit("*", "concurrent_tokens", 300),
        limit("key:*", "usd_total", 10**9),
    )


async def test_the_line_of_what_has_begun_holds_the_whole_reservation():
    full = make_setup()
    async with full.admit(10, 100, choices=2) as grant:
        assert grant.max_tokens == 100
        (begun,) = full.ledger.begun
        assert begun.taken == {REQUESTS: 1, TOKENS: 210, INPUT: 10, OUTPUT: 200}
        assert begun.charges == {}


async def test_what_was_clamped_is_not_held():
    tight = make_setup()
    async with tight.admit(10, 500) as grant:
        assert (grant.clamped, grant.max_tokens) == (True, 290)
        assert tight.ledger.begun[0].taken[OUTPUT] == 290


async def test_the_line_of_what_has_ended_holds_what_was_used():
    full = make_setup()
    async with full.admit(10, 100) as grant:
        await grant.settle(Usage(10, 5), Outcome.FINISHED)
    (event,) = full.ledger.events
    assert event.taken == {REQUESTS: 1, TOKENS: 15, INPUT: 10, OUTPUT: 5}
    assert list(event.charges) == ["usd_total|key:alice|*|total"]


async def test_failure_keeps_what_was_processed_and_refusal_nothing():
    full = make_setup()
    for error in (ReplicaLost(), Draining()):
        with suppress(type(error)):
            async with full.admit(10, 100) as grant:
                if isinstance(error, ReplicaLost):
                    grant.record_usage(Usage(10, 5))
                raise error
    assert [event.taken for event in full.ledger.events] == [{REQUESTS: 1, TOKENS: 15, INPUT: 10, OUTPUT: 5}, {}]


async def test_who_leaves_before_a_replica_was_asked_pays_for_nothing():
    full = make_setup()
    for replica in ("", "replica-0"):
        with suppress(asyncio.CancelledError):
            async with full.admit(10, 100) as grant:
                if replica:
                    grant.set_replica(replica)
                raise asyncio.CancelledError
    waited, ran = full.ledger.events
    assert (waited.outcome, waited.cost_nusd, waited.taken) == (Outcome.CANCELLED, 0, {REQUESTS: 1})
    assert (ran.outcome, ran.cost_nusd) == (Outcome.CANCELLED, 10 * 1000)


async def test_what_was_made_before_the_key_was_revoked_is_billed_and_nothing_before_it_was():
    full = make_setup()
    for output in (5, 0):
        with suppress(Unauthenticated):
            async with full.admit(10, 100) as grant:
                grant.record_usage(Usage(10, output))
                raise Unauthenticated
    billed, refused = full.ledger.events
    assert (billed.outcome, billed.cost_nusd) == (Outcome.CANCELLED, 10 * 1000 + 5 * 2000)
    assert (refused.outcome, refused.cost_nusd, refused.taken) == (Outcome.REFUSED, 0, {})
