"""Encoder of request bodies of OpenAI's API, in the dialect of the server."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from maitred.core.errors import Unsupported
from maitred.core.text_replica import TextRequest
from maitred.replica.upstream.dialects import CONTINUATION_FIELDS, GATEWAY_FIELDS, UpstreamDialect
from maitred.wire.openai.fields import (
    LIMIT_FIELDS,
    MESSAGES_THINKING,
    refuse,
    unsupported_fields,
    unsupported_stream_options,
)
from maitred.wire.openai.requests import failed_result
from maitred.wire.openai.responses import THOUGHT_FIELDS

_OWN_CHAT_FIELDS = GATEWAY_FIELDS | {"include_reasoning", MESSAGES_THINKING}
"""Fields of a conversation that the gateway itself honours..."""
_OWN_COMPLETION_FIELDS = (GATEWAY_FIELDS - {"max_completion_tokens"}) | {"best_of"}
"""...and those of a text completion; a `best_of` that is accepted equals `n`."""
_ADAPTED_MEMBERS = frozenset({"is_error", "content_blocks", *THOUGHT_FIELDS})
"""Members of a message that not every server reads."""
_CALL_MEMBERS = frozenset({"tool_calls", "tool_call_id"})


def split_fields(
    request: TextRequest, allowed: frozenset[str], parameters: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields that the server gets of a request, and the names of those that are left out.

    Args:
        request: The request.
        allowed: Fields that the server supports.
        parameters: Further fields that the server supports, because the configuration sets them.

    Raises:
        Unsupported: The request has a field that the server does not support and that changes the answer. The server
            would ignore it silently.
    """
    fields, own = request.fields, _OWN_CHAT_FIELDS if request.chat else _OWN_COMPLETION_FIELDS
    passed: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in fields.items():
        if name in own:
            continue
        if name in allowed or (name in parameters and name not in LIMIT_FIELDS):
            passed[name] = value
        else:
            others[name] = value
    ignored: list[str] = []
    if others:
        unsupported = unsupported_fields(others, frozenset(), chat=request.chat)
        if unsupported.refused:
            raise refuse(unsupported.refused[0], "is not known to the server that runs this model")
        ignored += unsupported.ignored
    if "stream_options" in fields:
        ignored += unsupported_stream_options(fields)
    return passed, ignored


def encode_body(
    request: TextRequest,
    dialect: UpstreamDialect,
    model: str,
    parameters: Mapping[str, Any],
    further_fields: Sequence[str] = (),
) -> tuple[bytes, list[str]]:
    """Encodes the body of a request, and names the fields that were left out.

    It requests a stream, so that a server that dies or stalls is detected early, unless the server has no stream for
    the request.

    Args:
        request: The request.
        dialect: Dialect of the server.
        model: Name of the model at the server.
        parameters: Default fields of the body; fields of the request override them.
        further_fields: Fields that the server supports beyond those of its dialect.

    Raises:
        Unsupported: The request has a field that the server does not support; see `split_fields`.
    """
    allowed = dialect.allowed_fields.union(further_fields) if further_fields else dialect.allowed_fields
    continues = dialect.continuation_fields is not None and bool(request.fields.get("continue_final_message"))
    if continues:
        request = without_continuation_fields(request)
    passed, ignored = split_fields(request, allowed, parameters)
    body: dict[str, Any] = {**parameters, **passed}
    if request.chat:
        body["messages"] = _adapt_messages(body["messages"], dialect, ignored)
        if "thinking_blocks" in dialect.thought_fields and MESSAGES_THINKING in request.fields:
            body["thinking"] = request.fields[MESSAGES_THINKING]
    if request.given:
        body |= _continuation_fields(request.given, body, dialect, chat=request.chat)
    elif continues:
        body |= dialect.continuation_fields or {}
    if request.scored and "logprobs" in dialect.allowed_fields and not body.get("logprobs"):
        # In /v1/completions, `logprobs` is the number of top tokens at each position. Some servers reject 0.
        body["logprobs"] = True if request.chat else 1
    if request.max_tokens is not None:
        body[dialect.max_tokens_field if request.chat else "max_tokens"] = request.max_tokens
    body |= {"model": model, "stream": True, "stream_options": dialect.stream_options}
    if "prompt_logprobs" in body:
        # vLLM refuses streams with them. The whole answer is read in place of a stream.
        del body["stream"], body["stream_options"]
    return msgspec.json.encode(body), ignored


def without_continuation_fields(request: TextRequest) -> TextRequest:
    """Returns the request without the fields that ask for a continuation of its last message.

    Servers have other fields for it, or none, because they always do it.
    """
    fields = {name: value for name, value in request.fields.items() if name not in CONTINUATION_FIELDS}
    return replace(request, fields=fields)


def unread_thought(messages: Sequence[Mapping[str, Any]], read: Collection[str]) -> str | None:
    """Returns the member with a thought of an earlier answer that a server does not get; None: it gets all there are.

    Args:
        messages: Messages of the conversation.
        read: Members with thoughts that the server reads; one of them has the whole thought of a message.
    """
    for message in messages:
        thoughts = [name for name in THOUGHT_FIELDS if message.get(name)]
        if thoughts and not any(name in read for name in thoughts):
            return thoughts[0]
    return None


def _adapt_messages(
    messages: Sequence[dict[str, Any]], dialect: UpstreamDialect, ignored: list[str]
) -> Sequence[dict[str, Any]]:
    """Returns the messages with the members that the server reads.

    A result that is an error becomes text, a thought that the server does not read is left out, and an id that it would
    refuse is shortened.

    Args:
        messages: Messages of the conversation.
        dialect: Dialect of the server.
        ignored: Gets the names of the members that are left out.
    """
    adapted = _ADAPTED_MEMBERS if dialect.max_call_id_characters is None else _ADAPTED_MEMBERS | _CALL_MEMBERS
    if all(map(adapted.isdisjoint, messages)):
        return messages
    if any("content_blocks" in message for message in messages):
        ignored.append("messages.content_blocks")
    if (thought := unread_thought(messages, dialect.thought_fields)) is not None:
        ignored.append(f"messages.{thought}")
    return [message if adapted.isdisjoint(message) else _adapt_message({**message}, dialect) for message in messages]


def _adapt_message(message: dict[str, Any], dialect: UpstreamDialect) -> dict[str, Any]:
    message.pop("content_blocks", None)
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
