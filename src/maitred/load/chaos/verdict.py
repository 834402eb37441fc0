"""How one promise came out."""

from typing import Literal

import msgspec

State = Literal["held", "broken", "unchecked"]

MOST_EXAMPLES = 5


class InvariantResult(msgspec.Struct, frozen=True, kw_only=True):
    """One promise.

    Attributes:
        name: Of the promise.
        state: `held`, `broken`, or `unchecked` where the evidence does not suffice.
        bound: What was promised.
        found: What was seen, or why it could not be checked.
        examples: The first few violations.
    """

    name: str
    state: State
    bound: str
    found: str
    examples: list[str] = []


def decided(name: str, bound: str, found: str, violations: list[str]) -> InvariantResult:
    """Broken by any violation, else held."""
    state: State = "broken" if violations else "held"
    return InvariantResult(name=name, state=state, bound=bound, found=found, examples=violations[:MOST_EXAMPLES])


def unchecked(name: str, bound: str, why: str) -> InvariantResult:
    """Neither held nor broken, because of `why`."""
    return InvariantResult(name=name, state="unchecked", bound=bound, found=why)
