"""A second replica for a late request: when, for whom, and that nothing of it is left."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.flow import PriorityClass
from maitred.dispatch.config import HedgingConfig
from maitred.dispatch.policy.hedging import HedgePolicy
from tests.support.dispatchers import EMPTY, DispatchSetup, make_dispatch_request

ON = HedgingConfig(models=["m"], least_s=0.01, most_tokens=64, share=0.5)
INTERACTIVE = {"priority": PriorityClass.INTERACTIVE}


def learnt(config=ON, seconds=(0.1,) * 20):
    hedging = HedgePolicy(config, "m")
    for ttft_s in seconds:
        hedging.on_dispatch()
        hedging.on_answered(ttft_s)
    return hedging


def setup_with_hedging(replicas=2, **config):
    """A setup that has learnt that a first token takes 0.1 s."""
    setup = DispatchSetup(
        hedging=HedgingConfig(**{"models": ["m"], "share": 0.5, "most_tokens": 64, **config}), replicas=replicas
    )
    hedging = setup.dispatcher.hedging
    for _ in range(20):
        hedging.on_dispatch()
        hedging.on_answered(0.1)
    return setup


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
def test_only_small_interactive_requests_are_hedged(fields, expected):
    assert HedgePolicy(ON, "m").is_for(make_dispatch_request(**{**INTERACTIVE, **fields})) is expected
    assert not HedgePolicy(ON, "another").is_for(make_dispatch_request(**INTERACTIVE))
    assert not HedgePolicy(HedgingConfig(), "m").is_for(make_dispatch_request(**INTERACTIVE)), "off"


def test_a_hedge_waits_longer_than_nearly_all_recent_first_tokens_took():
    assert learnt(seconds=[0.1] * 19).after_s is None, "too few are known"
    assert learnt(seconds=[0.1] * 95 + [2.0] * 5).after_s == 0.1
    assert learnt(seconds=[0.1] * 94 + [2.0] * 6).after_s == 2.0
    assert learnt(seconds=[0.001] * 20).after_s == 0.01, "the least"
    assert learnt(seconds=[9.0] * 300 + [0.2] * 256).after_s == 0.2, "what was long ago does not count"


@given(st.floats(0.01, 0.5), st.lists(st.booleans(), max_size=400))
def test_hedges_never_exceed_their_share_of_requests(share, wants):
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


def test_a_quiet_hour_saves_no_hedges_for_a_burst():
    hedging = learnt(seconds=[0.1] * 1000)
    copies = 0
    while hedging.affordable:
        hedging.spend()
        copies += 1
    assert copies == 5


@pytest.mark.parametrize("won", [True, False])
async def test_the_losing_replica_is_released(won):
    setup = setup_with_hedging()
    async with setup.enqueue(**INTERACTIVE) as entry:
        first = await entry.wait_dispatched()
        assert entry.start_hedge_timer() == 0.1
        hedge = entry.hedge()
        assert {first.name, hedge.endpoint.name} == {"replica-0", "replica-1"}
        assert [endpoint_state.credits.request_count for endpoint_state in setup.core.endpoint_states] == [1, 1]
        assert [endpoint_state.endpoint.admin_state.running for endpoint_state in setup.core.endpoint_states] == [1, 1]
        entry.on_submitted()
        hedge.on_submitted()
        hedge.settle(won=won)
        kept = hedge.endpoint if won else first
        assert [
            endpoint_state.credits.request_count
            for endpoint_state in setup.core.endpoint_states
            if endpoint_state.endpoint is not kept
        ] == [0]
        assert await entry.wait_dispatched() is kept
        entry.on_first_token()
        entry.charge_tokens(prompt_tokens=16, output_tokens=1)
        assert setup.core.running == 1
    setup.assert_empty()
    assert [endpoint_state.endpoint.admin_state.running for endpoint_state in setup.core.endpoint_states] == [0, 0]


async def test_a_hedged_request_is_charged_once():
    service = []
    for hedged in (False, True):
        setup = setup_with_hedging()
        async with setup.enqueue(**INTERACTIVE) as entry:
            await entry.wait_dispatched()
            if hedged:
                entry.hedge().settle(won=True)
            entry.charge_tokens(prompt_tokens=16, output_tokens=8)
        service.append(setup.core.predictor.served)
    assert service[0] == service[1] > 0


async def test_no_hedge_is_sent_while_others_wait_or_nothing_is_free():
    setup = setup_with_hedging()
    async with setup.enqueue(**INTERACTIVE) as entry:
        await entry.wait_dispatched()
        setup.replicas[0].say(free_sequences=0, running=4)
        setup.replicas[1].say(free_sequences=0, running=4)
        assert entry.hedge() is None, "no room"
        async with setup.enqueue(2) as waiting:
            asking = asyncio.create_task(waiting.wait_dispatched())
            await asyncio.sleep(0)
            setup.replicas[1]._load = EMPTY
            assert setup.core.waiting == 1
            assert entry.hedge() is None, "who waits goes first"
            asking.cancel()
            await asyncio.wait([asking])
        hedge = entry.hedge()
        assert hedge is not None
        hedge.settle(won=False)
    setup.assert_empty()


async def test_no_hedge_is_sent_with_one_replica_nor_after_the_first_token():
    setup = setup_with_hedging(replicas=1)
    async with setup.enqueue(**INTERACTIVE) as entry:
        await entry.wait_dispatched()
        assert entry.start_hedge_timer() is None
        assert entry.hedge() is None
    setup = setup_with_hedging()
    async with setup.enqueue(**INTERACTIVE) as entry:
        await entry.wait_dispatched()
        entry.charge_tokens(prompt_tokens=16, output_tokens=1)
        assert entry.hedge() is None
    setup.assert_empty()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["join", "hedge", "won", "lost", "leave", "down", "up"]), st.integers(0, 5))))
def test_no_credits_are_held_after_any_sequence_of_events(events):
    setup = setup_with_hedging(replicas=3)
    core, now_s = setup.core, setup.clock.now_s
    requests, hedges = [], {}
    for number, (what, which) in enumerate(events):
        released = [
            queued for queued in requests if queued.allocation is not None and queued.state.name == "DISPATCHED"
        ]
        chosen = released[which % len(released)] if released else None
        match what:
            case "join":
                queued = core.new_entry(make_dispatch_request(number, f"org-{which}", **INTERACTIVE))
                core.join(queued, now_s)
                requests.append(queued)
            case "hedge" if chosen is not None and chosen not in hedges:
                waiting = core.waiting
                hedge = core.hedge(chosen, now_s)
                assert hedge is None or not waiting
                if hedge is not None:
                    assert hedge.endpoint_state is not chosen.allocation.endpoint_state
                    hedges[chosen] = hedge
            case "won" | "lost" if chosen in hedges:
                core.settle_hedge(chosen, hedges.pop(chosen), won=what == "won")
            case "leave" if requests:
                queued = requests.pop(which % len(requests))
                if queued in hedges:
                    core.settle_hedge(queued, hedges.pop(queued), won=False)
                core.leave(queued, now_s, finished=bool(which % 2))
            case "down" | "up":
                setup.replicas[which % 3].up = what == "up"
        core.run_dispatch_pass(now_s)
    for queued, hedge in hedges.items():
        core.settle_hedge(queued, hedge, won=False)
    for queued in requests:
        core.leave(queued, now_s, finished=True)
    setup.assert_empty()
