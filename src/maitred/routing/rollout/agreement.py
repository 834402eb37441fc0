"""Agreement of answers: whether two versions have given the same answer to the same request. Pure.

Differences of form alone (case, spacing, punctuation, the width of characters) do not count. A short answer is its
result, so the rest must be the same. A long one can say the same in other words: of its words, a given part must be the
same, whatever their order. The part is their F1, the harmonic mean of the shares that each answer has in common with
the other (as in Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", EMNLP 2016). F1 tells
an answer to another question from one in other words; it is no judgement of quality.

Answers that were sampled differ by chance, even those of one model. They can be held to a similarity of their own, but
not to equality.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

MAX_EXACT_WORDS = 32
"""Most words of an answer that counts as short, which must be equal."""

_WORDS = re.compile(r"\w+(?:[.,]\d+)*")


def agree(first: Sequence[str], second: Sequence[str], similarity: float, *, greedy: bool) -> bool:
    """Returns whether all choices of two answers agree.

    Args:
        first: The texts of the choices of one answer, in their order.
        second: Those of the other answer.
        similarity: F1 that is enough, from 0 to 1.
        greedy: Whether no token was drawn, so that short answers can be equal.
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
    """Returns the text of a choice with its tool calls: a call of another tool is another answer."""
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
    """Returns how much two bags of words have in common: 1 if they are the same, 0 if they share no word."""
    common = (Counter(first) & Counter(second)).total()
    return 2 * common / (len(first) + len(second)) if common else 0.0


def _normalize_json(arguments: str) -> str:
    """Returns JSON with its members in alphabetical order; any other text as it is."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments
