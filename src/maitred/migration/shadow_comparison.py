"""Comparison of what two gateways answer to the same request, by what clients read.

Ids and times differ by their nature and are not compared. Texts are compared only where the request has temperature 0,
because others are drawn; names of headers only where clients of the other gateway may read them.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.migration.shadow_requests import SampleRequest
from maitred.wire.sse import SSEDecoder

_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens")
_READ_HEADERS = (
    *("x-litellm-call-id", "x-litellm-model-id", "x-litellm-model-group", "x-litellm-model-api-base"),
    *("x-litellm-response-cost", "x-litellm-response-duration-ms", "x-litellm-overhead-duration-ms"),
    *("x-litellm-attempted-retries", "x-litellm-attempted-fallbacks", "x-litellm-version", "retry-after"),
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests"),
    *("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens"),
)
_ERROR_FIELDS = ("message", "type", "param", "code")
_NOTHING: tuple[object, ...] = (None, "", [])
_LONGEST_VALUE = 120


class ShadowAnswer(msgspec.Struct, frozen=True):
    """Answer of one gateway to a request.

    Attributes:
        status: The status.
        headers: Headers by their names in lower case.
        body: The whole body, also of a stream.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


def find_differences(request: SampleRequest, theirs: ShadowAnswer, ours: ShadowAnswer) -> list[str]:
    """Returns what a client would see, one sentence for each difference; empty: nothing."""
    facts, own = _facts(request, theirs), _facts(request, ours)
    found = [
        f"{name}: theirs {_format(facts.get(name))}, ours {_format(own.get(name))}"
        for name in dict.fromkeys([*facts, *own])
        if facts.get(name) != own.get(name) and not (facts.get(name) in _NOTHING and own.get(name) in _NOTHING)
    ]
    if (theirs.status < 400) != (ours.status < 400):  # an answer and an error have nothing else in common
        return [
            f"status: theirs {theirs.status}, ours {ours.status}",
            *_error_lines(theirs, "theirs"),
            *_error_lines(ours, "ours"),
        ]
    lacking = [name for name in _READ_HEADERS if name in theirs.headers and name not in ours.headers]
    return [*found, *([f"headers that only theirs has: {', '.join(lacking)}"] if lacking else [])]


def _facts(request: SampleRequest, answer: ShadowAnswer) -> dict[str, object]:
    """Returns what clients read of an answer."""
    facts: dict[str, object] = {
        "status": answer.status,
        "content type": answer.headers.get("content-type", "").partition(";")[0],
    }
    if facts["content type"] == "text/event-stream":
        decoder = SSEDecoder()
        events = [event.data for event in decoder.feed(answer.body)]
        facts["end of the stream"] = events[-1] if events and events[-1] == "[DONE]" else "none"
        bodies = [body for event in events if event != "[DONE]" and (body := _object(event.encode())) is not None]
    else:
        body = _object(answer.body)
        if body is None:
            return facts | {"body": "no JSON object"}
        bodies = [body]
    error = next((body["error"] for body in bodies if body.get("error")), None)
    if error is not None:
        is_object = isinstance(error, dict)
        fields = [name for name in _ERROR_FIELDS if is_object and name in error]
        facts["fields of the error"] = fields if is_object else type(error).__name__
        facts["type of the error"] = error.get("type") if is_object else None
        return facts
    facts["model"] = next((body["model"] for body in bodies if body.get("model")), None)
    usage: dict[str, Any] = next(
        (body["usage"] for body in reversed(bodies) if isinstance(body.get("usage"), dict)), {}
    )
    facts |= {name: usage[name] for name in _USAGE if name in usage}
    choices = [choice for body in bodies for choice in body.get("choices") or () if isinstance(choice, dict)]
    facts["finish reasons"] = [each["finish_reason"] for each in choices if each.get("finish_reason")]
    facts["tool calls"] = _tool_calls(choices)
    if request.body.get("temperature") == 0:
        facts["text"] = "".join(_text(choice) for choice in choices)
    return facts


def _error_lines(answer: ShadowAnswer, whose: str) -> list[str]:
    """Returns what an error says."""
    error = (_object(answer.body) or {}).get("error") if answer.status >= 400 else None
    message = error.get("message") if isinstance(error, dict) else error
    return [] if message is None else [f"{whose} says {_format(message)}"]


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    """Returns the message of a choice, or what a chunk adds to it."""
    message = choice.get("message") or choice.get("delta")
    return message if isinstance(message, dict) else {}


def _text(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or _message(choice).get("content") or "")


def _tool_calls(choices: list[dict[str, Any]]) -> list[tuple[str, object]]:
    """Returns names and arguments of all calls, put together from the chunks of a stream."""
    calls: dict[tuple[int, int], list[str]] = {}
    for choice in choices:
        for place, call in enumerate(_message(choice).get("tool_calls") or ()):
            key = choice.get("index", 0), call.get("index", place)
            function = call.get("function") or {}
            name, arguments = calls.setdefault(key, ["", ""])
            calls[key] = [name + (function.get("name") or ""), arguments + (function.get("arguments") or "")]
    return [(name, _object(arguments.encode()) or arguments) for name, arguments in calls.values()]


def _format(value: object) -> str:
    text = "nothing" if value in (None, [], "") else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
