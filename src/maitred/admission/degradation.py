"""The `degradation` setting of a model: reductions of a request before it is refused."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct


class DegradationStep(Struct, frozen=True, kw_only=True):
    """One step of the degradation ladder; if it does not help, the next step is tried."""

    step: Annotated[
        Literal["shorten", "model", "overflow"],
        Meta(
            description="`shorten` lowers `max_tokens` to `to_tokens`, `model` answers with the smaller model `to`, "
            "`overflow` sends the whole request to the model `to`, such as a provider's, as far as the caller's limits "
            "for that model allow and the request may leave."
        ),
    ]
    to_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="For `shorten`: what `max_tokens` becomes. Several such steps give up the length bit by bit.",
            extra={"unit": "tokens"},
        ),
    ] = None
    to: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(description="For `model` and `overflow`: the name under which the other model is served."),
    ] = None


def ladder_faults(steps: Sequence[DegradationStep], place: str) -> Iterator[tuple[str, str]]:
    """Yields the faults of steps: missing fields, unsupported fields, or no effect.

    Args:
        steps: The ladder, first step first.
        place: Dotted name of the setting.
    """
    shortest: int | None = None
    seen: set[str] = set()
    for index, step in enumerate(steps):
        here = f"{place}[{index}]"
        for name, owners in (("to_tokens", ("shorten",)), ("to", ("model", "overflow"))):
            value = getattr(step, name)
            if step.step in owners and value is None:
                yield f"{here}.{name}", f"Must be set: the step `{step.step}` needs to know it."
            elif step.step not in owners and value is not None:
                yield f"{here}.{name}", f"Belongs to the step `{owners[0]}`, not to `{step.step}`. Remove it."
        if step.step == "shorten" and step.to_tokens is not None:
            if shortest is not None and step.to_tokens >= shortest:
                yield f"{here}.to_tokens", f"A step before it shortens to {shortest} already. Lower it, or remove it."
            shortest = min(step.to_tokens, shortest or step.to_tokens)
        name = f"{step.step} {step.to}"
        if step.step != "shorten" and name in seen:
            yield f"{here}.step", "The same step stands before it. Keep one."
        seen.add(name)
