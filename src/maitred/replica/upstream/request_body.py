"""Puts a request into the words of the server that will answer it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.core.errors import Unsupported
from maitred.core.text_replica import TextRequest
from maitred.replica.upstream.dialects import UpstreamDialect

_OURS = frozenset(
    {"model", "stream", "stream_options", "priority", "service_tier", "max_tokens", "max_completion_tokens"}
)
"""What this gateway decides, whatever the caller wrote: its own name for the model, whose turn it is, how long."""
_HINTS = frozenset(
    {
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "store", "verbosity", "reasoning_effort"),
        *("prediction", "parallel_tool_calls", "best_of", "include_reasoning"),
    }
)
"""What may go unheard: an answer without it is still the answer to the request. `best_of` is `n` where it passed."""
_HARMLESS: Mapping[str, Any] = {"n": 1, "logprobs": False}
"""Values that ask for nothing."""


def encode_body(request: TextRequest, dialect: UpstreamDialect, model: str, parameters: Mapping[str, Any]) -> bytes:
    """The body of the request. It always asks for a stream: a server that dies is noticed, and so is one that stalls.

    Args:
        request: What is asked.
        dialect: The server's.
        model: What the server calls the model.
        parameters: Fields for requests that do not have them.

    Raises:
        Unsupported: It asks for what the server does not know. Sent or left out, it would go unheard.
    """
    body: dict[str, Any] = {**parameters}
    for field, value in request.fields.items():
        if field in _OURS:
            continue
        if field in dialect.fields:
            body[field] = value
        elif field not in _HINTS and value != _HARMLESS.get(field, _OURS):
            raise Unsupported(f"{field} is not known to the server that runs this model. Remove it.", param=field)
    if request.given:
        body |= _continuing(request.given, body, dialect, chat=request.chat)
    if request.scored and "logprobs" in dialect.fields and not body.get("logprobs"):
        # A number is for texts to continue: of how many tokens at each position. Not all servers take a 0.
        body["logprobs"] = True if request.chat else 1
    if request.max_tokens is not None:
        body[dialect.limit_field if request.chat else "max_tokens"] = request.max_tokens
    body |= {"model": model, "stream": True, "stream_options": dialect.stream_options}
    return msgspec.json.encode(body)


def _continuing(given: str, body: Mapping[str, Any], dialect: UpstreamDialect, *, chat: bool) -> dict[str, Any]:
    """What makes the server go on behind a text instead of beginning."""
    if dialect.continuing is None:
        raise Unsupported("The server that runs this model cannot go on with an answer that another one has begun.")
    if not chat:
        return {"prompt": body["prompt"] + given}
    return {"messages": [*body["messages"], {"role": "assistant", "content": given}], **dialect.continuing}
