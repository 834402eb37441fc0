"""Anthropic's Messages API: encodes requests and parses streams, with `maitred.wire.anthropic`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest, Unsupported
from maitred.core.inference import TextDelta
from maitred.core.text_replica import TextBatch, TextRequest
from maitred.replica.upstream.errors import ReportedError, make_replica_lost, make_response_error
from maitred.replica.upstream.openai_stream import MAX_EVENT_BYTES
from maitred.wire.anthropic.answer import AnswerBroken, AnswerFailed, MessagesStreamParser
from maitred.wire.anthropic.outbound import begins_without_thought, to_messages
from maitred.wire.anthropic.requests import MessagesRequest
from maitred.wire.openai.requests import ChatRequest, Message
from maitred.wire.sse import SSEDecoder

DEFAULT_MAX_TOKENS = 4096
"""Value of `max_tokens` if neither the request nor `parameters` sets it; the API requires one."""


def encode_messages_body(
    request: TextRequest, model: str, parameters: Mapping[str, Any], *, continues_answers: bool = False
) -> bytes:
    """Encodes the body of a Messages request; see `maitred.replica.upstream.request_body.encode_body`.

    Args:
        request: The request.
        model: Name of the model at the server.
        parameters: Default fields of the body.
        continues_answers: Whether the server continues a last message of the assistant.
    """
    if not request.chat:
        raise InvalidRequest("This model answers conversations only. Use /v1/chat/completions.", param="model")
    if request.given and not continues_answers:
        raise Unsupported("The server that runs this model cannot go on with an answer that another one has begun.")
    chat = msgspec.convert(dict(request.fields), ChatRequest)
    max_tokens = request.max_tokens or parameters.get("max_tokens", DEFAULT_MAX_TOKENS)
    if request.given:
        begun = Message(role="assistant", content=request.given)
        chat = msgspec.structs.replace(chat, messages=[*chat.messages, begun], thinking=None)
    messages_request = to_messages(chat, model=model, max_tokens=max_tokens)
    body = {**parameters, **msgspec.to_builtins(messages_request)}
    if "thinking" in body and (request.given or not _may_think(messages_request, body["thinking"], chat.token_limit)):
        del body["thinking"]
    return msgspec.json.encode(body)


def _may_think(request: MessagesRequest, thinking: Any, asked_tokens: int | None) -> bool:  # noqa: ANN401 - any JSON
    """Returns whether the server would accept a request with this `thinking`.

    Where the client did not keep the thoughts of its conversation, the model answers without: the server refuses a turn
    that has begun without a thought. Nor does it think where the granted tokens do not suffice. The operator's own
    `thinking` also gives way to a forced tool call.

    Args:
        request: The request.
        thinking: Its `thinking`, or that of the configuration.
        asked_tokens: Output tokens that the caller asked for; None: not stated.
    """
    if not isinstance(thinking, dict) or thinking.get("type") not in ("enabled", "adaptive"):
        return True
    if thinking["type"] == "enabled" and begins_without_thought(request.messages):
        return False
    is_own = request.thinking is not None
    budget_tokens = thinking.get("budget_tokens")
    if isinstance(budget_tokens, int) and budget_tokens >= request.max_tokens:
        # The server tells a caller who asked for too little; nobody else did so.
        return is_own and asked_tokens is not None and budget_tokens >= asked_tokens
    return is_own or request.tool_choice is None or request.tool_choice.type in ("auto", "none")


class AnthropicStreamParser:
    """Parser of one stream of the Messages API. Implements `StreamParser` of `maitred.replica.upstream.stream`.

    Args:
        server: Name of the server, for log messages.

    Attributes:
        has_begun: Whether any part of the response was received.
        is_complete: Whether the whole response was received.
    """

    def __init__(self, server: str) -> None:
        self.has_begun = False
        self.is_complete = False
        self._server = server
        self._decoder = SSEDecoder()
        self._parser = MessagesStreamParser()
        self._incomplete_event_bytes = 0
        self._body: bytearray | None = bytearray()
        """The body so far, while it may be one object in place of a stream; None: it is a stream."""

    def feed(self, data: bytes) -> TextBatch | None:
        """Parses data and returns a batch of new deltas; None if there are none.

        Only the batch with the end has the usage, because the server reports its output tokens there.
        """
        deltas: list[TextDelta] = []
        message = None
        if self._body is not None:
            self._body += data if self._body else data.lstrip()
            message = _decode_object(self._body)
            if self._body and not self._body.startswith(b"{"):
                self._body = None
        events = self._decoder.feed(data) if self._body is None else []
        self._incomplete_event_bytes = 0 if events else self._incomplete_event_bytes + len(data)
        if self._incomplete_event_bytes > MAX_EVENT_BYTES:
            raise make_replica_lost("it sent an event without an end")
        try:
            if message is not None:
                deltas += self._parser.feed_whole(message)
            for event in events:
                deltas += self._parser.feed(event)
        except AnswerBroken as failure:
            raise make_replica_lost(str(failure)) from None
        except AnswerFailed as failure:
            if self.has_begun or deltas:
                raise make_replica_lost(f"it reported an error: {str(failure)[:200]}") from None
            raise make_response_error(
                self._server, failure.status, ReportedError(failure.message, failure.kind), None
            ) from None
        self.has_begun = self.has_begun or bool(deltas)
        self.is_complete = self._parser.is_complete
        usage, self._parser.usage = self._parser.usage, None
        if not deltas and (usage is None or not self.has_begun):
            return None
        return TextBatch(deltas, usage, len(deltas), self.is_complete)

    def on_end(self) -> None:
        """Handles the end of the body; raises ReplicaLost if the response is incomplete."""
        try:
            self._parser.on_end()
        except AnswerBroken as failure:
            raise make_replica_lost(str(failure)) from None
        self.is_complete = True


def _decode_object(data: bytearray) -> dict[str, Any] | None:
    """Decodes a body that is one whole JSON object; None if it is a stream, or a part of an object."""
    if not (data.startswith(b"{") and data[-16:].rstrip().endswith(b"}")):
        return None
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None
