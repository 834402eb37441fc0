"""Rate of replicas in service or steps per second, measured or computed from step times."""

import math

from msgspec import Struct

from maitred.core.flow import ServiceWeights
from maitred.core.replica import StepTimes

_FULL_TRUST_S = 2.0
"""Measured seconds from which on only the measured rate is used."""


class ServiceRate:
    """Service per second under full load, as an exponential moving average.

    Only time under full load counts: otherwise the rate would show demand, not capacity.

    Args:
        memory_s: Time constant of the average.
    """

    def __init__(self, memory_s: float = 10.0) -> None:
        self._memory_s = memory_s
        self._decayed_work = 0.0
        self._time_s = 0.0
        self._since: tuple[float, float] | None = None

    def on_saturated(self, done: float, now_s: float) -> None:
        """Adds a sample while the replicas are full and requests wait.

        Args:
            done: Total work since the start; a lower value than before means a restart.
            now_s: Now.
        """
        if self._since is not None:
            earlier, earlier_s = self._since
            passed_s = now_s - earlier_s
            if passed_s <= 0:
                return
            if done >= earlier:
                fade = math.exp(-passed_s / self._memory_s)
                self._decayed_work = self._decayed_work * fade + done - earlier
                self._time_s = self._time_s * fade + passed_s
        self._since = (done, now_s)

    def on_unsaturated(self) -> None:
        """Pauses the measurement until the replicas are full again."""
        self._since = None

    def per_s(self, computed: float | None) -> float | None:
        """Returns the rate per second; None if it is unknown.

        Args:
            computed: Rate from the engine's step times; None if these are unknown. It is used while little was
                measured.
        """
        if self._time_s <= 0 or self._decayed_work <= 0:
            return computed
        measured = self._decayed_work / self._time_s
        if computed is None:
            return measured
        return self.trust * measured + (1 - self.trust) * computed

    @property
    def trust(self) -> float:
        """Weight of the measured rate, from 0 to 1."""
        return min(1.0, self._time_s / _FULL_TRUST_S)


class TypicalRequest(Struct, frozen=True):
    """Mean sizes of a typical request."""

    prompt_tokens: float
    """Uncached prompt tokens."""
    output_tokens: float

    def service(self, weights: ServiceWeights) -> float:
        """Returns the service of the request."""
        return weights.prompt * self.prompt_tokens + weights.output * self.output_tokens


def computed_rate(times: StepTimes, typical: TypicalRequest, slots: int, weights: ServiceWeights) -> float | None:
    """Returns the service per second of `slots` typical requests; None if step times are unknown.

    Each request has one prefill and one step per output token. On average a step attends to the prompt and half the
    output. The batch shares the fixed time of a step.
    """
    prompt, output = typical.prompt_tokens, max(1.0, typical.output_tokens)
    decode_s = times.token_s + times.decode_s + times.fixed_s / max(1, slots)
    seconds = (
        times.token_s * prompt
        + times.chunk_s
        + times.pair_s * prompt * prompt / 2
        + output * (decode_s + times.context_token_s * (prompt + output / 2))
    )
    return typical.service(weights) / seconds if seconds > 0 else None


class StepParts(Struct, frozen=True):
    """Times of one step of a full batch."""

    decodes_s: float
    """Seconds of a step without a prefill."""
    prompt_s: float
    """Seconds that one prefill adds to a step."""
    whole_s: float
    """Seconds of a step with the mean number of prefills."""


def step_parts(times: StepTimes, typical: TypicalRequest, slots: int) -> StepParts | None:
    """Returns the step times of `slots` typical requests; None if step times are unknown."""
    prompt, output = typical.prompt_tokens, max(1.0, typical.output_tokens)
    prompt_s = times.token_s * prompt + times.chunk_s + times.pair_s * prompt * prompt / 2
    decodes_s = times.decoding(slots, int(slots * (prompt + output / 2)))
    whole_s = decodes_s + prompt_s * slots / output
    return StepParts(decodes_s, prompt_s, whole_s) if whole_s > 0 else None
