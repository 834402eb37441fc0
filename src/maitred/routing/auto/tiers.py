"""Model tiers: chooses the model of a request by its task, or by the difficulty of its prompt.

The difficulty of a prompt is the probability that a small model answers it wrong (`maitred.routing.complexity`), and it
is computed only from the way the prompt is written. An embedding would predict it a little better (AUC 0.72 instead of
0.70, see `benchmarks/routing/router_quality.py`), but each request would wait for an encoder instead of a fraction of a
millisecond.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from maitred.core.inference import Conversation, InferenceRequest, Prompt
from maitred.routing.auto.config import AutoConfig
from maitred.routing.auto.tasks import Task, detect_task
from maitred.routing.complexity import ComplexityModel

WEIGHTS_PATH = Path(__file__).resolve().parents[2] / "bundled" / "complexity-surface.json"
HEAD_CHARACTERS = 1_500
TAIL_CHARACTERS = 500
"""Number of characters kept from the end of a longer text, in addition to `HEAD_CHARACTERS`.

The question is usually at the beginning or at the end, and the bound keeps scoring well under a millisecond.
"""
_SCHEMA_FIELDS = frozenset({"response_format", "guided_json", "structured_outputs"})


class ModelTier(StrEnum):
    """Tier of a model among the three models of a name, from the smallest to the largest."""

    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


_TIERS = tuple(ModelTier)


@dataclass(frozen=True, slots=True)
class TierPreference:
    """Models for one request, in order of preference.

    Attributes:
        upward: Names of the preferred model and of its substitutes, each larger than the one before.
        downward: Names of the smaller models, the largest first, for callers who may use no model of `upward`.
        reason: Tier or task because of which `upward` begins with its first model.
        score: Difficulty of the prompt, from 0 to 1; None if it could not be scored or did not need a score.
        models_by_size: Names of all three models, the smallest first.
    """

    upward: tuple[str, ...]
    downward: tuple[str, ...]
    reason: str
    score: float | None = None
    models_by_size: tuple[str, ...] = ()


class AutoModel:
    """Models of one name; each request gets one of them.

    Args:
        config: Valid settings.
        model: Model that scores prompts without an embedding; None selects the model that is shipped with maitred.

    Attributes:
        escalation: Settings that decide which answers are also requested from a larger model.
    """

    def __init__(self, config: AutoConfig, model: ComplexityModel | None = None) -> None:
        self._models_by_tier = {tier: getattr(config, tier) for tier in _TIERS}
        self.escalation = config.escalation
        self._tasks = config.tasks
        self._medium_threshold, self._large_threshold = config.thresholds
        self._complexity_model = model or _bundled_model()

    @property
    def model_names(self) -> list[str]:
        """Names of all models, without duplicates."""
        return list(dict.fromkeys([*self._models_by_tier.values(), *self._tasks.values()]))

    def preference_for(self, request: InferenceRequest | None = None) -> TierPreference:
        """Returns the models for a request.

        If one request has several prompts, the first prompt decides.

        Args:
            request: The request; None gives the order for a request that is not known yet.
        """
        text = None if request is None else prompt_text(request.prompts[0])
        if request is None or text is None:
            return self._build_preference(ModelTier.MEDIUM, None)
        score = self._complexity_model.score(text, b"")
        tier = ModelTier.SMALL
        if score >= self._medium_threshold:
            tier = ModelTier.LARGE if score >= self._large_threshold else ModelTier.MEDIUM
        task = detect_task(text, has_schema=not _SCHEMA_FIELDS.isdisjoint(request.needs)) if self._tasks else None
        return self._build_preference(tier, score, task)

    def _build_preference(self, tier: ModelTier, score: float | None, task: Task | None = None) -> TierPreference:
        index = _TIERS.index(tier)
        models_by_size = tuple(self._models_by_tier.values())
        upward, downward = models_by_size[index:], models_by_size[:index][::-1]
        if task is not None and task in self._tasks:
            return TierPreference(
                upward=(self._tasks[task], *upward),
                downward=downward,
                reason=task,
                score=score,
                models_by_size=models_by_size,
            )
        return TierPreference(upward, downward, reason=tier, score=score, models_by_size=models_by_size)


def prompt_text(prompt: Prompt) -> str | None:
    """Returns the shortened text of a prompt, or of the last user message of a conversation.

    None: The result is None if there is no readable text, such as for token ids or for a message with only an image.
    """
    match prompt:
        case str():
            text = prompt
        case Conversation():
            text = _last_user_text(prompt.messages)
        case _:
            return None
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS:
        text = f"{text[:HEAD_CHARACTERS]}\n{text[-TAIL_CHARACTERS:]}"
    return text if text.strip() else None


def _last_user_text(messages: list[dict[str, Any]]) -> str:
    content = next((message.get("content") for message in reversed(messages) if message.get("role") == "user"), None)
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        content = "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


@cache
def _bundled_model() -> ComplexityModel:
    return ComplexityModel.load(WEIGHTS_PATH)
