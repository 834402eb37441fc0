"""What a sleeping engine does without: its weights and its KV cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from maitred.engine.kv.blocks import BlockPool
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.runner import Forward, ModelRunner


@dataclass(frozen=True, slots=True)
class ModelBed:
    """Implements `maitred.engine.slumber.Bed`.

    Attributes:
        runner: Computes with them.
        pool: Whose blocks lose their contents.
        load: Reads the model, or maps it, and makes an empty cache of the size that the pool is for.
    """

    runner: ModelRunner
    pool: BlockPool
    load: Callable[[], tuple[Forward, KVCache]]

    def lie_down(self) -> None:
        """See `Bed`."""
        self.runner.drop()
        self.pool.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def get_up(self) -> None:
        """See `Bed`."""
        self.runner.adopt(*self.load())
