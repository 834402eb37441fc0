"""Which limits hold for a request: those of its key, of each tenant above it, and of the whole installation."""

from collections.abc import Iterable, Sequence

import msgspec

from maitred.core.limits import Limit, LimitBook, LimitKind


class Rule(msgspec.Struct, frozen=True):
    """A limit, and the subject that it holds for here.

    The two differ for limits of ``key:*`` and ``tenant:*``, which hold for each key or tenant by itself.
    """

    subject: str
    limit: Limit


def rules_for(subjects: Sequence[str], book: LimitBook, model: str) -> list[Rule]:
    """Every limit that holds for these subjects and this model, from the narrowest subject to the widest."""
    rules: list[Rule] = []
    for subject in subjects:
        for name in (subject, each(subject)):
            rules += [
                Rule(subject, limit)
                for limit in (book.limits_of(name) if name else ())
                if limit.model is None or limit.model == model
            ]
    return rules


def each(subject: str) -> str:
    """The subject that stands for each one of this sort, such as ``key:*``; empty if there is none."""
    sort, colon, name = subject.partition(":")
    return f"{sort}:*" if colon and name != "*" else ""


def tightest(rules: Iterable[Rule], kind: LimitKind) -> Rule | None:
    """Of the limits of one kind, the one with the smallest value; the first of several."""
    return min((rule for rule in rules if rule.limit.kind is kind), key=lambda rule: rule.limit.value, default=None)
