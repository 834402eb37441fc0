"""Paths to routes."""

import pytest

from maitred.api.routes import Route, RouteTable
from maitred.core.errors import MethodNotAllowed, RouteNotFound


async def handler(call):
    raise NotImplementedError


LIST = Route("GET", "/v1/models", handler, "")
ONE = Route("GET", "/v1/models/{model}", handler, "")
POST = Route("POST", "/v1/chat/completions", handler, "")
TABLE = RouteTable([LIST, ONE, POST])


def test_whole_paths_and_rests():
    assert TABLE.find("GET", "/v1/models") == (LIST, "")
    assert TABLE.find("HEAD", "/v1/models") == (LIST, "")
    assert TABLE.find("GET", "/v1/models/Qwen/Qwen2.5-0.5B") == (ONE, "Qwen/Qwen2.5-0.5B")
    assert TABLE.find("POST", "/v1/chat/completions") == (POST, "")


@pytest.mark.parametrize("path", ["/", "", "/v1", "/v1/models/", "/v1/chat/completions/", "/V1/models", "/v1/modelsx"])
def test_near_misses_are_not_found(path):
    with pytest.raises(RouteNotFound):
        TABLE.find("GET", path)


def test_other_methods_are_named():
    with pytest.raises(MethodNotAllowed, match="takes POST"):
        TABLE.find("GET", "/v1/chat/completions")
    assert TABLE.methods_of("/v1/models/x") == ["GET", "HEAD"]
    assert TABLE.methods_of("/nowhere") == []
