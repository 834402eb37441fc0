"""Prefill planning: prompts under way and newcomers get the tokens that decodes leave, as they are owed service."""

from collections.abc import Callable

from maitred.core.flow import Flow
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.step_times import StepBudget

_LEAST_SHARE = 8
"""The oldest prompt under way gets at least one token in so many, whoever else is owed service. So it comes to its end
in a bounded number of steps, and so do all, one after the other."""

Claim = tuple[int, float]
"""What a flow's prompts are ordered by, the least first: its class (if classes count) and its lead over others."""


class PrefillBudget:
    """The tokens and the time that one step has for prompts.

    Args:
        tokens: At most so many.
        time: And no more than fit into this; None: time does not matter, because nobody waits for the step's end.
        fitting: How many these are, more or less.

    Attributes:
        least_tokens: Tokens that the oldest prompt gets in any case.
    """

    __slots__ = ("_time", "least_tokens", "tokens")

    def __init__(self, tokens: int, time: StepBudget | None, fitting: int) -> None:
        self.tokens = tokens
        self.least_tokens = max(1, fitting // _LEAST_SHARE)
        self._time = time

    @property
    def spent(self) -> bool:
        """Whether nothing fits any more."""
        return self.tokens == 0 or (self._time is not None and self._time.spent)

    def take(self, start: int, wanted: int) -> int:
        """Spends what some tokens take that follow `start` earlier ones; how many of those `wanted` fit."""
        length = min(wanted, self.tokens)
        if self._time is not None and length:
            length = self._time.take(start, length)
        self.tokens -= length
        return length


class ServiceOwed:
    """How much flows are owed, asked once per flow and step.

    Args:
        over_service: By how much service a flow leads the least served one of its class.
        by_class: Whether more urgent classes go first.
    """

    __slots__ = ("_by_class", "_known", "_over_service")

    def __init__(self, over_service: Callable[[Flow], float], *, by_class: bool) -> None:
        self._over_service = over_service
        self._by_class = by_class
        self._known: dict[int, Claim] = {}

    def claim_of(self, sequence: Sequence) -> Claim:
        """The claim of a sequence's flow."""
        account = sequence.account
        claim = self._known.get(id(account))
        if claim is None:
            flow = account.flow
            claim = (flow.priority.rank if self._by_class else 0, self._over_service(flow))
            self._known[id(account)] = claim
        return claim

    def on_charge(self, sequence: Sequence) -> None:
        """The sequence's flow was charged."""
        self._known.pop(id(sequence.account), None)
