"""Servers that speak Anthropic's Messages API: how they are asked and read, by means of `maitred.wire.anthropic`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.core.answer import TextDelta
from maitred.core.errors import InvalidRequest, Unsupported
from maitred.core.request import FinishReason
from maitred.core.text_replica import TextBatch, TextRequest
from maitred.replica.upstream.errors import ServerError, to_failure
from maitred.replica.upstream.openai_stream import MOST_EVENT_BYTES, broken
from maitred.wire.anthropic.answer import AnswerBroken, AnswerDelta, AnswerFailed, MessagesStreamParser
from maitred.wire.anthropic.outbound import to_messages
from maitred.wire.openai.requests import ChatRequest
from maitred.wire.sse import SSEDecoder

DEFAULT_MAX_TOKENS = 4096
"""Messages demands a limit. This one holds where neither the caller, nor a limit, nor `parameters` names one."""


def messages_body(request: TextRequest, model: str, parameters: Mapping[str, Any]) -> bytes:
    """The body of the request; see `maitred.replica.upstream.request_body.encode_body`."""
    if not request.chat:
        raise InvalidRequest("This model answers conversations only. Use /v1/chat/completions.", param="model")
    if request.given:
        raise Unsupported("The server that runs this model cannot go on with an answer that another one has begun.")
    chat = msgspec.convert(dict(request.fields), ChatRequest)
    max_tokens = request.max_tokens or parameters.get("max_tokens", DEFAULT_MAX_TOKENS)
    asked = msgspec.to_builtins(to_messages(chat, model=model, max_tokens=max_tokens))
    return msgspec.json.encode({**parameters, **asked})


class AnthropicStreamParser:
    """One stream; the counterpart of `maitred.replica.upstream.openai_stream.OpenAIStreamParser`.

    Args:
        server: Its name, for the log.

    Attributes:
        begun: Whether any part of the answer has come.
        whole: Whether everything has come.
    """

    def __init__(self, server: str) -> None:
        self.begun = False
        self.whole = False
        self._server = server
        self._events = SSEDecoder()
        self._answer = MessagesStreamParser()
        self._undecoded_bytes = 0

    def feed(self, data: bytes) -> TextBatch | None:
        """What these bytes add. The usage comes last: before, the server has not counted what it has written."""
        parts: list[TextDelta] = []
        events = self._events.feed(data)
        self._undecoded_bytes = 0 if events else self._undecoded_bytes + len(data)
        if self._undecoded_bytes > MOST_EVENT_BYTES:
            raise broken("it sent an event without an end")
        try:
            for event in events:
                parts += map(_part, self._answer.feed(event))
        except AnswerBroken as failure:
            raise broken(str(failure)) from None
        except AnswerFailed as failure:
            if self.begun or parts:
                raise broken(f"it reported an error: {str(failure)[:200]}") from None
            raise to_failure(self._server, failure.status, ServerError(failure.message, failure.kind), None) from None
        self.begun = self.begun or bool(parts)
        self.whole = self._answer.is_complete
        return TextBatch(parts, self._answer.usage if self.whole else None, len(parts), self.whole) if parts else None

    def ended(self) -> None:
        """The body has ended, as HTTP sees it; raises ReplicaLost if the answer has not."""
        try:
            self._answer.on_end()
        except AnswerBroken as failure:
            raise broken(str(failure)) from None


def _part(delta: AnswerDelta) -> TextDelta:
    finish = None if delta.finish is None else FinishReason(delta.finish)
    extra: dict[str, Any] | None = None if delta.tool_calls is None else {"tool_calls": delta.tool_calls}
    return TextDelta(0, delta.text, finish, extra=extra)
