"""Synchronized streams: equal fixed gaps, and next events in the same bucket of the timetable.

They stay together until before their last events, so the whole group moves to its next bucket at once. An event costs
little more than its send: it needs no timetable entry and no time of its own. This makes thousands of streams possible
on one core.
"""

from array import array
from collections.abc import Callable

from maitred.testing.scripted_openai.connection import ScriptedExchange

Voice = tuple[Callable[[bytes], int], int, ScriptedExchange]
"""Stream of a group: its send function, its next event when the group began, and its exchange."""


class SynchronizedStreams:
    """Streams whose events are sent together.

    Args:
        events: Events of all streams; each stream starts at its own index.
        due_s: Time at which the next event of each stream is due.
        gap_s: Time from one event to the next.

    Attributes:
        voices: Streams of the group.
        rounds: Number of rounds so far.
    """

    def __init__(self, events: list[bytes], due_s: float, gap_s: float) -> None:
        self.events = events
        self.due_s = due_s
        self.gap_s = gap_s
        self.voices: list[Voice] = []
        self.rounds = 0
        self._times_s: array[float] = array("d")
        self._joined: dict[ScriptedExchange, int] = {}
        self._ends: dict[int, list[ScriptedExchange]] = {}

    def join(self, exchange: ScriptedExchange) -> None:
        """Adds a stream that has more events than its last one to send."""
        self.voices.append((exchange.send, exchange.at - self.rounds, exchange))
        self._joined[exchange] = self.rounds
        self._ends.setdefault(self.rounds + len(exchange.sends) - 1 - exchange.at, []).append(exchange)

    def begin_round(self, now_s: float) -> None:
        """Notes that the next event of each stream is sent now."""
        self._times_s.append(self.due_s)
        self._times_s.append(now_s)

    def end_round(self, broken: list[ScriptedExchange]) -> list[ScriptedExchange]:
        """Removes broken streams and those with one event left; returns the latter."""
        self.rounds += 1
        self.due_s += self.gap_s
        ended = [exchange for exchange in self._ends.pop(self.rounds, []) if exchange in self._joined]
        ended = [exchange for exchange in ended if exchange not in broken]
        for exchange in (*ended, *broken):
            begin = self._joined.pop(exchange)
            exchange.times_s.extend(self._times_s[2 * begin :])
            exchange.at += self.rounds - begin
            exchange.due_s = self.due_s
        if ended or broken:
            self.voices = [voice for voice in self.voices if voice[2] in self._joined]
        return ended
