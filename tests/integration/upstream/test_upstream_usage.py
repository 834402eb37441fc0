"""What a server counts and how much it sends, held against what its request was granted: real HTTP on both sides."""

import json

import pytest

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.core.context import Outcome
from maitred.core.limits import Limit, LimitKind
from maitred.testing.scripted_openai import FaultKind, ScriptedFault, ServerScript, scripted_openai
from tests.integration.upstream.test_upstream_faults import stream, texts
from tests.support.upstream_gateway import upstream_gateway

PRICES = AdmissionConfig(prices={"*": PriceConfig(prompt=10.0, cached=1.0, output=30.0)})
BUDGET = Limit(id="budget", subject="*", kind=LimitKind.USD_TOTAL, value=1_000_000_000)
DONE = "data: [DONE]\n\n"


def event(data):
    return f"data: {json.dumps(data)}\n\n"


def chunk(text=None, finish=None, index=0, **delta):
    if text is not None:
        delta["content"] = text
    return event({"choices": [{"index": index, "delta": delta, "finish_reason": finish}]})


def usage(**counts):
    return event({"choices": [], "usage": counts})


def answering(*events):
    """A server that gives the same answer to everybody, and leaves the connection open to whoever still reads."""
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return ServerScript(faults=[ScriptedFault(kind=FaultKind.BYTES, share=1.0, text=head + "".join(events))])


def gateway(server, **settings):
    settings = {"dialect": "generic", "admitting": PRICES, "limited": [BUDGET], **settings}
    return upstream_gateway(f"{server.url}/v1", **settings)


async def the_only_line(system):
    await system.wait_until(lambda: system.nothing_left and system.ledger.events)
    (line,) = system.ledger.events
    return line


ENDLESS = [chunk("word ")] * 20_000


async def test_an_answer_that_ignores_max_tokens_ends_at_the_grant():
    with scripted_openai(answering(*ENDLESS)) as server:
        async with gateway(server) as system:
            answer = (await system.chat(max_tokens=40)).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 40
            assert answer["usage"]["estimated"] is True
            assert len(answer["choices"][0]["message"]["content"]) < 500
            line = await the_only_line(system)
            assert (line.outcome, line.output_tokens) == (Outcome.FINISHED, 40)
            assert line.cost_nusd <= (40 * 30 + line.prompt_tokens * 10) * 1000


async def test_a_stream_that_ignores_max_tokens_ends_at_the_grant():
    with scripted_openai(answering(*ENDLESS)) as server:
        async with gateway(server) as system:
            _, events, done, clean = await stream(system)
            assert (done, clean) == (True, True)
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert len(texts(events)) < 500
            assert (await the_only_line(system)).output_tokens == 8


async def test_what_was_told_before_the_grant_was_used_up_has_no_holes():
    """Texts and thoughts by turns, which come in one read."""
    said = [f"{number} and " for number in range(200)]
    by_turns = [chunk(piece) + chunk(reasoning_content=piece) for piece in said]
    with scripted_openai(answering(*by_turns, chunk(None, "stop"), DONE)) as server:
        async with gateway(server) as system:
            (choice,) = (await system.chat(max_tokens=40)).json()["choices"]
            assert choice["finish_reason"] == "length"
            for told in (choice["message"]["content"], choice["message"]["reasoning_content"]):
                assert len(told) > 100
                assert "".join(said).startswith(told)


async def test_one_choice_over_its_grant_leaves_the_others():
    over = [chunk("word ", index=1)] * 200
    end = [chunk("word", "stop", 1), chunk("lo", "stop"), usage(prompt_tokens=5, completion_tokens=203), DONE]
    with scripted_openai(answering(chunk("Hel"), *over, *end)) as server:
        async with gateway(server) as system:
            answer = (await system.chat(max_tokens=40, n=2)).json()
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
            assert answer["choices"][0]["message"]["content"] == "Hello"
            assert answer["usage"]["completion_tokens"] <= 80


async def test_an_answer_that_is_estimated_too_long_is_left_alone():
    """Its tokens have ten letters, more than those of most texts."""
    words = [chunk("abcdefghij")] * 38
    counted = usage(prompt_tokens=5, completion_tokens=38)
    with scripted_openai(answering(*words, chunk(None, "stop"), counted, DONE)) as server:
        async with gateway(server) as system:
            answer = (await system.chat(max_tokens=40)).json()
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["choices"][0]["message"]["content"] == "abcdefghij" * 38
            assert answer["usage"]["completion_tokens"] == 38
            assert "estimated" not in answer["usage"]


@pytest.mark.parametrize(
    ("counts", "prompt", "output", "estimated"),
    [
        ({"prompt_tokens": 1000, "total_tokens": 1000}, 1000, 1, True),
        ({"prompt_tokens": 1000, "completion_tokens": None}, 1000, 1, True),
        ({"prompt_tokens": 15.0, "completion_tokens": "2"}, 15, 2, False),
        ({"prompt_tokens": 15, "completion_tokens": 10**6}, 15, 1, True),
        ({"prompt_tokens": 15, "completion_tokens": 9 * 10**18}, 15, 1, True),
        ({"prompt_tokens": 10**8, "completion_tokens": 2}, 9, 2, True),
        ({"prompt_tokens": -5, "completion_tokens": -20_000}, 9, 1, True),
        ({"prompt_tokens": 0, "completion_tokens": 0}, 9, 1, True),
    ],
)
async def test_each_count_is_read_and_checked_for_itself(counts, prompt, output, estimated):
    with scripted_openai(answering(chunk("Hi"), chunk(None, "stop"), usage(**counts), DONE)) as server:
        async with gateway(server) as system:
            told = (await system.chat()).json()["usage"]
            assert (told["prompt_tokens"], told["completion_tokens"]) == (prompt, output)
            assert told.get("estimated", False) is estimated
            line = await the_only_line(system)
            assert (line.prompt_tokens, line.output_tokens) == (prompt, output)


async def test_a_budget_is_never_charged_more_than_was_reserved():
    counted = usage(prompt_tokens=16_000, completion_tokens=8)
    with scripted_openai(answering(chunk("Hi"), chunk(None, "stop"), counted, DONE)) as server:
        async with gateway(server) as system:
            await system.chat(max_tokens=8)
            line = await the_only_line(system)
            assert line.prompt_tokens == 16_000
            assert line.cost_nusd <= (8 * 30 + 20 * 10) * 1000
            (budget,) = await system.admission.budgets("*")
            assert budget.charged == line.cost_nusd
