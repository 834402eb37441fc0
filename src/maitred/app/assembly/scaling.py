"""Assembly of the scalers: which models' replicas follow the demand, and under which name this gateway decides."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from maitred.app.scaling.lease import LeaseClaim
from maitred.app.scaling.scaler import ModelScaler
from maitred.app.scaling.shared_demand import SharedDemand
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.core.ids import new_object_id
from maitred.dispatch.dispatcher import Dispatcher
from maitred.fleet.pool import ReplicaPool
from maitred.store.location import data_folder, make_folder
from maitred.store.scaling.demand import DemandExchange
from maitred.store.scaling.lease import ScalerLeases

_NAMES_FILE = "gateway.names"


def make_scalers(
    config: Config,
    pools: Mapping[str, ReplicaPool],
    dispatchers: Mapping[str, Dispatcher],
    leases: ScalerLeases,
    exchange: DemandExchange,
    clock: Clock,
) -> dict[str, ModelScaler]:
    """Makes the scalers of the models whose number of replicas follows the demand; `ModelScaler.run` starts one.

    The replicas of the `model` section belong to one gateway, so each gateway has a lease of its own for them. Its name
    stays with the data folder, so an override outlives the process, the container and the machine. Replicas on Ray
    belong to all gateways of their Serve application, which share one lease, and their demand, if they share the
    database.

    Raises:
        ConfigInvalid: The data folder cannot be read or written.
    """
    if not config.model.autoscaling.enabled:
        return {}
    gateway, owner, former_owner = name_process(data_folder(config.store))
    scalers = dict[str, ModelScaler]()
    for model, pool in pools.items():
        shared_pool = _shared_pool(config)
        name = shared_pool or f"{model}@{gateway}"
        scalers[model] = ModelScaler(
            pool,
            dispatchers[model],
            lease=LeaseClaim(leases, name, owner, clock, former_owner=former_owner),
            config=config.model.autoscaling,
            clock=clock,
            shared=SharedDemand(exchange, name, owner, clock) if shared_pool else None,
        )
    return scalers


def _shared_pool(config: Config) -> str | None:
    """Returns the name of the pool that other gateways share; None: there is none."""
    return f"{config.ray.application}@{config.ray.address}" if config.model.backend == "ray" else None


def name_process(folder: Path) -> tuple[str, str, str]:
    """Gives this process a name, and writes it to the data folder that it holds.

    The folder may be a copy that another gateway uses, too. So the name of the gateway alone does not tell who decides.

    Returns:
        Name of the gateway, which stays with the folder; name of this process; name of the process that had the folder
        before, which is gone, or "".

    Raises:
        ConfigInvalid: The file of the names cannot be read or written.
    """
    file, names = folder / _NAMES_FILE, list[str]()
    make_folder(folder)
    try:
        with suppress(FileNotFoundError):
            names = file.read_text(encoding="utf-8").split()
        gateway = names[0] if names else new_object_id("gateway")
        owner = new_object_id("process")
        temporary_file = file.with_name(f"{_NAMES_FILE}.new")
        temporary_file.write_text(f"{gateway}\n{owner}\n", encoding="utf-8")
        temporary_file.replace(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{file} cannot be read or written: {error}. It has the name of this gateway.") from None
    return gateway, owner, names[1] if len(names) > 1 else ""
