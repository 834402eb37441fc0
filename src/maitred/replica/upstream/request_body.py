"""Encoder of request bodies, in the dialect of the server that answers them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.core.errors import Unsupported
from maitred.core.text_replica import TextRequest
from maitred.replica.upstream.dialects import UpstreamDialect

_GATEWAY_FIELDS = frozenset(
    {"model", "stream", "stream_options", "priority", "service_tier", "max_tokens", "max_completion_tokens"}
)
"""Fields that this gateway decides, whatever the caller wrote: model name, streaming, priority and length."""
_OPTIONAL_FIELDS = frozenset(
    {
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "store", "verbosity", "reasoning_effort"),
        *("prediction", "parallel_tool_calls", "best_of", "include_reasoning"),
    }
)
"""Fields that may be left out: an answer without them still answers the request. A valid `best_of` equals `n`."""
_NO_OP_VALUES: Mapping[str, Any] = {"n": 1, "logprobs": False}
"""Values that ask for nothing, by field."""


def encode_body(request: TextRequest, dialect: UpstreamDialect, model: str, parameters: Mapping[str, Any]) -> bytes:
    """Encodes the body of a request.

    It always asks for a stream, so that a server that dies or stalls is noticed.

    Args:
        request: The request.
        dialect: Dialect of the server.
        model: The server's name of the model.
        parameters: Fields for requests that do not have them.

    Raises:
        Unsupported: The request has a field that the server does not know. Sent or left out, it would be ignored.
    """
    body: dict[str, Any] = {**parameters}
    for field, value in request.fields.items():
        if field in _GATEWAY_FIELDS:
            continue
        if field in dialect.allowed_fields:
            body[field] = value
        elif field not in _OPTIONAL_FIELDS and value != _NO_OP_VALUES.get(field, _GATEWAY_FIELDS):
            raise Unsupported(f"{field} is not known to the server that runs this model. Remove it.", param=field)
    if request.given:
        body |= _continuation_fields(request.given, body, dialect, chat=request.chat)
    if request.scored and "logprobs" in dialect.allowed_fields and not body.get("logprobs"):
        # For a text to continue it is a number: how many tokens at each position. Not all servers accept a 0.
        body["logprobs"] = True if request.chat else 1
    if request.max_tokens is not None:
        body[dialect.limit_field if request.chat else "max_tokens"] = request.max_tokens
    body |= {"model": model, "stream": True, "stream_options": dialect.stream_options}
    return msgspec.json.encode(body)


def _continuation_fields(
    given_text: str, body: Mapping[str, Any], dialect: UpstreamDialect, *, chat: bool
) -> dict[str, Any]:
    """Returns the fields that make the server continue a text instead of beginning an answer."""
    if dialect.continuation_fields is None:
        raise Unsupported("The server that runs this model cannot go on with an answer that another one has begun.")
    if not chat:
        return {"prompt": body["prompt"] + given_text}
    return {
        "messages": [*body["messages"], {"role": "assistant", "content": given_text}],
        **dialect.continuation_fields,
    }
