"""`maitred serve`: opens what a gateway stands on, puts the gateway together, and serves until a signal comes.

    signals -> Shutdown -> Gate <- Edge <- HttpServer <- clients
            `-> Reloader -> Regime

The HTTP server listens before the engine is ready: whoever comes early gets a 503 that says when to come back, and a
probe sees the process alive but not ready.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from rich.console import Console
from rich.markup import escape

from maitred.api.http.server import HttpServer
from maitred.app.address import url_of
from maitred.app.assembly.services import GatewayResources, open_ground
from maitred.app.banner import announce, announce_on_demand, announce_upstreams, show_key
from maitred.app.gateway import open_gateway
from maitred.app.models.encoder import EncoderModels
from maitred.app.reload import Read, Reloader
from maitred.app.runtime.gc import collect_seldom
from maitred.app.shutdown import Shutdown
from maitred.app.workers.controller import PendingWorkers, open_lobby
from maitred.app.workers.ipc import IpcDirectory
from maitred.config.loader import LoadedConfig
from maitred.core.clock import Clock
from maitred.fleet.engines import LocalEngines


async def serve(
    loaded: LoadedConfig,
    read: Read,
    listener: socket.socket,
    engines: LocalEngines | None,
    clock: Clock,
    house: IpcDirectory | None = None,
) -> int:
    """Serves until a signal comes; called by `maitred.app.start`.

    Args:
        loaded: The settings.
        read: Reads them again.
        listener: Bound.
        engines: Of the `model` section, which have begun to start; None where only others run any model.
        clock: For everything.
        house: Where API workers find this process, which is their controller then; None: it has no workers.

    Returns:
        The exit code: 0 after a drain, also if it had to cut answers short.

    Raises:
        ConfigInvalid: A setting names what cannot be used.
        ReplicaUnavailable: The engine did not start; the message has its last words.
    """
    console = Console()
    config, reloader = loaded.config, Reloader(loaded, read, clock)
    async with (
        _visited(house) as lobby,
        open_ground(config, engines, clock, partial(show_key, console), lobby.outlived) as ground,
        open_gateway(config, ground, reloader, clock, house) as gateway,
    ):
        server = HttpServer(
            gateway.application,
            stall_grace_s=config.server.stall_grace_s,
            path=None if house is None else house.edge,
        )
        shutdown = Shutdown(gateway.gate, config.server.drain_grace_s)
        gateway.watch(lambda config: server.adopt(config.server.stall_grace_s))
        gateway.watch(lambda config: shutdown.adopt(config.server.drain_grace_s))
        await gateway.desk.open(lobby, ground.stores.ledger.carried)
        with shutdown.on_signals(), reloader.on_signals():
            sockets = [listener] if house is None else None
            serving = asyncio.create_task(server.serve(sockets=sockets), name="http server")
            serving.add_done_callback(lambda _: shutdown.request())
            loading = "".join(f"; {escape(name)} is being loaded" for name in gateway.roster.starting)
            console.print(f"Listening at {url_of(listener)}{loading}.", highlight=False)
            if config.console.enabled:
                console.print(f"The console is at {url_of(listener)}/console.", highlight=False)
            try:
                if house is not None:
                    gateway.watch(lambda config: house.changed())
                    house.ready()
                await _tell_when_ready(console, url_of(listener), ground, shutdown)
                await shutdown.requested()
                await shutdown.drain()
                await gateway.desk.close()
            finally:
                server.stop(at_once=shutdown.insisted)
                await asyncio.wait([serving])
        serving.result()
    return 0


@asynccontextmanager
async def _visited(house: IpcDirectory | None) -> AsyncIterator[PendingWorkers]:
    """Where API workers are, if there are any; those that had another controller before have come."""
    if house is None:
        yield PendingWorkers()
        return
    async with open_lobby(house.desk) as lobby:
        await lobby.gathered(house.workers)
        yield lobby


async def _tell_when_ready(console: Console, url: str, ground: GatewayResources, shutdown: Shutdown) -> None:
    """Says what is served, each sort of models as soon as it can be.

    Raises:
        ReplicaUnavailable: No engine can start, or the encoder cannot.
    """
    local, on_demand, upstreams = ground.local, ground.on_demand, ground.upstreams
    if upstreams.models:
        announce_upstreams(console, url, upstreams.models, first=local is None)
    if on_demand.models:
        announce_on_demand(console, url, on_demand.models, first=local is None and not upstreams.models)
    if await _is_up(None if local is None else local.engines, ground.encoders, shutdown):
        collect_seldom()
        if local is not None:
            announce(console, url, local.name, local.model.card())


async def _is_up(engines: LocalEngines | None, encoders: EncoderModels, shutdown: Shutdown) -> bool:
    """Waits until an engine is ready, and the encoder; False if we are told to stop before that.

    Raises:
        ReplicaUnavailable: No engine can start, or the encoder cannot.
    """

    async def started() -> None:
        if engines is not None:
            await engines.started()
        await encoders.started()

    starting = asyncio.create_task(started(), name="engine start")
    stopping = asyncio.create_task(shutdown.requested(), name="shutdown request")
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        return starting.done()
    finally:
        starting.cancel()
        stopping.cancel()
