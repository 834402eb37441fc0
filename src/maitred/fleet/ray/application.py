"""Serve application whose replicas own one engine process each.

A Ray user deploys it with ``serve run maitred.fleet.ray.application:app replicas=2 num_gpus=1``, or names it in a
configuration for ``serve deploy``, with external scaling. No other replicas run until a gateway (`maitred serve
--backend ray`) sets a target.

Handles to these deployments are of no use to callers: a replica has no method that answers requests. Tokens go from the
engine to the gateways over sockets of their own.
"""

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingContext

from maitred.fleet.ray.arguments import ApplicationArguments, make_engine, read_arguments
from maitred.fleet.ray.config import SLOT_PREFIX
from maitred.fleet.ray.serve_api import policy_scaling
from maitred.observe.config import LogConfig
from maitred.observe.logs import configure_logging

UNHEALTHY_AFTER_S = 60.0
"""Downtime of an engine after which its actor counts as unhealthy, so that Ray starts another, perhaps elsewhere."""
_STOP_POLL_S = 0.1
"""Interval at which Serve looks whether calls of a handle still run before it stops a replica; there are none."""
_SHUTDOWN_RESERVE_S = 10.0
"""Time for the end of the actor itself, beyond that of its engine."""


class EngineReplica:
    """Replica of a deployment. It starts an engine, and is ready when the engine is.

    An engine that dies is started again here, on the same address. When Serve stops the replica, the engine refuses new
    requests and gives its running answers first; when the actor is killed, the engine ends with it.

    Args:
        arguments: Arguments of the application.
        port: Port of the engine.
        others: Handles of the other deployments, which belong to the application by that.
    """

    async def __init__(self, arguments: ApplicationArguments, port: int, others: tuple[object, ...] = ()) -> None:  # type: ignore[misc]
        configure_logging(LogConfig())
        self._down_since_s: float | None = None
        self._engine = make_engine(arguments, ray.util.get_node_ip_address(), port)
        self._engine.on_transition = self._on_transition
        await self._engine.__aenter__()
        await self._engine.wait_started()

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Does nothing: the user configuration of a deployment shows gateways the port of its engine."""

    def check_health(self) -> None:
        """Raises RuntimeError if the engine has been down for long, with its last lines."""
        if self._down_since_s is not None and time.monotonic() - self._down_since_s > UNHEALTHY_AFTER_S:
            raise RuntimeError(f"The engine does not come back: {self._engine.failure_reason}")

    async def __del__(self) -> None:
        """Stops the engine; Serve awaits this before it ends the actor."""
        await self._engine.__aexit__(None, None, None)

    def _on_transition(self) -> None:
        if self._engine.client.is_ready:
            self._down_since_s = None
        elif self._down_since_s is None:
            self._down_since_s = time.monotonic()


def app(arguments: dict[str, Any]) -> serve.Application:
    """Builds the Serve application, with all its deployments.

    Args:
        arguments: Fields of `ApplicationArguments`; text that comes from a command line is converted.

    Raises:
        ConfigInvalid: There is no such argument, or its value is out of range.
    """
    read = read_arguments(arguments)
    first, *others = (_slot(read, number) for number in range(read.max_replicas))
    bound = tuple(deployment.bind(read, port) for deployment, port in others)
    deployment, port = first
    return deployment.bind(read, port, bound)


def pushed_target(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Policy for autoscaling: the target that a gateway has pushed, and no state.

    The target is the lower bound of the deployment, which Serve keeps in its checkpoints: a dead gateway leaves the
    fleet as it is. Serve's controller calls this in each turn of its loop.
    """
    return context.capacity_adjusted_min_replicas, {}


def _slot(arguments: ApplicationArguments, number: int) -> tuple[serve.Deployment, int]:
    """Makes the deployment of one replica, with the port of its engine."""
    port, target = arguments.first_port + number, int(number < arguments.replicas)
    scaling = {"autoscaling_config": policy_scaling(target)} if arguments.scaling == "policy" else {"num_replicas": 1}
    deployment = serve.deployment(EngineReplica).options(
        name=f"{SLOT_PREFIX}{number}",
        user_config={"port": port},
        max_ongoing_requests=1,
        graceful_shutdown_wait_loop_s=_STOP_POLL_S,
        graceful_shutdown_timeout_s=arguments.stop_grace_s + _SHUTDOWN_RESERVE_S,
        ray_actor_options={
            "num_cpus": arguments.num_cpus,
            "num_gpus": arguments.num_gpus,
            "resources": arguments.resources,
            **({"accelerator_type": arguments.accelerator_type} if arguments.accelerator_type else {}),
        },
        **scaling,
    )
    if arguments.scaling == "external":
        # Serve knows this number: an external scaler may set it. Only the public option refuses it.
        deployment._deployment_config.num_replicas = target
    return deployment, port
