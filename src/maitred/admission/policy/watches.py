"""Which counters the limits of a subject watch: what stays the same from one request to the next.

A counter counts one fact: how much of one kind a subject has used, of one model or of all, in one window. However many
limits watch that fact, it has one counter and gets one claim, with the capacity of the tightest of them. So a limit
that is raised, or deleted and made again, finds what was used before; and a soft budget below a hard one costs nothing.

Counters are named ``kind|subject|model``, budgets with their window behind: ``usd_per_day|key:5b1f|*|2026-11-21``.

Limits change seldom and are asked for with every request, so what they come to is worked out once and kept.
"""

from collections.abc import Sequence

import msgspec

from maitred.admission.policy.rules import Rule, each, rules_for
from maitred.core.counters import Claim, CounterKind
from maitred.core.limits import Limit, LimitBook, LimitKind

_BOUNDS = frozenset({LimitKind.CONTEXT_TOKENS, LimitKind.OUTPUT_TOKENS})
"""These bound each request by itself: nothing is counted."""
_OF_PROMPTS = frozenset({LimitKind.INPUT_TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_MINUTE, LimitKind.CONCURRENT_TOKENS})
_OF_OUTPUT = frozenset({LimitKind.OUTPUT_TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_MINUTE, LimitKind.CONCURRENT_TOKENS})
_MOST_KEPT = 10_000
"""Subjects, 1 to 2 KiB each; the one that came first is forgotten first."""


class Watch(msgspec.Struct, frozen=True):
    """One counter, with all of its claim that no request changes."""

    rule: Rule
    """The tightest limit behind it: the one to name when there is no room."""
    soft: tuple[Limit, ...]
    """Soft budgets that it counts for."""
    claim: Claim
    """As it is for a request without tokens. The name of a budget's counter lacks its window."""
    prompt: bool
    """Whether tokens of prompts count..."""
    output: bool
    """...and tokens that are generated."""


class Watched(msgspec.Struct, frozen=True):
    """What the limits of some subjects come to."""

    rules: list[Rule]
    watches: list[Watch]


class Watches:
    """Finds the limits that hold for a request.

    Args:
        book: Who is limited how.
    """

    def __init__(self, book: LimitBook) -> None:
        self._book = book
        self._kept: dict[tuple[str, str], tuple[Sequence[Limit], Sequence[Limit], Watched]] = {}

    def over(self, subjects: Sequence[str], model: str) -> Watched:
        """What holds for these subjects and this model, from the narrowest subject to the widest."""
        limits_of = self._book.limits_of
        found = Watched([], [])
        for subject in subjects:
            own, of_each = limits_of(subject), limits_of(each(subject))
            if not (own or of_each):
                continue
            kept = self._kept.get((subject, model))
            if kept is None or kept[0] is not own or kept[1] is not of_each:
                rules = rules_for([subject], self._book, model)
                kept = own, of_each, Watched(rules, watches_of(rules))
                self._keep((subject, model), kept)
            found.rules.extend(kept[2].rules)
            found.watches.extend(kept[2].watches)
        return found

    def _keep(self, name: tuple[str, str], what: tuple[Sequence[Limit], Sequence[Limit], Watched]) -> None:
        self._kept.pop(name, None)
        if len(self._kept) >= _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[name] = what


def watches_of(rules: Sequence[Rule]) -> list[Watch]:
    """One watch for every counter that these limits watch."""
    groups: dict[tuple[LimitKind, str, str | None], list[Rule]] = {}
    for rule in rules:
        if rule.limit.kind not in _BOUNDS:
            groups.setdefault((rule.limit.kind, rule.subject, rule.limit.model), []).append(rule)
    return [_watch(kind, group) for (kind, _, _), group in groups.items()]


def _watch(kind: LimitKind, group: Sequence[Rule]) -> Watch:
    strict = [rule for rule in group if rule.limit.hard or not kind.spend]
    rule = min(strict or group, key=lambda rule: (rule.limit.value, _burst_of(rule.limit)))
    soft = tuple(rule.limit for rule in group if kind.spend and not rule.limit.hard)
    capacity = rule.limit.value if kind.spend else min(_burst_of(one.limit) for one in group)
    claim = _claim(rule, capacity, hard=bool(strict))
    return Watch(rule, soft, claim, kind in _OF_PROMPTS, kind in _OF_OUTPUT)


def _claim(rule: Rule, capacity: int, *, hard: bool) -> Claim:
    limit = rule.limit
    kind, name = limit.kind, _counter_of(rule)
    if kind.spend:
        return Claim(name, CounterKind.BUDGET, capacity, 0, hard=hard, clamps=True)
    of_tokens = kind in _OF_PROMPTS or kind in _OF_OUTPUT
    fixed = 0 if of_tokens else 1
    if kind.concurrent:
        return Claim(name, CounterKind.POOL, capacity, fixed, clamps=of_tokens)
    return Claim(name, CounterKind.BUCKET, capacity, fixed, refill_per_s=limit.value / 60)


def _burst_of(limit: Limit) -> int:
    """What a counter of this limit holds at most."""
    return limit.value if limit.burst is None or not limit.kind.per_minute else limit.burst


def _counter_of(rule: Rule) -> str:
    """The name of the counter behind a limit; a budget's lacks its window."""
    model = rule.limit.model
    return f"{rule.limit.kind.value}|{_part(rule.subject)}|{'*' if model is None else _part(model, wild='%2A')}"


def _part(text: str, wild: str = "*") -> str:
    """Part of a name, so that no two names can be the same by accident: subjects and models hold any character."""
    return wild if text == "*" else text.replace("%", "%25").replace("|", "%7C")
