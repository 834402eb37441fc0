"""Model name -> what serves it."""

import difflib
from collections.abc import Iterable, Iterator

from maitred.core.errors import ModelNotFound, ReplicaUnavailable
from maitred.core.ports import ModelCard, Replica
from maitred.core.tenancy import Principal
from maitred.text.tokenizer import Tokenizer


class ServedModel:
    """One model under the name that requests use.

    Args:
        name: The name.
        replica: Where it runs.
        tokenizer: The model's own.
    """

    def __init__(self, name: str, replica: Replica, tokenizer: Tokenizer) -> None:
        self.name = name
        self.replica = replica
        self.tokenizer = tokenizer
        self._card: ModelCard | None = None

    def card(self) -> ModelCard:
        """What the replica says of the model, or last said: while it restarts, requests can still be checked.

        Raises:
            ReplicaUnavailable: The replica has never been ready.
        """
        try:
            self._card = self.replica.card()
        except ReplicaUnavailable:
            if self._card is None:
                raise
        return self._card

    def ready(self) -> bool:
        """Whether a request could run now."""
        try:
            self.replica.card()
        except ReplicaUnavailable:
            return False
        return True


class Catalog:
    """All models that are served here."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def open_to(self, principal: Principal) -> list[str]:
        """The names of the models that this caller may use."""
        return [name for name in self._models if principal.may_use(name)]

    def resolve(self, name: str, principal: Principal) -> ServedModel:
        """The model of that name. One that the caller may not use is to it as if it did not exist.

        Raises:
            ModelNotFound: The message has the names that would have worked, and the closest one.
        """
        model = self._models.get(name)
        if model is None or not principal.may_use(name):
            raise ModelNotFound(_not_found(name, self.open_to(principal)), param="model")
        return model


def _not_found(name: str, served: list[str]) -> str:
    if not served:
        return f"The model {name[:200]!r} is not served to this key, and no other one is."
    close = difflib.get_close_matches(name[:200], served, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"The model {name[:200]!r} is not served here.{hint} Served: {', '.join(sorted(served))}."
