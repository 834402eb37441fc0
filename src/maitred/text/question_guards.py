"""Guards: questions that are never looked up, and pairs of questions that never share an answer. Pure rules on wording.

They come before every score. A vector hardly changes with a number, a name or a "not", so no threshold would find them.
When in doubt they refuse, which costs one answer that is computed again.
"""

from enum import StrEnum

from maitred.text.wording import FUNCTION_WORDS, NEGATIONS, OPENERS, PRONOUNS, Wording, stem

MIN_CONTENT_WORDS = 4
"""Fewer content words inside a conversation are a short follow-up: what they ask was said before."""
MAX_WORDS = 100
"""More words may not fit the window of an encoder, whose vectors then say nothing of the rest."""
_MIN_FUNCTION_SHARE = 0.2
"""A question with fewer English function words is in a language, or a notation, whose negations are not known."""
_NEGATING_PREFIXES = ("un", "in", "im", "il", "ir", "dis", "de", "non", "mis", "anti")
_LEADING_WORDS = 3


class Skip(StrEnum):
    """Reason why a question is not looked up."""

    EMPTY = "empty"
    FOLLOW_UP = "follow_up"
    LONG = "long"
    LANGUAGE = "language"


class Difference(StrEnum):
    """Kind of difference between two questions that never share an answer."""

    NUMBERS = "numbers"
    DATES = "dates"
    LITERALS = "literals"
    NAMES = "names"
    NEGATIONS = "negations"


def skip_reason(question: Wording, *, in_conversation: bool) -> Skip | None:
    """Returns why a question is not looked up; None: it may be.

    Args:
        question: Wording of the last user turn.
        in_conversation: Whether turns of a user or an assistant stand before it.
    """
    if not question.content:
        return Skip.EMPTY
    if len(question.words) > MAX_WORDS:
        return Skip.LONG
    if _leads_with_pronoun(question) or (in_conversation and len(question.content) < MIN_CONTENT_WORDS):
        return Skip.FOLLOW_UP
    function_words = sum(word in FUNCTION_WORDS or word in NEGATIONS for word in question.words)
    if function_words < _MIN_FUNCTION_SHARE * len(question.words):
        return Skip.LANGUAGE
    return None


def difference(asked: Wording, cached: Wording) -> Difference | None:
    """Returns what two questions differ in that decides the answer; None: nothing that the rules know."""
    if asked.numbers != cached.numbers:
        return Difference.NUMBERS
    if asked.dates != cached.dates:
        return Difference.DATES
    if asked.literals != cached.literals:
        return Difference.LITERALS
    if not _names_are_said(asked, cached) or not _names_are_said(cached, asked):
        return Difference.NAMES
    if asked.negations != cached.negations or _is_negated_by_prefix(asked, cached):
        return Difference.NEGATIONS
    return None


def _leads_with_pronoun(question: Wording) -> bool:
    """Whether a pronoun is the subject or the object of the first words: "yes, cancel it", "and what about those"."""
    words = list(question.words)
    while words and words[0] in OPENERS:
        words.pop(0)
    if not words:
        return True
    return words[0] in PRONOUNS or (len(words) <= _LEADING_WORDS and not PRONOUNS.isdisjoint(words))


def _names_are_said(one: Wording, other: Wording) -> bool:
    """Whether the names of one question stand in the other in the same order, with a capital or not."""
    if not one.names:
        return True
    said = [stem(word) for word in other.words]
    places = [said.index(name) if name in said else -1 for name in one.names]
    return places[0] >= 0 and places == sorted(places)


def _is_negated_by_prefix(one: Wording, other: Wording) -> bool:
    """Whether a word stands in one question and its opposite in the other: "lock" and "unlock"."""
    only_one, only_other = set(one.content) - set(other.content), set(other.content) - set(one.content)
    return any(
        prefix + word in there
        for here, there in ((only_one, only_other), (only_other, only_one))
        for word in here
        for prefix in _NEGATING_PREFIXES
    )
