"""A server that breaks its answers in every way there is: the client never takes a part for the whole.

Before anything of the answer has gone out, a failure is a status that clients retry by themselves. Afterwards it is an
error event, no ``[DONE]``, and a connection that is closed.
"""

import asyncio
import json

import httpx
import pytest

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.core.context import Outcome
from maitred.core.limits import Limit, LimitKind
from maitred.testing.scripted_openai import DelayDistribution, FaultKind, ScriptedFault, ServerScript, scripted_openai
from tests.support.upstream_gateway import upstream_gateway

PATIENT = {"first_part_timeout_s": 120.0, "idle_timeout_s": 120.0, "total_timeout_s": 120.0, "probe_every_s": 0.2}
"""Settings of an upstream whose time limits no busy machine reaches."""
LASTING = (FaultKind.SILENT, FaultKind.STALL, FaultKind.DRIP)
"""Faults that last until a time limit is over."""
TEXT = "0 1 2 3 4 5 6 7"


def script(kind, **how):
    fault = ScriptedFault(kind=kind, share=1.0, **how)
    # On a busy machine pieces that come close to one another arrive as one, and a failure with the first before it.
    return ServerScript(ttft=DelayDistribution(mean_s=0.01), itl=DelayDistribution(mean_s=0.02), faults=[fault])


def limits_of(a_script):
    """Settings of an upstream with this script: time limits are short where its fault lasts until one is over."""
    limits = {**PATIENT}
    for fault in a_script.faults:
        if fault.kind in LASTING and not (fault.kind is FaultKind.STALL and fault.for_s):
            limits |= {"idle_timeout_s": 1.0, "total_timeout_s": 2.0 if fault.kind is FaultKind.DRIP else 120.0}
            if fault.kind is FaultKind.SILENT or not fault.after:
                limits["first_part_timeout_s"] = 1.0
    return limits


BEFORE = [
    script(FaultKind.STATUS, status=500),
    script(FaultKind.STATUS, status=503, headers={"retry-after": "2"}),
    script(FaultKind.STATUS, status=429, headers={"retry-after-ms": "1500"}),
    script(FaultKind.STATUS, status=401),
    script(FaultKind.STATUS, status=404),
    script(FaultKind.CLOSE),
    script(FaultKind.HTML),
    script(FaultKind.EMPTY),
    script(FaultKind.ERROR_BODY),
    script(FaultKind.STALL, after=0),
    script(FaultKind.DRIP, after=0),
    script(FaultKind.CUT, after=0),
    script(FaultKind.RESET, after=0),
    script(FaultKind.ERROR_EVENT, after=0),
    script(FaultKind.HALF_EVENT, after=0),
    script(FaultKind.GARBAGE, after=0),
    script(FaultKind.NO_DONE, after=0),
]
AFTER = [
    script(FaultKind.STALL, after=3),
    script(FaultKind.DRIP, after=3),
    script(FaultKind.CUT, after=3),
    script(FaultKind.RESET, after=3),
    script(FaultKind.ERROR_EVENT, after=3),
    script(FaultKind.HALF_EVENT, after=3),
    script(FaultKind.SHORT_LENGTH, after=3),
    script(FaultKind.GARBAGE, after=3),
    script(FaultKind.NO_DONE, after=3),
    script(FaultKind.TWICE, after=3),
]
ODD = [
    script(FaultKind.BUNCHED),
    script(FaultKind.PINGS),
    script(FaultKind.NO_DONE, after=8),
    script(FaultKind.EVENT, after=3),
    script(FaultKind.EVENT, after=0, text="ping"),
    script(FaultKind.EVENT, after=3, text='{"ping": 1}'),
    script(FaultKind.EVENT, after=3, text='{"choices": []}'),
    script(FaultKind.CRLF),
    script(FaultKind.SPLIT),
    script(FaultKind.STALL, after=3, for_s=0.15),
]


def name(a_script):
    (fault,) = a_script.faults
    return f"{fault.kind}-{fault.status if fault.kind is FaultKind.STATUS else fault.after}"


def texts(events):
    return "".join(choice["delta"].get("content", "") for event in events for choice in event.get("choices", ()))


async def stream(system):
    """The events of a stream, whether it said that it is done, and whether the connection ended as it should."""
    body = {"model": "far", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 8, "stream": True}
    lines, clean = [], True
    async with system.client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return response, [], False, True
        try:
            async for line in response.aiter_lines():
                lines.append(line)  # noqa: PERF401 - kept also when the connection breaks
        except httpx.RemoteProtocolError:
            clean = False
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return response, [json.loads(entry) for entry in data if entry != "[DONE]"], "[DONE]" in data, clean


@pytest.mark.parametrize("behaviour", BEFORE, ids=name)
async def test_a_failure_before_the_answer_is_a_status_that_can_be_retried(behaviour):
    with scripted_openai(behaviour) as server:
        async with upstream_gateway(f"{server.url}/v1", dialect="generic", **limits_of(behaviour)) as system:
            for response in (await system.chat(), (await stream(system))[0]):
                assert response.status_code in (502, 503)
                error = response.json()["error"]
                assert error["code"] in ("replica_lost", "replica_unavailable")
                assert error["type"] == "server_error"
            await system.wait_until(lambda: system.nothing_left)
            # What nobody got costs nothing.
            assert [event.cost_nusd for event in system.ledger.events] == [0, 0]
            assert Outcome.FINISHED not in [event.outcome for event in system.ledger.events]


@pytest.mark.parametrize("behaviour", AFTER, ids=name)
async def test_a_failure_in_the_middle_is_never_an_end(behaviour):
    with scripted_openai(behaviour) as server:
        async with upstream_gateway(f"{server.url}/v1", **limits_of(behaviour)) as system:
            whole = await system.chat()
            assert whole.status_code in (502, 503)
            response, events, done, clean = await stream(system)
            assert response.status_code == 200
            assert events[-1]["error"]["code"] == "replica_lost"
            assert not done
            assert not clean
            assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
            await system.wait_until(lambda: system.nothing_left)
            assert {event.outcome for event in system.ledger.events} == {Outcome.FAILED}


@pytest.mark.parametrize("behaviour", ODD, ids=name)
async def test_what_is_only_odd_comes_through_whole(behaviour):
    with scripted_openai(behaviour) as server:
        async with upstream_gateway(f"{server.url}/v1", **limits_of(behaviour)) as system:
            whole = await system.chat()
            assert whole.json()["choices"][0]["message"]["content"] == TEXT
            _, events, done, clean = await stream(system)
            assert (texts(events), done, clean) == (TEXT, True, True)


async def test_who_says_when_to_come_back_is_heard():
    with scripted_openai(BEFORE[2]) as server:
        async with upstream_gateway(f"{server.url}/v1", **PATIENT) as system:
            refused = await system.chat()
            assert refused.headers["retry-after-ms"] == "1500"


async def test_a_credential_that_is_refused_is_no_fault_of_the_caller():
    with scripted_openai(BEFORE[3]) as server:
        async with upstream_gateway(f"{server.url}/v1", **PATIENT) as system:
            refused = await system.chat()
            assert refused.status_code == 503
            assert "does not accept this gateway's credential" in refused.json()["error"]["message"]


async def test_a_request_that_the_server_refuses_gets_the_reason():
    with scripted_openai(script(FaultKind.STATUS, status=400)) as server:
        async with upstream_gateway(f"{server.url}/v1", **PATIENT) as system:
            refused = await system.chat()
            assert (refused.status_code, refused.json()["error"]["message"]) == (400, "The script wants it so.")


async def test_usage_that_nobody_counted_is_marked_as_an_estimate():
    with scripted_openai(script(FaultKind.NO_USAGE)) as server:
        async with upstream_gateway(f"{server.url}/v1", **PATIENT) as system:
            usage = (await system.chat()).json()["usage"]
            assert usage["estimated"] is True
            assert usage["completion_tokens"] > 0
            (event,) = system.ledger.events
            assert (event.prompt_tokens, event.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])


async def test_the_servers_own_count_is_what_is_billed_and_what_is_learnt():
    with scripted_openai(
        ServerScript(ttft=DelayDistribution(mean_s=0.0), itl=DelayDistribution(mean_s=0.0), template_tokens=40)
    ) as server:
        async with upstream_gateway(f"{server.url}/v1", **PATIENT) as system:
            usage = (await system.chat()).json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (43, 8)
            assert "estimated" not in usage
            (event,) = system.ledger.events
            assert (event.prompt_tokens, event.output_tokens) == (43, 8)
            first = system.model.prompt_ratio.value
            for _ in range(5):
                await system.chat()
            assert system.model.prompt_ratio.value > first > 1


async def test_a_client_that_leaves_ends_the_work_behind():
    with scripted_openai(
        ServerScript(ttft=DelayDistribution(mean_s=0.01), itl=DelayDistribution(mean_s=0.02))
    ) as server:
        async with upstream_gateway(f"{server.url}/v1") as system:
            body = {"model": "far", "messages": [{"role": "user", "content": "a"}], "max_tokens": 500, "stream": True}
            async with system.client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if "3" in line:
                        break
            await system.wait_until(lambda: system.nothing_left)
            (event,) = system.ledger.events
            assert event.outcome is Outcome.CANCELLED
            assert 0 < event.output_tokens < 100
            truth = await asyncio.to_thread(server.truth)
        assert truth.requests[-1].end == "client_left"


async def test_a_server_that_is_down_is_unavailable_and_found_when_it_starts():
    with scripted_openai() as server:
        url = server.url
        server.stop()
        async with upstream_gateway(f"{url}/v1", up=False, **PATIENT) as system:
            await system.wait_until(lambda: "cannot be reached" in system.upstream.status.reason)
            assert (await system.client.get("/health/ready")).json()["status"] == "no_replica"
            (entry,) = (await system.client.get("/v1/models")).json()["data"]
            assert (entry["id"], entry["ready"]) == ("far", False)
            refused = await system.chat()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "replica_unavailable")
            assert int(refused.headers["retry-after"]) >= 1


async def test_limits_reserve_the_estimate_and_settle_on_what_was_counted():
    limit = Limit(id="l", subject="*", kind=LimitKind.TOKENS_PER_MINUTE, value=600)
    calm = ServerScript(ttft=DelayDistribution(mean_s=0.0), itl=DelayDistribution(mean_s=0.0), template_tokens=40)
    with scripted_openai(calm) as server:
        async with upstream_gateway(f"{server.url}/v1", limited=[limit], **PATIENT) as system:
            first = await system.chat()
            await system.chat()
            # 43 tokens of prompt and 8 of answer, each time, whatever had been reserved.
            left = int((await system.chat(max_tokens=1)).headers["x-ratelimit-remaining-tokens"])
            reserved = 600 - int(first.headers["x-ratelimit-remaining-tokens"])
            assert reserved < 43
            assert 600 - left == pytest.approx(2 * 51 + 16, abs=20)
            assert system.admission.leases.active == 0


async def test_a_hard_budget_cuts_the_answer_that_the_server_is_asked_for():
    budget = Limit(id="l", subject="*", kind=LimitKind.USD_TOTAL, value=60_000)
    prices = AdmissionConfig(prices={"*": PriceConfig(prompt=1, output=5)}, least_output_tokens=1)
    with scripted_openai(
        ServerScript(ttft=DelayDistribution(mean_s=0.0), itl=DelayDistribution(mean_s=0.0), template_tokens=0)
    ) as server:
        async with upstream_gateway(f"{server.url}/v1", limited=[budget], admitting=prices, **PATIENT) as system:
            answer = await system.chat(max_tokens=1_000)
            granted = int(answer.headers["x-maitred-max-tokens-clamped"])
            usage = answer.json()["usage"]
            assert usage["completion_tokens"] == granted < 12
            assert sum(event.cost_nusd for event in system.ledger.events) <= 60_000
            refused = await system.chat(max_tokens=1_000)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
