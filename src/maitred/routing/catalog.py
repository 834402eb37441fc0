"""Model name -> what serves it."""

import difflib
from collections.abc import Iterable, Iterator, Sequence

from maitred.core.errors import ModelNotFound, ReplicaUnavailable
from maitred.core.ports import Carded, ModelCard
from maitred.core.relay import TextReplica
from maitred.core.tenancy import Principal
from maitred.text.estimate import LearntRatio
from maitred.text.tokenizer import Tokenizer


class _Model:
    """What every model has: a name, and hosts that say whether they are there."""

    def __init__(self, name: str, hosts: Sequence[Carded]) -> None:
        self.name = name
        self._hosts = hosts
        self._card: ModelCard | None = None

    def card(self) -> ModelCard:
        """What a replica says of the model, or last said: while it restarts, requests can still be checked.

        Raises:
            ReplicaUnavailable: No replica has ever been ready.
        """
        failure = ReplicaUnavailable()
        for host in self._hosts:
            try:
                self._card = host.card()
                break
            except ReplicaUnavailable as unavailable:
                failure = unavailable
        if self._card is None:
            raise failure
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
    """

    def __init__(self, name: str, replicas: Carded, tokenizer: Tokenizer) -> None:
        super().__init__(name, [replicas])
        self.tokenizer = tokenizer


class TextModel(_Model):
    """One model that servers of others run, which take and give text.

    Args:
        name: The name that requests use.
        replicas: Those servers; at least one.
        tokenizer: The model's own, where somebody has put it here; None: tokens are estimated.

    Attributes:
        prompt_ratio: Tokens that its servers count for each one estimated in a prompt...
        output_ratio: ...and in an answer.
    """

    def __init__(self, name: str, replicas: Sequence[TextReplica], tokenizer: Tokenizer | None = None) -> None:
        super().__init__(name, replicas)
        self.replicas = replicas
        self.tokenizer = tokenizer
        self.prompt_ratio = LearntRatio()
        self.output_ratio = LearntRatio()


AnyModel = ServedModel | TextModel


class Catalog:
    """All models that are served here."""

    def __init__(self, models: Iterable[AnyModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[AnyModel]:
        return iter(self._models.values())

    def open_to(self, principal: Principal) -> list[str]:
        """The names of the models that this caller may use."""
        return [name for name in self._models if principal.may_use(name)]

    def resolve(self, name: str, principal: Principal) -> AnyModel:
        """The model of that name. One that the caller may not use is to it as if it did not exist.

        Raises:
            ModelNotFound: The message has the names that would have worked, and the closest one.
        """
        model = self._models.get(name)
        if model is None or not principal.may_use(name):
            raise ModelNotFound(_not_found(name, self.open_to(principal)), param="model")
        return model


def _is_ready(host: Carded) -> bool:
    try:
        host.card()
    except ReplicaUnavailable:
        return False
    return True


def _not_found(name: str, served: list[str]) -> str:
    if not served:
        return f"The model {name[:200]!r} is not served to this key, and no other one is."
    close = difflib.get_close_matches(name[:200], served, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"The model {name[:200]!r} is not served here.{hint} Served: {', '.join(sorted(served))}."
