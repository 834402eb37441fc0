"""Counts are read under every provider's names, each for itself."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.request import MOST_TOKENS, Usage
from maitred.wire.reported_usage import parse_usage


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        # OpenAI
        (
            {
                "prompt_tokens": 40,
                "completion_tokens": 48,
                "total_tokens": 88,
                "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 32},
            },
            Usage(40, 48, 8, reasoning_tokens=32),
        ),
        (
            {
                "input_tokens": 40,
                "output_tokens": 48,
                "input_tokens_details": {"cached_tokens": 8},
                "output_tokens_details": {"reasoning_tokens": 32},
            },
            Usage(40, 48, 8, reasoning_tokens=32),
        ),
        # Anthropic: the tokens of the cache are counted apart
        (
            {"input_tokens": 10, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 3, "output_tokens": 7},
            Usage(18, 7, 5, cache_write_tokens=3),
        ),
        # the same behind an API of OpenAI's, with the cache in the prompt or beside it
        (
            {"prompt_tokens": 18, "completion_tokens": 7, "total_tokens": 25, "cache_read_input_tokens": 5},
            Usage(18, 7, 5),
        ),
        (
            {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 22, "cache_read_input_tokens": 5},
            Usage(15, 7, 5),
        ),
        (
            {"prompt_tokens": 18, "completion_tokens": 7, "prompt_tokens_details": {"cache_write_tokens": 3}},
            Usage(18, 7, cache_write_tokens=3),
        ),
        # DeepSeek, Moonshot
        (
            {
                "prompt_tokens": 30,
                "completion_tokens": 5,
                "prompt_cache_hit_tokens": 20,
                "prompt_cache_miss_tokens": 10,
            },
            Usage(30, 5, 20),
        ),
        ({"prompt_cache_hit_tokens": 20, "prompt_cache_miss_tokens": 10, "completion_tokens": 5}, Usage(30, 5, 20)),
        ({"prompt_tokens": 30, "completion_tokens": 5, "cached_tokens": 20}, Usage(30, 5, 20)),
        # Google, in its own API and in OpenAI's, where zeros are left out and thoughts are in the total alone
        (
            {
                "promptTokenCount": 30,
                "candidatesTokenCount": 5,
                "thoughtsTokenCount": 11,
                "totalTokenCount": 46,
                "cachedContentTokenCount": 20,
            },
            Usage(30, 16, 20, reasoning_tokens=11),
        ),
        ({"prompt_tokens": 1000, "total_tokens": 1000}, Usage(1000, 0)),
        ({"prompt_tokens": 1000, "completion_tokens": None, "total_tokens": 1000}, Usage(1000, 0)),
        ({"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 345}, Usage(7, 338)),
        # xAI: thoughts beside the answer
        (
            {
                "prompt_tokens": 7,
                "completion_tokens": 9,
                "total_tokens": 26,
                "completion_tokens_details": {"reasoning_tokens": 10},
            },
            Usage(7, 19, reasoning_tokens=10),
        ),
        # Amazon
        (
            {"inputTokens": 10, "outputTokens": 7, "totalTokens": 25, "cacheReadInputTokens": 8},
            Usage(18, 7, 8),
        ),
        # other forms of numbers
        ({"prompt_tokens": 7.0, "completion_tokens": "3"}, Usage(7, 3)),
        ({"prompt_tokens": "7.5", "completion_tokens": 3}, Usage(8, 3)),
        # one that cannot be read takes none of the others with it
        ({"prompt_tokens": "many", "completion_tokens": 3}, Usage(0, 3)),
        ({"prompt_tokens": 7, "completion_tokens": -3}, Usage(7, 0)),
        ({"prompt_tokens": 7, "completion_tokens": True}, Usage(7, 0)),
        ({"prompt_tokens": 7, "completion_tokens": 1e308, "total_tokens": 9}, Usage(7, 2)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": []}, Usage(7, 3)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": "x"}}, Usage(7, 3)),
        (
            {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 10**6}},
            Usage(7, 3, 7),
        ),
        ({"completion_tokens": 3, "total_tokens": 10}, Usage(7, 3)),
        ({}, None),
        ([], None),
        (None, None),
        ({"total_tokens": 7}, None),
    ],
)
def test_a_report_in_any_form(reported, usage):
    assert parse_usage(reported) == usage


NAMES = [
    *("prompt_tokens", "input_tokens", "completion_tokens", "output_tokens", "total_tokens", "cached_tokens"),
    *("cache_read_input_tokens", "cache_creation_input_tokens", "prompt_cache_miss_tokens", "reasoning_tokens"),
    *("promptTokenCount", "thoughtsTokenCount", "totalTokenCount", "prompt_tokens_details", "cache_creation"),
]
COUNTS = st.one_of(st.none(), st.booleans(), st.integers(-9, 10**20), st.floats(), st.text(max_size=30), st.just([]))
REPORTS = st.recursive(COUNTS, lambda inner: st.dictionaries(st.sampled_from(NAMES), inner, max_size=8), max_leaves=12)


@given(REPORTS)
def test_whatever_is_reported_is_read_as_counts_that_can_be(reported):
    usage = parse_usage(reported)
    if usage is None:
        return
    assert 0 <= usage.cached_tokens + usage.cache_write_tokens <= usage.prompt_tokens <= MOST_TOKENS
    assert 0 <= usage.cache_write_1h_tokens <= usage.cache_write_tokens
    assert 0 <= usage.reasoning_tokens <= usage.completion_tokens <= MOST_TOKENS
    assert all(
        isinstance(count, int) and math.isfinite(count) for count in (usage.prompt_tokens, usage.completion_tokens)
    )
