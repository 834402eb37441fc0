"""Rollouts from outside: a gateway before two versions of a model that servers of others run."""

import asyncio
import json
from collections import Counter

import httpx
import pytest

from maitred.app.request.shadow_traffic import ShadowOutcome
from maitred.core.context import Outcome
from maitred.core.errors import Conflict
from maitred.core.limits import Limit, LimitKind
from maitred.core.rollout import RolloutPhase
from maitred.core.tenancy import Principal, Scope
from maitred.routing.config import RoutingConfig
from maitred.routing.rollout.config import RolloutConfig, TrialConfig
from maitred.testing.scripted_openai import DelayDistribution, FaultKind, ScriptedFault, ServerScript, scripted_openai
from maitred.wire.admin.requests import WeighRollout
from tests.integration.routing.test_routing import SOUND, ask, broken, model, text
from tests.integration.upstream.test_upstream_faults import TEXT
from tests.support.upstream_gateway import upstream_gateway


def rollout(**settings):
    return RoutingConfig(
        rollouts={"chat": RolloutConfig(**{"stable": "v1", "canary": "v2", "sticky": "session", **settings})}
    )


async def sides(system, count=24):
    """Which version each of so many sessions gets."""
    headers = [(await ask(system, "chat", {"x-session-id": f"s{i}"})).headers for i in range(count)]
    return [header["x-maitred-rollout"].removeprefix("chat=") for header in headers]


async def test_sessions_stay_at_their_version_while_the_weight_grows_and_all_go_back_at_once():
    with scripted_openai(SOUND) as one, scripted_openai(SOUND) as other:
        models = {"v1": model(one), "v2": model(other)}
        async with upstream_gateway("", models=models, routing=rollout(weight=0.3)) as system:
            first = await sides(system)
            assert {"stable", "canary"} == set(first)
            assert await sides(system) == first
            served = [
                (event.model, event.rollout) for event in system.ledger.events if event.outcome is Outcome.FINISHED
            ]
            assert set(served) == {("v1", "chat=stable"), ("v2", "chat=canary")}
            await system.rollouts.weigh("chat", WeighRollout(name="chat", weight=0.7))
            grown = await sides(system)
            assert all(now == "canary" for before, now in zip(first, grown, strict=True) if before == "canary")
            await system.rollouts.switch("chat")
            assert set(await sides(system, 5)) == {"canary"}
            body = await system.rollouts.rollback("chat")
            assert (body.phase, body.weight, body.why) == (RolloutPhase.ROLLED_BACK, 0.0, "an operator decided so")
            assert set(await sides(system, 5)) == {"stable"}
            with pytest.raises(Conflict, match="Start it again"):
                await system.rollouts.weigh("chat", WeighRollout(name="chat", weight=0.1))
            with pytest.raises(Conflict, match="Nothing would be served as chat"):
                await system.rollouts.end("chat")


async def test_the_stable_version_follows_a_canary_that_fails():
    with scripted_openai(SOUND) as one, scripted_openai(broken(FaultKind.CLOSE)) as bad:
        models = {"v1": model(one), "v2": model(bad)}
        async with upstream_gateway("", models=models, routing=rollout(weight=1.0)) as system:
            answer = await ask(system, "chat")
            assert text(answer) == TEXT
            assert answer.headers["x-maitred-rollout"] == "chat=stable"
            assert answer.headers["x-maitred-fallback"] == "stable=v1"
            await system.wait_until(lambda: system.nothing_left)
            lines = {(event.model, event.rollout): event.outcome for event in system.ledger.events}
            assert lines["v1", "chat=stable"] is Outcome.FINISHED
            assert lines["v2", "chat=canary"] is Outcome.FAILED


async def test_bounds_hold_for_the_canary_and_such_requests_are_not_on_trial():
    with scripted_openai(SOUND) as one, scripted_openai(SOUND) as other:
        models = {"v1": model(one, region="eu"), "v2": model(other, region="us", local=False)}
        async with upstream_gateway("", models=models, routing=rollout(weight=1.0)) as system:
            for header, value in (("x-maitred-region", "eu"), ("x-maitred-local-only", "true")):
                answer = await ask(system, "chat", {header: value})
                assert answer.headers["x-maitred-rollout"] == "chat=stable"
            assert (await ask(system, "chat")).headers["x-maitred-rollout"] == "chat=canary"
            assert not system.contexts[0].arm.tried
            assert system.contexts[2].arm.tried


async def test_whoever_may_use_one_version_only_gets_that_one():
    acme = Principal(key="k", tenants=("acme",), scopes=frozenset({Scope.INFERENCE}), models=frozenset({"v1"}))
    with scripted_openai(SOUND) as one, scripted_openai(SOUND) as other:
        models = {"v1": model(one), "v2": model(other)}
        async with upstream_gateway("", models=models, routing=rollout(weight=1.0), principal=acme) as system:
            assert (await ask(system, "chat")).headers["x-maitred-rollout"] == "chat=stable"
            assert (await ask(system, "v2")).status_code == 404
            listed = (await system.client.get("/v1/models")).json()["data"]
            assert [entry["id"] for entry in listed] == ["v1", "chat"]


async def test_requests_in_flight_finish_where_they_are():
    slow = ServerScript(ttft=SOUND.ttft, itl=DelayDistribution(mean_s=0.05))
    with scripted_openai(SOUND) as one, scripted_openai(slow) as other:
        models = {"v1": model(one), "v2": model(other)}
        async with upstream_gateway("", models=models, routing=rollout(weight=1.0)) as system:
            body = {"model": "chat", "stream": True, "messages": [{"role": "user", "content": "one two three"}]}
            async with system.client.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.headers["x-maitred-rollout"] == "chat=canary"
                lines = response.aiter_lines()
                await anext(lines)
                await system.rollouts.rollback("chat")
                assert [line async for line in lines if line][-1] == "data: [DONE]"
            assert isinstance(response, httpx.Response)
            assert [event.model for event in system.ledger.events] == ["v2"]


EAGER = TrialConfig(baseline_requests=20, failed_abort=0.0)


async def drive(system, over, at_most=600, abreast=10):
    """Sends requests until the rollout is over; returns it, and how many it took."""
    for sent in range(0, at_most, abreast):
        await asyncio.gather(*(ask(system, "chat") for _ in range(abreast)))
        if (body := system.rollouts.all()[0]).phase is over:
            return body, sent + abreast
    raise AssertionError(system.rollouts.all()[0])


async def test_a_canary_that_fails_is_aborted_and_no_caller_has_noticed():
    faulty = broken(FaultKind.CLOSE)
    faulty.faults[0] = ScriptedFault(kind=FaultKind.STATUS, status=500, share=0.6)
    settings = rollout(weight=0.5, sticky="request", trial=EAGER)
    with scripted_openai(SOUND) as one, scripted_openai(faulty) as bad:
        models = {"v1": model(one), "v2": model(bad)}
        async with upstream_gateway("", models=models, routing=settings) as system:
            body, _ = await drive(system, RolloutPhase.ABORTED)
            assert (body.weight, body.faults) == (0.0, ["errors"])
            assert body.why.startswith("errors, after ")
            assert {context.outcome for context in system.contexts} == {Outcome.FINISHED}
            assert (await ask(system, "chat")).headers["x-maitred-rollout"] == "chat=stable"
            await system.wait_until(lambda: system.nothing_left)


def wrong(share):
    """A canary some of whose answers have another word in them."""
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunk["choices"] = [{"index": 0, "delta": {"content": " but"}, "finish_reason": None}]
    return ServerScript(
        ttft=SOUND.ttft,
        itl=SOUND.itl,
        faults=[ScriptedFault(kind=FaultKind.EVENT, share=share, text=json.dumps(chunk))],
    )


def copies(system):
    return {end: count for (_, end), count in system.trials.shadow_traffic.outcome_counts.items()}


async def test_copies_are_compared_and_nobody_pays_or_waits_for_them():
    few = Limit(id="few", subject="*", kind=LimitKind.REQUESTS_PER_MINUTE, value=20)
    with scripted_openai(SOUND) as one, scripted_openai(SOUND) as other:
        models = {"v1": model(one), "v2": model(other)}
        async with upstream_gateway("", models=models, routing=rollout(shadow=1.0), limited=[few]) as system:
            for _ in range(10):
                assert text(await ask(system, "chat", temperature=0)) == TEXT
            streamed = await ask(system, "chat", temperature=0, stream=True)
            assert streamed.text.rstrip().endswith("[DONE]")
            await ask(system, "chat")
            await system.wait_until(lambda: system.trials.shadow_traffic.running == 0)
            assert copies(system) == {ShadowOutcome.AGREED: 11, ShadowOutcome.ANSWERED: 1}, (
                "what was sampled is not compared"
            )
            assert len(system.contexts) == 12, "copies are no requests"
            for number in range(8):
                assert (await ask(system, "chat")).status_code == 200, f"the limit of the callers, request {number}"
            assert (await ask(system, "chat")).status_code == 429
            await system.wait_until(lambda: system.trials.shadow_traffic.running == 0 and system.nothing_left)
            accounts = Counter((event.model, event.organisation, event.rollout) for event in system.ledger.events)
            assert accounts == {("v1", "anonymous", "chat=stable"): 20, ("v2", "operators", "chat=canary"): 20}
            assert system.rollouts.all()[0].canary_requests == 20


async def test_a_canary_with_other_answers_is_aborted_before_anybody_has_seen_one():
    with scripted_openai(SOUND) as one, scripted_openai(wrong(0.5)) as other:
        models = {"v1": model(one), "v2": model(other)}
        async with upstream_gateway("", models=models, routing=rollout(shadow=1.0, trial=EAGER)) as system:
            for _ in range(20):
                answers = await asyncio.gather(*(ask(system, "chat", temperature=0) for _ in range(5)))
                assert {text(answer) for answer in answers} == {TEXT}
                if (body := system.rollouts.all()[0]).phase is RolloutPhase.ABORTED:
                    break
            assert (body.phase, body.faults, body.shadow) == (RolloutPhase.ABORTED, ["disagreement"], 0.0)


async def test_a_canary_that_hangs_holds_up_nobody_and_nothing_is_left_of_its_copies():
    settings = rollout(shadow=1.0, shadow_limit=2)
    with scripted_openai(SOUND) as one, scripted_openai(broken(FaultKind.SILENT)) as hung:
        models = {"v1": model(one), "v2": model(hung)}
        async with upstream_gateway("", models=models, routing=settings) as system:
            for _ in range(5):
                assert text(await ask(system, "chat", temperature=0)) == TEXT
            assert system.trials.shadow_traffic.running == 2
            assert copies(system) == {ShadowOutcome.SKIPPED: 3}
            assert not system.nothing_left
        assert system.trials.shadow_traffic.running == 0
        assert system.nothing_left
        assert {event.outcome for event in system.ledger.events if event.model == "v2"} == {Outcome.CANCELLED}


async def test_a_caller_who_leaves_takes_its_copy_along():
    slow = ServerScript(ttft=DelayDistribution(mean_s=600.0), itl=SOUND.itl)
    with scripted_openai(slow) as one, scripted_openai(slow) as other:
        models = {"v1": model(one), "v2": model(other)}
        async with upstream_gateway("", models=models, routing=rollout(shadow=1.0)) as system:
            leaving = asyncio.create_task(ask(system, "chat", temperature=0))
            await system.wait_until(lambda: system.open_streams == 2 and system.trials.shadow_traffic.running == 1)
            leaving.cancel()
            await system.wait_until(lambda: system.trials.shadow_traffic.running == 0 and system.nothing_left)
            assert copies(system) == {ShadowOutcome.DROPPED: 1}
