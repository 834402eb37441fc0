"""Grammar compiler: compiles in background threads; sequences with equal grammars share the result.

A grammar is held from its first request until the last request with it has ended. Then it stays in a cache of limited
size for later requests, where an organisation that fills the cache drives out its own grammars. Every sequence uses its
own copy of the compiled grammar; a copy costs microseconds. The copies share the states that answers have reached, so
a grammar grows with the tokens that were written under it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from maitred.core.grammar import Grammar
from maitred.core.shared_cache import SharedCache
from maitred.text.grammar.language import COMPILING_STACK_BYTES, LIMITS, MAX_FORCED_BYTES, GrammarFault, grammar_source
from maitred.text.grammar.static_cost import least_states
from maitred.text.tokenizer import Tokenizer

_THREADS = 2
_UNKNOWN_TOKEN = "Token range end too large"
_MAX_UNUSED_BYTES = 64 << 20
_BYTES = 65_536
"""Memory of a compiled grammar, as measured with the allocator's counters: a fixed part, `_BYTES_PER_CHARACTER` for its
text, and `_BYTES_PER_STATE` for each state that is reached when it is compiled, or by a token that is written."""
_BYTES_PER_CHARACTER = 110
_BYTES_PER_STATE = 1_100
_MOST_STATES = 100_000
_KNOWN_TEXTS = 4096
_KNOWN_CHARACTERS = 256


class GrammarCompiler:
    """Compiler and cache of grammars.

    Args:
        vocabulary: Reads the model's vocabulary, once, when the first grammar comes; raises GrammarFault if it is
            unusable.
        max_unused_bytes: Maximum memory of cached grammars without a request.
    """

    def __init__(self, vocabulary: Callable[[], LLTokenizer], *, max_unused_bytes: int = _MAX_UNUSED_BYTES) -> None:
        self._vocabulary = _Once(vocabulary)
        self._held: dict[Grammar, int] = {}
        self._tokens: dict[Grammar, int] = {}
        self._unused: SharedCache[Grammar, None] = SharedCache(max_unused_bytes)
        self._compiled: dict[Grammar, Future[LLMatcher]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")

    @property
    def unused_bytes(self) -> int:
        """Memory of cached grammars without a request."""
        return self._unused.size

    def hold(self, grammar: Grammar) -> None:
        """Counts one more request of a grammar, and compiles the grammar if necessary."""
        self._held[grammar] = self._held.get(grammar, 0) + 1
        self._unused.pop(grammar)
        if grammar not in self._compiled:
            # The thread may start here, and uses the stack size that is set now.
            before = threading.stack_size(COMPILING_STACK_BYTES)
            self._compiled[grammar] = self._threads.submit(_compile, self._vocabulary, grammar)
            threading.stack_size(before)

    def add_tokens(self, grammar: Grammar, tokens: int) -> None:
        """Counts tokens that were written under a held grammar."""
        self._tokens[grammar] = self._tokens.get(grammar, 0) + tokens

    def release(self, grammar: Grammar, organisation: str) -> None:
        """Counts one request fewer of a grammar; after its last one, it counts for the request's organisation."""
        self._held[grammar] -= 1
        if self._held[grammar]:
            return
        del self._held[grammar]
        size_bytes = _memory_bytes(grammar, self._tokens.get(grammar, 0))
        for dropped in self._unused.put(grammar, None, organisation, size_bytes):
            del self._compiled[dropped]
            self._tokens.pop(dropped, None)

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


@lru_cache(_KNOWN_TEXTS)
def _compiled_states(grammar: Grammar) -> int:
    return least_states(grammar)


def _memory_bytes(grammar: Grammar, tokens: int) -> int:
    states = min(_MOST_STATES, _compiled_states(grammar) + tokens)
    return _BYTES + _BYTES_PER_CHARACTER * len(grammar.text) + _BYTES_PER_STATE * states


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
    tokenizer = vocabulary()
    matcher = LLMatcher(tokenizer, grammar_source(grammar), log_level=0, limits=LIMITS)
    if matcher.is_error():
        if _UNKNOWN_TOKEN in matcher.get_error():
            raise GrammarFault(
                f"The grammar names a token beyond the model's: ids run from 0 to {tokenizer.vocab_size - 1}."
            )
        raise GrammarFault(f"The grammar cannot be compiled: {' '.join(matcher.get_error().split())}. Change it.")
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
