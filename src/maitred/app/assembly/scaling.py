"""Assembly of the scalers: which models' replicas follow the demand, and under which name this gateway decides."""

import socket
from collections.abc import Mapping

from maitred.app.scaling.lease import LeaseClaim
from maitred.app.scaling.scaler import ModelScaler
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.dispatch.dispatcher import Dispatcher
from maitred.fleet.pool import ReplicaPool
from maitred.store.database import data_folder
from maitred.store.scaling.lease import ScalerLeases


def make_scalers(
    config: Config,
    pools: Mapping[str, ReplicaPool],
    dispatchers: Mapping[str, Dispatcher],
    leases: ScalerLeases,
    clock: Clock,
) -> dict[str, ModelScaler]:
    """Makes the scalers of the models whose number of replicas follows the demand; `ModelScaler.run` starts one.

    The replicas of the `model` section belong to one gateway, so each gateway has a lease of its own for them. Its name
    stays the same from one process to the next: only one process can hold the data folder. Replicas on Ray belong to
    all gateways of their Serve application, which share one lease if they share the database.
    """
    if not config.model.autoscaling.enabled:
        return {}
    gateway = f"{socket.gethostname()}:{data_folder(config.store).resolve()}"
    return {
        model: ModelScaler(
            pool,
            dispatchers[model],
            lease=LeaseClaim(leases, _pool_name(config, model, gateway), gateway, clock),
            config=config.model.autoscaling,
            clock=clock,
        )
        for model, pool in pools.items()
    }


def _pool_name(config: Config, model: str, gateway: str) -> str:
    if config.model.backend == "ray":
        return f"{config.ray.application}@{config.ray.address}"
    return f"{model}@{gateway}"
