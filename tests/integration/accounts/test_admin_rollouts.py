"""Rollouts through the administration's API."""

import pytest

from tests.support.admin_app import administered


@pytest.fixture
async def system(tmp_path):
    async with administered(tmp_path) as system:
        yield system


async def test_a_rollout_from_its_start_to_its_end(system):
    assert (await system.done("GET", "rollouts"))["data"] == []
    body = {"name": "m", "canary": "m2", "weight": 0.1, "shadow": 0.5, "automatic": "promote", "sticky": "session"}
    begun = await system.done("POST", "rollouts/start", body)
    assert {**begun, **body, "stable": "m", "phase": "running", "verdict": "continue"} == begun
    grown = await system.done("POST", "rollouts/weight", {"name": "m", "weight": 0.4})
    assert (grown["weight"], grown["shadow"]) == (0.4, 0.5)
    for verb, phase, weight in (
        ("switch", "switched", 1.0),
        ("promote", "promoted", 1.0),
        ("rollback", "rolled_back", 0.0),
    ):
        done = await system.done("POST", f"rollouts/{verb}", {"name": "m"})
        assert (done["phase"], done["weight"], done["shadow"]) == (phase, weight, 0.0)
        assert (await system.done("GET", "rollouts"))["data"] == [done]
    assert (await system.done("POST", "rollouts/end", {"name": "m"}))["phase"] == "ended"
    assert (await system.done("GET", "rollouts"))["data"] == []


async def test_what_makes_no_sense_is_refused_with_a_sentence(system):
    for verb, body, status, param in (
        ("start", {"name": "m", "canary": "nowhere"}, 400, "canary"),
        ("start", {"name": "other", "canary": "m2"}, 400, "name"),
        ("start", {"name": "m", "canary": "m2", "weight": 2}, 400, "weight"),
        ("start", {"name": "m", "canary": "m2", "wieght": 1}, 400, "wieght"),
        ("weight", {"name": "m", "weight": 0.5}, 404, "name"),
        ("rollback", {"name": "m"}, 404, "name"),
        ("end", {}, 400, "name"),
    ):
        assert (await system.refused("POST", f"rollouts/{verb}", status, body))["param"] == param
