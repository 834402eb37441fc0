"""Name resolution: from a name to its targets, by aliases, then exact names, then names with a `*`."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from maitred.routing.pools.config import RoutesConfig, TargetConfig


class ResolvedName(Struct, frozen=True):
    """Name with its targets."""

    name: str
    """The name without aliases."""
    key: str
    """The name as it stands in the table, with its `*`."""
    targets: Sequence[tuple[str, str | None]]
    """Pairs of a pool and the model name for its servers, the first choice first."""


class NameResolver:
    """Resolver of the names of a routing table.

    Args:
        config: The table; names in a cycle of aliases resolve to nothing.

    Attributes:
        rollout_models: Maps a name with a rollout to the model of requests that are on neither side of it. The owner
            must set it again when this model changes.
    """

    def __init__(self, config: RoutesConfig) -> None:
        self._aliases = {alias: _follow_alias(config.aliases, alias) for alias in config.aliases}
        """Maps each alias to the name that it leads to; None: it leads into a cycle."""
        self._auto = config.auto
        self._rollout_configs = config.rollouts
        self.rollout_models: Mapping[str, str] = {name: rollout.stable for name, rollout in config.rollouts.items()}
        self._exact = {name: targets for name, targets in config.names.items() if "*" not in name}
        parts = ((name.partition("*"), targets) for name, targets in config.names.items() if "*" in name)
        # Patterns are sorted by their number of literal characters, the largest first; then by the length of their
        # prefix, the longest first; then by their order in the table.
        self._patterns: list[tuple[str, str, list[TargetConfig]]] = sorted(
            ((prefix, suffix, targets) for (prefix, _, suffix), targets in parts),
            key=lambda pattern: (-len(pattern[0]) - len(pattern[1]), -len(pattern[0])),
        )

    def canonical(self, name: str) -> str:
        """Returns the final name of an alias; returns any other name unchanged, and an alias in a cycle."""
        final = self._aliases.get(name)
        return name if final is None else final

    def is_alias(self, name: str) -> bool:
        """Returns whether the name is an alias."""
        return name in self._aliases

    def is_auto(self, name: str) -> bool:
        """Returns whether the name selects a model for each request."""
        return name in self._auto

    def is_circular(self, alias: str) -> bool:
        """Returns whether an alias leads only to other aliases, in a cycle."""
        return alias in self._aliases and self._aliases[alias] is None

    def resolve(self, name: str) -> ResolvedName | None:
        """Resolves a name, or returns None if the name has no target."""
        name = self.canonical(name)
        if (model := self.rollout_models.get(name)) is not None:
            resolved = self.resolve_model(model)
            return None if resolved is None else replace(resolved, name=name)
        return self.resolve_model(name)

    def resolve_model(self, name: str) -> ResolvedName | None:
        """Resolves a name as if it had no rollout, or returns None if it has no target."""
        name = self.canonical(name)
        if self.is_circular(name):
            return None
        if name in self._exact:
            return ResolvedName(name, name, _expand_targets(self._exact[name], ""))
        for prefix, suffix, targets in self._patterns:
            if len(name) >= len(prefix) + len(suffix) and name.startswith(prefix) and name.endswith(suffix):
                wildcard = name[len(prefix) : len(name) - len(suffix)]
                return ResolvedName(name, f"{prefix}*{suffix}", _expand_targets(targets, wildcard))
        return None

    @property
    def listed_names(self) -> list[str]:
        """Names that callers may see in a list.

        The list has the names without a `*`, the names that select a model, and aliases.
        """
        aliases = (alias for alias in self._aliases if not self.is_circular(alias))
        return list(dict.fromkeys([*self._exact, *self._auto, *self._rollout_configs, *aliases]))


def _follow_alias(aliases: Mapping[str, str], alias: str) -> str | None:
    """Returns the name that an alias leads to, or None if it leads into a cycle."""
    name = alias
    for _ in aliases:
        name = aliases[name]
        if name not in aliases:
            return name
    return None


def _expand_targets(targets: Sequence[TargetConfig], wildcard: str) -> list[tuple[str, str | None]]:
    return [(target.pool, None if target.model is None else target.model.replace("*", wildcard)) for target in targets]
