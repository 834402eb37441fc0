"""Grammars in the form that llguidance compiles, and how much they may cost.

The limits hold wherever a grammar is compiled, so that what was taken at the gateway is taken by the engine, too. They
are llguidance's own: they bound the work of a compilation to some ten milliseconds and that of a mask to about as much,
and say nothing of the grammar's text in errors.
"""

from llguidance import LLMatcher, LLParserLimits

from maitred.core.grammar import Grammar

LIMITS = LLParserLimits(verbose_errors=False)
STACK_BYTES = 4 << 20
"""Of the thread in which a grammar is tried. llguidance goes down a grammar's rules by calling itself, and a stack that
overflows ends the process; threads that compile what has been tried have `COMPILING_STACK_BYTES`."""
COMPILING_STACK_BYTES = 4 * STACK_BYTES


def grammar_source(grammar: Grammar) -> str:
    """The grammar as llguidance takes it."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def error_in(grammar: Grammar) -> str | None:
    """What llguidance has against a grammar, in its own words; None: nothing."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar_source(grammar), limits=LIMITS)
    return messages[0] if failed else None
