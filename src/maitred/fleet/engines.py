"""Group of all engines of one model; the model is served while one of them is up.

Each engine starts, dies and comes back by itself. Which of them gets a request is decided by `maitred.dispatch`; this
module only keeps them alive and combines their cards.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from types import TracebackType

from msgspec.structs import replace

from maitred.core.errors import ReplicaUnavailable
from maitred.core.replica import ModelCard
from maitred.fleet.local import LocalEngine
from maitred.fleet.remote import RemoteEngine

ManagedEngine = LocalEngine | RemoteEngine


class EngineGroup(Mapping[str, ManagedEngine]):
    """Engines of one model. Entering starts all of them; leaving stops all.

    Args:
        engines: The engines by their names in the ledger; at least one. All run the same model.
    """

    def __init__(self, engines: Mapping[str, ManagedEngine]) -> None:
        self._engines = dict(engines)
        self._cards: dict[str, ModelCard] = {}
        self._exit_stack = AsyncExitStack()

    def __getitem__(self, name: str) -> ManagedEngine:
        return self._engines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def is_ready(self) -> bool:
        """Whether any of the engines would take a request now."""
        return any(engine.client.is_ready for engine in self._engines.values())

    def card(self) -> ModelCard:
        """Returns the card of all engines together: a request must fit each of them, and their capacities add up.

        Raises:
            ReplicaUnavailable: None of them is ready.
        """
        failure: ReplicaUnavailable | None = None
        for name, engine in self._engines.items():
            try:
                self._cards[name] = engine.client.card()
            except ReplicaUnavailable as unavailable:
                if failure is None or (unavailable.retry_after_s or 0.0) < (failure.retry_after_s or 0.0):
                    failure = unavailable
        if failure is not None and not self.is_ready:
            raise failure
        cards = list(self._cards.values())
        if len(cards) == 1:
            return cards[0]
        return replace(
            cards[0],
            context_tokens=min(card.context_tokens for card in cards),
            max_choices=min(card.max_choices for card in cards),
            max_sequences=sum(card.max_sequences for card in cards),
            kv_capacity_tokens=sum(card.kv_capacity_tokens for card in cards),
        )

    async def wait_started(self) -> None:
        """Waits until the first of the engines has been ready.

        Raises:
            ReplicaUnavailable: One cannot start, and none had.
        """
        starts = [asyncio.create_task(engine.wait_started(), name=f"start of {name}") for name, engine in self.items()]
        try:
            done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
            for start in done:
                start.result()
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def __aenter__(self) -> "EngineGroup":
        async with AsyncExitStack() as exit_stack:
            for engine in self._engines.values():
                await exit_stack.enter_async_context(engine)
            self._exit_stack = exit_stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit_stack.__aexit__(kind, error, trace)
