"""Reads large request bodies beside the event loop.

The decoder holds Python's interpreter lock for the whole of a body, so a thread alone would not help: a body of 7 MB
with half a million keys holds everybody up for more than a second. What costs time is the number of objects, not the
number of bytes. So the strings and values of a large body are counted first, in short steps that let the event loop run
in between, and a body with too many is refused. The rest is decoded and checked in the same thread. There is one such
thread: with several, the event loop would wait for its turn behind all of them. Between two bodies it rests for as long
as the first one took, so that a flood of large bodies gets at most half of the lock's time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from maitred.admission.policy.refusal import span, whose
from maitred.core.context import RateLimitStatus, RequestContext
from maitred.core.errors import InvalidRequest, RateLimited
from maitred.core.limits import LimitKind

T = TypeVar("T")

LARGE_BODY_BYTES = 256 * 1024
"""Size above which a body is large. Smaller ones are decoded at once: even the worst takes only milliseconds."""
MAX_STRINGS = 100_000
"""Largest number of strings in a large body, keys of objects included; 25,000 messages have so many."""
MAX_VALUES = 1_200_000
"""Largest number of values; the longest list of token ids is somewhat shorter."""
_STEP_BYTES = 256 * 1024
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-body")


class WorkLimiter:
    """Context for pieces of work of one thread, each of which begins after a rest as long as the work before it.

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
        self._rested_s = 0.0

    def __enter__(self) -> None:
        left_s = self._rested_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        self._began_s = self._clock()

    def __exit__(self, *_: object) -> None:
        ended_s = self._clock()
        self._rested_s = ended_s + (ended_s - self._began_s)


_limiter = WorkLimiter()


def check_rate(status: RateLimitStatus | None) -> None:
    """Checks whether the caller's rate has room for a request, before its large body is decoded.

    Raises:
        RateLimited: There is no room.
    """
    reading = None if status is None else status.requests
    if status is None or reading is None or reading.remaining >= 1:
        return
    # The counter refills evenly.
    wait_s = reading.reset_s * (1 - reading.remaining) / max(1, reading.capacity - reading.remaining)
    raise RateLimited(
        f"Rate limit reached: {whose(status.subject)} may send {status.value:,} requests per minute, and they are used "
        f"up. Come back in {span(wait_s)}.",
        subject=status.subject,
        limit=LimitKind.REQUESTS_PER_MINUTE.value,
        value=status.value,
        reading=reading,
        retry_after_s=wait_s,
    )


class LargeBody:
    """Large body of a request, which is decoded beside the event loop.

    Args:
        body: The body.
        context: Context of its request.
        rate_limit_status: Returns how far the caller's limits are used.
    """

    def __init__(
        self,
        body: bytes,
        context: RequestContext,
        rate_limit_status: Callable[[RequestContext], Awaitable[RateLimitStatus | None]],
    ) -> None:
        self._body = body
        self._context = context
        self._rate_limit_status = rate_limit_status

    async def decode(self, decode: Callable[..., T], **options: Any) -> T:  # noqa: ANN401 - those of `decode`
        """Returns what `decode` makes of the body and the options.

        Raises:
            RateLimited: The caller's rate has no room for a request.
            InvalidRequest: The body has too many strings or values, or `decode` raises it.
        """
        check_rate(await self._rate_limit_status(self._context))

        def check_and_decode() -> T:
            with _limiter:
                check_count(self._body)
                return decode(self._body, **options)

        return await asyncio.get_running_loop().run_in_executor(_thread, check_and_decode)


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
