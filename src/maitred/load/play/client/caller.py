"""Client of the load: sends a request as a user would, with retries, timeouts, hang-ups and stalls."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from maitred.load.measure.record import RequestRecord, UserOutcome
from maitred.load.play.client.answer import StreamRecorder, StreamTotals
from maitred.load.play.client.connection import ConnectionFailed, LoadConnection
from maitred.load.play.client.pool import ConnectionPool
from maitred.load.play.client.retry import delay_s, retries_status


@dataclass(frozen=True, slots=True)
class UserBehaviour:
    """Behaviour of one user beyond sending and reading.

    Attributes:
        leave_after_s: Time after sending at which the user hangs up; None: never.
        stall_after_s: Time after the response's head at which the user stops reading; None: never.
        stall_s: Time after which the user reads again.
    """

    leave_after_s: float | None = None
    stall_after_s: float | None = None
    stall_s: float = 0.0


PATIENT = UserBehaviour()
"""Behaviour of a user who reads to the end."""


class LoadClient:
    """Client that sends requests over the connections of a pool.

    Args:
        pool: Connection pool of the server.
        now_s: Returns the time of the run's clock.
        retries: How many times a failed request is sent again.
        timeout_s: Timeout of one attempt.
        rng: Random generator for the jitter of retries.
        traffic: Totals of the received data, for the live display.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        *,
        now_s: Callable[[], float],
        retries: int,
        timeout_s: float,
        rng: random.Random,
        traffic: StreamTotals,
    ) -> None:
        self._pool = pool
        self._now_s = now_s
        self._retries = retries
        self._timeout_s = timeout_s
        self._rng = rng
        self._traffic = traffic

    async def ask(
        self, record: RequestRecord, request: bytes, behaviour: UserBehaviour = PATIENT, *, keep_text: bool = False
    ) -> list[str]:
        """Sends the request until it has an outcome, fills the record, and returns the kept pieces of text.

        Cancelling the task closes the connection and leaves the outcome `UNFINISHED`.
        """
        while True:
            reader = await self._attempt(record, request, behaviour, keep_text)
            if record.status == 0:
                repeat = record.outcome in (UserOutcome.FAILED, UserOutcome.TIMED_OUT)
            else:
                repeat = record.status != 200 and retries_status(record.status, reader.headers)
            if not repeat or record.attempts > self._retries:
                record.text = reader.text if keep_text else None
                return reader.text
            await asyncio.sleep(delay_s(record.attempts - 1, reader.headers, self._rng, wall_s=time.time()))

    async def _attempt(
        self, record: RequestRecord, request: bytes, behaviour: UserBehaviour, keep_text: bool, *, new: bool = False
    ) -> StreamRecorder:
        """Sends the request once and fills the record with the result.

        A server may close a kept connection at the moment of its next use. This does not count as a failure: the
        request is sent again over a new connection at once. That is nobody's failure: the request goes out over a new
        one at once.
        """
        del record.arrivals_s[:]
        record.attempts += 1
        record.status = 0
        record.finish_reason = ""
        reader = StreamRecorder(record, self._traffic, keep_text=keep_text)
        connection: LoadConnection | None = None
        try:
            connection = await self._pool.take(new=new)
            async with asyncio.timeout(self._timeout_s):
                record.sent_s = self._now_s()
                ended = connection.request(request, reader)
                if behaviour is PATIENT:
                    await ended
                elif await _with_manners(ended, connection, reader, behaviour):
                    return self._close(record, reader, UserOutcome.CANCELLED, "")
            return self._close(record, reader, *reader.outcome())
        except ConnectionFailed as failure:
            if connection is not None and connection.used and record.status == 0 and not new:
                record.attempts -= 1
                return await self._attempt(record, request, behaviour, keep_text, new=True)
            outcome = UserOutcome.CUT if record.status == 200 else UserOutcome.FAILED
            return self._close(record, reader, outcome, reader.failure or str(failure))
        except TimeoutError:
            return self._close(record, reader, UserOutcome.TIMED_OUT, f"No end within {self._timeout_s:g} s.")
        finally:
            if connection is not None:
                self._pool.release(connection)

    def _close(self, record: RequestRecord, reader: StreamRecorder, outcome: UserOutcome, error: str) -> StreamRecorder:
        record.ended_s = self._now_s()
        record.outcome = outcome
        record.error = error
        return reader


async def _with_manners(
    ended: "asyncio.Future[None]", connection: LoadConnection, reader: StreamRecorder, behaviour: UserBehaviour
) -> bool:
    """Waits for the response with the user's behaviour; returns whether the user left before its end."""
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []
    if behaviour.stall_after_s is not None:

        def stall() -> None:
            connection.pause()
            timers.append(loop.call_later(behaviour.stall_s, connection.resume))

        reader.when_begun = lambda: timers.append(loop.call_later(behaviour.stall_after_s or 0.0, stall))
    try:
        async with asyncio.timeout(behaviour.leave_after_s) as patience:
            await ended
    except TimeoutError:
        if not patience.expired():
            raise
        return True
    finally:
        for timer in timers:
            timer.cancel()
    return False
