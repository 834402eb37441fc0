"""Models that are loaded on demand: checks the configured models, and makes their engines."""

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
from maitred.fleet.residency.footprint import Footprint, estimate_footprint, format_mebibytes
from maitred.fleet.residency.load_times import LoadTimes
from maitred.fleet.residency.manager import ModelManager
from maitred.fleet.residency.on_demand_replica import ModelDescription, OnDemandReplica
from maitred.observe.metrics.residency import ResidencyState, ResidentState
from maitred.routing.catalog import ServedModel
from maitred.store.location import data_folder
from maitred.text.answer_format import AnswerFormat
from maitred.text.generation_defaults import GenerationDefaults
from maitred.text.tokenizer import Tokenizer

_FREE_SHARE = 0.8
"""Share of the memory that is free at the start; the rest is for the gateway and for errors of the estimates."""


class OnDemandModelSet:
    """Models that are loaded on demand on this machine; empty if no model has a path.

    Args:
        residence: The manager that loads and unloads them.
        models: The models for the catalog.
    """

    def __init__(
        self, residence: ModelManager, replicas: Mapping[str, OnDemandReplica], models: list[ServedModel]
    ) -> None:
        self.models = models
        self.replicas = replicas
        self._manager = residence

    def loadables(self, clock: Clock) -> OnDemandModelAdmin:
        """Returns the admin service of these models."""
        return OnDemandModelAdmin(self._manager, clock)

    @property
    def pinnable(self) -> dict[str, PinnableModel]:
        """Returns the models whose prefixes can be pinned."""
        return {
            model.name: PinnableModel(model.tokenizer, {"local": self.replicas[model.name].engine.client})
            for model in self.models
        }

    @property
    def engines(self) -> dict[tuple[str, str], LocalEngine]:
        """Returns the engines by model and replica."""
        return {(name, "local"): replica.engine for name, replica in self.replicas.items()}

    def endpoints(self) -> dict[str, list[AnyEndpoint]]:
        """Returns the endpoints of each model, for dispatch."""
        return {name: [Endpoint("local", replica)] for name, replica in self.replicas.items()}

    def on_wanted(self, name: str) -> None:
        """Notes that a request was refused because it could not wait for the model's load."""
        if name in self.replicas:
            self._manager.mark_wanted(name)

    @asynccontextmanager
    async def running(self, dispatchers: Mapping[str, Dispatcher]) -> AsyncIterator[None]:
        """Loads and unloads the models for as long as the block lasts."""
        for name, replica in self.replicas.items():
            self._manager.add_model(replica, dispatchers[name].core)
            dispatchers[name].set_dispatch_listener(partial(self._manager.check, name))
        if not self.replicas:
            yield
            return
        async with running(self._manager.run(), "residence"):
            yield

    def state(self) -> ResidencyState:
        """Returns the state of memory and models for metrics."""
        residents = self._manager.policy
        return ResidencyState(
            budget_bytes=residents.budget_bytes if self.replicas else None,
            models={
                name: ResidentState(
                    resident=residents[name].phase is ResidencyPhase.LOADED,
                    loading=residents[name].phase is ResidencyPhase.LOADING,
                    asleep=residents[name].phase is ResidencyPhase.UNLOADED and residents[name].is_asleep,
                    reserved_bytes=residents[name].counted_bytes,
                    measured_bytes=self._manager.measured_bytes.get(name, 0),
                    loads=replica.loads,
                    load_s=replica.total_load_s,
                    failures=replica.failures,
                    unloads=replica.unloads,
                    sleeps=replica.sleeps,
                    wakes=replica.wakes,
                    predicted_load_s=residents[name].expected_start_s,
                )
                for name, replica in self.replicas.items()
            },
        )


def open_local_models(config: Config, clock: Clock) -> OnDemandModelSet:
    """Makes the models that have a path. No model is started yet.

    Raises:
        ConfigInvalid: A folder holds no model that can run, or a model could never fit into the memory.
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
                is_pinned=model.pinned,
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
        if (took_s := times.expected_load_s(folder)) is not None:
            residents[name].load_time.observe(took_s)
    residence = ModelManager(residents, clock, lambda name, seconds: times.record(chosen[name][1], seconds))
    replicas: dict[str, OnDemandReplica] = {}
    models: list[ServedModel] = []
    for name, (model, folder) in chosen.items():
        footprint = footprints[name]
        engine = LocalEngine(
            engine_command(folder, footprint.engine, config.dispatch.service.weights, config.log),
            silence_timeout_s=config.engine_link.silence_timeout_s,
            expected_start_s=footprint.load_s,
            clock=clock,
        )
        engine.client.pause_at_tokens = config.server.unread_tokens
        replicas[name] = OnDemandReplica(
            name, engine, footprint, ready_in_s=partial(residence.ready_in_s, name), clock=clock
        )
        tokenizer = Tokenizer.load(
            folder,
            allows_control_tokens=model.control_tokens == "allow",
            trusts_request_templates=model.trust_request_chat_template,
            cache_bytes=model.tokenizer_cache_bytes,
        )
        answers = AnswerFormat.of(tokenizer, model.tool_parser, model.reasoning_parser)
        defaults = GenerationDefaults.of(folder, model.generation_config)
        models.append(
            ServedModel(
                name,
                replicas=[ModelDescription(replicas[name])],
                tokenizer=tokenizer,
                answer_format=answers,
                defaults=defaults,
            )
        )
    return OnDemandModelSet(residence, replicas, models)


def _footprint(name: str, folder: Path, model: TextModelConfig, budget_bytes: int) -> Footprint:
    if is_encoder(folder) or model.engine.pooling is not None:
        raise ConfigInvalid(
            f"models.{name}.path: the model in {folder} computes embeddings, and is served as encoder.path. Only "
            "models that generate are loaded on demand."
        )
    return estimate_footprint(folder, replace(model.engine), budget_bytes)


def _check_fits(residents: ResidencyPolicy, footprints: Mapping[str, Footprint]) -> None:
    """Raises ConfigInvalid if a model could never be loaded: a refusal at its first request is too late."""
    for name, resident in residents.models.items():
        available_bytes = residents.available_bytes_for(name)
        if resident.memory_bytes > available_bytes:
            pinned = residents.budget_bytes - available_bytes
            beside = f", of which other models are pinned in {format_mebibytes(pinned)}" if pinned else ""
            raise ConfigInvalid(
                f"models.{name} can never be loaded: it takes {footprints[name]}, and all models together may take "
                f"{format_mebibytes(residents.budget_bytes)}{beside}. Raise residency.memory_bytes, or lower "
                f"models.{name}.engine.kv_memory_bytes."
            )
