"""Accepts connections at a socket that several processes share, so that each gets its part."""

import asyncio
import logging
import socket
from collections.abc import Callable

_COURTESY_S = 100e-6
"""For each connection that a process has, it lets others go first so long, to the millisecond..."""
_MOST_S = 2e-3
"""...but not longer than this."""
_PART = 16
"""A process accepts one waiting connection at a time, and one more for every this many connections it has."""
_REST_S = 1.0
"""Pause after the system refused an accept, such as for want of file descriptors; asyncio pauses as long."""
_log = logging.getLogger(__name__)


class FairAcceptor:
    """Accepts connections after a delay that grows with the number of this process's connections.

    An event loop's own server accepts all waiting connections, so the process that wakes first in a burst gets all of
    them for as long as they are kept open, while other processes have none. Here, a process with fewer connections is
    faster; if a connection still waits after the delay, the other processes have no time for it.

    Args:
        listener: The listening socket.
        protocol: Makes the protocol of a connection.
        connections: Returns how many connections this process has.
    """

    def __init__(
        self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], connections: Callable[[], int]
    ) -> None:
        listener.setblocking(False)  # another process may be faster
        self._listener = listener
        self._protocol = protocol
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._coming: set[asyncio.Task[None]] = set()
        self._waiting: asyncio.TimerHandle | None = None
        self._watch()

    def close(self) -> None:
        """Stops accepting connections at the socket."""
        if self._waiting is not None:
            self._waiting.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Waits until the connections that were accepted have their protocols, which then belong to the server."""
        await asyncio.gather(*self._coming)

    def _watch(self) -> None:
        self._waiting = None
        self._loop.add_reader(self._listener, self._on_readable)

    def _on_readable(self) -> None:
        self._loop.remove_reader(self._listener)
        courtesy_s = min(_MOST_S, (self._connections() + len(self._coming)) * _COURTESY_S)
        self._waiting = self._loop.call_later(courtesy_s, self._take)

    def _take(self) -> None:
        try:
            for _ in range(1 + self._connections() // _PART):
                self._accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass  # another process has accepted it, or the client has left
        except OSError as error:
            _log.error("No connection can be taken for %g s: %s.", _REST_S, error)
            self._waiting = self._loop.call_later(_REST_S, self._watch)
            return
        self._watch()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        task = self._loop.create_task(self._admit(connection), name="connection")
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    async def _admit(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:
            connection.close()  # the client has left
