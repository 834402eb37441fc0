"""Conversion of a caller's constraint to a grammar that compiles.

Regular expressions have the syntax of Rust's `regex`, without lookarounds and boundaries, and match the whole answer.
Context-free grammars are written in Lark, in llguidance's dialect, or EBNF as llama.cpp writes it (GBNF), which
llguidance turns
into Lark.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from maitred.core.grammar import Constraint, Grammar
from maitred.text.grammar.bounds import holds_exactly, is_number
from maitred.text.grammar.language import (
    LIMITS,
    MAX_FORCED_BYTES,
    GrammarFault,
    error_in,
    error_in_trial,
    grammar_source,
)
from maitred.text.grammar.schema import describe_location, enforceable, loose_keywords, without_keywords
from maitred.text.grammar.schema_converter import convert_schema
from maitred.text.grammar.static_cost import is_costly, longest_forced_run, longest_forced_run_of_lark

_UNENFORCED = re.compile(r'Unimplemented keys: \["(?P<keyword>[^"]+)"')
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (?P<format>.*)")
_UNHEARD = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_KEYWORD = re.compile(r'"([^"]+)"')
_TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength")
_MEMBER_COUNTS = ("minProperties", "maxProperties")
_COUNTED = "min/maxProperties only supported"
_OVERLAPPING = "are not disjoint"
_WEIGHTED_ONE_OF = "oneOf constraints are not supported"
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_LARK_RULE = re.compile(r"^[ \t]*[?!]{0,2}([a-zA-Z_]\w*)(?:\.-?\d+)?(?=\s*:)", re.MULTILINE)
_UNKNOWN_STATEMENT = re.compile(r"^[ \t]*(%(?:declare|override|extend)\b)", re.MULTILINE)
_TEMPLATE = re.compile(r"^[ \t]*[?!]{0,2}([a-z_]\w*[ \t]*\{[^}]*\})(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
_NAMED_TOKEN = re.compile(r"(?<![^\s:|(*+?)])<(?!\[)[^<>\s]+>")
_NO_END = "NoExtensionBias"
_PANIC = "panic"
_MOST_CHARACTERS = 300


def parse_grammar(constraint: Constraint, relaxed: list[str] | None = None) -> Grammar:
    """Converts a caller's constraint to a grammar.

    Args:
        constraint: The constraint.
        relaxed: Is extended by the keywords of a schema that is not strict which the grammar does not enforce.

    Raises:
        GrammarFault: The constraint is faulty, cannot be enforced, or takes too much to be followed.
    """
    relaxed = [] if relaxed is None else relaxed
    try:
        if constraint.form == "json_schema" and not constraint.strict:
            grammar = _lenient_grammar(constraint, relaxed)
        else:
            grammar = _GRAMMARS[constraint.form](constraint)
    except RecursionError:
        raise GrammarFault("It is nested too deeply. Send a flatter one.") from None
    if (error := error_in_trial(grammar)) is not None:
        raise GrammarFault(_trial_fault(grammar, error))
    return grammar


def _json_object(constraint: Constraint) -> Grammar:
    return _check("json_schema", enforceable({"type": "object"}, strict=True, whitespace=constraint.whitespace))


def _json_schema(constraint: Constraint) -> Grammar:
    return _whole_grammar(constraint.content, constraint.whitespace)


def _whole_grammar(schema: object, whitespace: str | None) -> Grammar:
    """Returns a grammar that enforces all of a schema, some of it in other words where that is necessary."""
    try:
        return _strict_grammar(schema, whitespace)
    except GrammarFault as fault:
        try:
            return _strict_grammar(_convert(schema), whitespace, original=schema)
        except UnenforceableKeywordError as rest:
            raise rest from fault
        except GrammarFault:
            # What is told in other words is narrower, and may leave nothing.
            raise fault from None


def _convert(schema: object) -> object:
    """Returns a schema with keywords that grammars know; the same one where it is none."""
    if isinstance(schema, dict):
        # A keyword whose value is of a wrong type fails anywhere in here; llguidance says so better.
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            return convert_schema(schema)
    return schema


def _lenient_grammar(constraint: Constraint, relaxed: list[str]) -> Grammar:
    """Returns a grammar that enforces a schema but for the keywords that no grammar can express."""
    schema, whitespace = constraint.content, constraint.whitespace
    with suppress(GrammarFault):
        return _whole_grammar(schema, whitespace)
    schema = without_keywords(schema, _is_unusable, relaxed)
    if isinstance(schema, dict) and any(keyword == "multipleOf" for keyword, _ in loose_keywords(schema)):
        # Each is fine by itself, but together they take too much.
        schema = without_keywords(schema, lambda keyword, _: keyword == "multipleOf", relaxed)
    with suppress(GrammarFault):
        return _whole_grammar(schema, whitespace)
    converted, failed, messages = _lenient_schema(schema, whitespace)
    if failed and _OVERLAPPING in messages[0]:
        schema = without_keywords(schema, lambda keyword, _: keyword == "patternProperties", relaxed)
        converted, failed, messages = _lenient_schema(schema, whitespace)
    if failed:
        # Patterns and formats that are fine by themselves may be too much together.
        schema = without_keywords(schema, lambda keyword, _: keyword in _TEXT_KEYWORDS, relaxed)
        converted, failed, messages = _lenient_schema(schema, whitespace)
    if failed:
        raise GrammarFault(_schema_fault(schema, messages[0]))
    keywords = _KEYWORD.findall(" ".join(_UNHEARD.findall(" ".join(messages))))
    if any(_COUNTED in message for message in messages):
        keywords += [keyword for keyword in _MEMBER_COUNTS if describe_location(schema, keyword) is not None]
    if describe_location(converted, "oneOf") is not None:
        keywords.append("oneOf")  # it is taken for `anyOf`, without a warning
    relaxed += [f"{keyword}{_at(describe_location(schema, keyword))}" for keyword in dict.fromkeys(keywords)]
    if isinstance(converted, dict):
        relaxed += [f"{keyword}{_at(describe_location(schema, keyword))}" for keyword, _ in loose_keywords(converted)]
    return Grammar("json_schema", enforceable(converted, strict=False, whitespace=whitespace))


def _lenient_schema(schema: object, whitespace: str | None) -> tuple[object, bool, list[str]]:
    """Returns a schema in other words, or as it is where they leave nothing, and whether it is faulty, and why."""
    converted = _convert(schema)
    failed, messages = _validate_lenient(converted, whitespace)
    if failed:
        converted = schema
        failed, messages = _validate_lenient(schema, whitespace)
    return converted, failed, messages


def _validate_lenient(schema: object, whitespace: str | None) -> tuple[bool, list[str]]:
    """Validates a schema without the keywords that llguidance does not know; returns whether it failed, and why."""
    source = grammar_source(Grammar("json_schema", enforceable(schema, strict=False, whitespace=whitespace)))
    return LLMatcher.validate_grammar_with_warnings(source, limits=LIMITS)


class UnenforceableKeywordError(GrammarFault):
    """Error for a keyword that no grammar can enforce."""


def _is_unusable(keyword: str, value: object) -> bool:
    """Returns whether a keyword cannot be enforced by itself, whatever stands beside it."""
    if not holds_exactly(keyword, value) or is_costly(keyword, value):
        return True
    if keyword in _TEXT_KEYWORDS[:2] and isinstance(value, str):
        kind = "string"
    elif keyword == "multipleOf" and is_number(value):
        kind = "number"
    else:
        return False
    grammar = Grammar("json_schema", enforceable({"type": kind, keyword: value}, strict=True))
    return error_in(grammar) is not None


def _strict_grammar(schema: object, whitespace: str | None, original: object = None) -> Grammar:
    """Returns a grammar that enforces all of a schema; faults are told with their places in the original one."""
    grammar = Grammar("json_schema", enforceable(schema, strict=True, whitespace=whitespace))
    if (error := error_in(grammar)) is not None:
        unenforced = _UNENFORCED.search(error) or _WEIGHTED_ONE_OF in error
        kind = UnenforceableKeywordError if unenforced else GrammarFault
        raise kind(_schema_fault(schema if original is None else original, error))
    return grammar


def _regex(constraint: Constraint) -> Grammar:
    pattern: str = constraint.content.removeprefix("^")
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2:
        pattern = pattern[:-1]
    return _check("regex", pattern, longest_forced_run(pattern))


def _choice(constraint: Constraint) -> Grammar:
    return _check("lark", "start: " + " | ".join(json.dumps(word, ensure_ascii=False) for word in constraint.content))


def _grammar(constraint: Constraint) -> Grammar:
    content: str = constraint.content
    if not _GBNF_RULE.search(content) and _LARK_RULE.search(content):
        text = _lark(content)
    else:
        try:
            text = any_to_lark(content)
        except RecursionError:
            raise
        except Exception as error:  # The converter can raise any exception, and the cause is always the grammar.
            raise GrammarFault(f"{_short(str(error))} Mend the grammar.") from error
    return _check("lark", text, longest_forced_run_of_lark(text))


def _lark(text: str) -> str:
    """Returns a grammar without what changes only the trees that Lark would build: `?`, `!` and priorities of rules.

    Raises:
        GrammarFault: The grammar has a statement or a template that llguidance does not know.
    """
    if found := _UNKNOWN_STATEMENT.search(text):
        raise GrammarFault(f"The statement `{found[1]}` of Lark cannot be used. Write the rules out.")
    if found := _TEMPLATE.search(text):
        raise GrammarFault(f"The template `{found[1][:64]}` cannot be used. Write out the rules that it stands for.")
    return _LARK_RULE.sub(r"\1", text)


_GRAMMARS: Mapping[str, Callable[[Constraint], Grammar]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "lark": lambda constraint: _check("lark", constraint.content),
}


def _check(kind: Any, text: str, forced: int = 0) -> Grammar:  # noqa: ANN401 - one of the three kinds
    if forced > MAX_FORCED_BYTES:
        raise GrammarFault(f"It demands a text of more than {MAX_FORCED_BYTES:,} bytes at once. Send a simpler one.")
    grammar = Grammar(kind, text)
    if (error := error_in(grammar)) is not None:
        raise GrammarFault(f"{_short(error)} Mend it.")
    return grammar


def _trial_fault(grammar: Grammar, error: str) -> str:
    """Returns why a valid grammar cannot be followed, and what to send instead."""
    if _NO_END in error:
        return (
            "It accepts no text of finite length: a rule or a `$ref` leads back to itself on every way. Give it an "
            "alternative that ends."
        )
    if grammar.kind == "lark" and (found := _NAMED_TOKEN.search(grammar.text)):
        return f"The token {found[0][:64]} cannot be named by its text. Name it by its id, such as `<[2]>`."
    if error.startswith(_PANIC):
        return "It cannot be followed. Send a simpler one."
    return f"{_short(error)} Send a simpler one."


def _schema_fault(schema: object, error: str) -> str:
    if match := _UNENFORCED.search(error):
        keyword = match["keyword"]
        return (
            f"The keyword `{keyword}`{_at(describe_location(schema, keyword))} cannot be enforced. Remove it, or say "
            "the same in another way."
        )
    if match := _UNKNOWN_FORMAT.search(error):
        return f"The format `{match['format'][:64]}` cannot be enforced. Remove it, or use `pattern`."
    if _WEIGHTED_ONE_OF in error:
        return (
            f"The keyword `oneOf`{_at(describe_location(schema, 'oneOf'))} cannot be enforced where several of "
            "its schemas may hold. Use `anyOf`, or make them exclude each other by a `const`."
        )
    return f"{_short(error)} Change the schema."


def _at(place: str | None) -> str:
    return f" at {place[:128]}" if place else ""


def _short(message: str) -> str:
    """Returns the library's message as one sentence of limited length."""
    text = " ".join(message.split())
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."
