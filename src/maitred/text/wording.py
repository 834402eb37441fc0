"""Wording of a question: its words, and those parts of it that decide by themselves what the answer is.

Vectors of sentences hardly notice a number, a name or a "not", and just these make another question of it. So they are
read from the text by rules. The rules know English, and digits of every script. They prefer to find too much: who
compares two questions by their wording must refuse when in doubt.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def _word_list(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTION_WORDS = _word_list(
    """
    a an the this that these those some any each every such own other another both all most more much many few less
    i me my mine myself you your yours yourself he him his himself she her hers herself it its itself we us our ours
    they them their theirs themselves one ones someone something anyone anything everyone everything
    who whom whose which what when where why how whether
    am is are was were be been being do does did doing done have has had having can could will would shall should may
    might must ought get gets got getting need needs want wants like let lets
    s d ll m re ve t ca wo sha
    of in on at by for with about against between into through during to from up down out off over under onto upon
    within along across behind beyond near than via per toward towards as
    and or but if because while until then so too also just only very really quite even still yet already again else
    there here now once ever please thanks thank hi hello hey ok okay yes yeah sure well right
    """
)
"""English words that structure a sentence and say little of its subject."""
NEGATIONS = _word_list(
    """
    not no never none nobody nothing nowhere neither nor without cannot except unless unable hardly barely lack lacks
    aint arent cant couldnt didnt doesnt dont hadnt hasnt havent isnt mustnt shouldnt wasnt werent wont wouldnt
    nicht kein keine keinen nie ohne pas jamais sans niet geen inte ikke non não nunca sin sem senza
    """
)
"""Words that negate: those of English, and the commonest of its neighbours."""
NUMERALS = _word_list(
    """
    zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
    nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand thousands million millions
    billion billions dozen dozens half quarter double triple twice thrice second third fourth fifth sixth seventh eighth
    ninth tenth
    """
)
"""Numerals. "One" and "first" are none, as they mostly count nothing; what replaces them is found."""
DATE_WORDS = _word_list(
    """
    monday tuesday wednesday thursday friday saturday sunday mon tue tues wed thu thurs fri
    january february april june july august september october november december jan feb apr jun jul aug sept oct nov dec
    today tomorrow yesterday tonight weekend weekday morning noon afternoon evening midnight spring summer autumn winter
    christmas easter daily weekly monthly quarterly yearly annually hourly
    """
)
"""Words that name a time. March and May are found where they are written with a capital."""
PRONOUNS = _word_list(
    """
    it this that these those they them he him she her one ones same there
    """
)
"""Words that stand for something said before."""
OPENERS = _word_list(
    """
    yes yeah yep no nope ok okay sure right well so and but or then also please thanks hey hi
    """
)
"""Words before the question proper."""

_NO_CONTENT = FUNCTION_WORDS | NEGATIONS | NUMERALS
# Repeats are bounded where their end may be missing: a hostile text must not take the square of its length.
_QUOTED = re.compile(
    r"```.{1,2000}?```|`[^`]{1,300}`|\"[^\"]{1,300}\"|“[^”]{1,300}”|«[^»]{1,300}»|「[^」]{1,300}」"
    r"|(?<!\w)['‘][^']{1,300}'(?!\w)",
    re.DOTALL,
)
_ADDRESS = re.compile(
    r"\b[a-z][a-z0-9+.-]{0,20}://\S+|\bwww\.\S+|[\w.+-]{1,64}@[\w-]{1,64}\.[\w.-]+|(?<!\w)[~.]{0,2}/[\w./-]+",
    re.IGNORECASE,
)
_COMPOUND = re.compile(r"\w+(?:[-./:#@+&=]+\w+)*[+#]*")
_WORD = re.compile(r"\w+(?:'\w+)*")
_NUMBER = re.compile(r"([+\-−]?)([$€£¥₹#]?)\s?(\d+(?:[.,:/-]\d+)*)(?:\s?([%°$€£¥₹]))?")
_CONTRACTED = re.compile(r"n't\b", re.IGNORECASE)
_SENTENCE_END = ".!?:;\n"


@dataclass(frozen=True, slots=True)
class Wording:
    """Words of a question and what they name.

    Attributes:
        words: Words in lower case, in their order.
        content: Those of them that are no function words, without plural endings.
        numbers: Amounts, with the word behind each, then numerals; each in their order.
        dates: Words that name a time, in their order.
        literals: Quoted texts, addresses and identifiers, each in their order.
        names: Words with a capital inside a sentence or all in capitals, in lower case, in their order.
        negations: Number of words that negate.
    """

    words: tuple[str, ...]
    content: tuple[str, ...]
    numbers: tuple[str, ...]
    dates: tuple[str, ...]
    literals: tuple[str, ...]
    names: tuple[str, ...]
    negations: int

    @classmethod
    def of(cls, text: str) -> "Wording":
        """Reads the wording of a text."""
        text = _CONTRACTED.sub(" not", unicodedata.normalize("NFKC", text).replace("’", "'"))
        literals = [*_QUOTED.findall(text), *_ADDRESS.findall(text)]
        literals += filter(_is_identifier, _COMPOUND.findall(_ADDRESS.sub(" ", text)))
        found = list(_WORD.finditer(text))
        words = tuple(match.group().casefold() for match in found)
        return cls(
            words=words,
            content=tuple(stem(word) for word in words if is_content_word(word)),
            numbers=(*_amounts(text), *(word for word in words if word in NUMERALS)),
            dates=tuple(word for word in words if word in DATE_WORDS),
            literals=tuple(literal.strip("\"'`“”«»「」‘’ .,?!").casefold() for literal in literals),
            names=tuple(_names(text, found)),
            negations=sum(not NEGATIONS.isdisjoint(_forms(word)) for word in words),
        )


def is_content_word(word: str) -> bool:
    """Whether a word says what a text speaks of: no function word, negation or number."""
    word = word.casefold().replace("’", "'")
    return _NO_CONTENT.isdisjoint(_forms(word)) and not word.isnumeric()


def stem(word: str) -> str:
    """Takes the plural and the possessive ending from an English word."""
    word = word.removesuffix("'s")
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-3] + "y" if word.endswith("ies") and len(word) > 4 else word[:-1]
    return word


def _forms(word: str) -> tuple[str, str, str]:
    """Returns a word, the same without apostrophes, and what stands before the first one."""
    return word, word.replace("'", ""), word.partition("'")[0]


def _amounts(text: str) -> Iterator[str]:
    """Finds numbers in digits of any script, with their sign and unit, and numerals of one character, as in Chinese."""
    digits = "".join(str(unicodedata.digit(c)) if c.isdigit() else c for c in text)
    for match in _NUMBER.finditer(digits):
        behind = _WORD.match(digits, match.end() + 1) if digits[match.end() : match.end() + 1] == " " else None
        unit = f" {stem(behind.group().casefold())}" if behind and is_content_word(behind.group()) else ""
        yield "".join(filter(None, match.groups())) + unit
    yield from (c for c in text if not c.isdigit() and unicodedata.numeric(c, None) is not None)


def _is_identifier(token: str) -> bool:
    """Whether a token is a code rather than a word: letters with digits or signs, or capitals inside."""
    has_letter, has_digit = any(map(str.isalpha, token)), any(map(str.isdigit, token))
    has_inner_capital = any(map(str.isupper, token[1:])) and not token.isupper()
    signs = set(token) - set("-/'")
    return (has_letter and has_digit) or (has_letter and (not all(c.isalnum() for c in signs) or has_inner_capital))


def _names(text: str, found: Sequence[re.Match[str]]) -> Iterator[str]:
    """Finds words with a capital that does not only begin a sentence."""
    for match in found:
        word = match.group()
        before = text[: match.start()].rstrip(" \t\"'“‘«([")
        begins = not before or before[-1] in _SENTENCE_END
        if word.casefold() in FUNCTION_WORDS or word.split("'")[0] == "I":
            continue
        if (word[0].isupper() and not begins) or (len(word) > 1 and word.isupper()):
            yield stem(word.casefold())
