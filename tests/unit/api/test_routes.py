"""Paths to routes."""

import pytest

from maitred.api.routes import Route, RouteTable
from maitred.core.errors import MethodNotAllowed, RouteNotFound


async def handler(call):
    raise NotImplementedError


LIST = Route("GET", "/v1/models", handler, "")
ONE = Route("GET", "/v1/models/{model}", handler, "")
CHAT = Route("POST", "/v1/chat/completions", handler, "")
KEY = Route("GET", "/admin/v1/keys/{id}", handler, "")
CHANGE = Route("PATCH", "/admin/v1/keys/{id}", handler, "")
ROTATE = Route("POST", "/admin/v1/keys/{id}/rotate", handler, "")
EVENTS = Route("GET", "/admin/v1/keys/events", handler, "")
RESPONSE = Route("GET", "/v1/responses/{id}", handler, "")
PART = Route("GET", "/v1/parts/{id}/items/{item}", handler, "")
WHOLE = Route("GET", "/v1/parts/{id}", handler, "")
PARTS = Route("GET", "/v1/parts/{id}/items", handler, "")
TABLE = RouteTable([LIST, ONE, CHAT, KEY, CHANGE, ROTATE, EVENTS, RESPONSE, WHOLE, PARTS, PART])


def test_two_parameters_are_given_together():
    assert TABLE.find("GET", "/v1/parts/a/items/b") == (PART, "a/b")
    assert TABLE.find("GET", "/v1/parts/a/items") == (PARTS, "a")
    assert TABLE.find("GET", "/v1/parts/a") == (WHOLE, "a")
    assert TABLE.find("GET", "/v1/parts/a/items/b/c") == (WHOLE, "a/items/b/c"), "a rest may have slashes"


def test_whole_paths_and_rests():
    assert TABLE.find("GET", "/v1/models") == (LIST, "")
    assert TABLE.find("HEAD", "/v1/models") == (LIST, "")
    assert TABLE.find("GET", "/v1/models/Qwen/Qwen2.5-0.5B") == (ONE, "Qwen/Qwen2.5-0.5B")
    assert TABLE.find("POST", "/v1/chat/completions") == (CHAT, "")


@pytest.mark.parametrize("path", ["/", "", "/v1", "//", "/v1/v1/v1/models", "/V1/models", "/v1/modelsx", "/v1/v1"])
def test_near_misses_are_not_found(path):
    with pytest.raises(RouteNotFound, match=r"GET /openapi\.json lists the routes"):
        TABLE.find("GET", path)
    assert TABLE.methods_of(path) == []


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions/", "//v1/chat/completions", "/v1//chat///completions//", "/chat/completions"),
        *("/chat/completions/", "/v1/v1/chat/completions", "//v1/v1/chat/completions/"),
    ],
)
def test_a_path_leads_where_it_means(path):
    assert TABLE.find("POST", path) == (CHAT, "")
    assert TABLE.methods_of(path) == ["POST"]
    with pytest.raises(MethodNotAllowed, match="takes POST"):
        TABLE.find("GET", path)


@pytest.mark.parametrize("path", ["//admin/v1/keys/5b1f", "/admin//v1/keys/events", "/v1/admin/v1/keys/events/"])
def test_a_path_that_is_not_below_v1_has_one_spelling(path):
    with pytest.raises(RouteNotFound):
        TABLE.find("POST", path)


def test_the_path_as_it_is_comes_first():
    own = Route("GET", "/v1/v1/models", handler, "")
    short = Route("GET", "/models", handler, "")
    table = RouteTable([LIST, ONE, own, short])
    assert [table.find("GET", path)[0] for path in ("/v1/models", "/v1/v1/models", "/models", "/models/")] == [
        *(LIST, own, short, LIST),
    ]
    assert table.find("GET", "/v1/models/org//name/") == (ONE, "org//name/")
    assert table.find("GET", "/models/org/name") == (ONE, "org/name")


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/audio/speech", "OpenAI's audio API"),
        ("/audio/transcriptions/", "OpenAI's audio API"),
        ("/v1/v1/threads/thread_1/runs", "OpenAI's Assistants API"),
        ("/v1/responses/compact", "OpenAI's compaction"),
        ("/v1/messages/batches/b/results", "Anthropic's Message Batches"),
        ("/v2/rerank", "Cohere's reranking"),
        ("/api/tags", "Ollama's API"),
        ("/v1beta/models/gemini:generateContent", "Google's Gemini API"),
        ("/openai/deployments/mine/chat/completions", "Azure's path"),
    ],
)
def test_a_path_of_another_api_is_told_what_it_is(path, advice):
    with pytest.raises(RouteNotFound) as raised:
        TABLE.find("POST", path)
    assert f"There is no path {path!r} here. That is {advice}" in raised.value.message


def test_a_path_of_very_many_segments_is_looked_up_at_once():
    with pytest.raises(RouteNotFound):
        TABLE.find("GET", "/v1" + "/a" * 30_000)


def test_other_methods_are_named():
    with pytest.raises(MethodNotAllowed, match="takes POST"):
        TABLE.find("GET", "/v1/chat/completions")
    assert TABLE.methods_of("/v1/models/x") == ["GET", "HEAD"]
    assert TABLE.methods_of("/nowhere") == []


def test_a_parameter_in_the_middle_is_one_segment():
    assert TABLE.find("POST", "/admin/v1/keys/5b1f/rotate") == (ROTATE, "5b1f")
    assert TABLE.find("POST", "/admin/v1/keys/rotate/rotate") == (ROTATE, "rotate")
    assert TABLE.find("GET", "/admin/v1/keys/rotate") == (KEY, "rotate")
    assert TABLE.find("GET", "/admin/v1/keys/a/b/rotate") == (KEY, "a/b/rotate")
    assert TABLE.find("GET", "/admin/v1/keys//rotate") == (KEY, "/rotate")
    with pytest.raises(MethodNotAllowed, match="takes POST"):
        TABLE.find("GET", "/admin/v1/keys/5b1f/rotate")


def test_a_path_can_take_several_methods():
    assert TABLE.find("PATCH", "/admin/v1/keys/5b1f") == (CHANGE, "5b1f")
    assert TABLE.methods_of("/admin/v1/keys/5b1f") == ["GET", "PATCH", "HEAD"]
    assert TABLE.find("GET", "/admin/v1/keys/events") == (EVENTS, "")
    with pytest.raises(MethodNotAllowed):
        TABLE.find("PATCH", "/admin/v1/keys/events")
