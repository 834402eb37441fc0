"""Limits: their kinds and their data format.

A limit belongs to one subject (see `maitred.core.tenancy`) and to one model or all of them. Several limits can apply to
one request; each must have room, so the tightest one decides.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec


class LimitKind(StrEnum):
    """Kind of a limit, by what it counts."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    """Prompt tokens and output tokens together."""
    INPUT_TOKENS_PER_MINUTE = "input_tokens_per_minute"
    OUTPUT_TOKENS_PER_MINUTE = "output_tokens_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    CONCURRENT_TOKENS = "concurrent_tokens"
    """Prompt tokens and reserved output tokens of all running requests."""
    CONTEXT_TOKENS = "context_tokens"
    """Prompt tokens and output tokens of one request."""
    OUTPUT_TOKENS = "output_tokens"
    """Output tokens of one request, for each choice."""
    USD_PER_DAY = "usd_per_day"
    USD_PER_WEEK = "usd_per_week"
    """Weeks begin on Monday; all windows are of UTC."""
    USD_PER_MONTH = "usd_per_month"
    USD_TOTAL = "usd_total"

    @property
    def per_minute(self) -> bool:
        """Whether the limit is a rate, counted by a token bucket."""
        return self.value.endswith("_per_minute")

    @property
    def concurrent(self) -> bool:
        """Whether the reservation is held while a request runs."""
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
    """Value in requests, tokens or nano-dollars."""
    model: str | None = None
    """Model that the limit applies to; None: all models together."""
    burst: int | None = None
    """Burst of a rate after a pause; None: the amount of one minute."""
    hard: bool = True
    """Whether a budget refuses requests at the limit. A soft budget only warns."""


class LimitSource(Protocol):
    """Source of the limits of each subject."""

    @property
    def edition(self) -> int:
        """Version number that changes with every change of limits, for cache invalidation."""
        ...

    def limits_of(self, subject: str) -> Sequence[Limit]:
        """The limits of exactly this subject (``tenant:acme``, ``key:*``, ``*``), in the order they were made."""
        ...
