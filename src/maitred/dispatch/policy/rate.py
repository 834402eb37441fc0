"""How fast a replica is, in service or steps: measured while it is full, else computed from the times of its steps."""

import math

from msgspec import Struct

from maitred.core.flow import ServiceWeights
from maitred.core.replica import StepTimes

_SETTLED_S = 2.0
"""Measured time from which on the measure is believed alone."""


class ServiceRate:
    """Service per second while requests wait; a mean that forgets with a time constant.

    Only full times count: what is done while nobody waits says what was asked for, not what can be done.

    Args:
        memory_s: The time constant.
    """

    def __init__(self, memory_s: float = 10.0) -> None:
        self._memory_s = memory_s
        self._done = 0.0
        self._time_s = 0.0
        self._since: tuple[float, float] | None = None

    def full(self, done: float, now_s: float) -> None:
        """Requests wait, and the replica has no room for them.

        Args:
            done: Since the beginning; less than before if that was another beginning.
            now_s: Now.
        """
        if self._since is not None:
            earlier, earlier_s = self._since
            passed_s = now_s - earlier_s
            if passed_s <= 0:
                return
            if done >= earlier:
                fade = math.exp(-passed_s / self._memory_s)
                self._done = self._done * fade + done - earlier
                self._time_s = self._time_s * fade + passed_s
        self._since = (done, now_s)

    def slack(self) -> None:
        """Notes free capacity: the time until the replicas are full again is not measured."""
        self._since = None

    def per_s(self, computed: float | None) -> float | None:
        """Returns service per second; None if it is not known.

        Args:
            computed: From the times of steps; None if these are not known. It counts for as long as little was
                measured.
        """
        if self._time_s <= 0 or self._done <= 0:
            return computed
        measured = self._done / self._time_s
        if computed is None:
            return measured
        return self.trust * measured + (1 - self.trust) * computed

    @property
    def trust(self) -> float:
        """How far the measure is believed, from 0 to 1."""
        return min(1.0, self._time_s / _SETTLED_S)


class TypicalRequest(Struct, frozen=True):
    """A request as most are."""

    prompt_tokens: float
    """To be computed: those found in the cache not counted."""
    output_tokens: float

    def service(self, weights: ServiceWeights) -> float:
        """Returns the service of the request."""
        return weights.prompt * self.prompt_tokens + weights.output * self.output_tokens


def computed_rate(times: StepTimes, typical: TypicalRequest, slots: int, weights: ServiceWeights) -> float | None:
    """Service per second of a batch of `slots` typical requests; None before the engine has measured its steps.

    Each request is prefilled once and then takes part in a step per token of its answer, half of which it attends to on
    average; the fixed part of a step is shared by the whole batch.
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
    """Parts of a step of a full batch, in seconds."""

    decodes_s: float
    """A step without any prompt."""
    prompt_s: float
    """What a prompt adds to one."""
    whole_s: float
    """A step with as many prompts as there are on average."""


def step_parts(times: StepTimes, typical: TypicalRequest, slots: int) -> StepParts | None:
    """For a batch of `slots` typical requests; None before the engine has measured its steps."""
    prompt, output = typical.prompt_tokens, max(1.0, typical.output_tokens)
    prompt_s = times.token_s * prompt + times.chunk_s + times.pair_s * prompt * prompt / 2
    decodes_s = times.decoding(slots, int(slots * (prompt + output / 2)))
    whole_s = decodes_s + prompt_s * slots / output
    return StepParts(decodes_s, prompt_s, whole_s) if whole_s > 0 else None
