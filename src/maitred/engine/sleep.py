"""Sleep mode: the process stays, with torch and compiled kernels, but releases the model's memory.

::

    awake --order--> drowsy --nothing runs--> asleep --order | a request--> waking --> awake
       ^               |
       `----order------'

A sleeping engine releases the weights and the KV cache, so the prefix cache is lost. The engine accepts requests in
every state, and a request that comes while it sleeps wakes it. So several gateways can share an engine that one of them
sends to sleep. A thread wakes the engine. Weights without a cache on disk take as long to read as at the first start,
and gateways would treat an engine that is silent for so long as lost.
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
"""Polling interval for the end of waking while the engine is otherwise idle."""


class _State(Enum):
    AWAKE = auto()
    DROWSY = auto()
    ASLEEP = auto()
    WAKING = auto()


class SleepController:
    """State machine that puts the engine to sleep and wakes it.

    Args:
        memory: Memory that is released while the engine sleeps.
        clock: Measures how long waking takes.
        wakes_in_s: Expected seconds for waking, until it is measured.

    Attributes:
        wakes_in_s: Expected seconds for waking: the duration of the last time.
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
        """Whether the engine cannot compute now, because it sleeps or is waking."""
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
        """Returns the seconds until `step` must be called; 0: now, None: no call is needed.

        Args:
            occupied: Whether any request has not ended.
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
        """Enters the next state if it is due; returns whether the engine can compute.

        Raises:
            BaseException: Waking failed; this is the exception of the thread.
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
        except BaseException as fault:  # raised again in `step`, where it ends the process
            self._fault = fault


def _release_memory() -> None:
    """Returns freed memory to the system, which the C library would otherwise keep for reuse.

    The garbage collector ignores objects that were frozen at startup. Cycles among them may hold the released memory,
    so they are unfrozen for one collection.
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
    """Functions that release and restore one model with its KV cache.

    Attributes:
        drop: Releases the model and its cache.
        restore: Reads the model again, or maps it, and makes an empty cache of the same size.
    """

    drop: Callable[[], None]
    restore: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of all models of an engine.

    Attributes:
        models: All models of the engine.
        scheduler: Scheduler whose KV blocks lose their contents.
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
