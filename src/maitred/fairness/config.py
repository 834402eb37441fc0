"""Settings of the queue order."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from maitred.core.flow import PriorityClass

_Weight = Annotated[float, Meta(gt=0)]


def _class_weights() -> dict[PriorityClass, float]:
    return {
        PriorityClass.INTERACTIVE: 8.0,
        PriorityClass.STANDARD: 4.0,
        PriorityClass.BATCH: 2.0,
        PriorityClass.BACKGROUND: 1.0,
    }


class QueueOrderConfig(Struct, frozen=True, kw_only=True):
    """Order of the waiting requests."""

    policy: Annotated[
        Literal["fair", "fifo", "priority", "deficit"],
        Meta(
            description="`fair`: classes share by weight, inside a class tenants by what they were served, inside a "
            "key the most pressing deadline goes first. `fifo`: order of arrival. `priority`: more urgent classes "
            "first, then order of arrival. `deficit`: keys take turns, each worth `quantum`; simpler than `fair`, and "
            "without classes.",
        ),
    ] = "fair"
    class_weights: Annotated[
        dict[PriorityClass, _Weight],
        Meta(
            description="What each class gets of the service while all of them have requests waiting, relative to the "
            "others. A class that is not named weighs 1. Policy `fair`.",
        ),
    ] = field(default_factory=_class_weights)
    ageing_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="A request that has waited so long in a class competes in the next more urgent one from then "
            "on, so that nothing waits for ever; null: never. Under policy `fair` only if nothing of the class began "
            "in that time: what waits for others of its class, or of its own tenant, does not become more urgent.",
            extra={"unit": "s"},
        ),
    ] = 30.0
    quantum: Annotated[
        float,
        Meta(
            ge=0,
            description="How far a tenant may be served ahead of the others (in service per weight: tokens of prompts, "
            "and twice the tokens of answers) so that requests with a common prefix run one after the other. 0: not "
            "at all, the fairest. Under policy `deficit`, what a turn is worth; 0: 1,000.",
        ),
    ] = 0.0
