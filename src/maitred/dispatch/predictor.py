"""Predictions for requests: output length, wait, first token, learnt from those that ran."""

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
from maitred.dispatch.pool_queue import QueuedRequest, QueueState
from maitred.fairness.entry import WorkAhead

UNMEASURED = StepTimes()
"""Of a replica that has not told yet how long its steps take, or never tells."""
_GOLDEN = 0.6180339887
"""Multiples of it, modulo 1, are spread evenly however many there are."""
_SURE = 0.5
"""A measured rate that is trusted by so much can send requests elsewhere."""
_FOLLOW = 0.05
"""Weight of the newest request in what is typical."""


class RunningWork(Struct, frozen=True):
    """Slots and blocks that running answers still hold, and for how long."""

    cases: tuple[list[tuple[float, str]], list[tuple[float, str]]]
    """Steps that each still takes, the fewest first, and whose it is; as it may turn out, in two opposite ways."""
    places: int
    """How many have one, or several."""
    blocks_per_place: float
    """KV blocks that come free with one."""
    output_tokens: float
    """Of an answer of theirs from its first token to its end, by how often one ends."""


class LatencyPredictor:
    """The predictions for one model.

    Args:
        outputs: How long answers are.
        weights: What tokens count.

    Attributes:
        served: Service done since the beginning.
        caution: By how much waits may be longer than predicted.
        calibration: The last predictions of times to first token, and what came.
    """

    def __init__(self, outputs: OutputLengths, weights: ServiceWeights) -> None:
        self.outputs = outputs
        self.served = 0.0
        self.caution = SafetyMargin()
        self.calibration = PredictionCalibration()
        self.weights = weights
        self._served = ServiceRate()
        self._steps = ServiceRate(memory_s=5.0)
        self._wait = PredictionCorrection()
        self._prefill = PredictionCorrection()
        # Means that follow:
        self._prompt_tokens = 256.0
        """Of a prompt, those that had to be computed."""
        self._fresh = 1.0
        """Which part of prompts that was."""
        self._blocks = 1.0
        """Per place."""
        self._learnt: TypicalRequest | None = None
        """What is typical; None: something was learnt since somebody asked."""

    def per_s(self, endpoint_states: Sequence[EndpointState]) -> float | None:
        """Service per second of all that are ready together."""
        return self._served.per_s(self._computed_per_s(endpoint_states))

    def is_sure(self, endpoint_states: Sequence[EndpointState]) -> bool:
        """Whether the rate is more than a first impression: what a crowd begins with is not how it goes on."""
        return self._served.trust >= _SURE or self._computed_per_s(endpoint_states) is not None

    def _computed_per_s(self, endpoint_states: Sequence[EndpointState]) -> float | None:
        """By the models of their steps; None: they have measured none."""
        computed = sum(
            computed_rate(endpoint_state.load.times, self._typical, self._places(endpoint_state), self.weights) or 0.0
            for endpoint_state in endpoint_states
        )
        return computed or None

    def steps_per_s(self, endpoint_states: Sequence[EndpointState], at_work: RunningWork) -> float | None:
        """Steps per second of one of them, full with such as run now."""
        parts = self._step_parts(endpoint_states, at_work)
        return self._steps.per_s(len(parts) / sum(part.whole_s for part in parts) if parts else None)

    def _step_parts(self, endpoint_states: Sequence[EndpointState], at_work: RunningWork) -> list[StepParts]:
        """Returns the step times of the endpoints that have measured them, full as they are."""
        alike, places = self._typical, 0
        if self._steps.trust < 1.0:
            alike = TypicalRequest(self._prompt_tokens, at_work.output_tokens)
            places = math.ceil(at_work.places / len(endpoint_states))
        return [
            parts
            for endpoint_state in endpoint_states
            if (parts := step_parts(endpoint_state.load.times, alike, places or self._places(endpoint_state)))
            is not None
        ]

    def turn_s(
        self, turn: PredictedTurn, endpoint_states: Sequence[EndpointState], at_work: RunningWork, now_s: float
    ) -> float | None:
        """Seconds until a turn, if they can be told.

        Steps in which a prompt is computed are longer than others, and over a short wait it matters how many these are.
        How long all of them are together is as it was measured; how that is shared out, as the engine's model of its
        steps says. Steps are counted from the last reports, so what has passed since is over.
        """
        steps_per_s = self.steps_per_s(endpoint_states, at_work)
        if not steps_per_s:
            return None
        parts = self._step_parts(endpoint_states, at_work)
        passed_s = sum(now_s - endpoint_state.step_began_s for endpoint_state in endpoint_states) / len(endpoint_states)
        if not parts:
            return max(0.0, turn.steps / steps_per_s - passed_s)
        decodes_s = sum(part.decodes_s for part in parts) / len(parts)
        prompt_s = sum(part.prompt_s for part in parts) / len(parts)
        whole_s = sum(part.whole_s for part in parts) / len(parts)
        prompts = turn.releases + sum(
            endpoint_state.load.waiting + endpoint_state.credits.uncounted.slots for endpoint_state in endpoint_states
        )
        seconds = turn.steps * decodes_s + prompts / len(endpoint_states) * prompt_s
        return max(0.0, seconds / (whole_s * steps_per_s) - passed_s)

    def at_work(self, entries: Collection[QueuedRequest]) -> RunningWork:
        """Returns what dispatched requests that have not left still hold."""
        cases: tuple[list[tuple[float, str]], list[tuple[float, str]]] = ([], [])
        draw = 0.0
        places, blocks, ends_per_step = 0, 0, 0.0
        for queued in entries:
            dispatch_request = queued.request
            produced = queued.output_tokens / queued.cost.slots
            draw = (draw + _GOLDEN) % 1.0
            drawn = self.outputs.on_leave(
                dispatch_request.principal_org, produced, dispatch_request.max_tokens, (draw, 1.0 - draw)
            )
            cost = queued.cost
            for left, tokens in zip(cases, drawn, strict=True):
                left += [(tokens if queued.begun else tokens + 1.0, queued.tenant.id)] * cost.slots
                ends_per_step += cost.slots / max(1.0, produced + tokens) / len(cases)
            places, blocks = places + cost.slots, blocks + cost.blocks
        for left in cases:
            left.sort()
        if not places:
            return RunningWork(cases, 0, self._blocks, self._typical.output_tokens)
        return RunningWork(cases, places, blocks / places, places / ends_per_step)

    def wait(
        self,
        queued: QueuedRequest,
        ahead: WorkAhead,
        free: Cost,
        ready: Sequence[EndpointState],
        at_work: RunningWork,
        turn_s: float | None,
    ) -> PredictedWait:
        """Until it is released, before any correction.

        Args:
            queued: The request.
            ahead: What the line says is before it.
            free: What it may use.
            ready: The replicas.
            at_work: What runs there.
            turn_s: Until its turn, where the line was played through.
        """
        queue = QueueAhead(
            entries=ahead.entries,
            service=ahead.service,
            free=free,
            left=[[steps for steps, _ in case] for case in at_work.cases],
            seconds_until_turn=turn_s,
            service_per_place=self.typical_service,
            blocks_per_place=self._blocks,
            blocks_held=at_work.blocks_per_place,
            steps_per_entry=self.steps_of(ahead.service / ahead.entries if ahead.entries else 0.0),
            per_s=self.per_s(ready),
            steps_per_s=self.steps_per_s(ready, at_work),
        )
        return predict_wait(queue, queued.cost)

    def steps(self, queued: QueuedRequest) -> float:
        """For how many steps it will keep its places, counted when it joined."""
        service = queued.service - self.weights.prompt * queued.request.prompt_tokens
        return max(1.0, service / self.weights.output / queued.request.choices) + 1.0

    def steps_of(self, service: float) -> float:
        """For how many steps a request of so much service keeps its place."""
        return max(1.0, (service - self.prompt_service) / self.weights.output) + 1.0

    @property
    def prompt_service(self) -> float:
        """Service of a typical prompt."""
        return self.weights.prompt * self._prompt_tokens

    def prompt_service_of(self, queued: QueuedRequest) -> float:
        """Returns the service of an entry's prompt, as far as it has to be computed."""
        return self.weights.prompt * self.to_compute(queued.request.prompt_tokens)

    def full(self, steps: int, now_s: float) -> None:
        """Requests wait, and there is no room for them."""
        self._served.full(self.served, now_s)
        self._steps.full(steps, now_s)

    def slack(self) -> None:
        """Notes that replicas have free capacity."""
        self._served.slack()
        self._steps.slack()

    @property
    def typical_prompt_tokens(self) -> float:
        """Tokens that had to be computed of a typical prompt."""
        return self._prompt_tokens

    @property
    def typical_service(self) -> float:
        """Service of a typical request."""
        return self._typical.service(self.weights)

    @property
    def _typical(self) -> TypicalRequest:
        """A request as most are, by all that ended until now."""
        if self._learnt is None:
            mean = self.outputs.mean
            self._learnt = TypicalRequest(self._prompt_tokens, 64.0 if mean is None else mean)
        return self._learnt

    def _places(self, endpoint_state: EndpointState) -> int:
        total = endpoint_state.total
        return min(total.slots, int(total.blocks / max(1.0, self._blocks)))

    def to_compute(self, prompt_tokens: int) -> float:
        """How many tokens of such a prompt have to be computed, usually."""
        return prompt_tokens * self._fresh

    def prefill_s(
        self, tokens: float, held_tokens: float, endpoint_state: EndpointState, ahead: int, now_s: float
    ) -> float:
        """From a request's release to its first token, before any correction.

        Args:
            tokens: Of its prompt, that have to be computed...
            held_tokens: ...and that need not be.
            endpoint_state: Where it will run.
            ahead: Requests that are released to it in the same moment.
            now_s: Now.
        """
        if endpoint_state.load.times == UNMEASURED:
            return 0.0
        fresh, in_flight = self._fresh, endpoint_state.in_flight
        sent = endpoint_state.credits.uncounted.minus(in_flight)
        return predict_prefill_s(
            endpoint_state.load,
            tokens,
            UnreportedPrompts(in_flight.slots, in_flight.prompt_tokens * fresh),
            UnreportedPrompts(
                max(0, sent.slots) + ahead, max(0, sent.prompt_tokens) * fresh + ahead * self._prompt_tokens
            ),
            endpoint_state.block_tokens,
            now_s - endpoint_state.step_began_s,
            held_tokens=held_tokens,
        )

    def position(self, position: int, wait_s: float, prefill_s: float, now_s: float) -> QueuePosition:
        """Returns the queue position as the caller is told it."""
        if not (wait_s or prefill_s):
            return QueuePosition(position, 0.0, 0.0)
        if wait_s:
            wait_s *= self._wait.factor(now_s)
        return QueuePosition(
            position, wait_s, wait_s + self.corrected_prefill_s(prefill_s, now_s) if prefill_s else wait_s
        )

    def cautious_s(self, position: QueuePosition) -> float:
        """A predicted time to the first token with what is added because a wait is not certain."""
        return position.ttft_s + (self.caution.factor - 1.0) * position.wait_s

    def corrected_prefill_s(self, prefill_s: float, now_s: float) -> float:
        """A predicted prefill as it is believed now."""
        return prefill_s * self._prefill.factor(now_s)

    # --- what it learns ---

    def on_dispatch(self, queued: QueuedRequest) -> None:
        """A request was given places."""
        cost = queued.cost
        self._blocks += _FOLLOW * (cost.blocks / (cost.slots or 1) - self._blocks)

    def on_waited(self, queued: QueuedRequest, now_s: float) -> None:
        """A request has been released, or has given up waiting, which it would have had to do for longer."""
        predicted = queued.predicted_position
        if predicted is None or queued.raw_wait_s <= 0 or _was_cold(queued):
            return
        waited_s = now_s - queued.joined_s
        if queued.state is QueueState.RELEASED or waited_s > predicted.wait_s:
            self._wait.compare(queued.raw_wait_s, waited_s, now_s)
            self.caution.compare(predicted.wait_s, waited_s)

    def on_first_token(self, queued: QueuedRequest, now_s: float) -> None:
        """The first token of a released request came."""
        predicted = queued.predicted_position
        if predicted is None or not (queued.prefill_s > 0 or predicted.ttft_s > 0) or _was_cold(queued):
            return
        if queued.prefill_s > 0:
            self._prefill.compare(queued.prefill_s, now_s - queued.dispatched_s, now_s)
        if predicted.ttft_s > 0:
            self.calibration.compare(predicted.ttft_s, now_s - queued.joined_s)

    def on_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt was computed, as far as it was not found in the cache."""
        self._prompt_tokens += _FOLLOW * (prompt_tokens - cached_tokens - self._prompt_tokens)
        self._fresh += _FOLLOW * (1.0 - cached_tokens / prompt_tokens - self._fresh)
        self._learnt = None

    def on_finished(self, queued: QueuedRequest) -> None:
        """A request came to its end by itself."""
        dispatch_request, tokens = queued.request, queued.output_tokens
        if tokens or not dispatch_request.max_tokens:
            per_choice = tokens if dispatch_request.choices == 1 else round(tokens / dispatch_request.choices)
            self.outputs.observe(dispatch_request.principal_org, per_choice, dispatch_request.max_tokens)
            self._learnt = None


def _was_cold(queued: QueuedRequest) -> bool:
    """Whether it waited for a replica to come back, which nobody can predict, and nothing is to be learnt from."""
    return WaitCause.COLD_START in queued.waited_ms
