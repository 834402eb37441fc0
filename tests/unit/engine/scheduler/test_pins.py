"""Prefixes that stay: what they may hold, when they go, and that nobody waits for them for ever."""

import pytest

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.core.request import EngineRequest, PinRequest, SamplingParams
from maitred.engine.config import KVShareConfig, PinsConfig
from maitred.engine.kv.blocks import BlockPool
from tests.support.schedulers import make_scheduler

BLOCK = 4


class SchedulerSetup:
    """A scheduler of 20 blocks on a clock of its own."""

    def __init__(self, *, blocks=20, **options):
        self.pool = BlockPool(blocks)
        self.scheduler = make_scheduler(
            self.pool,
            block_tokens=BLOCK,
            max_sequences=4,
            step_tokens=128,
            context_tokens=blocks * BLOCK,
            eos_token_ids=(0,),
            **{"pins": PinsConfig(share=0.5, share_each=0.4), **options},
        )
        self.now_s = 0.0
        self.added = 0

    def run(self, prompt, *, pin=None, org="acme", max_tokens=1):
        """One request to its end; the cached tokens that it found."""
        self.added += 1
        flow = Flow((FlowLevel(org),), PriorityClass.STANDARD)
        request = EngineRequest(
            str(self.added), prompt, SamplingParams(max_tokens=max_tokens, seed=0), org, flow, pin=pin
        )
        (sequence,) = self.scheduler.add(request, self.now_s)
        for _ in range(1000):
            plan = self.scheduler.plan(self.now_s)
            if any(advance.finish for advance in self.scheduler.commit(plan, [[5]] * len(plan.sampling))):
                return sequence.cached_tokens
        raise AssertionError("it never ends")

    def press(self, org="others"):
        """Somebody needs all the room that there is."""
        self.run(list(range(100, 100 + 34)), org=org, max_tokens=10)
        self.run(list(range(200, 200 + 34)), org=org, max_tokens=10)


def test_what_is_pinned_is_found_after_any_pressure_and_what_is_not_is_gone():
    setup = SchedulerSetup()
    prompt = list(range(1, 14))
    setup.run(prompt)
    setup.press()
    assert setup.run(prompt) == 0
    setup.run(prompt, pin=PinRequest("system", 60.0))
    assert setup.scheduler.pins.blocks == 3
    for _ in range(3):
        setup.press()
        assert setup.run([*prompt, 50]) == 12
    assert setup.pool.idle == setup.pool.total - 3
    setup.scheduler.pins.release("acme", "system")
    assert setup.pool.idle == setup.pool.total
    setup.press()
    assert setup.run(prompt) == 0


def test_a_prompt_of_whole_blocks_is_pinned_where_others_find_it():
    setup = SchedulerSetup()
    prompt = list(range(1, 9))
    setup.run(prompt)
    setup.run(prompt, pin=PinRequest("a", 60.0))
    assert setup.scheduler.pins.blocks == 2
    setup.press()
    assert setup.run([*prompt, 50]) == 8


def test_pins_end_with_their_time_and_an_idle_engine_wakes_for_that():
    setup = SchedulerSetup()
    setup.run(list(range(1, 9)), pin=PinRequest("a", 60.0))
    setup.now_s = 20.0
    assert setup.scheduler.max_idle_s(setup.now_s) == 40.0
    setup.now_s = 60.0
    assert setup.scheduler.max_idle_s(setup.now_s) == 0
    setup.scheduler.plan(setup.now_s)
    assert (setup.scheduler.pins.blocks, setup.scheduler.max_idle_s(setup.now_s)) == (0, None)
    assert setup.pool.idle == setup.pool.total


def test_one_of_the_same_name_takes_its_place_and_other_tenants_have_names_of_their_own():
    setup = SchedulerSetup()
    setup.run(list(range(1, 9)), pin=PinRequest("a", 60.0))
    setup.run(list(range(20, 32)), pin=PinRequest("a", 60.0))
    assert setup.scheduler.pins.blocks == 3
    setup.run(list(range(1, 9)), pin=PinRequest("a", 60.0), org="other")
    assert setup.scheduler.pins.blocks == 5


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [(range(3), "only whole blocks of 4"), (range(36), "takes 9 blocks; the pins of this tenant may hold 8")],
)
def test_what_cannot_be_pinned_is_refused(prompt, reason):
    setup = SchedulerSetup()
    with pytest.raises(ValueError, match=reason):
        setup.run(list(prompt), pin=PinRequest("a", 60.0))
    assert setup.scheduler.waiting == 0


def test_all_tenants_together_pin_no_more_than_their_share():
    setup = SchedulerSetup()
    setup.run(list(range(32)), pin=PinRequest("a", 60.0))
    with pytest.raises(ValueError, match="of all tenants together may hold 10, of which 8 are taken"):
        setup.run(list(range(12)), pin=PinRequest("a", 60.0), org="other")
    with pytest.raises(ValueError, match="Nothing can be pinned here"):
        SchedulerSetup(prefix_cache=False).run(list(range(12)), pin=PinRequest("a", 60.0))


def test_pins_go_before_a_request_would_wait_for_ever_the_one_that_ends_soonest_first():
    setup = SchedulerSetup()
    setup.run(list(range(1, 9)), pin=PinRequest("late", 600.0))
    setup.run(list(range(20, 28)), pin=PinRequest("soon", 60.0))
    setup.run(list(range(100, 171)), org="others")
    assert setup.scheduler.pins.given_up == 1
    assert setup.run([*range(1, 9), 50]) == 8
    setup.run(list(range(300, 379)), org="others")
    assert (setup.scheduler.pins.given_up, setup.scheduler.pins.blocks) == (2, 0)


def test_a_tenant_at_its_ceiling_gives_up_its_own_pins():
    setup = SchedulerSetup(kv_shares={"acme": KVShareConfig(ceiling=0.5)})
    setup.run(list(range(1, 9)), pin=PinRequest("mine", 600.0))
    setup.run(list(range(1, 9)), pin=PinRequest("theirs", 60.0), org="other")
    setup.run(list(range(100, 136)))
    assert (setup.scheduler.pins.given_up, setup.scheduler.pins.blocks) == (1, 2)
    assert setup.run([*range(1, 9), 50], org="other") == 8


def test_an_engine_that_falls_asleep_forgets_them():
    setup = SchedulerSetup()
    setup.run(list(range(1, 9)), pin=PinRequest("a", 60.0))
    setup.scheduler.clear()
    assert setup.pool.idle == setup.pool.total
    assert setup.run([*range(1, 9), 50]) == 0


@pytest.mark.parametrize("shares", [{}, {"acme": KVShareConfig(ceiling=0.5)}])
def test_an_answer_that_grows_alone_is_not_thrown_out_for_pins(shares):
    setup = SchedulerSetup(kv_shares=shares)
    setup.run(list(range(1, 25)), pin=PinRequest("a", 60.0))
    setup.run(list(range(31, 39)), pin=PinRequest("b", 90.0))
    assert setup.scheduler.pins.blocks == 8
    capacity = setup.pool.total // 2 if shares else setup.pool.total
    setup.run(list(range(50, 54)), max_tokens=(capacity - 1) * BLOCK)
    assert setup.scheduler.counters.preemptions == 0
    assert setup.scheduler.pins.given_up == 2
    assert setup.pool.idle == setup.pool.total
