"""Grammar state of one answer: allowed and forced next tokens, after the tokens so far."""

from collections.abc import Sequence
from copy import copy

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from maitred.core.request import SamplingParams
from maitred.engine.grammar.masks import WORD_BITS


class GrammarState:
    """Grammar state of one sequence.

    Args:
        matcher: Matcher in the start state.
        sampling: Sampling parameters of the sequence's request.
        eos: End-of-sequence tokens of the model.
        output: Output tokens so far.

    Attributes:
        matcher: Matcher in the current state.
    """

    __slots__ = ("_ended", "_ends", "_eos", "_fast", "_ignores_eos", "_min_tokens", "_stops", "matcher")

    def __init__(self, matcher: LLMatcher, sampling: SamplingParams, eos: Sequence[int], output: Sequence[int]) -> None:
        self.matcher = matcher
        self._eos = eos
        self._stops = sorted(frozenset(sampling.stop_token_ids).difference(eos))
        self._ends = frozenset((*eos, *self._stops))
        self._min_tokens = sampling.min_tokens
        self._ignores_eos = sampling.ignore_eos
        # Forced tokens have no computed log-probability, and may be banned.
        self._fast = sampling.top_logprobs is None and not sampling.restricts_tokens
        self._ended = False
        for token in output:
            matcher.consume_token(token)

    def copy(self) -> "GrammarState":
        """Returns an independent copy in the same state."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    @property
    def ended(self) -> bool:
        """Whether the answer has ended."""
        return self._ended

    def settle(self, bits: NDArray[np.int32], position: int) -> None:
        """Adjusts a mask so that end tokens are allowed only where the answer may end."""
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
        """Reads one more token; returns why the answer cannot continue, or None."""
        if not self.matcher.is_error():
            if token in self._ends:
                self._ended = True
                return None
            if self.matcher.consume_token(token):
                return None
        return self.matcher.get_error() or "The grammar does not take the token."

    def forced_tokens(self) -> list[int]:
        """Returns the forced next tokens, and reads them."""
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
    """Grammar states along the draft tokens of one sequence.

    A draft token may violate the answer's grammar. If it is allowed, the grammar may force further tokens behind it.
    Forced tokens are computed like drafts, but no token is sampled at their positions. For the tokens ``g1 f f g2``,
    with `f` forced, the model samples before ``g1``, before ``g2`` and at the end.

    The sequence's own grammar state stays unchanged: every draft token is tried on a copy. Each copy is kept, because
    it gives the allowed tokens at its position.

    Args:
        word: Grammar state of the sequence; None: it has no grammar.

    Attributes:
        tokens: Draft tokens, each with the forced tokens behind it.
        draws: Number of tokens before each position that the model samples.
        words: Grammar state at each sampled position; empty without a grammar.
        open: Whether further draft tokens can follow.
    """

    __slots__ = ("draws", "open", "tokens", "words")

    def __init__(self, word: GrammarState | None = None) -> None:
        self.tokens: list[int] = []
        self.draws = [0]
        self.words = [] if word is None else [word]
        self.open = True

    def take(self, token: int, most: int) -> None:
        """Adds a draft token and its forced tokens, up to `most` tokens in total."""
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
        """Adds the tokens of a draft as long as the forced tokens agree with it."""
        taken = self.tokens
        while self.open and len(taken) < min(len(guess), most) and taken == [*guess[: len(taken)]]:
            self.take(guess[len(taken)], most)

    def after(self, word: GrammarState, token: int) -> tuple[GrammarState, list[int]] | None:
        """Returns the state and forced tokens after `token` at state `word`; None if they are unknown."""
        for choice, place in enumerate(self.words[:-1]):
            if place is word:
                start, end = self.draws[choice : choice + 2]
                return (self.words[choice + 1], self.tokens[start + 1 : end]) if self.tokens[start] == token else None
        return None
