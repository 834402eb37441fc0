"""Constraints on an answer: the form from the caller, the form for the engine, and the result of a compilation.

The gateway and the process that compiles exchange these forms. The gateway reads them without an import of the
compiler.
"""

from typing import Any, Literal

import msgspec


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """Grammar that the answer must match.

    Attributes:
        kind: Notation of `text`: a JSON Schema (as JSON), a regular expression, or a context-free grammar in
            llguidance's dialect of Lark.
        text: The grammar itself.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """Unchecked constraint on an answer, as the caller sent it.

    Attributes:
        form: Kind of `content`: nothing (any JSON object is valid), a schema, a regular expression, a list of strings
            from which the answer is one, a context-free grammar (Lark, or EBNF in the syntax of llama.cpp), or a
            grammar that maitred generated (``lark``).
        content: See `form`.
        param: Request field that contains the constraint.
        strict: Whether the whole constraint must hold; otherwise the parts of a schema that cannot be enforced are
            ignored.
        whitespace: Regular expression of the allowed whitespace between JSON tokens; None: no whitespace.
    """

    form: Literal["json_object", "json_schema", "regex", "choice", "grammar", "lark"]
    content: Any
    param: str
    strict: bool = True
    whitespace: str | None = None


class GrammarResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of a compilation: a grammar, or what is wrong with the constraint."""

    grammar: Grammar | None = None
    fault: str = ""
    relaxed: tuple[str, ...] = ()
    """Keywords of the schema that the grammar does not enforce, with their places."""


GRAMMAR_LENGTH_BYTES = 4
"""Size in bytes of the length before each constraint to the compiling process, and before each of its results."""
