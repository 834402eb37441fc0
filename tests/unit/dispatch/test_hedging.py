"""A second replica for a late request: when, for whom, and that nothing of it is left."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.flow import PriorityClass
from maitred.dispatch.config import HedgingConfig
from maitred.dispatch.policy.hedging import HedgePolicy
from tests.support.dispatchers import EMPTY, Desk, errand

ON = HedgingConfig(models=["m"], least_s=0.01, most_tokens=64, share=0.5)
INTERACTIVE = {"priority": PriorityClass.INTERACTIVE}


def learnt(config=ON, seconds=(0.1,) * 20):
    hedging = HedgePolicy(config, "m")
    for each in seconds:
        hedging.on_dispatch()
        hedging.on_answered(each)
    return hedging


def desk(replicas=2, **config):
    """A desk that has learnt that a first token takes 0.1 s."""
    made = Desk(
        hedging=HedgingConfig(**{"models": ["m"], "share": 0.5, "most_tokens": 64, **config}), replicas=replicas
    )
    hedging = made.dispatcher.hedging
    for _ in range(20):
        hedging.on_dispatch()
        hedging.on_answered(0.1)
    return made


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"tokens": 33}, False),
        ({"max_tokens": 48}, True),
        ({"choices": 2}, False),
        ({"priority": PriorityClass.STANDARD}, False),
    ],
)
def test_it_is_for_small_interactive_requests(fields, expected):
    assert HedgePolicy(ON, "m").is_for(errand(**{**INTERACTIVE, **fields})) is expected
    assert not HedgePolicy(ON, "another").is_for(errand(**INTERACTIVE))
    assert not HedgePolicy(HedgingConfig(), "m").is_for(errand(**INTERACTIVE)), "off"


def test_late_is_what_nearly_none_of_the_last_was():
    assert learnt(seconds=[0.1] * 19).after_s is None, "too few are known"
    assert learnt(seconds=[0.1] * 95 + [2.0] * 5).after_s == 0.1
    assert learnt(seconds=[0.1] * 94 + [2.0] * 6).after_s == 2.0
    assert learnt(seconds=[0.001] * 20).after_s == 0.01, "the floor"
    assert learnt(seconds=[9.0] * 300 + [0.2] * 256).after_s == 0.2, "what was long ago does not count"


@given(st.floats(0.01, 0.5), st.lists(st.booleans(), max_size=400))
def test_copies_are_never_more_than_their_part(share, wants):
    hedging = HedgePolicy(HedgingConfig(models=["m"], share=share), "m")
    copies = 0
    for number, wanted in enumerate(wants, 1):
        hedging.on_dispatch()
        if wanted and hedging.affordable:
            hedging.spend()
            copies += 1
        assert copies <= share * number + 1e-6
    while hedging.affordable:
        hedging.spend()
        copies += 1
    assert copies <= share * len(wants) + 1e-6, "and nothing more is saved up"


def test_a_quiet_hour_does_not_pay_for_a_burst():
    hedging = learnt(seconds=[0.1] * 1000)
    copies = 0
    while hedging.affordable:
        hedging.spend()
        copies += 1
    assert copies == 5


@pytest.mark.parametrize("won", [True, False])
async def test_one_of_both_is_given_up(won):
    made = desk()
    async with made.seat(**INTERACTIVE) as seat:
        first = await seat.wait_dispatched()
        assert seat.hedge_after_s() == 0.1
        spare = seat.hedge()
        assert {first.name, spare.endpoint.name} == {"post-0", "post-1"}
        assert [station.credits.held for station in made.floor.endpoint_states] == [1, 1]
        assert [post.endpoint.admin_state.running for post in made.floor.endpoint_states] == [1, 1]
        seat.on_submitted()
        spare.on_submitted()
        spare.settle(won=won)
        kept = spare.endpoint if won else first
        assert [station.credits.held for station in made.floor.endpoint_states if station.endpoint is not kept] == [0]
        assert await seat.wait_dispatched() is kept
        seat.on_first_token()
        seat.charge_tokens(prompt_tokens=16, output_tokens=1)
        assert made.floor.running == 1
    made.assert_empty()
    assert [station.endpoint.admin_state.running for station in made.floor.endpoint_states] == [0, 0]


async def test_it_is_charged_once():
    service = []
    for hedged in (False, True):
        made = desk()
        async with made.seat(**INTERACTIVE) as seat:
            await seat.wait_dispatched()
            if hedged:
                seat.hedge().settle(won=True)
            seat.charge_tokens(prompt_tokens=16, output_tokens=8)
        service.append(made.floor.predictor.served)
    assert service[0] == service[1] > 0


async def test_there_is_none_where_others_wait_or_no_room_is():
    made = desk()
    async with made.seat(**INTERACTIVE) as seat:
        await seat.wait_dispatched()
        made.replicas[0].say(free_sequences=0, running=4)
        made.replicas[1].say(free_sequences=0, running=4)
        assert seat.hedge() is None, "no room"
        async with made.seat(2) as waiting:
            asking = asyncio.create_task(waiting.wait_dispatched())
            await asyncio.sleep(0)
            made.replicas[1]._load = EMPTY
            assert made.floor.waiting == 1
            assert seat.hedge() is None, "who waits goes first"
            asking.cancel()
            await asyncio.wait([asking])
        spare = seat.hedge()
        assert spare is not None
        spare.settle(won=False)
    made.assert_empty()


async def test_there_is_none_with_one_replica_nor_once_something_has_come():
    made = desk(replicas=1)
    async with made.seat(**INTERACTIVE) as seat:
        await seat.wait_dispatched()
        assert seat.hedge_after_s() is None
        assert seat.hedge() is None
    made = desk()
    async with made.seat(**INTERACTIVE) as seat:
        await seat.wait_dispatched()
        seat.charge_tokens(prompt_tokens=16, output_tokens=1)
        assert seat.hedge() is None
    made.assert_empty()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["join", "spare", "won", "lost", "leave", "down", "up"]), st.integers(0, 5))))
def test_whatever_happens_nothing_is_left(events):
    made = desk(replicas=3)
    floor, now_s = made.floor, made.clock.now_s
    tickets, spares = [], {}
    for number, (what, which) in enumerate(events):
        released = [ticket for ticket in tickets if ticket.allocation is not None and ticket.state.name == "RELEASED"]
        chosen = released[which % len(released)] if released else None
        match what:
            case "join":
                ticket = floor.new_entry(errand(number, f"org-{which}", **INTERACTIVE))
                floor.join(ticket, now_s)
                tickets.append(ticket)
            case "spare" if chosen is not None and chosen not in spares:
                waiting = floor.waiting
                spare = floor.hedge(chosen, now_s)
                assert spare is None or not waiting
                if spare is not None:
                    assert spare.endpoint_state is not chosen.allocation.endpoint_state
                    spares[chosen] = spare
            case "won" | "lost" if chosen in spares:
                floor.settle_hedge(chosen, spares.pop(chosen), won=what == "won")
            case "leave" if tickets:
                ticket = tickets.pop(which % len(tickets))
                if ticket in spares:
                    floor.settle_hedge(ticket, spares.pop(ticket), won=False)
                floor.leave(ticket, now_s, finished=bool(which % 2))
            case "down" | "up":
                made.replicas[which % 3].up = what == "up"
        floor.dispatch_ready(now_s)
    for ticket, spare in spares.items():
        floor.settle_hedge(ticket, spare, won=False)
    for ticket in tickets:
        floor.leave(ticket, now_s, finished=True)
    made.assert_empty()
