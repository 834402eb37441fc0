"""Prefix index and its load balancer: which replicas have how many leading tokens in KV cache.

The hash chain of `core.prefix` names each block, so a replica that has the block of a key has, or once had, the whole
prefix up to this block. The index maps each key to the set of replicas that have its block, stored as the bits of an
integer. A lookup goes through the keys of the prompt from the first and keeps the replicas that had every key so far: a
prompt of `b` blocks is compared with all `r` replicas in O(b + r), and the lookup ends when no replica is left. Keys
can be an iterator, so keys after the end of the lookup are never computed.

The content of a replica is learnt in one of two ways:

- **exactly**, from the block events of an engine: `on_stored`, `on_removed`, and `on_cleared` when it restarts; a
  prompt that was sent to a replica and is not computed yet is recorded by `on_expected`, so that concurrent requests
  with one prefix go to one replica;
- **approximately**, from the prompts that were sent there (`on_dispatch`): their blocks are assumed to stay until so
  many others have been used since as the replica has capacity for. The deepest blocks of a prompt are removed first, as
  in an engine, because fewer requests can reuse a block the further it is from the root.

Scopes are part of the keys, so a prefix is found only within its scope. The memory for each replica is at most one key
per block of its capacity. The routers of llm-d and SGLang use radix trees for the same idea; a tree of tokens also
finds prefixes that end inside a block, but costs a lock and a comparison of tokens at every node.

The balancer knows the prefix caches of its replicas. The caches of our own engines are known exactly: the engines
report which blocks they hold (`on_block_update`). The caches of other replicas are estimated from the prompts that were
sent there.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from maitred.core.balance import LoadBalancer, PlacementRequest, ReplicaCandidate
from maitred.core.prefix import BlockUpdate, chain, shared_scope, split_keys

_EXPECTED_SHARE = 4
"""Divisor of the capacity of a replica: at most capacity / divisor blocks may be expected ones."""


class _ReplicaBlocks:
    """Blocks of one replica, least recently used first."""

    __slots__ = ("bit", "blocks", "capacity", "expected")

    def __init__(self, bit: int, capacity: int) -> None:
        self.bit = bit
        self.capacity = capacity
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.expected: OrderedDict[bytes, None] = OrderedDict()
        """Blocks that are expected and not stored yet, with the oldest first."""


class PrefixIndex:
    """Index of the blocks that the replicas of one model have; all use the same block size.

    Args:
        block_tokens: Number of tokens in one block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._replicas: dict[str, _ReplicaBlocks] = {}
        self._names: dict[int, str] = {}
        """Replica name for each bit."""
        self._all_bits = 0
        self._replicas_by_block: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Returns the number of keys that at least one replica has."""
        return len(self._replicas_by_block)

    # --- replicas ---

    def add_replica(self, name: str, capacity_blocks: int) -> None:
        """Adds an empty replica; if a replica of this name exists, it is removed first."""
        self.remove_replica(name)
        bit = next(1 << index for index in range(len(self._names) + 1) if 1 << index not in self._names)
        self._names[bit] = name
        self._all_bits |= bit
        self._replicas[name] = _ReplicaBlocks(bit, capacity_blocks)

    def remove_replica(self, name: str) -> None:
        """Removes a replica and all of its blocks."""
        if name in self._replicas:
            self.on_cleared(name)
            bit = self._replicas.pop(name).bit
            del self._names[bit]
            self._all_bits &= ~bit

    # --- lookup ---

    def cached_tokens(self, keys: Iterable[bytes]) -> dict[str, int]:
        """Returns for each replica the number of leading tokens of a prompt that it has.

        Args:
            keys: Keys of the complete blocks of the prompt, from the first one (see `core.prefix.chain`).
        """
        tokens = dict.fromkeys(self._replicas, 0)
        matching, depth = self._all_bits, 0
        for key in keys if matching else ():
            remaining = matching & self._replicas_by_block.get(key, 0)
            self._set_depth(tokens, matching & ~remaining, depth)
            matching = remaining
            if not matching:
                return tokens
            depth += self.block_tokens
        self._set_depth(tokens, matching, depth)
        return tokens

    def _set_depth(self, tokens: dict[str, int], bits: int, depth: int) -> None:
        """Sets the token count of the replicas with these bits to the given depth."""
        while bits and depth:
            lowest = bits & -bits
            tokens[self._names[lowest]] = depth
            bits ^= lowest

    # --- updates ---

    def on_dispatch(self, name: str, keys: Sequence[bytes]) -> None:
        """Records the blocks of a prompt sent to a replica, or of an answer that ended there."""
        replica = self._replicas[name]
        for key in reversed(keys[: replica.capacity]):  # the root is marked as used last, so that it stays longest
            self._add(replica, key)

    def on_expected(self, name: str, keys: Iterable[bytes]) -> None:
        """Records the blocks of a prompt sent to a replica, which reports them after it has computed them.

        Blocks that the replica never computes, because the request was cancelled, are dropped in favour of later ones:
        at most a quarter of its capacity is expected at a time.
        """
        replica = self._replicas[name]
        for key in itertools.islice(keys, replica.capacity // _EXPECTED_SHARE):
            if key in replica.blocks:
                continue
            replica.expected[key] = None
            replica.expected.move_to_end(key)
            self._replicas_by_block[key] = self._replicas_by_block.get(key, 0) | replica.bit
        while len(replica.expected) > replica.capacity // _EXPECTED_SHARE:
            self._forget(replica, replica.expected.popitem(last=False)[0])

    def on_stored(self, name: str, keys: Iterable[bytes]) -> None:
        """Records blocks that the replica reports as stored."""
        replica = self._replicas[name]
        for key in keys:
            replica.expected.pop(key, None)
            self._add(replica, key)

    def on_removed(self, name: str, keys: Iterable[bytes]) -> None:
        """Removes blocks that the replica reports as removed; ignores blocks that the index does not have."""
        replica = self._replicas[name]
        for key in keys:
            if key in replica.blocks:
                del replica.blocks[key]
                self._forget(replica, key)

    def on_cleared(self, name: str) -> None:
        """Removes all blocks of a replica that has restarted or whose events were lost."""
        replica = self._replicas[name]
        for key in itertools.chain(replica.blocks, replica.expected):
            self._forget(replica, key)
        replica.blocks.clear()
        replica.expected.clear()

    def _add(self, replica: _ReplicaBlocks, key: bytes) -> None:
        blocks = replica.blocks
        if key in blocks:
            blocks.move_to_end(key)
            return
        blocks[key] = None
        self._replicas_by_block[key] = self._replicas_by_block.get(key, 0) | replica.bit
        if len(blocks) > replica.capacity:
            self._forget(replica, blocks.popitem(last=False)[0])

    def _forget(self, replica: _ReplicaBlocks, key: bytes) -> None:
        left = self._replicas_by_block[key] & ~replica.bit
        if left:
            self._replicas_by_block[key] = left
        else:
            del self._replicas_by_block[key]


_APPROXIMATE_BLOCK_TOKENS = 64
"""Block size of the estimates, which need no finer one; 64k tokens cost a thousand digests."""


class PrefixCacheBalancer:
    """Load balancer with an index of prefix caches. Implements `core.balance.CacheAwareBalancer`.

    Args:
        balancer: Load balancer that chooses the replica.
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
        """Sets the inner balancer, and keeps the indexes of the caches."""
        self._balancer = balancer

    def choose(self, request: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """Chooses one of the candidates by the inner balancer. Implements `core.balance.LoadBalancer`."""
        return self._balancer.choose(request, candidates)

    def cached_tokens(self, scope: str, prompts: Sequence[Sequence[int]]) -> Mapping[str, int]:
        """Returns for each replica the number of leading prompt tokens that it has cached.

        The count always leaves at least one token of each prompt to compute. Implements
        `core.balance.CacheAwareBalancer`.
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
        """Records that the prompts were sent to a replica; implements `core.balance.CacheAwareBalancer`."""
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
        """Removes the estimated cache of a replica that has restarted.

        A replica that reports its blocks also reports its restart. Implements `core.balance.CacheAwareBalancer`.
        """
        if name in self._approximate_capacities:
            self._approximate_index.on_cleared(name)

    def remove_replica(self, name: str) -> None:
        """Removes a replica that is gone, with what was known of its cache."""
        if self._approximate_capacities.pop(name, None) is not None:
            self._approximate_index.remove_replica(name)
        if (index := self._exact_index_by_replica.pop(name, None)) is not None:
            index.remove_replica(name)

    def on_block_update(self, name: str, update: BlockUpdate) -> None:
        """Applies the cache report of a replica: first the whole content, and then the changes."""
        if update.whole:
            self._start_index(name, update)
        elif name not in self._exact_index_by_replica:
            return  # the replica is sending the whole content
        index = self._exact_index_by_replica[name]
        index.on_removed(name, split_keys(update.removed))
        index.on_stored(name, split_keys(update.stored))

    def _start_index(self, name: str, update: BlockUpdate) -> None:
        self.remove_replica(name)
        index = self._exact_indexes.setdefault(update.block_tokens, PrefixIndex(update.block_tokens))
        index.add_replica(name, update.total_blocks)
        self._exact_index_by_replica[name] = index
