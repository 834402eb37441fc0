"""For how long the event loop had no time: what a replica seems to be late by then is our own doing."""

import asyncio

from maitred.core.clock import Clock
from maitred.dispatch.core import DispatchCore

_BEAT_S = 0.01
_PUNCTUAL_S = 0.002
"""So late is nobody's fault."""


class LoopLagMonitor:
    """A beat of the event loop while requests run whose first token says something, and all that it was late by.

    A thousand requests that come at once keep the loop for a second. The first tokens of those that were sent first
    lie in their sockets meanwhile, and a time to first token by our clock says nothing of the server. The beat is late
    by as much, and fires before sockets are read.

    Args:
        clock: Clock of the dispatcher.
        core: Is told, in `DispatchCore.stalled_s`. The beat stops when nothing runs on it.
    """

    def __init__(self, clock: Clock, core: DispatchCore) -> None:
        self._clock = clock
        self._core = core
        self._beating = False
        self._began_s = 0.0

    def watch(self) -> None:
        """Watches the event loop from now on, as long as anything runs."""
        if not self._beating:
            self._beating = True
            self._begin()

    def _begin(self) -> None:
        self._began_s = self._clock.monotonic_s()
        asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _beat(self) -> None:
        late_s = self._clock.monotonic_s() - self._began_s - _BEAT_S
        if late_s > _PUNCTUAL_S:
            self._core.stalled_s += late_s
        if self._core.running:
            self._begin()
        else:
            self._beating = False
