"""Model name -> what serves it."""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from maitred.core.errors import ModelNotFound
from maitred.core.ports import ModelCard, Replica
from maitred.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under the name that requests use.

    Attributes:
        card: As the replica gave it when it first came up; a list of models must not depend on its health.
    """

    name: str
    replica: Replica
    tokenizer: Tokenizer
    card: ModelCard


class Catalog:
    """All models that are served here."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def resolve(self, name: str) -> ServedModel:
        """The model of that name.

        Raises:
            ModelNotFound: With the names that would have worked, the closest first.
        """
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(self._not_found(name), param="model")
        return model

    def _not_found(self, name: str) -> str:
        close = difflib.get_close_matches(name, self._models, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        served = ", ".join(sorted(self._models))
        return f"The model {name[:200]!r} is not served here.{hint} Served: {served}."
