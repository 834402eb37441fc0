"""Whether two versions have given the same answer to the same request. Pure.

What differs by form alone (case, spacing, punctuation, the width of characters) is no difference. A short answer is
its result, so the rest must be the same. A long one can say the same in other words: of it, so much of the words must
be the same, whatever their order: their F1, the harmonic mean of the shares that each answer has in common with the
other (as in Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", EMNLP 2016). That tells an
answer to something else from one that is put differently; it is no judgement of either.

Answers that were sampled differ by chance, even those of one model. They can be held to a similarity of their own, but
not to equality.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

EXACT_WORDS = 32
"""Up to so many words, an answer is short."""

_WORDS = re.compile(r"\w+(?:[.,]\d+)*")


def agree(one: Sequence[str], other: Sequence[str], similarity: float, *, greedy: bool) -> bool:
    """Whether all choices of two answers do.

    Args:
        one: The texts of the choices of one, in their order.
        other: Those of the other.
        similarity: F1 that is enough, from 0 to 1.
        greedy: Whether nothing was drawn, so that short answers can be the same.
    """
    return len(one) == len(other) and all(
        _same(split_words(a), split_words(b), similarity, greedy=greedy) for a, b in zip(one, other, strict=True)
    )


def split_words(text: str) -> list[str]:
    """Its words and numbers, without what is form alone."""
    words: list[str] = _WORDS.findall(unicodedata.normalize("NFKC", text).casefold())
    return words


def with_calls(text: str, deltas: Sequence[Mapping[str, Any]]) -> str:
    """The text of a choice, and what it wants to be called: a call of another tool is another answer."""
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            said = calls.setdefault(call.get("index") or 0, ["", ""])
            said[0] += function.get("name") or ""
            said[1] += function.get("arguments") or ""
    return " ".join([text, *(f"{name} {_sorted(arguments)}" for _, (name, arguments) in sorted(calls.items()))])


def _same(one: list[str], other: list[str], similarity: float, *, greedy: bool) -> bool:
    if one == other:
        return True
    if greedy and min(len(one), len(other)) <= EXACT_WORDS:
        return False
    return f1(one, other) >= similarity


def f1(one: Sequence[str], other: Sequence[str]) -> float:
    """How much two bags of words have in common: 1 if they are the same, 0 if they share no word."""
    common = (Counter(one) & Counter(other)).total()
    return 2 * common / (len(one) + len(other)) if common else 0.0


def _sorted(arguments: str) -> str:
    """JSON whose members come in their alphabet's order; anything else as it is."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments
