"""Grammar compiler: compiles in background threads; sequences with equal grammars share the result.

A grammar is held from its first request until the last request with it has ended. Then it stays in a cache of limited
size for later requests. Every sequence uses its own copy of the compiled grammar; a copy costs microseconds.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from maitred.core.grammar import Grammar
from maitred.text.grammar.language import COMPILING_STACK_BYTES, LIMITS, MAX_FORCED_BYTES, GrammarFault, grammar_source
from maitred.text.tokenizer import Tokenizer

_THREADS = 2
_MAX_UNUSED_BYTES = 64 << 20
_BYTES = 65_536
"""Estimated memory of a compiled grammar: a fixed part, and `_BYTES_PER_CHARACTER` for its text, as measured."""
_BYTES_PER_CHARACTER = 100
_KNOWN_TEXTS = 4096
_KNOWN_CHARACTERS = 256


class GrammarCompiler:
    """Compiler and cache of grammars.

    Args:
        vocabulary: Reads the model's vocabulary, once, when the first grammar comes; raises GrammarFault if it is
            unusable.
        max_unused_bytes: Maximum memory of cached grammars without a request, as estimated.
    """

    def __init__(self, vocabulary: Callable[[], LLTokenizer], *, max_unused_bytes: int = _MAX_UNUSED_BYTES) -> None:
        self._vocabulary = _Once(vocabulary)
        self._max_unused_bytes = max_unused_bytes
        self._unused_bytes = 0
        self._held: dict[Grammar, int] = {}
        self._unused: OrderedDict[Grammar, None] = OrderedDict()
        self._compiled: dict[Grammar, Future[LLMatcher]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")

    def hold(self, grammar: Grammar) -> None:
        """Counts one more request of a grammar, and compiles the grammar if necessary."""
        self._held[grammar] = self._held.get(grammar, 0) + 1
        if grammar in self._unused:
            del self._unused[grammar]
            self._unused_bytes -= _memory_bytes(grammar)
        if grammar not in self._compiled:
            # The thread may start here, and uses the stack size that is set now.
            before = threading.stack_size(COMPILING_STACK_BYTES)
            self._compiled[grammar] = self._threads.submit(_compile, self._vocabulary, grammar)
            threading.stack_size(before)

    def release(self, grammar: Grammar) -> None:
        """Counts one request fewer of a grammar."""
        self._held[grammar] -= 1
        if self._held[grammar]:
            return
        del self._held[grammar]
        self._unused[grammar] = None
        self._unused_bytes += _memory_bytes(grammar)
        while self._unused_bytes > self._max_unused_bytes:
            oldest, _ = self._unused.popitem(last=False)
            self._unused_bytes -= _memory_bytes(oldest)
            del self._compiled[oldest]

    def ready(self, grammar: Grammar) -> bool:
        """Returns whether the compilation of a held grammar has ended, with or without success."""
        return self._compiled[grammar].done()

    def fault(self, grammar: Grammar) -> str | None:
        """Returns why a ready grammar is unusable; None: it is usable."""
        error = self._compiled[grammar].exception()
        return None if error is None else str(error)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Makes a new matcher for a sequence, in the start state of the grammar. The grammar must be ready."""
        return self._compiled[grammar].result().deep_copy()


def _memory_bytes(grammar: Grammar) -> int:
    return _BYTES + _BYTES_PER_CHARACTER * len(grammar.text)


class _Once:
    """Value that is made at its first use."""

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
    # The first mask reads what the grammar forces from its start. Here this takes no time of a step, and what it has
    # learnt is shared with all copies.
    matcher.compute_bitmask()
    if matcher.is_error() or len(matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
        raise GrammarFault(f"The grammar cannot be followed: {matcher.get_error() or 'its text is too long'}")
    return matcher


class _TextVocabulary:
    """Vocabulary as llguidance reads it: bytes of each token, and an encoder of forced text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: tuple[int, ...]) -> None:
        # A token beyond the logits cannot be chosen, whatever the tokenizer's files say.
        special = {*tokenizer.control_tokens, *eos_token_ids, *range(size, tokenizer.vocab_size)}
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = sorted(special)
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self._encode = tokenizer.text_tokenizer(special).encode
        self._encode_known = lru_cache(_KNOWN_TEXTS)(self._encode)

    def __call__(self, text: str) -> list[int]:
        # What a schema forces is forced in every answer that follows it.
        return self._encode_known(text) if len(text) <= _KNOWN_CHARACTERS else self._encode(text)


def load_vocabulary(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Reads a model's vocabulary from the files of its tokenizer.

    This takes about a second for 150,000 tokens, and blocks all other threads of the process.

    Args:
        folder: Folder of the model.
        vocab_size: Number of columns of the model's logits.
        eos_token_ids: End-of-sequence tokens of the model.

    Raises:
        GrammarFault: The tokenizer is missing, or it is not byte-based, or no token ends an answer.
    """
    if not eos_token_ids:
        raise GrammarFault(
            "This model's answers cannot be held to a grammar, as its files name no token that ends one."
        )
    try:
        tokenizer = Tokenizer.load(folder)
        vocabulary: Any = _TextVocabulary(tokenizer, vocab_size, eos_token_ids)
        return LLTokenizer(vocabulary, eos_token=list(eos_token_ids))
    except Exception as error:  # The libraries raise only `Exception`.
        raise GrammarFault(
            f"This model's answers cannot be held to a grammar, as its tokenizer cannot be used: {error}"
        ) from error
