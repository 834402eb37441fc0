"""Encoder that is served beside the model that generates: one encoder, or none."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from maitred.app.assembly.stores import running
from maitred.app.models.local import EngineClients
from maitred.app.models.router import home_region, untold_region
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.dispatch.dispatcher import Dispatcher
from maitred.engine.encoder.shape import is_bert
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.digest import fingerprint_of
from maitred.engine.models.source import find_model
from maitred.fleet.backend import BackendFacts, ManagedEngine
from maitred.fleet.local import LocalEngine, engine_command
from maitred.fleet.local_backend import LocalBackend
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.remote import FingerprintCheck, make_remote_engine
from maitred.replica.engine.client import EngineClient
from maitred.routing.catalog import ServedModel
from maitred.scaling.startup_times import StartupTimes
from maitred.text.tokenizer import Tokenizer
from maitred.wire.address import parse_address


@dataclass(frozen=True, slots=True)
class ServedEncoder:
    """Encoder model that is served, with the pool of its one replica and its queue."""

    model: ServedModel
    pool: ReplicaPool
    dispatcher: Dispatcher

    @property
    def client(self) -> EngineClient:
        """Client of its engine."""
        (engine,) = self.pool.engines.values()
        return engine.client


class EncoderModels:
    """Encoder models that are served, by name; empty if there is no encoder.

    Attributes:
        served: The encoders.
        models: The models for the catalog.
        pools: The pools of the encoders.
        dispatchers: The dispatchers of the encoders.
    """

    def __init__(self, served: Sequence[ServedEncoder]) -> None:
        self.served = served
        self.models = [encoder.model for encoder in served]
        self.pools: Mapping[str, ReplicaPool] = {e.model.name: e.pool for e in served}
        self.dispatchers: Mapping[str, Dispatcher] = {e.model.name: e.dispatcher for e in served}

    async def wait_all_started(self) -> None:
        """Waits until each encoder has been ready once.

        Raises:
            ReplicaUnavailable: The process of an encoder cannot start.
        """
        for pool in self.pools.values():
            await pool.wait_started()


@asynccontextmanager
async def open_encoders(config: Config, taken_name: str, clock: Clock) -> AsyncIterator[EncoderModels]:
    """Starts the configured encoder, if there is one; the end of the context stops it.

    Args:
        config: The configuration.
        taken_name: The name of the model that generates.
        clock: The clock of the encoder's queue.

    Raises:
        ConfigInvalid: The folder holds no embedding model, or its name is in use.
    """
    settings = config.encoder
    if not settings.path:
        yield EncoderModels([])
        return
    folder = find_model(settings.path)
    _check_reads(folder)
    name = settings.served_name or folder.resolve().name
    if name == taken_name:
        raise ConfigInvalid(f"encoder.served_name: both models are called {name}. Give one another name.")
    tokenizer = Tokenizer.load(folder)
    if settings.engine_address is not None:
        address = parse_address(settings.engine_address)
        same = FingerprintCheck(await asyncio.to_thread(fingerprint_of, folder))

        def make_engine(name: str) -> ManagedEngine:
            return make_remote_engine(address, config.engine_link, same.check)

    else:
        command = engine_command(folder, settings.engine(), log=config.log)

        def make_engine(name: str) -> ManagedEngine:
            return LocalEngine(command, clock=clock, silence_timeout_s=config.engine_link.silence_timeout_s)

    backend = LocalBackend(
        make_engine, BackendFacts(max_replicas=1), lambda _: settings.engine_address or "local", clock
    )
    async with ReplicaPool(backend, DesiredReplicas(1), StartupTimes({}), clock) as pool:
        region = untold_region(name, config)
        endpoints = [replace(endpoint, region=region) for endpoint in pool.endpoints()]
        dispatcher = Dispatcher(name, endpoints, config.dispatch, clock, region=home_region(name, config))
        model = ServedModel(name, EngineClients(pool.engines).values(), tokenizer)
        async with running(dispatcher.run(), "encoder dispatch"):
            yield EncoderModels([ServedEncoder(model, pool, dispatcher)])


def _check_reads(folder: Path) -> None:
    """Raises ConfigInvalid if the model is neither a BERT model nor one that the engine can generate with.

    The engine would report this too, but only in a log and seconds later.
    """
    if not is_bert(folder):
        try:
            ModelConfig.load(folder)
        except ConfigInvalid as fault:
            raise ConfigInvalid(f"encoder.path: {fault} Models of the BERT family can be named, too.") from fault
