"""Judge and schedule of `benchmarks.chaos.chaos`: a run without a fault proves nothing if none could be found."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.chaos.chaos_answers import BOTH_ENDS, DIFFERENT, HANGING, SILENT, Asked, Question
from benchmarks.support.chaos.chaos_judge import CHARGED, NOT_ONE_LINE, OTHER_TOKENS, Line, account_of
from benchmarks.support.chaos.chaos_trouble import ENGINE_KINDS, UPSTREAM_KINDS, schedule
from benchmarks.support.single_request import CHAT, Reply

QUESTION = Question({"model": "scripted", "max_tokens": 3}, CHAT, "0 1 2")
WHOLE = {"status": 200, "text": "0 1 2", "prompt_tokens": 7, "output_tokens": 3, "done": True, "whole": True}
LINE = Line("finished", 7, 3, 13_000)
"""Of the whole answer: 7 tokens at 1 and 3 at 2 dollars per million, in nano-dollars."""


def asked(**fields):
    return Asked(QUESTION, True, 0.0, Reply("r", **fields))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (WHOLE, ""),
        (WHOLE | {"text": "0 1 1 2"}, DIFFERENT),
        (WHOLE | {"text": "0 2"}, DIFFERENT),
        (WHOLE | {"output_tokens": 4}, DIFFERENT),
        ({"status": 200, "text": "0 1"}, SILENT),
        ({"status": 200, "text": "0 1", "done": True}, SILENT),
        ({"status": 200, "text": "0 1", "code": "connection"}, SILENT),
        ({"code": "connection"}, SILENT),
        ({"status": 200, "text": "0 1", "code": "replica_lost"}, ""),
        ({"status": 200, "text": "0 2", "code": "replica_lost"}, DIFFERENT),
        ({"status": 200, "text": "0 1", "code": "replica_lost", "done": True}, BOTH_ENDS),
        ({"status": 503, "code": "replica_unavailable"}, ""),
        ({"status": 200, "text": "0 1", "left": True}, HANGING),
    ],
)
def test_every_ending_has_its_name(fields, fault):
    assert asked(**fields).fault == fault


@pytest.mark.parametrize(
    ("fields", "lines", "fault"),
    [
        (WHOLE, [LINE], ""),
        (WHOLE, [], NOT_ONE_LINE),
        (WHOLE, [LINE, LINE], NOT_ONE_LINE),
        (WHOLE, [Line("finished", 7, 4, 15_000)], OTHER_TOKENS),
        (WHOLE, [Line("finished", 7, 3, 0)], OTHER_TOKENS),
        (WHOLE, [Line("failed", 7, 3, 13_000)], OTHER_TOKENS),
        ({"status": 200, "code": "replica_lost"}, [Line("failed", 7, 2, 0)], ""),
        ({"status": 200, "code": "replica_lost"}, [Line("failed", 7, 2, 11_000)], CHARGED),
        ({"status": 200, "code": "replica_lost"}, [], NOT_ONE_LINE),
        ({"status": 503, "code": "replica_unavailable"}, [], ""),
        ({"status": 200, "left": True}, [Line("cancelled", 7, 2, 11_000)], ""),
    ],
)
def test_the_ledger_is_compared_with_what_the_caller_received(fields, lines, fault):
    assert account_of(asked(**fields), lines) == fault


@given(st.integers(0, 2**32), st.sampled_from([ENGINE_KINDS, UPSTREAM_KINDS]), st.sampled_from([40.0, 180.0]))
def test_troubles_follow_one_another_and_leave_time_to_come_back(seed, kinds, seconds):
    troubles = schedule(random.Random(seed), kinds, 2, seconds)
    assert troubles == schedule(random.Random(seed), kinds, 2, seconds)
    assert all(one.at_s + one.for_s <= other.at_s for one, other in itertools.pairwise(troubles))
    assert troubles[-1].at_s + troubles[-1].for_s <= seconds - 3.0 + 0.01
    for first in range(0, len(troubles) - len(kinds) + 1, len(kinds)):
        assert {trouble.kind for trouble in troubles[first : first + len(kinds)]} == set(kinds)
