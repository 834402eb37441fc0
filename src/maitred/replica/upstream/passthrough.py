"""Request that an upstream server gets as it is, and its answer: one JSON object, a file, or a stream of events.

Unlike a chat completion, an answer has no format here that all servers' answers are brought into. What is read of it is
what is billed; the rest is passed on, without the gateway's credential if a server repeats it.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from maitred.core.errors import AnswerTooLarge, MaitredError, ReplicaStalled, Unsupported
from maitred.core.passthrough import PassthroughRequest
from maitred.replica.health.breaker import BreakerAttempt
from maitred.replica.http.connection import Response, ResponseBroken
from maitred.replica.http.content_decoder import ContentBroken, make_content_decoder
from maitred.replica.http.pool import ConnectFailed
from maitred.replica.http.request_head import encode_header, encode_request
from maitred.replica.upstream.errors import (
    make_replica_lost,
    make_response_error,
    make_timeout_error,
    parse_error,
    parse_error_body,
)

if TYPE_CHECKING:
    from maitred.replica.upstream.replica import UpstreamReplica

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 300.0
"""Default of `first_part_timeout_s` here: an image or a whole transcription comes at once, after a minute or two."""
_JSON = "application/json"
_EVENTS = "text/event-stream"
_MAX_ERROR_BYTES = 64 * 1024
_ERROR_BODY_TIMEOUT_S = 5.0
_LARGE_BYTES = 256 * 1024
"""Size above which a body is decoded beside the event loop."""
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NO_METHOD_STATUSES = (405, 501)
_NOT_FOUND = ("", "Not Found", "404 page not found")
"""What servers say of a path that they do not have."""
_CONTENT_TYPE = re.compile(
    r"(application/(json|octet-stream|x-subrip|x-ndjson|ogg)|audio/[\w.+-]+|image/[\w.+-]+|video/[\w.+-]+"
    r"|text/(plain|vtt|srt|event-stream))(\s*;\s*[\w=\"' .-]+)*",
    re.ASCII,
)
"""Content types that are passed on: what a browser would run as a page of ours is not among them."""


class PassthroughCall:
    """Context manager of one request: entering sends it and returns the answer; leaving ends it.

    Args:
        upstream: The upstream to which the request is sent.
        request: The request.
    """

    _attempt: BreakerAttempt
    _answer: "UpstreamAnswer"

    def __init__(self, upstream: "UpstreamReplica", request: PassthroughRequest) -> None:
        self._upstream = upstream
        self._request = request

    async def __aenter__(self) -> "UpstreamAnswer":
        upstream = self._upstream
        self._attempt = upstream.status.start_attempt()
        upstream.open_streams += 1
        try:
            now_s = asyncio.get_running_loop().time()
            deadline_s = now_s + upstream.config.total_timeout_s
            timeout_s = upstream.config.first_part_timeout_s or _ANSWER_TIMEOUT_S
            response = await self._send(min(now_s + timeout_s, deadline_s))
            if not 200 <= response.status < 300:
                raise await self._make_error(response)
            upstream.status.on_first_token(self._attempt)
            try:
                self._answer = UpstreamAnswer(response, upstream, deadline_s)
            except MaitredError:
                response.close()
                raise
        except BaseException as error:
            upstream.end_attempt(self._attempt, error, is_complete=False)
            raise
        return self._answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answer.close()
        self._upstream.end_attempt(self._attempt, error, is_complete=self._answer.is_complete)

    async def _send(self, head_deadline_s: float) -> Response:
        """Sends the request and waits for the head of the response."""
        upstream, request = self._upstream, self._request
        model = request.server_model or upstream.server_model
        size, pieces = request.body.encode(model, upstream.config.parameters)
        head = upstream.passthrough_head(request.path, request.body.content_type)
        lines = [encode_header("x-request-id", request.id)]
        if request.trace is not None:
            lines += [encode_header(name, value) for name, value in request.trace.headers().items()]
        try:
            if request.body.is_small:
                body = encode_request(head, lines, b"".join(pieces))
                return await upstream.connection_pool.send(body, deadline_s=head_deadline_s)
            lines += [b"connection: close", b"content-length: %d" % size]
            return await upstream.connection_pool.send_streamed(
                b"%b%b\r\n\r\n" % (head, b"\r\n".join(lines)), pieces, deadline_s=head_deadline_s
            )
        except TimeoutError:
            raise make_timeout_error("it gave no answer in time") from None
        except (ConnectFailed, ResponseBroken) as error:
            raise upstream.make_no_response_error(error) from None

    async def _make_error(self, response: Response) -> MaitredError:
        """Makes the exception for a response whose status is no success."""
        try:
            async with asyncio.timeout(_ERROR_BODY_TIMEOUT_S):
                body = await response.read_body(_MAX_ERROR_BYTES)
        except (TimeoutError, ResponseBroken):
            body = b""
        finally:
            response.close()
        error = parse_error_body(self._upstream.secret_mask.apply(body))
        status, path = response.status, self._request.path
        if status in _NO_METHOD_STATUSES or (status == 404 and error.message.strip() in _NOT_FOUND):
            log.error("The upstream %s has no path %s: it answered %d.", self._upstream.name, path, status)
            return Unsupported(
                f"The server that runs this model has no /{path}. Its operator must look at the upstream's URL, or "
                "name another server.",
                param="model",
            )
        sent = msgspec.json.encode(dict(self._request.body.fields()))
        return make_response_error(self._upstream.name, status, error, self._upstream.retry_after_s(response), sent)


class UpstreamAnswer:
    """Answer of an upstream. Implements `core.passthrough.PassthroughAnswer`.

    Args:
        response: The response, whose head has come.
        upstream: Its server.
        deadline_s: Deadline of the end of the answer, by the clock of the event loop.

    Attributes:
        content_type: Content type of the answer.
        is_stream: Whether it is passed on as it comes.
        is_complete: Whether the whole answer was read.

    Raises:
        ReplicaLost: The answer has a type that no answer of this API has.
    """

    def __init__(self, response: Response, upstream: "UpstreamReplica", deadline_s: float) -> None:
        self.content_type = response.headers.get(b"content-type", b"").decode("latin-1").strip() or _JSON
        if not _CONTENT_TYPE.fullmatch(self.content_type):
            raise make_replica_lost(f"it answered with the content type {self.content_type[:60]!r}")
        kind = self.content_type.partition(";")[0].strip().lower()
        self.is_stream = kind == _EVENTS or not kind.startswith(("text/", _JSON))
        self.is_complete = False
        self._is_json = kind == _JSON
        self._response = response
        self._config = upstream.config
        self._mask = upstream.secret_mask
        self._name = upstream.name
        self._deadline_s = deadline_s
        try:
            self._decoder = make_content_decoder(response.headers.get(b"content-encoding"))
        except ContentBroken as failure:
            raise make_replica_lost(str(failure)) from None

    async def read_whole(self) -> tuple[bytes, Mapping[str, msgspec.Raw]]:
        """Returns the whole body, with its members if it is a JSON object; it has no error then."""
        body = b"".join([piece async for piece in self])
        if not self._is_json:
            return body, {}
        try:
            if len(body) > _LARGE_BYTES:
                members = await asyncio.to_thread(_MEMBERS.decode, body)
            else:
                members = _MEMBERS.decode(body)
        except (msgspec.MsgspecError, UnicodeError):
            self.is_complete = False
            raise make_replica_lost("it answered with what is no JSON object") from None
        if "error" in members and (error := parse_error(msgspec.json.decode(body))) is not None:
            self.is_complete = False
            raise make_response_error(self._name, None, error)
        return body, members

    async def __aiter__(self) -> AsyncIterator[bytes]:
        loop, left_bytes, held = asyncio.get_running_loop(), self._config.max_answer_bytes, b""
        while True:
            idle_deadline_s = loop.time() + self._config.idle_timeout_s
            try:
                async with asyncio.timeout_at(min(idle_deadline_s, self._deadline_s)):
                    piece = await self._response.read()
                decoded = piece if self._decoder is None or not piece else self._decoder.decode(piece, left_bytes)
            except TimeoutError:
                raise make_replica_lost("it went silent in its answer", ReplicaStalled) from None
            except (ResponseBroken, ContentBroken) as failure:
                raise make_replica_lost(str(failure)) from None
            if len(decoded) > left_bytes:
                raise make_replica_lost("its answer is longer than max_answer_bytes", AnswerTooLarge)
            left_bytes -= len(decoded)
            shown, held = self._mask.split(held + decoded, body_over=not piece)
            if shown:
                yield shown
            if not piece:
                self.is_complete = True
                return

    def close(self) -> None:
        """Closes the connection if the answer is incomplete; the server then cancels the request."""
        self._response.close()
