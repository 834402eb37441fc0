"""Conversations on four replicas, in simulated time: what the balance finds in their caches, and how even it is."""

import heapq
import itertools
import random
from collections import OrderedDict

import pytest

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.core.flow import ServiceWeights
from maitred.core.prefix import chain
from maitred.routing.balance.balancer import Balancer
from maitred.routing.balance.config import BalanceConfig
from maitred.routing.prefix import PrefixIndex

BLOCK = 16
CAPACITY = 3_000
"""Blocks of a replica: about a quarter of what is asked for in all."""
PER_S = 20_000.0
"""Prompt tokens that a replica computes."""
STEP_S = 0.02
WEIGHTS = ServiceWeights()


class Lru:
    """A cache of blocks as an engine has it; the truth that the index only guesses."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.blocks = OrderedDict()

    def use(self, keys):
        """How many leading blocks it had; now it has all."""
        had = len(list(itertools.takewhile(self.blocks.__contains__, keys)))
        for key in reversed(keys):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return had


class Replica:
    """Computes prompts one after the other, and all answers beside."""

    def __init__(self, name):
        self.name = name
        self.cache = Lru(CAPACITY)
        self.free_at_s = 0.0
        self.runs = []
        """(when the prompt is computed, when the answer ends)."""
        self.served = 0.0

    def candidate(self, now_s, prompt_tokens, held_tokens):
        self.runs = [run for run in self.runs if run[1] > now_s]
        wait_s = max(0.0, self.free_at_s - now_s)
        return ReplicaCandidate(
            self.name,
            requests=len(self.runs),
            prompt_tokens=wait_s * PER_S,
            output_tokens=sum((end_s - max(begin_s, now_s)) / STEP_S for begin_s, end_s in self.runs),
            cached_tokens=held_tokens,
            wait_s=wait_s,
            prefill_s=(prompt_tokens - held_tokens) / PER_S,
        )

    def take(self, now_s, tokens, keys, output_tokens):
        """Tokens that were in its cache, the time to first token, and when it ends."""
        cached = min(self.cache.use(keys) * BLOCK, len(tokens) - 1)
        first_s = self.free_at_s = max(now_s, self.free_at_s) + (len(tokens) - cached) / PER_S
        self.runs.append((first_s, first_s + output_tokens * STEP_S))
        self.served += WEIGHTS.service(len(tokens), cached, output_tokens)
        return cached, first_s - now_s, self.runs[-1][1]


def play(policy, seed, *, sessions=160, turns=6, bound=1.2, price=4.0):
    chance = random.Random(seed)
    replicas = {name: Replica(name) for name in "abcd"}
    oracle = Lru(CAPACITY * len(replicas))
    index = PrefixIndex(BLOCK)
    for name in replicas:
        index.add_replica(name, CAPACITY)
    balance = Balancer(BalanceConfig(policy=policy, bound=bound, recompute_price=price), WEIGHTS, chance.random)
    systems = [[chance.randrange(50_000) for _ in range(640)] for _ in range(8)]
    now_s, arrivals = 0.0, []
    for number in range(sessions):
        now_s += chance.expovariate(4.0)
        arrivals.append((now_s, number, 0, systems[int(8 * chance.random() ** 2)]))
    heapq.heapify(arrivals)
    prompts = cached_in_all = oracle_cached = 0
    ttfts = []
    while arrivals:
        now_s, number, turn, before = heapq.heappop(arrivals)
        words = random.Random(f"{seed}/{number}/{turn}")  # the same text whatever the policy
        tokens = before + [words.randrange(50_000) for _ in range(words.randint(50, 800))]
        output = words.randint(20, 200)
        keys = list(chain("acme", tokens, BLOCK))
        held = index.cached_tokens(keys)
        among = [
            replica.candidate(now_s, len(tokens), min(held[replica.name], len(tokens) - 1))
            for replica in replicas.values()
        ]
        chosen = balance.choose(PlacementRequest(len(tokens), output), among)
        index.on_dispatch(chosen.name, keys)
        cached, ttft_s, end_s = replicas[chosen.name].take(now_s, tokens, keys, output)
        prompts += len(tokens)
        cached_in_all += cached
        oracle_cached += min(oracle.use(keys) * BLOCK, len(tokens) - 1)
        ttfts.append(ttft_s)
        if turn + 1 < turns:
            answer = [words.randrange(50_000) for _ in range(output)]
            heapq.heappush(arrivals, (end_s + words.uniform(1, 8), number, turn + 1, tokens + answer))
    served = [replica.served for replica in replicas.values()]
    return {
        "hits": cached_in_all / prompts,
        "of oracle": cached_in_all / oracle_cached,
        "uneven": max(served) / (sum(served) / len(served)),
        "ttft_s": sum(ttfts) / len(ttfts),
    }


def test_who_counts_what_its_work_takes_from_others_finds_more_and_waits_no_longer():
    own_only, priced = play("predicted_ttft", 3, price=1.0), play("predicted_ttft", 3)
    assert priced["of oracle"] > 1.03 * own_only["of oracle"]
    assert priced["ttft_s"] <= own_only["ttft_s"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_prefixes_are_found_and_nobody_is_crowded(seed):
    aware, blind = play("predicted_ttft", seed), play("round_robin", seed, bound=None)
    assert aware["uneven"] <= 1.2
    assert aware["of oracle"] >= 0.95
    assert aware["hits"] > 1.5 * blind["hits"]
    assert aware["ttft_s"] < 0.8 * blind["ttft_s"]
