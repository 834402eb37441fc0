"""Usage and cost of a request: its ledger entry, the prices, and feedback on its answer.

Money is counted in whole nano-dollars (billionths of a dollar), which are exact in integers and in the doubles of Lua
in Redis.

Prices are per million tokens, as every provider states them. The cost of a whole request is rounded up once, and a
reservation uses the same rule, so it is never smaller than the later charge.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from maitred.core.context import Outcome
from maitred.core.request import Usage

MIDDLE_SCORE = 0.5
_MINUTE_S = 60


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
    cache_write_tokens: int = 0
    """Prompt tokens that the server wrote into its prefix cache, a part of the prompt tokens."""
    cache: str = ""
    """How the answer was found without computing it: ``exact``, ``coalesced`` (with the same request of somebody else)
    or ``semantic``; ``partial``: some of its vectors were found; empty: all of it was computed. What was not computed
    is not in the prompt and output tokens here, so that the sums of the ledger stay those of the engines."""
    saved_tokens: int = 0
    """Prompt and output tokens that were not computed for this request."""


Settle = Callable[[], Awaitable[None]]
"""Function that charges the counters with the usage of one request."""


class Ledger(Protocol):
    """Ledger that stores usage durably."""

    def begin(self, event: UsageEvent) -> None:
        """Records that work has begun, so that an interrupted request stays visible.

        Args:
            event: The facts known so far. The later event for `record` has the same id.
        """
        ...

    def record(self, event: UsageEvent, response: str = "", settle: Settle | None = None) -> bool:
        """Records the usage of a request. After the return, a crash of this process cannot lose it.

        Args:
            event: The ledger entry.
            response: Id of the response that the answer is stored as. If this process dies before the response is
                stored, the request is an interrupted one, which is not billed. Empty: the answer is not stored.
            settle: Charges the counters with the usage. It is called when the response is stored, or given up.

        Returns:
            Whether the usage waits for its response. If not, `settle` is left to the caller.
        """
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


class UsageUnits(msgspec.Struct, frozen=True):
    """Units of one request that are no tokens."""

    images: int = 0
    image_size: str = ""
    """Size that was asked for, such as ``1024x1024``; empty: not stated."""
    image_quality: str = ""
    characters: int = 0
    """Characters that are spoken."""
    audio_s: float = 0.0
    """Seconds of sound that is transcribed."""
    estimated: bool = False
    """Whether the seconds are an estimate by the size of the file."""


class Price(msgspec.Struct, frozen=True):
    """Price of a model's tokens, in nano-dollars per thousand tokens."""

    prompt: int = 0
    cached: int = 0
    """Prompt tokens that were found in the prefix cache."""
    output: int = 0
    cache_write_surcharge: int = 0
    """Difference between the price of a prompt token that is written into the prefix cache and that of any other."""
    cache_write_1h_surcharge: int = 0
    """The same for a prompt token that is kept for an hour."""
    hit: int = 0
    """Price of a prompt or output token of a cached answer."""
    images: Mapping[str, int] = {}
    """Size, quality, or both with a slash -> price of one image in nano-dollars; ``*``: of all others."""
    characters: int = 0
    """Price of a thousand characters that are spoken."""
    audio_minute: int = 0
    """Price in nano-dollars of a minute of sound that is transcribed."""

    @classmethod
    def per_million_usd(
        cls,
        prompt: float,
        cached: float | None,
        output: float,
        cache_write: float | None = None,
        cache_write_1h: float | None = None,
        hit: float = 0.0,
    ) -> "Price":
        """Makes a price from dollars per million tokens.

        Cached and written tokens default to the prompt price, and those that are kept for an hour to the written ones.
        """
        prompt_nusd, output_nusd = _per_thousand(prompt), _per_thousand(output)
        write_nusd = prompt_nusd if cache_write is None else _per_thousand(cache_write)
        write_1h_nusd = write_nusd if cache_write_1h is None else _per_thousand(cache_write_1h)
        return cls(
            prompt_nusd,
            prompt_nusd if cached is None else _per_thousand(cached),
            output_nusd,
            write_nusd - prompt_nusd,
            write_1h_nusd - prompt_nusd,
            _per_thousand(hit),
        )

    @property
    def is_free(self) -> bool:
        """Whether no request costs anything, unless a cache has its answer."""
        return not (self.max_per_prompt_token or self.output or self.characters or self.audio_minute or self.images)

    @property
    def of_hits(self) -> "Price":
        """The price of cached answers, of which all tokens cost the same."""
        return Price(self.hit, self.hit, self.hit, hit=self.hit)

    def cost_nusd(self, usage: Usage) -> int:
        """Returns the cost of a request."""
        exact = (usage.prompt_tokens - usage.cached_tokens) * self.prompt + usage.cached_tokens * self.cached
        exact += usage.completion_tokens * self.output
        if usage.cache_write_tokens:
            exact += (usage.cache_write_tokens - usage.cache_write_1h_tokens) * self.cache_write_surcharge
            exact += usage.cache_write_1h_tokens * self.cache_write_1h_surcharge
        return usage.units_nusd - (-exact // PRICED_TOKENS)

    def image_nusd(self, size: str, quality: str) -> int:
        """Returns the price of one image in nano-dollars: the first of size with quality, size, quality, any."""
        names = (f"{size}/{quality}", size, quality, "*")
        return next((self.images[name] for name in names if name in self.images), 0)

    def cost_of_units(self, units: UsageUnits) -> tuple[int, str]:
        """Returns what units cost in nano-dollars, rounded up, and the words for it in the ledger; empty: nothing."""
        if units.images and (image_nusd := self.image_nusd(units.image_size, units.image_quality)):
            counted = "1 image" if units.images == 1 else f"{units.images} images"
            return units.images * image_nusd, f"{counted} at {to_usd(image_nusd):g} USD"
        if units.characters and self.characters:
            per_million = to_usd(self.characters * 1_000_000 // PRICED_TOKENS)
            cost_nusd = -(-units.characters * self.characters // PRICED_TOKENS)
            return cost_nusd, f"{units.characters} characters at {per_million:g} USD per million"
        if units.audio_s and self.audio_minute:
            about = "about " if units.estimated else ""
            cost_nusd = math.ceil(units.audio_s * self.audio_minute / _MINUTE_S)
            return cost_nusd, f"{about}{units.audio_s:.1f} s at {to_usd(self.audio_minute):g} USD a minute"
        return 0, ""

    @property
    def max_per_prompt_token(self) -> int:
        """The highest price of a prompt token, whether it is read from the cache, written into it, or neither."""
        return max(self.cached, self.prompt + max(0, self.cache_write_surcharge, self.cache_write_1h_surcharge))

    def max_cost_nusd(self, prompt_tokens: int, output_tokens: int) -> int:
        """Returns the highest cost of a request of this size."""
        return -(-(prompt_tokens * self.max_per_prompt_token + output_tokens * self.output) // PRICED_TOKENS)


def _per_thousand(usd_per_million: float) -> int:
    return round(usd_per_million * NANO * PRICED_TOKENS / 1_000_000)


class FeedbackLabel(StrEnum):
    """Label of a score, for counting."""

    GOOD = "good"
    NEUTRAL = "neutral"
    BAD = "bad"


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """One feedback item about one request."""

    score: float
    """Score from 0 (bad) to 1 (good)."""
    text: str = ""
    tags: tuple[str, ...] = ()

    @property
    def verdict(self) -> FeedbackLabel:
        """Returns good above 0.5 and bad below it."""
        if self.score == MIDDLE_SCORE:
            return FeedbackLabel.NEUTRAL
        return FeedbackLabel.GOOD if self.score > MIDDLE_SCORE else FeedbackLabel.BAD


class FeedbackReceipt(NamedTuple):
    """Result of storing feedback."""

    feedback: Feedback
    """The feedback that is stored now."""
    model: str
    """Model that served the request."""
    rollout: str
    """Rollout arm of the request, such as ``chat=canary``; empty: no rollout."""
    before: Feedback | None
    """The previous feedback; None: this is the first feedback for the request."""
