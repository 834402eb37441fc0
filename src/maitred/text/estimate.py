"""How many tokens a text has for a model whose tokenizer is not here.

Nobody but the model's own tokenizer can say; but limits and budgets have to reserve something before the answer of a
server that counts. The estimate goes by the script that a text is written in, which is what decides most:

==============================  =================  ============================================================
characters                      tokens for each    why
==============================  =================  ============================================================
ASCII                           1/4                OpenAI, "What are tokens and how to count them": a token is
                                                   about 4 characters of English
2 bytes in UTF-8 (accented      1/2                Petrov et al. 2023, "Language Model Tokenizers Introduce
Latin, Cyrillic, Greek,                            Unfairness Between Languages": texts in these scripts have
Arabic, Hebrew)                                    about twice as many tokens as the same text in English
3 bytes (Chinese, Japanese,     1                  the same: one character of Chinese or Japanese is about a
Korean, Indic, Thai)                               token
4 bytes (emoji, rare scripts)   2                  byte-level vocabularies have few of them whole
==============================  =================  ============================================================

A message costs 3 tokens more, and the opening of the answer another 3 (OpenAI's cookbook, "How to count tokens with
tiktoken"). Lengths in three encodings tell how many characters of each sort there are, without looking at one of them
in Python: a megabyte takes about a millisecond.

What remains is the vocabulary's own, and much the same from one text to the next: `LearntRatio` learns it from what the
server counted.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

_ASCII, _TWO_BYTES, _THREE_BYTES, _FOUR_BYTES = 0.25, 0.5, 1.0, 2.0
MESSAGE_TOKENS = 3
"""What a chat template writes around a message."""
OPENING_TOKENS = 3
"""...and before the answer."""


def estimate(text: str) -> float:
    """Tokens of a text. 0 only if it is empty."""
    if text.isascii():
        return len(text) * _ASCII
    characters = len(text)
    encoded = len(text.encode("utf-8", "surrogatepass"))
    plain = len(text.encode("ascii", "ignore"))
    four = len(text.encode("utf-16-le", "surrogatepass")) // 2 - characters
    # What is not ASCII takes 2, 3 or 4 bytes: two equations for the two sorts that are left.
    three = (encoded - plain) - 2 * (characters - plain) - 2 * four
    two = characters - plain - three - four
    return plain * _ASCII + two * _TWO_BYTES + three * _THREE_BYTES + four * _FOUR_BYTES


def estimate_conversation(messages: Iterable[Mapping[str, Any]], tools: object = None) -> float:
    """Tokens of a conversation, with what a chat template adds.

    Args:
        messages: As chat templates know them.
        tools: What the model is told of tools, as plain JSON values; it reads their definitions.
    """
    tokens = float(OPENING_TOKENS)
    for message in messages:
        tokens += MESSAGE_TOKENS + estimate(message.get("content") or "")
        if calls := message.get("tool_calls"):
            tokens += _estimate_json(calls)
    return tokens + (_estimate_json(tools) if tools else 0.0)


def _estimate_json(value: object) -> float:
    return estimate(msgspec.json.encode(value).decode())


class LearntRatio:
    """Real tokens per estimated one, for one model.

    The quotient of two sums that both forget: what was counted, over what had been estimated for it. Long texts weigh
    more than short ones, whose overheads say little of the vocabulary.

    Args:
        memory_tokens: After so many more tokens, what was learnt before counts for 1/e of what it did.

    Attributes:
        value: To multiply an estimate with, from `LEAST` to `MOST`; 1 before anything was learnt.
    """

    LEAST, MOST = 0.25, 4.0
    """A vocabulary further off is none; whoever counts so counts something else."""
    _BELIEF_TOKENS = 200.0
    """The weight of the first guess, so that one short text does not turn it over; and what any text may have beside
    what is estimated of it, such as a template's."""

    def __init__(self, memory_tokens: float = 200_000.0) -> None:
        self._memory_tokens = memory_tokens
        self._estimated = self._BELIEF_TOKENS
        self._counted = self._BELIEF_TOKENS
        self.value = 1.0

    def learn(self, estimated: float, counted: int) -> None:
        """A text of so many estimated tokens, before any correction, has in fact so many.

        More than any vocabulary makes of it is learnt as that much: one wrong count must not outweigh all others.
        """
        if estimated <= 0 or counted <= 0:
            return
        believed = min(counted, self.MOST * (estimated + self._BELIEF_TOKENS))
        kept = 1.0 - estimated / self._memory_tokens if estimated < self._memory_tokens else 0.0
        self._estimated = self._estimated * kept + estimated
        self._counted = self._counted * kept + believed
        ratio = self._counted / self._estimated
        self.value = self.LEAST if ratio < self.LEAST else min(ratio, self.MOST)
