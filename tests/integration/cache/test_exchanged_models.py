"""Models that are exchanged under one name, at gateways that share a Redis: no answer of the former one is found."""

import json
import shutil
import time
from dataclasses import dataclass

import httpx
import pytest
import safetensors.torch
import torch

from maitred.config.tree import BUNDLED_MODEL
from tests.support.console_server import consoled
from tests.support.processes import living_children
from tests.support.servers.redis_server import redis_server

CONFIG = """
engine: {{threads: 1}}
model: {{path: {model}, served_name: maitred-tiny}}
cache:
  url: {{file: {url}}}
  answer_timeout_s: 10  # a crowded machine can need more than some milliseconds
"""
ANSWERED = "The next day the soldier was very angry"
BODY = {
    "model": "maitred-tiny",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 12,
    "temperature": 0,
    "logprobs": True,
}
LIMIT_S = 300.0


@dataclass
class Gateway:
    """A gateway with a key of the tenant whose answers are shared."""

    system: object
    key: str

    def ask(self, **cache):
        """What the cache says, and the answer with its tokens, their log-probabilities and its usage."""
        response = httpx.post(
            f"{self.system.url}/v1/chat/completions",
            json={**BODY, "cache": cache},
            headers={"authorization": f"Bearer {self.key}"},
            timeout=LIMIT_S,
            trust_env=False,
        )
        assert response.status_code == 200, response.text
        answer = response.json()
        return response.headers["x-maitred-cache"], (answer["choices"], answer["usage"])

    def restart_engine(self):
        """Kills the engine, and waits until the next one runs."""
        before = self.system.server.metrics()["maitred_engine_restarts_total"]
        for process in living_children(self.system.server.process.pid):
            process.kill()
        deadline_s = time.monotonic() + LIMIT_S
        while not (now := self.system.server.metrics())["maitred_engine_up"] or (
            now["maitred_engine_restarts_total"] <= before
        ):
            assert time.monotonic() < deadline_s, "the engine is not started again"
            time.sleep(0.02)

    def compute_own(self):
        """Asks what has no answer here; returns it, once it is found again as it was computed."""
        status, own = self.ask()
        assert status == "miss"
        status, computed = self.ask(**{"no-cache": True, "no-store": True})
        assert (status, computed[0]) == ("miss", own[0])
        while (found := self.ask())[0] == "coalesced":
            pass  # it is not kept yet
        assert found == ("hit", own)
        return own


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a gateway on the Redis that all share."""
    folder = tmp_path_factory.mktemp("gateways")
    with redis_server() as redis:
        (folder / "url").write_text(redis.url.reveal())

        def started(model, **settings):
            config = folder / f"{model.name}.yaml"
            config.write_text(CONFIG.format(url=folder / "url", model=model))
            return consoled(program=("-m", "maitred", "serve", "--config", str(config)), **settings)

        yield started


@pytest.fixture(scope="module")
def first(start):
    """The gateway whose model stays, and its answer."""
    with start(BUNDLED_MODEL) as system:
        gateway = Gateway(system, system.key("acme"))
        own = gateway.compute_own()
        assert ANSWERED in own[0][0]["message"]["content"]
        yield gateway, own


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(BUNDLED_MODEL, tmp_path / "copy")


def replace_file(path, data):
    """Replaces a file, as who deploys a model does it: whoever has mapped the former one keeps it."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


def flip_bit(folder):
    """Changes one number of the weights, as little as possible."""
    path = folder / "model.safetensors"
    weights = bytearray(path.read_bytes())
    weights[len(weights) // 2] ^= 1
    replace_file(path, weights)


def merge_adapter(folder):
    """Adds a product of two narrow matrices to a projection; so adapters are served, merged into the weights."""
    path = folder / "model.safetensors"
    weights = safetensors.torch.load(path.read_bytes())
    matrix = weights["model.layers.0.self_attn.q_proj.weight"]
    draw = torch.Generator().manual_seed(1)
    narrow, wide = (torch.randn(size, 2, generator=draw) for size in matrix.shape)
    matrix += (0.1 * narrow @ wide.T).to(matrix.dtype)
    replace_file(path, safetensors.torch.save(weights, {"format": "pt"}))


def exchange_words(folder):
    """Exchanges two tokens that are not in the prompt, so that it has the same tokens as before."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    words = tokenizer["model"]["vocab"]
    words["Ġsoldier"], words["Ġangry"] = words["Ġangry"], words["Ġsoldier"]
    replace_file(path, json.dumps(tokenizer).encode())


def instruct(folder):
    """Lets the chat template begin with a text of its own."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_bytes())
    config["chat_template"] = "{{- bos_token }}{{- '<|system|>Be brief.' + eos_token }}" + config[
        "chat_template"
    ].removeprefix("{{- bos_token }}")
    replace_file(path, json.dumps(config).encode())


def test_files_that_are_exchanged_under_a_running_gateway_find_no_answers(start, first, copy):
    """Only its engine starts again."""
    stays, before = first
    with start(copy) as system:
        exchanged = Gateway(system, system.key("acme"))
        assert exchanged.ask() == ("hit", before)
        known = [before]
        for exchange in (flip_bit, merge_adapter):
            exchange(copy)
            exchanged.restart_engine()
            own = exchanged.compute_own()
            assert own not in known
            known.append(own)
        assert stays.ask() == ("hit", before)
        exchange_words(copy)
        exchanged.restart_engine()
        exchanged.compute_own()  # by the tokenizer of before, which this gateway still has
    with start(copy) as system:
        restarted = Gateway(system, system.key("acme"))
        assert restarted.compute_own() not in known
    assert stays.ask() == ("hit", before)


@pytest.mark.parametrize(
    ("exchange", "settings"),
    [
        pytest.param(instruct, {}, id="template"),
        pytest.param(None, {"engine__quantization": "int8"}, id="quantisation"),
    ],
)
def test_a_gateway_that_starts_with_another_model_of_the_name_finds_no_answers(start, first, copy, exchange, settings):
    stays, before = first
    if exchange is not None:
        exchange(copy)
    with start(copy, **settings) as system:
        exchanged = Gateway(system, system.key("acme"))
        own = exchanged.compute_own()
        assert own != before
    assert stays.ask() == ("hit", before)
