"""Traps of engines on Ray: what a configuration and a cluster say about trouble to come."""

from collections.abc import Iterator

import msgspec

from maitred.core.errors import ReplicaUnavailable
from maitred.fleet.ray.config import RayConfig
from maitred.fleet.ray.serve_api import ServeApi, ServeApplication
from maitred.wire.loopback import is_loopback

FIRST_EPHEMERAL_PORT = 32768
"""Least port that Linux gives to whoever asks for any, unless ``ip_local_port_range`` says otherwise."""
LEAST_GRACE_S = 30.0
"""Time that the last answers of an engine should get."""


class RayTrap(msgspec.Struct, frozen=True, kw_only=True):
    """Trap: what will go wrong, how that is known, and what to do."""

    setting: str
    summary: str
    evidence: str
    remedy: str


def config_traps(config: RayConfig) -> Iterator[RayTrap]:
    """Yields the traps in the settings."""
    host = config.address.partition("//")[2].rpartition(":")[0] or config.address.partition("//")[2]
    if config.token is not None and config.address.startswith("http:") and not is_loopback(host.strip("[]")):
        yield RayTrap(
            setting="ray.address",
            summary="The cluster's token crosses the network in plain text, and whoever has it can run code there.",
            evidence=f"ray.token goes to {config.address}.",
            remedy="Put a proxy with TLS before the dashboard and name it with https://, or use a tunnel.",
        )
    last_port = config.replica.first_port + config.replica.max_replicas - 1
    if last_port >= FIRST_EPHEMERAL_PORT:
        yield RayTrap(
            setting="ray.replica.first_port",
            summary="Any outgoing connection may have the port of an engine when it starts.",
            evidence=f"The engines listen on ports up to {last_port}; Linux gives those from {FIRST_EPHEMERAL_PORT} to "
            "connections.",
            remedy=f"Choose first_port so that all ports are below {FIRST_EPHEMERAL_PORT}.",
        )
    if config.replica.stop_grace_s < LEAST_GRACE_S:
        yield RayTrap(
            setting="ray.replica.stop_grace_s",
            summary="Answers are broken off when Ray stops a replica by itself; they go on elsewhere, if somewhere.",
            evidence=f"An engine gets {config.replica.stop_grace_s:g} s for its last answers.",
            remedy=f"Set it to {LEAST_GRACE_S:g} or more.",
        )


async def cluster_traps(config: RayConfig) -> list[RayTrap]:
    """Asks the cluster, and returns the traps there."""
    try:
        async with ServeApi(config) as api:
            application = await api.application()
    except ReplicaUnavailable as failure:
        return [
            RayTrap(
                setting="ray.address",
                summary="Gateways cannot start: the cluster does not answer them.",
                evidence=failure.message,
                remedy="Name the address of its dashboard in ray.address, and its token in ray.token.",
            )
        ]
    if application is None:
        return [] if config.deploys else [_missing(config)]
    return list(application_traps(config, application))


def _missing(config: RayConfig) -> RayTrap:
    return RayTrap(
        setting="ray.deploys",
        summary="Gateways cannot start: the cluster has no application with the engines, and they may not deploy it.",
        evidence=f"There is no application {config.application} at {config.address}.",
        remedy="Deploy it (`serve deploy`), or set ray.deploys.",
    )


def application_traps(config: RayConfig, application: ServeApplication) -> Iterator[RayTrap]:
    """Yields the traps in an application as Serve describes it."""
    if config.replica.scaling == "external" and not application.external_scaler_enabled:
        yield RayTrap(
            setting="ray.replica.scaling",
            summary="The number of replicas stays as it is: Serve takes no targets from gateways.",
            evidence=f"The application {config.application} was deployed without external_scaler_enabled.",
            remedy="Deploy it with `external_scaler_enabled: true`, which `serve run` can only with a file.",
        )
    if config.replica.scaling == "policy" and application.deployed_app_config is None:
        yield RayTrap(
            setting="ray.replica.scaling",
            summary="The number of replicas stays as it is: there is no configuration that a gateway could change.",
            evidence=f"The application {config.application} was deployed without a file.",
            remedy="Deploy it with a file (`serve deploy`).",
        )
    deployments = {name: found for name, found in application.deployments.items() if found.port is not None}
    for name, found in deployments.items():
        grace_s = found.deployment_config.graceful_shutdown_timeout_s
        if grace_s < LEAST_GRACE_S:
            yield RayTrap(
                setting=name,
                summary="Answers are broken off when Ray stops this replica by itself.",
                evidence=f"Its graceful_shutdown_timeout_s is {grace_s:g}; answers should get {LEAST_GRACE_S:g} s.",
                remedy="Take the option out of the application's configuration.",
            )
    hosts = {actor.node_ip for found in deployments.values() for actor in found.replicas if actor.node_ip}
    dashboard = config.address.partition("//")[2].rpartition(":")[0]
    if not is_loopback(dashboard) and (loopback := sorted(filter(is_loopback, hosts))):
        yield RayTrap(
            setting="ray.address",
            summary="Gateways cannot connect to the engines, which listen for their own machine alone.",
            evidence=f"A node of the cluster calls itself {loopback[0]}.",
            remedy="Start Ray there with the address that others know it by (`ray start --node-ip-address`).",
        )
