"""The autoscaler of production in a simulated fleet."""

from benchmarks.support.scaling.fleet import Observation, SimulatedFleet
from benchmarks.support.scaling.fleet_kernels import ABSENT, DRAINING, SERVING, STARTING
from benchmarks.support.scaling.outcome import Setting
from maitred.scaling.autoscaler import Autoscaler
from maitred.scaling.capacity import ReplicaCapacity
from maitred.scaling.decision import ScalingDecision
from maitred.scaling.demand import ArrivalWindow, Demand
from maitred.scaling.forecast import DemandForecast
from maitred.scaling.objectives import ScalingObjectives
from maitred.scaling.replica_status import ReplicaPhase, ReplicaStatus
from maitred.scaling.startup_times import StartKind, StartupTimes

PHASES = {STARTING: ReplicaPhase.STARTING, SERVING: ReplicaPhase.SERVING, DRAINING: ReplicaPhase.DRAINING}
FIRST_OUTPUT_TOKENS = 256
"""Expected length of an answer before any has finished."""
KV_TOKENS_PER_SLOT = 100_000
"""So many that the KV cache never binds, as in the simulation."""
LAST_ANSWERS = 200
"""Answers from which the length of those to come is known."""


class ProductionPolicy:
    """The autoscaler, with what the gateway knows: output lengths are those of answers that have finished.

    Args:
        fleet: Fleet whose replicas it sees.
        setting: Objectives and limits.
        interval_s: Seconds between two decisions.

    Attributes:
        autoscaler: Autoscaler of production.
        decision: Its last decision.
    """

    at_wait = True

    def __init__(self, fleet: SimulatedFleet, setting: Setting, *, interval_s: float) -> None:
        self.interval_s = interval_s
        self._fleet = fleet
        objectives = ScalingObjectives(ttft_s=setting.ttft_s, itl_s=setting.itl_s, max_replicas=setting.most)
        self.autoscaler = Autoscaler(objectives, StartupTimes({StartKind.COLD: fleet.lead_s}), DemandForecast())
        self.decision: ScalingDecision | None = None
        kind = fleet.kind
        self._capacity = ReplicaCapacity(
            times=kind.times,
            max_sequences=kind.slots,
            kv_tokens=kind.slots * KV_TOKENS_PER_SLOT,
            step_tokens=kind.step_tokens,
        )
        self._seen_s, self._arrived = 0.0, 0
        self._phases: dict[int, tuple[int, float, float]] = {}

    def desired(self, seen: Observation) -> int:
        """See `ScalingPolicy`."""
        if seen.now_s <= self._seen_s and self.decision is not None:
            return self.decision.desired
        self.decision = self.autoscaler.decide(self._demand(seen), self._replicas(seen), self._capacity, seen.now_s)
        return self.decision.desired

    def _demand(self, seen: Observation) -> Demand:
        prompts = self._fleet.trace.prompt_sums
        window = ArrivalWindow(
            start_s=self._seen_s,
            length_s=seen.now_s - self._seen_s,
            requests=seen.arrived - self._arrived,
            prompt_tokens=float(prompts[seen.arrived] - prompts[self._arrived]),
            output_tokens=self._last_outputs(seen, seen.arrived - self._arrived),
        )
        self._seen_s, self._arrived = seen.now_s, seen.arrived
        mean = self._last_outputs(seen, LAST_ANSWERS) / LAST_ANSWERS
        return Demand(
            waiting=seen.waiting,
            waiting_prompt_tokens=float(prompts[seen.arrived] - prompts[seen.arrived - seen.waiting]),
            waiting_output_tokens=seen.waiting * mean,
            running=seen.running,
            oldest_wait_s=seen.oldest_wait_s,
            window=window,
        )

    def _last_outputs(self, seen: Observation, requests: int) -> float:
        """Returns the output tokens of so many answers that finished last."""
        sums = self._fleet.state.output_sums
        known = min(requests, seen.finished)
        mean = (sums[seen.finished] - sums[max(0, seen.finished - LAST_ANSWERS)]) / max(
            1, min(seen.finished, LAST_ANSWERS)
        )
        if not seen.finished:
            mean = FIRST_OUTPUT_TOKENS
        return float(sums[seen.finished] - sums[seen.finished - known] + (requests - known) * mean)

    def _replicas(self, seen: Observation) -> list[ReplicaStatus]:
        state = self._fleet.state
        statuses = []
        rows = zip(state.phase.tolist(), state.ordered.tolist(), strict=True)
        for row, (phase, ordered_s) in enumerate(rows):
            if phase == ABSENT:
                continue
            before = self._phases.get(row)
            if before is None or before[:2] != (phase, ordered_s):
                began_s = ordered_s if phase == STARTING else seen.now_s
                if before is not None and before[1] == ordered_s and before[0] == STARTING:
                    began_s = float(state.ready[row])
                    self.autoscaler.startup_times.observe(StartKind.COLD, began_s - ordered_s)
                self._phases[row] = before = (phase, ordered_s, began_s)
            statuses.append(ReplicaStatus(name=f"{row}-{ordered_s:g}", phase=PHASES[phase], since_s=before[2]))
        return statuses
