"""Parts that the parsers of all servers' answers share: JSON of events, cut characters, and the words for an end.

They are lenient: whatever can be read without a loss is read.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from maitred.core.request import FinishReason

_FINISH_REASONS: Mapping[str, FinishReason | None] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "end_turn", "end"), FinishReason.STOP),
    **dict.fromkeys(("length", "max_tokens", "model_length"), FinishReason.LENGTH),
    **dict.fromkeys(("tool_calls", "tool_use", "function_call"), FinishReason.TOOL_CALLS),
    **dict.fromkeys(("content_filter", "refusal"), FinishReason.CONTENT_FILTER),
    "pause_turn": FinishReason.PAUSE,
    **dict.fromkeys(("null", "none"), None),
}
"""Finish reason by the usual words for it; None: the choice goes on."""
_FINISH_STEMS: Sequence[tuple[re.Pattern[str], FinishReason | None]] = (
    (
        re.compile(
            "abort|error|cancel|time_?d?_?out|fail|interrupt|insufficient|malformed|unavailable|disconnect|expire"
        ),
        None,
    ),
    (re.compile("length|max|limit|truncat|context|budget|pause"), FinishReason.LENGTH),
    (
        re.compile("filter|safety|block|recitation|prohibit|sensitive|moderat|guard|policy|spii|refus"),
        FinishReason.CONTENT_FILTER,
    ),
    (re.compile("tool|function"), FinishReason.TOOL_CALLS),
)
"""Finish reason by a part of the words of other servers; None: the answer is incomplete."""
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""A surrogate pair."""
_BYTES = re.compile("[\udc80-\udcff]+")
"""Bytes that are no UTF-8 by themselves, as `decode_event` keeps them."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_CUT_CHARACTER = re.compile(
    "(?:[\ud800-\udbff]|[\udcc2-\udcdf]|[\udce0-\udcef][\udc80-\udcbf]?|[\udcf0-\udcf4][\udc80-\udcbf]{0,2})\\Z"
)
"""First half of a surrogate pair, or first bytes of a character, at the end of a text."""


class AnswerBroken(Exception):
    """Error for an incomplete answer that no further event can complete."""


class AnswerFailed(Exception):
    """Error that the server reported in the stream.

    Args:
        kind: The type of the error, such as ``overloaded_error``.
        message: The message of the server.
        fields: All that the server said of it.
    """

    def __init__(self, kind: str, message: str, fields: Mapping[str, Any]) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.fields = fields


def parse_finish_reason(value: object, *, has_calls: bool) -> FinishReason | None:
    """Returns the finish reason in a server's words; None: the choice goes on.

    An unknown word, or a number, is an end, unless it speaks of a failure. A choice with tool calls ends for them,
    whatever the word, unless it was cut, and one without them does not.

    Raises:
        AnswerBroken: The choice is incomplete.
    """
    if isinstance(value, dict):
        value = value.get("type") or value.get("reason")
    if not value:
        return None
    if not isinstance(value, str):
        value = "end"
    word = value.lower()
    if word in _FINISH_REASONS:
        reason = _FINISH_REASONS[word]
    else:
        reason = next((meant for stem, meant in _FINISH_STEMS if stem.search(word)), FinishReason.STOP)
        if reason is None:
            raise AnswerBroken(f"a choice ended for the reason {value[:40]!r}, which is no end")
    if reason in (FinishReason.STOP, FinishReason.TOOL_CALLS):
        return FinishReason.TOOL_CALLS if has_calls else FinishReason.STOP
    return reason


def decode_event(data: bytes) -> tuple[Any, bool]:
    """Decodes the data of an event; None if it says nothing.

    Returns:
        The decoded value, and whether its texts may have surrogates: parts of characters that one event ends with and
        the next one begins with. `TextAssembler` and `replace_surrogates` remove them.

    Raises:
        AnswerBroken: The data begins as JSON does and is none.
    """
    try:
        return msgspec.json.decode(data), False
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    if not data.startswith((b"{", b"[")):
        return None, False  # a word that keeps the connection alive, such as ``ping``: no chunk begins like this
    try:
        # It takes lone surrogates, control characters and NaN too. Bytes that are no UTF-8 become surrogates.
        return json.loads(data.decode("utf-8", "surrogateescape"), strict=False), True
    except (ValueError, RecursionError):
        raise AnswerBroken("it sent an event that is no JSON") from None


class TextAssembler:
    """Assembler of texts, for characters whose parts come in two events: halves of a surrogate pair, or bytes in UTF-8.

    A text is continued by the text at the same place of a later event.

    Attributes:
        held: Parts of characters whose rest has not come, by place.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[object, ...], str] = {}

    def join(self, place: tuple[object, ...], value: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
        """Returns a value whose texts begin with the held parts, and without a part of a character at their ends.

        Args:
            place: Place of the value; an entry of a list is at its `index`, if it has one.
            value: A decoded JSON value.
        """
        match value:
            case str():
                text, part = _split_character(self.held.pop(place, "") + value)
                if part:
                    self.held[place] = part
                return text
            case list():
                return [self.join((*place, _index_of(entry, number)), entry) for number, entry in enumerate(value)]
            case dict():
                return {replace_surrogates(name): self.join((*place, name), entry) for name, entry in value.items()}
        return value

    def take(self, *place: object) -> list[tuple[object, ...]]:
        """Forgets the parts that are held at this place and within it, and returns their places."""
        places = [held for held in self.held if held[: len(place)] == place]
        for held in places:
            del self.held[held]
        return places


def _index_of(entry: object, number: int) -> object:
    index = entry.get("index") if isinstance(entry, dict) else None
    return number if index is None else str(index)


def _split_character(text: str) -> tuple[str, str]:
    """Joins the parts of characters in a text; returns it without a part at its end, and that part.

    Other surrogates are replaced.
    """
    if not _SURROGATE.search(text):
        return text, ""
    text = _PAIR.sub(lambda pair: pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text)
    part = ""
    if cut := _CUT_CHARACTER.search(text):
        text, part = text[: cut.start()], cut[0]
    text = _BYTES.sub(lambda run: run[0].encode("utf-8", "surrogateescape").decode("utf-8", "replace"), text)
    return _SURROGATE.sub("\ufffd", text), part


def replace_surrogates(value: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
    """Returns a value whose texts have no surrogates, which no encoder takes."""
    match value:
        case str():
            text, part = _split_character(value)
            return text + "\ufffd" if part else text
        case list():
            return [replace_surrogates(entry) for entry in value]
        case dict():
            return {replace_surrogates(name): replace_surrogates(entry) for name, entry in value.items()}
    return value
