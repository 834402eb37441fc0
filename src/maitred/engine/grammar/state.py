"""One answer's place in its grammar: what may come next, what must, and what was taken."""

from collections.abc import Sequence
from copy import copy

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from maitred.core.request import SamplingParams
from maitred.engine.grammar.masks import WORD_BITS


class GrammarState:
    """A sequence's place in its grammar.

    Args:
        matcher: At the beginning of the word.
        sampling: How the sequence's request is sampled.
        eos: How the model ends its turn.
        output: What has been generated so far.

    Attributes:
        matcher: At this place.
    """

    __slots__ = ("_ended", "_ends", "_eos", "_fast", "_ignores_eos", "_min_tokens", "_stops", "matcher")

    def __init__(self, matcher: LLMatcher, sampling: SamplingParams, eos: Sequence[int], output: Sequence[int]) -> None:
        self.matcher = matcher
        self._eos = eos
        self._stops = sorted(frozenset(sampling.stop_token_ids).difference(eos))
        self._ends = frozenset((*eos, *self._stops))
        self._min_tokens = sampling.min_tokens
        self._ignores_eos = sampling.ignore_eos
        self._fast = sampling.top_logprobs is None  # nobody has computed the log-probability of a forced token
        self._ended = False
        for token in output:
            matcher.consume_token(token)

    def copy(self) -> "GrammarState":
        """One at the same place, which goes on by itself."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    @property
    def ended(self) -> bool:
        """Whether the answer has ended."""
        return self._ended

    def settle(self, bits: NDArray[np.int32], position: int) -> None:
        """Lets the tokens that end the answer come where they may, and only there."""
        if self._stops and self.matcher.is_accepting():
            for token in self._stops:
                _set(bits, token)
        early = position < self._min_tokens
        unwanted = [*(self._eos if early or self._ignores_eos else ()), *(self._stops if early else ())]
        if unwanted:
            rest = bits.copy()
            for token in unwanted:
                _clear(rest, token)
            if rest.any():
                bits[:] = rest

    def take(self, token: int) -> str | None:
        """One more token of the answer; returns why it cannot go on, if it cannot."""
        if not self.matcher.is_error():
            if token in self._ends:
                self._ended = True
                return None
            if self.matcher.consume_token(token):
                return None
        return self.matcher.get_error() or "The grammar does not take the token."

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, which count as taken."""
        forced: list[int] = []
        if not self._fast or self._ended:
            return forced
        while tokens := self.matcher.compute_ff_tokens():
            taken = self.matcher.try_consume_tokens(tokens)
            forced += tokens[:taken]
            if taken < len(tokens):
                break
        if self._eos and self.matcher.is_stopped() and not self.matcher.is_error():
            self._ended = True
            forced.append(self._eos[0])
        return forced


def _set(bits: NDArray[np.int32], token: int) -> None:
    if token // WORD_BITS < bits.size:
        bits[token // WORD_BITS] |= np.int32(np.uint32(1 << token % WORD_BITS).view(np.int32))


def _clear(bits: NDArray[np.int32], token: int) -> None:
    if token // WORD_BITS < bits.size:
        bits[token // WORD_BITS] &= np.int32(~np.uint32(1 << token % WORD_BITS).view(np.int32))


class SpeculativeGrammarState:
    """The next tokens of one sequence, supposed.

    A draft may be impossible under the answer's grammar, and where it is not, the grammar may force tokens behind it.
    These come without being chosen, so they are computed like drafts but nothing is sampled before them: of the tokens
    ``g1 f f g2``, of which `f` are forced, the model chooses before ``g1``, before ``g2`` and at the end.

    The sequence's own position in its grammar does not move: every draft is tried on a copy, and each copy is kept, for
    it says what may come at its position.

    Args:
        word: Where the sequence stands in its grammar, if it has one.

    Attributes:
        tokens: Guesses, with what is forced behind each.
        draws: How many of the tokens stand before each choice of the model.
        words: The place in the grammar at each choice; empty without a grammar.
        open: Whether more can follow.
    """

    __slots__ = ("draws", "open", "tokens", "words")

    def __init__(self, word: GrammarState | None = None) -> None:
        self.tokens: list[int] = []
        self.draws = [0]
        self.words = [] if word is None else [word]
        self.open = True

    def take(self, token: int, most: int) -> None:
        """One more guess; there are no more tokens than `most`, what is forced included."""
        if not self.words:
            self.tokens.append(token)
            self.draws.append(len(self.tokens))
            return
        word = self.words[-1].copy()
        if word.take(token) is not None:
            self.open = False
            return
        self.tokens += [token, *word.forced_tokens()]
        if word.ended or len(self.tokens) > most:
            self.open = False
            del self.tokens[most:]
            return
        self.words.append(word)
        self.draws.append(len(self.tokens))

    def follow(self, guess: Sequence[int], most: int) -> None:
        """Takes the tokens of a guess, as long as what is forced agrees with it."""
        taken = self.tokens
        while self.open and len(taken) < min(len(guess), most) and taken == [*guess[: len(taken)]]:
            self.take(guess[len(taken)], most)

    def after(self, word: GrammarState, token: int) -> tuple[GrammarState, list[int]] | None:
        """Where a sequence is that was at `word` and got `token`, and what was forced; None: nothing is known of it."""
        for choice, place in enumerate(self.words[:-1]):
            if place is word:
                start, end = self.draws[choice : choice + 2]
                return (self.words[choice + 1], self.tokens[start + 1 : end]) if self.tokens[start] == token else None
        return None
