"""Minimal edits of a question: false pairs that need no label, as further examples for the training of a verifier.

Two content words change places, or one is replaced by another that the deployment's questions use. Nearly always this
makes another question, or none; the few edits that mean the same are noise, for which edits have a small weight. No
list of antonyms or names is needed: a verifier that has learnt that a single exchanged word matters refuses them, too.
"""

import random
import re
from collections.abc import Sequence

from maitred.text.wording import is_content_word, stem

_WORD = re.compile(r"\w+(?:['’]\w+)*")


def content_words(text: str) -> list[re.Match[str]]:
    """Finds the words that say of what a text speaks."""
    return [match for match in _WORD.finditer(text) if is_content_word(match.group())]


def swap_words(text: str, source: random.Random) -> str | None:
    """Exchanges two content words of a text; None: it has no two different ones."""
    words = content_words(text)
    pairs = [(a, b) for i, a in enumerate(words) for b in words[i + 1 :] if not _is_same(a.group(), b.group())]
    if not pairs:
        return None
    a, b = source.choice(pairs)
    return text[: a.start()] + b.group() + text[a.end() : b.start()] + a.group() + text[b.end() :]


def replace_word(text: str, vocabulary: Sequence[str], source: random.Random) -> str | None:
    """Replaces a content word of a text by another of a vocabulary; None: there is none to be replaced."""
    words = content_words(text)
    if not words or not vocabulary:
        return None
    word, other = source.choice(words), source.choice(vocabulary)
    return None if _is_same(word.group(), other) else text[: word.start()] + other + text[word.end() :]


def make_edits(texts: Sequence[str], source: random.Random) -> list[tuple[int, str]]:
    """Makes up to two edits of each text: a swap and a replacement.

    Words for replacements are drawn from all texts, so that frequent words come often.

    Returns:
        For each edit the index of its text and the edited text.
    """
    vocabulary = [word.group().casefold() for text in texts for word in content_words(text)]
    edits = []
    for index, text in enumerate(texts):
        edited = (swap_words(text, source), replace_word(text, vocabulary, source))
        edits += [(index, each) for each in edited if each is not None]
    return edits


def _is_same(one: str, other: str) -> bool:
    return stem(one.casefold()) == stem(other.casefold())
