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
TABLE = RouteTable([LIST, ONE, CHAT, KEY, CHANGE, ROTATE, EVENTS])


def test_whole_paths_and_rests():
    assert TABLE.find("GET", "/v1/models") == (LIST, "")
    assert TABLE.find("HEAD", "/v1/models") == (LIST, "")
    assert TABLE.find("GET", "/v1/models/Qwen/Qwen2.5-0.5B") == (ONE, "Qwen/Qwen2.5-0.5B")
    assert TABLE.find("POST", "/v1/chat/completions") == (CHAT, "")


@pytest.mark.parametrize("path", ["/", "", "/v1", "/v1/models/", "/v1/chat/completions/", "/V1/models", "/v1/modelsx"])
def test_near_misses_are_not_found(path):
    with pytest.raises(RouteNotFound):
        TABLE.find("GET", path)


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
