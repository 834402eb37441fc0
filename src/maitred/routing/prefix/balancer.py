"""Where requests to one model go: the balance, with what each replica's cache holds.

Of our own engines that is known: they tell which blocks can be found (`heard`). Of others it is guessed from what was
sent there.
"""

from collections.abc import Mapping, Sequence

from maitred.core.balance import LoadBalancer, PlacementRequest, ReplicaCandidate
from maitred.core.prefix import BlockUpdate, chain, shared_scope, split_keys
from maitred.routing.prefix.index import PrefixIndex

_GUESSED_BLOCK_TOKENS = 64
"""A guess from what was sent needs no finer ones, and a prompt of 64k tokens costs a thousand digests."""


class PrefixCacheBalancer:
    """Implements `core.balance.Placement`.

    Args:
        balance: Chooses.
    """

    def __init__(self, balance: LoadBalancer) -> None:
        self._balance = balance
        self._guessed = PrefixIndex(_GUESSED_BLOCK_TOKENS)
        self._capacities: dict[str, int] = {}
        """Of those whose caches are guessed, in tokens."""
        self._known: dict[int, PrefixIndex] = {}
        """By the size of a block."""
        self._index_for: dict[str, PrefixIndex] = {}
        """Of those that tell."""

    def reconfigure(self, balance: LoadBalancer) -> None:
        """Chooses by this from now on; what the caches hold is known as before."""
        self._balance = balance

    def choose(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """See `core.balance.Balance`."""
        return self._balance.choose(inquiry, candidates)

    def cached_tokens(self, scope: str, prompts: Sequence[Sequence[int]]) -> Mapping[str, int]:
        """See `core.balance.Placement`. At least one token of each prompt is left to compute."""
        total = dict.fromkeys((*self._capacities, *self._index_for), 0)
        for prompt in prompts:
            if self._capacities:
                for name, tokens in self._guessed.cached_tokens(chain(scope, prompt, _GUESSED_BLOCK_TOKENS)).items():
                    total[name] += min(tokens, len(prompt) - 1)
            for block_tokens, index in self._known.items():
                most = (len(prompt) - 1) // block_tokens * block_tokens
                for name, tokens in index.cached_tokens(chain(shared_scope(scope), prompt, block_tokens)).items():
                    total[name] += min(tokens, most)
        return total

    def on_dispatch(self, name: str, room_tokens: int, scope: str, prompts: Sequence[Sequence[int]]) -> None:
        """See `core.balance.Placement`."""
        if (index := self._index_for.get(name)) is not None:
            for prompt in prompts:
                index.expected(name, chain(shared_scope(scope), prompt, index.block_tokens))
            return
        if self._capacities.get(name) != room_tokens:
            self._guessed.join(name, max(1, room_tokens // _GUESSED_BLOCK_TOKENS))
            self._capacities[name] = room_tokens
        for prompt in prompts:
            self._guessed.on_dispatch(name, list(chain(scope, prompt, _GUESSED_BLOCK_TOKENS)))

    def on_restart(self, name: str) -> None:
        """See `core.balance.Placement`. One that tells has told that too."""
        if name in self._capacities:
            self._guessed.cleared(name)

    def on_block_update(self, name: str, news: BlockUpdate) -> None:
        """A replica tells what its cache holds: the whole first, and then what changes."""
        if news.whole:
            self._start_index(name, news)
        elif name not in self._index_for:
            return  # the whole is on its way
        index = self._index_for[name]
        index.removed(name, split_keys(news.removed))
        index.stored(name, split_keys(news.stored))

    def _start_index(self, name: str, news: BlockUpdate) -> None:
        if self._capacities.pop(name, None) is not None:
            self._guessed.leave(name)
        if (before := self._index_for.get(name)) is not None:
            before.leave(name)
        index = self._known.setdefault(news.block_tokens, PrefixIndex(news.block_tokens))
        index.join(name, news.total_blocks)
        self._index_for[name] = index
