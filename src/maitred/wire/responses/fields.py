"""Request fields of OpenAI's Responses API, and what becomes of those that this server does not honour.

The rules are those of `maitred.wire.openai.fields`: a field that changes the answer is refused by its name, a hint is
left out and named in the response.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maitred.core.errors import InvalidRequest, Unsupported
from maitred.wire.openai.faults import format_value
from maitred.wire.openai.fields import (
    FIELDS,
    HINT,
    RequestField,
    UnsupportedFields,
    members_beyond,
    refuse,
    split_unsupported,
)
from maitred.wire.responses.requests import (
    SERVER_CALLS,
    CompactRequest,
    ContextManagement,
    InputTokensRequest,
    ResponsesRequest,
)

HONOURED_FIELDS = frozenset(ResponsesRequest.__struct_fields__)
_COMPACT_FIELDS = frozenset(CompactRequest.__struct_fields__)
RESPONSES_FIELDS: Mapping[str, RequestField] = {
    "prompt": RequestField(alternative="Send the text of the template as instructions and input."),
    "moderation": RequestField(alternative="Check the answer by a request of your own."),
    "prompt_cache_retention": HINT,
    "prompt_cache_options": HINT,
    "client_metadata": HINT,
    "access_programs": HINT,
    "personality": HINT,
    "image": RequestField(alternative="This server generates text only."),
}
"""Fields that this server does not honour."""
_ALL_FIELDS: Mapping[str, RequestField] = {
    **FIELDS,
    "messages": RequestField(alternative="Send input."),
    "max_tokens": RequestField(alternative="Send max_output_tokens."),
    "max_completion_tokens": RequestField(alternative="Send max_output_tokens."),
    "response_format": RequestField(alternative="Send text.format."),
    "reasoning_effort": RequestField(alternative="Send reasoning.effort."),
    "verbosity": RequestField(alternative="Send text.verbosity."),
    "logprobs": RequestField(
        neutral_values=(False,), alternative="Send include with message.output_text.logprobs, and top_logprobs."
    ),
    "functions": RequestField(neutral_values=([],), alternative="Send tools."),
    "function_call": RequestField(neutral_values=("none", "auto"), alternative="Send tool_choice."),
    "system": RequestField(alternative="Send instructions."),
    **RESPONSES_FIELDS,
}
"""Fields of Responses, and those of other APIs: a client that sends one of these here wants it to be heeded."""
INCLUDES = (
    *("reasoning.encrypted_content", "message.output_text.logprobs", "message.input_image.image_url"),
    *("web_search_call.action.sources", "web_search_call.results", "file_search_call.results"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url"),
)
"""Additional parts of items that OpenAI names."""
_INCLUDES_HERE = frozenset(INCLUDES[:3])
"""Parts of items that this server has. The others are of items of tools that run at a provider."""
_TEXT_MEMBERS = frozenset({"format", "verbosity"})
_REASONING_MEMBERS = frozenset({"effort"})
_COMPACTION_MEMBERS = frozenset(ContextManagement.__struct_fields__)
_TOOL_MEMBERS: Mapping[str, frozenset[str]] = {
    "function": frozenset({"type", "name", "description", "parameters", "strict"}),
    "custom": frozenset({"type", "name", "description", "format"}),
}
"""Members of a tool that are read, by its type; tools of other types run at a provider."""


def unsupported_fields(sent: Mapping[str, Any], kind: type[InputTokensRequest]) -> UnsupportedFields:
    """Returns the fields and members of a request that this server does not honour.

    Args:
        sent: The request as it was written, of the right types.
        kind: Its struct.
    """
    honoured = _COMPACT_FIELDS if kind is CompactRequest else HONOURED_FIELDS
    fields = split_unsupported(sent, honoured, _ALL_FIELDS)
    ignored = dict.fromkeys(fields.ignored)
    ignored |= members_beyond("text", sent.get("text"), _TEXT_MEMBERS)
    ignored |= members_beyond("reasoning", sent.get("reasoning"), _REASONING_MEMBERS)
    ignored |= members_beyond("stream_options", sent.get("stream_options"), frozenset())
    for position, (tool_type, tool) in _entries_by_type(sent.get("tools")):
        if tool_type in _TOOL_MEMBERS:
            ignored |= members_beyond("tools", tool, _TOOL_MEMBERS[tool_type])
        else:
            ignored[f"tools[{position}] ({tool_type[:64]})"] = None
    for position, (item_type, _) in _entries_by_type(sent.get("input")):
        if item_type in SERVER_CALLS:
            ignored[f"input[{position}] ({item_type})"] = None
    for _, (_, entry) in _entries_by_type(sent.get("context_management")):
        ignored |= members_beyond("context_management", entry, _COMPACTION_MEMBERS)
    ignored |= dict.fromkeys(ignored_includes(sent.get("include") or ()))
    return UnsupportedFields(fields.refused, tuple(ignored))


def check_includes(names: Sequence[str]) -> None:
    """Raises InvalidRequest for the first name in ``include`` that OpenAI does not know."""
    for position, name in enumerate(names):
        if name not in INCLUDES:
            raise InvalidRequest(
                f"include[{position}] must be one of {', '.join(INCLUDES)}; got {format_value(name)}.",
                param=f"include[{position}]",
            )


def ignored_includes(names: Sequence[str]) -> list[str]:
    """Returns the entries of ``include`` that ask for parts of items which this server never has."""
    return [f"include[{position}] ({name[:64]})" for position, name in enumerate(names) if name not in _INCLUDES_HERE]


def _entries_by_type(entries: object) -> Iterator[tuple[int, tuple[str, Mapping[str, Any]]]]:
    """Yields the place, the type and the members of each entry of a list that has a type."""
    for position, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, dict) and isinstance(kind := entry.get("type"), str):
            yield position, (kind, entry)


def refuse_field(field: str) -> Unsupported:
    """Makes the error for a field that this server does not honour in a request for a response."""
    return refuse(field, "is not supported by this server", _ALL_FIELDS)
