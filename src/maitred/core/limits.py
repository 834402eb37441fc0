"""Limits: what is limited, and how a limit is written down.

A limit belongs to one subject (see `maitred.core.tenancy`) and to one model or all of them. Several can hold for one
request; each must have room, so the tightest rules.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec


class LimitKind(StrEnum):
    """Kind of a limit: what it counts."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    """Prompt and output together."""
    INPUT_TOKENS_PER_MINUTE = "input_tokens_per_minute"
    OUTPUT_TOKENS_PER_MINUTE = "output_tokens_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    CONCURRENT_TOKENS = "concurrent_tokens"
    """Prompt tokens and reserved output of the requests that run at one time."""
    CONTEXT_TOKENS = "context_tokens"
    """Prompt and output of one request."""
    OUTPUT_TOKENS = "output_tokens"
    """Output of one request, per choice."""
    USD_PER_DAY = "usd_per_day"
    USD_PER_WEEK = "usd_per_week"
    """Weeks begin on Monday; all windows are of UTC."""
    USD_PER_MONTH = "usd_per_month"
    USD_TOTAL = "usd_total"

    @property
    def per_minute(self) -> bool:
        """A rate, kept by a token bucket."""
        return self.value.endswith("_per_minute")

    @property
    def concurrent(self) -> bool:
        """Held while a request runs."""
        return self.value.startswith("concurrent_")

    @property
    def spend(self) -> bool:
        """Whether the limit counts money."""
        return self.value.startswith("usd_")


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """Limit of one kind for one subject."""

    id: str
    subject: str
    kind: LimitKind
    value: int
    """Requests, tokens, or nano-dollars."""
    model: str | None = None
    """Counts requests to this model only; None: to all models together."""
    burst: int | None = None
    """Of a rate: what may come at once after a pause; None: a minute's worth."""
    hard: bool = True
    """Of money: refuse at the limit. A soft budget only says that it was passed."""


class LimitSource(Protocol):
    """Source of the limits of each subject."""

    @property
    def edition(self) -> int:
        """Another number after every change of limits, so that what was made of them can be kept until then."""
        ...

    def limits_of(self, subject: str) -> Sequence[Limit]:
        """The limits of exactly this subject (``tenant:acme``, ``key:*``, ``*``), in the order they were made."""
        ...
