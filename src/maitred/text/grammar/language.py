"""Conversion of grammars to llguidance's form, and limits on what a grammar may cost.

The same limits hold wherever a grammar is compiled, so an engine accepts every grammar that the gateway has accepted.
The values are the default limits of llguidance: they bound the time of a compilation to about ten milliseconds, and the
time of a mask to about the same. The limits object also keeps the text of the grammar out of error messages.
"""

from llguidance import LLMatcher, LLParserLimits

from maitred.core.grammar import Grammar

LIMITS = LLParserLimits(verbose_errors=False)
STACK_BYTES = 4 << 20
"""Stack size of the thread that validates a grammar.

llguidance traverses the rules of a grammar recursively, and a stack overflow kills the process. Threads that compile a
validated grammar have `COMPILING_STACK_BYTES`.
"""
COMPILING_STACK_BYTES = 4 * STACK_BYTES


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


class GrammarFault(ValueError):
    """Error for a constraint that is faulty or cannot be enforced; the message says what to do."""
