"""Command `maitred serve`: opens the resources, makes the gateway, and serves until a signal comes.

    signals -> Shutdown -> InFlightLimiter <- GatewayApp <- HttpServer <- clients
            `-> Reloader -> ConfigGeneration

The HTTP server listens before the engine is ready: an early client gets a 503 with a retry time, and a probe sees that
the process is alive but not ready.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from rich.console import Console
from rich.markup import escape

from maitred.api.http.server import HttpServer
from maitred.app.address import format_url
from maitred.app.assembly.services import GatewayResources, open_resources
from maitred.app.banner import announce, announce_on_demand, announce_upstreams, show_key
from maitred.app.gateway import open_gateway
from maitred.app.models.encoder import EncoderModels
from maitred.app.reload import Read, Reloader
from maitred.app.runtime import tune_gc
from maitred.app.shutdown import Shutdown
from maitred.app.workers.controller_server import WorkerSessions, accept_workers
from maitred.app.workers.ipc import IpcFolder
from maitred.config.loader import LoadedConfig
from maitred.core.clock import Clock
from maitred.fleet.pool import ReplicaPool


async def serve(
    loaded: LoadedConfig,
    read: Read,
    listener: socket.socket,
    pool: ReplicaPool | None,
    clock: Clock,
    ipc: IpcFolder | None = None,
) -> int:
    """Serves until a signal comes; called by `maitred.app.start`.

    Args:
        loaded: The configuration.
        read: Reads the configuration again.
        listener: The bound socket.
        pool: Replicas of the `model` section, whose start has begun; None: only upstream servers run models.
        clock: The clock of all parts.
        ipc: Directory in which API workers find this process, which is then their controller; None: there are no
            workers.

    Returns:
        The exit code: 0 after a drain, also if it had to cut answers short.

    Raises:
        ConfigInvalid: A setting refers to something that cannot be used.
        ReplicaUnavailable: The engine did not start; the message holds its last lines of output.
    """
    console = Console()
    config, reloader = loaded.config, Reloader(loaded, read, clock)
    async with (
        _accept_workers(ipc) as worker_sessions,
        open_resources(config, pool, clock, partial(show_key, console), worker_sessions.surviving_work) as resources,
        open_gateway(config, resources, reloader, clock, ipc) as gateway,
    ):
        server = HttpServer(
            gateway.application,
            stall_grace_s=config.server.stall_grace_s,
            path=None if ipc is None else ipc.controller_http_socket,
        )
        shutdown = Shutdown(gateway.in_flight, config.server.drain_grace_s)
        gateway.watch(lambda config: server.reconfigure(gateway.application, config.server.stall_grace_s))
        gateway.watch(lambda config: shutdown.reconfigure(config.server.drain_grace_s))
        await gateway.controller.open(worker_sessions, resources.stores.ledger.surviving_ids)
        with shutdown.on_signals(), reloader.on_signals():
            sockets = [listener] if ipc is None else None
            serving = asyncio.create_task(server.serve(sockets=sockets), name="http server")
            serving.add_done_callback(lambda _: shutdown.request())
            loading = "".join(f"; {escape(name)} is being loaded" for name in gateway.registry.starting)
            console.print(f"Listening at {format_url(listener)}{loading}.", highlight=False)
            if config.console.enabled:
                console.print(f"The console is at {format_url(listener)}/console.", highlight=False)
            try:
                if ipc is not None:
                    gateway.watch(lambda config: ipc.notify_config_changed())
                    ipc.notify_ready()
                await _announce_when_ready(console, format_url(listener), resources, shutdown)
                await shutdown.wait_requested()
                await shutdown.drain()
                await gateway.controller.close()
            finally:
                server.stop(at_once=shutdown.forced)
                await asyncio.wait([serving])
        serving.result()
    return 0


@asynccontextmanager
async def _accept_workers(ipc: IpcFolder | None) -> AsyncIterator[WorkerSessions]:
    """Accepts the workers, if there are any; those that had an earlier controller have connected already."""
    if ipc is None:
        yield WorkerSessions()
        return
    async with accept_workers(ipc.controller_ipc_socket) as worker_sessions:
        await worker_sessions.wait_connected(ipc.worker_pids)
        yield worker_sessions


async def _announce_when_ready(console: Console, url: str, resources: GatewayResources, shutdown: Shutdown) -> None:
    """Announces the served models, each kind as soon as it is ready.

    Raises:
        ReplicaUnavailable: No engine can start, or the encoder cannot start.
    """
    local, on_demand, upstreams = resources.local, resources.on_demand, resources.upstreams
    if upstreams.models:
        announce_upstreams(console, url, upstreams.models, first=local is None)
    if on_demand.models:
        announce_on_demand(console, url, on_demand.models, first=local is None and not upstreams.models)
    if await _is_up(resources.pool, resources.encoders, shutdown):
        tune_gc()
        if local is not None:
            announce(console, url, local.name, local.model.card())


async def _is_up(pool: ReplicaPool | None, encoders: EncoderModels, shutdown: Shutdown) -> bool:
    """Waits until an engine and the encoder are ready; False if the shutdown was requested before that.

    Raises:
        ReplicaUnavailable: No engine can start, or the encoder cannot start.
    """

    async def wait_ready() -> None:
        if pool is not None:
            await pool.wait_started()
        await encoders.wait_all_started()

    starting = asyncio.create_task(wait_ready(), name="engine start")
    stopping = asyncio.create_task(shutdown.wait_requested(), name="shutdown request")
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        return starting.done()
    finally:
        starting.cancel()
        stopping.cancel()
