"""Which limits hold for a request: those of its key, of each tenant above it, and of the whole installation."""

from collections.abc import Iterable, Sequence

import msgspec

from maitred.core.limits import Limit, LimitKind, LimitSource


class LimitRule(msgspec.Struct, frozen=True):
    """A limit, and the subject that it holds for here.

    The two differ for limits of ``key:*`` and ``tenant:*``, which hold for each key or tenant by itself.
    """

    subject: str
    limit: Limit


def rules_for(subjects: Sequence[str], book: LimitSource, model: str) -> list[LimitRule]:
    """Every limit that holds for these subjects and this model, from the narrowest subject to the widest."""
    rules: list[LimitRule] = []
    for subject in subjects:
        for name in (subject, each(subject)):
            if limits := book.limits_of(name):
                rules += [LimitRule(subject, limit) for limit in limits if limit.model is None or limit.model == model]
    return rules


def each(subject: str) -> str:
    """The subject that stands for each one of this sort: ``key:*`` for ``key:5b1f``; empty for ``*``, which is one."""
    colon = subject.find(":")
    return subject[: colon + 1] + "*" if colon > 0 else ""


def tightest(rules: Iterable[LimitRule], kind: LimitKind) -> LimitRule | None:
    """Returns the limit of one kind with the smallest value, the first of several; None: there is none."""
    found: LimitRule | None = None
    for rule in rules:
        if rule.limit.kind is kind and (found is None or rule.limit.value < found.limit.value):
            found = rule
    return found
