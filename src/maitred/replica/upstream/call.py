"""One request at a server of somebody else's: it is sent, answered by a stream, and counted for what it came to.

    it gets requests -> POST -> head within the time -> parts, each within its time -> [DONE]

Every wait has an end, and every end that is not the answer's own is a failure. Leaving the context closes the
connection unless the answer came whole, and that is how all servers are told to stop computing.
"""

import asyncio
import logging
from contextlib import suppress
from functools import lru_cache, partial
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from maitred.core.errors import MaitredError, ReplicaBusy, ReplicaLost, ReplicaUnavailable
from maitred.core.text_replica import TextRequest
from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt
from maitred.replica.http.connection import Response, ResponseBroken
from maitred.replica.http.pool import ConnectFailed
from maitred.replica.http.request_head import line_of, request_of
from maitred.replica.upstream.anthropic import AnthropicStreamParser, messages_body
from maitred.replica.upstream.errors import error_in, failure_of, retry_after_of
from maitred.replica.upstream.openai_stream import OpenAIStreamParser, StreamParser, broken, how_broken
from maitred.replica.upstream.request_body import body_of
from maitred.replica.upstream.stream import UpstreamStream

if TYPE_CHECKING:
    from maitred.replica.upstream.replica import UpstreamReplica

log = logging.getLogger(__name__)

_MOST_ERROR_BYTES = 64 * 1024
_ERROR_BODY_S = 5.0
_EVENTS = b"text/event-stream"


class UpstreamCall:
    """A context: entering it sends the request and gives the answer; leaving it ends what is unfinished.

    Args:
        upstream: The server.
        request: What is asked.
    """

    __slots__ = ("_attempt", "_reader", "_request", "_stream", "_upstream")

    _attempt: BreakerAttempt
    _reader: StreamParser
    _stream: UpstreamStream

    def __init__(self, upstream: "UpstreamReplica", request: TextRequest) -> None:
        self._upstream = upstream
        self._request = request

    async def __aenter__(self) -> UpstreamStream:
        upstream, config = self._upstream, self._upstream.config
        attempt = self._attempt = upstream.standing.begin()
        upstream.open_streams += 1
        try:
            path, body = self._written()
            now_s = asyncio.get_running_loop().time()
            total_s = now_s + config.total_timeout_s
            begin_s = min(now_s + config.first_part_timeout_s, total_s)
            response = await self._ask(path, body, begin_s)
            if response.status != 200 or _media_type(response.headers.get(b"content-type", b"")) != _EVENTS:
                raise await self._refusal(response)
            self._stream = UpstreamStream(
                response,
                self._reader,
                begin_s=begin_s,
                idle_s=config.idle_timeout_s,
                total_s=total_s,
                begun=partial(upstream.standing.answered, attempt),
            )
        except BaseException as error:
            self._over(error)
            raise
        return self._stream

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._over(error)

    def _over(self, error: BaseException | None) -> None:
        """Says of the server what its end says."""
        outcome = AttemptOutcome.NEITHER
        if error is None:
            if self._reader.whole:
                outcome = AttemptOutcome.SUCCESS
        elif isinstance(error, ReplicaLost):
            outcome = AttemptOutcome.FAILURE
            log.warning("An answer of the upstream %s failed: %s.", self._upstream.name, how_broken(error))
        elif isinstance(error, ReplicaUnavailable) and not isinstance(error, ReplicaBusy):
            outcome = AttemptOutcome.FAILURE
        self._upstream.open_streams -= 1
        self._upstream.standing.ended(self._attempt, outcome)

    def _written(self) -> tuple[str, bytes]:
        """Where the request goes, and how it is written there."""
        upstream, request = self._upstream, self._request
        parameters, model = upstream.config.parameters, request.model or upstream.model
        if upstream.config.kind == "anthropic":
            self._reader = AnthropicStreamParser(upstream.name)
            return "messages", messages_body(request, model, parameters)
        samples = int(request.fields.get("n") or 1)
        self._reader = OpenAIStreamParser(upstream.name, request.choices, upstream.dialect, samples)
        path = "chat/completions" if request.chat else "completions"
        return path, body_of(request, upstream.dialect, model, parameters)

    async def _ask(self, path: str, body: bytes, begin_s: float) -> Response:
        """Sends the request; the response, when its head is there."""
        upstream, request = self._upstream, self._request
        lines = [line_of("x-request-id", request.id)]
        if request.trace is not None:
            lines += [line_of(name, value) for name, value in request.trace.headers().items()]
        try:
            return await upstream.line.ask(request_of(upstream.head("POST", path), lines, body), until_s=begin_s)
        except TimeoutError:
            log.warning(
                "The upstream %s gave no answer within %g s.", upstream.name, upstream.config.first_part_timeout_s
            )
            raise ReplicaUnavailable(
                "The server that runs this model did not answer in time. Try again after the time in Retry-After.",
                retry_after_s=1.0,
            ) from None
        except (ConnectFailed, ResponseBroken) as error:
            raise upstream.missed(error) from None

    async def _refusal(self, response: Response) -> MaitredError:
        """What a response means that is not a stream of events."""
        try:
            async with asyncio.timeout(_ERROR_BODY_S):
                body = await response.body(_MOST_ERROR_BYTES)
        except (TimeoutError, ResponseBroken):
            body = b""
        finally:
            response.close()
        name, headers, error = self._upstream.name, response.headers, None
        with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
            error = error_in(msgspec.json.decode(body))
        if response.status != 200:
            told = [headers.get(header, b"").decode("latin-1") for header in (b"retry-after-ms", b"retry-after")]
            return failure_of(name, response.status, error, retry_after_of(*told))
        if error is not None:
            return failure_of(name, error.status or 502, error, None)
        if not body:
            return broken("it sent nothing")
        kind = _media_type(headers.get(b"content-type", b"")).decode("latin-1")
        return broken(f"it was asked for a stream of events and sent {kind[:80]}")


@lru_cache(64)
def _media_type(content_type: bytes) -> bytes:
    """It, without what more is said of it."""
    return content_type.partition(b";")[0].strip().lower()
