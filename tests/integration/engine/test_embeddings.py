"""`POST /v1/embeddings`, from OpenAI's own client to an encoder in its own process."""

import base64
import json
import shutil
import struct
import time

import httpx
import openai
import pytest
import torch
import transformers
from torch.nn import functional

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.errors import CallerError
from maitred.core.request import EngineRequest, FinishReason, SamplingParams
from maitred.engine.encoder.config import EncoderConfig
from maitred.fleet.local import LocalEngine, engine_command
from maitred.testing.server_process import serving
from maitred.text.tokenizer import Tokenizer
from tests.support.models import make_encoder, save_words
from tests.support.openai_schemas import validate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-encoder"
    folder.mkdir()
    save_words(folder)
    make_encoder(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}, {% endfor %}")
    return folder


@pytest.fixture(scope="module")
def oracle(folder):
    """From a text to the vector that the library computes."""
    tokenizer, model = Tokenizer.load(folder), make_encoder(folder)

    @torch.inference_mode()
    def vector(text):
        tokens = tokenizer.encode(text, add_special_tokens=True) if isinstance(text, str) else text
        return functional.normalize(model(torch.tensor([tokens])).last_hidden_state[0].mean(0), dim=0).tolist()

    return vector


@pytest.fixture(scope="module")
def server(folder):
    settings = {"encoder.path": str(folder), "encoder.step_tokens": "64", "encoder.threads": "1"}
    settings["routing.aliases.nick"] = "tiny-encoder"
    settings["cache.mode"] = "off"  # tests ask for what others have asked for, and look at how it is computed
    with serving(settings=settings) as server:
        wait_for_both(server)
        yield server


def wait_for_both(server):
    """The other model may be ready first, and the server with it."""
    deadline_s = time.monotonic() + 300
    while server.metrics()["maitred_engine_up"] < 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def embed(server, **fields):
    return httpx.post(f"{server.url}/v1/embeddings", json={"model": "tiny-encoder", **fields}, timeout=300)


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
def test_the_official_client_gets_the_vectors_of_the_library(client, oracle, encoding_format):
    texts = ["hello world", "hello", "abc, def."]
    extra = {} if encoding_format is None else {"encoding_format": encoding_format}
    answer = client.embeddings.create(model="tiny-encoder", input=texts, **extra)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    for text, entry in zip(texts, answer.data, strict=True):
        got = entry.embedding
        if isinstance(got, str):
            raw = base64.b64decode(got)
            got = struct.unpack(f"<{len(raw) // 4}f", raw)
        assert got == pytest.approx(oracle(text), abs=1e-4)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (17, 17)


def test_the_answer_is_as_openai_describes_it(server):
    response = embed(server, input=[[2, 4, 3], [2, 5, 3]])
    assert response.status_code == 200
    validate("CreateEmbeddingResponse", response.json())
    assert response.headers["x-request-id"]


def test_the_answer_names_its_model_and_the_hints_that_were_left_out(server):
    response = embed(server, model="nick", input="hello", request_id="r", colour="red", cache={"ttl": 5})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "tiny-encoder"
    assert response.headers["x-maitred-requested-model"] == "nick"
    assert response.headers["x-maitred-ignored"] == "request_id, colour"


def test_shorter_vectors_have_length_one(client, oracle):
    answer = client.embeddings.create(model="tiny-encoder", input=[2, 4, 3], dimensions=5)
    wanted = functional.normalize(torch.tensor(oracle([2, 4, 3])[:5]), dim=0).tolist()
    assert answer.data[0].embedding == pytest.approx(wanted, abs=1e-4)


def test_many_texts_come_back_in_their_order_while_others_are_served(client, server, oracle):
    words = ["hello", "world", "abc", "xyz", "q", "hello world"]
    texts = [" ".join(words[(index + step) % 6] for step in range(1 + index % 7)) for index in range(300)]
    answer = client.embeddings.create(model="tiny-encoder", input=texts)
    assert len(answer.data) == 300
    for index in (0, 1, 50, 149, 298, 299):
        assert answer.data[index].embedding == pytest.approx(oracle(texts[index]), abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": "a " * 70}, "input", "context_length_exceeded"),
        ({"input": ["a", "a " * 70]}, "input[1]", "context_length_exceeded"),
        ({"input": [131]}, "input", "invalid_value"),
        ({"input": "a", "dimensions": 49}, "dimensions", "invalid_value"),
        ({"input": "a", "model": "maitred-tiny"}, "model", "invalid_value"),
        ({"input": "a", "model": "nobody"}, "model", "model_not_found"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"input": "a", "truncate": "END"}, "truncate", "invalid_value"),
        ({"input": "a", "input_type": "query"}, "input_type", "invalid_value"),
        ({"input": "a", "cache": {"ttl": 0}}, "cache.ttl", "invalid_value"),
    ],
)
def test_faults_name_their_field(server, fields, param, code):
    response = embed(server, **fields)
    assert response.status_code in (400, 404)
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_truncated(client, oracle, folder, side):
    tokens = Tokenizer.load(folder).encode("hello world, abc.", add_special_tokens=True)
    extra = {"truncate_prompt_tokens": 5, "truncation_side": side}
    answer = client.embeddings.create(
        model="tiny-encoder", input="hello world, abc.", extra_body=extra, encoding_format="float"
    )
    cut = [tokens[0], *(tokens[-4:-1] if side == "left" else tokens[1:4]), tokens[-1]]
    assert answer.data[0].embedding == pytest.approx(oracle(cut), abs=1e-4)
    assert answer.usage.prompt_tokens == 5
    extra["truncate_prompt_tokens"] = -1
    long = client.embeddings.create(model="tiny-encoder", input="hello " * 500, extra_body=extra)
    assert long.usage.prompt_tokens < 500


def test_a_conversation_is_embedded_as_its_template_writes_it(server, oracle, folder):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    tokens = Tokenizer.load(folder).encode("hello, world, ", add_special_tokens=False)
    answer = embed(server, messages=messages).json()
    assert answer["data"][0]["embedding"] == pytest.approx(oracle(tokens), abs=1e-4)
    begun = embed(server, messages=messages, continue_final_message=True).json()
    assert begun["usage"]["prompt_tokens"] == len(tokens) - 1
    both = embed(server, messages=messages, input="hello")
    assert (both.status_code, both.json()["error"]["param"]) == (400, "input")


def test_an_encoder_does_not_chat(server):
    body = {"model": "tiny-encoder", "messages": [{"role": "user", "content": "hello"}]}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "/v1/embeddings" in response.json()["error"]["message"]


def test_both_models_are_listed(client):
    windows = {model.id: model.max_model_len for model in client.models.list()}
    assert windows["tiny-encoder"] == 64
    assert "maitred-tiny" in windows


def test_the_list_of_models_tells_encoders_from_others(server):
    listed = httpx.get(f"{server.url}/v1/models").raise_for_status().json()["data"]
    dimensions = {entry["id"]: entry.get("embedding_dimensions") for entry in listed}
    (vector,) = embed(server, input="one").json()["data"]
    assert dimensions["tiny-encoder"] == len(vector["embedding"])
    assert dimensions["maitred-tiny"] is None


def test_prompt_tokens_alone_are_counted(server):
    embed(server, input="one")  # so that there is something to count from
    before = server.metrics()
    embed(server, input=[[2, 4, 3], [2, 5, 5, 3]])
    after = server.metrics()
    assert after["maitred_ledger_prompt_tokens_total"] - before["maitred_ledger_prompt_tokens_total"] == 7
    assert after["maitred_ledger_output_tokens_total"] == before["maitred_ledger_output_tokens_total"]
    assert after["maitred_ledger_drift_tokens"] == 0


def test_a_client_that_leaves_frees_what_it_held(server):
    """Thousands of texts, of which nobody waits for the answer."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/embeddings",
            json={"model": "tiny-encoder", "input": [[2, *[4] * 60, 3]] * 2000},
            timeout=httpx.Timeout(10, read=0.3),
        )

    def idle():
        metrics = server.metrics()
        return metrics["maitred_dispatch_running"] == metrics["maitred_engine_waiting"] == 0

    for _ in range(200):
        if idle():
            break
        embed(server, input="hello")  # each takes its turn beside what is left
    assert idle()
    assert server.metrics()["maitred_engine_finished_total"] < 2000


def test_the_same_key_gets_the_same_answer_without_computing(server):
    headers = {"idempotency-key": "once"}
    body = {"model": "tiny-encoder", "input": "hello"}
    first = httpx.post(f"{server.url}/v1/embeddings", json=body, headers=headers)
    computed = server.metrics()["maitred_engine_finished_total"]
    second = httpx.post(f"{server.url}/v1/embeddings", json=body, headers=headers)
    assert first.json() == second.json()
    assert server.metrics()["maitred_engine_finished_total"] == computed


def test_an_encoder_can_be_served_alone(folder, oracle):
    with serving(str(folder), settings={"model.served_name": "only", "engine.threads": "1"}) as server:
        response = embed(server, model="only", input="hello world")
        assert response.json()["data"][0]["embedding"] == pytest.approx(oracle("hello world"), abs=1e-4)
        refused = httpx.post(f"{server.url}/v1/completions", json={"model": "only", "prompt": "hello"})
        assert refused.status_code == 400


def test_the_model_that_chats_can_embed_too(tmp_path):
    """A decoder: its last row for the text, the end of the longest text that it reads, and no further."""
    library = transformers.AutoModel.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    texts = ["Once upon a time there was a fox.", "Fox.", "Rain " * 300]
    with serving(settings={"encoder.path": str(BUNDLED_MODEL), "encoder.served_name": "vectors"}) as server:
        wait_for_both(server)
        answer = embed(server, model="vectors", input=texts).json()
        for text, entry in zip(texts, answer["data"], strict=True):
            with torch.inference_mode():
                tokens = torch.tensor([tokenizer.encode(text, add_special_tokens=True)])
                wanted = functional.normalize(library(tokens).last_hidden_state[0, -1], dim=0)
            assert entry["embedding"] == pytest.approx(wanted.tolist(), abs=1e-4)
        short = embed(server, model="vectors", input=texts[-1], dimensions=16).json()["data"][0]["embedding"]
        assert short == pytest.approx(functional.normalize(wanted[:16], dim=0).tolist(), abs=1e-4)
        refused = embed(server, model="vectors", input=[5] * 2049).json()["error"]
        assert "input has 2,049 tokens, but the model reads at most 2,048." in refused["message"]
        body = {"model": "maitred-tiny", "prompt": "Once", "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).status_code == 200


def test_what_can_neither_encode_nor_generate_is_refused_at_the_start(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["T5Model"], "model_type": "t5"}')
    with (
        pytest.raises(RuntimeError, match=r"encoder\.path: The architecture T5Model is not supported"),
        serving(settings={"encoder.path": str(tmp_path)}),
    ):
        pass


def test_two_models_need_two_names(folder):
    settings = {"encoder.path": str(folder), "encoder.served_name": "maitred-tiny"}
    with (
        pytest.raises(RuntimeError, match=r"encoder\.served_name: both models are called maitred-tiny"),
        serving(settings=settings),
    ):
        pass


async def test_the_process_speaks_the_protocol_of_every_engine(folder):
    async with LocalEngine(engine_command(folder, EncoderConfig(threads=1).engine())) as engine:
        await engine.wait_started()
        card = engine.client.card()
        assert (card.embedding_dimensions, card.context_tokens) == (48, 64)
        async with engine.client.generate(
            EngineRequest("r", [2, 4, 3], SamplingParams(max_tokens=0, seed=0))
        ) as stream:
            deltas = [delta for batch in [batch async for batch in stream] for delta in batch]
        assert [delta.finish for delta in deltas] == [FinishReason.STOP]
        assert len(deltas[0].embedding or b"") == 4 * 48
        async with engine.client.generate(EngineRequest("g", [2], SamplingParams(max_tokens=4, seed=0))) as stream:
            with pytest.raises(CallerError, match="generates nothing"):
                await anext(aiter(stream))


def explained(server, request_id):
    key = next(line.partition("=")[2] for line in server.log.read_text().splitlines() if "MAITRED_ADMIN_KEY=" in line)
    headers = {"Authorization": f"Bearer {key.strip()}"}
    return httpx.get(f"{server.url}/admin/v1/requests/{request_id}", headers=headers).raise_for_status().json()


def test_the_timeline_shows_each_slice_of_a_request(server):
    texts = ["hello world"] * 70  # of 4 tokens each: more than a slice
    body = {"model": "tiny-encoder", "input": texts}
    httpx.post(f"{server.url}/v1/embeddings", json=body, headers={"x-request-id": "slices"}).raise_for_status()
    timeline = explained(server, "slices")
    assert (timeline["outcome"], timeline["route"], timeline["parameters"]) == ("finished", "/v1/embeddings", {})
    named = {}
    for span in timeline["chapters"]:
        named.setdefault(span["name"], []).append(span)
    assert [*named] == ["resolve", "plan", "admission", "queue", "routing", "attempt", "settlement"]
    (plan,) = named["plan"]
    assert (plan["facts"]["texts"], plan["facts"]["slices"]) == (70, len(named["attempt"]))
    assert plan["facts"]["prompt_tokens"] == timeline["prompt_tokens"] == 280
    engines = []
    for attempt in named["attempt"]:
        (engine,) = attempt["inside"]
        engines.append(engine)
        queue, encode = engine["inside"]
        assert (engine["name"], queue["name"], encode["name"]) == ("engine", "engine.queue", "encode")
        assert attempt["at_ms"] <= engine["at_ms"] == queue["at_ms"] <= encode["at_ms"]
        last_ms = encode["at_ms"] + encode["took_ms"]
        assert last_ms == pytest.approx(engine["at_ms"] + engine["took_ms"], abs=0.002)
        assert last_ms <= attempt["at_ms"] + attempt["took_ms"] + 0.002
        assert encode["took_ms"] > 0
        assert 1 <= encode["facts"]["batch"] <= 16, "a batch has 64 tokens at most"
    assert sum(engine["facts"]["texts"] for engine in engines) == 70
    assert sum(engine["inside"][1]["facts"]["prompt_tokens"] for engine in engines) == 280


def test_the_timeline_shows_what_a_slice_waited_for(server):
    """On a busy machine the slices of a request can come one by one, so that none waits: one request of many does."""
    body = {"model": "tiny-encoder", "input": ["hello world"] * 70}
    for number in range(100):
        name = f"waits-{number}"
        httpx.post(f"{server.url}/v1/embeddings", json=body, headers={"x-request-id": name}).raise_for_status()
        attempts = [span for span in explained(server, name)["chapters"] if span["name"] == "attempt"]
        queues = [attempt["inside"][0]["inside"][0] for attempt in attempts]
        if max(queue["facts"]["waited_ms"].get("slots", 0.0) for queue in queues) > 0:
            return
    pytest.fail("no slice of a hundred requests has waited for a slot")


def test_the_default_prompt_of_the_files_stands_before_texts_alone(folder, oracle, tmp_path):
    prompted = tmp_path / "prompted"
    shutil.copytree(folder, prompted)
    settings = {"prompts": {"ask": "world "}, "default_prompt_name": "ask", "truncate_dim": 3}
    (prompted / "config_sentence_transformers.json").write_text(json.dumps(settings))
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": f"1_{name}"} for name in ("Transformer", "Pooling")
    ]
    (prompted / "modules.json").write_text(json.dumps([*modules, {"type": "models.Normalize", "path": "2"}]))
    (prompted / "1_Pooling").mkdir()
    (prompted / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    with serving(settings={"encoder.path": str(prompted), "encoder.threads": "1"}) as server:
        wait_for_both(server)
        for given, read in (("hello", "world hello"), ([2, 4, 3], [2, 4, 3])):
            answer = embed(server, model="prompted", input=given).json()
            assert answer["data"][0]["embedding"] == pytest.approx(oracle(read)[:3], abs=1e-4)
