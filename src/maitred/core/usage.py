"""Usage and cost of a request: its ledger entry, and the prices.

Money is counted in whole nano-dollars (billionths of a dollar), which are exact in integers and in the doubles of Lua
in Redis.

Prices are per million tokens, as every provider states them. The cost of a whole request is rounded up once, and a
reservation uses the same rule, so it is never smaller than the later charge.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from maitred.core.context import Outcome


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Ledger entry of one request. Entries are written once and never changed.

    Entries are encoded as arrays, which are half as long as maps. Journals contain such arrays, so new fields are added
    at the end, and no field is removed.
    """

    id: str
    """Unique id of the entry; a second write of the same id changes nothing."""
    request_id: str
    """Request id that the client received; clients may reuse their ids."""
    time_s: float
    """Wall time at which the request ended, or began if it has not ended."""
    key: str
    tenant: str
    """The key's own tenant: a team, or an organisation with its own keys."""
    organisation: str
    model: str
    replica: str = ""
    route: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Cached tokens, a part of the prompt tokens."""
    output_tokens: int = 0
    price: str = ""
    """The applied price as text, such as ``0.5/0.05/1.5 USD per million``."""
    cost_nusd: int = 0
    ttft_s: float | None = None
    duration_s: float = 0.0
    outcome: Outcome = Outcome.FINISHED
    charges: Mapping[str, int] = {}
    """Budget counter -> amount that was charged to it. Budgets are restored from these values after a restart."""
    taken: Mapping[str, int] = {}
    """Rate counter -> amount that was taken from it, or reserved if the request has not ended. Rates are restored
    from these values after a restart."""
    rollout: str = ""
    """Rollout arm of the request, such as ``chat=canary``; empty: no rollout."""


class Ledger(Protocol):
    """Ledger that stores usage durably."""

    def begin(self, event: UsageEvent) -> None:
        """Records that work has begun, so that an interrupted request stays visible.

        Args:
            event: The facts known so far. The later event for `record` has the same id.
        """
        ...

    def record(self, event: UsageEvent) -> None:
        """Records the usage of a request. After the return, a crash of this process cannot lose it."""
        ...


NANO = 1_000_000_000
"""Nano-dollars in a dollar."""
PRICED_TOKENS = 1_000
"""Tokens per price unit: fine enough for $0.000001 per million, and products stay below 2^53."""


def to_nano_usd(usd: float) -> int:
    """Converts dollars to nano-dollars, rounded to the nearest."""
    return round(usd * NANO)


def to_usd(nusd: int) -> float:
    """Converts nano-dollars to dollars, for display."""
    return nusd / NANO


class Price(msgspec.Struct, frozen=True):
    """Price of a model's tokens, in nano-dollars per thousand tokens."""

    prompt: int = 0
    cached: int = 0
    """Prompt tokens that were found in the prefix cache."""
    output: int = 0

    @classmethod
    def per_million_usd(cls, prompt: float, cached: float | None, output: float) -> "Price":
        """Makes a price from dollars per million tokens; cached tokens default to the prompt price."""
        prompt_nusd, output_nusd = _per_thousand(prompt), _per_thousand(output)
        return cls(prompt_nusd, prompt_nusd if cached is None else _per_thousand(cached), output_nusd)

    def cost_nusd(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Returns the cost of a request. `cached_tokens` are part of `prompt_tokens`."""
        exact = (prompt_tokens - cached_tokens) * self.prompt + cached_tokens * self.cached
        exact += output_tokens * self.output
        return -(-exact // PRICED_TOKENS)


def _per_thousand(usd_per_million: float) -> int:
    return round(usd_per_million * NANO * PRICED_TOKENS / 1_000_000)
