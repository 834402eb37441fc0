"""A store of rollouts in memory, which can be away."""

from collections.abc import Mapping
from typing import Any

from maitred.core.errors import StoreUnavailable
from maitred.core.rollout import RolloutState
from maitred.store.rollouts import RolloutChange


class PaperRollouts:
    """Implements `maitred.app.admin.rollouts`."""

    def __init__(self) -> None:
        self.states: dict[str, RolloutState] = {}
        self.away = False

    async def all(self) -> list[RolloutState]:
        self._check()
        return list(self.states.values())

    async def change(self, name: str, change: RolloutChange) -> RolloutState:
        self._check()
        self.states[name] = change(self.states.get(name))
        return self.states[name]

    async def declare(self, declared: Mapping[str, Mapping[str, Any]]) -> None:
        self._check()
        for name, settings in declared.items():
            self.states[name] = RolloutState(name=name, settings={}, trial=0).start(dict(settings), 0.0)

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable
