"""Prefill planning: prompts get the tokens that decodes leave, in the order of owed service."""

from collections.abc import Callable

from maitred.core.flow import Flow
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.step_times import StepBudget

_LEAST_SHARE = 8
"""Divisor of the prefill tokens that gives the oldest prompt's minimum, whatever others are owed. So the oldest prefill
ends in a bounded number of steps, and then the next one, until all have ended."""

_FINISH_TOKENS = 1024
"""Tokens up to which it counts how much a prompt still needs. By so many a flow can be served ahead of the others, so
this bounds how unequal their shares can be."""

Claim = tuple[int, float]
"""Sort key of a flow's prompts, smallest first: priority class (if used), and the lead in service that the flow will
have when its prompt ends."""


class PrefillBudget:
    """Budget of one step for prefill, in tokens and in time.

    Args:
        tokens: Maximum prefill tokens.
        time: Limit in time; None: time is unlimited, because no decoding sequence waits for the end of the step.
        fitting: Approximate number of tokens that fit into the time.

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
        """Whether no further token fits."""
        return self.tokens == 0 or (self._time is not None and self._time.spent)

    def take(self, start: int, wanted: int) -> int:
        """Spends budget for `wanted` tokens after `start` earlier ones; returns how many of them fit."""
        length = min(wanted, self.tokens)
        if self._time is not None and length:
            length = self._time.take(start, length)
        self.tokens -= length
        return length


class ServiceOwed:
    """Cache of the service owed to flows, computed once per flow and step.

    The flow goes first whose prompt ends at the smallest lead, as in weighted fair queueing (Demers, Keshav and
    Shenker, SIGCOMM'89). So a short prompt is not computed in pieces beside a long one, and each flow still gets its
    share.

    Args:
        over_service: Returns the lead in service of a flow over the least served flow of its class.
        token_service: Service per prompt token; 0: how long prompts are makes no difference.
        by_class: Whether more urgent classes go first.
    """

    __slots__ = ("_by_class", "_known", "_over_service", "_token_service")

    def __init__(self, over_service: Callable[[Flow], float], token_service: float, *, by_class: bool) -> None:
        self._over_service = over_service
        self._token_service = token_service
        self._by_class = by_class
        self._known: dict[int, Claim] = {}

    def claim_of(self, sequence: Sequence) -> Claim:
        """Returns the sort key of a sequence's flow."""
        account = sequence.account
        claim = self._known.get(id(account))
        if claim is None:
            flow = account.flow
            lead = self._over_service(flow)
            if self._token_service:
                table = sequence.table
                needed = sequence.pending - (0 if table.blocks else table.cached_tokens(sequence.tokens))
                lead += self._token_service * min(needed, _FINISH_TOKENS) / flow.path[0].weight
            claim = self._known[id(account)] = (flow.priority.rank if self._by_class else 0, lead)
        return claim

    def on_charge(self, sequence: Sequence) -> None:
        """Notes that the sequence's flow was charged."""
        self._known.pop(id(sequence.account), None)
