"""Reads large request bodies beside the event loop.

The decoder holds Python's interpreter lock for the whole of a body, so a thread alone would not help: a body of 7 MB
with half a million keys holds everybody up for more than a second. What costs time is the number of objects, not the
number of bytes. So the strings and values of a large body are counted first, in short steps that let the event loop run
in between, and a body with too many is refused. The rest is decoded and checked in the same thread. There is one such
thread: with several, the event loop would wait for its turn behind all of them. Callers take turns at it. Between two
bodies it rests for `REST_PER_WORK` times as long as the first one took, so that a flood of large bodies gets at most
two fifths of the lock's time.

A caller whose limits have no room for any request is refused before its body is decompressed or decoded.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from maitred.api.compression import decompress
from maitred.api.fair_thread_pool import FairThreadPool
from maitred.core.context import RequestContext
from maitred.core.errors import BodyTooLarge, InvalidRequest
from maitred.core.tenancy import ANONYMOUS

T = TypeVar("T")

CheckLimits = Callable[[RequestContext, int], Awaitable[None]]
"""Checks whether the caller's limits have room for the smallest request with so many output tokens."""

LARGE_BODY_BYTES = 256 * 1024
"""Size above which a body is large. Smaller ones are decoded at once: even the worst takes only milliseconds."""
MAX_STRINGS = 100_000
"""Largest number of strings in a large body, keys of objects included; 25,000 messages have so many."""
MAX_VALUES = 1_200_000
"""Largest number of values; the longest list of token ids is somewhat shorter."""
_STEP_BYTES = 256 * 1024
REST_PER_WORK = 1.5
"""Rest behind a piece of work, as a multiple of the time that the work took."""


class WorkLimiter:
    """Context for pieces of work of one thread, each of which begins after a rest; see `REST_PER_WORK`.

    Args:
        clock: Returns the seconds of a clock.
        sleep: Sleeps for some seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._began_s = 0.0
        self._idle_until_s = 0.0

    def __enter__(self) -> None:
        left_s = self._idle_until_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        self._began_s = self._clock()

    def __exit__(self, *_: object) -> None:
        ended_s = self._clock()
        self._idle_until_s = ended_s + REST_PER_WORK * (ended_s - self._began_s)


class LargeBodyReader:
    """Decompresses and decodes large bodies, after the caller's limits were checked.

    Args:
        check_limits: Raises an error if the caller's limits have no room; None: no limits hold.
    """

    def __init__(self, check_limits: CheckLimits | None = None) -> None:
        self._check_limits = check_limits
        self._threads = FairThreadPool(1, "large-body")
        self._work_limiter = WorkLimiter()

    async def check(self, context: RequestContext, least_output: int | None) -> None:
        """Checks whether the caller's limits have room for the smallest request.

        Args:
            context: Context of the request.
            least_output: Fewest output tokens that a request of its route reserves; None: no limits hold for the route.

        Raises:
            LimitReached: There is no room.
        """
        if least_output is not None and self._check_limits is not None:
            await self._check_limits(context, least_output)

    async def run(self, context: RequestContext, cost_bytes: int, function: Callable[[], T]) -> T:
        """Runs a function in the thread when it is the caller's turn."""

        def run_limited() -> T:
            with self._work_limiter:
                return function()

        return await self._threads.run(context.principal or ANONYMOUS, cost_bytes, run_limited)

    async def decompress(
        self, body: bytes, coding: str, limit_bytes: int, context: RequestContext, least_output: int | None
    ) -> tuple[bytes, bool]:
        """Removes the coding of a body: at once if it is small without it, otherwise in the thread.

        Args:
            body: The compressed body.
            coding: One that `read_coding` returns.
            limit_bytes: Largest size of the body without its coding.
            context: Context of the request.
            least_output: See `check`.

        Returns:
            The body without its coding, and whether the limits were checked, which is done once per request.

        Raises:
            LimitReached: The body is large, and the caller's limits have no room for any request.
            BodyTooLarge: The body is longer than `limit_bytes`.
            InvalidRequest: The body does not have this coding.
        """
        if len(body) <= LARGE_BODY_BYTES:
            with suppress(BodyTooLarge):
                return decompress(body, coding, min(limit_bytes, LARGE_BODY_BYTES)), False
        await self.check(context, least_output)
        text = await self.run(context, limit_bytes, partial(decompress, body, coding, limit_bytes))
        return text, least_output is not None


class LargeBody:
    """Large body of a request, which is decoded beside the event loop.

    Args:
        body: The body.
        context: Context of its request.
        reader: Decodes it.
        least_output: Fewest output tokens that a request of its route reserves; None: no limits hold for the route.
    """

    def __init__(
        self, body: bytes, context: RequestContext, reader: LargeBodyReader, least_output: int | None = None
    ) -> None:
        self._body = body
        self._context = context
        self._reader = reader
        self._least_output = least_output

    async def decode(self, decode: Callable[..., T], **options: Any) -> T:  # noqa: ANN401 - those of `decode`
        """Returns what `decode` makes of the body and the options.

        Raises:
            LimitReached: The caller's limits have no room for any request.
            InvalidRequest: The body has too many strings or values, or `decode` raises it.
        """
        await self._reader.check(self._context, self._least_output)

        def check_and_decode() -> T:
            check_count(self._body)
            return decode(self._body, **options)

        return await self._reader.run(self._context, len(self._body), check_and_decode)


def check_count(body: bytes) -> None:
    """Checks the number of strings and values in a body of JSON, whether or not it is valid.

    Raises:
        InvalidRequest: There are too many.
    """
    quotes = commas = start = 0
    while start < len(body):
        piece = body[start : start + _STEP_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the step would cut an escape
            piece = body[start : start + _STEP_BYTES + 1]
        start += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        commas += b"".join(parts[quotes % 2 :: 2]).count(b",")  # every other part is outside of strings
        quotes += len(parts) - 1
        if quotes > 2 * MAX_STRINGS:
            raise InvalidRequest(
                f"The body has more than {MAX_STRINGS:,} strings, keys included. Send fewer messages, parts, "
                "keys or tools."
            )
        if commas > MAX_VALUES:
            raise InvalidRequest(f"The body has more than {MAX_VALUES:,} values. Send shorter lists.")
