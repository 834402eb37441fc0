"""Limits that apply to a request: those of its key, its tenants and the whole installation."""

from collections.abc import Iterable, Sequence

import msgspec

from maitred.core.limits import Limit, LimitKind, LimitSource


class LimitRule(msgspec.Struct, frozen=True):
    """A limit with the subject that it applies to.

    This subject differs from the subject of the limit for ``key:*`` and ``tenant:*``, which apply to each key or tenant
    separately.
    """

    subject: str
    limit: Limit


def rules_for(subjects: Sequence[str], book: LimitSource, model: str | None) -> list[LimitRule]:
    """Returns the limits for these subjects and this model, narrowest subject first; None: those for all models."""
    rules: list[LimitRule] = []
    for subject in subjects:
        for name in (subject, each(subject)):
            if limits := book.limits_of(name):
                rules += [LimitRule(subject, limit) for limit in limits if limit.model is None or limit.model == model]
    return rules


def each(subject: str) -> str:
    """Returns the wildcard subject of a subject: ``key:*`` for ``key:5b1f``; empty for ``*``."""
    colon = subject.find(":")
    return subject[: colon + 1] + "*" if colon > 0 else ""


def tightest(rules: Iterable[LimitRule], kind: LimitKind) -> LimitRule | None:
    """Returns the first limit of one kind with the smallest value; None: no such limit."""
    found: LimitRule | None = None
    for rule in rules:
        if rule.limit.kind is kind and (found is None or rule.limit.value < found.limit.value):
            found = rule
    return found
