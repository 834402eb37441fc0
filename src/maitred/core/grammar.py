"""Constraints on an answer, as a caller sends them and as the engine takes them."""

from typing import Any, Literal

import msgspec


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A formal language; an answer is one of its words.

    Attributes:
        kind: In which notation `text` is: a JSON Schema (as JSON), a regular expression, or a context-free grammar in
            llguidance's dialect of Lark.
        text: The grammar itself.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """Constraint on an answer as it was sent, not yet checked.

    Attributes:
        form: What `content` is: nothing (any JSON object will do), a schema, a regular expression, a list of strings of
            which the answer is to be one, a context-free grammar (Lark, or EBNF as llama.cpp writes it), or one that
            was put together here (``lark``).
        content: See `form`.
        param: The field of the request that says it.
        strict: Whether all of it has to hold; otherwise what cannot be enforced of a schema is left out.
        whitespace: A regular expression for what may stand between the tokens of JSON; None: nothing.
    """

    form: Literal["json_object", "json_schema", "regex", "choice", "grammar", "lark"]
    content: Any
    param: str
    strict: bool = True
    whitespace: str | None = None
