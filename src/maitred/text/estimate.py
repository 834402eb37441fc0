"""Estimate of a text's token count, for models whose tokenizer is not available here.

Only the tokenizer of the model gives the exact count. However, limits and budgets must reserve an amount before the
server, which counts the tokens, has answered. The estimate depends on the script of the text, which is the strongest
factor:

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

Each message adds 3 tokens, and the opening of the answer adds another 3 (OpenAI's cookbook, "How to count tokens with
tiktoken"). The lengths of the text in three encodings give the number of characters of each class, without a loop over
characters in Python: a megabyte takes about a millisecond.

An image counts as what Anthropic's documentation ("Vision") states for the largest one that is not scaled down, or as
OpenAI's ("Images and vision") for one of low detail. A page of a PDF has its text and its image (Anthropic, "PDF
support"); sound has ten tokens for each second (OpenAI, "Audio"), by the bytes of a WAV file of 24,000 samples.

The remaining error is specific to the vocabulary, and similar for all texts. `LearntRatio` learns it from the server's
counts.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

_ASCII, _TWO_BYTES, _THREE_BYTES, _FOUR_BYTES = 0.25, 0.5, 1.0, 2.0
MESSAGE_TOKENS = 3
"""Number of tokens that a chat template writes around a message."""
OPENING_TOKENS = 3
"""Number of tokens that a chat template writes before the answer."""
IMAGE_TOKENS = 1_600
_LOW_DETAIL_TOKENS = 85
_BASE64_CHARACTERS_PER_SOUND_TOKEN = 6_400
_BASE64_CHARACTERS_PER_FILE_TOKEN = 32


def estimate(text: str) -> float:
    """Estimates the number of tokens of a text; the result is 0 only for an empty text."""
    if text.isascii():
        return len(text) * _ASCII
    characters = len(text)
    encoded = len(text.encode("utf-8", "surrogatepass"))
    plain = len(text.encode("ascii", "ignore"))
    four = len(text.encode("utf-16-le", "surrogatepass")) // 2 - characters
    # Non-ASCII characters have 2, 3 or 4 bytes, which gives two equations for the two unknown counts.
    three = (encoded - plain) - 2 * (characters - plain) - 2 * four
    two = characters - plain - three - four
    return plain * _ASCII + two * _TWO_BYTES + three * _THREE_BYTES + four * _FOUR_BYTES


def estimate_conversation(messages: Iterable[Mapping[str, Any]], tools: object = None) -> float:
    """Estimates the tokens of a conversation, including those that a chat template adds.

    Args:
        messages: Messages as chat templates take them.
        tools: Tool definitions as plain JSON values; they are a part of the prompt.
    """
    tokens = float(OPENING_TOKENS)
    for message in messages:
        tokens += MESSAGE_TOKENS + estimate(message.get("content") or "")
        if calls := message.get("tool_calls"):
            tokens += _estimate_json(calls)
    return tokens + (_estimate_json(tools) if tools else 0.0)


def estimate_media(messages: Iterable[Mapping[str, Any]]) -> float:
    """Estimates the tokens of the images, sounds and files in messages, which their servers read beside the text.

    Args:
        messages: Messages as they were written, in the form of chat completions.
    """
    tokens = 0.0
    for message in messages:
        content = message.get("content")
        for part in content if content.__class__ is list else ():
            match part:
                case {"type": "text"}:
                    pass
                case {"type": "image_url", "image_url": {"detail": "low"}}:
                    tokens += _LOW_DETAIL_TOKENS
                case {"type": "input_audio", "input_audio": {"data": str() as data}}:
                    tokens += len(data) / _BASE64_CHARACTERS_PER_SOUND_TOKEN
                case {"type": "file", "file": {"file_data": str() as data}}:
                    tokens += max(IMAGE_TOKENS, len(data) / _BASE64_CHARACTERS_PER_FILE_TOKEN)
                case _:
                    tokens += IMAGE_TOKENS
    return tokens


def estimate_members(members: Mapping[str, Any]) -> float:
    """Estimates the tokens that a model has written for the members of a message's delta besides its text.

    These are thoughts, refusals, and the names and arguments of tool calls. Others, such as pictures, signatures and
    citations, are no text of the model.
    """
    # Some servers send a thought under both names.
    tokens = max(_estimate_value(members.get("reasoning_content")), _estimate_value(members.get("reasoning")))
    tokens += _estimate_value(members.get("refusal"))
    calls = members.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            for name in ("function", "custom"):
                function = call.get(name)
                if isinstance(function, dict):
                    tokens += sum(_estimate_value(function.get(field)) for field in ("name", "arguments", "input"))
    return tokens


def _estimate_value(value: object) -> float:
    return estimate(value) if isinstance(value, str) else 0.0


def _estimate_json(value: object) -> float:
    return estimate(msgspec.json.encode(value).decode())


class LearntRatio:
    """Learnt ratio of real tokens to estimated tokens, for one model.

    The ratio is a quotient of two decaying sums: counted tokens over the tokens that had been estimated for them. Long
    texts have a larger weight than short texts, whose fixed overhead says little about the vocabulary.

    Args:
        memory_tokens: Number of further tokens after which the weight of an observation has fallen to 1/e.

    Attributes:
        value: Factor to multiply an estimate with, from `LEAST` to `MOST`; 1 before the first observation.
    """

    LEAST, MOST = 0.25, 4.0
    """Smallest and largest ratio.

    Every vocabulary lies within these bounds; a server outside them counts something other than tokens.
    """
    _BELIEF_TOKENS = 200.0
    """Weight of the initial ratio 1, so that one short text does not change the ratio much.

    The value is also the number of tokens that any text may have in addition to its estimate, such as the tokens of a
    template.
    """

    def __init__(self, memory_tokens: float = 200_000.0) -> None:
        self._memory_tokens = memory_tokens
        self._estimated = self._BELIEF_TOKENS
        self._counted = self._BELIEF_TOKENS
        self.value = 1.0

    def learn(self, estimated: float, counted: int) -> None:
        """Records that a text has `counted` tokens, with an uncorrected estimate of `estimated` tokens.

        A count that is too high for any vocabulary is reduced to the upper bound, so that one wrong count cannot
        dominate all others.
        """
        if estimated <= 0 or counted <= 0:
            return
        believed = min(counted, self.MOST * (estimated + self._BELIEF_TOKENS))
        kept = 1.0 - estimated / self._memory_tokens if estimated < self._memory_tokens else 0.0
        self._estimated = self._estimated * kept + estimated
        self._counted = self._counted * kept + believed
        ratio = self._counted / self._estimated
        self.value = self.LEAST if ratio < self.LEAST else min(ratio, self.MOST)


class LearntBound:
    """Learnt least number of tokens for each unit of an answer, of one model.

    The units are estimated tokens, or chunks of a stream. It says nothing before `ANSWERS` answers were seen.

    Attributes:
        value: Fewest counted tokens for a unit; 0: not known yet.
    """

    ANSWERS = 8
    """Number of answers after which the value is believed..."""
    UNITS = 32
    """...each with at least this many units, because short ones say little."""

    def __init__(self) -> None:
        self.value = 0.0
        self._least = math.inf
        self._answers = 0

    def learn(self, units: float, counted: int) -> None:
        """Records that an answer of so many units has `counted` tokens."""
        if units < self.UNITS:
            return
        self._least = min(self._least, counted / units)
        self._answers += 1
        if self._answers >= self.ANSWERS:
            self.value = self._least
