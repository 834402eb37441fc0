"""Requests whose grammars are being compiled: they wait beside the line, and hold no place and no blocks."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

from maitred.core.grammar import Grammar
from maitred.engine.scheduler.sequence import Sequence


@dataclass(slots=True)
class PendingGrammar:
    """Request that waits for its grammar.

    Attributes:
        owner: Who has submitted it.
        request_id: Its id.
        grammar: What it waits for.
        sequences: Its choices; they are paused.
        since_s: From when on it has waited.
        paused: Whether its reader has fallen behind meanwhile, so that it does not go on by itself.
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
        """Choices of all of them."""
        return sum(len(request.sequences) for request in self._requests.values())

    def add(self, owner: Hashable, request_id: str, sequences: Iterable[Sequence], now_s: float) -> None:
        """A request whose grammar is held and not ready."""
        waiting = [*sequences]
        grammar = waiting[0].sampling.grammar
        assert grammar is not None
        self._requests[owner, request_id] = PendingGrammar(owner, request_id, grammar, waiting, now_s)

    def get(self, owner: Hashable, request_id: str) -> PendingGrammar | None:
        """The request, if it is one of these."""
        return self._requests.get((owner, request_id))

    def discard(self, owner: Hashable, sequence: Sequence) -> None:
        """A choice has ended."""
        request = self.get(owner, sequence.request.id)
        if request is not None:
            request.sequences.remove(sequence)
            if not request.sequences:
                del self._requests[owner, sequence.request.id]

    def take_ready(self, ready: Callable[[Grammar], bool]) -> Iterator[PendingGrammar]:
        """Removes and returns the requests whose grammars have been compiled, or cannot be."""
        for key, request in list(self._requests.items()):
            if ready(request.grammar):
                del self._requests[key]
                yield request
