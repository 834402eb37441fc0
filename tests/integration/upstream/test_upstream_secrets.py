"""A credential that a server says again reaches nobody, however it is cut into deltas; nothing else is held back."""
# ruff: noqa: SIM117 - nested contexts say who lives within whom

import json

import pytest

from maitred.core.inference import TextDelta
from maitred.core.secret import Secret
from maitred.core.text_replica import TextBatch
from maitred.replica.upstream.secret_mask import DeltaMask
from maitred.testing.scripted_anthropic import Reply, ScriptedAnthropic, block, end, start
from tests.integration.upstream.test_upstream_members import COUNTED, DONE, Bytes, chunk, event, events_of
from tests.integration.upstream.test_upstream_passing import running
from tests.support.upstream_gateway import upstream_gateway

KEY = "sk-live/ss-0123456789"
STARS = "*" * len(KEY)
API_KEY = Secret(KEY, "env KEY")


def pieces(text, size):
    return [text[at : at + size] for at in range(0, len(text), size)]


def call(text):
    return {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": text}}]}


MAKERS = {
    "content": lambda text: {"content": text},
    "reasoning_content": lambda text: {"reasoning_content": text},
    "refusal": lambda text: {"refusal": text},
    "arguments": call,
}


def text_in(message, member):
    if member == "arguments":
        return message["tool_calls"][0]["function"]["arguments"]
    return message[member]


@pytest.mark.parametrize("member", MAKERS)
@pytest.mark.parametrize("size", [1, 2, 5, 100])
async def test_a_chat_never_has_it(member, size):
    said = f"this is sk-live and s {KEY}{KEY} or so, sk-l"
    deltas = [chunk(MAKERS[member](piece)) for piece in pieces(said, size)]
    server = Bytes(b"".join(deltas) + chunk({}, "stop") + COUNTED + DONE)
    async with running(server.answer) as url:
        async with upstream_gateway(f"{url}/v1", dialect="generic", api_key=API_KEY) as system:
            whole = (await system.chat(max_tokens=200)).json()
            streamed = await system.chat(stream=True, max_tokens=200)
    assert text_in(whole["choices"][0]["message"], member) == said.replace(KEY, STARS)
    shown = ""
    for entry in events_of(streamed):
        delta = entry["choices"][0]["delta"]
        calls = delta.get("tool_calls") or [{"function": {"arguments": ""}}]
        shown += calls[0]["function"]["arguments"] if member == "arguments" else delta.get(member) or ""
    assert shown == said.replace(KEY, STARS)


async def test_texts_and_log_probabilities_of_completions():
    def text(piece):
        logprobs = {"tokens": [piece], "token_logprobs": [-0.5], "top_logprobs": [{piece: -0.5}], "text_offset": [0]}
        return event({"choices": [{"index": 0, "text": piece, "finish_reason": None, "logprobs": logprobs}]})

    ended = event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    server = Bytes(b"".join(map(text, [*pieces(f"a {KEY} s", 3), "ok"])) + ended + COUNTED + DONE)
    async with running(server.answer) as url:
        async with upstream_gateway(f"{url}/v1", dialect="generic", api_key=API_KEY) as system:
            body = {"model": "far", "prompt": "x", "max_tokens": 99, "logprobs": 1}
            whole = (await system.client.post("/v1/completions", json=body)).json()["choices"][0]
            events = events_of(await system.client.post("/v1/completions", json={**body, "stream": True}))
    assert whole["text"] == f"a {STARS} sok"
    assert "".join(entry["choices"][0]["text"] for entry in events) == f"a {STARS} sok"
    assert KEY not in "".join(whole["logprobs"]["tokens"])
    assert whole["logprobs"]["tokens"][-1] == "ok"


async def test_messages_of_servers_and_for_clients():
    said = f"so {KEY}."
    deltas = [{"type": "text_delta", "text": piece} for piece in pieces(said, 4)]
    cited = {"type": "citations_delta", "citation": {"type": "char_location", "cited_text": json.dumps(KEY)}}
    events = [start(10, 0), *block(0, {"type": "text", "text": ""}, *deltas, cited), *end("end_turn", 7)]
    async with ScriptedAnthropic([Reply(events)]) as server:
        async with upstream_gateway(server.url, kind="anthropic", api_key=API_KEY) as system:
            asked = {"model": "far", "max_tokens": 99, "messages": [{"role": "user", "content": "x"}]}
            version = {"anthropic-version": "2023-06-01"}
            answers = [
                await system.chat(),
                await system.chat(stream=True),
                await system.client.post("/v1/messages", json=asked, headers=version),
                await system.client.post("/v1/messages", json={**asked, "stream": True}, headers=version),
            ]
    assert all(KEY not in answer.text and STARS in answer.text.replace('","', "") for answer in answers[::2])
    for answer in answers[1::2]:
        texts = [entry.get("delta") or entry.get("choices", [{}])[0].get("delta") or {} for entry in events_of(answer)]
        assert "".join(text.get("text") or text.get("content") or "" for text in texts) == said.replace(KEY, STARS)


def test_what_begins_no_secret_is_not_held_back():
    mask = DeltaMask([KEY])
    for text in ("a", "the kiln", "word ", "ß"):
        assert not mask.is_concerned(TextBatch([TextDelta(0, text)], None, 1))
    (part,) = mask.apply(TextBatch([TextDelta(0, "six")], None, 1)).parts
    assert (part.text, mask.held) == ("six", {})


def test_an_end_that_may_begin_a_secret_waits_no_longer_than_for_the_next_text():
    mask = DeltaMask([KEY])
    assert mask.apply(TextBatch([TextDelta(0, "s")], None, 1)) is None
    batch = mask.apply(TextBatch([TextDelta(1, "s"), TextDelta(0, "", extra={"reasoning": "x"})], None, 1))
    assert [(part.index, part.text, part.extra) for part in batch.parts] == [
        (0, "s", None),
        (0, "", {"reasoning": "x"}),
    ]
    (part,) = mask.apply(TextBatch([TextDelta(1, "un")], None, 1)).parts
    assert (part.index, part.text) == (1, "sun")
