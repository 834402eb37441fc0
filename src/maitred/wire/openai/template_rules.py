"""What a caller may tell a model's chat template: names and values of its own, few and small."""

from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.faults import shown

MOST_ARGUMENTS = 32
MOST_NAME_CHARACTERS = 64
MOST_BYTES = 16 * 1024
"""All of them as JSON: a template may write them into the prompt, and is run before the prompt is counted."""
_OURS = frozenset({"messages", "tools", "add_generation_prompt"})
_FIELD = "chat_template_kwargs"


def check_template_arguments(arguments: Mapping[str, Any] | None, enable_thinking: bool | None = None) -> None:
    """Raises InvalidRequest for the first rule that they break."""
    if not arguments:
        return
    if len(arguments) > MOST_ARGUMENTS:
        raise InvalidRequest(
            f"{_FIELD} must have at most {MOST_ARGUMENTS} entries; got {len(arguments)}.", param=_FIELD
        )
    for name in arguments:
        if len(name) > MOST_NAME_CHARACTERS or not name.isidentifier():
            raise InvalidRequest(
                f"The names in {_FIELD} must be names of variables, of at most {MOST_NAME_CHARACTERS} characters; got "
                f"{shown(name)}.",
                param=_FIELD,
            )
        if name in _OURS:
            raise InvalidRequest(
                f"{_FIELD}.{name} is set by the request itself. Remove it, and send {name} as a field.", param=_FIELD
            )
    if (size := len(msgspec.json.encode(arguments))) > MOST_BYTES:
        raise InvalidRequest(f"{_FIELD} must have at most {MOST_BYTES:,} bytes; got {size:,}.", param=_FIELD)
    told = arguments.get("enable_thinking", enable_thinking)
    if enable_thinking is not None and told is not enable_thinking:
        raise InvalidRequest(
            f"enable_thinking and {_FIELD}.enable_thinking differ. Send only one.", param="enable_thinking"
        )
