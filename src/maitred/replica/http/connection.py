"""A connection to a server, and the response to the request that is on it.

Everything that one read of the socket brings is parsed at once and told once: to whoever waits for the response, or to
the function that `Response.listen` has been given. So an answer that comes whole wakes its reader one time.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from maitred.core.cohort import COHORT, CohortStage

MOST_HEAD_BYTES = 64 * 1024
_MOST_WAITING_BYTES = 256 * 1024
"""Of a body that nobody takes. Then the server has to wait."""


class ResponseBroken(Exception):
    """A response ended before it was whole.

    Attributes:
        untouched: Whether not a byte of it has come.
    """

    def __init__(self, reason: str, *, untouched: bool = False) -> None:
        super().__init__(reason)
        self.untouched = untouched


class Response:
    """What a server sends to one request.

    Attributes:
        status: 0 until the head is there.
        headers: By their names in lower case; of one that comes twice, the last.
        has_ended: Whether the body is there to its end.
        failure: Why there will be no more of it; None: nothing is wrong.
        pieces: What has come of the body and has not been taken.
        on_data: Called when all that came at once has been noted.
    """

    __slots__ = (
        "_called",
        "_connection",
        "_waiter",
        "failure",
        "has_ended",
        "headers",
        "on_data",
        "pieces",
        "status",
    )

    def __init__(self, connection: "HttpConnection") -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.has_ended = False
        self.failure: ResponseBroken | None = None
        self._connection = connection
        self.pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._called = False
        """Whether who waits has been woken, and has not come."""
        self.on_data: Callable[[], None] = self._wake

    def listen(self, heard: Callable[[], None]) -> None:
        """Calls `heard` for all that comes from now on, in place of waking who waits here."""
        self.on_data = heard

    def take(self) -> bytes:
        """What has come of the body and has not been taken."""
        pieces = self.pieces
        if not pieces:
            return b""
        self.pieces = []
        if not self.has_ended:
            self._connection.resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def wait_head(self, until_s: float | None = None) -> None:
        """Waits for the head; where it does not come, or nobody waits any more, the connection is closed.

        Args:
            until_s: No longer than that, by the event loop's clock.

        Raises:
            Interrupted: There will be none.
            TimeoutError: It has not come in time.
        """
        timer = None
        try:
            while not self.status:
                if self.failure is not None:
                    raise self.failure
                if timer is None and until_s is not None:
                    timer = asyncio.get_running_loop().call_at(until_s, self._late)
                await self._come()
        except BaseException:
            self.close()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def read(self) -> bytes:
        """The next bytes of the body; none at its end.

        Raises:
            Interrupted: It broke off.
        """
        while True:
            if data := self.take():
                return data
            if self.failure is not None:
                raise self.failure
            if self.has_ended:
                return b""
            await self._come()

    async def body(self, most_bytes: int) -> bytes:
        """The body, or the beginning of a longer one; see `read` for what it raises."""
        pieces: list[bytes] = []
        size = 0
        while size < most_bytes and (piece := await self.read()):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)[:most_bytes]

    def close(self) -> None:
        """Nobody wants the rest of it: the connection is closed, which tells the server to stop."""
        self.on_data = _nobody  # who has heard it refers to it, and would have to be found by Python's collector
        if not self.has_ended:
            self._connection.close()

    def drain(self, within_s: float) -> None:
        """Nobody wants the rest, but if it comes soon the connection can serve again."""
        self.on_data = _nobody
        if not self.has_ended:
            self._connection.drain(within_s)

    async def _come(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._called:
                self._called = False
                COHORT.arrive(CohortStage.ANSWERED)

    def _late(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
            self._called = True
            COHORT.expect(CohortStage.ANSWERED)


def _nobody() -> None:
    """Hears what nobody listens to."""


class HttpConnection(asyncio.Protocol):
    """One connection.

    Args:
        free: Called when it can take the next request.
        lost: Called when it is closed.

    Attributes:
        open: Whether it can be written to.
    """

    def __init__(self, free: "Callable[[HttpConnection], None]", lost: "Callable[[HttpConnection], None]") -> None:
        self.open = False
        self._free = free
        self._lost = lost
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._complete = False
        """Whether the response that is being parsed has come to its end."""
        self._keeps = False
        """Whether the connection can serve again then."""
        self._surplus = False
        """Whether more came behind that."""
        self._waiting_bytes = 0
        self._paused = False
        self._deaf = False
        """Whether nobody wants the rest of the body."""
        self._timer: asyncio.TimerHandle | None = None

    def send(self, request: bytes) -> Response:
        """Sends a request, on a connection that is free."""
        self._complete = False
        self._head_bytes = 0
        response = self._response = Response(self)
        self._transport.write(request)
        return response

    def close(self) -> None:
        """At once: what has not been sent is not sent any more."""
        self.open = False
        self._response = None
        self._stop_timer()
        self._transport.abort()

    def resume(self) -> None:
        """What waited has been taken."""
        self._waiting_bytes = 0
        if self._paused and self.open:
            self._paused = False
            self._transport.resume_reading()

    def drain(self, within_s: float) -> None:
        """See `Response.drain`."""
        self._deaf = True
        self.resume()
        self._timer = asyncio.get_running_loop().call_later(within_s, self.close)

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio
        self.open = True

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        response = self._response
        if response is None:
            self.close()  # it speaks without having been asked, mostly to say that it is about to close
            return
        if headless := not response.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._fail(f"it sent what is no HTTP ({type(error).__name__})")
                return
            self._surplus = True
        if headless and self._head_bytes > MOST_HEAD_BYTES and self._has_too_long_a_head(response):
            response.status = 0
            self._fail(f"the head of its response is longer than {MOST_HEAD_BYTES} bytes")
            return
        if self._complete:
            self._finish(response)
        elif self._waiting_bytes > _MOST_WAITING_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        response.on_data()

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.open = False
        self._stop_timer()
        self._lost(self)
        response = self._response
        if response is not None:
            if error is None and response.status and self._ends_with_connection(response):
                self._response, response.has_ended = None, True
                response.on_data()
            else:
                reason = "it closed the connection" if error is None else type(error).__name__
                self._fail(reason)
        del self._parser  # it holds the methods of this object

    # --- httptools ---

    def on_message_begin(self) -> None:
        """A response, or an interim one before it; or more than was asked for."""
        self._surplus = self._complete
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer, which is of no use to anybody here."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is there."""
        status = self._parser.get_status_code()
        if status >= 200 and not self._complete and self._response is not None:
            self._response.status, self._response.headers = status, self._headers

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        response = self._response
        if response is not None and not (self._complete or self._deaf):
            response.pieces.append(body)
            self._waiting_bytes += len(body)

    def on_message_complete(self) -> None:
        """The end of the response, or of an interim one."""
        if self._response is not None and self._response.status and not self._complete:
            self._complete = True
            self._keeps = self._parser.should_keep_alive()  # afterwards it does not know any more

    # --- ends ---

    def _finish(self, response: Response) -> None:
        """The response is whole."""
        self._response, response.has_ended, self._deaf = None, True, False
        self._stop_timer()
        if self._surplus or not (self.open and self._keeps):
            self.close()
        else:
            self.resume()
            self._free(self)

    def _fail(self, reason: str) -> None:
        response = self._response
        if self.open:
            self.close()
        self._response = None
        if response is not None:
            response.failure = ResponseBroken(reason, untouched=not self._head_bytes)
            response.on_data()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @staticmethod
    def _has_too_long_a_head(response: Response) -> bool:
        """Of what came with the end of a head, some may be its body."""
        size = sum(len(name) + len(value) for name, value in response.headers.items())
        return not response.status or size > MOST_HEAD_BYTES

    @staticmethod
    def _ends_with_connection(response: Response) -> bool:
        """Whether only the connection's end tells where the body ends."""
        return b"content-length" not in response.headers and b"transfer-encoding" not in response.headers
