"""Equal requests at the same time, of real clients at a real engine: one is computed, whoever leaves."""

import asyncio
import json
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.console_server import consoled

CALLERS = 100
LENGTH = 200
CHAT = {"model": "maitred-tiny", "temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
LIMIT_S = 300.0


@pytest.fixture(scope="module", params=[1, 4])
def system(request):
    with consoled(engine__threads=1, server__workers=request.param) as running:
        running.acme = running.key("acme")
        yield running


@pytest.fixture
async def client(system):
    headers = {"authorization": f"Bearer {system.acme}", "anthropic-version": "2023-06-01"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # so that all workers get some
    async with httpx.AsyncClient(
        base_url=system.url, headers=headers, timeout=LIMIT_S, limits=limits, trust_env=False
    ) as http:
        yield http


def counters(system):
    """Counters of the engine and of requests, summed over their labels."""
    found = {}
    for family in text_string_to_metric_families(system.admin.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def ledger(system):
    """Sums of the tokens in the ledger."""
    (total,) = system.admin.get("/admin/v1/usage").json()["data"]
    return total


async def stream(client, prompt, begun=None):
    """Text of a streamed chat completion, with what the cache says."""
    body = {**CHAT, "messages": [{"role": "user", "content": prompt}], "stream": True}
    text, ended = "", False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                text += choices[0]["delta"].get("content") or "" if choices else ""
                if text and begun is not None:
                    begun.set()
    assert ended
    return text, response.headers["x-maitred-cache"]


async def test_a_hundred_equal_streams_are_computed_once(system, client):
    before, booked = counters(system), ledger(system)
    results = await asyncio.gather(*(stream(client, "a hundred") for _ in range(CALLERS)))
    texts, cached = {text for text, _ in results}, [status for _, status in results]
    assert len(texts) == 1
    assert len(next(iter(texts))) > LENGTH // 2
    assert cached.count("miss") == 1
    assert set(cached) <= {"miss", "coalesced", "hit"}
    after, booked_after = await asyncio.to_thread(counted, system, before, booked)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["maitred_output_tokens_total"] == LENGTH
    assert booked_after["output_tokens"] - booked["output_tokens"] == LENGTH
    assert booked_after["prompt_tokens"] - booked["prompt_tokens"] == grown["maitred_prompt_tokens_total"]
    assert booked_after["requests"] - booked["requests"] == CALLERS
    assert booked_after["cache_hits"] - booked.get("cache_hits", 0) == CALLERS - 1


async def test_who_leaves_takes_nothing_from_the_others(system, client):
    before = counters(system)
    begun = [asyncio.Event() for _ in range(3)]
    running = []
    for event in begun:
        running.append(asyncio.create_task(stream(client, "leaving", event)))
        await event.wait()
    running[0].cancel()
    await asyncio.wait(running[:1])
    texts = [await task for task in running[1:]]
    assert texts[0][0] == texts[1][0] == (await stream(client, "leaving"))[0]
    assert "miss" not in {status for _, status in texts}
    output = "maitred_output_tokens_total"
    deadline_s = time.monotonic() + LIMIT_S
    while counters(system).get(output, 0) - before.get(output, 0) < LENGTH:
        assert time.monotonic() < deadline_s, "what was computed after the first caller had left is not counted"
        await asyncio.sleep(0.05)
    assert counters(system)[output] - before.get(output, 0) == LENGTH


def counted(system, before, booked):
    """The counters and the ledger when all callers are in them, which can be a moment after their answers."""
    deadline_s = time.monotonic() + LIMIT_S
    lookups = "maitred_cache_lookups_total"
    while True:
        now, total = counters(system), ledger(system)
        grown = now.get(lookups, 0) - before.get(lookups, 0), total["requests"] - booked["requests"]
        if min(grown) >= CALLERS:
            return now, total
        assert time.monotonic() < deadline_s, "not all requests are counted"
        time.sleep(0.01)


def wait_idle(system):
    """Waits until the engine computes nothing and no request is under way."""
    deadline_s = time.monotonic() + LIMIT_S
    while (now := counters(system))["maitred_engine_running"] or now["maitred_in_flight"]:
        assert time.monotonic() < deadline_s, "what everybody has left goes on"
        time.sleep(0.01)


async def test_when_all_leave_nothing_is_held(system, client):
    for _ in range(2):
        begun = [asyncio.Event() for _ in range(8)]
        running = [asyncio.create_task(stream(client, "all leave", event)) for event in begun]
        for event in begun:
            await event.wait()
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await asyncio.to_thread(wait_idle, system)
    text, _ = await stream(client, "all leave")
    assert len(text) > LENGTH // 2


async def test_all_apis_share_an_answer(system, client):
    prompt = "every dialect"
    chat = {"model": CHAT["model"], "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    response = {"model": CHAT["model"], "input": prompt, "temperature": 0, "max_output_tokens": 64}
    asked = [
        client.post("/v1/chat/completions", json={**chat, "max_tokens": 64}),
        client.post("/v1/messages", json={**chat, "max_tokens": 64}),
        client.post("/v1/responses", json=response),
    ]
    answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
    assert [answer.headers["x-maitred-cache"] for answer in answers].count("miss") == 1
    chatted, messaged, responded = (answer.json() for answer in answers)
    text = chatted["choices"][0]["message"]["content"]
    assert messaged["content"][0]["text"] == text
    assert responded["output"][0]["content"][0]["text"] == text
    tokens = chatted["usage"]["completion_tokens"]
    assert messaged["usage"]["output_tokens"] == responded["usage"]["output_tokens"] == tokens


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_split_bill_is_the_sum_that_the_engine_has_counted(workers):
    callers = 30
    with consoled(engine__threads=1, server__workers=workers, cache__coalesced_bill="split") as system:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        headers = {"authorization": f"Bearer {system.key('acme')}"}
        async with httpx.AsyncClient(
            base_url=system.url, headers=headers, timeout=LIMIT_S, limits=limits, trust_env=False
        ) as client:
            results = await asyncio.gather(*(stream(client, "split") for _ in range(callers)))
        assert len({text for text, _ in results}) == 1
        sharers = [status for _, status in results if status != "hit"]
        deadline_s = time.monotonic() + LIMIT_S
        while len(lines := system.admin.get("/admin/v1/usage/events?limit=100").json()["data"]) < callers:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.05)
        engine = counters(system)
        assert sum(line["output_tokens"] for line in lines) == engine["maitred_output_tokens_total"] == LENGTH
        assert sum(line["prompt_tokens"] for line in lines) == engine["maitred_prompt_tokens_total"]
        shares = sorted(line["output_tokens"] for line in lines if line["output_tokens"])
        assert len(sharers) > callers // 2
        assert len(shares) <= len(sharers)
        assert shares[:-1] == [LENGTH // len(shares)] * (len(shares) - 1)
        saved = sum(line["saved_tokens"] for line in lines)
        while counters(system)["maitred_cache_saved_tokens_total"] != saved:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.05)


def usages(response):
    """Everything that a response, whole or streamed, says of its tokens."""
    if "event-stream" not in response.headers["content-type"]:
        return response.json()["usage"]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    (*_, last) = (found for found in map(usage_in, map(json.loads, lines)) if found)
    return last


def usage_in(event):
    return event.get("usage") or (event.get("response") or {}).get("usage")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"max_tokens": 4, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"max_tokens": 4, "stream_options": {"include_usage": True}}),
        ("/v1/messages", {"max_tokens": 4}),
        ("/v1/responses", {"max_output_tokens": 4}),
    ],
)
async def test_a_hit_has_its_headers_and_the_usage_of_the_first_answer(client, path, fields):
    """The first answer finds a part of its prompt in the KV cache, and so all hits say that."""

    async def ask(prompt, *, stream):
        named = {"/v1/completions": {"prompt": prompt}, "/v1/responses": {"input": prompt}}
        asked = named.get(path, {"messages": [{"role": "user", "content": prompt}]})
        body = {"model": CHAT["model"], "temperature": 0, **fields, **asked, "stream": stream}
        if not stream:
            body.pop("stream_options", None)
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response

    text = f"Tell the one who asks {path} a long story about a king, his three sons and the forest. "
    await ask(text, stream=False)
    first = await ask(text + "Begin!", stream=False)
    key = first.headers["x-maitred-cache-key"]
    assert (first.headers["x-maitred-cache"], "age" in first.headers) == ("miss", False)
    cached = [value for name, value in flat(usages(first)) if name in ("cached_tokens", "cache_read_input_tokens")]
    assert cached[0] >= 16
    for stream in (True, False, True):
        again = await ask(text + "Begin!", stream=stream)
        while again.headers["x-maitred-cache"] == "coalesced":  # it is not kept yet
            again = await ask(text + "Begin!", stream=stream)
        assert again.headers["x-maitred-cache"] == "hit"
        assert 0 <= int(again.headers["age"]) < LIMIT_S
        assert again.headers["x-maitred-cache-key"] == again.headers["x-litellm-cache-key"] == key
        assert again.headers["x-request-id"] != first.headers["x-request-id"]
        assert dict(flat(usages(again))) == dict(flat(usages(first)))


def flat(usage):
    """The numbers of a usage, by their names."""
    for name, value in usage.items():
        if isinstance(value, dict):
            yield from flat(value)
        else:
            yield name, value
