"""One `maitred serve` behind another: a real upstream, as the official client sees it through the gateway before it."""

import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from maitred.identity.keys import make_key
from maitred.testing.server_process import serving
from tests.support.suite.fork_server import new_interpreters

USER = [{"role": "user", "content": "Tell me a short story about a waiter."}]
BEHIND = "maitred-tiny"
KEYS = {name: make_key().plaintext for name in ("BEHIND_KEY", "OTHER_KEY", "ADMIN_KEY", "ACME_KEY")}

CONFIG_BEHIND = """
server: {allow_unauthenticated: false}
engine: {threads: 1, kv_memory_bytes: 64MiB}
tenants:
  front:
    keys:
      one: {secret: {env: BEHIND_KEY}}
      admin: {secret: {env: ADMIN_KEY}, scopes: [admin, metrics]}
"""
CONFIG_BEFORE = """
admission:
  prices:
    "*": {prompt: 1000, output: 2000}
models:
  far:
    upstreams:
      - url: %(url)s/v1
        name: behind
        model: maitred-tiny
        api_key: {env: BEHIND_KEY}
        probe_every_s: 0.2
  exact:
    tokenizer: %(tokenizer)s
    upstreams:
      - {url: %(url)s/v1, model: maitred-tiny, api_key: {env: BEHIND_KEY}}
  refused:
    upstreams:
      - {url: %(url)s/v1, model: maitred-tiny, api_key: {env: OTHER_KEY}, probe_every_s: 0.2}
tenants:
  acme:
    limits: {usd_total: 1000, requests_per_minute: 1000}
    keys:
      one: {secret: {env: ACME_KEY}}
  house:
    keys:
      admin: {secret: {env: ADMIN_KEY}, scopes: [admin, metrics]}
"""


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    path = tmp_path_factory.mktemp("behind") / "maitred.yaml"
    path.write_text(CONFIG_BEHIND)
    with serving("--config", str(path), environment=KEYS) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def before(behind, tmp_path_factory):
    from maitred.config.tree import BUNDLED_MODEL

    path = tmp_path_factory.mktemp("before") / "maitred.yaml"
    path.write_text(CONFIG_BEFORE % {"url": behind.url, "tokenizer": BUNDLED_MODEL / "tokenizer.json"})
    with new_interpreters(), serving("--config", str(path), environment=KEYS) as server:
        yield server
        log = server.log.read_text()
        assert server.stop() == 0
        assert not [key for key in KEYS.values() if key in log]


@pytest.fixture
def near(behind):
    with openai.OpenAI(base_url=f"{behind.url}/v1", api_key=KEYS["BEHIND_KEY"], max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def far(before):
    with openai.OpenAI(base_url=f"{before.url}/v1", api_key=KEYS["ACME_KEY"], max_retries=0) as sdk:
        yield sdk


def running(server):
    head = {"authorization": f"Bearer {KEYS['ADMIN_KEY']}"}
    lines = httpx.get(f"{server.url}/metrics", headers=head).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("maitred_engine_running{"))


def until(condition, timeout_s=300.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def ask(sdk, model, **fields):
    return sdk.chat.completions.create(model=model, messages=USER, **{"max_tokens": 24, "seed": 5, **fields})


def test_a_gateway_of_upstreams_has_no_engine_and_no_torch(before):
    process = psutil.Process(before.process.pid)
    assert process.children() == []
    assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_the_answer_is_the_one_that_the_server_behind_gives(near, far):
    direct, passed = (ask(sdk, model, n=2) for sdk, model in ((near, BEHIND), (far, "far")))
    assert [choice.message.content for choice in passed.choices] == [
        choice.message.content for choice in direct.choices
    ]
    assert [choice.finish_reason for choice in passed.choices] == [choice.finish_reason for choice in direct.choices]
    assert passed.usage.completion_tokens == direct.usage.completion_tokens
    assert passed.usage.prompt_tokens == direct.usage.prompt_tokens
    assert passed.model == "far"


def test_streams_say_the_same_as_whole_answers(far):
    whole = ask(far, "far", n=2)
    texts, finishes, usage = ["", ""], {}, None
    for chunk in ask(far, "far", n=2, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes.get(choice.index)
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_stop_strings_and_log_probabilities(near, far):
    text = ask(near, BEHIND, temperature=0).choices[0].message.content
    stop = text[len(text) // 2 :][:4]
    cut = ask(far, "far", temperature=0, stop=stop)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    scored = [
        ask(sdk, model, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        for sdk, model in ((near, BEHIND), (far, "far"))
    ]
    assert [entry.model_dump() for entry in scored[0]] == [entry.model_dump() for entry in scored[1]]


def test_texts_are_continued_several_at_a_time(near, far):
    fields = {"prompt": ["Once upon a time", "The waiter"], "max_tokens": 8, "seed": 3, "logprobs": 1, "n": 2}
    direct, passed = (sdk.completions.create(model=name, **fields) for sdk, name in ((near, BEHIND), (far, "far")))
    assert [choice.text for choice in passed.choices] == [choice.text for choice in direct.choices]
    assert [choice.logprobs for choice in passed.choices] == [choice.logprobs for choice in direct.choices]
    assert passed.usage.total_tokens == direct.usage.total_tokens


def test_the_error_of_an_upstream_is_returned_in_its_words(far):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(far, "far", tools=tools)
    assert caught.value.body["param"] == "tools"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(far, "far", max_tokens=100_000)
    assert caught.value.body["code"] == "context_length_exceeded"


def test_prompts_are_counted_where_the_tokenizer_is_known(before, near):
    head = {"authorization": f"Bearer {KEYS['ACME_KEY']}"}
    tokens = httpx.post(f"{before.url}/tokenize", json={"model": "exact", "messages": USER}, headers=head).json()
    assert tokens["count"] == ask(near, BEHIND, max_tokens=1).usage.prompt_tokens
    unknown = httpx.post(f"{before.url}/tokenize", json={"model": "far", "messages": USER}, headers=head)
    assert unknown.status_code == 400
    assert "tokenizer" in unknown.json()["error"]["message"]


def test_a_client_that_leaves_frees_the_engine_behind(behind, far):
    stream = ask(far, "far", max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    until(lambda: running(behind) == 1)
    stream.close()
    until(lambda: running(behind) == 0)


def test_the_ledger_has_what_the_server_behind_counted(before, far):
    head = {"authorization": f"Bearer {KEYS['ADMIN_KEY']}"}

    def total():
        query = {"group_by": "model", "tenant": "acme"}
        rows = httpx.get(f"{before.url}/admin/v1/usage", params=query, headers=head).json()["data"]
        return next((row for row in rows if row.get("model") == "far"), {"prompt_tokens": 0, "output_tokens": 0})

    def calm():
        """Nothing of earlier tests is still to be written: usage goes there in batches."""
        seen = total()
        time.sleep(1)
        return seen == total()

    until(calm)
    first = total()
    used = [ask(far, "far", max_tokens=length).usage for length in (3, 9)]

    def settled():
        last = total()
        prompt = last["prompt_tokens"] - first["prompt_tokens"]
        output = last["output_tokens"] - first["output_tokens"]
        return (prompt, output) == (sum(u.prompt_tokens for u in used), sum(u.completion_tokens for u in used))

    until(settled)


def test_a_revoked_credential_is_reported_to_the_operator_and_not_to_the_caller(before, far):
    with pytest.raises(openai.InternalServerError) as caught:
        ask(far, "refused")
    assert caught.value.status_code == 503
    assert caught.value.body["code"] == "replica_unavailable"
    assert "does not accept our credential" in before.log.read_text()


def test_the_list_of_models_tells_who_is_there(before, far):
    ready = {model.id: model.ready for model in far.models.list().data}
    assert ready == {"far": True, "exact": True, "refused": False}
