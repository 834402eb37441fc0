"""Usage as servers report it, in the words of any of them.

Each count is read for itself: some servers write numbers as text or with a fraction, and leave out those that are zero.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from maitred.core.request import MOST_TOKENS, Usage

_PROMPT_NAMES = ("prompt_tokens", "input_tokens", "promptTokenCount", "prompt_eval_count")
_COMPLETION_NAMES = ("completion_tokens", "output_tokens", "candidatesTokenCount", "eval_count")
_TOTAL_NAMES = ("total_tokens", "totalTokenCount")
_CACHED_NAMES = (
    *("prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens", "cached_tokens"),
    *("prompt_cache_hit_tokens", "cache_read_input_tokens", "cachedContentTokenCount"),
)
"""Names of OpenAI, Moonshot, DeepSeek, Anthropic and Google."""
_REASONING_NAMES = (
    *("completion_tokens_details.reasoning_tokens", "output_tokens_details.reasoning_tokens"),
    *("reasoning_tokens", "thoughtsTokenCount"),
)
_UNREADABLE = -1


def parse_usage(fields: object) -> Usage | None:
    """Converts a reported usage into a `Usage`; None if it counts no prompt, or has a number that cannot be.

    Args:
        fields: Decoded value of `usage`.
    """
    if not isinstance(fields, dict):
        return None
    prompt, completion, total = (
        _first_count(fields, names) for names in (_PROMPT_NAMES, _COMPLETION_NAMES, _TOTAL_NAMES)
    )
    if _UNREADABLE in (prompt, completion) or (prompt is None and (total is None or completion is None)):
        return None
    cached = max(0, _first_count(fields, _CACHED_NAMES) or 0)
    if prompt is None:
        prompt = max(0, (total or 0) - (completion or 0))
    elif "prompt_tokens" not in fields and "cache_read_input_tokens" in fields:
        # Anthropic counts the tokens of its cache beside the others.
        prompt += cached + max(0, _first_count(fields, ("cache_creation_input_tokens",)) or 0)
    if completion is None:
        completion = max(0, (total or 0) - prompt)
    reasoning = max(0, _first_count(fields, _REASONING_NAMES) or 0)
    return Usage(prompt, completion, min(cached, prompt), reasoning_tokens=min(reasoning, completion))


def _first_count(fields: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """Returns the first of these counts that is there; None: there is none; `_UNREADABLE`: it is no count."""
    for name in names:
        outer, _, inner = name.rpartition(".")
        details = fields.get(outer) if outer else fields
        value = details.get(inner) if isinstance(details, dict) else None
        if value is not None:
            return _count(value)
    return None


def _count(value: object) -> int:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return _UNREADABLE
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_TOKENS:
        return _UNREADABLE
    return round(value)
