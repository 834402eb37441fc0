"""The functions that a caller lets a model ask for, free of any API's shape."""

from typing import Any

import msgspec


class Tool(msgspec.Struct, frozen=True):
    """Function that a model may call.

    Attributes:
        name: As the model writes it.
        param: The field that declares its parameters, for messages about them.
        declared: The whole declaration in the words of OpenAI's API, which is how chat templates know it.
        parameters: JSON Schema of its arguments, which are an object; None: nothing is said of them.
        strict: Whether every word of the schema binds. Otherwise words that no grammar can express are left to the
            model.
    """

    name: str
    param: str
    declared: dict[str, Any]
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolRules(msgspec.Struct, frozen=True):
    """Rules for tools: what a model may call, and what it must.

    Attributes:
        tools: All that the caller has declared; each name once.
        may: Whether it may call at all.
        must: Whether its answer has to be a call.
        only: The one function that it has to call; None: it is free to choose.
        parallel: Whether it may call several times in one answer.
    """

    tools: tuple[Tool, ...]
    may: bool = True
    must: bool = False
    only: str | None = None
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The functions that an answer may call."""
        if not self.may:
            return ()
        return self.tools if self.only is None else tuple(tool for tool in self.tools if tool.name == self.only)

    @property
    def declared(self) -> list[dict[str, Any]]:
        """Tools that the model reads of; those that it must not call are left out."""
        return [tool.declared for tool in self.tools] if self.may else []
