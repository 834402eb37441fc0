"""Streams in step: those with the same fixed gap whose next events fall into the same bucket of the timetable.

They stay together until before their last events, so the bucket moves as a whole, and an event costs little more than
its send: no entry in the timetable, no time of its own. This is what carries thousands of streams on one core.
"""

from array import array
from collections.abc import Callable

from maitred.testing.scripted_openai.connection import ScriptedExchange

Voice = tuple[Callable[[bytes], int], int, ScriptedExchange]
"""How to send, which event was to come when the chorus began, and whose stream it is."""


class SynchronizedStreams:
    """Streams whose events are sent together.

    Args:
        events: What all of them send, each from its own place on.
        due_s: Of the next event of each.
        gap_s: From one event to the next.

    Attributes:
        voices: Its streams.
        rounds: How many there have been.
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
        """Takes a stream in that has more than its last event to come."""
        self.voices.append((exchange.send, exchange.at - self.rounds, exchange))
        self._joined[exchange] = self.rounds
        self._ends.setdefault(self.rounds + len(exchange.sends) - 1 - exchange.at, []).append(exchange)

    def begin_round(self, now_s: float) -> None:
        """The next event of each stream is sent now."""
        self._times_s.append(self.due_s)
        self._times_s.append(now_s)

    def end_round(self, broken: list[ScriptedExchange]) -> list[ScriptedExchange]:
        """Lets go whose last event is next, and who could not be sent to; the former."""
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
