"""Vectors from the cache: with any part of the inputs known, the answer is the one without a cache, to the bit."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.cache.config import CacheConfig
from maitred.core.context import CacheStatus
from maitred.core.inference import CacheControl
from tests.support.admission_services import ALICE, BOB
from tests.unit.app.request.test_embedding_lookup import EmbedderSetup

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=3)
REQUESTS = st.lists(
    st.tuples(
        st.lists(TEXTS, min_size=1, max_size=40),
        st.sampled_from([None, 1, 3, 8]),
        st.sampled_from([ALICE, BOB]),
        st.builds(CacheControl, no_cache=st.booleans(), no_store=st.booleans(), namespace=st.sampled_from(["", "n"])),
    ),
    min_size=1,
    max_size=6,
)


@given(REQUESTS, st.sampled_from(["key", "tenant"]), st.integers(0, 4000))
async def test_answers_are_those_without_a_cache_and_the_ledger_is_the_engine(requests, scope, most_bytes):
    cached, plain = EmbedderSetup(cache=CacheConfig(scope=scope)), EmbedderSetup(cache=CacheConfig(mode="off"))
    cached.backend.reconfigure(most_bytes)  # at most seven vectors: others leave at any time
    for texts, dimensions, principal, control in requests:
        before = cached.encoder.tokens
        vectors, context = await cached.embed(*texts, dimensions=dimensions, principal=principal, cache=control)
        wanted, plain_context = await plain.embed(*texts, dimensions=dimensions, principal=principal)
        assert vectors == wanted
        assert context.usage == plain_context.usage
        event, computed = cached.events[-1], cached.encoder.tokens - before
        assert (event.prompt_tokens, event.saved_tokens) == (computed, context.prompt_tokens - computed)
        assert context.cache.status == (
            CacheStatus.HIT if not computed else CacheStatus.PARTIAL if event.saved_tokens else CacheStatus.MISS
        )


@given(st.lists(TEXTS, min_size=1, max_size=80), st.data())
async def test_what_is_known_is_never_computed_again(texts, data):
    setup = EmbedderSetup()
    known = [text for text in texts if data.draw(st.booleans())]
    if known:
        await setup.embed(*known)
    setup.encoder.computed.clear()
    await setup.embed(*texts)
    unknown = {tuple(text) for text in texts} - {tuple(text) for text in known}
    assert sorted(map(tuple, setup.encoder.computed)) == sorted(unknown)
