"""Connection to Redis: each script call is one round trip, and every failure raises `LinkLost`.

All calls share one connection, and Redis answers them in the order of the calls: Redis runs only one script at a time
in any case, and no reply about the slices of this gateway arrives after a newer one. Any failure (no route, no reply in
time, or a Redis that is loading, read-only or full) raises `LinkLost`, and the caller continues without Redis. This
module never retries a call, because Redis may have executed a call whose reply was lost.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from maitred.core.errors import ConfigInvalid
from maitred.core.secret import Secret

try:
    from redis.asyncio.connection import AbstractConnection, ConnectionPool
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import NoScriptError, RedisError, ResponseError
except ModuleNotFoundError:
    raise ConfigInvalid("counters.url needs the client of Redis. Install it: pip install 'maitred[redis]'") from None

_SCRIPTS = resources.files(__package__) / "scripts"
_MAX_TIMEOUTS = 8
"""Longest time of a call, as a number of timeouts, while Redis still answers earlier calls."""


class LinkLost(Exception):
    """Failure of Redis: a call was not executed, or its result is unknown."""


class LuaScript:
    """Script from the folder `scripts/`, preceded by the text that all scripts share.

    Args:
        name: Its file name without the extension.
    """

    def __init__(self, name: str) -> None:
        self.text = _read_script("common") + _read_script(name)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class RedisLink:
    """Connection that calls scripts while it is open.

    Args:
        url: Address of Redis.
        namespace: First part of every key.
        timeout_s: Longest time without a reply while calls wait; after it Redis counts as unreachable.
    """

    def __init__(self, url: Secret, namespace: str, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._prefix = f"{{{namespace}}}"
        # The connection pool is used only to parse the URL. This class enforces the timeouts itself: the timeouts of
        # redis-py can lose a cancellation on Python 3.11, and they do not consider the other calls.
        self._new_connection: Callable[[], AbstractConnection] = ConnectionPool.from_url(
            url.reveal(), retry=Retry(NoBackoff(), 0), protocol=2, decode_responses=False, socket_timeout=None
        ).make_connection
        self._connection: AbstractConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._pending: deque[asyncio.Future[bytes]] = deque()
        self._last_reply_s = 0.0

    async def open(self) -> None:
        """Connects to Redis, after closing any earlier connection.

        Raises:
            LinkLost: There is no Redis, or it rejects the connection.
        """
        await self.close()
        connection = self._new_connection()
        connect: Callable[[], Awaitable[None]] = connection.connect
        try:
            async with asyncio.timeout(self._timeout_s):
                await connect()
        except TimeoutError:
            await connection.disconnect(nowait=True)
            raise LinkLost(f"no connection within {self._timeout_s} s") from None
        except (RedisError, OSError) as error:
            await connection.disconnect(nowait=True)
            raise LinkLost(str(error) or type(error).__name__) from error
        self._connection = connection
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
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        while self._pending:
            reply = self._pending.popleft()
            if not reply.done():
                reply.set_exception(error)
                reply.exception()  # The caller may have stopped waiting.

    async def call(self, script: LuaScript, arguments: Mapping[str, object]) -> list[Any]:
        """Runs a script and returns its reply.

        Raises:
            LinkLost: Redis failed; see the module.
        """
        payload = msgspec.msgpack.encode(arguments)
        try:
            reply = await self._send("EVALSHA", script.sha, payload)
        except NoScriptError:
            reply = await self._send("EVAL", script.text, payload)
        return msgspec.msgpack.decode(reply, type=list[Any])

    async def _send(self, command: str, script: str, payload: bytes) -> bytes:
        connection, loop = self._connection, asyncio.get_running_loop()
        if connection is None or not connection.is_connected:
            raise LinkLost("there is no connection")
        reply: asyncio.Future[bytes] = loop.create_future()
        sent_s = loop.time()
        if not self._pending:
            self._last_reply_s = sent_s
        self._pending.append(reply)
        try:
            await connection.send_packed_command(
                connection.pack_command(command, script, 1, self._prefix, payload), check_health=False
            )
            while not reply.done():
                silent_s = loop.time() - self._last_reply_s
                if silent_s >= self._timeout_s or loop.time() - sent_s >= self._timeout_s * _MAX_TIMEOUTS:
                    raise LinkLost(f"no answer within {self._timeout_s} s")
                await asyncio.wait((reply,), timeout=self._timeout_s - silent_s)
                # A reply that arrived while this process was busy is not late.
                for _ in range(3):
                    if not reply.done():
                        await asyncio.sleep(0)
            return reply.result()
        except NoScriptError:
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
                result: Any
                try:
                    result = await connection.read_response(disconnect_on_error=False)
                except ResponseError as script_error:
                    result = script_error
                self._last_reply_s = asyncio.get_running_loop().time()
                reply = self._pending.popleft()
                if reply.done():
                    continue
                if isinstance(result, Exception):
                    reply.set_exception(result)
                    reply.exception()
                else:
                    reply.set_result(bytes(result))
        except (RedisError, OSError) as problem:
            error = LinkLost(str(problem) or type(problem).__name__)
        finally:
            if self._connection is connection:
                self.fail(error)
            await connection.disconnect(nowait=True)


@cache
def _read_script(name: str) -> str:
    return (_SCRIPTS / f"{name}.lua").read_text()
