"""Usage and cost of a request: the line that it leaves in the ledger, and prices.

Money is counted in whole nano-dollars: a billionth of a dollar is exact in an integer, and in the doubles of Redis'
Lua.

Prices are per million tokens, as every provider states them. A cost is rounded up once, for a whole request, so that a
reservation made with the same rule can never be smaller than the charge that follows.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from maitred.core.context import Outcome


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One request's line in the ledger. Lines are written once and never changed.

    Encoded as an array, which is half as long. Journals hold such arrays: new fields come last, and none goes.
    """

    id: str
    """Unique; writing the same id again changes nothing."""
    request_id: str
    """What the client was told; clients may repeat theirs."""
    time_s: float
    """Wall time at which the request ended; of work that has only begun, at which it did."""
    key: str
    tenant: str
    """The key's own tenant: a team, or an organisation that has keys of its own."""
    organisation: str
    model: str
    replica: str = ""
    route: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Part of the prompt tokens."""
    output_tokens: int = 0
    price: str = ""
    """The price that was applied, as text for people: ``0.5/0.05/1.5 USD per million``."""
    cost_nusd: int = 0
    ttft_s: float | None = None
    duration_s: float = 0.0
    outcome: Outcome = Outcome.FINISHED
    charges: Mapping[str, int] = {}
    """Budget counter -> what was charged to it. This is what makes budgets survive a restart."""
    taken: Mapping[str, int] = {}
    """Rate counter -> what was taken from it; of work that has only begun, what was reserved. This is what makes rates
    survive a restart."""
    rollout: str = ""
    """Which side of a rollout it was on, such as ``chat=canary``; empty: there is none behind its name."""


class Ledger(Protocol):
    """Takes usage so that it cannot be lost any more."""

    def begin(self, event: UsageEvent) -> None:
        """Notes that work has begun, so that an interruption leaves a trace.

        Args:
            event: What is known. The event that `record` gets later has the same id.
        """
        ...

    def record(self, event: UsageEvent) -> None:
        """Notes what was used. On return, the death of this process cannot lose it."""
        ...


NANO = 1_000_000_000
"""Nano-dollars in a dollar."""
PRICED_TOKENS = 1_000
"""Prices are kept per this many tokens: fine enough for $0.000001 per million, and products stay below 2^53."""


def to_nano_usd(usd: float) -> int:
    """Dollars as nano-dollars, to the nearest."""
    return round(usd * NANO)


def to_usd(nusd: int) -> float:
    """Nano-dollars as dollars, for people."""
    return nusd / NANO


class Price(msgspec.Struct, frozen=True):
    """Price of a model's tokens, in nano-dollars per thousand tokens."""

    prompt: int = 0
    cached: int = 0
    """Prompt tokens that were found in the prefix cache."""
    output: int = 0

    @classmethod
    def per_million_usd(cls, prompt: float, cached: float | None, output: float) -> "Price":
        """From dollars per million tokens; cached tokens cost what others do unless said otherwise."""
        prompt_nusd, output_nusd = _per_thousand(prompt), _per_thousand(output)
        return cls(prompt_nusd, prompt_nusd if cached is None else _per_thousand(cached), output_nusd)

    def cost_nusd(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Returns the cost of a request. `cached_tokens` are part of `prompt_tokens`."""
        exact = (prompt_tokens - cached_tokens) * self.prompt + cached_tokens * self.cached
        exact += output_tokens * self.output
        return -(-exact // PRICED_TOKENS)


def _per_thousand(usd_per_million: float) -> int:
    return round(usd_per_million * NANO * PRICED_TOKENS / 1_000_000)
