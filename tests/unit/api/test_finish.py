"""How an answer that was cut by its deadline is marked, in both APIs, whole and streamed."""

import json

import pytest

from maitred.api.chat import ChatFormatter
from maitred.api.completions import CompletionFormatter
from maitred.api.streaming import CollectedChoice
from maitred.core.context import RequestContext
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.wire.openai.decode import decode_chat, decode_completion

CONTEXT = RequestContext("req-1", 0.0, model="m")
SHAPES = {
    "chat": ChatFormatter(
        decode_chat(b'{"model":"m","messages":[{"role":"user","content":"x"}]}', strict=True), "chatcmpl-1", CONTEXT
    ),
    "completion": CompletionFormatter(decode_completion(b'{"model":"m","prompt":"x"}', strict=True), "cmpl-1", CONTEXT),
}
ENDS = [
    (FinishReason.STOP, {"finish_reason": "stop"}),
    (FinishReason.LENGTH, {"finish_reason": "length"}),
    (FinishReason.DEADLINE, {"finish_reason": "length", "stop_reason": "deadline"}),
]


def ending(choice):
    return {name: value for name, value in choice.items() if name in ("finish_reason", "stop_reason")}


@pytest.mark.parametrize(("reason", "expected"), ENDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_finish_by_deadline_is_marked(shape, reason, expected):
    whole = json.loads(shape.whole([CollectedChoice(["Hi"], finish=reason)], Usage(1, 1)))
    assert ending(whole["choices"][0]) == expected
    events = shape.events([TextDelta(0, "Hi"), TextDelta(0, "", reason)]).decode().strip().split("\n\n")
    ends = [ending(json.loads(event.removeprefix("data: "))["choices"][0]) for event in events]
    assert ends == [{"finish_reason": None}, expected]
