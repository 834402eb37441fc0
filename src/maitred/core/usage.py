"""Usage and cost of a request: the line that it leaves in the ledger."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from maitred.core.answer import Outcome


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
