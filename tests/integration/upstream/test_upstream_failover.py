"""When a request goes on at another server or another model: after time-outs, in an outage, without a retry budget."""

import asyncio

import pytest

from maitred.app.models import upstreams
from maitred.config.tree import TextModelConfig
from maitred.replica.health.config import BreakerConfig, HealthConfig
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig
from maitred.testing.scripted_openai import DelayDistribution, FaultKind, ScriptedFault, ServerScript, scripted_openai
from maitred.testing.server_process import free_port
from tests.integration.upstream.test_upstream_faults import TEXT, limits_of
from tests.support.upstream_gateway import upstream_gateway

SOUND = ServerScript(ttft=DelayDistribution(mean_s=0.01), itl=DelayDistribution(mean_s=0.002))
ROUTING = RoutingConfig(fallbacks={"far": FallbackConfig(general=["near"])})
TIMEOUTS = {
    "no head": ScriptedFault(kind=FaultKind.SILENT, share=1.0),
    "nothing of the answer": ScriptedFault(kind=FaultKind.STALL, share=1.0, after=0),
    "only signs of life": ScriptedFault(kind=FaultKind.DRIP, share=1.0, after=0, for_s=0.05),
    "silence in the middle": ScriptedFault(kind=FaultKind.STALL, share=1.0, after=3),
}
BUSY = ScriptedFault(kind=FaultKind.STATUS, status=503, share=1.0)


def failing(fault):
    return ServerScript(ttft=SOUND.ttft, itl=SOUND.itl, faults=[fault])


def model(*scripted, **settings):
    return TextModelConfig(
        upstreams=[
            UpstreamConfig(
                url=f"{server.url}/v1",
                name=f"server-{number}",
                **{"dialect": "sglang", **limits_of(server.script), **settings},
            )
            for number, server in enumerate(scripted)
        ]
    )


@pytest.mark.parametrize("fault", TIMEOUTS.values(), ids=TIMEOUTS)
async def test_a_time_out_that_was_used_up_is_not_spent_again_while_a_model_is_left(fault):
    with scripted_openai(failing(fault)) as late, scripted_openai(SOUND) as sound:
        models = {"far": model(late), "near": model(sound)}
        async with upstream_gateway("", models=models, routing=ROUTING, retries=2) as system:
            answer = await system.chat()
            assert answer.json()["choices"][0]["message"]["content"] == TEXT
            assert answer.headers["x-maitred-fallback"] == "general=near"
            assert len(late.truth().requests) == 1


@pytest.mark.parametrize("fault", TIMEOUTS.values(), ids=TIMEOUTS)
async def test_nor_while_a_server_is_left(fault):
    with scripted_openai(failing(fault)) as late, scripted_openai(SOUND) as sound:
        async with upstream_gateway("", model=model(late, sound), retries=2) as system:
            answers = await asyncio.gather(system.chat(), system.chat())
            assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == [TEXT, TEXT]
            assert len(late.truth().requests) == 1


async def test_silence_in_the_middle_is_risked_again_where_nothing_else_is_left():
    fault = ScriptedFault(kind=FaultKind.STALL, requests=[0], after=3)
    with scripted_openai(failing(fault)) as server:
        async with upstream_gateway("", model=model(server), retries=2) as system:
            assert (await system.chat()).json()["choices"][0]["message"]["content"] == TEXT
            assert len(server.truth().requests) == 2


@pytest.mark.parametrize("status", [429, 503, 500, 401])
async def test_an_outage_is_learnt(status):
    fault = ScriptedFault(kind=FaultKind.STATUS, status=status, share=1.0)
    with scripted_openai(failing(fault)) as busy, scripted_openai(SOUND) as sound:
        models = {"far": model(busy), "near": model(sound)}
        async with upstream_gateway("", models=models, routing=ROUTING) as system:
            # So long that nobody finds out within this test.
            health = HealthConfig(breaker=BreakerConfig(first_open_s=1_000.0, most_open_s=1_000.0))
            system.upstream.status.reconfigure(60.0, health)
            system.upstream.status.health.breaker._draw = lambda: 1.0
            most = health.most_refusals if status in (429, 503) else health.breaker.max_fails
            for _ in range(most + 4):
                answer = await system.chat()
                assert answer.status_code == 200
                assert answer.headers["x-maitred-fallback"] == "general=near"
            assert len(busy.truth().requests) == most


async def test_a_model_without_a_fallback_is_asked_all_the_same():
    with scripted_openai(failing(BUSY)) as busy:
        async with upstream_gateway("", model=model(busy)) as system:
            for _ in range(6):
                assert (await system.chat()).status_code == 503
            assert len(busy.truth().requests) == 6


async def test_failover_to_an_idle_server_needs_no_retry_budget():
    broken_script = failing(ScriptedFault(kind=FaultKind.STATUS, status=500, share=1.0))
    with scripted_openai(broken_script) as broken, scripted_openai(SOUND) as sound:
        async with upstream_gateway("", model=model(broken, sound), retries=2, allowance=0) as system:
            for _ in range(4):
                answers = await asyncio.gather(system.chat(), system.chat())
                assert [answer.status_code for answer in answers] == [200, 200]
            assert sum(context.recoveries for context in system.contexts) > 0


async def test_the_only_server_is_not_asked_again_without_a_retry_budget():
    with scripted_openai(failing(ScriptedFault(kind=FaultKind.STATUS, status=500, requests=[0]))) as server:
        async with upstream_gateway(f"{server.url}/v1", retries=2, allowance=0) as system:
            assert (await system.chat()).status_code == 502
            assert len(server.truth().requests) == 1


@pytest.mark.parametrize(("others", "deadline_s"), [(0, 120.0), (1, 30.0)])
async def test_the_default_time_for_the_first_part_depends_on_what_else_can_be_asked(others, deadline_s, monkeypatch):
    taken = []
    with scripted_openai(SOUND) as server, scripted_openai(SOUND) as other:
        scripted = [server, other][: 1 + others]
        settings = {"first_part_timeout_s": None, "total_timeout_s": 600.0}
        async with upstream_gateway("", model=model(*scripted, **settings)) as system:
            for upstream in system.model.replicas:
                send = upstream.connection_pool.send

                async def spy(data, *, deadline_s=None, send=send, **how):
                    if deadline_s is not None:
                        taken.append(deadline_s - asyncio.get_running_loop().time())
                    return await send(data, deadline_s=deadline_s, **how)

                monkeypatch.setattr(upstream.connection_pool, "send", spy)
            assert (await system.chat()).status_code == 200
    assert taken == [pytest.approx(deadline_s, abs=5.0)]


async def test_a_gateway_that_starts_knows_which_servers_are_there(monkeypatch):
    """A controller that is started again is asked at once, and refuses nothing for want of a look at a server."""
    monkeypatch.setattr(upstreams, "_FIRST_PROBE_TIMEOUT_S", 300.0)
    with scripted_openai(SOUND) as sound:
        gone = UpstreamConfig(url=f"http://127.0.0.1:{free_port()}/v1", dialect="generic")
        models = {"there": model(sound), "gone": TextModelConfig(upstreams=[gone])}
        async with upstreams.open_upstreams(models) as opened:
            up = {name: [server.status.is_up for server in servers] for name, servers in opened.current.servers.items()}
            assert up == {"there": [True], "gone": [False]}
