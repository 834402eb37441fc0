"""Rules for the arguments that a client passes to a model's chat template: few and small names and values."""

from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.faults import format_value

MAX_ARGUMENTS = 32
MAX_NAME_CHARACTERS = 64
MAX_BYTES = 16 * 1024
"""Most bytes of all arguments as JSON.

A template may write them into the prompt, and runs before the prompt is counted.
"""
_RESERVED_NAMES = frozenset({"messages", "tools", "add_generation_prompt"})
_FIELD = "chat_template_kwargs"


def check_template_arguments(arguments: Mapping[str, Any] | None, enable_thinking: bool | None = None) -> None:
    """Raises InvalidRequest for the first rule that the arguments break."""
    if not arguments:
        return
    if len(arguments) > MAX_ARGUMENTS:
        raise InvalidRequest(f"{_FIELD} must have at most {MAX_ARGUMENTS} entries; got {len(arguments)}.", param=_FIELD)
    for name in arguments:
        if len(name) > MAX_NAME_CHARACTERS or not name.isidentifier():
            raise InvalidRequest(
                f"The names in {_FIELD} must be names of variables, of at most {MAX_NAME_CHARACTERS} characters; got "
                f"{format_value(name)}.",
                param=_FIELD,
            )
        if name in _RESERVED_NAMES:
            raise InvalidRequest(
                f"{_FIELD}.{name} is set by the request itself. Remove it, and send {name} as a field.", param=_FIELD
            )
    if (size := len(msgspec.json.encode(arguments))) > MAX_BYTES:
        raise InvalidRequest(f"{_FIELD} must have at most {MAX_BYTES:,} bytes; got {size:,}.", param=_FIELD)
    effective = arguments.get("enable_thinking", enable_thinking)
    if enable_thinking is not None and effective is not enable_thinking:
        raise InvalidRequest(
            f"enable_thinking and {_FIELD}.enable_thinking differ. Send only one.", param="enable_thinking"
        )
