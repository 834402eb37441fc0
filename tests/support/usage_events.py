"""Usage events for the tests of the ledger."""

from maitred.core.context import Outcome
from maitred.core.usage import UsageEvent


class SetClock:
    """A clock that stands where it is put."""

    def __init__(self, wall_s: float = 1_763_740_000.0) -> None:
        self.now_s = wall_s

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


def usage_event(number: int, **changes: object) -> UsageEvent:
    """The event of some request; a number is an id."""
    fields: dict[str, object] = {
        "id": f"u-{number:06d}",
        "request_id": f"req-{number}",
        "time_s": 1_763_740_000.0 + number,
        "key": "5b1f0c9e7d2a",
        "tenant": "research",
        "organisation": "acme",
        "model": "tiny",
        "prompt_tokens": 100 + number,
        "cached_tokens": 10,
        "output_tokens": number,
        "cost_nusd": 1_000 + number,
        "duration_s": 1.5,
        "outcome": Outcome.FINISHED,
        "charges": {"spend:tenant:acme": 1_000 + number, f"spend:key:{number % 3}": 7},
        "taken": {"requests:key": 1},
    }
    return UsageEvent(**(fields | changes))
