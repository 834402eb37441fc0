"""What a sleeping engine does without: its weights and its KV cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from maitred.engine.models.kv_cache import KVCache
from maitred.engine.runner import Forward, ModelRunner
from maitred.engine.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class ModelBed:
    """Implements `maitred.engine.slumber.Bed`.

    Attributes:
        runner: Computes with them.
        scheduler: Whose blocks lose their contents.
        load: Reads the model, or maps it, and makes an empty cache of the size that its pool is for.
    """

    runner: ModelRunner
    scheduler: Scheduler
    load: Callable[[], tuple[Forward, KVCache]]

    def lie_down(self) -> None:
        """See `Bed`."""
        self.runner.drop()
        self.scheduler.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def get_up(self) -> None:
        """See `Bed`."""
        self.runner.adopt(*self.load())
