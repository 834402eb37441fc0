"""What does not fit together in a table of routes."""

import difflib
from collections.abc import Iterable, Iterator

from maitred.routing.pools.config import RoutesConfig
from maitred.routing.pools.names import Names

_CHAINS = ("general", "context_length", "content_policy")


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
    names = Names(config)
    for alias, name in config.aliases.items():
        here = f"{place}.aliases.{alias}"
        if alias in config.names:
            yield here, f"Is a model, too. Remove {place}.names.{alias}, or the alias."
        elif "*" in alias:
            yield here, f"An alias is one name. Put names with `*` below {place}.names."
        elif names.is_circle(alias):
            yield here, "Leads back to itself. Let one of these aliases stand for a model."
        elif name not in config.aliases and names.find(name) is None:
            yield here, _unknown("model", name, [*config.names, *config.aliases])
    for model, fallback in config.fallbacks.items():
        here = f"{place}.fallbacks.{model}"
        if model in config.aliases:
            yield here, f"Is an alias. Say it of the model itself: {names.canonical(model)}."
        elif names.find(model) is None:
            yield here, _unknown("model", model, config.names)
        for chain in _CHAINS:
            tried = [names.canonical(name) for name in getattr(fallback, chain)]
            for index, name in enumerate(tried):
                if name == model:
                    yield f"{here}.{chain}[{index}]", "Is the model itself. Remove it."
                elif name in tried[:index]:
                    yield f"{here}.{chain}[{index}]", "Stands before it already. Keep one."
                elif names.find(name) is None:
                    yield f"{here}.{chain}[{index}]", _unknown("model", name, [*config.names, *config.aliases])


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name[:200], names, n=1)
    if close:
        return f"No such {kind}: {name!r}. Did you mean {close[0]}?"
    return f"No such {kind}: {name!r}. There are: {', '.join(names)}." if names else f"No {kind} is defined."
