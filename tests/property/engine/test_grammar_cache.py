"""The cache of compiled grammars keeps to its bytes, and takes room from whoever has most."""

from concurrent.futures import Future

from hypothesis import example, given, settings
from hypothesis import strategies as st

from maitred.core.grammar import Grammar
from maitred.engine.grammar import compiler as compiling
from maitred.engine.grammar.compiler import GrammarCompiler

MOST_BYTES = 500_000
TEXTS = ["a", "b" * 10, "[ab]{3}", "a{60}", "c" * 900, "d|e"]
steps = st.lists(
    st.tuples(
        *(st.sampled_from(["hold", "release"]), st.sampled_from(TEXTS), st.sampled_from("xyz"), st.integers(0, 300))
    ),
    max_size=60,
)


class NoCompilation(GrammarCompiler):
    """Takes every grammar for compiled."""

    def __init__(self):
        super().__init__(lambda: None, max_unused_bytes=MOST_BYTES)
        self._threads.shutdown()
        self._threads = self

    def submit(self, *_):
        done = Future()
        done.set_result(None)
        return done


def size_bytes(grammar, tokens):
    return compiling._memory_bytes(grammar, tokens)


@settings(max_examples=100)
@given(steps)
@example(
    [
        *[("hold", text, "x", 0) for text in ("a", "b" * 10, "a{60}")],
        *[("release", "a{60}", "x", 112), ("release", "a", "y", 0), ("release", "b" * 10, "y", 152)],
    ]
)
def test_the_cache_keeps_to_its_bytes_and_to_the_shares(actions):
    compiler, held, tokens, kept = NoCompilation(), {}, {}, {}
    for action, text, organisation, written in actions:
        grammar = Grammar("regex", text)
        if action == "hold":
            compiler.hold(grammar)
            held[grammar] = held.get(grammar, 0) + 1
            kept.pop(grammar, None)
        elif held.get(grammar):
            compiler.add_tokens(grammar, written)
            compiler.release(grammar, organisation)
            tokens[grammar] = tokens.get(grammar, 0) + written
            held[grammar] -= 1
            if not held[grammar]:
                kept[grammar] = organisation, size_bytes(grammar, tokens[grammar])
                while sum(size for _, size in kept.values()) > MOST_BYTES:
                    sums = {}
                    for owner, size in kept.values():
                        sums[owner] = sums.get(owner, 0) + size
                    largest = [owner for owner, size in sums.items() if size == max(sums.values())]
                    oldest = [next(one for one, (other, _) in kept.items() if other == owner) for owner in largest]
                    # One of the largest owners has lost its oldest; several may be lost at once, one after the other.
                    gone = next(one for one in oldest if one not in compiler._compiled)
                    del kept[gone]
                    tokens.pop(gone)
        assert compiler.unused_bytes == sum(size for _, size in kept.values()) <= MOST_BYTES
        in_use = {grammar for grammar, count in held.items() if count}
        assert compiler._compiled.keys() == kept.keys() | in_use
