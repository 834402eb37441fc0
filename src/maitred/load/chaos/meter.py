"""What the server would bill.

A rehearsal compares its own count with the server's. Today the server's count is its metrics; a ledger that bills per
request becomes another `Meter`.
"""

from typing import Protocol

import msgspec

from maitred.load.chaos.scrape import Counters
from maitred.load.measure.record import RunData
from maitred.load.play.target import PROBE_WORDS


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that somebody pays for."""

    prompt_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "Bill") -> "Bill":
        return Bill(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )

    def __sub__(self, other: "Bill") -> "Bill":
        return Bill(
            prompt_tokens=self.prompt_tokens - other.prompt_tokens,
            output_tokens=self.output_tokens - other.output_tokens,
        )


NOTHING = Bill()


class Meter(Protocol):
    """A server's own account of what it has delivered."""

    def bill(self) -> Bill | None:
        """Everything so far, restarts included; it never falls. None: the server keeps no such account."""


class MetricsMeter:
    """The account in the gateway's metrics."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def bill(self) -> Bill | None:
        """See `Meter`."""
        prompt = self._counters.total("maitred_prompt_tokens_total")
        output = self._counters.total("maitred_output_tokens_total")
        if prompt is None or output is None:
            return None
        return Bill(prompt_tokens=round(prompt), output_tokens=round(output))


def probe_bill(data: RunData) -> Bill:
    """What a run's own calibration has cost before its first request: two prompts of known length, a token each.

    The run has found out how long they are: that is what calibration is.
    """
    prompt = sum(data.template_tokens + data.tokens_per_word * words for words in PROBE_WORDS)
    return Bill(prompt_tokens=round(prompt), output_tokens=len(PROBE_WORDS))
