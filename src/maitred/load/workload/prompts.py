"""Prompt text from lengths and block ids: English-looking words with the requested number of tokens.

Text is a pure function of the seed and the request. A prefix cache on the server needs three properties: the same
prefix number or block id gives the same words; a block that is cut short is the beginning of the whole block; and
different numbers give different first words, so that nothing is shared by accident. The last property is guaranteed,
because every text begins with its number, spelled in words as digits.
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
"""Number of tokens of block text that are cached, about 25 MB."""
FEWEST_WORDS = 64
"""Least one-token words; with fewer, all words are used, and lengths are right only on average."""
FEWEST_DIGITS = 2
"""Least number of digits: with fewer, the words after a small number could spell a larger number."""
URN = 1 << 16
"""Number of entries of the table that words are drawn from."""
_ANCHOR = "the"


class PromptWriter:
    """Writer of the prompts of a run.

    Args:
        tokens_per_word: Tokens per word of the tester's vocabulary, by the server's tokenizer; unused with `tokenizer`.
        template_tokens: Tokens that the server adds to a message: role marks and the beginning of the text.
        block_tokens: Length of a block.
        seed: Seed of the words.
        tokenizer: Tokenizer of the server. With it, only words of one token are used, so lengths are exact.
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
        """Returns the shared prefix of a number; a shorter prefix is the beginning of a longer one."""
        return self._prefix(number, tokens)

    def message(self, session_id: int, turn_number: int, tokens: int) -> str:
        """Returns a user message that gives a prompt of `tokens`, including what the server adds."""
        return " ".join(self._make_words(f"message:{turn_number}", session_id, tokens - self._template_tokens))

    def blocks(self, ids: Sequence[int], tokens: int) -> str:
        """Returns a whole prompt of blocks, cut to `tokens` including what the server adds.

        Args:
            ids: Block ids in order. Each block's words depend on its own id alone, so two prompts with the same first
                ids have the same first tokens.
            tokens: Length of the prompt; at most the length of the blocks.
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
        """Returns the words of a block, and their number.

        If a block is not a whole number of words, some blocks have one word more than others, chosen by the id: an id
        always gives the same words, and many blocks together have the right length.
        """
        most = max(1, math.ceil(self._block_words))
        lot, *numbers = _numbers(f"{self._seed}:block:{id_}", 1 + most)
        count = max(1, int(self._block_words + lot / URN))
        opening = self._opening(id_, count)
        return count, " ".join([*opening, *map(self._urn.__getitem__, numbers[len(opening) : count])])

    def _make_words(self, purpose: str, number: int, tokens: float) -> list[str]:
        """Makes words for the given number of tokens; the first words spell the number."""
        (first,) = self._opening(number, 1)
        count = self._word_count(tokens, first)
        opening = self._opening(number, count)
        numbers = _numbers(f"{self._seed}:{purpose}:{number}", count)
        return [*opening, *map(self._urn.__getitem__, numbers[len(opening) :])]

    def _opening(self, number: int, most: int) -> list[str]:
        """Spells a number in words, the fastest-changing digit first; two words cover a million numbers."""
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
        """Returns how many more tokens a word has without a space before it."""
        if self._tokenizer is None:
            return 0
        return len(self._tokenizer.encode(word, add_special_tokens=False)) - _tokens_after_space(self._tokenizer, word)


def probe(words: int) -> str:
    """Returns a text with exactly this number of words, to measure the server's token count."""
    return " ".join(map(_urn(WORDS).__getitem__, _numbers(f"probe:{words}", words)))


def fit(words_a: int, tokens_a: int, words_b: int, tokens_b: int) -> tuple[float, float]:
    """Fits tokens per word and tokens per message: the line through two probes.

    If the server's count does not rise with the words, one token per word is assumed.
    """
    per_word = (tokens_b - tokens_a) / (words_b - words_a)
    if per_word <= 0:
        return 1.0, 0.0
    return per_word, max(0.0, tokens_a - per_word * words_a)


def _urn(words: Sequence[str]) -> list[str]:
    """Makes a table from every 16-bit number to a word.

    Some words occur one part in 65 more often than others, which is not noticeable.
    """
    return list(itertools.islice(itertools.cycle(words), URN))


def _numbers(key: str, count: int) -> "array[int]":
    """Returns 16-bit numbers that depend on the key alone; fewer numbers are the beginning of more.

    It uses an extendable hash, because a new `random.Random` for every block takes ten times as long.
    """
    numbers = array("H", hashlib.shake_128(key.encode()).digest(2 * count))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _measure_words(tokenizer: Tokenizer) -> tuple[Sequence[str], float]:
    """Returns the words to use with a tokenizer, and the tokens of each word."""
    counts = {word: _tokens_after_space(tokenizer, word) for word in WORDS}
    single = [word for word, tokens in counts.items() if tokens == 1]
    if len(single) >= FEWEST_WORDS:
        return single, 1.0
    return WORDS, sum(counts.values()) / len(counts)


def _tokens_after_space(tokenizer: Tokenizer, word: str) -> int:
    before, after = (len(tokenizer.encode(text, add_special_tokens=False)) for text in (_ANCHOR, f"{_ANCHOR} {word}"))
    return after - before
