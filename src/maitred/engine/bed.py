"""What a sleeping engine does without: its weights and its KV cache, and those of its draft model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from maitred.engine.models.decoder import Decoder
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.runner import Forward, ModelRunner
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.speculate.draft_model import DraftModel


@dataclass(frozen=True, slots=True)
class ModelBed:
    """Implements `maitred.engine.slumber.Bed`.

    Attributes:
        runner: Computes with them.
        scheduler: Whose blocks lose their contents.
        load: Reads the model, or maps it, and makes an empty cache of the size that its pool is for.
        draft: Writes ahead, if anybody does.
        load_draft: The same for it; None: there is none.
    """

    runner: ModelRunner
    scheduler: Scheduler
    load: Callable[[], tuple[Forward, KVCache]]
    draft: DraftModel | None = None
    load_draft: Callable[[], tuple[Decoder, KVCache] | None] = lambda: None

    def lie_down(self) -> None:
        """See `Bed`."""
        self.runner.drop()
        if self.draft is not None:
            self.draft.drop()
        self.scheduler.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def get_up(self) -> None:
        """See `Bed`."""
        self.runner.adopt(*self.load())
        if self.draft is not None and (again := self.load_draft()) is not None:
            self.draft.adopt(*again)
