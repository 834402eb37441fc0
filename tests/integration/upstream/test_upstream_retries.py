"""What fails before the first part of an answer is tried again, elsewhere if there is an elsewhere.

Who asks sees none of it, and is billed once.
"""

import asyncio

import pytest

from maitred.config.tree import TextModelConfig
from maitred.core.context import Outcome
from maitred.core.limits import Limit, LimitKind
from maitred.replica.health.config import BreakerConfig, HealthConfig
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig
from maitred.testing.scripted_openai import DelayDistribution, FaultKind, ScriptedFault, ServerScript, scripted_openai
from tests.integration.upstream.test_upstream_faults import AFTER, BEFORE, PATIENT, TEXT, limits_of, name, stream, texts
from tests.support.upstream_gateway import upstream_gateway

SOUND = ServerScript(ttft=DelayDistribution(mean_s=0.01), itl=DelayDistribution(mean_s=0.002))


def once(fault, **how):
    """A server whose first request alone meets the fault."""
    return ServerScript(ttft=SOUND.ttft, itl=SOUND.itl, faults=[ScriptedFault(kind=fault, requests=[0], **how)])


def servers(*scripted, **settings):
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


@pytest.mark.parametrize("behaviour", BEFORE, ids=name)
async def test_with_a_sound_server_beside_it_nobody_sees_the_failure(behaviour):
    with scripted_openai(behaviour) as broken, scripted_openai(SOUND) as sound:
        async with upstream_gateway("", model=servers(broken, sound, dialect="generic"), retries=2) as system:
            # Two at a time, so that one of them goes to each server.
            for _ in range(2):
                answers = await asyncio.gather(system.chat(), system.chat())
                assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == [TEXT, TEXT]
            (_, events, done, clean) = await stream(system)
            assert (texts(events), done, clean) == (TEXT, True, True)
            await system.wait_until(lambda: system.nothing_left)
            assert [event.outcome for event in system.ledger.events] == [Outcome.FINISHED] * 5
            assert sum(context.recoveries for context in system.contexts) >= 1
            assert {event.replica for event in system.ledger.events} & {"server-0,server-1"}


@pytest.mark.parametrize("behaviour", AFTER, ids=name)
async def test_who_waits_for_the_whole_has_seen_nothing_of_a_broken_part(behaviour):
    with scripted_openai(behaviour) as broken, scripted_openai(SOUND) as sound:
        async with upstream_gateway("", model=servers(broken, sound), retries=2) as system:
            answers = await asyncio.gather(system.chat(), system.chat())
            for answer in answers:
                assert answer.json()["choices"][0]["message"]["content"] == TEXT
                assert answer.json()["usage"]["completion_tokens"] == 8
            await system.wait_until(lambda: system.nothing_left)
            events = system.ledger.events
            assert [(event.outcome, event.output_tokens) for event in events] == [(Outcome.FINISHED, 8)] * 2
            assert sum(context.recoveries for context in system.contexts) >= 1


@pytest.mark.parametrize("behaviour", AFTER, ids=name)
async def test_what_breaks_in_its_middle_is_not_begun_anew(behaviour):
    """The client has seen a part of it already."""
    with scripted_openai(behaviour) as broken:
        async with upstream_gateway("", model=servers(broken), retries=2) as system:
            _, events, done, clean = await stream(system)
            assert events[-1]["error"]["code"] == "replica_lost"
            assert not done
            assert not clean
            assert [context.recoveries for context in system.contexts] == [0]


@pytest.mark.parametrize("fault", [FaultKind.CLOSE, FaultKind.EMPTY, FaultKind.HTML, FaultKind.ERROR_BODY])
async def test_the_only_server_is_asked_again_after_a_pause(fault):
    with scripted_openai(once(fault)) as server:
        async with upstream_gateway(f"{server.url}/v1", retries=2, **PATIENT) as system:
            answer = await system.chat()
            assert answer.json()["choices"][0]["message"]["content"] == TEXT
            (event,) = system.ledger.events
            assert (event.outcome, event.output_tokens) == (Outcome.FINISHED, 8)
            assert [context.recoveries for context in system.contexts] == [1]


async def test_the_only_server_is_not_asked_before_the_time_that_it_names():
    fault = once(FaultKind.STATUS, status=429, headers={"retry-after-ms": "700"})
    with scripted_openai(fault) as server:
        async with upstream_gateway(f"{server.url}/v1", retries=2, **PATIENT) as system:
            begun_s = asyncio.get_running_loop().time()
            assert (await system.chat()).status_code == 200
            assert asyncio.get_running_loop().time() - begun_s >= 0.7


async def test_a_long_retry_after_is_returned_instead_of_waited_for():
    fault = once(FaultKind.STATUS, status=503, headers={"retry-after": "60"})
    with scripted_openai(fault) as server:
        async with upstream_gateway(f"{server.url}/v1", retries=2, **PATIENT) as system:
            refused = await system.chat()
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")


async def test_a_credential_that_is_not_accepted_is_not_sent_again():
    fault = once(FaultKind.STATUS, status=401)
    with scripted_openai(fault) as server:
        async with upstream_gateway(f"{server.url}/v1", retries=2, **PATIENT) as system:
            assert (await system.chat()).status_code == 503
            assert [context.recoveries for context in system.contexts] == [0]


async def test_a_server_that_keeps_failing_is_left_alone():
    broken = ServerScript(
        ttft=SOUND.ttft, itl=SOUND.itl, faults=[ScriptedFault(kind=FaultKind.STATUS, status=500, share=1.0)]
    )
    with scripted_openai(broken) as bad, scripted_openai(SOUND) as good:
        async with upstream_gateway("", model=servers(bad, good), retries=2) as system:
            for _ in range(12):
                answers = await asyncio.gather(*(system.chat() for _ in range(4)))
                assert {answer.status_code for answer in answers} == {200}
            # Without a breaker each request would begin at the broken server, which has the most room.
            asked, answered = (len(server.truth().requests) for server in (bad, good))
            assert (answered, 0 < asked < 24) == (48, True)


@pytest.mark.parametrize("behaviour", AFTER, ids=name)
async def test_a_server_that_keeps_breaking_off_is_left_alone(behaviour):
    with scripted_openai(behaviour) as broken:
        async with upstream_gateway("", model=servers(broken), retries=0) as system:
            statuses = [(await system.chat()).status_code for _ in range(12)]
            # It may have been asked again since: the time for which it is left alone is drawn.
            assert (statuses[:5], set(statuses)) == ([502] * 5, {502, 503})
            assert system.upstream.open_streams == 0


async def test_retries_come_from_the_tenants_budget():
    broken = ServerScript(ttft=SOUND.ttft, itl=SOUND.itl, faults=[ScriptedFault(kind=FaultKind.CLOSE, share=1.0)])
    # The breaker stays closed: where it is open, it is waited for, and the budget is hardly touched.
    health = HealthConfig(breaker=BreakerConfig(max_fails=1000, least_requests=1000))
    with scripted_openai(broken) as server:
        async with upstream_gateway(f"{server.url}/v1", retries=5, allowance=4, **PATIENT) as system:
            system.upstream.status.reconfigure(60.0, health)
            for _ in range(6):
                assert (await system.chat()).status_code in (502, 503)
            made = sum(context.recoveries for context in system.contexts)
            assert 4 <= made <= 4 + 0.2 * 6, "what the budget has"


PER_MINUTE = Limit(id="rate", subject="*", kind=LimitKind.REQUESTS_PER_MINUTE, value=3)


@pytest.mark.parametrize("status", [400, 422, 429, 401, 500])
async def test_what_a_server_refuses_counts_in_the_rate_of_requests(status):
    fault = ScriptedFault(kind=FaultKind.STATUS, status=status, share=1.0, headers={"retry-after": "30"})
    with scripted_openai(ServerScript(faults=[fault])) as server:
        async with upstream_gateway(f"{server.url}/v1", limited=[PER_MINUTE]) as system:
            statuses = [(await system.chat()).status_code for _ in range(6)]
            assert statuses[3:] == [429] * 3
            assert len(server.truth().requests) == 3


async def test_a_request_that_falls_back_counts_once():
    fault = ScriptedFault(kind=FaultKind.STATUS, status=500, share=1.0)
    with scripted_openai(ServerScript(faults=[fault])) as broken, scripted_openai(SOUND) as sound:
        models = {"far": servers(broken), "near": servers(sound)}
        routing = RoutingConfig(fallbacks={"far": FallbackConfig(general=["near"])})
        async with upstream_gateway("", models=models, routing=routing, limited=[PER_MINUTE]) as system:
            answers = [await system.chat() for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
            assert answers[0].headers["x-ratelimit-remaining-requests"] == "2"


@pytest.mark.parametrize(("configured", "asked", "answers"), [(2, "0", False), (0, "1", True)])
async def test_a_request_says_how_often_it_is_tried_again(configured, asked, answers):
    with scripted_openai(once(FaultKind.CLOSE)) as broken:
        async with upstream_gateway("", model=servers(broken), retries=configured) as system:
            body = {"model": "far", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 8}
            said = {"x-maitred-retries": asked}
            response = await system.client.post("/v1/chat/completions", json=body, headers=said)
            assert (response.status_code == 200) == answers, response.text
            wrong = {"x-maitred-retries": "11"}
            refused = await system.client.post("/v1/chat/completions", json=body, headers=wrong)
            assert (refused.status_code, "from 0 to 10" in refused.json()["error"]["message"]) == (400, True)
