"""Conversion of grammars to llguidance's form, and limits on what a grammar may cost.

The same limits hold wherever a grammar is compiled, so an engine accepts every grammar that the gateway has accepted.
The limits object also keeps the text of the grammar out of error messages. Compiling is not all that a grammar costs:
`a{1000}{1000}` compiles at once, and its first step takes seconds. So the gateway also tries a grammar, with bytes for
tokens, before it admits a request: its start, and a few answers by chance.
"""

import json
import random
import re
import time
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from maitred.core.grammar import Grammar

LIMITS = LLParserLimits(verbose_errors=False, step_lexer_fuel=50_000, max_lexer_states=100_000)
"""Limits of a compilation and of a step.

The fuel of a step suffices for twice what formats and patterns take. A state takes some 300 bytes, and an answer
reaches one with each character of a string of limited length.
"""
MAX_FORCED_BYTES = 16_384
"""Longest text that a grammar may force at once: the engine reads it within one step."""
STACK_BYTES = 4 << 20
"""Stack size of the thread that validates a grammar.

llguidance traverses the rules of a grammar recursively, and a stack overflow kills the process. Threads that compile a
validated grammar have `COMPILING_STACK_BYTES`.
"""
COMPILING_STACK_BYTES = 4 * STACK_BYTES
_TOKENS = re.compile(r"<\[([\^\d,\s-]*)\]>")
"""Tokens in a grammar, by their ids or by ranges of ids."""
_TOKEN_ID = re.compile(r"\d{1,7}")
_MAX_TOKENS = 1 << 20
_KNOWN_VOCABULARIES = 8
_TRIAL_ANSWERS = 3
_TRIAL_STEPS = 48
_MAX_STEP_S = 0.05
"""Longest processor time of a step of a trial; most take less than a thousandth of that."""


def grammar_source(grammar: Grammar) -> str:
    """Converts a grammar to the form that llguidance takes."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def error_in(grammar: Grammar) -> str | None:
    """Validates a grammar; returns the error message of llguidance, or None if the grammar is valid."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar_source(grammar), limits=LIMITS)
    return messages[0] if failed else None


def error_in_trial(grammar: Grammar) -> str | None:
    """Follows a valid grammar for some steps; returns why an engine could not do so, or None."""
    size = 1024
    token_ids = [int(token) for ids in _TOKENS.findall(grammar.text) for token in _TOKEN_ID.findall(ids)]
    while any(token >= size - 1 for token in token_ids) and size < _MAX_TOKENS:
        size *= 2
    start = LLMatcher(_trial_vocabulary(size), grammar_source(grammar), log_level=0, limits=LIMITS)
    for seed in range(_TRIAL_ANSWERS):
        matcher, chance = start.deep_copy(), random.Random(seed)
        for _ in range(_TRIAL_STEPS):
            began_s = time.thread_time()
            mask = b"" if matcher.is_stopped() else matcher.compute_bitmask()
            if matcher.is_error():
                return matcher.get_error()
            forced = matcher.compute_ff_bytes()
            if len(forced) > MAX_FORCED_BYTES:
                return f"it demands a text of more than {MAX_FORCED_BYTES:,} bytes at once"
            if time.thread_time() - began_s > _MAX_STEP_S:
                return "it takes too long to follow"
            allowed = [byte for byte in range(256) if mask and mask[byte >> 3] >> (byte & 7) & 1]
            if not allowed or not matcher.try_consume_tokens([*forced] or [chance.choice(allowed)]):
                break
    return None


def matches_pattern(pattern: str, text: str) -> bool:
    """Returns whether a text matches the `pattern` of a schema, as a grammar takes it; a faulty one matches none."""
    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    matcher = LLMatcher(_trial_vocabulary(1024), grammar, log_level=0, limits=LIMITS)
    tokens = [*json.dumps(text, ensure_ascii=False).encode()]
    return not matcher.is_error() and matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


class _TrialVocabulary:
    """Vocabulary of single bytes, and of enough further tokens for those that a grammar names by their ids."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, size: int) -> None:
        self.eos_token_id = size - 1
        self.special_token_ids = [self.eos_token_id]
        self.tokens = [*(bytes([byte]) for byte in range(256)), *([b""] * (size - 256))]

    def __call__(self, text: str) -> list[int]:
        return [*text.encode()]


@lru_cache(_KNOWN_VOCABULARIES)
def _trial_vocabulary(size: int) -> LLTokenizer:
    vocabulary: Any = _TrialVocabulary(size)
    return LLTokenizer(vocabulary)


class GrammarFault(ValueError):
    """Error for a constraint that is faulty or cannot be enforced; the message says what to do."""
