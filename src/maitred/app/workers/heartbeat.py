"""Heartbeats of the processes of a gateway, by which the supervisor finds a process that hangs.

A process that is stopped, or whose event loop is blocked, does not exit, so no exit code tells of it. Each process has
a counter in memory that it shares with the supervisor, and its event loop increments the counter every second.
"""

import asyncio
import mmap
import struct
from collections.abc import Coroutine
from typing import Any

_INTERVAL_S = 1.0
_COUNTER = struct.Struct("=Q")
SILENCE_LIMIT_S = 12.0
"""Longest pause of an event loop. On a machine with too few cores a start alone blocks it for seconds."""
START_LIMIT_S = 120.0
"""Longest time that a process may take to start its event loop."""
_MOST_BETWEEN_CHECKS_S = 5.0
"""Most time that counts between two checks: the supervisor may have been suspended together with the process."""


class ProcessHeartbeat:
    """Counter that one process increments and its supervisor reads; made before the fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _COUNTER.size)

    @property
    def count(self) -> int:
        """Number of heartbeats until now."""
        return int(_COUNTER.unpack(self._memory[: _COUNTER.size])[0])

    def beat(self) -> None:
        """Adds one to the counter."""
        self._memory[: _COUNTER.size] = _COUNTER.pack(self.count + 1)

    async def run(self, work: Coroutine[Any, Any, int]) -> int:
        """Runs the work of the process with heartbeats; returns its exit code."""
        beating = asyncio.create_task(self._beat_repeatedly(), name="heartbeat")
        try:
            return await work
        finally:
            beating.cancel()

    async def _beat_repeatedly(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(_INTERVAL_S)


class ProcessMonitor:
    """Monitor of heartbeats; it has no clock of its own."""

    def __init__(self) -> None:
        self._heartbeats: dict[int, ProcessHeartbeat] = {}
        self._counts: dict[int, int] = {}
        self._silent_s: dict[int, float] = {}
        self._checked_s: float | None = None

    def add(self, pid: int, heartbeat: ProcessHeartbeat) -> None:
        """Adds a process that was just started."""
        self._heartbeats[pid] = heartbeat
        self._counts[pid], self._silent_s[pid] = 0, 0.0

    def remove(self, pid: int) -> None:
        """Removes a process that has ended."""
        for entries in (self._heartbeats, self._counts, self._silent_s):
            entries.pop(pid, None)

    def hung_pids(self, now_s: float) -> list[int]:
        """Returns the processes that have been silent for too long; call it every few seconds."""
        elapsed_s = 0.0 if self._checked_s is None else min(now_s - self._checked_s, _MOST_BETWEEN_CHECKS_S)
        self._checked_s = now_s
        hung = []
        for pid, heartbeat in self._heartbeats.items():
            count = heartbeat.count
            self._silent_s[pid] = 0.0 if count != self._counts[pid] else self._silent_s[pid] + elapsed_s
            self._counts[pid] = count
            if self._silent_s[pid] >= (SILENCE_LIMIT_S if count else START_LIMIT_S):
                hung.append(pid)
        return hung
