"""Faults of a routing table: settings that contradict each other or have no target."""

import difflib
from collections.abc import Iterable, Iterator

from maitred.routing.auto.tiers import ModelTier
from maitred.routing.pools.config import RoutesConfig
from maitred.routing.pools.names import NameResolver
from maitred.routing.rollout.faults import rollout_faults

_CHAINS = ("general", "context_length", "content_policy")
_AUTO_NAME_MESSAGE = "A model is chosen behind this name. Name one of its models instead."


def route_faults(config: RoutesConfig, location: str = "routing") -> Iterator[tuple[str, str]]:
    """Finds names without a target, names in a cycle, and names with a repeated target.

    Args:
        config: The routing table.
        location: Dotted name of the routing table.

    Yields:
        The dotted name of a setting and a description of its fault.
    """
    for name, targets in config.names.items():
        setting_key = f"{location}.names.{name}"
        if name.count("*") > 1:
            yield setting_key, "Has more than one `*`. Keep one."
        if not targets:
            yield setting_key, "Leads to no pool. Name one, or remove the model."
        seen_targets = set()
        for index, target in enumerate(targets):
            target_key = f"{setting_key}[{index}]"
            if target.pool not in config.pools:
                yield f"{target_key}.pool", _unknown_name_message("pool", target.pool, config.pools)
            if (target.model or "").count("*") > name.count("*"):
                yield (
                    f"{target_key}.model",
                    f"Has a `*`, and {name} has none that it could stand for. Write the name out.",
                )
            if (target.pool, target.model) in seen_targets:
                yield target_key, "Stands before it already. Keep one."
            seen_targets.add((target.pool, target.model))
    names = NameResolver(config)
    for alias, name in config.aliases.items():
        setting_key = f"{location}.aliases.{alias}"
        if alias in config.names:
            yield setting_key, f"Is a model, too. Remove {location}.names.{alias}, or the alias."
        elif "*" in alias:
            yield setting_key, f"An alias is one name. Put names with `*` below {location}.names."
        elif names.is_circular(alias):
            yield setting_key, "Leads back to itself. Let one of these aliases stand for a model."
        elif name not in {**config.aliases, **config.auto, **config.rollouts} and names.resolve(name) is None:
            yield (
                setting_key,
                _unknown_name_message("model", name, [*config.names, *config.aliases, *config.auto, *config.rollouts]),
            )
    for model, fallback in config.fallbacks.items():
        setting_key = f"{location}.fallbacks.{model}"
        if model in config.aliases:
            yield setting_key, f"Is an alias. Say it of the model itself: {names.canonical(model)}."
        elif model in config.auto:
            yield (
                setting_key,
                f"Is a name behind which a model is chosen. Say it of those below {location}.auto.{model}.",
            )
        elif names.resolve(model) is None:
            yield setting_key, _unknown_name_message("model", model, config.names)
        for chain in _CHAINS:
            chain_names = [names.canonical(name) for name in getattr(fallback, chain)]
            for index, name in enumerate(chain_names):
                if name == model:
                    yield f"{setting_key}.{chain}[{index}]", "Is the model itself. Remove it."
                elif name in chain_names[:index]:
                    yield f"{setting_key}.{chain}[{index}]", "Stands before it already. Keep one."
                elif name in config.auto:
                    yield f"{setting_key}.{chain}[{index}]", _AUTO_NAME_MESSAGE
                elif names.resolve(name) is None:
                    yield (
                        f"{setting_key}.{chain}[{index}]",
                        _unknown_name_message("model", name, [*config.names, *config.aliases]),
                    )
    yield from _auto_faults(config, names, f"{location}.auto")
    for name, rollout in config.rollouts.items():
        for key, message in rollout_faults(name, rollout, names, config.rollouts):
            yield f"{location}.rollouts.{name}{key and '.'}{key}", message


def _auto_faults(config: RoutesConfig, names: NameResolver, location: str) -> Iterator[tuple[str, str]]:
    """Finds faults of the names that select a model."""
    for name, auto in config.auto.items():
        setting_key = f"{location}.{name}"
        if name in config.names or name in config.aliases:
            yield setting_key, "Is a model or an alias, too. Give it a name of its own."
        elif "*" in name:
            yield setting_key, "Has a `*`. Give it one name, and let aliases stand for it."
        models = {size: getattr(auto, size) for size in ModelTier}
        for key, model in (*models.items(), *((f"tasks.{task}", model) for task, model in auto.tasks.items())):
            if names.canonical(model) in config.auto:
                yield f"{setting_key}.{key}", _AUTO_NAME_MESSAGE
            elif names.resolve(model) is None:
                yield f"{setting_key}.{key}", _unknown_name_message("model", model, [*config.names, *config.aliases])
        for index, opening in enumerate(auto.escalation.openings):
            if not opening.strip():
                yield f"{setting_key}.escalation.openings[{index}]", "Is empty, as every answer begins. Remove it."
        thresholds = auto.thresholds
        if len(thresholds) != 2 or not 0 <= thresholds[0] <= thresholds[1] <= 1:
            thresholds_text = ", ".join(f"{threshold:g}" for threshold in thresholds)
            yield (
                f"{setting_key}.thresholds",
                f"Must be two numbers from 0 to 1, the lower one first, not [{thresholds_text}].",
            )


def _unknown_name_message(kind: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name[:200], names, n=1)
    if close:
        return f"No such {kind}: {name!r}. Did you mean {close[0]}?"
    return f"No such {kind}: {name!r}. There are: {', '.join(names)}." if names else f"No {kind} is defined."
