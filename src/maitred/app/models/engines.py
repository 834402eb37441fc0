"""Replica pool of the `model` section: engines started here, or engines that run elsewhere.

In a gateway of several processes, one process owns the engines (see `maitred.app.workers.engine_host`), and the other
processes find them through its IPC directory.
"""

import asyncio
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from maitred.app.scaling.startup_file import StoredStartupTimes
from maitred.app.workers.ipc import IpcFolder
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.engine.models.digest import fingerprint_of
from maitred.engine.models.source import find_model
from maitred.fleet.agent.backend import AgentBackend
from maitred.fleet.agent.machine_backend import MachineBackend
from maitred.fleet.backend import BackendFacts, ReplicaBackend
from maitred.fleet.kubernetes.api import KubernetesApi
from maitred.fleet.kubernetes.backend import KubernetesBackend
from maitred.fleet.local import CommandFactory, LocalEngine, engine_command
from maitred.fleet.local_backend import LocalBackend
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.remote import FingerprintCheck, RemoteEngine, make_remote_engine
from maitred.scaling.startup_times import StartKind, StartupTimes
from maitred.store.location import data_folder
from maitred.wire.address import parse_address

MAX_REPLICAS = 64
"""Most engines of the model on one machine; more could not share its cores."""
_MAX_STARTS = 2
"""Most engines that start at a time on one machine, beyond those that start with the gateway."""


async def make_pool(config: Config, command: CommandFactory | None, clock: Clock) -> ReplicaPool:
    """Makes the pool of the configured model in a gateway of one process; entering it starts the replicas.

    Args:
        config: The configuration.
        command: Returns the command that starts an engine; None: that of this installation.
        clock: The clock of the engines.

    Raises:
        ConfigInvalid: There is no model where the configuration says.
    """
    if config.model.starts_here:
        return pool_of(make_local_backend(config, command, clock), config, clock)
    addresses = config.model.attached
    fingerprint_check = FingerprintCheck(await asyncio.to_thread(fingerprint_of, find_model(config.model.folder)))
    if config.model.backend == "ray":
        from maitred.app.models.ray_engines import make_ray_backend  # slow to import

        return pool_of(make_ray_backend(config, fingerprint_check, clock), config, clock)
    if config.model.backend == "kubernetes":
        pods = KubernetesBackend(
            KubernetesApi(config.kubernetes),
            make_engine=lambda address: make_remote_engine(address, config.engine_link, fingerprint_check.check),
            port=config.kubernetes.port,
            lease=config.kubernetes.lease,
            facts=BackendFacts(
                max_replicas=config.kubernetes.max_replicas,
                max_starts=config.kubernetes.max_replicas,
                expected_start_s=30.0,
                gpus_per_replica=config.kubernetes.gpus_per_replica,
                usd_per_hour=config.kubernetes.usd_per_hour,
            ),
            clock=clock,
        )
        return pool_of(pods, config, clock)
    if config.model.backend == "agents":
        backend = MachineBackend(
            config.agents,
            config.engine_link,
            make_engine=lambda address: make_remote_engine(
                parse_address(address), config.engine_link, fingerprint_check.check
            ),
            clock=clock,
            region=config.region or config.model.region or "",
        )
        return pool_of(backend, config, clock)
    facts = BackendFacts(max_replicas=len(addresses), max_starts=len(addresses), outlives_gateway=True)
    attached = LocalBackend(
        lambda address: make_remote_engine(parse_address(address), config.engine_link, fingerprint_check.check),
        facts,
        addresses.__getitem__,
        clock,
    )
    return pool_of(attached, config, clock, replicas=len(addresses))


def replica_name(config: Config, number: int) -> str:
    """Returns the name of the replica of this number; it stands in the ledger."""
    return f"local-{number}" if number or config.model.replicas > 1 else "local"


def make_agent_pool(config: Config, ipc: IpcFolder, clock: Clock) -> ReplicaPool:
    """Makes the pool of the configured model in a controller; the engine host starts and stops the replicas."""
    backend = AgentBackend(
        ipc.agent_socket,
        lambda address: RemoteEngine(parse_address(address), silence_timeout_s=config.engine_link.silence_timeout_s),
        facts=BackendFacts(max_replicas=MAX_REPLICAS, start_kind=StartKind.WEIGHTS_CACHED),
        name_of=partial(replica_name, config),
        clock=clock,
    )
    return pool_of(backend, config, clock)


def pool_of(backend: ReplicaBackend, config: Config, clock: Clock, replicas: int | None = None) -> ReplicaPool:
    """Makes a pool that has as many replicas at first as the configuration says, or as are named here."""
    pool = ReplicaPool(
        backend,
        DesiredReplicas(config.model.replicas if replicas is None else replicas),
        _startup_times(backend, config),
        clock,
    )
    pool.region = config.region or config.model.region
    pool.reconfigure(config.server.unread_tokens)
    return pool


def _startup_times(backend: ReplicaBackend, config: Config) -> StartupTimes:
    """Makes the start-up times of the model; decisions on the number of replicas need those of earlier runs."""
    if not config.model.autoscaling.enabled:
        return StartupTimes({backend.facts.start_kind: backend.facts.expected_start_s})
    return stored_startup_times(config, config.model.folder, backend.facts)


def stored_startup_times(config: Config, folder: Path, facts: BackendFacts) -> StoredStartupTimes:
    """Makes the start-up times of the model in a folder, which are kept from one run of the gateway to the next."""
    return StoredStartupTimes(
        data_folder(config.store) / "startup_times.json",
        str(folder.expanduser().absolute()),
        {facts.start_kind: facts.expected_start_s},
    )


def make_local_backend(
    config: Config, command: CommandFactory | None, clock: Clock, ipc: IpcFolder | None = None
) -> LocalBackend:
    """Makes the backend that starts engines of the configured model on this machine.

    Args:
        config: The configuration.
        command: Returns the command that starts an engine; None: that of this installation.
        clock: The clock of the engines.
        ipc: Folder in which other processes find the engines; None: no other process uses them.

    Raises:
        ConfigInvalid: There is no model where the configuration says.
    """
    folder = find_model(config.model.folder)

    def start_command(address: str) -> list[str]:
        if command is not None:
            return list(command(address))
        most = config.model.autoscaling.max_replicas if config.model.autoscaling.enabled else 1
        sharers = max(config.model.replicas, most, len(backend.replicas()))
        settings = replace(config.engine, machine_share=config.engine.machine_share / sharers)
        return list(engine_command(folder, settings, config.dispatch.service.weights, config.log)(address))

    def make_engine(name: str) -> LocalEngine:
        return LocalEngine(
            start_command,
            clock=clock,
            silence_timeout_s=config.engine_link.silence_timeout_s,
            expected_start_s=facts.expected_start_s,
            others_serve=lambda: backend.is_ready,
            retries_first=lambda: backend.has_started,
            listens_at=None if ipc is None else ipc.engine_folder(name),
        )

    facts = BackendFacts(
        max_replicas=MAX_REPLICAS,
        max_starts=_MAX_STARTS,
        start_kind=StartKind.WEIGHTS_CACHED,
        can_sleep=True,
    )
    backend = LocalBackend(make_engine, facts, partial(replica_name, config), clock)
    return backend
