"""Prefill planning: prompts get the tokens that decodes leave, in the order of owed service."""

from collections.abc import Callable

from maitred.core.flow import Flow
from maitred.core.replica import StepTimes
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.step_times import StepBudget

_FINISH_TOKENS = 1024
"""Tokens up to which it counts how much a prompt still needs. By so many a flow can be served ahead of the others, so
this bounds how unequal their shares can be."""

_SINGLE_TOKENS = 512
"""Tokens by which a flow with a single sequence can be ahead of flows with several. Whoever waits for each answer
before the next question takes less than their share, but the counters forget that while they are idle."""

Claim = tuple[int, float]
"""Sort key of a flow's prompts, smallest first: priority class (if used), and the lead in service that the flow will
have when its prompt ends."""


class PrefillBudget:
    """Budget of one step for prefill, in tokens and in time.

    Args:
        tokens: Maximum prefill tokens.
        time: Limit in time.
    """

    __slots__ = ("_time", "tokens")

    def __init__(self, tokens: int, time: StepBudget) -> None:
        self.tokens = tokens
        self._time = time

    @property
    def spent(self) -> bool:
        """Whether no further token fits."""
        return self.tokens == 0 or self._time.spent

    def take(self, start: int, wanted: int, *, scored: bool = False) -> int:
        """Spends budget for `wanted` tokens after `start` earlier ones; returns how many of them fit.

        The arguments are those of `StepBudget.take`.
        """
        length = min(wanted, self.tokens)
        if length:
            length = self._time.take(start, length, scored=scored)
        self.tokens -= length
        return length


class ServiceOwed:
    """Cache of the service owed to flows, computed once per flow and step.

    The flow goes first whose prompt ends at the smallest lead, as in weighted fair queueing (Demers, Keshav and
    Shenker, SIGCOMM'89). So a short prompt is not computed in pieces beside a long one, and each flow still gets its
    share. What a prompt still needs is counted in time, as the number of tokens of a new prompt that take as long.

    Args:
        over_service: Returns the lead in service of a flow over the least served flow of its class.
        token_service: Service per prompt token; 0: how long prompts are makes no difference.
        times: Model of step times.
        by_class: Whether more urgent classes go first.
    """

    __slots__ = ("_by_class", "_known", "_over_service", "_times", "_token_service")

    def __init__(
        self, over_service: Callable[[Flow], float], token_service: float, times: StepTimes, *, by_class: bool
    ) -> None:
        self._over_service = over_service
        self._token_service = token_service
        self._times = times
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
                ahead = min(self._needed_tokens(sequence), _FINISH_TOKENS)
                if account.sequences == 1:
                    ahead -= _SINGLE_TOKENS
                lead += self._token_service * ahead / flow.path[0].weight
            claim = self._known[id(account)] = (flow.priority.rank if self._by_class else 0, lead)
        return claim

    def _needed_tokens(self, sequence: Sequence) -> float:
        """Returns how many tokens, each taking as long as a new prompt's first, the rest of a prompt costs."""
        table, times = sequence.table, self._times
        start = sequence.computed if table.blocks else table.cached_tokens(sequence.tokens, sequence.reusable_tokens)
        length = len(sequence.tokens) - start
        return times.chunk(start, length) / times.token_s if times.token_s else length

    def on_charge(self, sequence: Sequence) -> None:
        """Notes that the sequence's flow was charged."""
        self._known.pop(id(sequence.account), None)
