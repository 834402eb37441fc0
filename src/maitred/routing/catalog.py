"""Model name -> what serves it."""

from collections.abc import Iterable, Iterator, Sequence

from maitred.core.errors import ReplicaUnavailable
from maitred.core.replica import HasModelCard, ModelCard
from maitred.core.text_replica import TextReplica
from maitred.text.answer_format import AnswerFormat
from maitred.text.estimate import LearntRatio
from maitred.text.generation_defaults import GenerationDefaults
from maitred.text.tokenizer import Tokenizer


class _Model:
    """What every model has: a name, and hosts that say whether they are there."""

    def __init__(self, name: str, hosts: Sequence[HasModelCard]) -> None:
        self.name = name
        self._hosts = hosts
        self._card: ModelCard | None = None

    def card(self) -> ModelCard:
        """What a replica says of the model, or last said: while it restarts, requests can still be checked.

        Raises:
            ReplicaUnavailable: No replica has ever been ready.
        """
        failure: ReplicaUnavailable | None = None
        for host in self._hosts:
            try:
                self._card = host.card()
                break
            except ReplicaUnavailable as unavailable:
                failure = unavailable
        if self._card is None:
            raise failure or ReplicaUnavailable()
        return self._card

    def ready(self) -> bool:
        """Whether a request could run now."""
        return any(map(_is_ready, self._hosts))


class ServedModel(_Model):
    """One model under the name that requests use.

    Args:
        name: The name.
        replicas: Where it runs.
        tokenizer: The model's own.
        format: What its answers are made of; None: as its chat template shows.
        defaults: How its tokens are chosen where a request does not say.
    """

    def __init__(
        self,
        name: str,
        replicas: HasModelCard,
        tokenizer: Tokenizer,
        format: AnswerFormat | None = None,  # noqa: A002
        defaults: GenerationDefaults = GenerationDefaults(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(name, [replicas])
        self.tokenizer = tokenizer
        self.defaults = defaults
        self._format = format

    @property
    def format(self) -> AnswerFormat:
        """See the class."""
        if self._format is None:
            self._format = AnswerFormat.of(self.tokenizer)
        return self._format


class TextModel(_Model):
    """One model that servers of others run, which take and give text.

    Args:
        name: The name that requests use.
        replicas: Those servers; at least one.
        tokenizer: The model's own, where somebody has put it here; None: tokens are estimated.
        reprompts: Whether a stream that breaks off goes on at another server, by its text.

    Attributes:
        prompt_ratio: Tokens that its servers count for each one estimated in a prompt...
        output_ratio: ...and in an answer.
    """

    def __init__(
        self,
        name: str,
        replicas: Sequence[TextReplica],
        tokenizer: Tokenizer | None = None,
        *,
        reprompts: bool = False,
    ) -> None:
        super().__init__(name, replicas)
        self.replicas = replicas
        self.tokenizer = tokenizer
        self.reprompts = reprompts
        self.prompt_ratio = LearntRatio()
        self.output_ratio = LearntRatio()

    def at(self, replicas: Sequence[TextReplica], tokenizer: Tokenizer | None, *, reprompts: bool) -> "TextModel":
        """The same model elsewhere, with what was learnt of it."""
        model = TextModel(self.name, replicas, tokenizer, reprompts=reprompts)
        model.prompt_ratio, model.output_ratio, model._card = self.prompt_ratio, self.output_ratio, self._card
        return model


AnyModel = ServedModel | TextModel


class Catalog:
    """All models that are served here."""

    def __init__(self, models: Iterable[AnyModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[AnyModel]:
        return iter(self._models.values())

    def __getitem__(self, name: str) -> AnyModel:
        return self._models[name]


def _is_ready(host: HasModelCard) -> bool:
    try:
        host.card()
    except ReplicaUnavailable:
        return False
    return True
