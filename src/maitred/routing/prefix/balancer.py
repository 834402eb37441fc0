"""Load balancer that knows the prefix caches of its replicas.

The caches of our own engines are known exactly: the engines report which blocks they hold (`on_block_update`). The
caches of other replicas are estimated from the prompts that were sent there.
"""

from collections.abc import Mapping, Sequence

from maitred.core.balance import LoadBalancer, PlacementRequest, ReplicaCandidate
from maitred.core.prefix import BlockUpdate, chain, shared_scope, split_keys
from maitred.routing.prefix.index import PrefixIndex

_APPROXIMATE_BLOCK_TOKENS = 64
"""Block size of the estimates: they need no finer one, and a prompt of 64k tokens costs a thousand digests."""


class PrefixCacheBalancer:
    """Load balancer with an index of prefix caches. Implements `core.balance.CacheAwareBalancer`.

    Args:
        balancer: Chooses the replica.
    """

    def __init__(self, balancer: LoadBalancer) -> None:
        self._balancer = balancer
        self._approximate_index = PrefixIndex(_APPROXIMATE_BLOCK_TOKENS)
        self._approximate_capacities: dict[str, int] = {}
        """Cache capacity in tokens of each replica whose cache is estimated."""
        self._exact_indexes: dict[int, PrefixIndex] = {}
        """Exact indexes by block size."""
        self._exact_index_by_replica: dict[str, PrefixIndex] = {}
        """Exact index of each replica that reports its blocks."""

    def reconfigure(self, balancer: LoadBalancer) -> None:
        """Sets the balancer that chooses; the indexes of the caches are kept."""
        self._balancer = balancer

    def choose(self, request: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """Chooses one of the candidates by the inner balancer. Implements `core.balance.LoadBalancer`."""
        return self._balancer.choose(request, candidates)

    def cached_tokens(self, scope: str, prompts: Sequence[Sequence[int]]) -> Mapping[str, int]:
        """Returns for each replica how many leading tokens of the prompts it holds.

        At least one token of each prompt is left to compute. Implements `core.balance.CacheAwareBalancer`.
        """
        total = dict.fromkeys((*self._approximate_capacities, *self._exact_index_by_replica), 0)
        for prompt in prompts:
            if self._approximate_capacities:
                for name, tokens in self._approximate_index.cached_tokens(
                    chain(scope, prompt, _APPROXIMATE_BLOCK_TOKENS)
                ).items():
                    total[name] += min(tokens, len(prompt) - 1)
            for block_tokens, index in self._exact_indexes.items():
                max_tokens = (len(prompt) - 1) // block_tokens * block_tokens
                for name, tokens in index.cached_tokens(chain(shared_scope(scope), prompt, block_tokens)).items():
                    total[name] += min(tokens, max_tokens)
        return total

    def on_dispatch(self, name: str, capacity_tokens: int, scope: str, prompts: Sequence[Sequence[int]]) -> None:
        """Notes that the prompts were sent to a replica. Implements `core.balance.CacheAwareBalancer`."""
        if (index := self._exact_index_by_replica.get(name)) is not None:
            for prompt in prompts:
                index.on_expected(name, chain(shared_scope(scope), prompt, index.block_tokens))
            return
        if self._approximate_capacities.get(name) != capacity_tokens:
            self._approximate_index.add_replica(name, max(1, capacity_tokens // _APPROXIMATE_BLOCK_TOKENS))
            self._approximate_capacities[name] = capacity_tokens
        for prompt in prompts:
            self._approximate_index.on_dispatch(name, list(chain(scope, prompt, _APPROXIMATE_BLOCK_TOKENS)))

    def on_restart(self, name: str) -> None:
        """Forgets an estimated cache whose replica has restarted.

        A replica that reports its blocks reports the restart, too. Implements `core.balance.CacheAwareBalancer`.
        """
        if name in self._approximate_capacities:
            self._approximate_index.on_cleared(name)

    def on_block_update(self, name: str, update: BlockUpdate) -> None:
        """Applies a replica's report of its cache: the whole content first, and then the changes."""
        if update.whole:
            self._start_index(name, update)
        elif name not in self._exact_index_by_replica:
            return  # the whole content is on its way
        index = self._exact_index_by_replica[name]
        index.on_removed(name, split_keys(update.removed))
        index.on_stored(name, split_keys(update.stored))

    def _start_index(self, name: str, update: BlockUpdate) -> None:
        if self._approximate_capacities.pop(name, None) is not None:
            self._approximate_index.remove_replica(name)
        if (previous := self._exact_index_by_replica.get(name)) is not None:
            previous.remove_replica(name)
        index = self._exact_indexes.setdefault(update.block_tokens, PrefixIndex(update.block_tokens))
        index.add_replica(name, update.total_blocks)
        self._exact_index_by_replica[name] = index
