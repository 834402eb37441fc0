"""Which of several models a request is for: by what kind of work it is, else by how hard it looks.

How hard it looks is the probability that a small model answers it wrong (`maitred.routing.complexity`), from how it is
written alone. An embedding would tell a little more (AUC 0.72 instead of 0.70, see
`benchmarks/routing/router_quality.py`), and cost each request a wait for an encoder instead of a fraction of a
millisecond.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from maitred.core.answer import InferenceRequest
from maitred.routing.auto.config import AutoConfig
from maitred.routing.auto.prompt import prompt_text
from maitred.routing.auto.tasks import Task, detect_task
from maitred.routing.complexity import ComplexityModel

WEIGHTS = Path(__file__).resolve().parents[2] / "bundled" / "complexity-surface.json"
_SCHEMAS = frozenset({"response_format", "guided_json", "structured_outputs"})


class ModelTier(StrEnum):
    """One of the three models, the smallest first."""

    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


_SIZES = tuple(ModelTier)


@dataclass(frozen=True, slots=True)
class TierPreference:
    """The models for one request.

    Attributes:
        upward: The names of the one it is for and of those that stand in for it, each larger than the one before.
        downward: Those that are smaller, the largest first: for callers to whom none of the others is open.
        reason: A size or a task: why `upward` begins as it does.
        score: How hard it looks, from 0 to 1; None: it could not be scored, or did not need to be.
        sizes: The names of all three models, the smallest first.
    """

    upward: tuple[str, ...]
    downward: tuple[str, ...]
    reason: str
    score: float | None = None
    sizes: tuple[str, ...] = ()


class AutoModel:
    """The models behind one name.

    Args:
        config: Without `auto_faults`.
        model: What scores prompts without an embedding; None: the one that comes with maitred.

    Attributes:
        escalation: Which answers are asked of a larger model as well.
    """

    def __init__(self, config: AutoConfig, model: ComplexityModel | None = None) -> None:
        self._names = {size: getattr(config, size) for size in _SIZES}
        self.escalation = config.escalation
        self._tasks = config.tasks
        self._medium_from, self._large_from = config.thresholds
        self._model = model or _bundled()

    @property
    def names(self) -> list[str]:
        """Of all models, each once."""
        return list(dict.fromkeys([*self._names.values(), *self._tasks.values()]))

    def preference(self, request: InferenceRequest | None = None) -> TierPreference:
        """The models for a request. Of several prompts in one request the first counts.

        Args:
            request: The request; None: before there is any.
        """
        text = None if request is None else prompt_text(request.prompts[0])
        if request is None or text is None:
            return self._order_for(ModelTier.MEDIUM, None)
        score = self._model.score(text, b"")
        size = ModelTier.SMALL
        if score >= self._medium_from:
            size = ModelTier.LARGE if score >= self._large_from else ModelTier.MEDIUM
        task = detect_task(text, has_schema=not _SCHEMAS.isdisjoint(request.needs)) if self._tasks else None
        return self._order_for(size, score, task)

    def _order_for(self, size: ModelTier, score: float | None, task: Task | None = None) -> TierPreference:
        place = _SIZES.index(size)
        sizes = tuple(self._names.values())
        upward, downward = sizes[place:], sizes[:place][::-1]
        if task is not None and task in self._tasks:
            return TierPreference((self._tasks[task], *upward), downward, task, score, sizes)
        return TierPreference(upward, downward, size, score, sizes)


@cache
def _bundled() -> ComplexityModel:
    return ComplexityModel.load(WEIGHTS)
