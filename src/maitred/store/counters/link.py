"""The connection to Redis: one script is one round trip, many can be under way, and there is one way to fail.

All calls share one connection and are answered in the order in which they were made: Redis runs one script at a time
anyway, and what it says of this gateway's slices is never overtaken. Whatever goes wrong (no route, no answer in time,
a Redis that is loading, read-only or full) is `LinkLost`: the caller goes on without Redis. Nothing is tried again
here, because a call whose answer was lost may have been carried out.
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
_LONGEST = 8
"""A call may take so many times the timeout, as long as Redis answers others that came before it."""


class LinkLost(Exception):
    """Redis did not do what was asked, or it is not known whether it did."""


class LuaScript:
    """One of the scripts in `scripts/`, after the text that all of them share.

    Args:
        name: Its file without the ending.
    """

    def __init__(self, name: str) -> None:
        self.text = _text("common") + _text(name)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class RedisLink:
    """Calls scripts, while it is open.

    Args:
        url: Where Redis is.
        namespace: First part of every key.
        timeout_s: So long after it was heard of last, with a call under way, Redis counts as away.
    """

    def __init__(self, url: Secret, namespace: str, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._prefix = f"{{{namespace}}}"
        # The pool only reads the URL. What bounds the time is here: redis-py's own timeouts can swallow a cancellation
        # on Python 3.11, and know nothing of the other calls.
        self._new_connection: Callable[[], AbstractConnection] = ConnectionPool.from_url(
            url.reveal(), retry=Retry(NoBackoff(), 0), protocol=2, decode_responses=False, socket_timeout=None
        ).make_connection
        self._connection: AbstractConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._heard_s = 0.0

    async def open(self) -> None:
        """Connects anew.

        Raises:
            LinkLost: There is no Redis, or none that lets us in.
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
        """Fails what is under way, and disconnects."""
        self.fail(LinkLost("the connection was closed"))
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    def fail(self, error: LinkLost) -> None:
        """Fails what is under way and what comes, until it is opened again."""
        self._connection = None
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # Its caller may have left.

    async def call(self, script: LuaScript, arguments: Mapping[str, object]) -> list[Any]:
        """Runs a script.

        Raises:
            LinkLost: See the module.
        """
        payload = msgspec.msgpack.encode(arguments)
        try:
            answer = await self._send("EVALSHA", script.sha, payload)
        except NoScriptError:
            answer = await self._send("EVAL", script.text, payload)
        return msgspec.msgpack.decode(answer, type=list[Any])

    async def _send(self, command: str, script: str, payload: bytes) -> bytes:
        connection, loop = self._connection, asyncio.get_running_loop()
        if connection is None or not connection.is_connected:
            raise LinkLost("there is no connection")
        answer: asyncio.Future[bytes] = loop.create_future()
        sent_s = loop.time()
        if not self._waiting:
            self._heard_s = sent_s
        self._waiting.append(answer)
        try:
            await connection.send_packed_command(
                connection.pack_command(command, script, 1, self._prefix, payload), check_health=False
            )
            while not answer.done():
                silent_s = loop.time() - self._heard_s
                if silent_s >= self._timeout_s or loop.time() - sent_s >= self._timeout_s * _LONGEST:
                    raise LinkLost(f"no answer within {self._timeout_s} s")
                await asyncio.wait((answer,), timeout=self._timeout_s - silent_s)
                # An answer that came while this process was busy with other things is not late.
                for _ in range(3):
                    if not answer.done():
                        await asyncio.sleep(0)
            return answer.result()
        except NoScriptError:
            raise
        except (RedisError, OSError, RuntimeError, LinkLost) as error:
            # RuntimeError: uvloop's, for writing to a transport that it closed in this very turn.
            lost = error if isinstance(error, LinkLost) else LinkLost(str(error) or type(error).__name__)
            self.fail(lost)
            raise lost from error

    async def _read(self, connection: AbstractConnection) -> None:
        """Hands out answers, until the connection ends."""
        error = LinkLost("the connection ended")
        try:
            while True:
                outcome: Any
                try:
                    outcome = await connection.read_response(disconnect_on_error=False)
                except ResponseError as refusal:
                    outcome = refusal
                self._heard_s = asyncio.get_running_loop().time()
                answer = self._waiting.popleft()
                if answer.done():
                    continue
                if isinstance(outcome, Exception):
                    answer.set_exception(outcome)
                    answer.exception()
                else:
                    answer.set_result(bytes(outcome))
        except (RedisError, OSError) as problem:
            error = LinkLost(str(problem) or type(problem).__name__)
        finally:
            if self._connection is connection:
                self.fail(error)
            await connection.disconnect(nowait=True)


@cache
def _text(name: str) -> str:
    return (_SCRIPTS / f"{name}.lua").read_text()
