"""A replica in the time of a clock of its own: its steps take what a function says, and nobody waits."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec.structs import replace

from maitred.core.errors import ReplicaLost
from maitred.core.replica import LoadReport, ModelCard
from maitred.core.request import EngineRequest, FinishReason, TokenDelta
from maitred.testing.script import SCRIPTED_CARD

CARD = replace(SCRIPTED_CARD, max_sequences=64, context_tokens=4096, kv_capacity_tokens=1 << 20)


class Machine:
    """Implements `Replica`, `Clock` and the sleep of what measures it.

    Args:
        step_s: The time of a step, from its decodes and its prompt tokens.
        card: What it says of itself.
        dies_at: The step in which it is lost; None: never.
    """

    def __init__(
        self, step_s: Callable[[int, int], float], card: ModelCard = CARD, *, dies_at: int | None = None
    ) -> None:
        self._step_s = step_s
        self._card = card
        self._dies_at = dies_at
        self._streams: list[_Stream] = []
        self._now_s = 0.0
        self._steps = 0
        self.largest = 0

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        until_s = self._now_s + seconds
        while self._now_s < until_s and any(not stream.over for stream in self._streams):  # noqa: ASYNC110
            await asyncio.sleep(0)

    def card(self) -> ModelCard:
        return self._card

    def load(self) -> LoadReport:
        return LoadReport(running=len(self._streams))

    weight = 1.0

    def count_unreported(self) -> int:
        return 0

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls nobody."""

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator["_Stream"]:
        assert len(self._streams) < self._card.max_sequences
        assert len(request.prompt) + request.sampling.max_tokens <= self._card.context_tokens
        assert all(0 <= token < self._card.vocab_size for token in request.prompt)
        stream = _Stream(self, request)
        self._streams.append(stream)
        try:
            yield stream
        finally:
            self._streams.remove(stream)

    def step(self) -> None:
        """One token for everybody."""
        self._steps += 1
        running = [stream for stream in self._streams if not stream.over]
        self.largest = max(self.largest, len(running))
        prompts = [len(stream.request.prompt) for stream in running if not stream.sent]
        self._now_s += self._step_s(len(running) - len(prompts), sum(prompts))
        for stream in running:
            stream.sent += 1
            stream.pending += 1
            stream.over = stream.sent == stream.request.sampling.max_tokens
            stream.lost = self._steps == self._dies_at


class _Stream:
    def __init__(self, machine: Machine, request: EngineRequest) -> None:
        self.machine = machine
        self.request = request
        self.sent = 0
        self.pending = 0
        self.over = False
        self.lost = False

    def __aiter__(self) -> "_Stream":
        return self

    async def __anext__(self) -> list[TokenDelta]:
        """Whoever has nothing to read when all have read makes the next step happen."""
        await asyncio.sleep(0)
        while not self.pending:
            if self.lost:
                raise ReplicaLost
            if self.over:
                raise StopAsyncIteration
            if not any(stream.pending for stream in self.machine._streams):
                self.machine.step()
            await asyncio.sleep(0)
        self.pending -= 1
        return [TokenDelta(0, [1], FinishReason.LENGTH if self.over else None)]

    def cancel(self, index: int) -> None:
        self.over = True

    def pause(self) -> None:
        raise AssertionError("nothing is paused here")

    def resume(self) -> None:
        raise AssertionError("nothing is paused here")
