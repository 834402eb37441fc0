"""The model of the `model` section, which is always there, and our own engines that run it."""

from dataclasses import dataclass

from maitred.app.admin.pins import PinnableModel
from maitred.config.tree import Config
from maitred.dispatch.request import AnyEndpoint, Endpoint
from maitred.engine.models.source import find_model
from maitred.fleet.engines import EngineGroup, SleepableReplica
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
    engines: EngineGroup

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    def endpoints(self) -> list[AnyEndpoint]:
        """For dispatch; each can sleep."""
        return [Endpoint(name, SleepableReplica(engine.client)) for name, engine in self.engines.items()]

    @property
    def pinnable(self) -> PinnableModel:
        """For prefixes that stay."""
        return PinnableModel(self.model.tokenizer, {name: engine.client for name, engine in self.engines.items()})


def local_model(config: Config, engines: EngineGroup) -> LocalModel:
    """Makes the model of the catalog that these engines run.

    Raises:
        ConfigInvalid: No model is where the configuration says.
    """
    folder = find_model(config.model.folder)
    tokenizer = Tokenizer.load(folder)
    answers = AnswerFormat.of(tokenizer, config.model.tool_parser, config.model.reasoning_parser)
    defaults = GenerationDefaults.of(folder, config.model.generation_config)
    name = config.model.served_name or folder.resolve().name
    return LocalModel(ServedModel(name, engines, tokenizer, answers, defaults), engines)
