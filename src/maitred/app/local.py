"""The model of the `model` section, which is always there, and our own engines that run it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from maitred.app.pins import Pinnable
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.core.digest import ModelDigest
from maitred.dispatch.errand import AnyPost, Post
from maitred.engine.models.digest import digest_of
from maitred.engine.models.source import find_model
from maitred.fleet.attached import attached
from maitred.fleet.engines import Engines
from maitred.fleet.local import Command, LocalEngine, engine_command
from maitred.fleet.same_model import SameModel
from maitred.fleet.sleeper import Sleeper
from maitred.routing.catalog import ServedModel
from maitred.text.answer_format import AnswerFormat
from maitred.text.generation_defaults import GenerationDefaults
from maitred.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that generates.

    Attributes:
        model: For the catalog.
        engines: By the names that the ledger has for them.
    """

    model: ServedModel
    engines: Engines

    @property
    def name(self) -> str:
        """Of the model."""
        return self.model.name

    def posts(self) -> list[AnyPost]:
        """For dispatch; each can sleep."""
        return [Post(name, Sleeper(engine.link)) for name, engine in self.engines.items()]

    @property
    def pinnable(self) -> Pinnable:
        """For prefixes that stay."""
        return Pinnable(self.model.tokenizer, {name: engine.link for name, engine in self.engines.items()})


@asynccontextmanager
async def open_local(config: Config, command: Command | None, clock: Clock) -> AsyncIterator[LocalModel | None]:
    """Starts the engines, or finds those that run elsewhere; None where only servers of others run any model.

    Args:
        config: The settings.
        command: Starts an engine; None: that of this installation.
        clock: For them.

    Raises:
        ConfigInvalid: No model is where the configuration says.
    """
    if not config.has_engine:
        yield None
        return
    folder = find_model(config.model.folder)
    tokenizer = Tokenizer.load(folder)
    each = replace(config.engine, machine_share=config.engine.machine_share / config.model.replicas)
    command = command or engine_command(folder, each, config.dispatch.service.weights, config.log)
    digest = await asyncio.to_thread(digest_of, folder) if config.model.attached else ModelDigest()
    async with _engines(config, command, SameModel(digest), clock) as engines:
        for engine in engines.values():
            engine.link.unread_tokens = config.server.unread_tokens
        answers = AnswerFormat.of(tokenizer, config.model.tool_parser, config.model.reasoning_parser)
        defaults = GenerationDefaults.of(folder, config.model.generation_config)
        name = config.model.served_name or folder.resolve().name
        yield LocalModel(ServedModel(name, engines, tokenizer, answers, defaults), engines)


def _engines(config: Config, command: Command, model: SameModel, clock: Clock) -> Engines:
    silence_timeout_s = config.engine_link.silence_timeout_s
    if config.model.attached:
        return Engines({address: attached(address, config.engine_link, model) for address in config.model.attached})
    count = config.model.replicas
    names = [f"local-{number}" for number in range(count)] if count > 1 else ["local"]
    engines: Engines = Engines(
        {
            name: LocalEngine(
                command, clock=clock, silence_timeout_s=silence_timeout_s, others_serve=lambda: engines.ready
            )
            for name in names
        }
    )
    return engines
