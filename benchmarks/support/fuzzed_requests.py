"""Requests for the Responses API that are drawn at random, and then changed at random places."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.support.installation import MODEL

_WORDS = ("", "a", "Hi there", "message", "user", "input_text", "call_1", "f", "{}", "auto", "maitred-tiny")
_EXTREMES: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 1e308, 5e-324, 0.5, "0", "1"),
    *([], {}, [[]], [None], {"": None}, "x" * 10_000, "\0", "\ud800", "\U0001f600" * 50, "ﷺ", "\u202e", "%s%n", "../"),
)
_MOST_CHANGES = 4
_DEEP = (5, 60, 600)
"""Levels of nesting."""
_STREAMED = 0.5


def fuzzed_request(rng: random.Random) -> Any:  # noqa: ANN401 - JSON of any kind
    """Returns a body for ``POST /v1/responses``; four of ten are as they should be."""
    body: Any = _request(rng)
    if rng.random() < 0.4:
        return body
    for _ in range(rng.randint(1, _MOST_CHANGES)):
        body = _changed(body, rng)
    return body


def _request(rng: random.Random) -> dict[str, Any]:
    some: dict[str, Callable[[], Any]] = {
        "instructions": lambda: "Be kind.",
        "temperature": lambda: rng.choice((0, 0.7, 2)),
        "top_p": lambda: rng.choice((0.1, 1)),
        "top_logprobs": lambda: rng.randint(0, 5),
        "include": lambda: rng.sample(
            ["message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results"],
            k=rng.randint(0, 2),
        ),
        "tools": lambda: [_tool(rng) for _ in range(rng.randint(0, 2))],
        "tool_choice": lambda: rng.choice(("auto", "none", {"type": "function", "name": "f"})),
        "text": lambda: {"format": _format(rng)},
        "reasoning": lambda: {"effort": rng.choice(("none", "low", "high"))},
        "metadata": lambda: {"a": "b"},
        "store": lambda: rng.random() < 0.5,
        "background": lambda: rng.random() < 0.3,
        "parallel_tool_calls": lambda: rng.random() < 0.5,
        "previous_response_id": lambda: "resp_1",
        "conversation": lambda: rng.choice(("conv_1", {"id": "conv_1"})),
        "truncation": lambda: rng.choice(("auto", "disabled")),
        "service_tier": lambda: rng.choice(("auto", "default", "flex", "priority")),
        "prompt": lambda: {"id": "pmpt_1", "variables": {}},
        "max_tool_calls": lambda: 2,
        "prompt_cache_key": lambda: "k",
        "safety_identifier": lambda: "s",
        "user": lambda: "u",
        "seed": lambda: 3,
        "stop": lambda: ["x"],
        "stream_options": lambda: {"include_obfuscation": False},
    }
    chosen = [name for name in some if rng.random() < 0.06]
    content: Any = "Hi" if rng.random() < 0.3 else [_item(rng) for _ in range(rng.randint(1, 4))]
    body = {"model": MODEL, "input": content, "max_output_tokens": rng.randint(1, 12)}
    return {**body, **{name: some[name]() for name in chosen}, "stream": rng.random() < _STREAMED}


def _item(rng: random.Random) -> dict[str, Any]:
    role = rng.choice(("user", "user", "user", "assistant", "system", "developer"))
    items: Sequence[Callable[[], dict[str, Any]]] = (
        lambda: {"role": role, "content": "Hi"},
        lambda: {"role": role, "content": "Tell me of a fox."},
        lambda: {"type": "message", "role": role, "content": [_part(rng)]},
        lambda: {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        lambda: {"type": "function_call_output", "call_id": "call_1", "output": rng.choice(("3", [_part(rng)]))},
        lambda: {"type": "custom_tool_call", "call_id": "call_1", "name": "g", "input": "x"},
        lambda: {"type": "custom_tool_call_output", "call_id": "call_1", "output": "y"},
        lambda: {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "t"}],
        },
        lambda: {"type": "item_reference", "id": rng.choice(("msg_1_0", "msg", ""))},
        lambda: {"type": rng.choice(_OTHER_ITEMS), "id": "x_1", "status": "completed"},
    )
    return rng.choices(items, weights=(6, 6, 4, 1, 1, 1, 1, 1, 1, 1))[0]()


_OTHER_ITEMS = (
    *("web_search_call", "file_search_call", "computer_call", "computer_call_output", "image_generation_call"),
    *("code_interpreter_call", "local_shell_call", "local_shell_call_output", "mcp_list_tools", "mcp_call"),
    *("mcp_approval_request", "mcp_approval_response", "compaction", "apply_patch_call", "shell_call", "nobody_knows"),
)


def _part(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            *({"type": "input_text", "text": "Hi"},) * 6,
            {"type": "output_text", "text": "Hi", "annotations": []},
            {"type": "refusal", "refusal": "No."},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
            {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,QQ=="},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        )
    )


def _tool(rng: random.Random) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
    return rng.choice(
        (
            {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": True},
            {"type": "function", "name": "f", "parameters": None},
            {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
            {"type": rng.choice(("web_search", "file_search", "mcp", "code_interpreter", "nobody_knows"))},
        )
    )


def _format(rng: random.Random) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    return rng.choice(
        (
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "name": "n", "schema": schema, "strict": True},
        )
    )


def _changed(value: Any, rng: random.Random) -> Any:  # noqa: ANN401 - JSON
    """Returns the value with one change at a random depth."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        match rng.randrange(12):
            case 0:
                return {key: each for key, each in value.items() if key != name}
            case 1:
                return {**value, rng.choice(_WORDS): _anything(rng)}
            case _:
                return {**value, name: _changed(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value + value
            case 1:
                return [*value[:at], _anything(rng), *value[at:]]
            case _:
                return [*value[:at], _changed(value[at], rng), *value[at + 1 :]]
    return _anything(rng)


def _anything(rng: random.Random) -> Any:  # noqa: ANN401 - JSON
    match rng.randrange(6):
        case 0:
            return rng.choice(_WORDS)
        case 1:
            return "".join(chr(rng.choice((rng.randrange(32), rng.randrange(0xD800), 0x1F468))) for _ in range(9))
        case 2:
            return _nested(rng)
        case 3:
            return rng.choice((_item, _part, _tool, _format))(rng)
        case _:
            return rng.choice(_EXTREMES)


def _nested(rng: random.Random) -> Any:  # noqa: ANN401 - JSON
    value: Any = rng.choice(_WORDS)
    for _ in range(rng.choice(_DEEP)):
        value = [value] if rng.random() < 0.5 else {"properties": value}
    return value
