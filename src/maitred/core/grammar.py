"""What an answer has to look like, as the engine is told it."""

from typing import Literal

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
