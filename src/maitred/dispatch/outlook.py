"""What is predicted for requests: length of the answer, wait, first token. It learns from those that ran."""

from collections.abc import Sequence

from maitred.core.answer import Place
from maitred.core.service import ServiceWeights
from maitred.dispatch.policy.calibration import Calibration, Correction
from maitred.dispatch.policy.credits import Cost
from maitred.dispatch.policy.outputs import OutputLengths
from maitred.dispatch.policy.prediction import Queue, Wait, prefill_of, wait_of
from maitred.dispatch.policy.rate import ServiceRate, Typical, computed_rate
from maitred.dispatch.station import Station
from maitred.dispatch.ticket import Ticket
from maitred.fairness.entry import Ahead

_FOLLOW = 0.05
"""Weight of the newest request in what is typical."""


class _Mean:
    """A mean that follows."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def saw(self, value: float) -> None:
        self.value += _FOLLOW * (value - self.value)


class Outlook:
    """The predictions for one model.

    Args:
        outputs: How long answers are.
        weights: What tokens count.

    Attributes:
        served: Service done since the beginning.
        rate: How fast.
        calibration: The last predictions of times to first token, and what came.
    """

    def __init__(self, outputs: OutputLengths, weights: ServiceWeights) -> None:
        self.outputs = outputs
        self.served = 0.0
        self.rate = ServiceRate()
        self.calibration = Calibration()
        self._weights = weights
        self._wait = Correction()
        self._prefill = Correction()
        self._prompt = _Mean(256.0)
        """Tokens of a prompt that had to be computed."""
        self._fresh = _Mean(1.0)
        """Which part of prompts that was."""
        self._blocks = _Mean(1.0)
        """Per place."""

    def per_s(self, stations: Sequence[Station]) -> float | None:
        """Service per second of all that are ready together."""
        typical = Typical(self._prompt.value, self.outputs.mean or 64.0)
        computed = 0.0
        for station in stations:
            total = station.total
            places = min(total.slots, int(total.blocks / max(1.0, self._blocks.value)))
            computed += computed_rate(station.load.times, typical, places, self._weights) or 0.0
        return self.rate.per_s(computed or None)

    def wait(self, ticket: Ticket, ahead: Ahead, free: Cost, per_s: float | None) -> Wait:
        """Until it is released, before any correction."""
        queue = Queue(
            ahead.entries,
            ahead.service,
            free,
            self._weights.prompt * self._prompt.value + self._weights.output * (self.outputs.mean or 64.0),
            self._blocks.value,
            per_s,
        )
        return wait_of(queue, ticket.cost)

    def prefill_s(self, ticket: Ticket, station: Station, ahead: int) -> float:
        """From its release to its first token, before any correction.

        Args:
            ticket: The request.
            station: Where it will run.
            ahead: Requests that are released to it in the same moment.
        """
        before = station.credits.uncounted.prompt_tokens * self._fresh.value + ahead * self._prompt.value
        own = ticket.errand.prompt_tokens * self._fresh.value
        return prefill_of(station.load, own, before, station.block_tokens)

    def place(self, position: int, wait_s: float, prefill_s: float, now_s: float) -> Place:
        """What is said to the caller."""
        wait_s *= self._wait.factor(now_s)
        return Place(position, wait_s, wait_s + self.corrected_prefill_s(prefill_s, now_s))

    def corrected_prefill_s(self, prefill_s: float, now_s: float) -> float:
        """A predicted prefill as it is believed now."""
        return prefill_s * self._prefill.factor(now_s)

    # --- what it learns ---

    def released(self, ticket: Ticket) -> None:
        """A request was given places."""
        self._blocks.saw(ticket.cost.blocks / max(1, ticket.cost.slots))

    def first_token(self, ticket: Ticket, now_s: float) -> None:
        """The first token of a released request came."""
        if ticket.predicted is None:
            return
        waited_s = ticket.released_s - ticket.joined_s
        if ticket.raw_wait_s > 0:
            self._wait.compare(ticket.raw_wait_s, waited_s, now_s)
        if ticket.prefill_s > 0:
            self._prefill.compare(ticket.prefill_s, now_s - ticket.released_s, now_s)
        if ticket.predicted.ttft_s > 0:
            self.calibration.compare(ticket.predicted.ttft_s, now_s - ticket.joined_s)

    def prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt was computed, as far as it was not found in the cache."""
        if prompt_tokens:
            self._prompt.saw(prompt_tokens - cached_tokens)
            self._fresh.saw(1.0 - cached_tokens / prompt_tokens)

    def finished(self, ticket: Ticket) -> None:
        """A request came to its end by itself."""
        errand = ticket.errand
        if ticket.output_tokens:
            self.outputs.saw(errand.principal_org, round(ticket.output_tokens / errand.choices))
