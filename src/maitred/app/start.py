"""The first things that a gateway does: what may refuse it, then its engines, and only then all the rest of it.

    address, folder -> engine processes -> the gateway's own code -> stores, queues, HTTP
                           |                                                          |
                           +-- torch, weights, kernels ----------------> hello -------+

Both sides take seconds to import what they need, and each has its core for that. So this module, and what it imports,
stays light: every millisecond here is one that the engine's start waits. What can refuse this gateway comes before the
engines nevertheless: who may not serve from this folder must not take an accelerator's memory from who does.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import uvloop

from maitred.app.address import bind
from maitred.app.engines import make_engines
from maitred.config.loader import LoadedConfig
from maitred.core.clock import SystemClock
from maitred.fleet.local import Command
from maitred.observe.logs import set_up
from maitred.store.tenure import tenures

Read = Callable[[], LoadedConfig]


def run(loaded: LoadedConfig, command: Command | None = None, *, read: Read | None = None) -> int:
    """Serves until a signal comes.

    Args:
        loaded: The configuration.
        command: Starts the engine; by default the one of this installation. Tests bring their own.
        read: Reads the configuration again, for a reload; None: it stays as it is.

    Returns:
        The exit code: 0 after a drain, also if it had to cut answers short.

    Raises:
        ConfigInvalid: No model is where the configuration says, or the address is taken.
        ReplicaUnavailable: The engine did not start; the message has its last words.
    """
    set_up(loaded.config.log)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_start(loaded, command, read or (lambda: loaded)))


async def _start(loaded: LoadedConfig, command: Command | None, read: Read) -> int:
    config = loaded.config
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bind(config.server))
        await stack.enter_async_context(tenures(config.store, alone=config.counters.url is None))
        engines = None
        if config.has_engine:
            engines = await stack.enter_async_context(await make_engines(config, command, clock))
        # In a thread, because the loop has processes to start and to listen to meanwhile.
        serve = await asyncio.to_thread(_gateway)
        return await serve(loaded, read, listener, engines, clock)


def _gateway() -> Callable[..., Awaitable[int]]:
    # What modules bring stays, and need not be looked through for garbage again and again while they come.
    gc.disable()
    try:
        from maitred.app.serve import serve
    finally:
        gc.freeze()
        gc.enable()
    return serve
