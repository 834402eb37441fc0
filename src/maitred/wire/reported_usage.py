"""Reads the usage that a server of another operator reports, whatever it calls its counts.

Each count is read for itself: a missing or unreadable one counts as 0 and takes none of the others with it. A server of
protocol buffers omits zeros, some send floats or strings, and each provider has its own names:

==============  ====================================================================================================
OpenAI          ``prompt_tokens``, ``completion_tokens``, ``total_tokens``, ``prompt_tokens_details.cached_tokens``,
                ``completion_tokens_details.reasoning_tokens``; in its Responses API ``input_tokens`` and so on
Anthropic       ``input_tokens`` without the tokens of the cache, which are in ``cache_read_input_tokens`` and
                ``cache_creation_input_tokens``; in ``cache_creation`` by lifetime
DeepSeek        ``prompt_cache_hit_tokens`` and ``prompt_cache_miss_tokens``
Moonshot        ``cached_tokens`` beside the others
Google          ``promptTokenCount``, ``candidatesTokenCount``, ``thoughtsTokenCount``, ``cachedContentTokenCount``; in
                its OpenAI-compatible API thoughts are a part of ``total_tokens`` alone, as at xAI
Amazon          ``inputTokens``, ``outputTokens``, ``cacheReadInputTokens``, ``cacheWriteInputTokens``
==============  ====================================================================================================

Whether the counts are credible is decided where the request is known; see `maitred.app.request.usage_counter`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from maitred.core.request import MOST_TOKENS, Usage

_PROMPT = ("prompt_tokens", "promptTokenCount", "prompt_token_count")
_INPUT = ("input_tokens", "inputTokens")
"""Names of the prompt's count that leave out the tokens of the cache, if the cache has counts of its own."""
_OUTPUT = ("completion_tokens", "output_tokens", "outputTokens", "candidatesTokenCount", "candidates_token_count")
_TOTAL = ("total_tokens", "totalTokenCount", "total_token_count", "totalTokens")
_TOOL_RESULTS = ("toolUsePromptTokenCount", "tool_use_prompt_token_count")
"""Prompt tokens that Google counts beside the prompt."""
_THOUGHTS = ("thoughtsTokenCount", "thoughts_token_count")
"""Output tokens that Google counts beside the answer."""
_PROMPT_DETAILS = ("prompt_tokens_details", "input_tokens_details", "prompt_token_details")
_OUTPUT_DETAILS = ("completion_tokens_details", "output_tokens_details")
_CACHED = (
    *("cached_tokens", "prompt_cache_hit_tokens", "num_cached_tokens", "cachedContentTokenCount"),
    "cached_content_token_count",
)
_CACHE_READ = ("cache_read_input_tokens", "cacheReadInputTokens", "cacheReadInputTokenCount")
_CACHE_WRITE = ("cache_creation_input_tokens", "cacheWriteInputTokens", "cacheWriteInputTokenCount")
_WRITTEN = ("cache_write_tokens", "cache_creation_tokens")
_REASONING = ("reasoning_tokens",)
_MAX_DIGITS = 24
_BILLED_COUNTS = frozenset(
    {
        *("prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens"),
        "cache_read_input_tokens",
    }
)
"""Members of a usage that the gateway writes itself."""


def is_empty(value: object) -> bool:
    """Returns whether the value of a member says nothing."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def read_usage(fields: object) -> Usage | None:
    """Returns a reported usage with whatever else the server counted; None if it counts nothing."""
    if isinstance(fields, dict) and len(fields) == 3:  # what most servers report; the rest gives the same for it
        get = fields.get
        prompt, output, total = get("prompt_tokens"), get("completion_tokens"), get("total_tokens")
        if type(prompt) is type(output) is type(total) is int and 0 < prompt < total == prompt + output <= MOST_TOKENS:
            return Usage(prompt, output)
    usage = parse_usage(fields)
    if usage is None or not isinstance(fields, dict):
        return None
    return msgspec.structs.replace(usage, details=_usage_details(fields))


def _usage_details(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what a server's usage has beside the counts of prompt and answer; None: nothing."""
    details = {name: value for name, value in fields.items() if name not in _BILLED_COUNTS and not is_empty(value)}
    if (
        (prompt := details.get("prompt_tokens_details"))
        and isinstance(prompt, dict)
        and prompt.keys() == {"cached_tokens"}
    ):
        del details["prompt_tokens_details"]
    return details or None


def parse_usage(fields: object) -> Usage | None:
    """Returns the usage in a decoded JSON object; None if it counts neither prompt nor answer."""
    if not isinstance(fields, dict):
        return None
    prompt, output, total = _count(fields, _PROMPT), _count(fields, _OUTPUT), _count(fields, _TOTAL)
    prompt_details, output_details = _details(fields, _PROMPT_DETAILS), _details(fields, _OUTPUT_DETAILS)
    read, written = _count(fields, _CACHE_READ), _count(fields, _CACHE_WRITE)
    cached = _first(_count(prompt_details, _CACHED), _count(fields, _CACHED), read)
    apart = (read or 0) + (written or 0)
    """Tokens of the cache that have counts of their own, which the prompt's count may leave out."""
    if prompt is None and (rest := _count(fields, _INPUT)) is not None:
        prompt = rest + apart
    elif prompt is None and (missed := _count(fields, ("prompt_cache_miss_tokens",))) is not None:
        prompt = missed + (cached or 0)
    elif prompt is None and apart:
        prompt = apart
    elif prompt is not None and apart and total == prompt + (output or 0) + apart:
        prompt += apart
    if prompt is not None:
        prompt += _count(fields, _TOOL_RESULTS) or 0
    if prompt is None and total is not None and output is not None:
        prompt = max(0, total - output)
    if prompt is None and output is None:
        return None
    reasoning = _first(_count(output_details, _REASONING), _count(fields, _THOUGHTS), _count(fields, _REASONING))
    answer = (output or 0) + (_count(fields, _THOUGHTS) or 0)
    if total is not None and prompt is not None:
        answer = max(answer, total - prompt)
    prompt, answer = min(prompt or 0, MOST_TOKENS), min(answer, MOST_TOKENS)
    cached = min(cached or 0, prompt)
    written = min(_first(written, _count(prompt_details, _WRITTEN)) or 0, prompt - cached)
    lifetimes = _details(fields, ("cache_creation",)) or _details(prompt_details, ("cache_creation_token_details",))
    return Usage(
        prompt,
        answer,
        cached,
        reasoning_tokens=min(reasoning or 0, answer),
        cache_write_tokens=written,
        cache_write_1h_tokens=min(_count(lifetimes, ("ephemeral_1h_input_tokens",)) or 0, written),
    )


def _first(*counts: int | None) -> int | None:
    """Returns the first count that is there."""
    return next((count for count in counts if count is not None), None)


def _details(fields: Mapping[str, object], names: Sequence[str]) -> Mapping[str, object]:
    """Returns the first of these members that is an object."""
    for name in names:
        details = fields.get(name)
        if isinstance(details, dict):
            return details
    return {}


def _count(fields: Mapping[str, object], names: Sequence[str]) -> int | None:
    """Returns the first of these members that is a count; None if there is none."""
    for name in names:
        if name in fields and (count := _read_count(fields[name])) is not None:
            return count
    return None


def _read_count(value: object) -> int | None:
    """Reads a count from an integer, a float or a string; None if it is none, or beyond every context."""
    if isinstance(value, str) and len(value) <= _MAX_DIGITS:
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not 0 <= value <= MOST_TOKENS:  # not a number compares as False
        return None
    return math.ceil(value)
