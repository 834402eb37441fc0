"""Connection to Redis: each call is one round trip, and every failure raises `LinkLost`.

All calls share one connection, and Redis answers them in the order of the calls: Redis runs only one command at a time
in any case, and no reply arrives after a newer one. Any failure (no route, no reply in time, or a Redis that is
loading, read-only or full) raises `LinkLost`, and the caller continues without Redis. This module never retries a call,
because Redis may have executed a call whose reply was lost.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from maitred.core.errors import ConfigInvalid
from maitred.core.secret import Secret

try:
    from redis.asyncio.connection import AbstractConnection, ConnectionPool
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import NoScriptError, RedisError, ResponseError
except ModuleNotFoundError:
    raise ConfigInvalid(
        "counters.url and cache.url need the client of Redis. Install it: pip install 'maitred[redis]'"
    ) from None

Word = str | bytes | int
"""Word of a command."""


class LinkLost(Exception):
    """Failure of Redis: a call was not executed, or its result is unknown."""


class ReplyDelay(LinkLost):
    """Failure of one call: its reply is late, and the link waits for it without another call."""


class _Call:
    """Commands that were sent together, and their replies."""

    def __init__(self, commands: int) -> None:
        self._commands = commands
        self._replies: list[Any] = []
        self.future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def add(self, reply: object) -> bool:
        """Adds the next reply; returns whether it is the last one."""
        self._replies.append(reply)
        if len(self._replies) < self._commands:
            return False
        error = next((reply for reply in self._replies if isinstance(reply, ResponseError)), None)
        if self.future.done():
            pass
        elif error is None:
            self.future.set_result(self._replies)
        else:
            self.fail(error)
        return True

    def fail(self, error: Exception) -> None:
        """Ends the call with an error."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # The caller may have stopped waiting.


class RedisLink:
    """Connection that sends commands while it is open.

    Args:
        url: Address of Redis.
        timeout_s: Longest time without a reply while calls wait; after it Redis counts as unreachable.
        most_timeouts: Longest time of a call, as a number of timeouts, while Redis still answers earlier calls.
        connect_timeout_s: Longest time of `open`.
        late_s: Longest time for which the connection stays behind a call that has timed out, until there is a reply. No
            call is sent meanwhile, and all fail with `ReplyDelay`. 0: the connection is closed at once.
    """

    def __init__(
        self,
        url: Secret,
        *,
        timeout_s: float,
        most_timeouts: int = 8,
        connect_timeout_s: float | None = None,
        late_s: float = 0.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._longest_s = timeout_s * most_timeouts
        self._connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._late_s = late_s
        self._late_since_s: float | None = None
        # The connection pool is used only to parse the URL. This class enforces the timeouts itself: the timeouts of
        # redis-py can lose a cancellation on Python 3.11, and they do not consider the other calls.
        self._new_connection: Callable[[], AbstractConnection] = ConnectionPool.from_url(
            url.reveal(), retry=Retry(NoBackoff(), 0), protocol=2, decode_responses=False, socket_timeout=None
        ).make_connection
        self._connection: AbstractConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._pending: deque[_Call] = deque()
        self._last_reply_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None and self._connection.is_connected

    @property
    def is_late(self) -> bool:
        """Whether a call has timed out and there was no reply since: every call would fail with `ReplyDelay`."""
        since_s = self._late_since_s
        return since_s is not None and asyncio.get_running_loop().time() - since_s < self._late_s

    async def open(self) -> None:
        """Connects to Redis, after closing any earlier connection.

        Raises:
            LinkLost: There is no Redis, or it rejects the connection.
        """
        await self.close()
        connection = self._new_connection()
        connect: Callable[[], Awaitable[None]] = connection.connect
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await connect()
            self._connection = connection
        except TimeoutError:
            raise LinkLost(f"no connection within {self._connect_timeout_s} s") from None
        except (RedisError, OSError) as error:
            raise LinkLost(str(error) or type(error).__name__) from error
        finally:
            if self._connection is None:
                await connection.disconnect(nowait=True)
        self._reader = asyncio.create_task(self._read(connection), name="redis answers")

    async def close(self) -> None:
        """Fails all pending calls, and disconnects."""
        self.fail(LinkLost("the connection was closed"))
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    def fail(self, error: LinkLost) -> None:
        """Fails all pending calls and later ones, until the link is opened again."""
        self._connection = None
        self._late_since_s = None
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        while self._pending:
            self._pending.popleft().fail(error)

    async def send(self, *commands: tuple[Word, ...]) -> list[Any]:
        """Sends commands in one round trip and returns a reply for each.

        Raises:
            LinkLost: Redis failed; see the module.
            ReplyDelay: The reply to this call, or to one before, is late.
            NoScriptError: Redis does not know the script that a command names.
        """
        connection, loop = self._connection, asyncio.get_running_loop()
        if connection is None or not connection.is_connected:
            raise LinkLost("there is no connection")
        if self.is_late:
            raise ReplyDelay("a reply is late")
        call = _Call(len(commands))
        sent_s = loop.time()
        if not self._pending:
            self._last_reply_s = sent_s
        self._pending.append(call)
        try:
            if self._late_since_s is not None:
                raise LinkLost(f"no answer within {self._late_s} s")
            async with asyncio.timeout(self._longest_s):  # for what does not fit into the buffer of the socket
                await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            while not call.future.done():
                silent_s = loop.time() - self._last_reply_s
                if silent_s >= self._timeout_s or loop.time() - sent_s >= self._longest_s:
                    if self._late_s:
                        call.future.cancel()
                        self._late_since_s = loop.time()
                        raise ReplyDelay(f"no answer within {self._timeout_s} s")
                    raise LinkLost(f"no answer within {self._timeout_s} s")
                await asyncio.wait((call.future,), timeout=self._timeout_s - silent_s)
                # A reply that arrived while this process was busy is not late.
                for _ in range(3):
                    if not call.future.done():
                        await asyncio.sleep(0)
            return call.future.result()
        except (NoScriptError, ReplyDelay):
            raise
        except (RedisError, OSError, RuntimeError, LinkLost) as error:
            # uvloop raises RuntimeError for a write to a transport that it closed in the same loop iteration.
            lost = error if isinstance(error, LinkLost) else LinkLost(str(error) or type(error).__name__)
            self.fail(lost)
            raise lost from error

    async def _read(self, connection: AbstractConnection) -> None:
        """Gives each reply to the call that waits for it, until the connection ends."""
        error = LinkLost("the connection ended")
        try:
            while True:
                reply: object
                try:
                    reply = await connection.read_response(disconnect_on_error=False)
                except ResponseError as rejection:
                    reply = rejection
                self._last_reply_s = asyncio.get_running_loop().time()
                self._late_since_s = None
                if self._pending[0].add(reply):
                    self._pending.popleft()
        except (RedisError, OSError) as problem:
            error = LinkLost(str(problem) or type(problem).__name__)
        finally:
            if self._connection is connection:
                self.fail(error)
            await connection.disconnect(nowait=True)
