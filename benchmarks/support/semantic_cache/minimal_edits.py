"""Minimal edits of questions, by kind: each asks for another answer than the question that it was made from."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from maitred.engine.similar.edits import content_words

ANTONYMS = """
increase decrease|open close|opened closed|activate deactivate|enable disable|buy sell|send receive|sent received
deposit withdraw|before after|start stop|add remove|lock unlock|accept reject|accepted rejected|higher lower|high low
fast slow|faster slower|cheap expensive|cheaper pricier|early late|earlier later|import export|win lose|lend borrow
push pull|pushed pulled|arrive depart|arrival departure|more fewer|old new|hot cold|best worst|good bad|always never
easy difficult|allowed forbidden|approve decline|approved declined|passed failed|virtual physical|incoming outgoing
domestic international|maximum minimum|max min|longest shortest|long short|big small|large small|credit debit
left right|public private|free paid|correct wrong|begin finish|save delete|show hide|next previous|weak strong
safe dangerous|inside outside|above below|sunny rainy|spend earn|most least|freeze unfreeze|same different
"""
ENTITIES = """
paris madrid london berlin rome tokyo chicago boston dallas miami seattle denver austin atlanta|france spain germany
italy japan china mexico canada brazil india russia ireland|spanish french german italian japanese chinese russian
portuguese korean arabic|euros dollars pounds yen pesos rupees|eur usd gbp jpy aud chf|visa mastercard amex|
google apple samsung amazon walmart netflix|pizza pasta sushi tacos lasagna burrito|delta united southwest lufthansa
"""
_AUXILIARY = re.compile(
    r"\b(is|are|was|were|can|could|will|would|should|do|does|did|has|have|am)\b(?! not|n?['’])", re.I
)
_NEGATION = re.compile(r"\s(?:not|never)\b|n['’]t\b", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
_SWAP_WORDS = {"from", "to", "before", "after", "than", "with", "into", "for", "on", "in"}


@dataclass(frozen=True)
class MinimalEdit:
    """Question and an edit of it that has another answer."""

    kind: str
    original: str
    edited: str


def _opposites() -> dict[str, str]:
    pairs = [pair.split() for line in ANTONYMS.split("\n") for pair in line.split("|") if pair.strip()]
    return {here: there for a, b in pairs for here, there in ((b, a), (a, b))}


OPPOSITES = _opposites()
GROUPS = [group.split() for group in ENTITIES.replace("\n", " ").split("|")]
GROUP_OF = {name: group for group in GROUPS for name in group}


def edit_number(text: str, source: random.Random) -> tuple[str, str]:
    """Changes a number of a question, or asks for an amount and then for another."""
    found = _DIGITS.search(text)
    if found:
        other = str(int(found.group()) + source.randint(1, 9))
        return text, text[: found.start()] + other + text[found.end() :]
    amount = source.randint(2, 500)
    return (
        f"{text.rstrip('?. ')} for {amount} dollars",
        f"{text.rstrip('?. ')} for {amount + source.randint(1, 50)} dollars",
    )


def edit_negation(text: str, source: random.Random) -> tuple[str, str] | None:
    """Takes the negation out of a question, or puts one into it."""
    found = _NEGATION.search(text)
    if found:
        return text, text[: found.start()] + text[found.end() :]
    auxiliaries = list(_AUXILIARY.finditer(text))
    if not auxiliaries:
        return None
    word = source.choice(auxiliaries)
    return text, f"{text[: word.end()]} not{text[word.end() :]}"


def edit_order(text: str, source: random.Random) -> tuple[str, str] | None:
    """Exchanges two content words of a question, around a preposition where there is one."""
    words = content_words(text)
    pairs = [
        (a, b) for i, a in enumerate(words) for b in words[i + 1 :] if a.group().casefold() != b.group().casefold()
    ]
    around = [(a, b) for a, b in pairs if not _SWAP_WORDS.isdisjoint(text[a.end() : b.start()].casefold().split())]
    if not pairs:
        return None
    a, b = source.choice(around or pairs)
    return text, text[: a.start()] + b.group() + text[a.end() : b.start()] + a.group() + text[b.end() :]


def edit_antonym(text: str, source: random.Random) -> tuple[str, str] | None:
    """Replaces a word of a question by its opposite."""
    return _replaced(text, source, lambda word: OPPOSITES.get(word))


def edit_entity(text: str, source: random.Random) -> tuple[str, str]:
    """Replaces a name of a question, in lower case, or asks about a place and then about another."""
    found = _replaced(text.lower(), source, lambda word: _other(word, source))
    if found is not None:
        return found
    place = source.choice(GROUPS[0])
    return f"{text.lower().rstrip('?. ')} in {place}", f"{text.lower().rstrip('?. ')} in {_other(place, source)}"


KINDS = {
    "number": edit_number,
    "negation": edit_negation,
    "swap": edit_order,
    "antonym": edit_antonym,
    "entity": edit_entity,
}


def make_suite(texts: list[str], source: random.Random, most: dict[str, int]) -> list[MinimalEdit]:
    """Makes edits of all kinds, of the first questions that each kind can be made of."""
    edits = []
    for kind, edit in KINDS.items():
        made = 0
        for text in texts:
            pair = edit(text, source) if made < most[kind] else None
            if pair is not None and pair[0].casefold() != pair[1].casefold():
                edits.append(MinimalEdit(kind, *pair))
                made += 1
    return edits


def _replaced(text: str, source: random.Random, other: Callable[[str], str | None]) -> tuple[str, str] | None:
    words = [(match, other(match.group().casefold())) for match in re.finditer(r"[^\W\d_]+", text)]
    known = [(match, word) for match, word in words if word is not None]
    if not known:
        return None
    match, word = source.choice(known)
    return text, text[: match.start()] + word + text[match.end() :]


def _other(name: str, source: random.Random) -> str | None:
    group = GROUP_OF.get(name)
    return None if group is None else source.choice([each for each in group if each != name])
