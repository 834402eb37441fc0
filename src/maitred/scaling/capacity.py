"""Capacity of a replica: the load that it serves within the objectives, from its measured step times.

In steady state, a replica that gets `r` requests per second, with `o` output tokens each, has a batch of `b = r o T`
sequences (Little's law), where `T` is the mean time between two tokens. A sequence shares its steps with `b` others (an
arrival sees what an outsider sees) and with the prefill of the `r T` requests that arrive during a step. With the
linear model of step times this gives ``T = A + r T W``. Here `A` is the step time of a sequence that is alone, and the
*work* `W` is the time that one request adds to the steps that it takes part in: its decodes and its prefill. Hence::

    T = A / (1 - r W)            utilisation = r W
    r = (1 - A / T) / W          the rate at which the time between tokens reaches an objective T
    r = N / (o A + N W)          the rate at which N slots are full, if steps compute all the time

The step time and with it the batch grow beyond all bounds as `r W` approaches 1: an error of a few percent in `W` can
be a factor in the latency. So what the autoscaler goes by is the rate at an objective, which has no such pole.
"""

import math
from enum import StrEnum

import msgspec

from maitred.core.replica import StepTimes
from maitred.scaling.demand import RequestMix

_Z95 = 1.645
_BISECTIONS = 30


class KneeBound(StrEnum):
    """Bound that keeps the load of a replica from being higher."""

    ITL = "itl"
    TTFT = "ttft"
    SLOTS = "slots"
    KV = "kv"


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A replica in steady state at some rate of requests of a mix."""

    requests_per_s: float
    utilisation: float
    """Share of the time that the work of these requests takes; the fixed time of steps fills the rest."""
    batch: float
    """Mean number of running sequences."""
    itl_s: float
    """Mean time between two tokens of an answer."""
    itl_p95_s: float
    """95th percentile of a request's mean time between tokens: batch and prefill beside it fluctuate."""
    ttft_s: float
    """95th percentile of the time to first token; infinite where the queue grows."""
    bound: KneeBound | None = None
    """Bound that keeps the load from being higher; None: the rate was given."""


class ReplicaCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of one replica, by the linear model of its step times.

    It does not depend on the mix of the requests: the mix is an argument of each question.
    """

    times: StepTimes
    max_sequences: float
    kv_tokens: float
    step_tokens: int = 2_048
    """Most tokens of a step."""
    overhead_s: float = 0.0
    """Time for which a request has a slot while no step computes it; see `SlotOverhead`."""

    def prefill_s(self, mix: RequestMix) -> float:
        """Returns the mean time that the prefill of a request adds to steps."""
        return self._prefill_s(mix.prompt_tokens, mix.prompt_tokens**2 * (1 + mix.prompt_variation), mix.cached_tokens)

    def _prefill_s(self, tokens: float, squared_tokens: float, cached_tokens: float) -> float:
        """Returns the time of a prefill, from its tokens and their (mean) square."""
        times = self.times
        chunks = max(1.0, tokens / self.step_tokens)
        pairs = 0.5 * (squared_tokens + tokens) + tokens * cached_tokens
        return times.token_s * tokens + times.chunk_s * chunks + times.pair_s * pairs

    def decode_s(self, mix: RequestMix) -> float:
        """Returns the time that one running sequence adds to a step."""
        times = self.times
        return times.token_s + times.decode_s + times.context_token_s * mix.decoding_context_tokens

    def work_s(self, mix: RequestMix) -> float:
        """Returns the mean time that a request adds to all its steps together."""
        return mix.output_tokens * self.decode_s(mix) + self.prefill_s(mix)

    def slots(self, mix: RequestMix) -> float:
        """Returns how many sequences of this mix can run together: as many as there are slots, and KV cache for.

        Sequences differ in length; they must fit in 95 % of the cases.
        """
        return min(self.max_sequences, self._kv_sequences(mix))

    def _kv_sequences(self, mix: RequestMix) -> float:
        # Their lengths have the mean m and the standard deviation v m. n of them fit if n m + z v m sqrt(n) <= kv.
        spread = mix.prompt_variation * mix.prompt_tokens**2 + mix.output_variation * mix.output_tokens**2
        margin = 0.5 * _Z95 * math.sqrt(spread) / max(1.0, mix.whole_tokens)
        root = math.sqrt(margin**2 + self.kv_tokens / max(1.0, mix.whole_tokens)) - margin
        return max(1.0, root**2)

    def requests_per_s(self, mix: RequestMix, itl_s: float) -> float:
        """Returns the rate at which the mean step time is `itl_s`, or all slots are full; see the module docstring."""
        work_s, slots = self.work_s(mix), self.slots(mix)
        if work_s <= 0:
            return math.inf
        alone_s = self.alone_itl_s(mix)
        at_itl = max(0.0, 1 - alone_s / itl_s) / work_s
        # The root of N = r (o T + h) with T = A / (1 - r W); without overhead h it is that of the module docstring.
        whole_s = mix.output_tokens * alone_s + self.overhead_s + slots * work_s
        root_s = math.sqrt(max(0.0, whole_s**2 - 4 * self.overhead_s * work_s * slots))
        return min(at_itl, 2 * slots / (whole_s + root_s))

    def alone_ttft_s(self, mix: RequestMix, batch: float = 0.0) -> float:
        """Returns the 95th percentile of the TTFT without any wait, beside a batch of running sequences."""
        tokens = mix.prompt_p95_tokens
        beside_s = self.times.fixed_s + batch * self.decode_s(mix)
        return self._prefill_s(tokens, tokens**2, mix.cached_tokens) + beside_s * max(1.0, tokens / self.step_tokens)

    def is_reachable(self, mix: RequestMix, *, ttft_s: float, itl_s: float) -> bool:
        """Whether a request that is alone at a replica meets both objectives."""
        return self.alone_itl_s(mix) <= itl_s and self.alone_ttft_s(mix) <= ttft_s

    def alone_itl_s(self, mix: RequestMix) -> float:
        """Returns the time between tokens of a request that is alone at a replica."""
        return self.times.fixed_s + self.decode_s(mix)

    def load(self, mix: RequestMix, requests_per_s: float) -> ReplicaLoad:
        """Returns batch, step time and TTFT of a replica in steady state at this rate.

        The TTFT has three parts: the wait for a slot, as in an M/G/N queue (Sakasegawa's approximation, 1977); the wait
        for the prefill of others, as in an M/G/1 queue (Pollaczek and Khinchine); and the prefill of a long prompt.
        """
        work_s, decode_s = self.work_s(mix), self.decode_s(mix)
        utilisation = requests_per_s * work_s
        if utilisation >= 1:
            return ReplicaLoad(
                requests_per_s=requests_per_s,
                utilisation=utilisation,
                batch=math.inf,
                itl_s=math.inf,
                itl_p95_s=math.inf,
                ttft_s=math.inf,
            )
        itl_s = self.alone_itl_s(mix) / (1 - utilisation)
        resident_s = mix.output_tokens * itl_s
        batch = requests_per_s * resident_s
        # Number of others beside a request, and the prefill work that comes while it is there, vary as Poisson counts.
        prefill_spread_s = (
            self.prefill_s(mix) * math.sqrt((1 + mix.prompt_variation) * batch) / max(1.0, mix.output_tokens)
        )
        # Where more work comes, steps take longer and the batch grows: by the derivative of T = A / (1 - r W).
        spread_s = math.hypot(decode_s * math.sqrt(batch), prefill_spread_s) / (1 - utilisation)
        return ReplicaLoad(
            requests_per_s=requests_per_s,
            utilisation=utilisation,
            batch=batch,
            itl_s=itl_s,
            itl_p95_s=itl_s + _Z95 * spread_s,
            ttft_s=self._slot_wait_s(mix, batch + requests_per_s * self.overhead_s, itl_s, 1 - utilisation)
            + self._prefill_wait_s(mix, requests_per_s, batch)
            + self.alone_ttft_s(mix, batch),
        )

    def _slot_wait_s(self, mix: RequestMix, taken: float, itl_s: float, idle: float) -> float:
        """Returns the 95th percentile of the wait for a slot, if so many slots are taken on average.

        Sequences take longer beside more others. This makes the variance of their number larger than in a queue with
        constant times, by 1 / `idle`; so as many slots are needed as if there were fewer and larger ones.
        """
        slots = self.slots(mix)
        busy = taken / slots
        if busy >= 1:
            return math.inf
        slots *= idle
        chance = busy ** (math.sqrt(2 * (slots + 1)) - 1)
        if chance <= 0.05:
            return 0.0
        resident_s = mix.output_tokens * itl_s + self.overhead_s
        mean_s = 0.5 * (1 + mix.output_variation) * resident_s / (slots * (1 - busy))
        return math.log(chance / 0.05) * mean_s

    def _prefill_wait_s(self, mix: RequestMix, requests_per_s: float, batch: float) -> float:
        """Returns the 95th percentile of the wait for the prefill of others."""
        # Decodes and the fixed time take a part of each step; a prefill gets what is left of it.
        step_s = self.times.fixed_s + batch * self.decode_s(mix)
        prefill_s = self.prefill_s(mix)
        stretched_s = prefill_s + step_s * max(1.0, mix.prompt_tokens / self.step_tokens) * min(
            1.0, mix.prompt_tokens / self.step_tokens
        )
        busy = requests_per_s * stretched_s
        if busy >= 1:
            return math.inf
        if busy <= 0.05:
            return 0.0
        mean_s = 0.5 * (1 + mix.prompt_variation) * stretched_s / (1 - busy)
        return math.log(busy / 0.05) * mean_s

    def knee(self, mix: RequestMix, *, ttft_s: float, itl_s: float) -> ReplicaLoad:
        """Returns the highest load at which both objectives are met, with what binds there.

        The rate is 0 if even a request that is alone misses one of them.
        """
        rate = self.requests_per_s(mix, itl_s)
        if self.load(mix, rate * (1 - 1e-6)).itl_s >= itl_s * (1 - 1e-4):
            bound = KneeBound.ITL
        else:
            bound = KneeBound.SLOTS if self.slots(mix) >= self.max_sequences else KneeBound.KV
        if self.load(mix, rate).ttft_s > ttft_s:
            low, high = 0.0, rate
            for _ in range(_BISECTIONS):
                middle = 0.5 * (low + high)
                low, high = (middle, high) if self.load(mix, middle).ttft_s <= ttft_s else (low, middle)
            # A queue for slots makes the TTFT infinite where the slots are full: then it is they that bind.
            bound, rate = (bound if low > 0.999 * rate else KneeBound.TTFT), low
        return msgspec.structs.replace(self.load(mix, rate), bound=bound)


class CapacityEstimator:
    """Capacity of a model's replicas as learned from their reports.

    Only reports of replicas that are warm count: those of a replica that has just begun to serve, drains, or whose
    report is stale say nothing of what a replica can do.

    Args:
        warm_up_s: For how long the reports of a new replica do not count.
    """

    def __init__(self, *, warm_up_s: float = 30.0) -> None:
        self._warm_up_s = warm_up_s
        self._times_by_replica: dict[str, StepTimes] = {}
        self._typical: StepTimes | None = None

    def observe(
        self, name: str, times: StepTimes, *, serving_for_s: float, is_draining: bool = False, is_stale: bool = False
    ) -> None:
        """Takes the step times that a replica reports, if they count."""
        if is_draining or is_stale or serving_for_s < self._warm_up_s or times.fixed_s + times.token_s <= 0:
            return
        if self._times_by_replica.get(name) != times:
            self._times_by_replica[name] = times
            self._typical = _median(list(self._times_by_replica.values()))

    def forget(self, name: str) -> None:
        """Forgets a replica that has left. What was learned stays until there is a report of another one."""
        if self._times_by_replica.pop(name, None) is not None and self._times_by_replica:
            self._typical = _median(list(self._times_by_replica.values()))

    def capacity(
        self, *, max_sequences: float, kv_tokens: float, step_tokens: int = 2_048, overhead_s: float = 0.0
    ) -> ReplicaCapacity | None:
        """Returns the capacity of a typical replica; None: it is not known yet."""
        if self._typical is None:
            return None
        return ReplicaCapacity(
            times=self._typical,
            max_sequences=max_sequences,
            kv_tokens=kv_tokens,
            step_tokens=step_tokens,
            overhead_s=overhead_s,
        )


def _median(times: list[StepTimes]) -> StepTimes:
    """Returns the step times of the replica that is in the middle, by a step as it is typical."""
    ordered = sorted(times, key=lambda one: one.of(512 + 32, 32 * 1_024, decodes=32, chunks=1, pairs=512 * 256))
    return ordered[len(ordered) // 2]
