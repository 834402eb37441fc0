"""Prediction of what a number of replicas would make of the demand, and the least number that meets the objectives."""

import math
from bisect import insort
from collections.abc import Sequence

from maitred.scaling.capacity import ReplicaCapacity
from maitred.scaling.demand import Demand, RequestMix
from maitred.scaling.fluid_queue import FluidQueue, QueuePlayback
from maitred.scaling.forecast import DemandForecast
from maitred.scaling.objectives import ScalingObjectives
from maitred.scaling.replica_status import ReplicaPhase, ReplicaStatus
from maitred.scaling.startup_times import StartKind, StartupTimes

_LEAD_QUANTILE = 0.9
"""Share of starts that must be complete by the time from which a replica counts."""
_MISSED_SHARE = 0.005
"""Share of missed requests that is not worth a replica."""
_LEAST_AHEAD_S = 10.0
"""How far to look beyond the lead time at least."""
_MOST_PRICED = 16
"""Numbers of replicas that are compared by their price."""
_KNOTS_S = (5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0)


class ReadyTimes:
    """When the replicas of a model serve: those that do, those on their way, and those that could be had.

    Args:
        replicas: The model's replicas.
        startup_times: How long starts take.
        start_kind: Kind of the next start of a new replica.
        now_s: The present time.

    Attributes:
        ready: Number of replicas that serve.
        coming: Number of replicas that start or wake.
        new_s: Seconds until a new replica serves.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaStatus],
        startup_times: StartupTimes,
        *,
        start_kind: StartKind,
        now_s: float,
    ) -> None:
        self.ready = self.coming = 0
        self._ready_s: list[float] = []
        self.new_s = startup_times.quantile(start_kind, _LEAD_QUANTILE)
        reserve_s: list[float] = []
        for replica in replicas:
            match replica.phase:
                case ReplicaPhase.SERVING:
                    self.ready += 1
                    insort(self._ready_s, 0.0)
                case ReplicaPhase.STARTING | ReplicaPhase.WAKING:
                    self.coming += 1
                    insort(self._ready_s, replica.serves_in_s(startup_times, _LEAD_QUANTILE, now_s))
                case ReplicaPhase.DRAINING:
                    reserve_s.append(0.0)
                case ReplicaPhase.ASLEEP:
                    reserve_s.append(startup_times.quantile(StartKind.ASLEEP, _LEAD_QUANTILE))
                case ReplicaPhase.FAILED | ReplicaPhase.MAINTENANCE:
                    pass
        self._ready_s += sorted(reserve_s)

    @property
    def committed(self) -> int:
        """Number of replicas that serve or are about to."""
        return self.ready + self.coming

    @property
    def lead_s(self) -> float:
        """Seconds until one more replica would serve than serve or are about to."""
        return self._ready_s[self.committed] if len(self._ready_s) > self.committed else self.new_s

    @property
    def known(self) -> int:
        """Number of replicas that serve, are about to, or could be had without a new start."""
        return len(self._ready_s)

    def of(self, number: int) -> list[float]:
        """Returns the seconds after which each of so many replicas serves, ascending."""
        known = self._ready_s[:number]
        known.extend([self.new_s] * (number - len(known)))
        known.sort()
        return known


class ScalingPrediction:
    """Prediction of what numbers of replicas make of pending work and forecast, until those started now serve.

    Args:
        objectives: Objectives and limits.
        forecast: Forecast of the demand.
        demand: What waits and runs.
        times: When replicas serve.
        capacity: Capacity of one replica.
        mix: Sizes of the requests.

    Attributes:
        is_reachable: Whether a request that is alone at a replica meets the objectives. An objective that it misses
            does not count: more replicas would not help.
        resident_s: Seconds for which a request runs at full load.
        alone_ttft_s: TTFT without any wait.
        requests_per_s: Requests per second that one replica serves within the objectives.
    """

    def __init__(
        self,
        objectives: ScalingObjectives,
        *,
        forecast: DemandForecast,
        demand: Demand,
        times: ReadyTimes,
        capacity: ReplicaCapacity,
        mix: RequestMix,
    ) -> None:
        self._objectives = objectives
        self._forecast = forecast
        self._demand = demand
        self.times = times
        self._capacity = capacity
        self._mix = mix
        alone_itl_s = capacity.alone_itl_s(mix)
        # Half of an objective that even a request on its own misses would leave no load at all.
        self._itl_s = objectives.itl_s if alone_itl_s < 0.95 * objectives.itl_s else math.inf
        self.requests_per_s = capacity.requests_per_s(mix, self._itl_s)
        step_s = alone_itl_s / max(1e-6, 1 - self.requests_per_s * capacity.work_s(mix))
        self.resident_s = mix.output_tokens * step_s + capacity.overhead_s
        self.alone_ttft_s = capacity.alone_ttft_s(mix, self.requests_per_s * mix.output_tokens * step_s)
        self.is_reachable = capacity.is_reachable(mix, ttft_s=objectives.ttft_s, itl_s=objectives.itl_s)
        left_s = objectives.ttft_s - self.alone_ttft_s
        self._longest_wait_s = left_s if left_s > 0 else 0.5 * objectives.ttft_s
        self._queue = self._playable()

    def play(self, number: int) -> QueuePlayback:
        """Plays the queue with so many replicas and the middle of the forecast."""
        return self._queue.play(self.times.of(number))

    def _playable(self) -> FluidQueue:
        # A queue can be felt for about as long as it has grown.
        end_s = self.times.lead_s + max(_LEAST_AHEAD_S, min(60.0, self.resident_s), min(300.0, self.times.lead_s))
        knots = [0.0, *(knot for knot in _KNOTS_S if knot < end_s), end_s]
        rates = [self._forecast.at(knot) for knot in knots]
        return FluidQueue(
            self._capacity,
            self._mix,
            itl_s=self._itl_s,
            demand=self._demand,
            knots=knots,
            rates=rates,
            longest_wait_s=self._longest_wait_s,
        )

    def _sequences(self, requests_per_s: float, in_s: float) -> float:
        """Returns the sequences after so many seconds if requests come at this rate until then.

        What runs and waits now leaves with the time that a request takes; the rate decides on the rest.
        """
        stay = math.exp(-in_s / self.resident_s)
        present = self._demand.running + self._queue.queued
        return present * stay + requests_per_s * self.resident_s * (1 - stay)

    def utilisation(self, number: int) -> float:
        """Returns which share of the capacity of so many replicas is needed at the end of the lead time."""
        lead_s = self.times.lead_s
        sequences = self._sequences(self._forecast.at(lead_s), lead_s)
        return sequences / (number * self._queue.batch) if number else math.inf if sequences else 0.0

    def least_by_capacity(self, confidence: float, target_utilisation: float) -> int:
        """Returns the least number whose capacity is not exceeded at the end of the lead time.

        It must hold for the quantile, and for the middle of the forecast at the target utilisation. Which replicas are
        ordered now matters from then on, not before; so this is the newsvendor's choice of a quantile. The quantile is
        one of rates over `window_s`: what exceeds the capacity for so long may wait as long as the objective allows.
        """
        number = self._least_at(confidence, target_utilisation, self.times.lead_s)
        if number > self.times.known:
            # Those that sleep or drain are too few; the others take the time of a start.
            number = max(self.times.known, self._least_at(confidence, target_utilisation, self.times.new_s))
        return number

    def _least_at(self, confidence: float, target_utilisation: float, lead_s: float) -> int:
        sequences = self._sequences(self._forecast.at(lead_s, confidence), lead_s)
        if sequences < 1 and not self._demand.any:
            return 0
        borne = sequences / (1 + self._longest_wait_s / self._forecast.window_s)
        mean = self._sequences(self._forecast.at(lead_s), lead_s) / target_utilisation
        return max(1, math.ceil(max(borne, mean) / self._queue.batch - 1e-9))

    def least(self, confidence: float, target_utilisation: float) -> int:
        """Returns the least number of replicas that meets the objectives as well as is worth its price.

        Args:
            confidence: Quantile of the forecast for which they must hold.
            target_utilisation: Highest predicted utilisation.
        """
        queue = self._queue
        # One more than there may be is enough to say so, whatever the demand is.
        most = self._objectives.most_replicas + 1
        low = min(self.least_by_capacity(confidence, target_utilisation), most)
        # So many can take everything that comes at once, or are more than there may be.
        high = max(low, min(math.ceil(queue.total_requests / queue.batch), most), 1)
        fewest = queue.play(self.times.of(high)).missed
        number = self._least_within(queue, low, high, fewest + _MISSED_SHARE * queue.total_requests)
        if number == low:
            return low
        # Misses of one second of a replica's work are as bad as so many seconds of a replica; see `hold`.
        price_s = confidence / (1 - confidence) / self.requests_per_s
        replica_s = self._queue.end_s
        costs = (
            (queue.play(self.times.of(count)).missed * price_s + count * replica_s, count)
            for count in range(number, low - 1, -max(1, (number - low) // _MOST_PRICED))
        )
        return min(costs)[1]

    def _least_within(self, queue: FluidQueue, low: int, high: int, tolerated: float) -> int:
        """Returns the least number from `low` to `high` that misses no more than is tolerated."""
        guess = min(high, max(low, self.times.committed))
        if low < guess:
            if queue.play(self.times.of(guess)).missed <= tolerated:
                if queue.play(self.times.of(guess - 1)).missed > tolerated:
                    return guess
                high = guess - 1
            else:
                low = guess + 1
        while low < high:
            middle = (low + high) // 2
            if queue.play(self.times.of(middle)).missed <= tolerated:
                high = middle
            else:
                low = middle + 1
        return low

    def rate_needing(self, number: int, confidence: float, target_utilisation: float) -> float:
        """Returns the demand at which so many replicas would be needed again, as the level of the forecast."""
        lead_s = self.times.new_s
        served = (number - 1) * self.requests_per_s
        margin = math.sqrt(self._forecast.at(lead_s, confidence)) - math.sqrt(self._forecast.level)
        borne = served * (1 + self._longest_wait_s / self._forecast.window_s)
        return min(served * target_utilisation, max(0.0, math.sqrt(borne) - max(0.0, margin)) ** 2)
