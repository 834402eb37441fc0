"""Faults of a rollout's settings: versions and tolerances that contradict each other."""

import difflib
from collections.abc import Iterator, Mapping

from maitred.routing.pools.names import NameResolver
from maitred.routing.rollout.config import RolloutConfig, TrialConfig

_TOLERANCES = ("slow", "failed", "refused", "disagreeing", "length")


def rollout_faults(
    name: str, rollout: RolloutConfig, names: NameResolver, rollouts: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Finds versions that are not two different models, and tolerances that contradict each other.

    Args:
        name: Name that requests ask for.
        rollout: The settings.
        names: Resolver of the table's names.
        rollouts: All names with a rollout; this one may be among them.

    Yields:
        The dotted name of a setting within the rollout (empty for the name of the rollout), and a description of its
        fault.
    """
    if names.is_alias(name):
        yield "", f"Is an alias. Name the rollout after the model itself: {names.canonical(name)}."
    elif "*" in name:
        yield "", "Has a `*`. Give it one name."
    elif names.is_auto(name):
        yield "", "A model is chosen behind this name. Roll out one of those models instead."
    for side in ("stable", "canary"):
        model = names.canonical(getattr(rollout, side))
        if names.is_auto(model):
            yield side, "A model is chosen behind this name. Name one of its models instead."
        elif model == name and side == "canary":
            yield side, "Is the name of the rollout itself. Name the new model."
        elif model in rollouts and model != name:
            yield side, f"Is the name of another rollout. Name one of its models: {_model_list(rollouts[model])}."
        elif names.resolve_model(model) is None:
            yield side, _unknown_model_message(model, names)
    if names.canonical(rollout.stable) == names.canonical(rollout.canary):
        yield "canary", "Is the stable model. Name the one that is to be tried."
    yield from ((f"trial.{key}", message) for key, message in _trial_faults(rollout.trial))


def _trial_faults(trial: TrialConfig) -> Iterator[tuple[str, str]]:
    for tolerance in _TOLERANCES:
        abort, promote = getattr(trial, f"{tolerance}_abort"), getattr(trial, f"{tolerance}_promote")
        if not abort < promote:
            yield (
                f"{tolerance}_promote",
                f"{promote:g} is not above {tolerance}_abort, {abort:g}. Between the two lies what can be told "
                "apart only "
                "with ever more requests: leave some room.",
            )


def _model_list(rollout: object) -> str:
    return ", ".join((rollout.stable, rollout.canary)) if isinstance(rollout, RolloutConfig) else "those behind it"


def _unknown_model_message(model: str, names: NameResolver) -> str:
    listed = sorted(names.listed_names)
    close = difflib.get_close_matches(model[:200], listed, n=1)
    if close:
        return f"No such model: {model!r}. Did you mean {close[0]}?"
    return f"No such model: {model!r}. There are: {', '.join(listed)}."
