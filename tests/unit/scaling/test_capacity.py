"""The closed form of a replica's capacity, against a simulation of its steps."""

import math
import random
from collections import deque
from heapq import heappop, heappush

import pytest

from maitred.core.replica import StepTimes, pairs_of
from maitred.scaling.capacity import CapacityEstimator, KneeBound, ReplicaCapacity
from maitred.scaling.demand import RequestMix

GPU = StepTimes(fixed_s=0.008, token_s=2.5e-5, context_token_s=6e-9, decode_s=4e-5, chunk_s=2e-4, pair_s=2e-10)
CPU = StepTimes(fixed_s=0.004, token_s=1.0e-3, context_token_s=1e-7, decode_s=1e-3, chunk_s=5e-4, pair_s=2e-8)
CHAT = RequestMix(prompt_tokens=600, output_tokens=150, prompt_variation=0.5, output_variation=0.5)
LONG = RequestMix(prompt_tokens=6_000, output_tokens=300, prompt_variation=1.5, output_variation=1.0)


def gamma(random_: random.Random, mean: float, variation: float) -> int:
    return max(1, round(random_.gammavariate(1 / variation, mean * variation)))


def simulate(capacity: ReplicaCapacity, mix: RequestMix, rate: float, requests: int):
    """Steps of a replica with Poisson arrivals: prompts in order, in chunks beside the decodes.

    Returns the mean time between tokens, the mean batch, the times to first token, and the mean times between tokens of
    the requests, both in the order of size. The first tenth does not count.
    """
    random_ = random.Random(1)
    coming = deque[list[float]]()  # arrived_s, tokens left of the prompt, prompt, output
    at_s = 0.0
    for _ in range(requests):
        at_s += random_.expovariate(rate)
        prompt = gamma(random_, mix.prompt_tokens, mix.prompt_variation)
        coming.append([at_s, prompt, prompt, gamma(random_, mix.output_tokens, mix.output_variation)])
    waiting = deque[list[float]]()
    ends: list[tuple[int, float, float, float]] = []  # step after which it is complete, began_s, tokens, context then
    now_s = token_s = batch_s = context = used = 0.0
    step = tokens = 0
    ttfts, itls, warm_s = [], [], 0.1 * at_s
    while now_s < at_s:
        while coming and coming[0][0] <= now_s:
            waiting.append(coming.popleft())
        if not waiting and not ends:
            now_s = coming[0][0]
            continue
        decodes, budget = len(ends), capacity.step_tokens - len(ends)
        chunks = prefill = pairs = 0
        first = []
        while waiting and budget > 0 and decodes + len(first) < capacity.max_sequences:
            request = waiting[0]
            if request[1] == request[2]:
                if used + request[2] + request[3] > capacity.kv_tokens:
                    break
                used += request[2] + request[3]
            length = int(min(budget, request[1]))
            pairs += pairs_of(int(request[2] - request[1]), length)
            request[1] -= length
            budget, prefill, chunks = budget - length, prefill + length, chunks + 1
            if request[1] <= 0:
                first.append(waiting.popleft())
        step_s = capacity.times.of(decodes + prefill, int(context), decodes=decodes, chunks=chunks, pairs=pairs)
        now_s, step, context = now_s + step_s, step + 1, context + decodes
        if now_s > warm_s:
            token_s, batch_s, tokens = token_s + decodes * step_s, batch_s + decodes * step_s, tokens + decodes
        while ends and ends[0][0] <= step:
            _, began_s, output, total = heappop(ends)
            context -= total
            used -= total
            if began_s > warm_s:
                itls.append((now_s - began_s) / output)
        for arrived_s, _, prompt, output in first:
            heappush(ends, (step + int(output), now_s, output, prompt + output))
            context += prompt
            if now_s > warm_s:
                ttfts.append(now_s - arrived_s)
    return token_s / tokens, batch_s / (now_s - warm_s), sorted(ttfts), sorted(itls)


GPU_REPLICA = ReplicaCapacity(times=GPU, max_sequences=256, kv_tokens=10_000_000)


@pytest.mark.parametrize("mix", [CHAT, LONG], ids=["chat", "long"])
@pytest.mark.parametrize("itl_s", [0.014, 0.016, 0.027])
def test_the_rate_at_an_objective_is_that_of_a_simulation_step_by_step(mix, itl_s):
    rate = GPU_REPLICA.requests_per_s(mix, itl_s)
    got_s, batch, _, _ = simulate(GPU_REPLICA, mix, rate, 4_000)
    # What the simulation reaches at this rate, as the rate at which the formula would reach it.
    assert GPU_REPLICA.requests_per_s(mix, got_s) == pytest.approx(rate, rel=0.06)
    assert batch == pytest.approx(GPU_REPLICA.load(mix, rate).batch, rel=0.12)


def test_the_rate_at_which_slots_are_full_is_that_of_the_simulation():
    few = ReplicaCapacity(times=GPU, max_sequences=24, kv_tokens=10_000_000)
    rate = few.requests_per_s(CHAT, 1.0)
    _, batch, ttfts, _ = simulate(few, CHAT, 1.5 * rate, 900)
    served_per_s = len(ttfts) / (0.9 * 900 / (1.5 * rate))
    assert served_per_s == pytest.approx(rate, rel=0.07)
    assert batch == pytest.approx(24, rel=0.03)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_ttft_is_not_below_that_of_the_simulation(share):
    rate = share / GPU_REPLICA.work_s(LONG)
    _, _, ttfts, _ = simulate(GPU_REPLICA, LONG, rate, 4_000)
    # The sum of three parts, each in its 95th percentile, is more than the percentile of their sum.
    p95_s = ttfts[int(0.95 * len(ttfts))]
    assert p95_s < GPU_REPLICA.load(LONG, rate).ttft_s < 1.5 * p95_s


def test_itl_fluctuates_more_than_its_mean_tells():
    rate = 0.6 / GPU_REPLICA.work_s(CHAT)
    got_s, _, _, itls = simulate(GPU_REPLICA, CHAT, rate, 6_000)
    load = GPU_REPLICA.load(CHAT, rate)
    p95_s = itls[int(0.95 * len(itls))]
    assert load.itl_s < load.itl_p95_s == pytest.approx(p95_s, rel=0.15)
    assert p95_s > 1.1 * got_s


def test_the_knee_says_what_binds():
    itl = GPU_REPLICA.knee(CHAT, ttft_s=5.0, itl_s=0.016)
    assert (itl.bound, itl.itl_s) == (KneeBound.ITL, pytest.approx(0.016))
    ttft = GPU_REPLICA.knee(LONG, ttft_s=1.2, itl_s=1.0)
    assert (ttft.bound, ttft.ttft_s) == (KneeBound.TTFT, pytest.approx(1.2, rel=0.01))
    few = ReplicaCapacity(times=GPU, max_sequences=8, kv_tokens=10_000_000)
    assert few.knee(CHAT, ttft_s=math.inf, itl_s=1.0).bound is KneeBound.SLOTS
    small = ReplicaCapacity(times=GPU, max_sequences=256, kv_tokens=20_000)
    assert small.knee(CHAT, ttft_s=math.inf, itl_s=1.0).bound is KneeBound.KV


def test_an_objective_that_nobody_meets_leaves_no_rate():
    assert not GPU_REPLICA.is_reachable(CHAT, ttft_s=5.0, itl_s=0.005)
    assert GPU_REPLICA.knee(CHAT, ttft_s=5.0, itl_s=0.005).requests_per_s == 0
    assert not GPU_REPLICA.is_reachable(LONG, ttft_s=0.1, itl_s=0.1)
    assert GPU_REPLICA.knee(LONG, ttft_s=0.1, itl_s=0.1).requests_per_s == pytest.approx(0, abs=1e-6)


def test_sequences_of_different_length_need_a_margin_of_kv_cache():
    even = RequestMix(prompt_tokens=600, output_tokens=150, prompt_variation=0.0, output_variation=0.0)
    small = ReplicaCapacity(times=GPU, max_sequences=256, kv_tokens=15_000)
    assert small.slots(even) == pytest.approx(20)
    assert small.slots(CHAT) < 20


def test_a_rate_above_the_capacity_has_no_steady_state():
    load = GPU_REPLICA.load(CHAT, 1.01 / GPU_REPLICA.work_s(CHAT))
    assert load.utilisation > 1
    assert load.ttft_s == load.itl_s == math.inf


class TestCapacityEstimator:
    SLOW = StepTimes(fixed_s=0.5, token_s=1e-3)

    def capacity(self, estimator):
        return estimator.capacity(max_sequences=8, kv_tokens=1_000)

    def test_unknown_is_not_a_number(self):
        estimator = CapacityEstimator()
        estimator.observe("a", StepTimes(), serving_for_s=100.0)
        assert self.capacity(estimator) is None

    def test_reports_that_say_nothing_of_a_warm_replica_do_not_count(self):
        estimator = CapacityEstimator(warm_up_s=30.0)
        estimator.observe("a", GPU, serving_for_s=31.0)
        before = self.capacity(estimator)
        estimator.observe("b", self.SLOW, serving_for_s=29.0)
        estimator.observe("c", self.SLOW, serving_for_s=100.0, is_draining=True)
        estimator.observe("d", self.SLOW, serving_for_s=100.0, is_stale=True)
        assert self.capacity(estimator) == before
        assert before.times == GPU

    def test_the_replica_in_the_middle_is_typical(self):
        estimator = CapacityEstimator()
        for name, times in (("a", self.SLOW), ("b", GPU), ("c", CPU)):
            estimator.observe(name, times, serving_for_s=100.0)
        assert self.capacity(estimator).times == CPU
        estimator.forget("a")
        estimator.forget("c")
        assert self.capacity(estimator).times == GPU

    def test_what_was_learned_outlives_the_last_replica(self):
        estimator = CapacityEstimator()
        estimator.observe("a", GPU, serving_for_s=100.0)
        estimator.forget("a")
        assert self.capacity(estimator).times == GPU
