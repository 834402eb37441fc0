"""Registry of the models that the gateway's own engines serve: models, endpoints and engines.

The registry is immutable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from maitred.app.admin.pins import PinnableModel
from maitred.app.models.encoder import EncoderModels
from maitred.app.models.local import LocalModel
from maitred.app.models.on_demand import OnDemandModelSet
from maitred.config.tree import Config
from maitred.core.errors import ConfigInvalid
from maitred.dispatch.request import AnyEndpoint
from maitred.fleet.sleepable_replica import ManagedEngine
from maitred.observe.metrics.engines import EngineState, EngineStates
from maitred.replica.engine.client import EngineClient
from maitred.routing.catalog import AnyModel


@dataclass(frozen=True, slots=True)
class EngineRegistry:
    """Registry of models, endpoints and engines, made by `open_registry`.

    Attributes:
        models: The models for the catalog.
        endpoints: The endpoints for the dispatchers of models that generate; encoders have their own.
        engines: The gateway's own engines, by model and replica.
        pinnable: The models whose prefixes can be pinned.
        starting: The models whose engines start with the gateway.
    """

    models: Sequence[AnyModel]
    endpoints: Mapping[str, Sequence[AnyEndpoint]]
    engines: Mapping[tuple[str, str], ManagedEngine]
    pinnable: Mapping[str, PinnableModel]
    starting: Sequence[str]

    def check(self, config: Config) -> None:
        """Raises ConfigInvalid if a configured model has the name of a model that starts with the gateway."""
        for name in self.starting:
            if name in config.models:
                raise ConfigInvalid(f"Two models are called {name!r}. Give one of them another name.")

    def links(self) -> dict[str, list[EngineClient]]:
        """Returns the clients of the gateway's own engines, by model."""
        links: dict[str, list[EngineClient]] = {}
        for (model, _), engine in self.engines.items():
            links.setdefault(model, []).append(engine.client)
        return links

    def addresses(self, local: LocalModel | None) -> dict[str, str]:
        """Returns the addresses of the resident model's engines, by engine name."""
        return {} if local is None else {name: str(engine.client.address) for name, engine in local.engines.items()}

    def states(self) -> EngineStates:
        """Returns the states of the gateway's own engines."""
        return {where: _state_of(engine) for where, engine in self.engines.items()}


def open_registry(
    config: Config, local: LocalModel | None, on_demand: OnDemandModelSet, encoders: EncoderModels
) -> EngineRegistry:
    """Makes the registry of the opened models.

    Raises:
        ConfigInvalid: Two models have the same name.
    """
    models: list[AnyModel] = [*on_demand.models]
    endpoints = on_demand.endpoints()
    pinnable = on_demand.pinnable
    engines: dict[tuple[str, str], ManagedEngine] = {}
    if local is not None:
        models.append(local.model)
        endpoints[local.name] = local.endpoints()
        pinnable[local.name] = local.pinnable
        engines |= {(local.name, replica): engine for replica, engine in local.engines.items()}
    for name, encoder in encoders.engines.items():
        engines[name, config.encoder.engine_address or "local"] = encoder
    starting = list(dict.fromkeys(name for name, _ in engines))
    registry = EngineRegistry(
        models=[*models, *encoders.models],
        endpoints=endpoints,
        engines=engines | on_demand.engines,
        pinnable=pinnable,
        starting=starting,
    )
    registry.check(config)
    return registry


def _state_of(engine: ManagedEngine) -> EngineState:
    up = engine.client.is_ready
    return EngineState(up, engine.restarts, engine.client.load(), engine.client.card() if up else None)
