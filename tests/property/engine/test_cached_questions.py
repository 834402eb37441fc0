"""Cached questions are bounded, whatever is added, removed and served in whatever order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.request import SimilarSearch
from maitred.engine.similar.cached_questions import CachedQuestions, RecentQuestions
from maitred.engine.similar.index import MEAN_TOKENS
from maitred.wire.frames import KeptQuestion, UpdateSimilar
from tests.support.similar.encoded_questions import encoded_question
from tests.support.similar.question_readers import WordReader

WORDS = ["card", "loan", "bank", "fee"]
TEXTS = st.tuples(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3), st.sampled_from([1, 1, 30])).map(
    lambda drawn: " ".join(drawn[0] * drawn[1])
)
PARTITIONS = st.sampled_from([b"p", b"q", b"r"])
KEYS = st.integers(0, 9).map(lambda number: b"%d" % number)
EVENTS = st.one_of(
    st.tuples(st.just("search"), PARTITIONS, TEXTS),
    st.tuples(st.just("keep"), PARTITIONS, TEXTS, KEYS),
    st.tuples(st.just("remove"), KEYS),
    st.tuples(st.just("serve"), KEYS),
)


@given(st.lists(EVENTS, max_size=60), st.integers(1, 5))
@settings(max_examples=150)
def test_never_more_than_the_bound_and_only_what_was_kept_in_the_partition(events, max_entries):
    reader = WordReader(context_tokens=1000)
    cached = CachedQuestions(reader, encoder="e", max_entries=max_entries)
    kept = {}
    for kind, *details in events:
        match kind:
            case "search":
                partition, text = details
                search = SimilarSearch(text, partition, "s", 3, -1.0)
                (result,) = cached.answer([(reader.tokens(text), search)])
                assert len(result.found) <= 3
                for found in result.found:
                    assert kept[found.key] == (partition, found.question)
            case "keep":
                partition, text, key = details
                cached.update(UpdateSimilar(kept=[KeptQuestion(partition, text, key)]))
                if cached._recent.get(partition, text) is not None:
                    kept[key] = (partition, text)
            case "remove":
                cached.update(UpdateSimilar(removed=details))
                kept.pop(details[0], None)
            case "serve":
                cached.update(UpdateSimilar(served=details))
        assert len(cached.index) <= max_entries
        assert cached.index.tokens <= MEAN_TOKENS * max_entries


@given(st.lists(st.tuples(PARTITIONS, TEXTS), max_size=40), st.integers(1, 6))
def test_recent_questions_are_those_that_were_searched_last(searches, max_entries):
    recent = RecentQuestions(max_entries)
    for partition, text in searches:
        recent.add(partition, encoded_question(text))
    latest = [*dict.fromkeys(reversed(searches))]
    fitting, tokens = [], 0
    for partition, text in latest[:max_entries]:
        tokens += len(text.split())
        if tokens > MEAN_TOKENS * max_entries:
            break
        fitting.append((partition, text))
    assert [each for each in latest if recent.get(*each) is not None] == fitting
    assert len(recent) == len(fitting)
