"""Where a caller stands with its rates: the tightest of those on requests, and of those on tokens."""

from collections.abc import Sequence

from maitred.admission.policy.rules import Rule
from maitred.core.answer import Standing
from maitred.core.counters import Reading
from maitred.core.limits import LimitKind

_TOKENS = frozenset(
    {LimitKind.TOKENS_PER_MINUTE, LimitKind.INPUT_TOKENS_PER_MINUTE, LimitKind.OUTPUT_TOKENS_PER_MINUTE}
)


def standing_of(rules: Sequence[Rule], readings: Sequence[Reading]) -> Standing | None:
    """The standing that these readings show, one for each rule; None if no rate is among them.

    Requests are all alike, so the tightest of their limits is the one with the fewest left. Input, output and all
    tokens are not: of these it is the one with the smallest share left.
    """
    requests: Reading | None = None
    tokens: Reading | None = None
    for rule, reading in zip(rules, readings, strict=True):
        if rule.limit.kind is LimitKind.REQUESTS_PER_MINUTE:
            if requests is None or reading.remaining < requests.remaining:
                requests = reading
        elif rule.limit.kind in _TOKENS and (tokens is None or _share(reading) < _share(tokens)):
            tokens = reading
    return None if requests is None and tokens is None else Standing(requests, tokens)


def _share(reading: Reading) -> float:
    return reading.remaining / reading.capacity if reading.capacity > 0 else 0.0
