"""The closed form of a replica's capacity, against a simulation of its steps."""

import math
import random

import pytest

from maitred.core.replica import StepTimes, pairs_of
from maitred.scaling.capacity import CapacityEstimator, KneeBound, ReplicaCapacity
from maitred.scaling.demand import RequestMix

GPU = StepTimes(
    fixed_s=0.008, token_s=2.5e-5, context_token_s=6e-9, decode_s=4e-5, chunk_s=2e-4, pair_s=2e-10
)
CPU = StepTimes(fixed_s=0.004, token_s=1.0e-3, context_token_s=1e-7, decode_s=1e-3, chunk_s=5e-4, pair_s=2e-8)
CHAT = RequestMix(prompt_tokens=600, output_tokens=150, prompt_variation=0.5, output_variation=0.5)
LONG = RequestMix(prompt_tokens=6_000, output_tokens=300, prompt_variation=1.5, output_variation=1.0)


def gamma(random_: random.Random, mean: float, variation: float) -> int:
    return max(1, round(random_.gammavariate(1 / variation, mean * variation)))


def simulate(capacity: ReplicaCapacity, mix: RequestMix, rate: float, seconds: float, seed: int = 1):
    """Steps of a replica with Poisson arrivals: prompts in order, in chunks beside the decodes.

    Returns the mean time between tokens, the mean batch of decodes, and the times to first token.
    """
    random_ = random.Random(seed)
    now_s, next_s = 0.0, random_.expovariate(rate)
    waiting: list[list[float]] = []  # [arrived_s, prompt left, prompt, output]
    running: list[list[float]] = []  # [output left, context]
    used = 0.0
    ttfts, itls, batches, warm_s = [], [], [], 0.1 * seconds
    while now_s < seconds:
        while next_s <= now_s:
            prompt = gamma(random_, mix.prompt_tokens, mix.prompt_variation)
            waiting.append([next_s, prompt, prompt, gamma(random_, mix.output_tokens, mix.output_variation)])
            next_s += random_.expovariate(rate)
        if not waiting and not running:
            now_s = next_s
            continue
        decodes, context = len(running), sum(sequence[1] for sequence in running)
        budget = capacity.step_tokens - decodes
        chunks = prefill = pairs = 0
        done: list[list[float]] = []
        for request in waiting:
            if budget <= 0 or decodes + len(done) >= capacity.max_sequences:
                break
            if used + request[2] + request[3] > capacity.kv_tokens and request[1] == request[2]:
                break
            if request[1] == request[2]:
                used += request[2] + request[3]
            length = int(min(budget, request[1]))
            pairs += pairs_of(int(request[2] - request[1]), length)
            request[1] -= length
            budget -= length
            prefill += length
            chunks += 1
            if request[1] <= 0:
                done.append(request)
        step_s = capacity.times.of(decodes + prefill, context, decodes=decodes, chunks=chunks, pairs=pairs)
        now_s += step_s
        if now_s > warm_s:
            batches.append((step_s, decodes))
        for sequence in running:
            sequence[0] -= 1
            sequence[1] += 1
        for request in done:
            waiting.remove(request)
            running.append([request[3], request[2], now_s, request[3]])
            if now_s > warm_s:
                ttfts.append(now_s - request[0])
        itls += [(now_s - sequence[2]) / sequence[3] for sequence in running if sequence[0] <= 0 and now_s > warm_s]
        used -= sum(sequence[1] for sequence in running if sequence[0] <= 0)
        running = [sequence for sequence in running if sequence[0] > 0]
    tokens = sum(batch for _, batch in batches)
    mean_itl_s = sum(step_s * batch for step_s, batch in batches) / tokens
    mean_batch = sum(step_s * batch for step_s, batch in batches) / (now_s - warm_s)
    return mean_itl_s, mean_batch, sorted(ttfts), sorted(itls)


if __name__ == "__main__":
    for times, name in ((GPU, "gpu"), (CPU, "cpu")):
        for mix in (CHAT, LONG):
            capacity = ReplicaCapacity(times=times, max_sequences=256, kv_tokens=10_000_000, step_tokens=2048 if name == 'gpu' else 64)
            top = 1 / capacity.work_s(mix)
            for share in (0.3, 0.5, 0.7, 0.8):
                got = simulate(capacity, mix, share * top, 4000 / (share * top))
                load = capacity.load(mix, share * top)
                print(
                    name, share, round(top, 2), "itl", got[0], load.itl_s, "batch", got[1], load.batch,
                    "ttft95", got[2][int(0.95 * len(got[2]))], load.ttft_s, "itl95", got[3][int(0.95*len(got[3]))], load.itl_p95_s,
                )
