"""The process that owns the engine processes of the `model` section, so that they outlive the controller.

The engine host starts engines, restarts them and logs how they end; it neither submits requests nor decides. It is the
agent of the controller, which orders more engines or fewer. The first ones start before that.
"""

import asyncio
import signal

from maitred.app.models.engines import make_local_backend, replica_name
from maitred.app.workers.ipc import IpcFolder
from maitred.config.tree import Config
from maitred.core.clock import SystemClock
from maitred.fleet.agent.server import AgentServer
from maitred.fleet.local import CommandFactory


async def run_engine_host(config: Config, command: CommandFactory | None, ipc: IpcFolder) -> int:
    """Runs the engines until SIGTERM or SIGINT comes.

    Args:
        config: The settings.
        command: Starts an engine; None: the command of this installation.
        ipc: Has the folder in which the other processes find the engines.

    Returns:
        The exit code.

    Raises:
        ReplicaUnavailable: No engine could start; the message has the last output of one.
    """
    clock = SystemClock()
    backend = make_local_backend(config, command, clock, ipc)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopped.set)
    async with backend, AgentServer(backend, clock).listening(ipc.agent_socket):
        for number in range(config.model.replicas):
            backend.start(replica_name(config, number))
        start_task = asyncio.create_task(backend.wait_started(), name="engine start")
        stop_task = asyncio.create_task(stopped.wait(), name="end")
        await asyncio.wait([start_task, stop_task], return_when=asyncio.FIRST_COMPLETED)
        try:
            if not stop_task.done():
                start_task.result()
                await stop_task
        finally:
            start_task.cancel()
            stop_task.cancel()
    return 0
