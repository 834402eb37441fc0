"""Which replicas hold the KV of how many leading tokens of a prompt.

Blocks are named by the hash chain of `core.prefix`, so whoever holds the block of a key holds, or once held, the whole
prefix up to it. The index maps each key to the set of replicas that hold its block, as the bits of a number. A lookup
walks the prompt's keys from the first and keeps the replicas that had every one so far: a prompt of `b` blocks is
compared with all of `r` replicas in O(b + r), and the walk ends with the last of them. Keys can be an iterator: those
behind the end are never computed.

What a replica holds is learnt in one of two ways:

- **exactly**, from the block events of an engine: `stored`, `removed`, and `cleared` when it starts anew; what was sent
  there and is not computed yet is `expected`, so that requests with one prefix that come together go together;
- **approximately**, from what was sent there (`sent`): its blocks are taken to stay until so many others have been used
  since as the replica has room for. Of a prompt the deepest blocks go first, as they do in an engine, because the
  further from the root, the fewer can use them again.

Scopes are part of the keys: nothing is found across them. Memory: for each replica at most as many keys as it has
blocks. The same idea serves llm-d's and SGLang's routers with radix trees; a tree of tokens finds prefixes that end
inside a block too, and costs a lock and a comparison of tokens at every node.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice

_EXPECTED_SHARE = 4
"""One in so many blocks of a replica may be expected."""


class _Holding:
    """One replica's blocks, least recently used first."""

    __slots__ = ("bit", "blocks", "capacity", "expected")

    def __init__(self, bit: int, capacity: int) -> None:
        self.bit = bit
        self.capacity = capacity
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.expected: OrderedDict[bytes, None] = OrderedDict()
        """Not among the blocks; the oldest first."""


class PrefixIndex:
    """The index over the replicas of one model, which all cut prompts into equal blocks.

    Args:
        block_tokens: Tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._holdings: dict[str, _Holding] = {}
        self._names: dict[int, str] = {}
        """Bit -> whose it is."""
        self._everyone = 0
        self._replicas_by_block: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Keys that somebody holds."""
        return len(self._replicas_by_block)

    # --- who is there ---

    def join(self, name: str, capacity_blocks: int) -> None:
        """A replica that holds nothing; one that was here before begins anew."""
        self.leave(name)
        bit = next(1 << place for place in range(len(self._names) + 1) if 1 << place not in self._names)
        self._names[bit] = name
        self._everyone |= bit
        self._holdings[name] = _Holding(bit, capacity_blocks)

    def leave(self, name: str) -> None:
        """A replica is gone, and with it all that it held."""
        if name in self._holdings:
            self.cleared(name)
            bit = self._holdings.pop(name).bit
            del self._names[bit]
            self._everyone &= ~bit

    # --- what is held ---

    def cached_tokens(self, keys: Iterable[bytes]) -> dict[str, int]:
        """For each replica, the leading tokens of a prompt that it holds.

        Args:
            keys: Of the prompt's whole blocks, from the first (see `core.prefix.chain`).
        """
        tokens = dict.fromkeys(self._holdings, 0)
        have, depth = self._everyone, 0
        for key in keys if have else ():
            still = have & self._replicas_by_block.get(key, 0)
            self._record(tokens, have & ~still, depth)
            have = still
            if not have:
                return tokens
            depth += self.block_tokens
        self._record(tokens, have, depth)
        return tokens

    def _record(self, tokens: dict[str, int], bits: int, depth: int) -> None:
        """Those replicas hold the prompt to that depth."""
        while bits and depth:
            lowest = bits & -bits
            tokens[self._names[lowest]] = depth
            bits ^= lowest

    # --- what is learnt ---

    def on_dispatch(self, name: str, keys: Sequence[bytes]) -> None:
        """A prompt was sent there, or an answer has ended there, whose blocks are these."""
        holding = self._holdings[name]
        for key in reversed(keys[: holding.capacity]):  # the root is used last, so that it stays longest
            self._add(holding, key)

    def expected(self, name: str, keys: Iterable[bytes]) -> None:
        """A prompt was sent there whose blocks are these: the replica will say so once it has computed them.

        What it never computes, because nobody waits for it any more, is forgotten for what is expected later: no more
        than a quarter of its room is expected at once.
        """
        holding = self._holdings[name]
        for key in islice(keys, holding.capacity // _EXPECTED_SHARE):
            if key in holding.blocks:
                continue
            holding.expected[key] = None
            holding.expected.move_to_end(key)
            self._replicas_by_block[key] = self._replicas_by_block.get(key, 0) | holding.bit
        while len(holding.expected) > holding.capacity // _EXPECTED_SHARE:
            self._forget(holding, holding.expected.popitem(last=False)[0])

    def stored(self, name: str, keys: Iterable[bytes]) -> None:
        """The replica says that it holds these blocks now."""
        holding = self._holdings[name]
        for key in keys:
            holding.expected.pop(key, None)
            self._add(holding, key)

    def removed(self, name: str, keys: Iterable[bytes]) -> None:
        """The replica says that it no longer holds these. Those that it was not known to hold change nothing."""
        holding = self._holdings[name]
        for key in keys:
            if key in holding.blocks:
                del holding.blocks[key]
                self._forget(holding, key)

    def cleared(self, name: str) -> None:
        """It holds nothing: it has started anew, or events of it were lost."""
        holding = self._holdings[name]
        for key in chain(holding.blocks, holding.expected):
            self._forget(holding, key)
        holding.blocks.clear()
        holding.expected.clear()

    def _add(self, holding: _Holding, key: bytes) -> None:
        blocks = holding.blocks
        if key in blocks:
            blocks.move_to_end(key)
            return
        blocks[key] = None
        self._replicas_by_block[key] = self._replicas_by_block.get(key, 0) | holding.bit
        if len(blocks) > holding.capacity:
            self._forget(holding, blocks.popitem(last=False)[0])

    def _forget(self, holding: _Holding, key: bytes) -> None:
        left = self._replicas_by_block[key] & ~holding.bit
        if left:
            self._replicas_by_block[key] = left
        else:
            del self._replicas_by_block[key]
