"""Which counters the limits of a subject watch: what stays the same from one request to the next.

A counter counts one fact: how much of one kind a subject has used, of one model or of all, in one window. However many
limits watch that fact, it has one counter and gets one claim, with the capacity of the tightest of them. So a limit
that is raised, or deleted and made again, finds what was used before; and a soft budget below a hard one costs nothing.

Counters are named ``kind|subject|model``, budgets with their window behind: ``usd_per_day|key:5b1f|*|2026-11-21``.
"""

from collections.abc import Sequence

import msgspec

from maitred.admission.policy.rules import LimitRule
from maitred.core.counters import CounterKind, LimitClaim
from maitred.core.limits import Limit, LimitKind

_BOUNDS = frozenset({LimitKind.CONTEXT_TOKENS, LimitKind.OUTPUT_TOKENS})
"""These bound each request by itself: nothing is counted."""
_OF_PROMPTS = frozenset({LimitKind.INPUT_TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_MINUTE, LimitKind.CONCURRENT_TOKENS})
_OF_OUTPUT = frozenset({LimitKind.OUTPUT_TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_MINUTE, LimitKind.CONCURRENT_TOKENS})


class WatchedCounter(msgspec.Struct, frozen=True):
    """One counter, with all of its claim that no request changes."""

    rule: LimitRule
    """The tightest limit behind it: the one to name when there is no room."""
    soft: tuple[Limit, ...]
    """Soft budgets that it counts for."""
    claim: LimitClaim
    """A budget's lacks the price, and in the name of its counter the window."""


def watches_of(rules: Sequence[LimitRule]) -> list[WatchedCounter]:
    """One watch for every counter that these limits watch."""
    groups: dict[tuple[LimitKind, str, str | None], list[LimitRule]] = {}
    for rule in rules:
        if rule.limit.kind not in _BOUNDS:
            groups.setdefault((rule.limit.kind, rule.subject, rule.limit.model), []).append(rule)
    return [_watch(kind, group) for (kind, _, _), group in groups.items()]


def _watch(kind: LimitKind, group: Sequence[LimitRule]) -> WatchedCounter:
    strict = [rule for rule in group if rule.limit.hard or not kind.spend]
    rule = min(strict or group, key=lambda rule: (rule.limit.value, _burst_of(rule.limit)))
    soft = tuple(rule.limit for rule in group if kind.spend and not rule.limit.hard)
    capacity = rule.limit.value if kind.spend else min(_burst_of(one.limit) for one in group)
    claim = _claim(rule, capacity, hard=bool(strict))
    return WatchedCounter(rule, soft, claim)


def _claim(rule: LimitRule, capacity: int, *, hard: bool) -> LimitClaim:
    limit = rule.limit
    kind, name = limit.kind, _counter_of(rule)
    if kind.spend:
        return LimitClaim(name, CounterKind.BUDGET, capacity, 0, hard=hard, clamps=True)
    prompt, output = int(kind in _OF_PROMPTS), int(kind in _OF_OUTPUT)
    fixed = 0 if prompt or output else 1
    if kind.concurrent:
        return LimitClaim(name, CounterKind.POOL, capacity, fixed, output, clamps=not fixed, per_prompt=prompt)
    return LimitClaim(
        name, CounterKind.BUCKET, capacity, fixed, output, refill_per_s=limit.value / 60, per_prompt=prompt
    )


def _burst_of(limit: Limit) -> int:
    """What a counter of this limit holds at most."""
    return limit.value if limit.burst is None or not limit.kind.per_minute else limit.burst


def _counter_of(rule: LimitRule) -> str:
    """The name of the counter behind a limit; a budget's lacks its window."""
    model = rule.limit.model
    return f"{rule.limit.kind.value}|{_part(rule.subject)}|{'*' if model is None else _part(model, wild='%2A')}"


def _part(text: str, wild: str = "*") -> str:
    """Part of a name, so that no two names can be the same by accident: subjects and models hold any character."""
    return wild if text == "*" else text.replace("%", "%25").replace("|", "%7C")
