"""Late requests that go to a second server, from outside: two servers of which each is slow now and then."""

import asyncio
import time

from maitred.config.tree import TextModelConfig
from maitred.core.context import Outcome
from maitred.dispatch.config import DispatchConfig, HedgingConfig
from maitred.replica.upstream.config import UpstreamConfig
from maitred.testing.scripted_openai import DelayDistribution, FaultKind, ScriptedFault, ServerScript, scripted_openai
from tests.support.upstream_gateway import upstream_gateway

URGENT = {"x-maitred-priority": "interactive"}
SLOW_S = 3.0
"""Much longer than an answer takes on a crowded machine."""
WARM = 40
ASKED = 100
SHARE = 0.2


def script(share):
    faults = [ScriptedFault(kind=FaultKind.STALL, after=0, for_s=SLOW_S, share=share)]
    return ServerScript(ttft=DelayDistribution(mean_s=0.005), itl=DelayDistribution(mean_s=0.001), faults=faults)


def hedging(**settings):
    return DispatchConfig(hedging=HedgingConfig(**{"models": ["far"], "share": SHARE, "least_s": 0.03} | settings))


def servers(*urls):
    upstreams = [UpstreamConfig(url=f"{url}/v1", dialect="sglang", name=f"s{n}") for n, url in enumerate(urls)]
    return TextModelConfig(upstreams=upstreams)


async def ttft(system, headers=URGENT):
    """Seconds to the first token of a stream; the header that tells of a second server."""
    body = {"model": "far", "messages": [{"role": "user", "content": "one"}], "max_tokens": 4, "stream": True}
    begun_s = time.perf_counter()
    async with system.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines()
        await anext(lines)
        after_s = time.perf_counter() - begun_s
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        return after_s, response.headers.get("x-maitred-hedged")


async def many(system, count):
    """So many requests, four at a time."""
    left = iter(range(count))

    async def one_after_the_other():
        return [await ttft(system) for _ in left]

    return [measured for some in await asyncio.gather(*(one_after_the_other() for _ in range(4))) for measured in some]


async def test_a_late_request_is_answered_by_another_server_and_nothing_is_left():
    times, extra = {}, {}
    for name, dispatching in (("off", DispatchConfig()), ("on", hedging())):
        with scripted_openai(script(0.05)) as one, scripted_openai(script(0.05)) as other:
            async with upstream_gateway("", model=servers(one.url, other.url), dispatching=dispatching) as system:
                await many(system, WARM)
                measured = await many(system, ASKED)
                await system.wait_until(lambda: system.nothing_left)
                times[name] = sorted(after_s for after_s, _ in measured)
                events = system.ledger.events
                assert {(event.outcome, event.output_tokens) for event in events} == {(Outcome.FINISHED, 4)}
                assert len(events) == WARM + ASKED, "one line each, whoever answered"
                hedges = [hedged for _, hedged in measured]
                rescued = [after_s for after_s, hedged in measured if hedged == "second"]
            asked = len(one.stop().requests) + len(other.stop().requests)
            extra[name] = asked - len(events)
            assert (name == "on") == ("second" in hedges)
    assert extra["off"] == 0
    assert 0 < extra["on"] <= SHARE * (WARM + ASKED), "the budget"
    assert times["off"][-3] > SLOW_S
    assert sorted(rescued)[len(rescued) // 2] < SLOW_S, "sooner than the first server would have answered"


def ready_to_hedge(system, copies=5.0):
    """As if it had learnt that a first token takes a moment."""
    system.dispatcher.hedging._ttft_samples_s.extend([0.01] * 20)
    system.dispatcher.hedging._budget = copies


async def test_the_others_are_never_sent_twice():
    late = ServerScript(ttft=DelayDistribution(mean_s=0.2), itl=DelayDistribution(mean_s=0.001))
    with scripted_openai(late) as one, scripted_openai(late) as other:
        async with upstream_gateway("", model=servers(one.url, other.url), dispatching=hedging()) as system:
            ready_to_hedge(system)
            body = {"model": "far", "messages": [{"role": "user", "content": "one"}]}
            hedges = []
            for headers, most in ((URGENT, 4), ({}, 4), (URGENT, 4000)):
                answer = await system.client.post(
                    "/v1/chat/completions", json={**body, "max_tokens": most}, headers=headers, timeout=300
                )
                assert answer.status_code == 200
                hedges.append(answer.headers.get("x-maitred-hedged"))
            assert [hedge is not None for hedge in hedges] == [True, False, False], "not interactive, not small"
        assert len(one.stop().requests) + len(other.stop().requests) == 4


async def test_a_client_that_leaves_during_the_race_leaves_nothing_behind():
    with scripted_openai(script(1.0)) as one, scripted_openai(script(1.0)) as other:
        async with upstream_gateway("", model=servers(one.url, other.url), dispatching=hedging()) as system:
            ready_to_hedge(system)
            leaving = asyncio.create_task(ttft(system))
            await system.wait_until(lambda: sum(replica.open_streams for replica in system.model.replicas) == 2)
            leaving.cancel()
            await asyncio.wait([leaving])
            await system.wait_until(lambda: system.nothing_left)
            (event,) = system.ledger.events
            assert (event.outcome, event.output_tokens) == (Outcome.CANCELLED, 0)


async def test_a_server_that_breaks_during_the_race_is_not_missed():
    broken = ServerScript(ttft=DelayDistribution(mean_s=0.15), faults=[ScriptedFault(kind=FaultKind.CLOSE, share=1.0)])
    slow = ServerScript(ttft=DelayDistribution(mean_s=0.3), itl=DelayDistribution(mean_s=0.001))
    with scripted_openai(broken) as one, scripted_openai(slow) as other:
        async with upstream_gateway("", model=servers(one.url, other.url), dispatching=hedging(), retries=2) as system:
            ready_to_hedge(system)
            for _ in range(3):
                await ttft(system)
            await system.wait_until(lambda: system.nothing_left)
            assert {event.outcome for event in system.ledger.events} == {Outcome.FINISHED}
