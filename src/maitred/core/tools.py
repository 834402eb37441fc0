"""Tools that a caller offers to a model, independent of any API format."""

from typing import Any

import msgspec


class Tool(msgspec.Struct, frozen=True):
    """Function that a model may call.

    Attributes:
        name: Name of the function, as the model writes it.
        param: Request field that declares its parameters, for error messages.
        declared: The whole declaration in OpenAI's format, which chat templates expect.
        parameters: JSON Schema of its arguments object; None: not declared.
        strict: Whether every keyword of the schema is enforced. Otherwise the model alone decides about keywords that
            no grammar can express.
    """

    name: str
    param: str
    declared: dict[str, Any]
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolRules(msgspec.Struct, frozen=True):
    """Rules for tools: the allowed and the required calls.

    Attributes:
        tools: All tools that the caller has declared; each name once.
        may: Whether the model may call a tool.
        must: Whether the answer must be a tool call.
        only: The one function that the model must call; None: any declared tool.
        parallel: Whether one answer may contain several calls.
    """

    tools: tuple[Tool, ...]
    may: bool = True
    must: bool = False
    only: str | None = None
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Returns the tools that an answer may call."""
        if not self.may:
            return ()
        return self.tools if self.only is None else tuple(tool for tool in self.tools if tool.name == self.only)

    @property
    def declared(self) -> list[dict[str, Any]]:
        """Returns the declarations for the prompt, without the tools that the model must not call."""
        return [tool.declared for tool in self.tools] if self.may else []
