"""Parser of streamed answers of the Responses API; it checks that they are complete.

The parser performs no I/O: it turns events into deltas. Texts, thoughts and arguments of calls are in the deltas as
those of every other server, so they are counted, checked and masked as all others are. What else an event says is in
`TextDelta.block`: a text has it where its place is another one than before. So a client that speaks this API gets all
events as they came, except for those that begin and end the response.

A stream is complete when an event has said how the response ended. Items and events of unknown types pass through.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maitred.core.inference import TextDelta, TokenLogprob, TokenScore
from maitred.core.request import FinishReason, Usage
from maitred.wire.answer_event import AnswerBroken, AnswerFailed, TextAssembler, decode_event, replace_surrogates
from maitred.wire.openai.responses import REASONING_FIELDS
from maitred.wire.reported_usage import read_usage
from maitred.wire.responses.outbound import ORIGIN
from maitred.wire.responses.requests import SERVER_CALLS
from maitred.wire.sse import SSEEvent

TEXT_EVENTS: Mapping[str, str] = {
    "response.output_text.delta": "content",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": REASONING_FIELDS[0],
    "response.reasoning_summary_text.delta": REASONING_FIELDS[0],
}
"""Type of an event with a piece of a text -> the member of a delta that has it."""
CALL_EVENTS: Mapping[str, tuple[str, str]] = {
    "response.function_call_arguments.delta": ("function", "arguments"),
    "response.mcp_call_arguments.delta": ("function", "arguments"),
    "response.code_interpreter_call_code.delta": ("function", "arguments"),
    "response.custom_tool_call_input.delta": ("custom", "input"),
}
"""Type of an event with a piece of a call -> the members of the call that have it."""
_BEGINNINGS = frozenset({"response.created", "response.queued", "response.in_progress"})
_ENDS = frozenset({"response.completed", "response.incomplete"})
_SIGNS_OF_LIFE = frozenset({"keepalive", "ping"})
_END_MARKERS = ("", "[DONE]")
_KIND = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
"""Pattern of the types of events, which are also the names of events in a stream."""
_OF_CONNECTION = frozenset({"sequence_number", "obfuscation"})
"""Members of an event that are about this stream only."""
_READ_OF_TOKEN = frozenset({"token", "logprob", "bytes", "top_logprobs"})


def is_response_event(event: Mapping[str, Any]) -> bool:
    """Returns whether an event is of the Responses API."""
    kind = event.get("type")
    return isinstance(kind, str) and not kind.startswith("content_block_")


def begins_item(event: Mapping[str, Any]) -> bool:
    """Returns whether an event of a stream begins an item."""
    return event.get("type") == "response.output_item.added"


def tells_server_call(event: Mapping[str, Any]) -> bool:
    """Returns whether an event of a stream tells of a tool that runs at the server, which reads what it gives."""
    return _type_of(event.get("item")) in SERVER_CALLS


def _type_of(item: object) -> object:
    return item.get("type") if isinstance(item, dict) else None


class ResponsesStreamParser:
    """Parser of one stream of events of the Responses API.

    Args:
        model: Name of the model here, which items of reasoning are given.
        on_reasoning: Called for each item of reasoning.

    Attributes:
        is_complete: Whether the parser has received the whole answer.
        usage: Usage of the whole answer; None: the server has not reported it yet.
    """

    def __init__(self, model: str, on_reasoning: Callable[[], None] = lambda: None) -> None:
        self.is_complete = False
        self.usage: Usage | None = None
        self._model = model
        self._on_reasoning = on_reasoning
        self._has_content = False
        self._held: list[TextDelta] = []
        """Start of an item of reasoning before anything else: the model has not shown anything yet."""
        self._places: dict[object, Mapping[str, Any]] = {}
        """Text or call -> the place of its last piece."""
        self._characters = TextAssembler()
        """Joins characters whose parts come in two events."""

    @property
    def has_ended(self) -> bool:
        """Whether the end of the response has come."""
        return self.is_complete

    def is_whole(self, fields: Mapping[str, Any]) -> bool:
        """Returns whether an object is a whole answer."""
        return fields.get("object") == "response"

    def feed(self, event: SSEEvent) -> list[TextDelta]:
        """Parses an event and returns its additions to the answer, the last of them with the finish reason.

        Raises:
            AnswerBroken: The event is out of order, or cannot be read.
            AnswerFailed: The event is an error.
        """
        fields = self._decode(event)
        kind = fields.get("type")
        if self.is_complete or not isinstance(kind, str) or not _KIND.fullmatch(kind):
            return []
        if kind in _SIGNS_OF_LIFE or kind in _BEGINNINGS:
            return []
        if kind in _ENDS:
            response = fields.get("response")
            return self._end(kind, response if isinstance(response, dict) else {})
        if kind in ("response.failed", "response.cancelled"):
            _raise_failure(fields.get("response"))
        delta = self._read(kind, fields)
        if not self._has_content and begins_item(fields) and _type_of(fields.get("item")) == "reasoning":
            self._held.append(delta)
            return []
        self._has_content = True
        held, self._held = self._held, []
        return [*held, delta]

    def feed_whole(self, response: Mapping[str, Any]) -> list[TextDelta]:
        """Parses an answer that has come as one object, though a stream was asked for; raises as `feed` does."""
        status = response.get("status")
        if status not in ("completed", "incomplete"):
            _raise_failure(response)
        return self._end(f"response.{status}", response)

    def on_end(self) -> None:
        """Handles the end of the body; raises AnswerBroken if the response has not ended."""
        if not self.is_complete:
            raise AnswerBroken("it ended before response.completed" if self._has_content else "it was empty")

    def _read(self, kind: str, fields: Mapping[str, Any]) -> TextDelta:
        """Returns the delta of an event that is neither the beginning nor the end."""
        event = {name: value for name, value in fields.items() if name not in _OF_CONNECTION}
        text = event.get("delta")
        if not isinstance(text, str) or not (kind in TEXT_EVENTS or kind in CALL_EVENTS):
            return TextDelta(0, "", block=self._with_origin(event))
        del event["delta"]
        if kind in CALL_EVENTS:
            call, member = CALL_EVENTS[kind]
            index = event.get("output_index")
            number = index if isinstance(index, int) else 0
            extra: dict[str, Any] = {"tool_calls": [{"index": number, call: {member: text}}]}
            return TextDelta(0, "", extra=extra, block=self._moved_to((call, number), event))
        name = TEXT_EVENTS[kind]
        if name != "content":
            names = REASONING_FIELDS if name in REASONING_FIELDS else (name,)
            return TextDelta(0, "", extra=dict.fromkeys(names, text), block=self._moved_to(name, event))
        scores = _read_scores(event.pop("logprobs", None))
        return TextDelta(0, text, scores=scores, block=self._moved_to(name, event))

    def _moved_to(self, text: object, place: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the place of a text if it has another one than before."""
        if self._places.get(text) == place:
            return None
        self._places[text] = place
        return place

    def _end(self, kind: str, response: Mapping[str, Any]) -> list[TextDelta]:
        self.is_complete = True
        self.usage = read_usage(response.get("usage"))
        output = response.get("output")
        items = [item for item in (output if isinstance(output, list) else ()) if isinstance(_type_of(item), str)]
        told = {"type": kind, "response": {**response, "output": list(map(self._name_origin, items))}}
        finish = FinishReason.STOP
        if kind == "response.incomplete":
            details = response.get("incomplete_details")
            reason = details.get("reason") if isinstance(details, dict) else None
            finish = FinishReason.CONTENT_FILTER if reason == "content_filter" else FinishReason.LENGTH
        elif any(item.get("type") in ("function_call", "custom_tool_call") for item in items):
            finish = FinishReason.TOOL_CALLS
        # Of an answer that came at once, nothing has been counted yet.
        text, extra = ("", None) if self._has_content else _written_in(items)
        self._has_content = True
        held, self._held = self._held, []
        return [*held, TextDelta(0, text, finish, extra=extra, block=told)]

    def _with_origin(self, event: dict[str, Any]) -> dict[str, Any]:
        item = event.get("item")
        return {**event, "item": self._name_origin(item)} if isinstance(item, dict) else event

    def _name_origin(self, item: dict[str, Any]) -> dict[str, Any]:
        """Returns an item with the name of its model, if it is of reasoning that only this model reads."""
        if item.get("type") != "reasoning":
            return item
        self._on_reasoning()
        return {**item, ORIGIN: {"model": self._model}} if item.get("encrypted_content") else item

    def _decode(self, event: SSEEvent) -> dict[str, Any]:
        """Decodes an event; an event without content is an empty object.

        Raises:
            AnswerBroken: The event is no JSON object.
            AnswerFailed: The event is an error.
        """
        written = event.data.strip()
        if written in _END_MARKERS:
            return {}
        fields, is_mended = decode_event(written.encode("utf-8", "surrogateescape"))
        if fields is None and event.type != "error" and written.isalnum():
            return {}  # a word that keeps the connection alive
        if event.type == "error" and not isinstance(fields, dict):
            fields = {"type": "error", "message": replace_surrogates(written)}
        if not isinstance(fields, dict):
            raise AnswerBroken("it sent an event that is no JSON object")
        if is_mended or self._characters.held:
            place = fields.get("type"), fields.get("item_id"), fields.get("content_index")
            fields = {
                name: self._characters.join((place, name), value) if name == "delta" else replace_surrogates(value)
                for name, value in fields.items()
            }
        if not isinstance(fields.get("type"), str) and event.type != "message":
            fields["type"] = event.type  # the name of the event says it, too
        if fields.get("type") == "error" or ("type" not in fields and fields.get("error")):
            raise AnswerFailed("", str(fields.get("message") or ""), fields)
        return fields


def _raise_failure(response: object) -> None:
    error = response.get("error") if isinstance(response, dict) else None
    if not isinstance(error, dict):
        raise AnswerBroken("its response has not been completed")
    raise AnswerFailed(str(error.get("code") or ""), str(error.get("message") or ""), {"error": error})


def _read_scores(logprobs: object) -> list[TokenScore] | None:
    """Returns the log-probabilities of an event; None: it has none that can be read."""
    if not isinstance(logprobs, list) or not logprobs:
        return None
    try:
        return [TokenScore(_token(entry), list(map(_token, entry.get("top_logprobs") or ())), 0) for entry in logprobs]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _token(entry: Mapping[str, Any]) -> TokenLogprob:
    text: str = entry["token"]
    raw = bytes(entry["bytes"]) if entry.get("bytes") else text.encode()
    members = {name: value for name, value in entry.items() if name not in _READ_OF_TOKEN}
    return TokenLogprob(text, raw, entry.get("logprob"), members or None)


def _written_in(items: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any] | None]:
    """Returns what the model has written in items: the text, and the thoughts and calls as members of a delta."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        for part in [*(item.get("content") or ()), *(item.get("summary") or ())]:
            if isinstance(part, dict) and isinstance(text := part.get("text") or part.get("refusal"), str):
                (thoughts if item.get("type") == "reasoning" else texts).append(text)
        if isinstance(written := item.get("arguments") or item.get("input"), str):
            calls.append({"index": number, "function": {"arguments": written}})
    extra: dict[str, Any] = dict.fromkeys(REASONING_FIELDS, "".join(thoughts)) if thoughts else {}
    return "".join(texts), (extra | ({"tool_calls": calls} if calls else {})) or None
