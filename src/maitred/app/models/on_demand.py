"""Models that are loaded on demand: checks the configured models, and makes their replica pools."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
from msgspec.structs import replace

from maitred.app.admin.on_demand import OnDemandModelAdmin
from maitred.app.admin.pins import PinnableModel
from maitred.app.assembly.stores import running
from maitred.app.models.engines import stored_startup_times
from maitred.app.models.local import EngineClients
from maitred.config.tree import Config, TextModelConfig
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.dispatch.dispatcher import Dispatcher
from maitred.engine.encoder.shape import is_encoder
from maitred.engine.models.source import find_model
from maitred.fleet.backend import BackendFacts
from maitred.fleet.local import LocalEngine, engine_command
from maitred.fleet.local_backend import LocalBackend
from maitred.fleet.policy.model_residency import ModelResidency, ResidencyPhase
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.policy.residency import ResidencyPolicy
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.residency.footprint import Footprint, estimate_footprint, format_mebibytes
from maitred.fleet.residency.manager import ModelManager, OnDemandModel
from maitred.observe.metrics.residency import ResidencyState, ResidentState
from maitred.routing.catalog import ServedModel
from maitred.scaling.startup_times import StartKind
from maitred.text.answer_format import AnswerFormat
from maitred.text.generation_defaults import GenerationDefaults
from maitred.text.tokenizer import Tokenizer

_FREE_SHARE = 0.8
"""Share of the memory that is free at the start; the rest is for the gateway and for errors of the estimates."""


class OnDemandModelSet:
    """Models that are loaded on demand on this machine; empty if no model has a path.

    Args:
        manager: The manager that loads and unloads them.
        models: The models for the catalog.
        pools: Model -> the pool of its one replica.

    Attributes:
        models: See above.
        pools: See above.
    """

    def __init__(self, manager: ModelManager, models: Sequence[ServedModel], pools: Mapping[str, ReplicaPool]) -> None:
        self.models = models
        self.pools = pools
        self._manager = manager

    def loadables(self, clock: Clock) -> OnDemandModelAdmin:
        """Returns the admin service of these models."""
        return OnDemandModelAdmin(self._manager, clock)

    @property
    def pinnable(self) -> dict[str, PinnableModel]:
        """Returns the models whose prefixes can be pinned."""
        return {
            model.name: PinnableModel(model.tokenizer, EngineClients(self.pools[model.name].engines))
            for model in self.models
        }

    def on_wanted(self, name: str) -> None:
        """Notes that a request was refused because it could not wait for the model's load."""
        if name in self.pools:
            self._manager.mark_wanted(name)

    @asynccontextmanager
    async def running(self, dispatchers: Mapping[str, Dispatcher]) -> AsyncIterator[None]:
        """Loads and unloads the models for as long as the block lasts."""
        for name, pool in self.pools.items():
            self._manager.add_model(OnDemandModel(name, pool, dispatchers[name]))
        if not self.pools:
            yield
            return
        async with running(self._manager.run(), "residency"):
            yield

    def state(self) -> ResidencyState:
        """Returns the state of memory and models for metrics."""
        policy = self._manager.policy
        return ResidencyState(
            budget_bytes=policy.budget_bytes if self.pools else None,
            models={
                name: ResidentState(
                    resident=policy[name].phase is ResidencyPhase.LOADED,
                    loading=policy[name].phase is ResidencyPhase.LOADING,
                    asleep=policy[name].phase is ResidencyPhase.UNLOADED and policy[name].is_asleep,
                    reserved_bytes=policy[name].counted_bytes,
                    measured_bytes=model.measured_bytes,
                    loads=model.loads,
                    load_s=model.total_load_s,
                    failures=model.failures,
                    unloads=model.unloads,
                    sleeps=model.sleeps,
                    wakes=model.wakes,
                    predicted_load_s=policy[name].expected_start_s,
                )
                for name, model in self._manager.models.items()
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
    manager = ModelManager(residents, clock)
    pools: dict[str, ReplicaPool] = {}
    models: list[ServedModel] = []
    for name, (model, folder) in chosen.items():
        footprint = footprints[name]
        pool = _make_pool(config, name, folder, footprint, manager, clock)
        for kind, estimate in (
            (StartKind.WEIGHTS_CACHED, residents[name].load_time),
            (StartKind.ASLEEP, residents[name].wake_time),
        ):
            for took_s in pool.startup_times.measured.get(kind, ()):
                estimate.observe(took_s)
        pools[name] = pool
        models.append(_catalog_model(name, folder, model, footprint, pool))
    return OnDemandModelSet(manager, models, pools)


def _catalog_model(
    name: str, folder: Path, model: TextModelConfig, footprint: Footprint, pool: ReplicaPool
) -> ServedModel:
    tokenizer = Tokenizer.load(
        folder,
        allows_control_tokens=model.control_tokens == "allow",
        trusts_request_templates=model.trust_request_chat_template,
        cache_bytes=model.tokenizer_cache_bytes,
    )
    return ServedModel(
        name,
        replicas=EngineClients(pool.engines).values(),
        tokenizer=tokenizer,
        answer_format=AnswerFormat.of(tokenizer, model.tool_parser, model.reasoning_parser),
        defaults=GenerationDefaults.of(folder, model.generation_config),
        coming_card=lambda: footprint.card,
        stays_ready=lambda: pool.stays_ready,
    )


def _make_pool(
    config: Config, name: str, folder: Path, footprint: Footprint, manager: ModelManager, clock: Clock
) -> ReplicaPool:
    """Makes the pool of a model's one replica, which is not started yet."""
    facts = BackendFacts(
        max_replicas=1, start_kind=StartKind.WEIGHTS_CACHED, expected_start_s=footprint.load_s, can_sleep=True
    )

    def make_engine(replica: str) -> LocalEngine:
        engine = LocalEngine(
            engine_command(folder, footprint.engine, config.dispatch.service.weights, config.log),
            silence_timeout_s=config.engine_link.silence_timeout_s,
            expected_start_s=footprint.load_s,
            clock=clock,
        )
        engine.check_process = partial(manager.check_process, name)
        return engine

    backend = LocalBackend(make_engine, facts, lambda number: "local", clock)
    startup_times = stored_startup_times(config, folder, facts)
    pool = ReplicaPool(backend, DesiredReplicas(0), startup_times, clock, refusal=partial(manager.refusal, name))
    pool.reconfigure(config.server.unread_tokens)
    return pool


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
