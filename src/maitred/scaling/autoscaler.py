"""Autoscaler: the least number of replicas with which pending and forecast work meets the objectives."""

from collections.abc import Sequence

import msgspec

from maitred.scaling.capacity import ReplicaCapacity
from maitred.scaling.decision import ScalingDecision, ScalingEvidence, ScalingLimit, ScalingReason
from maitred.scaling.demand import Demand
from maitred.scaling.forecast import DemandForecast
from maitred.scaling.hold import hold_s, start_cost_s
from maitred.scaling.objectives import ScalingObjectives
from maitred.scaling.prediction import ReadyTimes, ScalingPrediction
from maitred.scaling.replica_status import ReplicaStatus
from maitred.scaling.startup_times import StartKind, StartupTimes

_DOWN_CONFIDENCE = 0.25
"""How much of the rest of the confidence remains for going down: 0.9 becomes 0.975."""
_DOWN_UTILISATION = 0.85
"""Share of the target utilisation that a smaller number may have: room for what comes, that noise does not order."""
_SETTLED_S = 10.0
"""A number is lowered only after fewer have been enough for so long."""


class ScalingOverride(msgspec.Struct, frozen=True, kw_only=True):
    """A number of replicas that a person has set, with its end."""

    replicas: int
    until_s: float


class Autoscaler:
    """Decides the number of replicas of one model.

    Args:
        objectives: Objectives and limits; may be replaced at any time.
        startup_times: How long starts take.
        forecast: Forecast of the demand; `decide` shows it the arrivals.
        start_kind: Kind of the next start of a new replica; may be replaced at any time.
    """

    def __init__(
        self,
        objectives: ScalingObjectives,
        startup_times: StartupTimes,
        forecast: DemandForecast,
        *,
        start_kind: StartKind = StartKind.COLD,
    ) -> None:
        self.objectives = objectives
        self.startup_times = startup_times
        self.forecast = forecast
        self.start_kind = start_kind
        self.override: ScalingOverride | None = None
        """Number that a person has set; it ends by itself. The limits hold for it, too."""
        self._unneeded_since_s: dict[int, float] = {}
        """Since when fewer than so many replicas have been enough."""

    def decide(
        self, demand: Demand, replicas: Sequence[ReplicaStatus], capacity: ReplicaCapacity | None, now_s: float
    ) -> ScalingDecision:
        """Returns the number of replicas from now on. Call it about once a second, and as soon as requests wait.

        Args:
            demand: Demand now, with what has arrived since the last call.
            replicas: All replicas of the model.
            capacity: Capacity of one replica; None: not known yet.
            now_s: The present time, on the clock of the statuses.
        """
        self.forecast.observe(demand.window)
        if self.override is not None and self.override.until_s <= now_s:
            self.override = None
        times = ReadyTimes(replicas, self.startup_times, start_kind=self.start_kind, now_s=now_s)
        mix = self.forecast.mix
        if capacity is None or mix is None:
            return self._conclude(demand, times, None, _need_blindly(demand, times), times.committed, None, now_s)
        prediction = ScalingPrediction(
            self.objectives, forecast=self.forecast, demand=demand, times=times, capacity=capacity, mix=mix
        )
        self.forecast.window_s = min(60.0, max(10.0, prediction.resident_s))
        need = prediction.least(self.objectives.confidence, self.objectives.target_utilisation)
        kept, hold_until_s = self._keep(prediction, demand, need, now_s)
        return self._conclude(demand, times, prediction, need, kept, hold_until_s, now_s)

    def _keep(self, prediction: ScalingPrediction, demand: Demand, need: int, now_s: float) -> tuple[int, float | None]:
        """Returns how many replicas are kept of those that there are, and until when the last one is held."""
        objectives, committed = self.objectives, prediction.times.committed
        if need >= committed:
            self._unneeded_since_s.clear()
            return committed, None
        confidence = 1 - _DOWN_CONFIDENCE * (1 - objectives.confidence)
        enough = max(need, prediction.least(confidence, _DOWN_UTILISATION * objectives.target_utilisation))
        for number in [number for number in self._unneeded_since_s if number <= enough or number > committed]:
            del self._unneeded_since_s[number]
        cost_s = start_cost_s(prediction.times.new_s, objectives.confidence)
        for number in range(enough + 1, committed + 1):
            self._unneeded_since_s.setdefault(number, now_s)
        for number in range(committed, enough, -1):
            unneeded_s = now_s - self._unneeded_since_s[number]
            if number == 1:
                held_s = self._idle_hold_s(prediction.times.new_s, cost_s)
            else:
                rate = prediction.rate_needing(number, objectives.confidence, objectives.target_utilisation)
                held_s = hold_s(self.forecast, rate, unneeded_s=unneeded_s, start_cost_s=cost_s)
            held_s = max(held_s, _SETTLED_S - unneeded_s, prediction.times.new_s - unneeded_s)
            if held_s > 0:
                return number, now_s + held_s
        return min(enough, committed), None

    def _idle_hold_s(self, lead_s: float, cost_s: float) -> float:
        """Returns for how long the only replica is kept though nothing is asked for; 0: it goes.

        After a silence, as much time again passes before the next arrival, more or less; the profile may know better.
        """
        silent_s = self.forecast.silent_s
        rate = max(self.forecast.at(lead_s), 1 / max(silent_s, 1e-9))
        return cost_s - silent_s if rate * cost_s > 1 and silent_s < cost_s else 0.0

    def _conclude(
        self,
        demand: Demand,
        times: ReadyTimes,
        prediction: ScalingPrediction | None,
        need: int,
        kept: int,
        hold_until_s: float | None,
        now_s: float,
    ) -> ScalingDecision:
        """Applies override and limits, and says why."""
        objectives, override = self.objectives, self.override
        wanted = max(need, kept) if override is None else override.replicas
        desired = min(max(wanted, objectives.min_replicas), objectives.most_replicas)
        limits = []
        if desired > wanted:
            limits.append(ScalingLimit.MIN_REPLICAS)
        if desired < wanted:
            by_limit = {
                ScalingLimit.MAX_REPLICAS: objectives.max_replicas,
                ScalingLimit.GPUS: objectives.replicas_with_gpu,
                ScalingLimit.USD_PER_HOUR: objectives.affordable_replicas,
            }
            limits.append(min(by_limit, key=by_limit.__getitem__))
        most_asleep = min(objectives.replicas_with_gpu, objectives.affordable_replicas) - desired
        return ScalingDecision(
            at_s=now_s,
            desired=desired,
            asleep=max(0, min(objectives.sleeping_replicas, most_asleep)),
            reason=self._reason(demand, times, prediction, need, desired, limits),
            evidence=self._evidence(demand, times, prediction, desired, hold_until_s, tuple(limits)),
            override_until_s=None if override is None else override.until_s,
        )

    def _reason(
        self,
        demand: Demand,
        times: ReadyTimes,
        prediction: ScalingPrediction | None,
        need: int,
        desired: int,
        limits: Sequence[ScalingLimit],
    ) -> ScalingReason:
        objectives = self.objectives
        if self.override is not None:
            return ScalingReason.OVERRIDE
        if prediction is None:
            return ScalingReason.UNKNOWN_CAPACITY
        if ScalingLimit.MAX_REPLICAS in limits or ScalingLimit.USD_PER_HOUR in limits:
            return ScalingReason.LIMITED
        if not prediction.is_reachable:
            return ScalingReason.UNREACHABLE
        if desired > times.committed:
            if ScalingLimit.MIN_REPLICAS in limits:
                return ScalingReason.MINIMUM
            if desired <= prediction.least_by_capacity(objectives.confidence, objectives.target_utilisation):
                return ScalingReason.UTILISATION
            return ScalingReason.BACKLOG if demand.waiting else ScalingReason.FORECAST
        if desired < times.committed:
            return ScalingReason.SURPLUS if desired else ScalingReason.IDLE
        if ScalingLimit.MIN_REPLICAS in limits:
            return ScalingReason.MINIMUM
        if need < desired:
            return ScalingReason.HOLDING
        return ScalingReason.STEADY if desired else ScalingReason.IDLE

    def _evidence(
        self,
        demand: Demand,
        times: ReadyTimes,
        prediction: ScalingPrediction | None,
        desired: int,
        hold_until_s: float | None,
        limits: tuple[ScalingLimit, ...],
    ) -> ScalingEvidence:
        lead_s = times.lead_s
        ttft_s = one_less_s = itl_s = None
        if prediction is not None:
            played = prediction.play(desired)
            ttft_s, itl_s = prediction.alone_ttft_s + played.longest_wait_s, played.itl_s
            if desired:
                one_less_s = prediction.alone_ttft_s + prediction.play(desired - 1).longest_wait_s
        return ScalingEvidence(
            objectives=self.objectives,
            ready=times.ready,
            coming=times.coming,
            ttft_s=ttft_s,
            ttft_with_one_less_s=one_less_s,
            itl_s=itl_s,
            utilisation=None if prediction is None or not desired else prediction.utilisation(desired),
            replica_requests_per_s=None if prediction is None else prediction.requests_per_s,
            requests_per_s=self.forecast.range(lead_s),
            forecast_coverage=self.forecast.coverage,
            waiting=demand.waiting,
            running=demand.running,
            lead_time_s=lead_s,
            hold_until_s=hold_until_s,
            limits=limits,
        )


def _need_blindly(demand: Demand, times: ReadyTimes) -> int:
    """Returns the number of replicas while none was measured: one if anything is asked for, and none goes."""
    return max(times.committed, 1 if demand.any else 0)
