"""Parser of streams of typed events, as the Messages API and the Responses API have them: from bytes to batches."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from maitred.core.errors import MaitredError
from maitred.core.inference import TextDelta
from maitred.core.request import Usage
from maitred.core.text_replica import TextBatch
from maitred.replica.upstream.errors import make_replica_lost, make_stream_error, parse_error, parse_error_in_place
from maitred.replica.upstream.whole_body import WholeBody
from maitred.wire.answer_event import AnswerBroken, AnswerFailed, decode_event, replace_surrogates
from maitred.wire.sse import SSEDecoder, SSEEvent


class EventParser(Protocol):
    """Parser of the events of one API."""

    is_complete: bool
    """Whether the parser has received the whole answer."""
    usage: Usage | None
    """Usage of the whole answer; None: the server has not reported it yet."""

    @property
    def has_ended(self) -> bool:
        """Whether the reason for the end has come."""
        ...

    def is_whole(self, fields: Mapping[str, Any]) -> bool:
        """Returns whether an object is a whole answer."""
        ...

    def feed(self, event: SSEEvent) -> list[TextDelta]:
        """Parses an event; raises AnswerBroken or AnswerFailed."""
        ...

    def feed_whole(self, message: Mapping[str, Any], /) -> list[TextDelta]:
        """Parses an answer that has come as one object; raises as `feed` does."""
        ...

    def on_end(self) -> None:
        """Handles the end of the body; raises AnswerBroken if the answer is not complete."""
        ...


class EventStreamParser:
    """Parser of one stream of typed events. Implements `StreamParser` of `maitred.replica.upstream.stream`.

    Args:
        server: Name of the server, for log messages.
        parser: Parser of the events.
        request_body: Body of the request, to tell the caller's words from the server's.

    Attributes:
        has_begun: Whether any part of the response was received.
        is_complete: Whether the whole response was received.
    """

    def __init__(self, server: str, parser: EventParser, request_body: bytes | None = None) -> None:
        self.has_begun = False
        self.is_complete = False
        self._server = server
        self._request_body = request_body
        self._body = WholeBody()
        self._decoder = SSEDecoder("surrogateescape")
        self._parser = parser

    def feed(self, data: bytes) -> TextBatch | None:
        """Parses data and returns a batch of new deltas; None if there are none.

        Only the batch with the end has the usage, because the server reports its output tokens there.
        """
        events = self._decoder.feed(data) if self._body.value is None else []
        if events:
            self._body.on_events()
        elif self._body.add(data):
            return None
        return self._read(events)

    def _read(self, events: Sequence[SSEEvent], message: Mapping[str, Any] | None = None) -> TextBatch | None:
        """Reads events, or a whole message in place of them."""
        deltas: list[TextDelta] = []
        try:
            if message is not None:
                deltas += self._parser.feed_whole(message)
            for event in events:
                deltas += self._parser.feed(event)
        except AnswerBroken as failure:
            raise make_replica_lost(str(failure)) from None
        except AnswerFailed as failure:
            raise self._make_error(failure, has_begun=self.has_begun or bool(deltas)) from None
        self.has_begun = self.has_begun or bool(deltas)
        self.is_complete = self._parser.is_complete
        usage, self._parser.usage = self._parser.usage, None
        if not deltas and (usage is None or not self.has_begun):
            return None
        chunks = sum(delta.block is None for delta in deltas)
        return TextBatch(deltas, usage, chunks, self.is_complete)

    def on_end(self, *, is_framed: bool) -> TextBatch | None:
        """Handles the end of the body; returns deltas of its last event, if that was held back.

        Raises:
            ReplicaLost: The response is incomplete.
            MaitredError: The body is an error.
        """
        if self._body.value is not None:
            return self._read((), self._decode_message(bytes(self._body.value)))
        batch = None
        try:
            if not self._parser.has_ended:
                # The event stream standard drops an event without its blank line, but one that can be read is whole.
                batch = self._read(self._decoder.feed(b"\n\n"))
            self._parser.on_end()
        except AnswerBroken as failure:
            raise make_replica_lost(str(failure)) from None
        except AnswerFailed as failure:
            raise self._make_error(failure, has_begun=self.has_begun) from None
        self.is_complete = True
        return None if batch is None else TextBatch(batch.parts, batch.usage, batch.chunks, whole=True)

    def _make_error(self, failure: AnswerFailed, *, has_begun: bool) -> MaitredError:
        error = parse_error(failure.fields) or parse_error_in_place(failure.fields)
        return make_stream_error(self._server, error, self._request_body, has_begun=has_begun)

    def _decode_message(self, body: bytes) -> Mapping[str, Any]:
        """Decodes a whole message in place of a stream; raises the error that came instead of it."""
        try:
            fields = replace_surrogates(decode_event(body)[0])
        except AnswerBroken:
            fields = None
        if not isinstance(fields, dict):
            raise make_replica_lost("it was asked for a stream of events and sent something else")
        if self._parser.is_whole(fields):
            return fields
        # The error may be that of a proxy, in the form of another API.
        error = parse_error_in_place(fields)
        if error is None:
            raise make_replica_lost("it was asked for an answer and sent another object")
        raise make_stream_error(self._server, error, self._request_body, has_begun=False)
