"""Money, in whole nano-dollars: a billionth of a dollar is exact in an integer, and in the doubles of Redis' Lua.

Prices are per million tokens, as every provider states them. A cost is rounded up once, for a whole request, so that a
reservation made with the same rule can never be smaller than the charge that follows.
"""

import msgspec

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
