"""Replica that is loaded on demand: its engine is started at a load and ended at an unload.

A sleeping replica has kept its engine's process without the memory-consuming parts, so it is loaded sooner.

Its queue sees one replica. While it is not loaded, its card raises an error with the expected time, so requests wait
for it; after a load that has just failed the error says so, and requests do not wait.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

import psutil

from maitred.core.clock import Clock
from maitred.core.errors import ModelHeld, ModelLoadFailed, ModelLoading, ReplicaUnavailable
from maitred.core.replica import LoadReport, ModelCard, TokenStream
from maitred.core.request import EngineRequest
from maitred.fleet.local import LocalEngine
from maitred.fleet.process import Backoff
from maitred.fleet.residency.footprint import Footprint

_FIRST_RETRY_S, _MAX_RETRY_S = 2.0, 300.0
"""Waits before a failed load is tried again: first and longest.

A load may take memory from other models, so it is retried less often than a dead engine is restarted.
"""

_SLEEP_TIMEOUT_S = 600.0
"""Time limit for an engine to fall asleep or to wake; weights that were not kept may have to be converted again."""
_HELD_RETRY_S = 10.0
"""`Retry-After` of a held model: the time of its release is unknown, so callers should come back rarely."""


class OnDemandReplica:
    """Replica of one model that is loaded on demand. Implements `maitred.core.replica.Replica`.

    Args:
        name: The name that requests use.
        engine: Engine of the model; started and stopped here, again and again.
        footprint: Facts about the model that are known before its first load.
        ready_in_s: Returns in how many seconds it would be loaded; called only while it is not.
        clock: The clock.

    Attributes:
        is_open: Whether new requests may be sent to the replica.
        is_held: Whether its operator keeps it out of memory.
        loads: Number of loads...
        total_load_s: ...and the time that they took together.
        failures: Loads that failed.
        unloads: Number of unloads.
        sleeps: How often it fell asleep...
        wakes: ...and woke.
    """

    def __init__(
        self, name: str, engine: LocalEngine, footprint: Footprint, ready_in_s: Callable[[], float], clock: Clock
    ) -> None:
        self.name = name
        self.engine = engine
        self.footprint = footprint
        self.is_open = self.is_held = False
        self.loads = self.failures = self.unloads = self.sleeps = self.wakes = 0
        self.total_load_s = 0.0
        self._ready_in_s = ready_in_s
        self._clock = clock
        self._backoff = Backoff(first_s=_FIRST_RETRY_S, most_s=_MAX_RETRY_S)
        self._failed_until_s = float("-inf")
        self._listeners: list[Callable[[], None]] = []
        self._engine_running = False
        engine.client.on_change(self._notify)

    # --- replica interface ---

    def card(self) -> ModelCard:
        """Returns the card of the model while it is loaded. Implements `maitred.core.replica.Replica`.

        Raises:
            ModelHeld: The model is not loaded, and the operator keeps it so.
            ModelLoading: The model is not loaded, and a waiting request causes its load.
            ModelLoadFailed: The model could not be loaded, and no load is tried for a while.
            ReplicaUnavailable: Its engine has died and is being restarted.
        """
        if self.is_open:
            return self.engine.client.card()
        if self.is_held:
            raise ModelHeld(retry_after_s=_HELD_RETRY_S)
        failed_for_s = self._failed_until_s - self._clock.monotonic_s()
        if failed_for_s > 0:
            raise ModelLoadFailed(retry_after_s=failed_for_s)
        raise ModelLoading(retry_after_s=self._ready_in_s())

    @property
    def weight(self) -> float:
        """Weight of its engine. Implements `maitred.core.replica.Replica`."""
        return self.engine.client.weight

    def load(self) -> LoadReport:
        """Returns the last load report of its engine. Implements `maitred.core.replica.Replica`."""
        return self.engine.client.load()

    def count_unreported(self) -> int:
        """Returns the number of submitted requests that the last report cannot know of."""
        return self.engine.client.count_unreported()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change and report. Implements `maitred.core.replica.Replica`."""
        self._listeners.append(listener)

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[TokenStream]:
        """Submits the request to its engine. Implements `maitred.core.replica.Replica`."""
        return self.engine.client.generate(request)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    # --- load, sleep and unload ---

    def set_open(self, is_open: bool) -> None:
        """Sets whether new requests may go to the replica."""
        if is_open != self.is_open:
            self.is_open = is_open
            self._notify()

    def set_held(self, is_held: bool) -> None:
        """Sets whether the model is kept out of memory; both settings end the delay after a failed load."""
        self.is_held, self._failed_until_s = is_held, float("-inf")
        self._notify()

    async def load_model(self) -> int:
        """Starts the engine, or wakes it, and waits until it serves.

        Returns:
            The memory of its process, in bytes.

        Raises:
            ReplicaUnavailable: The engine cannot be started; its process is gone.
        """
        try:
            if self._engine_running:
                await self._set_asleep(asleep=False)
            else:
                await self.engine.__aenter__()
                self._engine_running = True
                await self.engine.wait_started()
        except BaseException:
            await self.unload()
            raise
        return self.measure_bytes()

    async def sleep(self) -> int:
        """Makes the engine free its memory and keep its process.

        Returns:
            The memory that the process still takes, in bytes.

        Raises:
            ReplicaUnavailable: The engine was lost or did not sleep; its process is gone.
        """
        self.set_open(False)
        try:
            await self._set_asleep(asleep=True)
        except BaseException:
            await self.unload()
            raise
        self.sleeps += 1
        return self.measure_bytes()

    async def _set_asleep(self, *, asleep: bool) -> None:
        try:
            async with asyncio.timeout(_SLEEP_TIMEOUT_S):
                await self.engine.client.set_asleep(asleep=asleep)
        except TimeoutError:
            raise ReplicaUnavailable(f"Its engine did not {'fall asleep' if asleep else 'wake'} in time.") from None

    @property
    def has_restarted(self) -> bool:
        """Whether the engine was ordered to sleep but is awake, because it died and was restarted."""
        return self._engine_running and not self.engine.client.is_asleep

    @property
    def wakes_in_s(self) -> float:
        """Seconds that waking takes, as its engine reports."""
        return self.engine.client.wakes_in_s

    def on_loaded(self, took_s: float, *, was_asleep: bool) -> None:
        """Counts a load, or a waking, that has succeeded."""
        if was_asleep:
            self.wakes += 1
        else:
            self.loads += 1
            self.total_load_s += took_s
        self._backoff = Backoff(first_s=_FIRST_RETRY_S, most_s=_MAX_RETRY_S)
        self._failed_until_s = float("-inf")

    def on_load_failed(self) -> float:
        """Counts a failed load; returns the seconds until the next one may be tried.

        Requests that wait for the model get the error.
        """
        self.failures += 1
        retry_in_s = self._backoff.wait_s(0.0)
        self._failed_until_s = self._clock.monotonic_s() + retry_in_s
        self._notify()
        return retry_in_s

    async def unload(self) -> None:
        """Ends the engine; its memory is free when this returns. Without an engine, nothing happens."""
        self.set_open(False)
        if self._engine_running:
            self._engine_running = False
            await self.engine.__aexit__(None, None, None)

    def measure_bytes(self) -> int:
        """Measures the memory of the process, including its part of shared memory; 0 without a process."""
        return 0 if self.engine.pid is None else process_memory_bytes(self.engine.pid)


class ModelDescription:
    """Description of a model that is loaded on demand, also while it is not loaded.

    With it, requests are checked before they wait for the model.

    Args:
        replica: The model's replica.
    """

    def __init__(self, replica: OnDemandReplica) -> None:
        self._replica = replica
        self._card = replica.footprint.card

    def card(self) -> ModelCard:
        """Returns the engine's current card, or its last card, or the card that the model's files predict."""
        with suppress(ReplicaUnavailable):
            self._card = self._replica.engine.client.card()
        return self._card


def process_memory_bytes(pid: int) -> int:
    """Measures the memory of a process: its own and its part of shared memory (PSS).

    If the system does not report PSS, the resident memory is used.
    """
    try:
        process = psutil.Process(pid)
        full = process.memory_full_info()
        return int(getattr(full, "pss", 0) or full.rss)
    except psutil.Error:
        return 0
