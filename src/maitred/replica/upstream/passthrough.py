"""Request that an upstream server gets as it is, and its answer: one JSON object, a file, or a stream of events.

Unlike a chat completion, an answer has no format here that all servers' answers are brought into. What is read of it is
what is billed; the rest is passed on, without the gateway's credential if a server repeats it.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping

import msgspec

from maitred.core.errors import AnswerTooLarge, ReplicaStalled
from maitred.replica.http.connection import Response, ResponseBroken
from maitred.replica.http.content_decoder import ContentBroken, make_content_decoder
from maitred.replica.upstream.config import UpstreamConfig
from maitred.replica.upstream.errors import (
    make_replica_lost,
    make_response_error,
    parse_error,
)
from maitred.replica.upstream.secret_mask import SecretMask

_JSON = "application/json"
_EVENTS = "text/event-stream"
_LARGE_BYTES = 256 * 1024
"""Size above which a body is decoded beside the event loop."""
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CONTENT_TYPE = re.compile(
    r"(application/(json|octet-stream|x-subrip|x-ndjson|ogg)|audio/[\w.+-]+|image/[\w.+-]+|video/[\w.+-]+"
    r"|text/(plain|vtt|srt|event-stream))(\s*;\s*[\w=\"' .-]+)*",
    re.ASCII,
)
"""Content types that are passed on: what a browser would run as a page of ours is not among them."""


class UpstreamAnswer:
    """Answer of an upstream. Implements `core.text_replica.PassthroughAnswer`.

    Args:
        response: The response, whose head has come.
        config: Settings of its server.
        name: Name of its server.
        mask: Masks the server's credential.
        deadline_s: Deadline of the end of the answer, by the clock of the event loop.

    Attributes:
        content_type: Content type of the answer.
        is_stream: Whether it is passed on as it comes.
        is_complete: Whether the whole answer was read.

    Raises:
        ReplicaLost: The answer has a type that no answer of this API has.
    """

    def __init__(
        self, response: Response, config: UpstreamConfig, name: str, *, mask: SecretMask, deadline_s: float
    ) -> None:
        self.content_type = response.headers.get(b"content-type", b"").decode("latin-1").strip() or _JSON
        if not _CONTENT_TYPE.fullmatch(self.content_type):
            raise make_replica_lost(f"it answered with the content type {self.content_type[:60]!r}")
        kind = self.content_type.partition(";")[0].strip().lower()
        self.is_stream = kind == _EVENTS or not kind.startswith(("text/", _JSON))
        self.is_complete = False
        self._is_json = kind == _JSON
        self._response = response
        self._config = config
        self._mask = mask
        self._name = name
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
