"""Where requests to one model go: the balance, with what each replica's cache is thought to hold."""

from collections.abc import Mapping, Sequence

from maitred.core.balance import Balance, Candidate, Inquiry
from maitred.core.prefix import chain
from maitred.routing.prefix.index import PrefixIndex

_BLOCK_TOKENS = 64
"""Of the index; a guess from what was sent needs no finer ones, and a prompt of 64k tokens costs a thousand digests."""


class Placement:
    """Implements `core.balance.Placement`.

    Args:
        balance: Chooses.
    """

    def __init__(self, balance: Balance) -> None:
        self._balance = balance
        self._index = PrefixIndex(_BLOCK_TOKENS)
        self._rooms: dict[str, int] = {}

    def choose(self, inquiry: Inquiry, candidates: Sequence[Candidate]) -> Candidate:
        """See `core.balance.Balance`."""
        return self._balance.choose(inquiry, candidates)

    def held(self, scope: str, prompts: Sequence[Sequence[int]]) -> Mapping[str, int]:
        """See `core.balance.Placement`. At least one token of each prompt is left to compute."""
        total = dict.fromkeys(self._rooms, 0)
        for prompt in prompts:
            for name, tokens in self._index.held(chain(scope, prompt, _BLOCK_TOKENS)).items():
                total[name] += min(tokens, len(prompt) - 1)
        return total

    def sent(self, name: str, room_tokens: int, scope: str, prompts: Sequence[Sequence[int]]) -> None:
        """See `core.balance.Placement`."""
        if self._rooms.get(name) != room_tokens:
            self._index.join(name, max(1, room_tokens // _BLOCK_TOKENS))
            self._rooms[name] = room_tokens
        for prompt in prompts:
            self._index.sent(name, list(chain(scope, prompt, _BLOCK_TOKENS)))

    def emptied(self, name: str) -> None:
        """See `core.balance.Placement`."""
        if name in self._rooms:
            self._index.cleared(name)
