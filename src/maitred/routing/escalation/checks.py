"""Checks of an answer that work without knowing the right answer."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason

MAX_REFUSAL_CHARACTERS = 600
"""Longest text that counts as a refusal by its opening; a longer text is an answer."""
_APOLOGY = re.compile(
    r"(?:(?:i'm|i am|we're|we are)? ?(?:very |so |truly |really )?sorry|i apologi[sz]e|my apologies|unfortunately)"
    r"(?: for [^.,;:!]{1,60})?[ ,.;:!—-]{1,4}(?:but )?"
)


class CheckFailure(StrEnum):
    """Kind of check that an answer failed."""

    SCHEMA = "schema"
    REFUSAL = "refusal"
    LOGPROB = "logprob"


@dataclass(slots=True)
class ChoiceText:
    """Text of one choice of an answer, joined from its parts."""

    text: str = ""
    refusal: str = ""
    """Text that the server has marked as a refusal."""
    has_tool_calls: bool = False
    finish: FinishReason | None = None
    logprobs: list[float] = field(default_factory=list)


def collect_choices(parts: Iterable[TextDelta]) -> list[ChoiceText]:
    """Returns the choices that the parts form, in their order."""
    choices: dict[int, ChoiceText] = {}
    texts: dict[int, list[str]] = {}
    for part in parts:
        choice = choices.setdefault(part.index, ChoiceText())
        texts.setdefault(part.index, []).append(part.text)
        extra = part.extra or {}
        choice.refusal += extra.get("refusal", "")
        choice.has_tool_calls = choice.has_tool_calls or bool(extra.get("tool_calls"))
        logprobs = [score.chosen.logprob for score in part.scores or ()]
        choice.logprobs += [logprob for logprob in logprobs if logprob is not None]
        choice.finish = part.finish or choice.finish
    for index, choice in choices.items():
        choice.text = "".join(texts[index])
    return [choices[index] for index in sorted(choices)]


def is_refusal(choice: ChoiceText, openings: Sequence[str]) -> bool:
    """Returns whether the server marked the choice as a refusal or its text begins like one.

    Args:
        choice: The choice.
        openings: Beginnings of refusals, in lower case and with straight apostrophes.
    """
    if choice.refusal or choice.finish is FinishReason.CONTENT_FILTER:
        return True
    if choice.has_tool_calls or len(choice.text) > MAX_REFUSAL_CHARACTERS:
        return False
    text = choice.text.strip().lower().replace("’", "'")
    if apology := _APOLOGY.match(text):
        text = text[apology.end() :]
    return text.startswith(tuple(openings))


def mean_logprob(choice: ChoiceText) -> float | None:
    """Returns the mean log-probability of the tokens of the choice, or None if the server sent none.

    A token with a probability of zero counts as a token with probability e^-100.
    """
    if not choice.logprobs:
        return None
    return math.fsum(max(logprob, -100.0) for logprob in choice.logprobs) / len(choice.logprobs)


def requested_schema(fields: Mapping[str, Any]) -> object | None:
    """Returns the JSON schema of the answer in a request in OpenAI's format, or None if it has none."""
    response_format = fields.get("response_format") or {}
    match response_format.get("type"):
        case "json_schema":
            schema: object = (response_format.get("json_schema") or {}).get("schema")
            return schema
        case "json_object":
            return {"type": "object"}
    return fields.get("guided_json")
