"""From a name to its targets: aliases, then names as they stand, then those with a `*`."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from maitred.routing.pools.config import RoutesConfig, TargetConfig


class ResolvedName(Struct, frozen=True):
    """What a name leads to."""

    name: str
    """Without aliases."""
    key: str
    """As it stands in the table, with its `*`."""
    targets: Sequence[tuple[str, str | None]]
    """Pool and what its servers are to be asked for, the first choice first."""


class ModelNames:
    """The names of a table.

    Args:
        config: The table. Circles among its aliases lead nowhere.

    Attributes:
        rollouts: A name with a rollout -> the model that serves whoever is on neither side of it. To be set anew when
            that changes.
    """

    def __init__(self, config: RoutesConfig) -> None:
        self._aliases = config.aliases
        self._auto = config.auto
        self._declared = config.rollouts
        self.rollouts: Mapping[str, str] = {name: each.stable for name, each in config.rollouts.items()}
        self._exact = {name: targets for name, targets in config.names.items() if "*" not in name}
        parts = ((name.partition("*"), targets) for name, targets in config.names.items() if "*" in name)
        # The most literal characters first, of as many the longest beginning; then as they stand in the table.
        self._patterns: list[tuple[str, str, list[TargetConfig]]] = sorted(
            ((before, after, targets) for (before, _, after), targets in parts),
            key=lambda pattern: (-len(pattern[0]) - len(pattern[1]), -len(pattern[0])),
        )

    def canonical(self, name: str) -> str:
        """The name that an alias stands for in the end; any other name is itself."""
        for _ in self._aliases:
            if name not in self._aliases:
                break
            name = self._aliases[name]
        return name

    def is_alias(self, name: str) -> bool:
        """Whether it stands for another name."""
        return name in self._aliases

    def is_auto(self, name: str) -> bool:
        """Whether a model is chosen behind it."""
        return name in self._auto

    def is_circle(self, alias: str) -> bool:
        """Whether an alias stands for no name in the end."""
        return self.canonical(alias) in self._aliases

    def find(self, name: str) -> ResolvedName | None:
        """What it leads to; None: nowhere."""
        name = self.canonical(name)
        if (model := self.rollouts.get(name)) is not None:
            found = self.model(model)
            return None if found is None else replace(found, name=name)
        return self.model(name)

    def model(self, name: str) -> ResolvedName | None:
        """What it leads to, if there is a rollout of that name without it."""
        name = self.canonical(name)
        if name in self._exact:
            return ResolvedName(name, name, _targets(self._exact[name], ""))
        for before, after, targets in self._patterns:
            if len(name) >= len(before) + len(after) and name.startswith(before) and name.endswith(after):
                starred = name[len(before) : len(name) - len(after)]
                return ResolvedName(name, f"{before}*{after}", _targets(targets, starred))
        return None

    @property
    def listed(self) -> list[str]:
        """The names that can be told to callers: those without a `*`, those behind which one is chosen, and aliases."""
        aliases = (alias for alias in self._aliases if not self.is_circle(alias))
        return list(dict.fromkeys([*self._exact, *self._auto, *self._declared, *aliases]))


def _targets(targets: Sequence[TargetConfig], starred: str) -> list[tuple[str, str | None]]:
    return [(each.pool, None if each.model is None else each.model.replace("*", starred)) for each in targets]
