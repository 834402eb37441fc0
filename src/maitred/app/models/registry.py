"""Registry of the models that the gateway's own engines serve: models, endpoints and engines.

Which models there are does not change; the replicas of the resident model come and go.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from maitred.app.admin.pins import PinnableModel
from maitred.app.models.encoder import EncoderModels
from maitred.app.models.local import LocalModel
from maitred.app.models.on_demand import OnDemandModelSet
from maitred.config.tree import Config
from maitred.core.errors import ConfigInvalid
from maitred.dispatch.request import AnyEndpoint
from maitred.fleet.backend import ManagedEngine
from maitred.fleet.pool import ReplicaPool
from maitred.observe.metrics.engines import EngineState, EngineStates
from maitred.routing.catalog import AnyModel


@dataclass(frozen=True, slots=True)
class EngineRegistry:
    """Registry of models, endpoints and engines, made by `open_registry`.

    Attributes:
        models: The models for the catalog.
        on_demand_endpoints: The endpoints of models that are loaded on demand.
        fixed_engines: The engines that do not belong to a pool, by model and replica.
        pools: Model -> the pool of its replicas.
        pinnable: The models whose prefixes can be pinned.
        starting: The models whose engines start with the gateway.
    """

    models: Sequence[AnyModel]
    on_demand_endpoints: Mapping[str, Sequence[AnyEndpoint]]
    fixed_engines: Mapping[tuple[str, str], ManagedEngine]
    pools: Mapping[str, ReplicaPool]
    pinnable: Mapping[str, PinnableModel]
    starting: Sequence[str]

    def check(self, config: Config) -> None:
        """Raises ConfigInvalid if a configured model has the name of a model that starts with the gateway."""
        for name in self.starting:
            if name in config.models:
                raise ConfigInvalid(f"Two models are called {name!r}. Give one of them another name.")

    @property
    def endpoints(self) -> dict[str, Sequence[AnyEndpoint]]:
        """Endpoints for the dispatchers of models that generate; encoders have their own."""
        return {**self.on_demand_endpoints, **{name: pool.endpoints() for name, pool in self.pools.items()}}

    @property
    def engines(self) -> dict[tuple[str, str], ManagedEngine]:
        """The gateway's own engines, by model and replica."""
        pooled = {(model, name): engine for model, pool in self.pools.items() for name, engine in pool.engines.items()}
        return {**pooled, **self.fixed_engines}

    def on_engine(self, listener: Callable[[tuple[str, str], ManagedEngine], None]) -> None:
        """Calls `listener` with each engine of the gateway's own, by model and replica, now and when one comes."""
        for where, engine in self.fixed_engines.items():
            listener(where, engine)
        for model, pool in self.pools.items():
            pool.on_engine(partial(_tell_engine, listener, model))

    def output_tokens(self) -> dict[str, int]:
        """Returns the number of output tokens of the gateway's own engines, by model."""
        totals = {model: pool.output_tokens for model, pool in self.pools.items()}
        for (model, _), engine in self.fixed_engines.items():
            totals[model] = totals.get(model, 0) + engine.client.output_tokens
        return totals

    def addresses(self) -> dict[str, str]:
        """Returns the addresses of the engines of pools, by replica."""
        return {
            name: str(engine.client.address) for pool in self.pools.values() for name, engine in pool.engines.items()
        }

    def states(self) -> EngineStates:
        """Returns the states of the gateway's own engines."""
        return {where: _state_of(engine) for where, engine in self.engines.items()}


def open_registry(
    config: Config,
    local: LocalModel | None,
    pool: ReplicaPool | None,
    on_demand: OnDemandModelSet,
    encoders: EncoderModels,
) -> EngineRegistry:
    """Makes the registry of the opened models.

    Raises:
        ConfigInvalid: Two models have the same name.
    """
    models: list[AnyModel] = [*on_demand.models]
    pinnable = on_demand.pinnable
    engines: dict[tuple[str, str], ManagedEngine] = {}
    if local is not None:
        models.append(local.model)
        pinnable[local.name] = local.pinnable
    for name, encoder in encoders.engines.items():
        engines[name, config.encoder.engine_address or "local"] = encoder
    pools = {} if local is None or pool is None else {local.name: pool}
    starting = list(dict.fromkeys([*pools, *(name for name, _ in engines)]))
    registry = EngineRegistry(
        models=[*models, *encoders.models],
        on_demand_endpoints=on_demand.endpoints(),
        fixed_engines=engines | on_demand.engines,
        pools=pools,
        pinnable=pinnable,
        starting=starting,
    )
    registry.check(config)
    return registry


def _tell_engine(
    listener: Callable[[tuple[str, str], ManagedEngine], None], model: str, name: str, engine: ManagedEngine
) -> None:
    listener((model, name), engine)


def _state_of(engine: ManagedEngine) -> EngineState:
    up = engine.client.is_ready
    return EngineState(up, engine.restarts, engine.client.load(), engine.client.card() if up else None)
