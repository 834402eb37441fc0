"""The cache of vectors before an encoder in a process: what is known is not computed, and the bits are the same."""

import base64
import random
import time

import httpx
import pytest

from maitred.testing.server_process import serving
from maitred.text.tokenizer import Tokenizer
from tests.support.models import make_encoder, save_words

TEXTS = 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-encoder"
    folder.mkdir()
    save_words(folder)
    make_encoder(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with serving(settings={"encoder.path": str(folder), "encoder.threads": "1"}) as server:
        deadline_s = time.monotonic() + 300
        while server.metrics()["maitred_engine_up"] < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        yield server


def embed(server, texts, headers=None, **fields):
    """Returns the vectors as bytes, and the response."""
    body = {"model": "tiny-encoder", "input": texts, "encoding_format": "base64", **fields}
    response = httpx.post(f"{server.url}/v1/embeddings", json=body, headers=headers, timeout=300).raise_for_status()
    entries = response.json()["data"]
    assert [entry["index"] for entry in entries] == list(range(len(texts)))
    return [base64.b64decode(entry["embedding"]) for entry in entries], response


def make_texts(count, seed):
    """Returns different texts of different lengths, as token ids."""
    drawn = random.Random(seed)
    return [[2, *(drawn.randrange(4, 100) for _ in range(drawn.randrange(4, 12))), seed, 3] for _ in range(count)]


def test_a_request_of_which_half_is_known_computes_half(server):
    texts = make_texts(TEXTS, seed=10)
    known = texts[::2]
    earlier, first = embed(server, known)
    assert first.headers["x-maitred-cache"] == "miss"
    before = server.metrics()
    vectors, response = embed(server, texts)
    after = server.metrics()
    assert response.headers["x-maitred-cache"] == "partial"
    assert vectors[::2] == earlier, "to the bit"
    tokens, computed = sum(map(len, texts)), sum(map(len, texts[1::2]))
    assert response.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}

    def grown(name):
        return after[name] - before.get(name, 0.0)

    assert grown("maitred_engine_prompt_tokens_total") == computed
    assert grown("maitred_ledger_prompt_tokens_total") == computed
    assert grown("maitred_engine_finished_total") == TEXTS // 2
    assert after["maitred_ledger_drift_tokens"] == 0
    assert grown("maitred_prompt_tokens_total") == computed
    assert grown("maitred_cache_saved_tokens_total") == tokens - computed
    again, hit = embed(server, texts)
    assert (again, hit.headers["x-maitred-cache"]) == (vectors, "hit")
    assert int(hit.headers["age"]) >= 0
    assert server.metrics()["maitred_engine_prompt_tokens_total"] == after["maitred_engine_prompt_tokens_total"]


def test_text_and_its_tokens_share_a_vector_and_shorter_ones_are_cut_from_it(server, folder):
    text = "hello world, abc"
    (whole,), first = embed(server, [text])
    assert first.headers["x-maitred-cache"] == "miss"
    assert "age" not in first.headers
    tokens = Tokenizer.load(folder).encode(text, add_special_tokens=True)
    (same,), second = embed(server, [tokens])
    assert (same, second.headers["x-maitred-cache"]) == (whole, "hit")
    assert second.headers["x-maitred-cache-key"] == first.headers["x-maitred-cache-key"]
    (cut,), third = embed(server, [text], dimensions=5)
    assert (len(cut), third.headers["x-maitred-cache"]) == (20, "hit")
    (computed,), fourth = embed(server, [text], dimensions=5, cache={"no-cache": True})
    assert (computed, fourth.headers["x-maitred-cache"]) == (cut, "miss")


def test_only_if_cached_is_refused_for_one_unknown_input(server):
    known, unknown = make_texts(2, seed=20)
    embed(server, [known])
    headers = {"cache-control": "only-if-cached"}
    assert embed(server, [known], headers)[1].headers["x-maitred-cache"] == "hit"
    body = {"model": "tiny-encoder", "input": [known, unknown]}
    refused = httpx.post(f"{server.url}/v1/embeddings", json=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "not_cached")
