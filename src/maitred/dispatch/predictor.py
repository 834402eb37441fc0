"""What is predicted for requests: length of the answer, wait, first token. It learns from those that ran."""

import math
from collections.abc import Collection, Sequence

from msgspec import Struct

from maitred.core.flow import QueuePosition, ServiceWeights
from maitred.core.replica import StepTimes
from maitred.core.request import WaitCause
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.calibration import PredictionCalibration, PredictionCorrection, SafetyMargin
from maitred.dispatch.policy.credits import Cost
from maitred.dispatch.policy.outputs import OutputLengths
from maitred.dispatch.policy.prediction import PredictedWait, QueueAhead, UnreportedPrompts, prefill_of, wait_of
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
    """What the running answers still hold, and for how long."""

    ways: tuple[list[tuple[float, str]], list[tuple[float, str]]]
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

    def per_s(self, stations: Sequence[EndpointState]) -> float | None:
        """Service per second of all that are ready together."""
        return self._served.per_s(self._computed_per_s(stations))

    def is_sure(self, stations: Sequence[EndpointState]) -> bool:
        """Whether the rate is more than a first impression: what a crowd begins with is not how it goes on."""
        return self._served.trust >= _SURE or self._computed_per_s(stations) is not None

    def _computed_per_s(self, stations: Sequence[EndpointState]) -> float | None:
        """By the models of their steps; None: they have measured none."""
        computed = sum(
            computed_rate(station.load.times, self._typical, self._places(station), self.weights) or 0.0
            for station in stations
        )
        return computed or None

    def steps_per_s(self, stations: Sequence[EndpointState], at_work: RunningWork) -> float | None:
        """Steps per second of one of them, full with such as run now."""
        parts = self._step_parts(stations, at_work)
        return self._steps.per_s(len(parts) / sum(part.whole_s for part in parts) if parts else None)

    def _step_parts(self, stations: Sequence[EndpointState], at_work: RunningWork) -> list[StepParts]:
        """Of those stations that have measured their steps, full as they are; or as they are when they are measured."""
        alike, places = self._typical, 0
        if self._steps.trust < 1.0:
            alike = TypicalRequest(self._prompt_tokens, at_work.output_tokens)
            places = math.ceil(at_work.places / len(stations))
        return [
            parts
            for station in stations
            if (parts := step_parts(station.load.times, alike, places or self._places(station))) is not None
        ]

    def turn_s(
        self, turn: PredictedTurn, stations: Sequence[EndpointState], at_work: RunningWork, now_s: float
    ) -> float | None:
        """Seconds until a turn, if they can be told.

        Steps in which a prompt is computed are longer than others, and over a short wait it matters how many these are.
        How long all of them are together is as it was measured; how that is shared out, as the engine's model of its
        steps says. Steps are counted from the last reports, so what has passed since is over.
        """
        steps_per_s = self.steps_per_s(stations, at_work)
        if not steps_per_s:
            return None
        parts = self._step_parts(stations, at_work)
        passed_s = sum(now_s - station.step_began_s for station in stations) / len(stations)
        if not parts:
            return max(0.0, turn.steps / steps_per_s - passed_s)
        decodes_s = sum(part.decodes_s for part in parts) / len(parts)
        prompt_s = sum(part.prompt_s for part in parts) / len(parts)
        whole_s = sum(part.whole_s for part in parts) / len(parts)
        prompts = turn.releases + sum(station.load.waiting + station.credits.uncounted.slots for station in stations)
        seconds = turn.steps * decodes_s + prompts / len(stations) * prompt_s
        return max(0.0, seconds / (whole_s * steps_per_s) - passed_s)

    def at_work(self, tickets: Collection[QueuedRequest]) -> RunningWork:
        """What those that were released and have not left still hold."""
        ways: tuple[list[tuple[float, str]], list[tuple[float, str]]] = ([], [])
        draw = 0.0
        places, blocks, ends_per_step = 0, 0, 0.0
        for ticket in tickets:
            errand = ticket.errand
            produced = ticket.output_tokens / ticket.cost.slots
            draw = (draw + _GOLDEN) % 1.0
            drawn = self.outputs.left(errand.principal_org, produced, errand.max_tokens, (draw, 1.0 - draw))
            cost = ticket.cost
            for left, tokens in zip(ways, drawn, strict=True):
                left += [(tokens if ticket.begun else tokens + 1.0, ticket.tenant.id)] * cost.slots
                ends_per_step += cost.slots / max(1.0, produced + tokens) / len(ways)
            places, blocks = places + cost.slots, blocks + cost.blocks
        for left in ways:
            left.sort()
        if not places:
            return RunningWork(ways, 0, self._blocks, self._typical.output_tokens)
        return RunningWork(ways, places, blocks / places, places / ends_per_step)

    def wait(
        self,
        ticket: QueuedRequest,
        ahead: WorkAhead,
        free: Cost,
        ready: Sequence[EndpointState],
        at_work: RunningWork,
        turn_s: float | None,
    ) -> PredictedWait:
        """Until it is released, before any correction.

        Args:
            ticket: The request.
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
            left=[[steps for steps, _ in way] for way in at_work.ways],
            seconds_until_turn=turn_s,
            service_per_place=self.typical_service,
            blocks_per_place=self._blocks,
            blocks_held=at_work.blocks_per_place,
            steps_per_entry=self.steps_of(ahead.service / ahead.entries if ahead.entries else 0.0),
            per_s=self.per_s(ready),
            steps_per_s=self.steps_per_s(ready, at_work),
        )
        return wait_of(queue, ticket.cost)

    def steps(self, ticket: QueuedRequest) -> float:
        """For how many steps it will keep its places, counted when it joined."""
        service = ticket.service - self.weights.prompt * ticket.errand.prompt_tokens
        return max(1.0, service / self.weights.output / ticket.errand.choices) + 1.0

    def steps_of(self, service: float) -> float:
        """For how many steps a request of so much service keeps its place."""
        return max(1.0, (service - self.prompt_service) / self.weights.output) + 1.0

    @property
    def prompt_service(self) -> float:
        """What a typical prompt counts."""
        return self.weights.prompt * self._prompt_tokens

    def prompt_service_of(self, ticket: QueuedRequest) -> float:
        """What the prompt of this one counts, as far as it has to be computed."""
        return self.weights.prompt * self.to_compute(ticket.errand.prompt_tokens)

    def full(self, steps: int, now_s: float) -> None:
        """Requests wait, and there is no room for them."""
        self._served.full(self.served, now_s)
        self._steps.full(steps, now_s)

    def slack(self) -> None:
        """There is room."""
        self._served.slack()
        self._steps.slack()

    @property
    def typical_prompt_tokens(self) -> float:
        """That had to be computed of a prompt."""
        return self._prompt_tokens

    @property
    def typical_service(self) -> float:
        """Of a request."""
        return self._typical.service(self.weights)

    @property
    def _typical(self) -> TypicalRequest:
        """A request as most are, by all that ended until now."""
        if self._learnt is None:
            mean = self.outputs.mean
            self._learnt = TypicalRequest(self._prompt_tokens, 64.0 if mean is None else mean)
        return self._learnt

    def _places(self, station: EndpointState) -> int:
        total = station.total
        return min(total.slots, int(total.blocks / max(1.0, self._blocks)))

    def to_compute(self, prompt_tokens: int) -> float:
        """How many tokens of such a prompt have to be computed, usually."""
        return prompt_tokens * self._fresh

    def prefill_s(self, tokens: float, held_tokens: float, station: EndpointState, ahead: int, now_s: float) -> float:
        """From a request's release to its first token, before any correction.

        Args:
            tokens: Of its prompt, that have to be computed...
            held_tokens: ...and that need not be.
            station: Where it will run.
            ahead: Requests that are released to it in the same moment.
            now_s: Now.
        """
        if station.load.times == UNMEASURED:
            return 0.0
        fresh, under_way = self._fresh, station.under_way
        sent = station.credits.uncounted.minus(under_way)
        return prefill_of(
            station.load,
            tokens,
            UnreportedPrompts(under_way.slots, under_way.prompt_tokens * fresh),
            UnreportedPrompts(
                max(0, sent.slots) + ahead, max(0, sent.prompt_tokens) * fresh + ahead * self._prompt_tokens
            ),
            station.block_tokens,
            now_s - station.step_began_s,
            held_tokens=held_tokens,
        )

    def place(self, position: int, wait_s: float, prefill_s: float, now_s: float) -> QueuePosition:
        """What is said to the caller."""
        if not (wait_s or prefill_s):
            return QueuePosition(position, 0.0, 0.0)
        if wait_s:
            wait_s *= self._wait.factor(now_s)
        return QueuePosition(
            position, wait_s, wait_s + self.corrected_prefill_s(prefill_s, now_s) if prefill_s else wait_s
        )

    def cautious_s(self, place: QueuePosition) -> float:
        """A predicted time to the first token with what is added because a wait is not certain."""
        return place.ttft_s + (self.caution.factor - 1.0) * place.wait_s

    def corrected_prefill_s(self, prefill_s: float, now_s: float) -> float:
        """A predicted prefill as it is believed now."""
        return prefill_s * self._prefill.factor(now_s)

    # --- what it learns ---

    def released(self, ticket: QueuedRequest) -> None:
        """A request was given places."""
        cost = ticket.cost
        self._blocks += _FOLLOW * (cost.blocks / (cost.slots or 1) - self._blocks)

    def waited(self, ticket: QueuedRequest, now_s: float) -> None:
        """A request has been released, or has given up waiting, which it would have had to do for longer."""
        predicted = ticket.predicted
        if predicted is None or ticket.raw_wait_s <= 0 or _was_cold(ticket):
            return
        waited_s = now_s - ticket.joined_s
        if ticket.state is QueueState.RELEASED or waited_s > predicted.wait_s:
            self._wait.compare(ticket.raw_wait_s, waited_s, now_s)
            self.caution.compare(predicted.wait_s, waited_s)

    def first_token(self, ticket: QueuedRequest, now_s: float) -> None:
        """The first token of a released request came."""
        predicted = ticket.predicted
        if predicted is None or not (ticket.prefill_s > 0 or predicted.ttft_s > 0) or _was_cold(ticket):
            return
        if ticket.prefill_s > 0:
            self._prefill.compare(ticket.prefill_s, now_s - ticket.released_s, now_s)
        if predicted.ttft_s > 0:
            self.calibration.compare(predicted.ttft_s, now_s - ticket.joined_s)

    def prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt was computed, as far as it was not found in the cache."""
        self._prompt_tokens += _FOLLOW * (prompt_tokens - cached_tokens - self._prompt_tokens)
        self._fresh += _FOLLOW * (1.0 - cached_tokens / prompt_tokens - self._fresh)
        self._learnt = None

    def finished(self, ticket: QueuedRequest) -> None:
        """A request came to its end by itself."""
        errand, tokens = ticket.errand, ticket.output_tokens
        if tokens or not errand.max_tokens:
            each = tokens if errand.choices == 1 else round(tokens / errand.choices)
            self.outputs.saw(errand.principal_org, each, errand.max_tokens)
            self._learnt = None


def _was_cold(ticket: QueuedRequest) -> bool:
    """Whether it waited for a replica to come back, which nobody can predict, and nothing is to be learnt from."""
    return WaitCause.COLD_START in ticket.waited_ms
