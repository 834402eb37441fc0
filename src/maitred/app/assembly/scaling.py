"""Assembly of the scalers: which models' replicas follow the demand, and under which name this gateway decides."""

import fcntl
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from maitred.app.scaling.forecast_file import ForecastFile
from maitred.app.scaling.lease import LeaseClaim
from maitred.app.scaling.scaler import ModelScaler
from maitred.app.scaling.shared_demand import SharedDemand
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.core.ids import new_object_id
from maitred.dispatch.dispatcher import Dispatcher
from maitred.fleet.kubernetes.backend import KubernetesBackend
from maitred.fleet.kubernetes.leases import KubernetesLeases
from maitred.fleet.pool import ReplicaPool
from maitred.store.location import data_folder, make_folder
from maitred.store.scaling.demand import DemandExchange
from maitred.store.scaling.lease import ScalerLeases

_NAMES_FILE = "gateway{}.names"


@contextmanager
def make_claims(
    config: Config, pools: Mapping[str, ReplicaPool], leases: ScalerLeases, clock: Clock
) -> Iterator[dict[str, LeaseClaim]]:
    """Makes the claims on the leases of the pools that need one, under names that are theirs in the block.

    The replicas of the `model` section belong to one gateway, so each gateway has a lease of its own for them. Its name
    stays with the data folder, so an override outlives the process, the container and the machine. Replicas on Ray
    belong to all gateways of their Serve application, those of agents to all gateways of their region, and pods to all
    gateways of their Deployment. Such gateways share one lease, and their demand, if they share the database; the lease
    of a Deployment is in the cluster. Agents and Deployments get orders of the holder alone, so their pool needs a
    lease also where nobody scales it.

    Raises:
        ConfigInvalid: The data folder cannot be read or written.
    """
    claims = dict[str, LeaseClaim]()
    with ExitStack() as stack:
        if config.model.autoscaling.enabled or config.model.backend in ("agents", "kubernetes"):
            gateway, process, former_process = stack.enter_context(name_process(data_folder(config.store)))
            for model, pool in pools.items():
                name = _shared_pool(config, model) or f"{model}@{gateway}"
                store = leases
                if isinstance(pool.backend, KubernetesBackend):
                    store = KubernetesLeases(leases.database, clock, pool.backend.api, config.kubernetes.lease)
                claims[model] = LeaseClaim(store, name, process, clock, former_owner=former_process)
        yield claims


def make_scalers(
    config: Config,
    pools: Mapping[str, ReplicaPool],
    dispatchers: Mapping[str, Dispatcher],
    claims: Mapping[str, LeaseClaim],
    exchange: DemandExchange,
    clock: Clock,
) -> dict[str, ModelScaler]:
    """Makes the scalers of the models whose number of replicas follows the demand; `ModelScaler.run` starts one."""
    if not config.model.autoscaling.enabled:
        return {}
    forecasts = data_folder(config.store) / "forecasts"
    return {
        model: ModelScaler(
            pool,
            dispatchers[model],
            lease=claims[model],
            config=config.model.autoscaling,
            clock=clock,
            shared=(
                SharedDemand(exchange, claims[model].lease.pool, claims[model].owner, clock)
                if _shared_pool(config, model)
                else None
            ),
            forecast_file=ForecastFile(forecasts, claims[model].lease.pool, clock),
        )
        for model, pool in pools.items()
    }


def _shared_pool(config: Config, model: str) -> str | None:
    """Returns the name of the pool that other gateways share; None: there is none."""
    match config.model.backend:
        case "ray":
            return f"{config.ray.application}@{config.ray.address}"
        case "agents":
            return f"{model}@{config.region or config.model.region or 'agents'}"
        case "kubernetes":
            return f"{config.kubernetes.namespace or ''}/{config.kubernetes.deployment}@kubernetes"
    return None


@contextmanager
def name_process(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Gives this process a name, and writes it to the data folder; the name of its gateway is its own in the block.

    Several gateways may use the folder at the same time, if they count in one Redis: each has another name of it. And
    the folder may be a copy that a gateway elsewhere uses, so the name of the gateway alone does not tell who decides.

    Yields:
        Name of the gateway, which stays with the folder; name of this process; name of the process that was this
        gateway before and is gone, or "".

    Raises:
        ConfigInvalid: The file of the names cannot be read or written.
    """
    with ExitStack() as stack:
        for number in itertools.count(1):
            file, names = folder / _NAMES_FILE.format("" if number == 1 else f"-{number}"), list[str]()
            try:
                make_folder(folder)
                lock = stack.enter_context(file.with_suffix(".names.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with suppress(FileNotFoundError):
                    names = file.read_text(encoding="utf-8").split()
                gateway = names[0] if names else new_object_id("gateway")
                process = new_object_id("process")
                temporary_file = file.with_suffix(".names.new")
                temporary_file.write_text(f"{gateway}\n{process}\n", encoding="utf-8")
                temporary_file.replace(file)
            except BlockingIOError:
                continue  # another gateway that runs has this name
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigInvalid(
                    f"{file} cannot be read or written: {error}. It has the name of this gateway."
                ) from None
            break
        yield gateway, process, names[1] if len(names) > 1 else ""
