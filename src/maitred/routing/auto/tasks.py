"""Task detection: a few rules find the kind of work that a prompt asks for.

Rules are used rather than a trained model, so that an operator who reads the configuration can predict where a request
will go. The rules prefer to miss a task over naming a wrong one, because a prompt without a task is still routed by its
difficulty. The time of all patterns grows linearly with the text.
"""

import re
from enum import StrEnum


class Task(StrEnum):
    """Kind of work that a prompt asks for."""

    CODE = "code"
    """The prompt contains code or asks for code."""
    EXTRACTION = "extraction"
    """The answer has a schema, or the prompt asks for fields, labels or JSON."""
    CHAT = "chat"
    """Any other prompt."""


_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_SOURCE = re.compile(
    r"^[ \t]*(?:def \w+\(|class \w+[:({]|import [\w.]+(?: as \w+)?;?$|from [\w.]+ import\b|#include\b|func \w+\(|"
    r"fn \w+[(<]|public (?:static|class)\b|(?:const|let|var) \w+ =|SELECT\b.{1,200}\bFROM\b)",
    re.MULTILINE,
)
_TRACEBACK = re.compile(r"^(?:Traceback \(most recent call last\)|panicked at |Exception in thread )", re.MULTILINE)
_LANGUAGE = re.compile(
    r"(?<!\w)(?:python|java|javascript|typescript|c\+\+|c#|rust|golang|kotlin|swift|ruby|php|scala|haskell|sql|bash)(?!\w)",
    re.IGNORECASE,
)
_WANTS_PROGRAM = re.compile(
    r"\b(?:write|implement|create|generate|give me|fix|optimi[sz]e|port|translate)\b[^.?!\n]{0,60}\b"
    r"(?:code|functions?|script|program|class|method|query|regular expression|unit tests?|algorithm)\b",
    re.IGNORECASE,
)
_WANTS_REWORK = re.compile(
    r"\b(?:refactor|debug|review)\b[^.?!\n]{0,30}\b(?:code|function|script|program|method|class)\b", re.IGNORECASE
)
_WANTS_FIELDS = re.compile(
    r"(?:^|[.:!?\n]\s?)(?:please |now )?(?:extract|classify|categori[sz]e|label|annotate|parse)\b"
    r"|\b(?:extract|pull out|list all)\b[^.?!\n]{0,60}\b(?:from|in) (?:the|this|these|each|every)\b"
    r"|\b(?:as|in|into|with|return|respond with|output|only|valid) (?:a |an |the |valid )?json\b",
    re.IGNORECASE,
)


def detect_task(text: str, *, has_schema: bool = False) -> Task:
    """Returns the kind of work that a prompt asks for.

    Args:
        text: The prompt; the caller keeps it short.
        has_schema: Whether the answer must follow a schema, which is stronger evidence than any word.
    """
    if has_schema:
        return Task.EXTRACTION
    if _is_about_code(text):
        return Task.CODE
    if _WANTS_FIELDS.search(text):
        return Task.EXTRACTION
    return Task.CODE if _FENCE.search(text) else Task.CHAT  # a code fence can contain any text, so it is checked last


def _is_about_code(text: str) -> bool:
    if any(pattern.search(text) for pattern in (_SOURCE, _TRACEBACK, _WANTS_REWORK)):
        return True
    return _WANTS_PROGRAM.search(text) is not None and _LANGUAGE.search(text) is not None
