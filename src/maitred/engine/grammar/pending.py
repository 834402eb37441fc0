"""Requests whose grammars are being compiled: they wait outside the queue without slots or blocks."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

from maitred.core.grammar import Grammar
from maitred.engine.scheduler.sequence import Sequence


@dataclass(slots=True)
class PendingGrammar:
    """Request that waits for its grammar.

    Attributes:
        owner: Owner that submitted the request.
        request_id: Id of the request.
        grammar: Grammar that the request waits for.
        sequences: Choices of the request, which are paused.
        since_s: Start time of the wait.
        paused: Whether the gateway has paused the request meanwhile, so that it does not start by itself.
    """

    owner: Hashable
    request_id: str
    grammar: Grammar
    sequences: list[Sequence]
    since_s: float
    paused: bool = False


class PendingGrammars:
    """Requests that wait for their grammars."""

    def __init__(self) -> None:
        self._requests: dict[tuple[Hashable, str], PendingGrammar] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def sequences(self) -> int:
        """Number of choices of all pending requests."""
        return sum(len(request.sequences) for request in self._requests.values())

    def add(self, owner: Hashable, request_id: str, sequences: Iterable[Sequence], now_s: float) -> None:
        """Adds a request whose grammar is held but not ready."""
        waiting = [*sequences]
        grammar = waiting[0].sampling.grammar
        assert grammar is not None
        self._requests[owner, request_id] = PendingGrammar(owner, request_id, grammar, sequences=waiting, since_s=now_s)

    def get(self, owner: Hashable, request_id: str) -> PendingGrammar | None:
        """Returns the request if it is pending, else None."""
        return self._requests.get((owner, request_id))

    def discard(self, owner: Hashable, sequence: Sequence) -> None:
        """Removes a choice that has ended."""
        request = self.get(owner, sequence.request.id)
        if request is not None:
            request.sequences.remove(sequence)
            if not request.sequences:
                del self._requests[owner, sequence.request.id]

    def take_ready(self, ready: Callable[[Grammar], bool]) -> Iterator[PendingGrammar]:
        """Removes and returns the requests whose grammars are compiled or have failed."""
        for key, request in list(self._requests.items()):
            if ready(request.grammar):
                del self._requests[key]
                yield request
