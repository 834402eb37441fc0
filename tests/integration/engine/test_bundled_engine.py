"""The whole system on the bundled model: real processes, the real engine, the official SDK."""

import asyncio
import json
import os
import signal
import threading
import time
from contextlib import suppress

import anthropic
import httpx
import openai
import psutil
import pytest
import torch
import transformers

from maitred.config.tree import BUNDLED_MODEL
from maitred.testing.server_process import ServerProcess, serving

MODEL = "maitred-tiny"
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def server():
    with serving(settings={"engine.kv_memory_bytes": "64MiB", "dispatch.service.output": "2.5"}) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def settled(server: ServerProcess, within_s: float = 300.0) -> dict[str, float]:
    """The metrics once nothing is in flight; fails when something stays behind."""
    deadline_s = time.monotonic() + within_s
    while True:
        metrics = server.metrics()
        held = metrics["maitred_engine_kv_blocks_total"] - metrics["maitred_engine_kv_blocks_free"]
        left = held + sum(
            metrics[name] for name in ("maitred_engine_running", "maitred_engine_waiting", "maitred_in_flight")
        )
        if not left:
            return metrics
        assert time.monotonic() < deadline_s, f"something stays behind: {metrics}"
        time.sleep(0.05)


def ask(client, **fields):
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Tell me about the rabbit."}], **fields
    )


def test_the_engine_counts_tokens_as_the_queue_does(server):
    (engine,) = psutil.Process(server.process.pid).children()
    assert json.loads(engine.cmdline()[-1])["service"] == [1.0, 0.1, 2.5]


def test_streamed_and_whole_answers_are_the_same(client):
    options = {"max_tokens": 40, "seed": 7, "temperature": 0.8}
    whole = ask(client, **options)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]


def test_tokens_that_a_request_bans_are_never_chosen(client):
    def tokens(**fields):
        answer = ask(client, max_tokens=30, temperature=0, extra_body={"return_token_ids": True, **fields})
        return answer.choices[0].token_ids

    plain = tokens(ignore_eos=True)
    words = ["the", "rabbit", "of the"]
    banned = tokens(ignore_eos=True, bad_words=words)
    assert banned != plain
    text = "".join(f" {token} " for token in banned)
    for sequence in (tokenize(client, spelt) for word in words for spelt in (word, f" {word}")):
        assert "".join(f" {token} " for token in sequence) not in text, sequence
    two = plain[:2]
    assert {*tokens(ignore_eos=True, allowed_token_ids=two)} <= {*two}


def test_banned_tokens_and_the_form_of_an_answer_hold_together(client):
    (b,), (end,) = tokenize(client, "b"), tokenize(client, "<|end|>")
    form = {"structured_outputs": {"regex": "[abc]{4}"}}
    answer = ask(client, max_tokens=9, extra_body={**form, "allowed_token_ids": [b, end]})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("bbbb", "stop")
    forced = {"structured_outputs": {"choice": ["abc"]}}
    with pytest.raises(openai.BadRequestError, match="No token is left to choose"):
        ask(client, max_tokens=9, extra_body={**forced, "allowed_token_ids": [b, end]})
    with pytest.raises(openai.BadRequestError, match="No token is left to choose"):
        ask(client, max_tokens=9, extra_body={"allowed_token_ids": [end], "min_tokens": 2})
    one = ask(client, max_tokens=9, extra_body={"allowed_token_ids": [end]})
    assert (one.choices[0].message.content, one.usage.completion_tokens) == ("", 1)


def tokenize(client, text):
    body = {"prompt": text, "add_special_tokens": False}
    return httpx.post(f"{str(client.base_url).removesuffix('/v1/')}/tokenize", json=body).json()["tokens"]


def test_the_same_seed_gives_the_same_answer_in_company(client):
    options = {"max_tokens": 30, "seed": 42, "temperature": 1.0}
    alone = ask(client, **options).choices[0].message.content
    noise = [threading.Thread(target=lambda seed=seed: ask(client, max_tokens=60, seed=seed, n=4)) for seed in range(6)]
    for thread in noise:
        thread.start()
    crowded = ask(client, **options).choices[0].message.content
    for thread in noise:
        thread.join()
    assert crowded == alone


def test_choices_share_the_prompt_and_are_counted(client, server):
    before = settled(server)
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time " * 40, n=4, max_tokens=8, seed=1, extra_body={"ignore_eos": True}
    )
    after = settled(server)
    assert len({choice.text for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens == 32
    prompt = after["maitred_engine_prompt_tokens_total"] - before["maitred_engine_prompt_tokens_total"]
    cached = after["maitred_engine_cached_tokens_total"] - before["maitred_engine_cached_tokens_total"]
    assert prompt == 4 * answer.usage.prompt_tokens
    assert cached >= 3 * ((answer.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


def test_a_repeated_prompt_is_found_in_the_cache(client):
    prompt = "The fox looked at the grapes. " * 30
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    second = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    expected = (second.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.usage.prompt_tokens_details.cached_tokens == expected > 0


SCORED_PROMPT = "The fox looked at the grapes. They were high, and the fox was small. " * 8


def test_log_probabilities_of_a_prompt_are_those_of_transformers(client, server):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    first = client.completions.create(model=MODEL, prompt=SCORED_PROMPT, max_tokens=1)  # now it is cached
    answer = client.completions.create(
        model=MODEL, prompt=SCORED_PROMPT, max_tokens=0, echo=True, logprobs=3, n=2, extra_body={"prompt_logprobs": 2}
    )
    assert answer.usage.prompt_tokens == first.usage.prompt_tokens
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (0, 0)
    tokens = httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": SCORED_PROMPT}).json()["tokens"]
    with torch.no_grad():
        expected = torch.log_softmax(oracle(torch.tensor([tokens])).logits[0], -1)[:-1]
    chosen = [row[token].item() for row, token in zip(expected, tokens[1:], strict=True)]
    for choice in answer.choices:
        assert (choice.text, choice.finish_reason) == (SCORED_PROMPT, "length")
        told = choice.logprobs
        assert told.token_logprobs[0] is told.top_logprobs[0] is None
        assert told.token_logprobs[1:] == pytest.approx(chosen, abs=1e-3)
        places = zip(told.tokens[1:], told.text_offset[1:], strict=True)
        assert all(SCORED_PROMPT[offset:].startswith(token) for token, offset in places)
        for top, row in zip(told.top_logprobs[1:], expected, strict=True):
            assert sorted(top.values(), reverse=True)[:3] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
        entries = choice.model_extra["prompt_logprobs"]
        assert entries[0] is None
        for token, entry, logprob, row in zip(tokens[1:], entries[1:], chosen, expected, strict=True):
            assert entry[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-3)
            best = [value["logprob"] for value in entry.values() if value["rank"] <= 2]
            assert sorted(best, reverse=True) == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
    settled(server)


def test_a_stream_begins_with_the_echoed_prompt_and_says_what_a_whole_answer_says(client):
    options = {"model": MODEL, "prompt": ["The fox", "Once upon a time"], "n": 2, "max_tokens": 6, "seed": 3}
    options |= {"echo": True, "logprobs": 2}
    whole = client.completions.create(**options)
    streamed = [[] for _ in whole.choices]
    for chunk in client.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index].append(chunk.choices[0])
    for choice, parts in zip(whole.choices, streamed, strict=True):
        assert parts[0].text.startswith(options["prompt"][choice.index // 2])
        assert "".join(part.text for part in parts) == choice.text
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            said = [entry for part in parts if part.logprobs for entry in getattr(part.logprobs, field)]
            assert said == getattr(choice.logprobs, field)


def test_a_conversation_has_log_probabilities_of_its_prompt_and_too_many_are_refused(client):
    answer = ask(client, max_tokens=2, n=2, extra_body={"prompt_logprobs": 1})
    entries = answer.model_extra["prompt_logprobs"]
    assert len(entries) == answer.usage.prompt_tokens
    assert all(entry.keys() and 1 in {value["rank"] for value in entry.values()} for entry in entries[1:])
    with pytest.raises(openai.BadRequestError, match="262,144 are allowed"):
        client.completions.create(
            model=MODEL, prompt=[[5] * 1000] * 64, max_tokens=1, extra_body={"prompt_logprobs": 20}
        )
    with pytest.raises(openai.BadRequestError, match="asks for all 4,096 tokens"):
        ask(client, max_tokens=2, logprobs=True, top_logprobs=-1)


def test_a_stop_string_cuts_the_answer_before_it(client):
    options = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0.0}
    text = client.completions.create(**options).choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = client.completions.create(**options, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 60


async def test_clients_that_leave_leave_nothing_behind(server):
    body = {"model": MODEL, "prompt": "Run ", "max_tokens": 1900, "ignore_eos": True}

    async def leave(after_s: float, *, stream: bool) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            with suppress(TimeoutError):
                asked = client.post("/v1/completions", json=body | {"stream": stream})
                answer = await asyncio.wait_for(asked, after_s)
                assert answer.status_code == 200, answer.text  # a fast machine may have answered the patient

    async def leave_within_the_answer() -> None:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=300) as client,
            client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer,
        ):
            await anext(answer.aiter_bytes())

    before = await asyncio.to_thread(server.metrics)
    leaving = (leave(0.05 * number, stream=number % 2 == 0) for number in range(1, 13))
    # On a busy machine those who leave by the clock may be gone before their requests have begun.
    await asyncio.gather(leave_within_the_answer(), *leaving)
    after = await asyncio.to_thread(settled, server)
    assert after["maitred_engine_cancelled_total"] > before["maitred_engine_cancelled_total"]


def test_where_nothing_may_go_on_a_killed_engine_loses_its_streams_loudly_and_comes_back():
    with serving(settings={"engine.kv_memory_bytes": "64MiB", "dispatch.recoveries": 0}) as server:
        engine = psutil.Process(server.process.pid).children()[0]
        body = {"model": MODEL, "prompt": "Run ", "max_tokens": 1900, "ignore_eos": True}
        texts: list[str] = []

        def read_and_kill(client: httpx.Client) -> None:
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                for text in response.iter_text():
                    texts.append(text)
                    if len(texts) == 3:
                        os.kill(engine.pid, signal.SIGKILL)

        with httpx.Client(base_url=server.url, timeout=300) as client:
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                read_and_kill(client)
            events = [event for event in "".join(texts).split("\n\n") if event]
            assert "replica_lost" in events[-1]
            assert "data: [DONE]" not in events

            refused = client.post("/v1/completions", json=body | {"max_tokens": 1})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            deadline_s = time.monotonic() + 300
            while client.get("/health/ready").status_code != 200:
                assert time.monotonic() < deadline_s, "the engine does not come back"
                time.sleep(0.1)
            answer = client.post("/v1/completions", json=body | {"max_tokens": 3})
            assert answer.json()["usage"]["completion_tokens"] == 3
        assert server.metrics()["maitred_engine_restarts_total"] == 1
        assert server.stop() == 0


def test_a_client_that_speaks_anthropic_gets_the_same_answer(client, server):
    messages = [{"role": "user", "content": "Tell me about the rabbit and the fox. " * 8}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 40}
    theirs = client.chat.completions.create(**asked, temperature=0)
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as other:
        whole = other.messages.create(**asked, extra_body={"temperature": 0})
        anew = {"temperature": 0, "cache": {"no-cache": True}}
        with other.messages.stream(**asked, extra_body=anew) as stream:
            streamed = stream.get_final_message()
        counted = other.messages.count_tokens(model=MODEL, messages=asked["messages"])
    assert whole.content[0].text == streamed.content[0].text == theirs.choices[0].message.content
    assert whole.stop_reason == streamed.stop_reason
    assert whole.usage.output_tokens == streamed.usage.output_tokens == theirs.usage.completion_tokens
    assert counted.input_tokens == theirs.usage.prompt_tokens
    read = streamed.usage.cache_read_input_tokens
    assert streamed.usage.input_tokens + read == theirs.usage.prompt_tokens
    assert read >= BLOCK_TOKENS
