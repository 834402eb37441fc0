"""What does not fit together in a table of routes."""

import difflib
from collections.abc import Iterable, Iterator

from maitred.routing.auto.tiers import ModelTier
from maitred.routing.pools.config import RoutesConfig
from maitred.routing.pools.names import ModelNames
from maitred.routing.rollout.faults import rollout_faults

_CHAINS = ("general", "context_length", "content_policy")
_CHOSEN = "A model is chosen behind this name. Name one of its models instead."


def route_faults(config: RoutesConfig, place: str = "routing") -> Iterator[tuple[str, str]]:
    """Names that lead nowhere, in circles, or to the same place twice.

    Args:
        config: The table.
        place: Its dotted name.

    Yields:
        The dotted name of a setting, and what is wrong with it.
    """
    for name, targets in config.names.items():
        here = f"{place}.names.{name}"
        if name.count("*") > 1:
            yield here, "Has more than one `*`. Keep one."
        if not targets:
            yield here, "Leads to no pool. Name one, or remove the model."
        seen = set()
        for index, target in enumerate(targets):
            there = f"{here}[{index}]"
            if target.pool not in config.pools:
                yield f"{there}.pool", _unknown("pool", target.pool, config.pools)
            if (target.model or "").count("*") > name.count("*"):
                yield f"{there}.model", f"Has a `*`, and {name} has none that it could stand for. Write the name out."
            if (target.pool, target.model) in seen:
                yield there, "Stands before it already. Keep one."
            seen.add((target.pool, target.model))
    names = ModelNames(config)
    for alias, name in config.aliases.items():
        here = f"{place}.aliases.{alias}"
        if alias in config.names:
            yield here, f"Is a model, too. Remove {place}.names.{alias}, or the alias."
        elif "*" in alias:
            yield here, f"An alias is one name. Put names with `*` below {place}.names."
        elif names.is_circle(alias):
            yield here, "Leads back to itself. Let one of these aliases stand for a model."
        elif name not in {**config.aliases, **config.auto, **config.rollouts} and names.find(name) is None:
            yield here, _unknown("model", name, [*config.names, *config.aliases, *config.auto, *config.rollouts])
    for model, fallback in config.fallbacks.items():
        here = f"{place}.fallbacks.{model}"
        if model in config.aliases:
            yield here, f"Is an alias. Say it of the model itself: {names.canonical(model)}."
        elif model in config.auto:
            yield here, f"Is a name behind which a model is chosen. Say it of those below {place}.auto.{model}."
        elif names.find(model) is None:
            yield here, _unknown("model", model, config.names)
        for chain in _CHAINS:
            tried = [names.canonical(name) for name in getattr(fallback, chain)]
            for index, name in enumerate(tried):
                if name == model:
                    yield f"{here}.{chain}[{index}]", "Is the model itself. Remove it."
                elif name in tried[:index]:
                    yield f"{here}.{chain}[{index}]", "Stands before it already. Keep one."
                elif name in config.auto:
                    yield f"{here}.{chain}[{index}]", _CHOSEN
                elif names.find(name) is None:
                    yield f"{here}.{chain}[{index}]", _unknown("model", name, [*config.names, *config.aliases])
    yield from _auto_faults(config, names, f"{place}.auto")
    for name, rollout in config.rollouts.items():
        for key, message in rollout_faults(name, rollout, names, config.rollouts):
            yield f"{place}.rollouts.{name}{key and '.'}{key}", message


def _auto_faults(config: RoutesConfig, names: ModelNames, place: str) -> Iterator[tuple[str, str]]:
    """What is wrong with names behind which a model is chosen."""
    for name, auto in config.auto.items():
        here = f"{place}.{name}"
        if name in config.names or name in config.aliases:
            yield here, "Is a model or an alias, too. Give it a name of its own."
        elif "*" in name:
            yield here, "Has a `*`. Give it one name, and let aliases stand for it."
        models = {size: getattr(auto, size) for size in ModelTier}
        for key, model in (*models.items(), *((f"tasks.{task}", model) for task, model in auto.tasks.items())):
            if names.canonical(model) in config.auto:
                yield f"{here}.{key}", _CHOSEN
            elif names.find(model) is None:
                yield f"{here}.{key}", _unknown("model", model, [*config.names, *config.aliases])
        for index, opening in enumerate(auto.escalation.openings):
            if not opening.strip():
                yield f"{here}.escalation.openings[{index}]", "Is empty, as every answer begins. Remove it."
        thresholds = auto.thresholds
        if len(thresholds) != 2 or not 0 <= thresholds[0] <= thresholds[1] <= 1:
            shown = ", ".join(f"{each:g}" for each in thresholds)
            yield f"{here}.thresholds", f"Must be two numbers from 0 to 1, the lower one first, not [{shown}]."


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name[:200], names, n=1)
    if close:
        return f"No such {kind}: {name!r}. Did you mean {close[0]}?"
    return f"No such {kind}: {name!r}. There are: {', '.join(names)}." if names else f"No {kind} is defined."
