"""Engines of the `model` section: engines started here, or engines that run elsewhere.

In a gateway of several processes, one process owns the engines (see `maitred.app.workers.engine_host`), and the other
processes find them through its IPC directory.
"""

import asyncio
from pathlib import Path

from msgspec.structs import replace

from maitred.app.workers.ipc import IpcFolder
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.engine.models.digest import fingerprint_of
from maitred.engine.models.source import find_model
from maitred.fleet.sleepable_replica import EngineGroup
from maitred.fleet.local import CommandFactory, LocalEngine, engine_command, socket_address
from maitred.fleet.remote import FingerprintCheck, RemoteEngine, make_remote_engine


async def make_engines(
    config: Config, command: CommandFactory | None, clock: Clock, ipc: IpcFolder | None = None
) -> EngineGroup:
    """Makes the engines of the configured model; entering the returned group starts them.

    Args:
        config: The configuration.
        command: Returns the command that starts an engine; None: that of this installation.
        clock: The clock of the engines.
        ipc: Folder in which other processes find the engines that are started here; None: no other process uses
            them.

    Raises:
        ConfigInvalid: There is no model where the configuration says.
    """
    folder = find_model(config.model.folder)
    if config.model.attached:
        same = FingerprintCheck(await asyncio.to_thread(fingerprint_of, folder))
        engines = EngineGroup(
            {address: make_remote_engine(address, config.engine_link, same) for address in config.model.attached},
        )
    else:
        engines = _started_here(config, command or _command(config, folder), clock, ipc)
    return _make_group(engines, config)


def engines_in(ipc: IpcFolder, config: Config) -> EngineGroup:
    """Makes the group of engines that another process of this gateway runs."""
    silence_timeout_s = config.engine_link.silence_timeout_s
    engines = {
        name: RemoteEngine(socket_address(ipc.engine_folder(name)), silence_timeout_s=silence_timeout_s)
        for name in _names(config)
    }
    return _make_group(EngineGroup(engines), config)


def _make_group(engines: EngineGroup, config: Config) -> EngineGroup:
    for engine in engines.values():
        engine.client.pause_at_tokens = config.server.unread_tokens
    return engines


def _names(config: Config) -> list[str]:
    count = config.model.replicas
    return [f"local-{number}" for number in range(count)] if count > 1 else ["local"]


def _command(config: Config, folder: Path) -> CommandFactory:
    settings = replace(config.engine, machine_share=config.engine.machine_share / config.model.replicas)
    return engine_command(folder, settings, config.dispatch.service.weights, config.log)


def _started_here(config: Config, command: CommandFactory, clock: Clock, ipc: IpcFolder | None) -> EngineGroup:
    silence_timeout_s = config.engine_link.silence_timeout_s
    engines: EngineGroup = EngineGroup(
        {
            name: LocalEngine(
                command,
                clock=clock,
                silence_timeout_s=silence_timeout_s,
                others_serve=lambda: engines.is_ready,
                folder=None if ipc is None else ipc.engine_folder(name),
            )
            for name in _names(config)
        }
    )
    return engines
