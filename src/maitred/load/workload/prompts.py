"""From lengths and block ids to text: English-looking words, so many that the server counts the tokens asked for.

Text is a pure function of the seed and of what is asked for. Three things about it matter to a cache of prefixes on the
server: the same prefix number or block id is the same words; a block that is cut short is the beginning of the whole
one; and whatever has another number begins with other words, so that nothing is shared that should not be. The last
holds by construction: every text opens with its number, spelled in words as the digits.
"""

import hashlib
import itertools
import math
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

from maitred.load.workload.words import WORDS
from maitred.text.tokenizer import Tokenizer

KEPT_TOKENS = 1 << 22
"""So much of the blocks' text is remembered, about 25 MB."""
FEWEST_WORDS = 64
"""A tokenizer with fewer words of one token than this gets all words, and lengths that are right on average."""
FEWEST_DIGITS = 2
"""With fewer, the words after a small number could spell a larger one."""
URN = 1 << 16
"""Entries of the table that words are drawn from."""
_ANCHOR = "the"


class PromptWriter:
    """Writes the prompts of a run.

    Args:
        tokens_per_word: Of the tester's words, by the server's tokenizer; not used with `tokenizer`.
        template_tokens: What the server adds to a message: role marks, the beginning of the text.
        block_tokens: Length of a block.
        seed: Of the words.
        tokenizer: The server's. With it only words of one token are used, so lengths are exact.
    """

    def __init__(
        self,
        *,
        tokens_per_word: float,
        template_tokens: float,
        block_tokens: int,
        seed: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._template_tokens = template_tokens
        self._seed = seed
        self._tokenizer = tokenizer
        self._words: Sequence[str] = WORDS
        self._tokens_per_word = tokens_per_word
        if tokenizer is not None:
            self._words, self._tokens_per_word = _measure_words(tokenizer)
        self._urn = _urn(self._words)
        self._block_words = block_tokens / self._tokens_per_word
        self._first_extra = lru_cache(maxsize=len(WORDS))(self._count_first_extra)
        self._block = lru_cache(maxsize=max(1, KEPT_TOKENS // block_tokens))(self._write_block)
        self._prefix = lru_cache(maxsize=1024)(self._write_prefix)

    def prefix(self, number: int, tokens: int) -> str:
        """The shared prefix of this number; a shorter one is the beginning of a longer one."""
        return self._prefix(number, tokens)

    def message(self, session_id: int, turn_number: int, tokens: int) -> str:
        """A user's message that makes a prompt of `tokens`, together with what the server adds to it."""
        return " ".join(self._make_words(f"message:{turn_number}", session_id, tokens - self._template_tokens))

    def blocks(self, ids: Sequence[int], tokens: int) -> str:
        """A whole prompt of these blocks, the last of them cut so that it has `tokens`, what the server adds included.

        Args:
            ids: In order. The first words of a prompt come from the first block alone, and so on, so two prompts with
                the same first ids have the same first tokens.
            tokens: Not more than the blocks hold.
        """
        texts: list[str] = []
        left = 0
        for place, id_ in enumerate(ids):
            words, text = self._block(id_)
            if place == 0:
                left = self._word_count(tokens - self._template_tokens, text.partition(" ")[0])
            if words >= left:
                texts.append(text if words == left else " ".join(text.split(" ", left)[:left]))
                break
            texts.append(text)
            left -= words
        return " ".join(texts)

    def _write_prefix(self, number: int, tokens: int) -> str:
        return " ".join(self._make_words("prefix", number, tokens))

    def _write_block(self, id_: int) -> tuple[int, str]:
        """The words of a block, and how many they are.

        Where a block is no whole number of words, some blocks have one more than others, by the id's own lot: an id has
        always the same words, and many blocks together have the right length.
        """
        most = max(1, math.ceil(self._block_words))
        lot, *numbers = _numbers(f"{self._seed}:block:{id_}", 1 + most)
        count = max(1, int(self._block_words + lot / URN))
        opening = self._opening(id_, count)
        return count, " ".join([*opening, *map(self._urn.__getitem__, numbers[len(opening) : count])])

    def _make_words(self, purpose: str, number: int, tokens: float) -> list[str]:
        """Words that make so many tokens; the first of them say the number."""
        (first,) = self._opening(number, 1)
        count = self._word_count(tokens, first)
        opening = self._opening(number, count)
        numbers = _numbers(f"{self._seed}:{purpose}:{number}", count)
        return [*opening, *map(self._urn.__getitem__, numbers[len(opening) :])]

    def _opening(self, number: int, most: int) -> list[str]:
        """The number in words, the digit that changes fastest first; at least two, which holds a million numbers."""
        words: list[str] = []
        base = len(self._words)
        digits = 2 * number if number >= 0 else -2 * number - 1
        while len(words) < most and (digits or len(words) < FEWEST_DIGITS):
            digits, digit = divmod(digits, base)
            words.append(self._words[(digit + self._seed) % base])
        return words

    def _word_count(self, tokens: float, first: str) -> int:
        return max(1, round((tokens - self._first_extra(first)) / self._tokens_per_word))

    def _count_first_extra(self, word: str) -> int:
        """How many more tokens a word has where no space is before it."""
        if self._tokenizer is None:
            return 0
        return len(self._tokenizer.encode(word, add_special_tokens=False)) - _tokens_after_space(self._tokenizer, word)


def probe(words: int) -> str:
    """A text of exactly so many words, to see how many tokens a server counts."""
    return " ".join(map(_urn(WORDS).__getitem__, _numbers(f"probe:{words}", words)))


def fit(words_a: int, tokens_a: int, words_b: int, tokens_b: int) -> tuple[float, float]:
    """Tokens per word, and tokens that come with every message, from two probes: the line through both.

    A server whose count does not rise with the words cannot be asked so; one token per word is assumed of it.
    """
    per_word = (tokens_b - tokens_a) / (words_b - words_a)
    if per_word <= 0:
        return 1.0, 0.0
    return per_word, max(0.0, tokens_a - per_word * words_a)


def _urn(words: Sequence[str]) -> list[str]:
    """A table from every number of 16 bits to a word.

    Some words come up by one part in 65 more often than others, which nobody can tell.
    """
    return list(itertools.islice(itertools.cycle(words), URN))


def _numbers(key: str, count: int) -> "array[int]":
    """Returns so many numbers of 16 bits that follow from the key alone; fewer of them are the beginning of more.

    An extendable hash: a new `random.Random` for every block takes ten times as long.
    """
    numbers = array("H", hashlib.shake_128(key.encode()).digest(2 * count))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _measure_words(tokenizer: Tokenizer) -> tuple[Sequence[str], float]:
    """The words to use with a tokenizer, and how many tokens each has."""
    counts = {word: _tokens_after_space(tokenizer, word) for word in WORDS}
    single = [word for word, tokens in counts.items() if tokens == 1]
    if len(single) >= FEWEST_WORDS:
        return single, 1.0
    return WORDS, sum(counts.values()) / len(counts)


def _tokens_after_space(tokenizer: Tokenizer, word: str) -> int:
    before, after = (len(tokenizer.encode(text, add_special_tokens=False)) for text in (_ANCHOR, f"{_ANCHOR} {word}"))
    return after - before
