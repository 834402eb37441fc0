"""Compiled grammars: made in threads beside the steps, shared by all sequences that have the same.

A grammar is held from the moment that a request with it comes until the last one has ended; then it stays while there
is room, for the next one. A compiled grammar is never used itself: every sequence has a copy, which costs microseconds.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import tokenizers
from llguidance import LLMatcher, LLTokenizer

from maitred.core.grammar import Grammar
from maitred.text.grammar.language import COMPILING_STACK_BYTES, LIMITS, GrammarFault, grammar_source

_THREADS = 2
_MOST_UNUSED = 256


class GrammarCompiler:
    """Compiles grammars and keeps them.

    Args:
        vocabulary: Reads the model's, once, when the first grammar comes; raises GrammarFault if it cannot be used.
        most_unused: Grammars that are kept though no request has them.
    """

    def __init__(self, vocabulary: Callable[[], LLTokenizer], *, most_unused: int = _MOST_UNUSED) -> None:
        self._vocabulary = _Once(vocabulary)
        self._most_unused = most_unused
        self._held: dict[Grammar, int] = {}
        self._unused: OrderedDict[Grammar, None] = OrderedDict()
        self._compiled: dict[Grammar, Future[LLMatcher]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")

    def hold(self, grammar: Grammar) -> None:
        """One more request has it: compiles it, unless that has been done."""
        self._held[grammar] = self._held.get(grammar, 0) + 1
        self._unused.pop(grammar, None)
        if grammar not in self._compiled:
            # The thread may begin here, and takes the size that holds now for its stack.
            before = threading.stack_size(COMPILING_STACK_BYTES)
            self._compiled[grammar] = self._threads.submit(_compile, self._vocabulary, grammar)
            threading.stack_size(before)

    def release(self, grammar: Grammar) -> None:
        """One request less has it."""
        self._held[grammar] -= 1
        if self._held[grammar]:
            return
        del self._held[grammar]
        self._unused[grammar] = None
        while len(self._unused) > self._most_unused:
            oldest, _ = self._unused.popitem(last=False)
            del self._compiled[oldest]

    def ready(self, grammar: Grammar) -> bool:
        """Whether a grammar that is held has been compiled, or cannot be."""
        return self._compiled[grammar].done()

    def fault(self, grammar: Grammar) -> str | None:
        """Why a grammar that is ready cannot be used; None: it can."""
        error = self._compiled[grammar].exception()
        return None if error is None else str(error)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher of its own for a sequence, at the beginning of the word. Of a grammar that is ready only."""
        return self._compiled[grammar].result().deep_copy()


class _Once:
    """Value that is made when it is first needed."""

    def __init__(self, make: Callable[[], LLTokenizer]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None

    def __call__(self) -> LLTokenizer:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made


def _compile(vocabulary: Callable[[], LLTokenizer], grammar: Grammar) -> LLMatcher:
    matcher = LLMatcher(vocabulary(), grammar_source(grammar), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarFault(f"The grammar cannot be compiled: {matcher.get_error()}")
    return matcher


def load_vocabulary(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Reads a model's ``tokenizer.json``.

    Takes about a second for 150,000 tokens, in which no other thread of the process runs.

    Args:
        folder: Where the model lies.
        vocab_size: Columns of the model's logits.
        eos_token_ids: How it ends its turn.

    Raises:
        GrammarFault: There is no tokenizer, or not one of bytes.
    """
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.no_truncation()
        backend.no_padding()
        size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=list(eos_token_ids))
    except Exception as error:  # Both libraries raise nothing more exact.
        raise GrammarFault(
            f"This model's answers cannot be held to a grammar, as its tokenizer cannot be used: {error}"
        ) from error
