"""The index says what a model says that keeps whole prefixes, under every order of events."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from maitred.core.prefix import block_key, chain, root_key
from maitred.routing.prefix import PrefixIndex

BLOCK = 2
NAMES = ["a", "b", "c"]
SCOPES = st.sampled_from(["", "acme", "umbrella"])
PROMPTS = st.lists(st.integers(0, 1), max_size=9)
CAPACITY = 6


def prefixes(scope, tokens):
    """Each whole block, as everything up to its end."""
    return [(scope, tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]


class IndexMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = PrefixIndex(BLOCK)
        self.model = {}
        """Replica -> the prefixes that it holds, least recently used first."""

    def use(self, name, blocks):
        held = self.model[name]
        for block in blocks:
            if block in held:
                held.remove(block)
            held.append(block)
            del held[:-CAPACITY]

    @rule(name=st.sampled_from(NAMES))
    def join(self, name):
        self.index.add_replica(name, CAPACITY)
        self.model[name] = []

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name):
        self.index.remove_replica(name)
        self.model.pop(name, None)

    @rule(name=st.sampled_from(NAMES), scope=SCOPES, tokens=PROMPTS)
    def send(self, name, scope, tokens):
        if name in self.model:
            self.index.on_dispatch(name, list(chain(scope, tokens, BLOCK)))
            self.use(name, reversed(prefixes(scope, tokens)[:CAPACITY]))

    @rule(name=st.sampled_from(NAMES), scope=SCOPES, tokens=PROMPTS)
    def store(self, name, scope, tokens):
        if name in self.model:
            self.index.on_stored(name, chain(scope, tokens, BLOCK))
            self.use(name, prefixes(scope, tokens))

    @rule(name=st.sampled_from(NAMES), scope=SCOPES, tokens=PROMPTS)
    def remove(self, name, scope, tokens):
        if name in self.model:
            keys = list(chain(scope, tokens, BLOCK))
            self.index.on_removed(name, keys)
            gone = prefixes(scope, tokens)
            self.model[name] = [block for block in self.model[name] if block not in gone]
            assert self.index.cached_tokens(keys)[name] == 0, "after its removal nothing of it is found"

    @rule(name=st.sampled_from(NAMES))
    def clear(self, name):
        if name in self.model:
            self.index.on_cleared(name)
            self.model[name] = []

    @rule(scope=SCOPES, tokens=PROMPTS)
    def look(self, scope, tokens):
        expected = {}
        for name, held in self.model.items():
            expected[name] = 0
            for depth, block in enumerate(prefixes(scope, tokens), 1):
                if block not in held:
                    break
                expected[name] = depth * BLOCK
        assert self.index.cached_tokens(chain(scope, tokens, BLOCK)) == expected

    @invariant()
    def nothing_is_kept_that_nobody_holds(self):
        assert len(self.index) == len({block for held in self.model.values() for block in held})
        assert all(len(held) <= CAPACITY for held in self.model.values())


TestIndex = IndexMachine.TestCase


@given(scope=SCOPES, tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), block_tokens=st.integers(1, 9))
def test_a_chain_is_what_its_blocks_are(scope, tokens, block_tokens):
    expected, key = [], root_key(scope)
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        key = block_key(key, tokens[end - block_tokens : end])
        expected.append(key)
    assert list(chain(scope, tokens, block_tokens)) == expected


def test_keys_behind_the_end_are_not_computed():
    index = PrefixIndex(BLOCK)
    index.add_replica("a", 100)
    index.add_replica("b", 100)
    index.on_dispatch("a", list(chain("", [1, 2, 3, 4], BLOCK)))
    keys = chain("", [1, 2, 3, 4, *range(1_000_000)], BLOCK)
    assert index.cached_tokens(keys) == {"a": 4, "b": 0}
    assert len(list(keys)) == 500_000 - 1


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning():
    index = PrefixIndex(BLOCK)
    index.add_replica("a", 4)
    first = list(chain("", [0] * 8, BLOCK))
    index.on_dispatch("a", first)
    index.on_dispatch("a", list(chain("", [1] * 4, BLOCK)))
    assert index.cached_tokens(first) == {"a": 4}
