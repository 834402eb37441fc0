"""An engine that sleeps: its process stays, with torch imported and kernels compiled, and its memory is given back.

::

    awake --order--> drowsy --nothing runs--> asleep --order | a request--> waking --> awake
       ^               |
       `----order------'

What it drops are the weights and the KV cache, and with that all that can be found in it. Requests are taken in all the
while; those that come while it sleeps wake it, so several gateways can share an engine that one of them sends to sleep.
Waking is done in a thread: weights that are not kept on disk take as long to be read as they did at first, and an
engine that says nothing for so long would be taken for lost.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import torch

from maitred.core.clock import Clock
from maitred.engine.scheduler.scheduler import Scheduler

_LOOK_S = 0.005
"""How often one looks, while there is nothing else to do, whether it is awake."""


class _State(Enum):
    AWAKE = auto()
    DROWSY = auto()
    ASLEEP = auto()
    WAKING = auto()


class SleepController:
    """Whether the engine sleeps.

    Args:
        memory: Memory that is released meanwhile.
        clock: Measures how long waking takes.
        wakes_in_s: What that is expected to take before it was measured.

    Attributes:
        wakes_in_s: How long waking should take: as long as it did the last time.
    """

    def __init__(self, memory: "ModelMemory", clock: Clock, wakes_in_s: float) -> None:
        self.wakes_in_s = wakes_in_s
        self._memory = memory
        self._clock = clock
        self._state = _State.AWAKE
        self._called = False
        self._waking: threading.Thread | None = None
        self._since_s = 0.0
        self._fault: BaseException | None = None

    @property
    def asleep(self) -> bool:
        """Whether nothing can be computed now."""
        return self._state in (_State.ASLEEP, _State.WAKING)

    def order(self, *, asleep: bool) -> None:
        """Orders the engine to sleep as soon as nothing runs, or to wake."""
        if asleep:
            self._called = False
            self._state = _State.DROWSY if self._state is _State.AWAKE else self._state
        else:
            self._called = self._state is _State.ASLEEP
            self._state = _State.AWAKE if self._state is _State.DROWSY else self._state

    def max_idle_s(self, *, occupied: bool) -> float | None:
        """How long `turn` may be put off while it sleeps or is about to: 0 where it has something to do.

        Args:
            occupied: Whether there is any request.
        """
        match self._state:
            case _State.DROWSY:
                return None if occupied else 0.0
            case _State.ASLEEP:
                return 0.0 if occupied or self._called else None
            case _State.WAKING:
                return _LOOK_S if self._waking is not None and self._waking.is_alive() else 0.0
            case _State.AWAKE:
                return None

    def step(self, *, occupied: bool) -> bool:
        """Goes on to the next state if it is time; returns whether anything can be computed.

        Raises:
            BaseException: It cannot wake; whatever the cause was.
        """
        match self._state:
            case _State.DROWSY if not occupied:
                self._memory.release_memory()
                _release_memory()
                self._state, self._called = _State.ASLEEP, False
            case _State.ASLEEP if occupied or self._called:
                self._state, self._called, self._since_s = _State.WAKING, False, self._clock.monotonic_s()
                self._waking = threading.Thread(target=self._wake, name="waking", daemon=True)
                self._waking.start()
            case _State.WAKING if self._waking is not None and not self._waking.is_alive():
                self._waking.join()
                if self._fault is not None:
                    raise self._fault
                self._state, self._waking = _State.AWAKE, None
                self.wakes_in_s = self._clock.monotonic_s() - self._since_s
        return not self.asleep

    def _wake(self) -> None:
        try:
            self._memory.restore_memory()
        except BaseException as fault:  # raised again where it ends the process
            self._fault = fault


def _release_memory() -> None:
    """Returns freed memory to the system, where the C library would keep it for later.

    The collector does not look at what was there when the engine became ready; cycles in it may hold what was dropped.
    """
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    else:
        gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class LoadedModelMemory(NamedTuple):
    """A model with its cache, as whoever computes with them has them.

    Attributes:
        drop: Lets go of both.
        restore: Reads the model again, or maps it, and makes an empty cache of the same size.
    """

    drop: Callable[[], None]
    restore: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of the models of an engine.

    Attributes:
        models: All that the engine has.
        scheduler: Whose blocks lose their contents.
    """

    models: Sequence[LoadedModelMemory]
    scheduler: Scheduler

    def release_memory(self) -> None:
        """Releases weights and caches."""
        for model in self.models:
            model.drop()
        self.scheduler.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore_memory(self) -> None:
        """Restores weights and caches."""
        for model in self.models:
            model.restore()
