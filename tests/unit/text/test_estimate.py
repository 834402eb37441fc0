"""Estimates of tokens: by script, for conversations, and corrected by what was counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.config.tree import BUNDLED_MODEL
from maitred.text.estimate import LearntRatio, estimate, estimate_conversation
from maitred.text.tokenizer import Tokenizer

WEIGHTS = {1: 0.25, 2: 0.5, 3: 1.0, 4: 2.0}


@given(st.text())
def test_every_character_counts_by_its_length(text):
    assert estimate(text) == pytest.approx(sum(WEIGHTS[len(character.encode())] for character in text))


@given(st.text(), st.text())
def test_parts_add_up(one, other):
    assert estimate(one + other) == pytest.approx(estimate(one) + estimate(other))


def test_half_a_surrogate_is_no_fault():
    assert estimate("\ud800a") > 0


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("The quick brown fox jumps over the lazy dog.", 11),
        ("Быстрая лиса", 5.75),
        ("敏捷的棕色狐狸", 7),
        ("🦊", 2),
    ],
)
def test_scripts(text, tokens):
    assert estimate(text) == tokens


def test_a_conversation_costs_more_than_its_text():
    messages = [{"role": "user", "content": "abcd"}, {"role": "assistant", "content": ""}]
    assert estimate_conversation(messages) == 1 + 2 * 3 + 3
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]
    assert estimate_conversation([{"role": "assistant", "content": "", "tool_calls": call}]) > 12
    assert estimate_conversation(messages, tools=call) > estimate_conversation(messages)


def test_what_was_counted_corrects_the_estimate_of_what_comes():
    tokenizer, ratio = Tokenizer.load(BUNDLED_MODEL), LearntRatio()
    text = "It was a long evening at the restaurant, and the waiter had many guests. " * 20
    counted = len(tokenizer.encode(text, add_special_tokens=False))
    before = abs(estimate(text) - counted)
    for _ in range(10):
        ratio.learn(estimate(text), counted)
    assert abs(estimate(text) * ratio.value - counted) < 0.1 * before + 1


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 10**7))))
def test_a_ratio_stays_within_reason(lessons):
    ratio = LearntRatio()
    for estimated, counted in lessons:
        ratio.learn(estimated, counted)
    assert LearntRatio.LEAST <= ratio.value <= LearntRatio.MOST


def test_a_ratio_forgets():
    ratio = LearntRatio(memory_tokens=1_000)
    for _ in range(100):
        ratio.learn(100, 300)
    assert ratio.value == pytest.approx(3, rel=0.01)
    for _ in range(100):
        ratio.learn(100, 100)
    assert ratio.value == pytest.approx(1, rel=0.01)


def test_one_wrong_count_is_soon_outweighed():
    ratio = LearntRatio()
    ratio.learn(10, 2**31)
    assert ratio.value == LearntRatio.MOST
    for _ in range(100):
        ratio.learn(100, 100)
    assert ratio.value < 1.1
