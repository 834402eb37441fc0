"""The policy that goes by when the first token would come."""

from collections.abc import Sequence

from maitred.core.balance import Candidate, Inquiry
from maitred.routing.balance.loads import Loads
from maitred.routing.balance.turns import Turns

_ALIKE = 1.05
"""Predictions that differ by less are equal: what tells them apart is noise, and it would send everything one way."""


class PredictedTtft:
    """Where the first token is predicted to come first.

    The prediction is what is before the request there, and its own prompt less what the replica holds of it. So a
    replica that holds the prefix is chosen until the wait for it costs more than computing the prefix elsewhere: the
    trade that routers by prefix alone leave to a threshold. Where not all can predict seconds, tokens to be computed
    take their place. Of predictions that are alike, the least loaded replica is taken.

    Args:
        loads: Counts what is outstanding.
    """

    def __init__(self, loads: Loads) -> None:
        self._loads = loads
        self._turns = Turns()

    def choose(self, inquiry: Inquiry, candidates: Sequence[Candidate]) -> Candidate:
        """See `core.balance.Balance`."""
        scores = predicted(inquiry, candidates)
        limit = _ALIKE * min(scores)
        alike = [candidate for candidate, score in zip(candidates, scores, strict=True) if score <= limit]
        return self._turns.took(self._turns.least(alike, self._loads.relative), len(candidates))


def predicted(inquiry: Inquiry, candidates: Sequence[Candidate]) -> list[float]:
    """When the first token would come from each, by weight; in seconds, or in tokens before it."""
    seconds = [
        (candidate.wait_s + candidate.prefill_s) / candidate.weight
        for candidate in candidates
        if candidate.wait_s is not None and candidate.prefill_s is not None
    ]
    if len(seconds) == len(candidates):
        return seconds
    return [
        (candidate.prompt_tokens + max(0, inquiry.prompt_tokens - candidate.held_tokens)) / candidate.weight
        for candidate in candidates
    ]
