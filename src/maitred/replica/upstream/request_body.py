"""Encoder of request bodies of OpenAI's API, in the dialect of the server."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from maitred.core.errors import Unsupported
from maitred.core.text_replica import TextRequest
from maitred.replica.upstream.dialects import UpstreamDialect
from maitred.wire.openai.requests import failed_result
from maitred.wire.openai.responses import THOUGHT_FIELDS

_OVERRIDDEN_FIELDS = frozenset(
    {"model", "stream", "stream_options", "priority", "service_tier", "max_tokens", "max_completion_tokens"}
)
"""Fields that are not copied from the caller's request, because the gateway sets or removes them."""
_DROPPABLE_FIELDS = frozenset(
    {
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "store", "verbosity", "reasoning_effort"),
        *("prediction", "parallel_tool_calls", "best_of", "include_reasoning", "thinking"),
    }
)
"""Fields that are dropped if the server does not support them, because the response stays valid. `best_of` is one of
them: a valid one equals `n`."""
_ADAPTED_MEMBERS = frozenset({"is_error", *THOUGHT_FIELDS})
"""Members of a message that not every server reads."""
_CALL_MEMBERS = frozenset({"tool_calls", "tool_call_id"})
_DEFAULT_VALUES: Mapping[str, Any] = {"n": 1, "logprobs": False}
"""Values without an effect, by field; a field with this value is dropped if it is not supported."""


def encode_body(request: TextRequest, dialect: UpstreamDialect, model: str, parameters: Mapping[str, Any]) -> bytes:
    """Encodes the body of a request.

    It always requests a stream, so that a server that dies or stalls is detected early.

    Args:
        request: The request.
        dialect: Dialect of the server.
        model: Name of the model at the server.
        parameters: Default fields of the body; fields of the request override them.

    Raises:
        Unsupported: The request has a field that the server does not support. The server would ignore it silently.
    """
    body: dict[str, Any] = {**parameters}
    for field, value in request.fields.items():
        if field in _OVERRIDDEN_FIELDS:
            continue
        if field in dialect.allowed_fields:
            body[field] = value
        elif field not in _DROPPABLE_FIELDS and value != _DEFAULT_VALUES.get(field, _OVERRIDDEN_FIELDS):
            raise Unsupported(f"{field} is not known to the server that runs this model. Remove it.", param=field)
    if request.chat:
        body["messages"] = _adapt_messages(body["messages"], dialect)
    if request.given:
        body |= _continuation_fields(request.given, body, dialect, chat=request.chat)
    if request.scored and "logprobs" in dialect.allowed_fields and not body.get("logprobs"):
        # In /v1/completions, `logprobs` is the number of top tokens at each position. Some servers reject 0.
        body["logprobs"] = True if request.chat else 1
    if request.max_tokens is not None:
        body[dialect.max_tokens_field if request.chat else "max_tokens"] = request.max_tokens
    body |= {"model": model, "stream": True, "stream_options": dialect.stream_options}
    return msgspec.json.encode(body)


def _adapt_messages(messages: Sequence[dict[str, Any]], dialect: UpstreamDialect) -> list[dict[str, Any]]:
    """Returns the messages with the members that the server reads.

    A result that is an error becomes text, a thought that the server does not read is left out, and an id that it would
    refuse is shortened.
    """
    adapted = _ADAPTED_MEMBERS if dialect.max_call_id_characters is None else _ADAPTED_MEMBERS | _CALL_MEMBERS
    return [message if adapted.isdisjoint(message) else _adapt_message({**message}, dialect) for message in messages]


def _adapt_message(message: dict[str, Any], dialect: UpstreamDialect) -> dict[str, Any]:
    if message.pop("is_error", False):
        message["content"] = _failed_content(message.get("content"))
    for field in THOUGHT_FIELDS:
        if field not in dialect.thought_fields:
            message.pop(field, None)
    if blocks := message.get("thinking_blocks"):
        message["thinking_blocks"] = [
            {name: block[name] for name in block if name not in ("index", "position")} for block in blocks
        ]
    if (most := dialect.max_call_id_characters) is not None:
        if "tool_call_id" in message:
            message["tool_call_id"] = _shorten_id(message["tool_call_id"], most)
        if "tool_calls" in message:
            message["tool_calls"] = [{**call, "id": _shorten_id(call["id"], most)} for call in message["tool_calls"]]
    return message


def _shorten_id(call_id: str, most: int) -> str:
    """Returns an id of at most so many characters, the same for the same id, because a result names its call by it."""
    if len(call_id) <= most:
        return call_id
    return "call_" + hashlib.sha256(call_id.encode()).hexdigest()[: most - 5]


def _failed_content(content: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]]:
    """Returns the content of a failed tool call's result, which says that it failed."""
    if not isinstance(content, list):
        return failed_result(content or "")
    match content:
        case [{"type": "text", "text": str() as text} as first, *rest]:
            return [{**first, "text": failed_result(text)}, *rest]
    return [{"type": "text", "text": failed_result("")}, *content]


def _continuation_fields(
    given_text: str, body: Mapping[str, Any], dialect: UpstreamDialect, *, chat: bool
) -> dict[str, Any]:
    """Returns the fields that make the server continue the given text."""
    if dialect.continuation_fields is None:
        raise Unsupported("The server that runs this model cannot go on with an answer that another one has begun.")
    if not chat:
        return {"prompt": body["prompt"] + given_text}
    return {
        "messages": [*body["messages"], {"role": "assistant", "content": given_text}],
        **dialect.continuation_fields,
    }
