"""A model that comes and goes: its engine is started when the model is loaded and ended when it is unloaded.

One that sleeps has kept its engine's process, without what takes the memory, and is back sooner.

To the queue it is one replica. While it is not there it says when it would be, so requests wait for it; a load that has
just failed it says too, so they do not.
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

_FIRST_S, _MOST_S = 2.0, 300.0
"""Before a load that failed is tried again: it may cost others their memory, so less often than an engine that died."""

_REST_S = 600.0
"""For an engine to fall asleep or to wake: weights that are not kept may be converted again."""
_HELD_RETRY_S = 10.0
"""Nobody knows when an operator lets a model come back; who comes again asks rarely."""


class OnDemandReplica:
    """One model. Implements `maitred.core.replica.Replica`.

    Args:
        name: The name that requests use.
        engine: Runs it; entered here, again and again.
        footprint: What is known of the model before it was ever loaded.
        ready_in_s: When it would be there; asked while it is not.
        clock: The time.

    Attributes:
        open: Whether new requests may go to it.
        is_held: Whether its operator keeps it out of memory.
        loads: How often it was loaded...
        load_s: ...and how long that took together.
        failures: Loads that failed.
        unloads: How often it was unloaded.
        sleeps: How often it fell asleep...
        wakes: ...and woke.
    """

    def __init__(
        self, name: str, engine: LocalEngine, footprint: Footprint, ready_in_s: Callable[[], float], clock: Clock
    ) -> None:
        self.name = name
        self.engine = engine
        self.footprint = footprint
        self.open = self.is_held = False
        self.loads = self.failures = self.unloads = self.sleeps = self.wakes = 0
        self.load_s = 0.0
        self._ready_in_s = ready_in_s
        self._clock = clock
        self._backoff = Backoff(first_s=_FIRST_S, most_s=_MOST_S)
        self._failed_until_s = float("-inf")
        self._listeners: list[Callable[[], None]] = []
        self._entered = False
        engine.link.on_change(self._notify)

    # --- the replica ---

    def card(self) -> ModelCard:
        """See `core.ports.Replica`.

        Raises:
            ModelHeld: It is not there, and stays away.
            ModelLoading: It is not there, and is loaded if a request waits for it.
            ModelLoadFailed: It could not be loaded, and is left in peace for a while.
            ReplicaUnavailable: Its engine has died and is started again.
        """
        if self.open:
            return self.engine.link.card()
        if self.is_held:
            raise ModelHeld(retry_after_s=_HELD_RETRY_S)
        failed_for_s = self._failed_until_s - self._clock.monotonic_s()
        if failed_for_s > 0:
            raise ModelLoadFailed(retry_after_s=failed_for_s)
        raise ModelLoading(retry_after_s=self._ready_in_s())

    @property
    def weight(self) -> float:
        """See `core.ports.Replica`."""
        return self.engine.link.weight

    def load(self) -> LoadReport:
        """See `core.ports.Replica`."""
        return self.engine.link.load()

    def unreported(self) -> int:
        """See `core.ports.Replica`."""
        return self.engine.link.unreported()

    def on_change(self, listener: Callable[[], None]) -> None:
        """See `core.ports.Replica`."""
        self._listeners.append(listener)

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[TokenStream]:
        """See `core.ports.Replica`."""
        return self.engine.link.generate(request)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    # --- coming and going ---

    def admit(self, is_open: bool) -> None:
        """Whether new requests may go to it, from now on."""
        if is_open != self.open:
            self.open = is_open
            self._notify()

    def hold(self, is_held: bool) -> None:
        """Whether it is kept out of memory from now on. Whoever is let in may be loaded at once, whatever failed."""
        self.is_held, self._failed_until_s = is_held, float("-inf")
        self._notify()

    async def load_in(self) -> int:
        """Starts its engine, or wakes it, and waits until it serves.

        Returns:
            What its process takes, in bytes.

        Raises:
            ReplicaUnavailable: It cannot be started; nothing of it is left.
        """
        try:
            if self._entered:
                await self._set_asleep(asleep=False)
            else:
                await self.engine.__aenter__()
                self._entered = True
                await self.engine.started()
        except BaseException:
            await self.unload()
            raise
        return self.measured_bytes()

    async def sleep(self) -> int:
        """Its engine gives back what it can and keeps its process.

        Returns:
            What that takes, in bytes.

        Raises:
            ReplicaUnavailable: It was lost, or does not; nothing of it is left.
        """
        self.admit(False)
        try:
            await self._set_asleep(asleep=True)
        except BaseException:
            await self.unload()
            raise
        self.sleeps += 1
        return self.measured_bytes()

    async def _set_asleep(self, *, asleep: bool) -> None:
        try:
            async with asyncio.timeout(_REST_S):
                await self.engine.link.sleep(asleep=asleep)
        except TimeoutError:
            raise ReplicaUnavailable(f"Its engine did not {'fall asleep' if asleep else 'wake'} in time.") from None

    @property
    def restarted(self) -> bool:
        """Whether its engine, which was to sleep, is awake: it has died and was started again."""
        return self._entered and not self.engine.link.asleep

    @property
    def wakes_in_s(self) -> float:
        """How long its engine says that waking takes."""
        return self.engine.link.wakes_in_s

    def loaded(self, took_s: float, *, woken: bool) -> None:
        """It serves, after so long."""
        if woken:
            self.wakes += 1
        else:
            self.loads += 1
            self.load_s += took_s
        self._backoff = Backoff(first_s=_FIRST_S, most_s=_MOST_S)
        self._failed_until_s = float("-inf")

    def fail(self) -> float:
        """Its load has failed. Returns for how many seconds it is left in peace; those who wait for it are told."""
        self.failures += 1
        again_in_s = self._backoff.wait_s(0.0)
        self._failed_until_s = self._clock.monotonic_s() + again_in_s
        self._notify()
        return again_in_s

    async def unload(self) -> None:
        """Ends its engine; its memory is free when this returns. Without one, nothing happens."""
        self.admit(False)
        if self._entered:
            self._entered = False
            await self.engine.__aexit__(None, None, None)

    def measured_bytes(self) -> int:
        """What its process takes now, its part of shared memory included; 0 where there is none."""
        return 0 if self.engine.pid is None else model_memory(self.engine.pid)


class ModelDescription:
    """What a lodger's model is, also while it is not there: requests are checked before they wait for it.

    Args:
        replica: The model's.
    """

    def __init__(self, replica: OnDemandReplica) -> None:
        self._replica = replica
        self._card = replica.footprint.card

    def card(self) -> ModelCard:
        """As its engine says, or has said, or will say as far as the files tell."""
        with suppress(ReplicaUnavailable):
            self._card = self._replica.engine.link.card()
        return self._card


def model_memory(pid: int) -> int:
    """The memory of a process: its own and its part of what it shares (PSS), or what is resident if nobody tells."""
    try:
        process = psutil.Process(pid)
        full = process.memory_full_info()
        return int(getattr(full, "pss", 0) or full.rss)
    except psutil.Error:
        return 0
