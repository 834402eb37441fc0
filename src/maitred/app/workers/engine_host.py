"""The process that keeps the engines of the `model` section, so that they outlive the controller.

It starts them, starts them again and says how they end; it neither submits anything nor decides. The controller and
the workers know where they listen.
"""

import asyncio
import signal

from maitred.app.models.engines import make_engines
from maitred.app.workers.ipc import IpcDirectory
from maitred.config.tree import Config
from maitred.core.clock import SystemClock
from maitred.fleet.local import Command


async def keep(config: Config, command: Command | None, house: IpcDirectory) -> int:
    """Keeps them until SIGTERM comes.

    Args:
        config: The settings.
        command: Starts an engine; None: that of this installation.
        house: Where the others find them.

    Returns:
        The exit code.

    Raises:
        ReplicaUnavailable: None of them could start; the message has the last words of one.
    """
    engines = await make_engines(config, command, SystemClock(), house)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with engines:
        starting = asyncio.create_task(engines.started(), name="engine start")
        stopping = asyncio.create_task(stopped.wait(), name="end")
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        try:
            if not stopping.done():
                starting.result()
                await stopping
        finally:
            starting.cancel()
            stopping.cancel()
    return 0
