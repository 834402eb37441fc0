"""Prefix index, and the load balancer that uses it: which replicas hold the KV of how many leading tokens.

Blocks are named by the hash chain of `core.prefix`, so a replica with the block of a key holds, or once held, the whole
prefix up to it. The index maps each key to the set of replicas that hold its block, as the bits of a number. A lookup
walks the prompt's keys from the first and keeps the replicas that had every one so far: a prompt of `b` blocks is
compared with all of `r` replicas in O(b + r), and the walk ends with the last of them. Keys can be an iterator: those
behind the end are never computed.

The content of a replica is learnt in one of two ways:

- **exactly**, from the block events of an engine: `on_stored`, `on_removed`, and `on_cleared` when it restarts;
  a prompt that was sent there and is not computed yet is `on_expected`, so that concurrent requests with one prefix go
  to one replica;
- **approximately**, from the prompts that were sent there (`on_dispatch`): their blocks are assumed to stay until so
  many others have been used since as the replica has capacity for. Of a prompt the deepest blocks go first, as they do
  in an engine, because the further from the root, the fewer requests can use them again.

Scopes are part of the keys: no prefix is found across them. Memory: for each replica at most as many keys as it has
blocks. llm-d's and SGLang's routers use radix trees for the same idea; a tree of tokens finds prefixes that end inside
a block too, and costs a lock and a comparison of tokens at every node.

The balancer knows the prefix caches of its replicas. The caches of our own engines are known exactly: the engines
    report which blocks they hold (`on_block_update`). The
caches of other replicas are estimated from the prompts that were sent there.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from maitred.core.balance import LoadBalancer, PlacementRequest, ReplicaCandidate
from maitred.core.prefix import BlockUpdate, chain, shared_scope, split_keys

_EXPECTED_SHARE = 4
"""Divisor of a replica's capacity: one in so many of its blocks may be expected ones."""


class _ReplicaBlocks:
    """Blocks of one replica, least recently used first."""

    __slots__ = ("bit", "blocks", "capacity", "expected")

    def __init__(self, bit: int, capacity: int) -> None:
        self.bit = bit
        self.capacity = capacity
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.expected: OrderedDict[bytes, None] = OrderedDict()
        """Blocks that are expected and not stored yet; the oldest first."""


class PrefixIndex:
    """Index of the blocks that the replicas of one model hold, all with the same block size.

    Args:
        block_tokens: Tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._replicas: dict[str, _ReplicaBlocks] = {}
        self._names: dict[int, str] = {}
        """Name of the replica of each bit."""
        self._all_bits = 0
        self._replicas_by_block: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Returns the number of keys that any replica holds."""
        return len(self._replicas_by_block)

    # --- replicas ---

    def add_replica(self, name: str, capacity_blocks: int) -> None:
        """Adds a replica that holds nothing; a known one is removed first."""
        self.remove_replica(name)
        bit = next(1 << index for index in range(len(self._names) + 1) if 1 << index not in self._names)
        self._names[bit] = name
        self._all_bits |= bit
        self._replicas[name] = _ReplicaBlocks(bit, capacity_blocks)

    def remove_replica(self, name: str) -> None:
        """Removes a replica and all that it held."""
        if name in self._replicas:
            self.on_cleared(name)
            bit = self._replicas.pop(name).bit
            del self._names[bit]
            self._all_bits &= ~bit

    # --- lookup ---

    def cached_tokens(self, keys: Iterable[bytes]) -> dict[str, int]:
        """Returns for each replica the leading tokens of a prompt that it holds.

        Args:
            keys: Keys of the prompt's whole blocks, from the first (see `core.prefix.chain`).
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
        """Sets the tokens of the replicas with these bits to that depth."""
        while bits and depth:
            lowest = bits & -bits
            tokens[self._names[lowest]] = depth
            bits ^= lowest

    # --- updates ---

    def on_dispatch(self, name: str, keys: Sequence[bytes]) -> None:
        """Notes the blocks of a prompt that was sent to a replica, or of an answer that has ended there."""
        replica = self._replicas[name]
        for key in reversed(keys[: replica.capacity]):  # the root is used last, so that it stays longest
            self._add(replica, key)

    def on_expected(self, name: str, keys: Iterable[bytes]) -> None:
        """Notes the blocks of a prompt that was sent to a replica, which will report them once it has computed them.

        Blocks that it never computes, because the request was cancelled, are forgotten for later ones: no more than a
        quarter of its capacity is expected at once.
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
        """Notes blocks that the replica reports as stored."""
        replica = self._replicas[name]
        for key in keys:
            replica.expected.pop(key, None)
            self._add(replica, key)

    def on_removed(self, name: str, keys: Iterable[bytes]) -> None:
        """Removes blocks that the replica reports as removed. Blocks that it was not known to hold change nothing."""
        replica = self._replicas[name]
        for key in keys:
            if key in replica.blocks:
                del replica.blocks[key]
                self._forget(replica, key)

    def on_cleared(self, name: str) -> None:
        """Forgets all blocks of a replica, which has restarted, or whose events were lost."""
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
