"""Measures event-loop lag, so that it is not mistaken for a slow replica."""

import asyncio

from maitred.core.clock import Clock
from maitred.dispatch.core import DispatchCore

_INTERVAL_S = 0.01
_IGNORED_LAG_S = 0.002
"""Lag up to this is ignored as timer jitter."""


class LoopLagMonitor:
    """Measures event-loop lag with a periodic timer while requests run.

    A burst of a thousand requests blocks the event loop for a second. Meanwhile first tokens wait in sockets, so a
    measured time to first token is too long. The timer is late by the same time, and it fires before the sockets are
    read.

    Args:
        clock: Clock of the dispatcher.
        core: The lag is added to its `DispatchCore.stalled_s`. The timer stops when no request runs.
    """

    def __init__(self, clock: Clock, core: DispatchCore) -> None:
        self._clock = clock
        self._core = core
        self._is_running = False
        self._scheduled_s = 0.0

    def watch(self) -> None:
        """Starts the timer; it runs as long as any request runs."""
        if not self._is_running:
            self._is_running = True
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled_s = self._clock.monotonic_s()
        asyncio.get_running_loop().call_later(_INTERVAL_S, self._on_timer)

    def _on_timer(self) -> None:
        late_s = self._clock.monotonic_s() - self._scheduled_s - _INTERVAL_S
        if late_s > _IGNORED_LAG_S:
            self._core.stalled_s += late_s
        if self._core.running:
            self._schedule()
        else:
            self._is_running = False
