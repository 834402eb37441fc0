"""Gateway and real engine together, as `maitred serve` starts them, with the model that comes along."""
# ruff: noqa: PT012 - what is awaited is what may be cut off

import asyncio
import time

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maitred.testing.server_process import serving

MODEL = "maitred-tiny"
USER = [{"role": "user", "content": "Tell me a short story about a waiter."}]


@pytest.fixture(scope="module")
def server():
    with serving(settings={"engine.threads": 1, "engine.kv_memory_bytes": 64 << 20}) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture
async def client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


async def wait_until(condition, timeout_s=300.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


async def test_the_same_seed_gives_the_same_answer_whole_or_streamed_alone_or_in_a_batch(client):
    async def whole():
        answer = await client.chat.completions.create(model=MODEL, messages=USER, max_tokens=40, seed=5, n=2)
        return [choice.message.content for choice in answer.choices]

    alone = await whole()
    together = await asyncio.gather(*(whole() for _ in range(6)))
    assert all(answer == alone for answer in together)
    texts = ["", ""]
    stream = await client.chat.completions.create(model=MODEL, messages=USER, max_tokens=40, seed=5, n=2, stream=True)
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == alone


SAID = st.text("ab fox.\n", min_size=1, max_size=12)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    system=SAID,
    turns=st.lists(SAID, min_size=1, max_size=3).filter(lambda said: len(said) % 2),
    most=st.integers(1, 24),
)
def test_all_apis_give_the_same_answer(server, system, turns, most):
    """Chat completions, Messages and Responses: the same greedy text, end and usage for the same conversation."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]
    instructed = [{"role": "system", "content": system}, *messages]
    common = {"model": MODEL, "temperature": 0}

    def ask(path, body):
        headers = {"anthropic-version": "2023-06-01"}
        answer = httpx.post(f"{server.url}{path}", json={**common, **body}, headers=headers, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()

    chat = ask("/v1/chat/completions", {"messages": instructed, "max_tokens": most})
    message = ask("/v1/messages", {"messages": messages, "system": system, "max_tokens": most})
    response = ask("/v1/responses", {"input": messages, "instructions": system, "max_output_tokens": most})
    (choice,) = chat["choices"]
    text = choice["message"]["content"] or ""
    assert "".join(block["text"] for block in message["content"]) == text
    assert "".join(part["text"] for item in response["output"] for part in item["content"]) == text
    is_cut = choice["finish_reason"] == "length"
    assert (message["stop_reason"] == "max_tokens") == (response["status"] == "incomplete") == is_cut
    usage = chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == usage
    cached = message["usage"]["cache_read_input_tokens"]
    assert (message["usage"]["input_tokens"] + cached, message["usage"]["output_tokens"]) == usage


async def test_a_second_look_at_a_prompt_finds_it_in_the_cache(client):
    prompt = "It was a long evening at the restaurant. " * 8
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    anew = {"cache": {"no-cache": True}}  # the cache of prefixes is meant, not that of answers
    first = await client.completions.create(**asked, extra_body=anew)
    second = await client.completions.create(**asked, extra_body=anew)
    assert first.choices[0].text == second.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert second.usage.prompt_tokens == first.usage.prompt_tokens


async def test_token_ids_and_text_are_the_same_prompt(client, server):
    async with httpx.AsyncClient(base_url=server.url) as http:
        tokens = (await http.post("/tokenize", json={"prompt": "Once upon a time"})).json()["tokens"]
    text = await client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=10, temperature=0)
    ids = await client.completions.create(model=MODEL, prompt=tokens, max_tokens=10, temperature=0)
    assert text.choices[0].text == ids.choices[0].text
    assert text.usage == ids.usage or text.usage.prompt_tokens == ids.usage.prompt_tokens == len(tokens)


async def test_a_stop_string_is_where_the_answer_would_have_gone_on(client):
    whole = await client.completions.create(model=MODEL, prompt="The waiter", max_tokens=40, temperature=0)
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    cut = await client.completions.create(model=MODEL, prompt="The waiter", max_tokens=40, temperature=0, stop=stop)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < whole.usage.completion_tokens


async def test_clients_that_leave_give_every_block_back(server, client):
    total = server.metrics()["maitred_engine_kv_blocks_total"]

    async def impatient(number):
        request = client.chat.completions.create(
            model=MODEL, messages=USER, max_tokens=1500, extra_body={"ignore_eos": True}, stream=number % 2 == 0
        )
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                answer = await request
                async for _ in answer:
                    pass

    await asyncio.gather(*(impatient(number) for number in range(8)))
    await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
    await wait_until(lambda: server.metrics()["maitred_engine_running"] == 0)
    await wait_until(lambda: server.metrics()["maitred_engine_kv_blocks_free"] == total)
    assert server.metrics()["maitred_in_flight"] == 0


async def test_log_probabilities_are_those_of_the_choice(client):
    answer = await client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    for token in answer.choices[0].logprobs.content:
        assert token.logprob <= 0
        # Greedy takes the most probable one.
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == token.top_logprobs[0].logprob
