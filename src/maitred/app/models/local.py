"""Resident model of the `model` section, with the gateway's own engines that run it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import psutil

from maitred.app.admin.pins import PinnableModel
from maitred.config.tree import Config
from maitred.core.replica import ModelCard
from maitred.engine.models.source import find_model
from maitred.fleet.backend import ManagedEngine
from maitred.fleet.residency.footprint import estimate_footprint
from maitred.replica.engine.client import EngineClient
from maitred.routing.catalog import ServedModel
from maitred.text.answer_format import AnswerFormat
from maitred.text.generation_defaults import GenerationDefaults
from maitred.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Resident model that generates.

    Attributes:
        model: The model for the catalog.
        engines: The engines, by their names in the ledger; they may come and go.
    """

    model: ServedModel
    engines: Mapping[str, ManagedEngine]

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    @property
    def pinnable(self) -> PinnableModel:
        """Returns the model as one whose prefixes can be pinned."""
        return PinnableModel(self.model.tokenizer, EngineClients(self.engines))


class EngineClients(Mapping[str, EngineClient]):
    """View of engines that shows their clients.

    Args:
        engines: The engines by name.
    """

    def __init__(self, engines: Mapping[str, ManagedEngine]) -> None:
        self._engines = engines

    def __getitem__(self, name: str) -> EngineClient:
        return self._engines[name].client

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)


def local_model(
    config: Config,
    engines: Mapping[str, ManagedEngine],
    lets_wait: Callable[[], bool],
    stays_ready: Callable[[], bool],
) -> LocalModel:
    """Makes the catalog's model for these engines.

    Args:
        config: The configuration.
        engines: The engines, which may come and go.
        lets_wait: Returns whether requests may wait while no engine serves. Until the first has told its card, they are
            checked against the one that the model's files predict.
        stays_ready: Returns whether the model is ready while no engine serves.

    Raises:
        ConfigInvalid: There is no model where the configuration says.
    """
    folder = find_model(config.model.folder)
    tokenizer = Tokenizer.load(
        folder,
        allows_control_tokens=config.model.control_tokens == "allow",
        trusts_request_templates=config.model.trust_request_chat_template,
        cache_bytes=config.model.tokenizer_cache_bytes,
    )
    answers = AnswerFormat.of(tokenizer, config.model.tool_parser, config.model.reasoning_parser)
    defaults = GenerationDefaults.of(folder, config.model.generation_config)
    name = config.model.served_name or folder.resolve().name

    @cache
    def predicted_card() -> ModelCard:
        return estimate_footprint(folder, config.engine, psutil.virtual_memory().total).card

    model = ServedModel(
        name,
        replicas=EngineClients(engines).values(),
        tokenizer=tokenizer,
        answer_format=answers,
        defaults=defaults,
        coming_card=lambda: predicted_card() if lets_wait() else None,
        stays_ready=stays_ready,
    )
    return LocalModel(model, engines)
