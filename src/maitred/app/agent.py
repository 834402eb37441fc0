"""The agent of a machine: it owns engines there, and gateways elsewhere order more or fewer of them.

::

    maitred agent --dials--> gateways        who and where it is, what it has; orders of the one that decides
          |
       engines <--tokens, load: TCP-- gateways

The engines outlive gateways and lost connections, and end with the agent.
"""

import asyncio
import logging
import signal
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from maitred.config.tree import Config
from maitred.core.clock import SystemClock
from maitred.core.errors import ConfigInvalid
from maitred.engine.models.source import find_model
from maitred.fleet.agent.dialer import GatewayDialer
from maitred.fleet.agent.protocol import AgentHello
from maitred.fleet.agent.server import AgentServer
from maitred.fleet.agent.status import count_gpus
from maitred.fleet.backend import BackendFacts
from maitred.fleet.local import CommandFactory, LinkAddress, LocalEngine, engine_command
from maitred.fleet.local_backend import LocalBackend
from maitred.scaling.startup_times import StartKind
from maitred.wire.address import TcpAddress, parse_tcp
from maitred.wire.link.credentials import dialer_credentials, listener_credentials
from maitred.wire.loopback import is_loopback

_MAX_STARTS = 2
"""Most engines that start at a time on one machine."""
_NOTICE_S = 0.5
"""Time between the news that the agent leaves and the end of its engines: gateways send them nothing more then."""
_log = logging.getLogger(__name__)


class AgentOptions(Struct, frozen=True, kw_only=True):
    """Options of an agent: its machine and its gateways."""

    gateways: Sequence[TcpAddress]
    name: str
    listen_host: str
    """Name or number of this machine at which gateways reach its engines."""
    first_port: int
    """The first engine listens there, the next one on the next port."""
    max_replicas: int
    zone: str = ""
    usd_per_hour: float = 0.0
    """Price of one replica."""
    stop_grace_s: float = 35.0
    """Time for the answers that an engine still gives when it is stopped."""


async def run_agent(config: Config, options: AgentOptions, command: CommandFactory | None = None) -> int:
    """Runs the agent until SIGTERM or SIGINT comes, and its engines have given their answers.

    Args:
        config: The settings.
        options: What it is told beside them.
        command: Returns the command that starts an engine; None: that of this installation.

    Returns:
        The exit code.

    Raises:
        ConfigInvalid: There is no model where the settings say, or an address needs a secret or TLS.
    """
    clock = SystemClock()
    backend = make_backend(config, options, clock, command)
    gpus = count_gpus(config.engine.device)
    hello = AgentHello(name=options.name, region=config.region or "", zone=options.zone, gpus=gpus)
    server = AgentServer(backend, clock, hello)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopped.set)
    async with backend, GatewayDialer(server, options.gateways, config.engine_link):
        _log.info("The agent %s may run %d engines on %s.", options.name, options.max_replicas, options.listen_host)
        await stopped.wait()
        server.leave()
        await asyncio.sleep(_NOTICE_S)
        await _stop_all(backend)
    return 0


def make_backend(
    config: Config, options: AgentOptions, clock: SystemClock, command: CommandFactory | None
) -> LocalBackend:
    """Makes the backend of the engines of this machine, which listen for gateways.

    Raises:
        ConfigInvalid: There is no model where the settings say, or the address of the engines needs a secret or TLS.
    """
    folder, link = find_model(config.model.folder), config.engine_link
    first = parse_tcp(str(TcpAddress(options.listen_host, options.first_port)))  # names that cannot be are found now
    if is_loopback(options.listen_host) and not all(is_loopback(gateway.host) for gateway in options.gateways):
        raise ConfigInvalid(
            f"Gateways on other machines cannot reach engines at {options.listen_host}. Name this machine in "
            "--listen-host."
        )
    listener_credentials(first, link)  # raises now what every engine would
    credentials = dialer_credentials(first, link)
    engine = replace(config.engine, machine_share=config.engine.machine_share / options.max_replicas)
    start_command = command or engine_command(
        folder, engine, config.dispatch.service.weights, config.log, link=link, region=config.region
    )

    def make_engine(name: str) -> LocalEngine:
        used = {replica.engine.client.address for replica in backend.replicas().values() if replica.engine is not None}
        ports = range(options.first_port, options.first_port + options.max_replicas + len(used))
        addresses = (TcpAddress(options.listen_host, port) for port in ports)
        address = next(address for address in addresses if address not in used)
        return LocalEngine(
            start_command,
            clock=clock,
            silence_timeout_s=link.silence_timeout_s,
            stop_grace_s=options.stop_grace_s,
            expected_start_s=facts.expected_start_s,
            others_serve=lambda: backend.is_ready,
            retries_first=lambda: True,  # gateways see why it fails, and this agent serves them on
            listens_at=LinkAddress(address, credentials),
        )

    facts = BackendFacts(
        max_replicas=options.max_replicas,
        max_starts=_MAX_STARTS,
        start_kind=StartKind.WEIGHTS_CACHED,
        can_sleep=True,
        usd_per_hour=options.usd_per_hour,
    )
    backend = LocalBackend(make_engine, facts, f"{options.name}-{{}}".format, clock)
    return backend


async def _stop_all(backend: LocalBackend) -> None:
    """Stops all engines, and waits until they are gone."""
    changed = asyncio.Event()
    backend.on_change(changed.set)
    for name in list(backend.replicas()):
        backend.stop(name)
    while backend.replicas():
        changed.clear()
        await changed.wait()
