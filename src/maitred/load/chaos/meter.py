"""Meters of the tokens that the server would bill.

A rehearsal compares its own count with the count in the server's metrics.
"""

import msgspec

from maitred.load.chaos.scrape import CounterTotals
from maitred.load.measure.record import RunData
from maitred.load.play.target import PROBE_WORDS


class TokenBill(msgspec.Struct, frozen=True, kw_only=True):
    """Bill: counts of tokens that somebody pays for."""

    prompt_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "TokenBill") -> "TokenBill":
        return TokenBill(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )

    def __sub__(self, other: "TokenBill") -> "TokenBill":
        return TokenBill(
            prompt_tokens=self.prompt_tokens - other.prompt_tokens,
            output_tokens=self.output_tokens - other.output_tokens,
        )


NOTHING = TokenBill()


class MetricsMeter:
    """Meter that reads the bill from the gateway's metrics."""

    def __init__(self, counters: CounterTotals) -> None:
        self._counters = counters

    def bill(self) -> TokenBill | None:
        """Returns the bill from the gateway's counters; None: there are none."""
        prompt = self._counters.total("maitred_prompt_tokens_total")
        output = self._counters.total("maitred_output_tokens_total")
        if prompt is None or output is None:
            return None
        return TokenBill(prompt_tokens=round(prompt), output_tokens=round(output))


def probe_bill(data: RunData) -> TokenBill:
    """Returns the cost of a run's own calibration: two prompts of known length, with one token each.

    The calibration of the run has measured how long these prompts are.
    """
    prompt = sum(data.template_tokens + data.tokens_per_word * words for words in PROBE_WORDS)
    return TokenBill(prompt_tokens=round(prompt), output_tokens=len(PROBE_WORDS))
