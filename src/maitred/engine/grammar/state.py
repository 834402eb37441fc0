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

    def forced(self) -> list[int]:
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
