"""Several replicas with capacity: which of them gets a request."""

import random

import pytest

from maitred.app.request.upstream_request import TruncatedPrompt
from maitred.core.flow import ServiceWeights
from maitred.core.prefix import BlockUpdate, chain, shared_scope
from maitred.core.replica import StepTimes
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.queue import QueueState
from maitred.dispatch.request import Endpoint
from maitred.routing.balance.balancer import Balancer
from maitred.routing.balance.config import BalanceConfig
from maitred.routing.prefix import PrefixCacheBalancer
from tests.support.dispatchers import CARD, ScriptedReplica, make_dispatch_request

TIMES = StepTimes(fixed_s=0.01, token_s=0.001)


class Pool:
    """Replicas with capacity for anything, and a dispatch core before them."""

    def __init__(self, count=3, *, times=TIMES, **settings):
        load = {"free_blocks": 10_000, "total_blocks": 10_000, "times": times}
        self.replicas = {}
        for number in range(count):
            replica = self.replicas[f"r{number}"] = ScriptedReplica(CARD)
            replica.say(**load)
        placement = PrefixCacheBalancer(Balancer(BalanceConfig(**settings), ServiceWeights(), random.Random(1).random))
        endpoints = [Endpoint(name, replica) for name, replica in self.replicas.items()]
        self.core = DispatchCore(endpoints, DispatchConfig(headroom=0.0), placement)
        self.now_s = 1_000_000.0
        self.made = 0

    def ask(self, prompt, org="acme", **fields):
        """Where a request goes; it has ended when this returns."""
        self.made += 1
        self.now_s += 1.0
        asked = make_dispatch_request(self.made, org, tokens=len(prompt), arrived_s=self.now_s, **fields)
        asked.prompts[:] = [prompt]
        queued = self.core.new_entry(asked)
        self.core.join(queued, self.now_s)
        assert self.core.run_dispatch_pass(self.now_s) == [queued]
        assert queued.state is QueueState.DISPATCHED
        name = queued.allocation.endpoint_state.endpoint.name
        self.core.leave(queued, self.now_s, finished=True)
        return name


def text(seed, length=640):
    words = random.Random(seed)
    return [words.randrange(100) for _ in range(length)]


def test_the_next_turn_of_a_session_goes_to_the_same_replica():
    pool = Pool(bound=None)
    homes = {}
    for seed in range(6):
        homes[seed] = pool.ask(text(seed))
    assert len(set(homes.values())) == 3, "what nobody holds is spread"
    for seed, home in homes.items():
        assert pool.ask(text(seed) + text(100 + seed, 64)) == home


def test_a_session_stays_whatever_it_says():
    pool = Pool()
    for session in ("acme/1", "acme/2", "acme/3", "acme/4"):
        assert len({pool.ask(text(seed), session=session) for seed in range(20)}) == 1


def test_another_organisation_finds_no_cached_prefix():
    pool = Pool(count=2, bound=None)
    home = pool.ask(text(1))
    assert {pool.ask(text(1), org=f"org-{number}") for number in range(4)} == set(pool.replicas)
    assert pool.ask(text(1)) == home


def test_an_engine_that_has_started_anew_holds_nothing():
    pool = Pool(count=2, bound=None)
    for replica in pool.replicas.values():
        replica.say(steps=500)
    home = pool.ask(text(1))
    assert pool.ask(text(1)) == pool.ask(text(1)) == home
    pool.replicas[home].say(steps=2)
    assert pool.ask(text(1)) != home, "it is the other one's turn"


def test_a_replica_with_much_to_compute_is_not_chosen():
    pool = Pool(count=2, bound=None)
    home = pool.ask(text(1))
    pool.replicas[home].say(waiting_prompt_tokens=5_000, running=1)
    assert pool.ask(text(1)) != home


def test_before_anything_was_measured_tokens_decide():
    pool = Pool(count=2, times=StepTimes(), bound=None)
    home = pool.ask(text(1))
    assert pool.ask(text(1)) == home
    pool.replicas[home].say(waiting_prompt_tokens=5_000, running=1)
    assert pool.ask(text(1)) != home


def test_the_bound_spreads_what_one_prompt_would_keep_together():
    pool = Pool(count=2)
    for replica in pool.replicas.values():
        replica.say(waiting_prompt_tokens=10, running=1)
    given = [pool.ask(text(seed % 2)) for seed in range(2)] + [pool.ask(text(0)) for _ in range(200)]
    assert 0.35 < given.count("r0") / len(given) < 0.65


def test_a_full_replica_is_not_chosen():
    pool = Pool(count=2, bound=None)
    home = pool.ask(text(1))
    pool.replicas[home].say(free_sequences=0, running=4)
    assert pool.ask(text(1)) != home


class Alone(Pool):
    """One engine that tells what it holds: of `known` all whole blocks of 16 tokens."""

    def __init__(self, known, org="acme"):
        super().__init__(1)
        self.replicas["r0"].say(step_tokens=10_000)
        keys = b"".join(chain(shared_scope(org), known, 16))
        self.placement = self.core.selector.balancer
        self.placement.on_block_update("r0", BlockUpdate(1, 16, 1_000, stored=keys, whole=True))

    def foreseen_s(self, prompt, org="acme"):
        """What is foretold of the prompt's first token where nobody waits and nothing runs."""
        asked = make_dispatch_request(1, org, tokens=len(prompt), arrived_s=self.now_s)
        asked.prompts[:] = [prompt]
        queued = self.core.new_entry(asked)
        assert self.core.dispatch_now(queued, self.now_s)
        return queued.prefill_s


def test_cached_tokens_add_no_predicted_prefill_time():
    whole_s = pytest.approx(0.01 + 0.640)
    assert Alone(text(1)).foreseen_s(text(2)) == whole_s
    assert Alone(text(1)).foreseen_s(text(1)) == pytest.approx(0.01 + 0.016), "the last token is computed: its block is"
    assert Alone(text(1)).foreseen_s(text(1) + text(2)) == whole_s
    assert Alone(text(1)).foreseen_s(text(1), org="another") == whole_s, "nothing is shared with others"
    pool = Alone(text(1))
    pool.placement.on_block_update(
        "r0", BlockUpdate(2, 16, 1_000, removed=b"".join(chain(shared_scope("acme"), text(1), 16)))
    )
    assert pool.foreseen_s(text(1)) == whole_s


def test_cached_tokens_count_while_others_wait():
    pool = Alone(text(1))
    pool.replicas["r0"].say(free_sequences=0, running=4)
    waits = {}
    for seed in (1, 2):
        asked = make_dispatch_request(seed, "acme", tokens=640, arrived_s=pool.now_s)
        asked.prompts[:] = [text(seed)]
        queued = pool.core.new_entry(asked)
        pool.core.forecast_cache.forecast_and_store(queued, pool.core.refresh(pool.now_s), pool.now_s)
        waits[seed] = queued.prefill_s
    assert waits[2] - waits[1] == pytest.approx(0.624)


def test_a_prompt_with_unknown_tokens_is_predicted_with_the_usual_cached_share():
    foreseen_s = []
    for prompt in (TruncatedPrompt((), 640), text(2)):
        pool = Alone(text(1))
        for _ in range(200):
            pool.core.predictor.on_prompt(100, 50)
        foreseen_s.append(pool.foreseen_s(prompt))
    assert foreseen_s == [pytest.approx(0.01 + 0.320, rel=0.01), pytest.approx(0.01 + 0.640)]
