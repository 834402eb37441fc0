"""The cache of answers for operators: what the administration and its commands say and remove."""

import json

import pytest

from maitred.cache.answer_key import AnswerKey, answer_digest
from maitred.core.errors import StoreUnavailable
from tests.integration.accounts.test_admin_cli import Operator, rows
from tests.support.admin_app import administered


def key(question, tenant="acme", model="chat"):
    """Key of an answer; those of the model `code` are of another epoch."""
    return AnswerKey(
        answer_digest([question, tenant, model]), tenant, "org", model, epoch="2" if model == "code" else ""
    )


@pytest.fixture
async def operator(tmp_path):
    async with administered(tmp_path) as system:
        for tenant, model, answers in (("acme", "chat", 3), ("acme", "code", 2), ("other", "chat", 1)):
            for n in range(answers):
                system.answers.put(key(n, tenant, model), b"x" * 100, 60.0, "")
        yield Operator(system)


KEPT = [("acme", "chat", 3), ("acme", "code", 2), ("other", "chat", 1)]


async def kept(system):
    shown = await system.done("GET", "cache")
    return [(group["tenant"], group["model"], group["answers"]) for group in shown["data"]]


async def test_what_is_kept_is_shown(operator):
    shown = await operator.system.done("GET", "cache")
    assert shown["object"] == "cache"
    assert shown["data"][0] == {"tenant": "acme", "model": "chat", "epoch": "", "answers": 3, "bytes": 300}
    assert [group["epoch"] for group in shown["data"]] == ["", "2", ""]
    assert await kept(operator.system) == KEPT
    store = shown["store"]
    assert (store["backend"], store["answers"], store["max_bytes"], store["stores"]) == ("memory", 6, 1 << 20, 6)
    assert 600 < store["bytes"] < 6 * 1000
    assert shown["use"] == {"lookups": {}, "saved_tokens": 0}


@pytest.mark.parametrize(
    ("query", "left"),
    [
        ({"tenant": "acme"}, KEPT[2:]),
        ({"model": "chat"}, KEPT[1:2]),
        ({"tenant": "acme", "model": "code"}, [KEPT[0], KEPT[2]]),
        ({"tenant": "nobody"}, KEPT),
        ({"key": key(0).name}, [("acme", "chat", 2), *KEPT[1:]]),
        ({"key": key(0).name, "tenant": "other"}, KEPT),
        ({"epoch": "2"}, [KEPT[0], KEPT[2]]),
        ({"epoch": ""}, KEPT[1:2]),
        ({"epoch": "", "tenant": "other"}, KEPT[:2]),
        ({"epoch": "3"}, KEPT),
        ({"all": "true"}, []),
    ],
)
async def test_removes_what_is_selected(operator, query, left):
    removed = await operator.system.done("DELETE", "cache", query=query)
    assert removed == {"object": "removed_answers", "removed": 6 - sum(answers for _, _, answers in left)}
    assert await kept(operator.system) == left


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({}, "Which answers are meant?"),
        ({"all": "false"}, "Which answers are meant?"),
        ({"tenant": ""}, "Which answers are meant?"),
        ({"all": "true", "model": "chat"}, "all=true means all answers"),
        ({"all": "true", "epoch": ""}, "all=true means all answers"),
        ({"all": "perhaps"}, "all must be"),
        ({"age": "1"}, "age"),
        ([("tenant", "acme"), ("tenant", "other")], "comes twice"),
    ],
)
async def test_removes_nothing_where_it_is_not_clear_what(operator, query, message):
    error = await operator.system.refused("DELETE", "cache", 400, query=query)
    assert message in error["message"]
    assert await kept(operator.system) == KEPT


async def test_a_redis_that_is_away_is_said(operator, monkeypatch):
    async def away(*_):
        raise StoreUnavailable("The Redis of `cache.url` does not answer.")

    monkeypatch.setattr(operator.system.answers, "describe", away)
    monkeypatch.setattr(operator.system.answers, "remove", away)
    for error in (
        await operator.system.refused("GET", "cache", 503),
        await operator.system.refused("DELETE", "cache", 503, query={"all": "true"}),
    ):
        assert "cache.url" in error["message"]


async def test_only_administrators(operator):
    for method in ("GET", "DELETE"):
        response = await operator.system.call(method, "cache", query={}, headers={"authorization": "Bearer sk-none"})
        assert response.status_code == 401


async def test_commands(operator):
    shown = rows(await operator.does("cache", "list"))
    assert shown[:4] == [
        ["TENANT", "MODEL", "EPOCH", "ANSWERS", "BYTES"],
        ["acme", "chat", "-", "3", "300"],
        ["acme", "code", "2", "2", "200"],
        ["other", "chat", "-", "1", "100"],
    ]
    assert "0 of 0 look-ups were served without computing" in shown[4][0]
    assert "of 1,048,576 bytes" in shown[4][0]
    assert json.loads(await operator.does("cache", "list", "--json"))["store"]["answers"] == 6
    assert await operator.does("cache", "clear", "--answer", key(0).name) == "Removed 1 answer.\n"
    assert await operator.does("cache", "clear", "--tenant", "acme", "--model", "chat") == "Removed 2 answers.\n"
    assert await operator.does("cache", "clear", "--epoch", "", "--tenant", "other") == "Removed 1 answer.\n"
    assert "Pass --tenant, --model, --answer or --epoch" in await operator.cannot("cache", "clear")
    assert "all=true" in await operator.cannot("cache", "clear", "--all", "--model", "chat")
    assert await operator.does("cache", "clear", "--epoch", "2") == "Removed 2 answers.\n"
    assert await kept(operator.system) == []
