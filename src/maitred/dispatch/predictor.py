"""Predicts wait, time to first token and output length from earlier requests."""

import math
from collections.abc import Collection, Sequence

from msgspec import Struct

from maitred.core.flow import QueuePosition, ServiceWeights
from maitred.core.replica import StepTimes
from maitred.core.request import WaitCause
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.credits import Cost
from maitred.dispatch.policy.outputs import OutputLengths
from maitred.dispatch.policy.prediction import (
    PredictedWait,
    PredictionCalibration,
    PredictionCorrection,
    QueueAhead,
    SafetyMargin,
    UnreportedPrompts,
    predict_prefill_s,
    predict_wait,
)
from maitred.dispatch.policy.rate import ServiceRate, StepParts, TypicalRequest, computed_rate, step_parts
from maitred.dispatch.policy.simulation import PredictedTurn
from maitred.dispatch.queue import QueuedRequest, QueueState
from maitred.fairness.entry import WorkAhead

UNMEASURED = StepTimes()
"""Step times of a replica that has not reported any."""
_GOLDEN_RATIO = 0.6180339887
"""Multiples of the golden ratio modulo 1 are spread evenly over 0 to 1."""
_MIN_RATE_TRUST = 0.5
"""Least trust in the measured rate for overflow decisions."""
_MEAN_WEIGHT = 0.05
"""Weight of the newest request in the moving averages."""


class RunningWork(Struct, frozen=True):
    """Slots and KV blocks of running requests, and their remaining steps."""

    cases: tuple[list[tuple[float, str]], list[tuple[float, str]]]
    """Two samples of (remaining steps, tenant id) of each slot, ascending; the second uses opposite draws."""
    places: int
    """Number of slots that running requests hold."""
    blocks_per_place: float
    """KV blocks that are freed with each slot."""
    output_tokens: float
    """Mean output length of the running requests, weighted by completion rate."""


class LatencyPredictor:
    """Predictor of waits, prefill times and output lengths for one model.

    Args:
        outputs: Distribution of output lengths.
        weights: Service of each kind of token.

    Attributes:
        served: Total service since the start.
        safety_margin: Safety margin of predicted waits.
        calibration: The last predicted and actual times to first token.
    """

    def __init__(self, outputs: OutputLengths, weights: ServiceWeights) -> None:
        self.outputs = outputs
        self.served = 0.0
        self.safety_margin = SafetyMargin()
        self.calibration = PredictionCalibration()
        self.weights = weights
        self._service_rate = ServiceRate()
        self._steps = ServiceRate(memory_s=5.0)
        self._wait = PredictionCorrection()
        self._prefill = PredictionCorrection()
        # Exponential moving averages:
        self._mean_uncached_prompt_tokens = 256.0
        """Mean prompt tokens that were not cached."""
        self._uncached_share = 1.0
        """Mean share of prompt tokens that were not cached."""
        self._mean_blocks_per_slot = 1.0
        """Mean KV blocks per slot."""
        self._typical_request: TypicalRequest | None = None
        """Cached typical request; None: it must be computed again."""

    def per_s(self, endpoint_states: Sequence[EndpointState]) -> float | None:
        """Returns the service per second of these endpoints together."""
        return self._service_rate.per_s(self._computed_per_s(endpoint_states))

    def is_rate_known(self, endpoint_states: Sequence[EndpointState]) -> bool:
        """Whether the service rate is known well enough; the first seconds of a burst are not typical."""
        return self._service_rate.trust >= _MIN_RATE_TRUST or self._computed_per_s(endpoint_states) is not None

    def _computed_per_s(self, endpoint_states: Sequence[EndpointState]) -> float | None:
        """Returns the rate from the engines' step times; None: no engine has reported any."""
        computed = sum(
            computed_rate(endpoint_state.load.times, self._typical, self._usable_slots(endpoint_state), self.weights)
            or 0.0
            for endpoint_state in endpoint_states
        )
        return computed or None

    def steps_per_s(self, endpoint_states: Sequence[EndpointState], running_work: RunningWork) -> float | None:
        """Returns the steps per second of one endpoint with a batch like the current one."""
        parts = self._step_parts(endpoint_states, running_work)
        return self._steps.per_s(len(parts) / sum(part.whole_s for part in parts) if parts else None)

    def _step_parts(self, endpoint_states: Sequence[EndpointState], running_work: RunningWork) -> list[StepParts]:
        """Returns step times for a full batch at each endpoint that reports step times."""
        typical, places = self._typical, 0
        if self._steps.trust < 1.0:
            typical = TypicalRequest(self._mean_uncached_prompt_tokens, running_work.output_tokens)
            places = math.ceil(running_work.places / len(endpoint_states))
        return [
            parts
            for endpoint_state in endpoint_states
            if (parts := step_parts(endpoint_state.load.times, typical, places or self._usable_slots(endpoint_state)))
            is not None
        ]

    def turn_s(
        self, turn: PredictedTurn, endpoint_states: Sequence[EndpointState], running_work: RunningWork, now_s: float
    ) -> float | None:
        """Returns the seconds until a turn; None: the step rate is unknown.

        Steps with a prefill take longer, so their number matters for short waits. The mean step time is measured; the
        engine's step model splits it between decodes and prefills. Steps are counted from the last load reports, so the
        time since then is subtracted.
        """
        steps_per_s = self.steps_per_s(endpoint_states, running_work)
        if not steps_per_s:
            return None
        parts = self._step_parts(endpoint_states, running_work)
        passed_s = sum(now_s - endpoint_state.step_began_s for endpoint_state in endpoint_states) / len(endpoint_states)
        if not parts:
            return max(0.0, turn.steps / steps_per_s - passed_s)
        decodes_s = sum(part.decodes_s for part in parts) / len(parts)
        prompt_s = sum(part.prompt_s for part in parts) / len(parts)
        whole_s = sum(part.whole_s for part in parts) / len(parts)
        prompts = turn.dispatched_before + sum(
            endpoint_state.load.waiting + endpoint_state.credits.unreported.slots for endpoint_state in endpoint_states
        )
        seconds = turn.steps * decodes_s + prompts / len(endpoint_states) * prompt_s
        return max(0.0, seconds / (whole_s * steps_per_s) - passed_s)

    def running_work(self, running_requests: Collection[QueuedRequest]) -> RunningWork:
        """Returns the slots, blocks and remaining steps of running requests."""
        cases: tuple[list[tuple[float, str]], list[tuple[float, str]]] = ([], [])
        draw = 0.0
        places, blocks, ends_per_step = 0, 0, 0.0
        for queued in running_requests:
            dispatch_request = queued.request
            produced_per_slot = queued.output_tokens / queued.cost.slots
            draw = (draw + _GOLDEN_RATIO) % 1.0
            drawn = self.outputs.sample_remaining_tokens(
                dispatch_request.organisation, produced_per_slot, dispatch_request.max_tokens, (draw, 1.0 - draw)
            )
            cost = queued.cost
            for remaining_steps, tokens in zip(cases, drawn, strict=True):
                remaining_steps += [(tokens if queued.has_output else tokens + 1.0, queued.tenant.id)] * cost.slots
                ends_per_step += cost.slots / max(1.0, produced_per_slot + tokens) / len(cases)
            places, blocks = places + cost.slots, blocks + cost.blocks
        for remaining_steps in cases:
            remaining_steps.sort()
        if not places:
            return RunningWork(cases, 0, self._mean_blocks_per_slot, self._typical.output_tokens)
        return RunningWork(cases, places, blocks / places, places / ends_per_step)

    def wait(
        self,
        queued: QueuedRequest,
        ahead: WorkAhead,
        free: Cost,
        ready: Sequence[EndpointState],
        running_work: RunningWork,
        turn_s: float | None,
    ) -> PredictedWait:
        """Predicts the wait until dispatch, without correction.

        Args:
            queued: The request.
            ahead: Work that the fair queue puts before the request.
            free: Free credits that the request may use.
            ready: The replicas.
            running_work: Work of the running requests.
            turn_s: Seconds until its turn from the simulation; None: not simulated.
        """
        queue = QueueAhead(
            entries=ahead.entries,
            service=ahead.service,
            free=free,
            left=[[steps for steps, _ in case] for case in running_work.cases],
            seconds_until_turn=turn_s,
            service_per_place=self.typical_service,
            blocks_per_place=self._mean_blocks_per_slot,
            blocks_held=running_work.blocks_per_place,
            steps_per_entry=self.steps_of(ahead.service / ahead.entries if ahead.entries else 0.0),
            per_s=self.per_s(ready),
            steps_per_s=self.steps_per_s(ready, running_work),
        )
        return predict_wait(queue, queued.cost)

    def steps(self, queued: QueuedRequest) -> float:
        """Returns the steps for which a request will hold its slots, predicted when it joined."""
        service = queued.service - self.weights.prompt * queued.request.prompt_tokens
        return max(1.0, service / self.weights.output / queued.request.choices) + 1.0

    def steps_of(self, service: float) -> float:
        """Returns the steps for which a request with this service holds its slot."""
        return max(1.0, (service - self.prompt_service) / self.weights.output) + 1.0

    @property
    def prompt_service(self) -> float:
        """Service of a typical prompt."""
        return self.weights.prompt * self._mean_uncached_prompt_tokens

    def prompt_service_of(self, queued: QueuedRequest) -> float:
        """Returns the expected service of the uncached tokens of an entry's prompt."""
        return self.weights.prompt * self.expected_uncached_tokens(queued.request.prompt_tokens)

    def on_saturated(self, steps: int, now_s: float) -> None:
        """Records that all replicas are full while requests wait."""
        self._service_rate.on_saturated(self.served, now_s)
        self._steps.on_saturated(steps, now_s)

    def on_unsaturated(self) -> None:
        """Records that replicas have free capacity, which pauses the measurement."""
        self._service_rate.on_unsaturated()
        self._steps.on_unsaturated()

    @property
    def typical_prompt_tokens(self) -> float:
        """Uncached tokens of a typical prompt."""
        return self._mean_uncached_prompt_tokens

    @property
    def typical_service(self) -> float:
        """Service of a typical request."""
        return self._typical.service(self.weights)

    @property
    def _typical(self) -> TypicalRequest:
        """Typical request, from the moving averages."""
        if self._typical_request is None:
            mean = self.outputs.mean
            self._typical_request = TypicalRequest(self._mean_uncached_prompt_tokens, 64.0 if mean is None else mean)
        return self._typical_request

    def _usable_slots(self, endpoint_state: EndpointState) -> int:
        total = endpoint_state.total
        return min(total.slots, int(total.blocks / max(1.0, self._mean_blocks_per_slot)))

    def expected_uncached_tokens(self, prompt_tokens: int) -> float:
        """Returns the expected uncached tokens of a prompt."""
        return prompt_tokens * self._uncached_share

    def prefill_s(
        self, tokens: float, held_tokens: float, endpoint_state: EndpointState, ahead: int, now_s: float
    ) -> float:
        """Predicts the seconds from dispatch to the first token, without correction.

        Args:
            tokens: Prompt tokens that have to be computed.
            held_tokens: Prompt tokens that are cached.
            endpoint_state: Endpoint where the request will run.
            ahead: Number of requests that are dispatched to that endpoint just before it.
            now_s: Now.
        """
        if endpoint_state.load.times == UNMEASURED:
            return 0.0
        fresh, in_flight = self._uncached_share, endpoint_state.in_flight
        sent = endpoint_state.credits.unreported.minus(in_flight)
        return predict_prefill_s(
            endpoint_state.load,
            tokens,
            UnreportedPrompts(in_flight.slots, in_flight.prompt_tokens * fresh),
            UnreportedPrompts(
                max(0, sent.slots) + ahead,
                max(0, sent.prompt_tokens) * fresh + ahead * self._mean_uncached_prompt_tokens,
            ),
            endpoint_state.block_tokens,
            now_s - endpoint_state.step_began_s,
            held_tokens=held_tokens,
        )

    def position(self, position: int, wait_s: float, prefill_s: float, now_s: float) -> QueuePosition:
        """Returns the corrected queue position for the caller."""
        if not (wait_s or prefill_s):
            return QueuePosition(position, 0.0, 0.0)
        if wait_s:
            wait_s *= self._wait.factor(now_s)
        return QueuePosition(
            position, wait_s, wait_s + self.corrected_prefill_s(prefill_s, now_s) if prefill_s else wait_s
        )

    def cautious_s(self, position: QueuePosition) -> float:
        """Returns the predicted time to first token plus the safety margin of the wait."""
        return position.ttft_s + (self.safety_margin.factor - 1.0) * position.wait_s

    def corrected_prefill_s(self, prefill_s: float, now_s: float) -> float:
        """Returns a predicted prefill time with the current correction."""
        return prefill_s * self._prefill.factor(now_s)

    # --- learning ---

    def on_dispatch(self, queued: QueuedRequest) -> None:
        """Updates the mean KV blocks per slot from a dispatched request."""
        cost = queued.cost
        self._mean_blocks_per_slot += _MEAN_WEIGHT * (cost.blocks / (cost.slots or 1) - self._mean_blocks_per_slot)

    def on_waited(self, queued: QueuedRequest, now_s: float) -> None:
        """Learns from a wait that ended with dispatch or failure."""
        predicted = queued.predicted_position
        if predicted is None or queued.raw_wait_s <= 0 or WaitCause.COLD_START in queued.waited_ms:
            return
        waited_s = now_s - queued.joined_s
        if queued.state is QueueState.DISPATCHED or waited_s > predicted.wait_s:
            self._wait.compare(queued.raw_wait_s, waited_s, now_s)
            self.safety_margin.compare(predicted.wait_s, waited_s)

    def on_first_token(self, queued: QueuedRequest, now_s: float) -> None:
        """Learns from the time to first token of a dispatched request."""
        predicted = queued.predicted_position
        # A wait for a replica to start says nothing about later requests.
        if predicted is None or WaitCause.COLD_START in queued.waited_ms:
            return
        if queued.prefill_s > 0:
            took_s = now_s - queued.dispatched_s
            if queued.allocation is not None and queued.allocation.endpoint_state.is_far:
                took_s = max(0.0, took_s - queued.allocation.endpoint_state.round_trip_s)
            self._prefill.compare(queued.prefill_s, took_s, now_s)
        if predicted.ttft_s > 0:
            self.calibration.compare(predicted.ttft_s, now_s - queued.joined_s)

    def on_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Updates the mean uncached prompt tokens from a computed prompt."""
        self._mean_uncached_prompt_tokens += _MEAN_WEIGHT * (
            prompt_tokens - cached_tokens - self._mean_uncached_prompt_tokens
        )
        self._uncached_share += _MEAN_WEIGHT * (1.0 - cached_tokens / prompt_tokens - self._uncached_share)
        self._typical_request = None

    def on_finished(self, queued: QueuedRequest) -> None:
        """Learns the output length of a request that completed normally."""
        dispatch_request, tokens = queued.request, queued.output_tokens
        if tokens or not dispatch_request.max_tokens:
            per_choice = tokens if dispatch_request.choices == 1 else round(tokens / dispatch_request.choices)
            self.outputs.observe(dispatch_request.organisation, per_choice, dispatch_request.max_tokens)
            self._typical_request = None
