"""Guesses by looking up what followed the last time."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.table import BlockTable
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.speculate.ngram import NgramDrafter


def sequence_of(tokens):
    request = EngineRequest(id="r", prompt=list(tokens), sampling=SamplingParams(max_tokens=100, seed=0))
    return Sequence(0, request, 0, BlockTable(BlockPool(1), 4, ""), frozenset())


def guess(tokens, most=4):
    return NgramDrafter().draft(sequence_of(tokens), most)


def test_it_says_what_followed_the_last_time():
    assert guess([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]).tokens == (4, 5, 6, 7)
    assert guess([1, 2, 3, 4, 1, 2, 3, 5, 9, 8, 7, 1, 2, 3]).tokens == (5, 9, 8, 7)


def test_what_goes_round_in_a_circle_goes_on_so():
    assert guess([9, 1, 2, 1, 2, 1, 2], most=5).tokens == (1, 2, 1, 2, 1)
    assert guess([7, 7, 7, 7], most=3).tokens == (7, 7, 7)


def test_it_says_nothing_where_nothing_was_the_same():
    assert guess([]) is None
    assert guess([1, 2]) is None
    assert guess([1, 2, 3]) is None
    assert guess([1, 2, 3, 4, 5]) is None


def test_a_longer_agreement_speaks_more_for_a_guess():
    short, long = guess([9, 1, 2, 3, 4, 8, 1, 2, 3]), guess([*range(20), *range(12)])
    assert short.kind == 2
    assert long.kind == 4


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8))
def test_asked_at_every_token_it_says_the_same_as_asked_once(tokens, most):
    drafter, sequence = NgramDrafter(), sequence_of([])
    for end in range(len(tokens) + 1):
        sequence.tokens = tokens[:end]
        drafted = drafter.draft(sequence, most)
        assert drafted == guess(tokens[:end], most)
        places = [p for p in range(3, end) if tokens[p - 3 : p] == tokens[end - 3 : end]]
        assert (drafted is not None) == bool(places)
        if drafted is not None:
            place = max(places)
            assert drafted.tokens == tuple(tokens[place + i % (end - place)] for i in range(most))


def test_a_sequence_that_is_forgotten_leaves_nothing():
    drafter, sequence = NgramDrafter(), sequence_of([1, 2, 3, 1, 2, 3])
    drafter.draft(sequence, 2)
    drafter.forget(sequence)
    assert not drafter._indexes
    drafter.forget(sequence)
