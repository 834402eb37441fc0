"""Dialer of an agent: connections to all gateways that names stand for, which are made again whenever they end."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from maitred.core.backoff import BackoffCeiling
from maitred.fleet.agent.connection import STRANGER_S
from maitred.fleet.agent.server import AgentServer
from maitred.wire.address import TcpAddress
from maitred.wire.link.config import LinkConfig
from maitred.wire.link.credentials import Credentials, dialer_credentials
from maitred.wire.link.handshake import AGENT_LINK

_CHECK_S = 2.0
"""Time between two look-ups of a name while one of its addresses is not connected: a gateway may be back elsewhere."""
_CHECKS = 5
"""As many intervals pass between two look-ups while all are connected; gateways come and go behind a name."""
CONNECT_S = 2.0
"""Time limit of one attempt at an address: where a machine is gone, nothing answers, and the system waits minutes."""
_BACKOFF = BackoffCeiling(first_s=0.1, most_s=2.0)
"""Back-off of attempts. A gateway gives no order before it has been up for longer than the longest pause and attempt
together."""
_log = logging.getLogger(__name__)


class GatewayDialer:
    """Dialer of gateways. Entering starts to dial; leaving closes the connections.

    Args:
        server: The agent's end of each connection.
        gateways: Names, or numbers, and ports of gateways. All addresses of a name are dialed.
        link: Settings by which agents and gateways know each other.

    Raises:
        ConfigInvalid: A gateway is on another machine, and the settings have no secret or no TLS for it.
    """

    def __init__(self, server: AgentServer, gateways: Sequence[TcpAddress], link: LinkConfig) -> None:
        self._server = server
        self._credentials = {gateway: dialer_credentials(gateway, link, AGENT_LINK) for gateway in gateways}
        self._tasks: list[asyncio.Task[None]] = []
        self._connected: set[tuple[TcpAddress, str]] = set()
        """Gateways with the addresses at which there is a connection."""

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._dial_all(gateway, credentials), name=f"gateways at {gateway}")
            for gateway, credentials in self._credentials.items()
        ]
        for task in self._tasks:
            task.add_done_callback(_log_fault)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._server.close()

    async def _dial_all(self, gateway: TcpAddress, credentials: Credentials) -> None:
        """Keeps a connection to each address of a name."""
        kept: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                found = await _resolve(gateway)
                for host in found:
                    if host not in kept or kept[host].done():
                        line = self._keep(gateway, host, credentials)
                        kept[host] = asyncio.create_task(line, name=f"gateway at {host}")
                        kept[host].add_done_callback(_log_fault)
                for _ in range(_CHECKS):
                    await asyncio.sleep(_CHECK_S)
                    if not found or any((gateway, host) not in self._connected for host in found):
                        break
        finally:
            for task in kept.values():
                task.cancel()

    async def _keep(self, gateway: TcpAddress, host: str, credentials: Credentials) -> None:
        """Dials one address again and again, until its name has it no more."""
        loop = asyncio.get_running_loop()
        failures, told = 0, ""
        while not failures or host in await _resolve(gateway):
            ended = asyncio.Event()
            try:
                _, line = await loop.create_connection(
                    lambda: self._server.connect(ended.set, credentials),  # noqa: B023 - called before the next turn
                    sock=await _open_socket(host, gateway.port),
                    ssl=credentials.tls,
                    server_hostname=None if credentials.tls is None else gateway.host,
                    ssl_handshake_timeout=None if credentials.tls is None else STRANGER_S,
                )
            except ssl.SSLError as error:
                fault = f"TLS cannot be agreed on: {error}"
            except TimeoutError:
                fault = f"nothing answers there within {CONNECT_S:g} s"
            except (OSError, ValueError) as error:  # a name of which TLS can make nothing is a ValueError
                fault = getattr(error, "strerror", None) or str(error)
            else:
                began_s = loop.time()
                self._connected.add((gateway, host))
                try:
                    await ended.wait()
                finally:
                    self._connected.discard((gateway, host))
                fault = line.fault or "the connection has ended"
                if loop.time() - began_s > _BACKOFF.most_s and not line.fault:
                    failures = 0
            failures += 1
            if fault != told:
                told = fault
                _log.warning("No connection to the gateway at %s (%s): %s. Trying again.", gateway, host, fault)
            await asyncio.sleep(_BACKOFF.after(failures))


def _log_fault(task: asyncio.Task[None]) -> None:
    """Logs the exception that has ended a task, which should only be cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("The %s is dialed no longer.", task.get_name(), exc_info=error)


async def _open_socket(host: str, port: int) -> socket.socket:
    """Opens a socket to a number of a host, within `CONNECT_S`."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _resolve(gateway: TcpAddress) -> list[str]:
    """Returns all addresses of the name of a gateway; none while it cannot be resolved."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(gateway.host, gateway.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # a name that cannot be encoded is a ValueError
        _log.warning("The name of the gateway %s cannot be resolved: %s", gateway, error)
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
