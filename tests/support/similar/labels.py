"""Labelled pairs of made-up questions: the answers are the same if thing and deed are."""

import random

from maitred.core.request import LabelledPair

THINGS = ["card", "fee", "bank", "limit", "loan", "salary", "deposit", "rate", "branch", "phone"]
DOINGS = ["block", "find", "change", "close", "order", "lose"]
FORMS = ("how do i {} my {}", "please tell me how i {} the {}", "can you {} a {} for me", "i would like to {} this {}")


def questions():
    """Questions, each with what decides its answer."""
    return [(form.format(doing, thing), (doing, thing)) for form in FORMS for doing in DOINGS for thing in THINGS]


def labelled_pairs(count, seed=3):
    """Pairs of which some have the same answer; where they lie says nothing of it."""
    source, known = random.Random(seed), questions()
    pairs = []
    while len(pairs) < count:
        (asked, one), (cached, other) = source.sample(known, 2)
        if one == other or source.random() < 0.05:
            surroundings = (source.uniform(0.6, 0.9), source.uniform(0.6, 0.9), max(0.0, source.uniform(-0.2, 0.1)))
            pairs.append(LabelledPair(asked, cached, one == other, surroundings))
    return pairs
