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
        resident: The pool of the `model` section by model: its number of replicas can be set.
        on_demand: The pools of models that are loaded on demand, by model.
        encoders: The pools of encoders, by model.
        pinnable: The models whose prefixes can be pinned.
    """

    models: Sequence[AnyModel]
    resident: Mapping[str, ReplicaPool]
    on_demand: Mapping[str, ReplicaPool]
    encoders: Mapping[str, ReplicaPool]
    pinnable: Mapping[str, PinnableModel]

    @property
    def starting(self) -> list[str]:
        """The models whose engines start with the gateway."""
        return [*self.resident, *self.encoders]

    @property
    def generating(self) -> dict[str, ReplicaPool]:
        """The pools of models that generate, by model; encoders have queues of their own."""
        return {**self.resident, **self.on_demand}

    @property
    def pools(self) -> dict[str, ReplicaPool]:
        """All pools, by model."""
        return {**self.generating, **self.encoders}

    def check(self, config: Config) -> None:
        """Raises ConfigInvalid if a configured model has the name of a model that starts with the gateway."""
        for name in self.starting:
            if name in config.models:
                raise ConfigInvalid(f"Two models are called {name!r}. Give one of them another name.")

    @property
    def endpoints(self) -> dict[str, Sequence[AnyEndpoint]]:
        """Endpoints for the dispatchers of models that generate."""
        return {name: pool.endpoints() for name, pool in self.generating.items()}

    @property
    def engines(self) -> dict[tuple[str, str], ManagedEngine]:
        """The gateway's own engines, by model and replica."""
        return {(model, name): engine for model, pool in self.pools.items() for name, engine in pool.engines.items()}

    def on_engine(self, listener: Callable[[tuple[str, str], ManagedEngine], None]) -> None:
        """Calls `listener` with each engine of the gateway's own, by model and replica, now and when one comes."""
        for model, pool in self.pools.items():
            pool.on_engine(partial(_tell_engine, listener, model))

    def output_tokens(self) -> dict[str, int]:
        """Returns the number of output tokens of the gateway's own engines, by model."""
        return {model: pool.output_tokens for model, pool in self.pools.items()}

    def addresses(self) -> dict[str, str]:
        """Returns the addresses of the engines to which workers connect themselves, by replica."""
        return {
            name: str(engine.client.address) for pool in self.resident.values() for name, engine in pool.engines.items()
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
    if local is not None:
        models.append(local.model)
        pinnable[local.name] = local.pinnable
    registry = EngineRegistry(
        models=[*models, *encoders.models],
        resident={} if local is None or pool is None else {local.name: pool},
        on_demand=on_demand.pools,
        encoders=encoders.pools,
        pinnable=pinnable,
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
