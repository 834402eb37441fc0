"""Agreement of answers: compares the answers of two versions to the same request; pure code.

Differences of form only (case, spacing, punctuation, the width of characters) are ignored. A short answer consists only
of its result, so the rest must be equal. A long answer can express the same content in other words: a given part of its
words must be equal, in any order. This part is measured as F1, the harmonic mean of the shares of words that each
answer has in common with the other (as in Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of
Text", EMNLP 2016). F1 distinguishes an answer to another question from an answer in other words; it does not measure
quality.

Sampled answers differ by chance, even those of one model. A trial can require a similarity of sampled answers, but not
equality.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

MAX_EXACT_WORDS = 32
"""Largest number of words of a short answer; short answers must be equal."""

_WORDS = re.compile(r"\w+(?:[.,]\d+)*")


def agree(first: Sequence[str], second: Sequence[str], similarity: float, *, greedy: bool) -> bool:
    """Returns whether all choices of two answers agree.

    Args:
        first: Texts of the choices of one answer, in their order.
        second: Texts of the choices of the other answer.
        similarity: Smallest F1 that counts as agreement, from 0 to 1.
        greedy: Whether both answers were decoded without sampling, so that short answers can be equal.
    """
    return len(first) == len(second) and all(
        _words_agree(split_words(first_text), split_words(second_text), similarity, greedy=greedy)
        for first_text, second_text in zip(first, second, strict=True)
    )


def split_words(text: str) -> list[str]:
    """Splits a text into words and numbers, without differences of form."""
    words: list[str] = _WORDS.findall(unicodedata.normalize("NFKC", text).casefold())
    return words


def append_tool_calls(text: str, deltas: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a choice followed by its tool calls.

    A call of another tool is therefore a different answer.
    """
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            call_parts = calls.setdefault(call.get("index") or 0, ["", ""])
            call_parts[0] += function.get("name") or ""
            call_parts[1] += function.get("arguments") or ""
    return " ".join([text, *(f"{name} {_normalize_json(arguments)}" for _, (name, arguments) in sorted(calls.items()))])


def _words_agree(first: list[str], second: list[str], similarity: float, *, greedy: bool) -> bool:
    if first == second:
        return True
    if greedy and min(len(first), len(second)) <= MAX_EXACT_WORDS:
        return False
    return f1(first, second) >= similarity


def f1(first: Sequence[str], second: Sequence[str]) -> float:
    """Returns the overlap of two bags of words: 1 if they are equal, 0 if they share no word."""
    common = (Counter(first) & Counter(second)).total()
    return 2 * common / (len(first) + len(second)) if common else 0.0


def _normalize_json(arguments: str) -> str:
    """Returns JSON with its members in alphabetical order; returns any other text unchanged."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments
