"""What a sleeping engine does without: the weights and the KV caches of its models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from maitred.engine.scheduler.scheduler import Scheduler


class LoadedModelMemory(NamedTuple):
    """A model with its cache, as whoever computes with them has them.

    Attributes:
        drop: Lets go of both.
        restore: Reads the model again, or maps it, and makes an empty cache of the same size.
    """

    drop: Callable[[], None]
    restore: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Implements `maitred.engine.sleep.Sleepable`.

    Attributes:
        models: All that the engine has.
        scheduler: Whose blocks lose their contents.
    """

    models: Sequence[LoadedModelMemory]
    scheduler: Scheduler

    def lie_down(self) -> None:
        """See `Bed`."""
        for model in self.models:
            model.drop()
        self.scheduler.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def get_up(self) -> None:
        """See `Bed`."""
        for model in self.models:
            model.restore()
