"""Request fields of Anthropic's Messages API, and what becomes of those that this server does not honour.

The rules are those of `maitred.wire.openai.fields`: a field that changes the answer is refused by its name, a hint is
left out and named in the response. The models of this gateway get the equivalent chat completion, so what becomes of
fields such as `top_k` at an upstream is decided there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from maitred.core.errors import Unsupported
from maitred.wire.anthropic.requests import KNOWN_BLOCKS
from maitred.wire.openai.fields import (
    FIELDS,
    HINT,
    RequestField,
    UnsupportedFields,
    members_beyond,
    refuse,
    split_unsupported,
)

HONOURED_FIELDS = frozenset(
    {
        *("model", "messages", "system", "max_tokens", "metadata", "stop_sequences", "stream", "temperature"),
        *("thinking", "tool_choice", "tools", "top_k", "top_p", "output_config", "context_management", "cache"),
    }
)
MESSAGES_FIELDS: Mapping[str, RequestField] = {
    "container": RequestField(alternative="Run code by a tool of your own."),
    "mcp_servers": RequestField(neutral_values=([],), alternative="Call the servers by tools of your own."),
    "compaction": RequestField(alternative="Ask for a summary in a message."),
    "thread": RequestField(alternative="Send the whole conversation in messages."),
    "inference_geo": RequestField(neutral_values=("global",), alternative="Send the header x-maitred-region."),
    "billing_policy": RequestField(alternative="Use a key of the tenant that pays."),
    "cache_control": HINT,
    "service_tier": HINT,
    "speed": HINT,
    "diagnostics": HINT,
    "fallbacks": HINT,
    "fallback_credit_token": HINT,
    "user_profile_id": HINT,
    "workspace_id": HINT,
    "betas": HINT,
    "anthropic_version": HINT,
    "anthropic_beta": HINT,
}
"""Fields that this server does not honour; `maitred.wire.anthropic.decode` has rules for values of some of them."""
OPERATOR_FIELDS = frozenset(
    {
        *("billing_policy", "inference_geo", "speed", "fallbacks", "fallback_credit_token", "user_profile_id"),
        *("workspace_id", "betas", "anthropic_version", "anthropic_beta"),
    }
)
"""Fields that no server gets from a client: the operator decides who pays, for what, and which model answers. The last
three are headers in the body, for other ways to the same API."""
WITHHELD_FIELDS = OPERATOR_FIELDS | {"cache"}
"""Fields that no server gets: those of the operator, and what the gateway itself honours."""
_ALL_FIELDS: Mapping[str, RequestField] = {
    **FIELDS,
    "stop": RequestField(alternative="Send stop_sequences."),
    "response_format": RequestField(alternative="Send output_config.format."),
    "parallel_tool_calls": RequestField(
        neutral_values=(True,), alternative="Send tool_choice.disable_parallel_tool_use."
    ),
    **MESSAGES_FIELDS,
}
"""Fields of Messages, and those of other APIs: a client that sends one of these here wants it to be heeded."""
_BLOCK_MEMBERS = frozenset({"type", "text", "source", "id", "name", "input", "tool_use_id", "content", "is_error"}) | {
    *("thinking", "signature", "data", "extra_content", "citations"),
}
_DOCUMENT_MEMBERS = frozenset({"type", "source", "title"})
_TOOL_MEMBERS = frozenset({"type", "name", "description", "input_schema", "strict"})


def unsupported_fields(sent: Mapping[str, Any]) -> UnsupportedFields:
    """Returns the fields and members of a Messages request that this server does not honour.

    Args:
        sent: The request as it was written.
    """
    fields = split_unsupported(sent, HONOURED_FIELDS, _ALL_FIELDS)
    ignored = dict.fromkeys(fields.ignored)
    ignored |= members_beyond("output_config", sent.get("output_config"), frozenset({"format"}))
    for path, blocks in _block_lists(sent):
        for block in blocks:
            # The foreign blocks and the citations of earlier answers go to servers that speak Messages.
            if not isinstance(block, dict) or block.get("type") in KNOWN_BLOCKS:
                ignored |= members_beyond(path, block, _BLOCK_MEMBERS)
            elif block.get("type") == "document":
                ignored |= members_beyond(path, block, _DOCUMENT_MEMBERS)
    for tool in _list_in(sent, "tools"):
        ignored |= members_beyond("tools", tool, _TOOL_MEMBERS)
    return UnsupportedFields(fields.refused, tuple(ignored))


def refuse_field(field: str) -> Unsupported:
    """Makes the error for a field that this server does not honour in a Messages request."""
    return refuse(field, "is not supported by this server", _ALL_FIELDS)


def _block_lists(sent: Mapping[str, Any]) -> list[tuple[str, Sequence[object]]]:
    lists = [("system", _list_in(sent, "system"))]
    return lists + [("messages.content", _list_in(message, "content")) for message in sent["messages"]]


def _list_in(members: Mapping[str, Any], name: str) -> Sequence[object]:
    value = members.get(name)
    return value if isinstance(value, list) else ()
