"""The engines of the `model` section: started here, or found where they run."""

import asyncio
from pathlib import Path

from msgspec.structs import replace

from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.engine.models.digest import digest_of
from maitred.engine.models.source import find_model
from maitred.fleet.attached import attached
from maitred.fleet.engines import Engines
from maitred.fleet.local import Command, LocalEngine, engine_command
from maitred.fleet.same_model import SameModel


async def make_engines(config: Config, command: Command | None, clock: Clock) -> Engines:
    """All of them; enter what comes back to start them.

    Args:
        config: The settings.
        command: Starts an engine; None: that of this installation.
        clock: For them.

    Raises:
        ConfigInvalid: No model is where the configuration says.
    """
    folder = find_model(config.model.folder)
    if config.model.attached:
        same = SameModel(await asyncio.to_thread(digest_of, folder))
        engines = Engines(
            {address: attached(address, config.engine_link, same) for address in config.model.attached},
        )
    else:
        engines = _started_here(config, command or _command(config, folder), clock)
    for engine in engines.values():
        engine.link.unread_tokens = config.server.unread_tokens
    return engines


def _command(config: Config, folder: Path) -> Command:
    each = replace(config.engine, machine_share=config.engine.machine_share / config.model.replicas)
    return engine_command(folder, each, config.dispatch.service.weights, config.log)


def _started_here(config: Config, command: Command, clock: Clock) -> Engines:
    count = config.model.replicas
    names = [f"local-{number}" for number in range(count)] if count > 1 else ["local"]
    silence_timeout_s = config.engine_link.silence_timeout_s
    engines: Engines = Engines(
        {
            name: LocalEngine(
                command, clock=clock, silence_timeout_s=silence_timeout_s, others_serve=lambda: engines.ready
            )
            for name in names
        }
    )
    return engines
