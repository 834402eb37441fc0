"""Open Responses as assertions: the shape of a response, and the order of its events.

The members are those of https://www.openresponses.org/openapi/openapi.json; every member of a response is required.
"""

import json
from collections.abc import Mapping
from typing import Any

import jsonschema

from maitred.wire.sse import SSEDecoder

TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
NULL, OBJECT = {"type": "null"}, {"type": "object"}


def _required(**members: Any) -> dict[str, Any]:
    return {"type": "object", "required": sorted(members), "properties": members}


def _nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, NULL]}


def _list_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
OUTPUT_TEXT = _required(
    type={"const": "output_text"}, text=TEXT, annotations=_list_of(OBJECT), logprobs=_list_of(OBJECT)
)
ITEM = {
    "anyOf": [
        _required(
            type={"const": "message"},
            id=TEXT,
            status=STATUS,
            role={"const": "assistant"},
            content=_list_of({"anyOf": [OUTPUT_TEXT, _required(type={"const": "refusal"}, refusal=TEXT)]}),
        ),
        _required(type={"const": "function_call"}, id=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT, status=STATUS),
        _required(type={"const": "reasoning"}, id=TEXT, summary=_list_of(OBJECT)),
        _required(type={"const": "compaction"}, id=TEXT, encrypted_content=TEXT),
    ]
}
USER_MESSAGE = _required(
    type={"const": "message"},
    id=TEXT,
    status=STATUS,
    role={"const": "user"},
    content=_list_of(_required(type={"const": "input_text"}, text=TEXT)),
)
USAGE = _required(
    input_tokens=COUNT,
    input_tokens_details=_required(cached_tokens=COUNT),
    output_tokens=COUNT,
    output_tokens_details=_required(reasoning_tokens=COUNT),
    total_tokens=COUNT,
)
TOOL = _required(
    type={"const": "function"},
    name=TEXT,
    description=_nullable(TEXT),
    parameters=_nullable(OBJECT),
    strict=_nullable({"type": "boolean"}),
)
RESPONSE = _required(
    id=TEXT,
    object={"const": "response"},
    created_at=COUNT,
    completed_at=_nullable(COUNT),
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    incomplete_details=_nullable(_required(reason=TEXT)),
    model=TEXT,
    previous_response_id=_nullable(TEXT),
    instructions=_nullable(TEXT),
    output=_list_of(ITEM),
    error=_nullable(_required(code=TEXT, message=TEXT)),
    tools=_list_of(TOOL),
    tool_choice={"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]},
    truncation={"enum": ["auto", "disabled"]},
    parallel_tool_calls={"type": "boolean"},
    text=_required(format=_required(type=TEXT)),
    top_p={"type": "number"},
    presence_penalty={"type": "number"},
    frequency_penalty={"type": "number"},
    top_logprobs=COUNT,
    temperature={"type": "number"},
    reasoning=_nullable(OBJECT),
    usage=_nullable(USAGE),
    max_output_tokens=_nullable(COUNT),
    max_tool_calls=_nullable(COUNT),
    store={"type": "boolean"},
    background={"type": "boolean"},
    service_tier=TEXT,
    metadata=OBJECT,
    safety_identifier=_nullable(TEXT),
    prompt_cache_key=_nullable(TEXT),
)
COMPACTED = _required(
    id=TEXT,
    object={"const": "response.compaction"},
    created_at=COUNT,
    output=_list_of({"anyOf": [USER_MESSAGE, ITEM]}),
    usage=USAGE,
)
_PLACE = {"item_id": TEXT, "output_index": COUNT}
_PART = {**_PLACE, "content_index": COUNT}
_LOGPROBS = {"logprobs": _list_of(OBJECT)}
EVENTS = {
    **{
        name: {"response": RESPONSE}
        for name in ("created", "queued", "in_progress", "completed", "incomplete", "failed")
    },
    **{f"output_item.{name}": {"output_index": COUNT, "item": ITEM} for name in ("added", "done")},
    **{f"content_part.{name}": {**_PART, "part": OBJECT} for name in ("added", "done")},
    "output_text.delta": {**_PART, **_LOGPROBS, "delta": TEXT},
    "output_text.done": {**_PART, **_LOGPROBS, "text": TEXT},
    "function_call_arguments.delta": {**_PLACE, "delta": TEXT},
    "function_call_arguments.done": {**_PLACE, "name": TEXT, "arguments": TEXT},
}
"""Type of an event, without its prefix -> its members beside the type and the number."""


def validate(schema: Mapping[str, Any], instance: Any) -> None:
    """Raises jsonschema.ValidationError unless the decoded JSON is as the schema says."""
    jsonschema.Draft202012Validator(schema).validate(instance)


def read_stream(content: bytes) -> list[dict[str, Any]]:
    """Returns the events of a stream, each of which is as it must be, and where it must be."""
    *sent, last = SSEDecoder().feed(content)
    assert last.data == "[DONE]"
    events = [json.loads(event.data) for event in sent]
    assert [event.type for event in sent] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    for event in events:
        validate(_required(**EVENTS[event["type"].removeprefix("response.")]), event)
    first, second, *inner, end = events
    assert [first["type"], second["type"]] == ["response.created", "response.in_progress"]
    assert (first["response"]["output"], second["response"]["usage"]) == ([], None)
    output = end["response"]["output"]
    for index, item in enumerate(output):
        _check_item([event for event in inner if event["output_index"] == index], item)
    assert all(event["output_index"] < len(output) for event in inner)
    assert {event["response"]["id"] for event in (first, second, end)} == {end["response"]["id"]}
    return events


def _check_item(events: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Checks the events of one item against the item in the last event."""
    added, *inner, done = events
    assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
    assert done["item"] == item
    assert {added["item"]["id"], *(event["item_id"] for event in inner)} == {item["id"]}
    kinds = [event["type"].removeprefix("response.") for event in inner]
    deltas = "".join(event["delta"] for event in inner if "delta" in event)
    match item["type"]:
        case "message":
            between = ["output_text.delta"] * (len(kinds) - 3)
            assert kinds == ["content_part.added", *between, "output_text.done", "content_part.done"]
            (part,) = item["content"]
            assert deltas == inner[-2]["text"] == part["text"]
            assert inner[-1]["part"] == part
        case "function_call":
            name = "function_call_arguments"
            assert kinds == [*[f"{name}.delta"] * (len(kinds) - 1), f"{name}.done"]
            assert deltas == inner[-1]["arguments"] == item["arguments"]
            assert inner[-1]["name"] == item["name"]
        case "compaction":
            assert kinds == []
