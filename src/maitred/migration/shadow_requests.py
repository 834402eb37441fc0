"""Requests that are sent to two gateways: those of a file, or a few for each model."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from maitred.core.errors import ConfigInvalid

CHAT = "/v1/chat/completions"
_QUESTION = [{"role": "user", "content": "Name the capital of France in one word."}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class SampleRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request for two gateways.

    Attributes:
        body: Its body.
        path: Its path.
        name: What it is called in the report; empty: its place.
    """

    body: dict[str, Any]
    path: str = CHAT
    name: str = ""


def read_requests(file: Path) -> list[SampleRequest]:
    """Returns the requests of a file with one JSON object a line: a body, or ``{"path": …, "body": …, "name": …}``.

    Raises:
        ConfigInvalid: The file cannot be read, or a line is no request.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigInvalid(f"{file} cannot be read: {error.strerror}.") from None
    requests: list[SampleRequest] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=dict[str, Any])
            whole = found if "body" in found else {"body": found}
            request = msgspec.convert(whole, SampleRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigInvalid(
                f'{file}:{number}: No request: {error}. Write one JSON object a line: a body, or {{"path": "/v1/…", '
                '"body": {…}}.'
            ) from None
        name = request.name or f"line {number}"
        requests.append(SampleRequest(request.body, request.path, f"{name} ({request.body.get('model', 'no model')})"))
    if not requests:
        raise ConfigInvalid(f"{file} has no requests. Write one JSON object a line.")
    return requests


def sample_requests(models: Iterable[str]) -> Sequence[SampleRequest]:
    """Returns a few requests for each model: whole, as a stream and with a tool; and one for no model."""
    requests: list[SampleRequest] = []
    for model in models:
        plain = {"model": model, "messages": _QUESTION, "max_tokens": 16, "temperature": 0}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        weather = [{"role": "user", "content": "How is the weather in Paris?"}]
        forced = {"tools": [_TOOL], "tool_choice": "required", "messages": weather, "max_tokens": 64}
        requests += [
            SampleRequest(plain, name=f"{model}: an answer"),
            SampleRequest(plain | usage, name=f"{model}: a stream"),
            SampleRequest(plain | forced, name=f"{model}: a tool"),
        ]
    missing = {"model": "no-such-model", "messages": _QUESTION}
    return [*requests, SampleRequest(missing, name="a model that there is not")]
