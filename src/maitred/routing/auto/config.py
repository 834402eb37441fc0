"""Settings of `routing.auto`: names that select a model for each request."""

from typing import Annotated

from msgspec import Meta, Struct

from maitred.routing.auto.tasks import Task
from maitred.routing.escalation.config import EscalationConfig


class AutoConfig(Struct, frozen=True, kw_only=True):
    """Settings of one name with three models; the difficulty of a prompt selects the model."""

    small: Annotated[str, Meta(description="A model's name, for prompts that score below the first threshold.")]
    medium: Annotated[
        str, Meta(description="For those from there to the second threshold, and for what cannot be scored.")
    ]
    large: Annotated[str, Meta(description="For those from the second threshold on.")]
    thresholds: Annotated[
        tuple[float, ...],
        Meta(
            description="Two scores from 0 to 1, the lower first. A score is the predicted probability that a small "
            "model answers wrong, learnt from examination questions: set them on your own traffic."
        ),
    ] = (0.3, 0.7)
    tasks: Annotated[
        dict[Task, str],
        Meta(
            description="Models for kinds of work, however hard: `code`, `extraction` (a JSON schema, or a wish for "
            "fields or labels) and `chat` (anything else). What has no model here goes by its score."
        ),
    ] = {}
    escalation: EscalationConfig = EscalationConfig()


AutoModels = Annotated[
    dict[str, AutoConfig],
    Meta(
        description="A name that requests use, such as `auto` -> the models of which one is chosen for each request. "
        "The caller must be allowed the name and the model."
    ),
]
