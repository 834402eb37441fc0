"""Encoder that is served beside the model that generates: one encoder, or none."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from maitred.app.assembly.stores import running
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.engine.encoder.shape import is_bert
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.digest import fingerprint_of
from maitred.engine.models.source import find_model
from maitred.fleet.local import LocalEngine, engine_command
from maitred.fleet.remote import FingerprintCheck, RemoteEngine, make_remote_engine
from maitred.routing.catalog import ServedModel
from maitred.text.tokenizer import Tokenizer
from maitred.wire.address import parse_address


@dataclass(frozen=True, slots=True)
class ServedEncoder:
    """Encoder model that is served, with its engine and its queue."""

    model: ServedModel
    engine: LocalEngine | RemoteEngine
    dispatcher: Dispatcher


class EncoderModels:
    """Encoder models that are served, by name; empty if there is no encoder.

    Attributes:
        served: The encoders.
        models: The models for the catalog.
        engines: The engines of the encoders.
        dispatchers: The dispatchers of the encoders.
    """

    def __init__(self, served: Sequence[ServedEncoder]) -> None:
        self.served = served
        self.models = [encoder.model for encoder in served]
        self.engines: Mapping[str, LocalEngine | RemoteEngine] = {e.model.name: e.engine for e in served}
        self.dispatchers: Mapping[str, Dispatcher] = {e.model.name: e.dispatcher for e in served}

    async def wait_all_started(self) -> None:
        """Waits until each encoder has been ready once.

        Raises:
            ReplicaUnavailable: The process of an encoder cannot start.
        """
        for engine in self.engines.values():
            await engine.wait_started()


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
    engine: LocalEngine | RemoteEngine
    if settings.engine_address is not None:
        same = FingerprintCheck(await asyncio.to_thread(fingerprint_of, folder))
        engine = make_remote_engine(parse_address(settings.engine_address), config.engine_link, same.check)
    else:
        silence_timeout_s = config.engine_link.silence_timeout_s
        command = engine_command(folder, settings.engine(), log=config.log)
        engine = LocalEngine(command, clock=clock, silence_timeout_s=silence_timeout_s)
    async with engine:
        dispatcher = Dispatcher(
            name, [Endpoint(settings.engine_address or "local", engine.client)], config.dispatch, clock
        )
        async with running(dispatcher.run(), "encoder dispatch"):
            yield EncoderModels([ServedEncoder(ServedModel(name, [engine.client], tokenizer), engine, dispatcher)])


def _check_reads(folder: Path) -> None:
    """Raises ConfigInvalid if the model is neither a BERT model nor one that the engine can generate with.

    The engine would report this too, but only in a log and seconds later.
    """
    if not is_bert(folder):
        try:
            ModelConfig.load(folder)
        except ConfigInvalid as fault:
            raise ConfigInvalid(f"encoder.path: {fault} Models of the BERT family can be named, too.") from fault
