"""First steps of a gateway: the checks that can refuse it, then its engines, then everything else.

    address, folder -> engine processes -> the gateway's own code -> stores, queues, HTTP
                           |                                                          |
                           +-- torch, weights, kernels ----------------> hello -------+

The gateway and the engines both take seconds to import their code, and each has its own core for that. So this module
and its imports stay light: each millisecond here delays the start of the engine. Checks that can refuse this gateway
still run before the engines start: a gateway that may not use this data folder must not take accelerator memory from
the gateway that uses it.
"""

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial

import uvloop

from maitred.app.address import bind
from maitred.app.models.engines import make_agent_pool, make_pool
from maitred.app.runtime import limit_malloc_arenas
from maitred.app.workers.heartbeat import ProcessHeartbeat
from maitred.app.workers.ipc import IpcFolder, open_ipc
from maitred.app.workers.supervisor import CONTROLLER, ENGINE_HOST, ProcessMain, Supervisor
from maitred.config.loader import LoadedConfig
from maitred.config.tree import Config
from maitred.core.clock import SystemClock
from maitred.fleet.local import CommandFactory
from maitred.observe.logs import configure_logging
from maitred.store.data_lock import lock_data

Read = Callable[[], LoadedConfig]
_BACKLOG = 4096
"""Number of connections that the kernel accepts while every worker is busy."""


def run(loaded: LoadedConfig, command: CommandFactory | None = None, *, read: Read | None = None) -> int:
    """Serves until a signal comes.

    Args:
        loaded: The configuration.
        command: Returns the command that starts the engine; by default, that of this installation. Tests pass their
            own.
        read: Reads the configuration again for a reload; None: the configuration does not change.

    Returns:
        The exit code: 0 after a drain, also if it had to cut answers short.

    Raises:
        ConfigInvalid: There is no model where the configuration says, or the address is in use.
        ReplicaUnavailable: The engine did not start; the message holds its last lines of output.
    """
    configure_logging(loaded.config.log)
    limit_malloc_arenas()
    read = read or (lambda: loaded)
    with bind(loaded.config.server) as listener:
        if loaded.config.server.workers > 1:
            return _several(loaded, command, read, listener)
        return uvloop.run(_start(loaded, command, read, listener))


def _several(loaded: LoadedConfig, command: CommandFactory | None, read: Read, listener: socket.socket) -> int:
    """Runs a controller, its workers and an engine host, each in a process of its own."""
    in_force = loaded

    def read_again() -> None:
        nonlocal in_force
        in_force = read()

    def control(workers: Collection[int], heartbeat: ProcessHeartbeat) -> int:
        start = _start(in_force, command, read, listener, replace(ipc, worker_pids=workers))
        return uvloop.run(heartbeat.run(start))

    def keep(_: Collection[int], heartbeat: ProcessHeartbeat) -> int:
        from maitred.app.workers.engine_host import run_engine_host

        return uvloop.run(heartbeat.run(run_engine_host(loaded.config, command, ipc)))

    def work(number: int, _: Collection[int], heartbeat: ProcessHeartbeat) -> int:
        from maitred.app.workers.worker import run_worker

        return uvloop.run(heartbeat.run(run_worker(in_force.config, number, listener, ipc, SystemClock())))

    listener.listen(_BACKLOG)
    with _lock_data(loaded.config), open_ipc() as ipc:
        parts: dict[int, ProcessMain] = {
            number: partial(work, number) for number in range(1, loaded.config.server.workers + 1)
        }
        if loaded.config.has_engine and loaded.config.model.starts_here:
            parts[ENGINE_HOST] = keep
        return Supervisor({CONTROLLER: control, **parts}, read_again, _prepare).run()


def _lock_data(config: Config) -> AbstractContextManager[None]:
    """Locks the data folder, also for processes that are forked meanwhile."""
    return lock_data(config.store, exclusive=config.counters.url is None)


async def _start(
    loaded: LoadedConfig,
    command: CommandFactory | None,
    read: Read,
    listener: socket.socket,
    ipc: IpcFolder | None = None,
) -> int:
    config = loaded.config
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        if ipc is None:
            stack.enter_context(_lock_data(config))
        if config.store.url is not None:
            from maitred.store.database_lock import lock_database  # slow to import

            await stack.enter_async_context(lock_database(config.store, exclusive=config.counters.url is None))
        pool = None
        if config.has_engine:
            if ipc is None or not config.model.starts_here:
                pool = await make_pool(config, command, clock)
            else:
                pool = make_agent_pool(config, ipc, clock)
            await stack.enter_async_context(pool)
        # This import runs in a thread, because the event loop must start processes and listen to them meanwhile.
        serve = await asyncio.to_thread(_gateway)
        return await serve(loaded, read, listener, pool, clock, ipc)


def _prepare() -> None:
    import maitred.app.workers.worker  # noqa: F401

    _gateway()


def _gateway() -> Callable[..., Awaitable[int]]:
    # The objects that an import makes stay, so garbage collections during the import would be useless.
    gc.disable()
    try:
        from maitred.app.serve import serve
    finally:
        gc.freeze()
        gc.enable()
    return serve
