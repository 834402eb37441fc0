"""A cache that owners share, against a list of what was put: bounds, sums, owners, expiry, and nothing left behind."""

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from maitred.cache import eviction
from maitred.cache.adaptive import AdaptiveCache

KEYS = st.integers(0, 60) | st.integers(1000, 1249)
OWNERS = st.sampled_from("abcd")


class AdaptiveCacheMachine(RuleBasedStateMachine):
    """Every key's latest value, owner, size and expiry; a key leaves when the cache says that it was dropped."""

    @initialize(most=st.sampled_from([1, 12, 60, 300]))
    def begin(self, most):
        self.most = most
        self.cache = AdaptiveCache(most)
        self.known = {}
        self.now_s = 0.0
        self.most_entries = 0
        self.values = 0

    def sizes(self):
        found = {}
        for _, owner, size, _ in self.known.values():
            found[owner] = found.get(owner, 0) + size
        return found

    @rule(key=KEYS, owner=OWNERS, size=st.integers(1, 14), lasts_s=st.sampled_from([inf, inf, 1.0, 5.0]))
    def put(self, key, owner, size, lasts_s):
        self.values += 1
        self.known.pop(key, None)
        expires_s = self.now_s + lasts_s
        dropped = self.cache.put(key, self.values, owner, size, expires_s=expires_s, now_s=self.now_s)
        assert len(dropped) == len(set(dropped))
        self.known[key] = self.values, owner, size, expires_s
        for each in dropped:
            sizes = self.sizes()
            assert sum(sizes.values()) > self.most, "nobody is dropped while there is space"
            loser = self.known.pop(each)[1]
            if each != key:
                assert sizes[loser] == max(sizes.values()), "the largest owner makes room"
                assert sizes[loser] * len(sizes) > self.most, "nobody falls below a fair part"

    @rule(first=st.integers(0, 1000), count=st.integers(1, 150), owner=OWNERS)
    def put_many(self, first, count, owner):
        """Enough for an owner to learn."""
        for key in range(first, first + count):
            if self.cache.get(1000 + key % 250, self.now_s) is None:
                self.put(1000 + key % 250, owner, 1, inf)

    @rule(key=KEYS)
    def get(self, key):
        value, _, _, expires_s = self.known.get(key, (None, "", 0, inf))
        if expires_s <= self.now_s:
            value = None
            self.known.pop(key)
        assert self.cache.get(key, self.now_s) == value

    @rule(key=KEYS)
    def pop(self, key):
        assert self.cache.pop(key) == self.known.pop(key, (None,))[0]
        assert key not in self.cache

    @rule(owner=OWNERS)
    def pop_owner(self, owner):
        gone = {key for key, known in self.known.items() if known[1] == owner}
        for key in gone:
            assert self.cache.pop(key) == self.known.pop(key)[0]

    @rule(every=st.integers(2, 5))
    def pop_some(self, every):
        gone = {key for key in self.known if key % every == 0}
        for key in gone:
            assert self.cache.pop(key) == self.known.pop(key)[0]

    @rule(passes_s=st.sampled_from([0.5, 3.0]))
    def wait(self, passes_s):
        self.now_s += passes_s

    @precondition(lambda self: len(self.known) > 1)
    @rule(most=st.sampled_from([12, 60, 300]))
    def change_bound(self, most):
        """The next `put` applies it."""
        self.most = self.cache.most = most
        self.put(0, "a", 1, inf)

    @invariant()
    def sums_are_exact(self):
        sizes = self.sizes()
        assert self.cache.size == sum(sizes.values()) <= self.most
        assert len(self.cache) == len(self.known)
        assert {owner: share.size for owner, share in self.cache._shares.items()} == sizes
        assert all(key in self.cache for key in self.known)

    @invariant()
    def what_it_learns_from_is_bounded(self):
        self.most_entries = max(self.most_entries, len(self.known))
        for share in self.cache._shares.values():
            queues = share.queues
            assert queues.size == share.size <= share.listed
            assert queues._small_size == sum(entry.size for entry in queues._small.values())
            ghosts = [queues._ghosts, queues._older_ghosts]
            assert max(map(len, ghosts)) <= self.most_entries
            assert {type(ghost) for each in ghosts for ghost in each} <= {int}
            if share._shadows:
                sampled = [entry.size for key, entry in queues.items() if hash(key) % eviction._SAMPLED == 0]
                assert share._sampled_size == sum(sampled)
            for shadow in share._shadows:
                assert shadow.size <= share._sampled_size
                assert all(entry.value is None for _, entry in shadow.items())
        assert len(self.cache._by_size) <= 2 * len("abcd") + 17


TestAdaptiveCache = AdaptiveCacheMachine.TestCase
TestAdaptiveCache.settings = settings(stateful_step_count=40, deadline=None)
