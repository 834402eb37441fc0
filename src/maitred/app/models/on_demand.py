"""The models of the configuration that are loaded on demand: checked, given their engines, and kept."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
from msgspec.structs import replace

from maitred.app.admin.on_demand import OnDemandModelAdmin
from maitred.app.admin.pins import PinnableModel
from maitred.app.assembly.stores import running
from maitred.config.tree import Config, TextModelConfig
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import AnyEndpoint, Endpoint
from maitred.engine.encoder.shape import is_encoder
from maitred.engine.models.source import find_model
from maitred.fleet.local import LocalEngine, engine_command
from maitred.fleet.policy.model_residency import ModelResidency, ResidencyPhase
from maitred.fleet.policy.residency import ResidencyPolicy
from maitred.fleet.residency.footprint import Footprint, footprint_of, mebibytes
from maitred.fleet.residency.load_times import LoadTimes
from maitred.fleet.residency.manager import ModelManager
from maitred.fleet.residency.on_demand_replica import ModelDescription, OnDemandReplica
from maitred.observe.metrics.residency import ResidencyState, ResidentState
from maitred.routing.catalog import ServedModel
from maitred.store.database import data_folder
from maitred.text.answer_format import AnswerFormat
from maitred.text.generation_defaults import GenerationDefaults
from maitred.text.tokenizer import Tokenizer

_FREE_SHARE = 0.8
"""Of the memory that is free when the server starts; what is left is for the gateway, and for what was misjudged."""


class OnDemandModelSet:
    """The models that come and go on this machine; none where none has a path.

    Args:
        residence: Where they live.
        models: For the catalog.
    """

    def __init__(
        self, residence: ModelManager, lodgers: Mapping[str, OnDemandReplica], models: list[ServedModel]
    ) -> None:
        self.models = models
        self.lodgers = lodgers
        self._residence = residence

    def loadables(self, clock: Clock) -> OnDemandModelAdmin:
        """For the operator."""
        return OnDemandModelAdmin(self._residence, clock)

    @property
    def pinnable(self) -> dict[str, PinnableModel]:
        """For prefixes that stay."""
        return {
            model.name: PinnableModel(model.tokenizer, {"local": self.lodgers[model.name].engine.link})
            for model in self.models
        }

    @property
    def engines(self) -> dict[tuple[str, str], LocalEngine]:
        """By model and replica."""
        return {(name, "local"): lodger.engine for name, lodger in self.lodgers.items()}

    def posts(self) -> dict[str, list[AnyEndpoint]]:
        """For dispatch."""
        return {name: [Endpoint("local", lodger)] for name, lodger in self.lodgers.items()}

    def wanted(self, name: str) -> None:
        """A request for it was refused that could not wait for its load."""
        if name in self.lodgers:
            self._residence.want(name)

    @asynccontextmanager
    async def running(self, dispatchers: Mapping[str, Dispatcher]) -> AsyncIterator[None]:
        """They come and go for as long as the block lasts."""
        for name, lodger in self.lodgers.items():
            self._residence.attend(lodger, dispatchers[name].floor)
            dispatchers[name].after_turn(partial(self._residence.look, name))
        if not self.lodgers:
            yield
            return
        async with running(self._residence.run(), "residence"):
            yield

    def state(self) -> ResidencyState:
        """For metrics."""
        residents = self._residence.residents
        return ResidencyState(
            budget_bytes=residents.budget_bytes if self.lodgers else None,
            models={
                name: ResidentState(
                    resident=residents[name].phase is ResidencyPhase.IN,
                    loading=residents[name].phase is ResidencyPhase.LOADING,
                    asleep=residents[name].phase is ResidencyPhase.OUT and residents[name].asleep,
                    reserved_bytes=residents[name].counted_bytes,
                    measured_bytes=self._residence.measured_bytes.get(name, 0),
                    loads=lodger.loads,
                    load_s=lodger.load_s,
                    failures=lodger.failures,
                    unloads=lodger.unloads,
                    sleeps=lodger.sleeps,
                    wakes=lodger.wakes,
                    predicted_load_s=residents[name].comes_in_s,
                )
                for name, lodger in self.lodgers.items()
            },
        )


def open_local_models(config: Config, clock: Clock) -> OnDemandModelSet:
    """The models that have a path. Nothing is started yet.

    Raises:
        ConfigInvalid: A folder holds no model that can be run, or one could never fit the memory.
    """
    settings = config.residency
    budget_bytes = settings.memory_bytes or int(psutil.virtual_memory().available * _FREE_SHARE)
    chosen = {name: (model, find_model(model.path)) for name, model in config.models.items() if model.path is not None}
    footprints = {name: _footprint(name, folder, model, budget_bytes) for name, (model, folder) in chosen.items()}
    residents = ResidencyPolicy(
        [
            ModelResidency(
                name,
                model.memory_bytes or footprints[name].total_bytes,
                pinned=model.pinned,
                keep_alive_s=settings.keep_alive_s,
                load_s=footprints[name].load_s,
            )
            for name, (model, _) in chosen.items()
        ],
        budget_bytes,
        settings.turn_loads,
    )
    _check_fits(residents, footprints)
    times = LoadTimes(data_folder(config.store) / "load-times.json")
    for name, (_, folder) in chosen.items():
        if (took_s := times.of(folder)) is not None:
            residents[name].load.saw(took_s)
    residence = ModelManager(residents, clock, lambda name, seconds: times.learn(chosen[name][1], seconds))
    lodgers: dict[str, OnDemandReplica] = {}
    models: list[ServedModel] = []
    for name, (model, folder) in chosen.items():
        footprint = footprints[name]
        engine = LocalEngine(
            engine_command(folder, footprint.engine, config.dispatch.service.weights, config.log),
            silence_timeout_s=config.engine_link.silence_timeout_s,
            expected_start_s=footprint.load_s,
            clock=clock,
        )
        engine.link.unread_tokens = config.server.unread_tokens
        lodgers[name] = OnDemandReplica(name, engine, footprint, partial(residence.ready_in_s, name), clock)
        tokenizer = Tokenizer.load(folder)
        answers = AnswerFormat.of(tokenizer, model.tool_parser, model.reasoning_parser)
        defaults = GenerationDefaults.of(folder, model.generation_config)
        models.append(ServedModel(name, ModelDescription(lodgers[name]), tokenizer, answers, defaults))
    return OnDemandModelSet(residence, lodgers, models)


def _footprint(name: str, folder: Path, model: TextModelConfig, budget_bytes: int) -> Footprint:
    if is_encoder(folder) or model.engine.pooling is not None:
        raise ConfigInvalid(
            f"models.{name}.path: the model in {folder} computes embeddings, and is served as encoder.path. Only "
            "models that generate are loaded on demand."
        )
    return footprint_of(folder, replace(model.engine), budget_bytes)


def _check_fits(residents: ResidencyPolicy, footprints: Mapping[str, Footprint]) -> None:
    """Raises ConfigInvalid where a model could never be loaded: a server that refuses it later would be a trap."""
    for name, resident in residents.all.items():
        room_bytes = residents.room_for(name)
        if resident.memory_bytes > room_bytes:
            pinned = residents.budget_bytes - room_bytes
            beside = f", of which other models are pinned in {mebibytes(pinned)}" if pinned else ""
            raise ConfigInvalid(
                f"models.{name} can never be loaded: it takes {footprints[name]}, and all models together may take "
                f"{mebibytes(residents.budget_bytes)}{beside}. Raise residency.memory_bytes, or lower "
                f"models.{name}.engine.kv_memory_bytes."
            )
