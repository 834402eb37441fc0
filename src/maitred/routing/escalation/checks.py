"""What speaks against an answer, as far as it can be told without knowing the right one."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from maitred.core.answer import TextDelta
from maitred.core.request import FinishReason

MOST_REFUSAL_CHARACTERS = 600
"""Whoever writes more has begun to answer."""
_APOLOGY = re.compile(
    r"(?:(?:i'm|i am|we're|we are)? ?(?:very |so |truly |really )?sorry|i apologi[sz]e|my apologies|unfortunately)"
    r"(?: for [^.,;:!]{1,60})?[ ,.;:!—-]{1,4}(?:but )?"
)


class CheckFailure(StrEnum):
    """What an answer has failed."""

    SCHEMA = "schema"
    REFUSAL = "refusal"
    LOGPROB = "logprob"


@dataclass(slots=True)
class ChoiceText:
    """One choice of an answer, put together from its parts."""

    text: str = ""
    refusal: str = ""
    """What its server has marked as one."""
    calls_tools: bool = False
    finish: FinishReason | None = None
    logprobs: list[float] = field(default_factory=list)


def choice_texts(parts: Iterable[TextDelta]) -> list[ChoiceText]:
    """The choices that these parts make, in their order."""
    choices: dict[int, ChoiceText] = {}
    texts: dict[int, list[str]] = {}
    for part in parts:
        said = choices.setdefault(part.index, ChoiceText())
        texts.setdefault(part.index, []).append(part.text)
        extra = part.extra or {}
        said.refusal += extra.get("refusal", "")
        said.calls_tools = said.calls_tools or bool(extra.get("tool_calls"))
        said.logprobs += [score.chosen.logprob for score in part.scores or ()]
        said.finish = part.finish or said.finish
    for index, said in choices.items():
        said.text = "".join(texts[index])
    return [choices[index] for index in sorted(choices)]


def is_refusal(said: ChoiceText, openings: Sequence[str]) -> bool:
    """Whether its server says so, or it begins like one.

    Args:
        said: The choice.
        openings: In small letters, with straight apostrophes.
    """
    if said.refusal or said.finish is FinishReason.CONTENT_FILTER:
        return True
    if said.calls_tools or len(said.text) > MOST_REFUSAL_CHARACTERS:
        return False
    text = said.text.strip().lower().replace("’", "'")
    if apology := _APOLOGY.match(text):
        text = text[apology.end() :]
    return text.startswith(tuple(openings))


def mean_logprob(said: ChoiceText) -> float | None:
    """Of its tokens; None: nobody has told it. A token that should have been impossible counts as one in e^100."""
    if not said.logprobs:
        return None
    return math.fsum(max(logprob, -100.0) for logprob in said.logprobs) / len(said.logprobs)


def schema_in(fields: Mapping[str, Any]) -> object | None:
    """The JSON schema that a request in the words of OpenAI's API asks its answer to follow; None: none."""
    wanted = fields.get("response_format") or {}
    match wanted.get("type"):
        case "json_schema":
            schema: object = (wanted.get("json_schema") or {}).get("schema")
            return schema
        case "json_object":
            return {"type": "object"}
    return fields.get("guided_json")
