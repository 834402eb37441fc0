"""A clock that stands still while its process does.

A process can be stopped for a while: its container is paused, its machine is moved or goes to sleep, a debugger holds
it. What it counts in its own memory nobody else can touch meanwhile, and nothing of it has become untrue. Yet leases
would end, because nobody renewed them, and the first requests after the pause would be given what those that still run
have reserved: a hard budget would be overspent.
"""

import asyncio

from maitred.core.clock import Clock


class PauseFreeClock:
    """Another clock less the pauses. Implements `maitred.core.clock.Clock`.

    Args:
        clock: Counts pauses too. Wall time is its own: windows of budgets end whoever sleeps.
        longest_s: A busy event loop may be late by this; what is longer is a pause.
    """

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._seen_s = clock.monotonic_s()
        self._paused_s = 0.0

    def monotonic_s(self) -> float:
        """See `Clock`."""
        now_s = self._clock.monotonic_s()
        # Whoever reads the time first after a pause finds it, before anything is decided by it.
        if now_s - self._seen_s > self._longest_s:
            self._paused_s += now_s - self._seen_s
        self._seen_s = now_s
        return now_s - self._paused_s

    def wall_s(self) -> float:
        """See `Clock`."""
        return self._clock.wall_s()

    async def run(self) -> None:
        """Ticks until it is cancelled. Only while it runs can a pause be told from a time without requests."""
        while True:
            await asyncio.sleep(self._longest_s / 2)
            self.monotonic_s()
