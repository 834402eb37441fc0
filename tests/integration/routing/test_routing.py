"""Names, fallbacks and bounds from outside: a gateway before several models that servers of others run."""

import asyncio
import json

import openai
import pytest

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.admission.degradation import DegradationStep
from maitred.config.tree import TextModelConfig
from maitred.core.context import Outcome
from maitred.core.limits import Limit, LimitKind
from maitred.core.tenancy import Principal, Scope
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig, TargetConfig
from maitred.testing.scripted_openai import DelayDistribution, FaultKind, ScriptedFault, ServerScript, scripted_openai
from tests.integration.upstream.test_upstream_faults import BEFORE, PATIENT, TEXT, limits_of, name
from tests.integration.upstream.test_upstream_passing import Server, chunk, client, running
from tests.support.upstream_gateway import upstream_gateway

SOUND = ServerScript(ttft=DelayDistribution(mean_s=0.01), itl=DelayDistribution(mean_s=0.002))
CHAT = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 8}


def broken(kind, **how):
    return ServerScript(ttft=SOUND.ttft, itl=SOUND.itl, faults=[ScriptedFault(kind=kind, share=1.0, **how)])


def model(server, **settings):
    return TextModelConfig(upstreams=[UpstreamConfig(url=f"{server.url}/v1", **limits_of(server.script))], **settings)


def text(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def ask(system, model, headers=None, **fields):
    return await system.client.post(
        "/v1/chat/completions", json={"model": model, **CHAT, **fields}, headers=headers or {}
    )


@pytest.mark.parametrize("behaviour", BEFORE, ids=name)
async def test_a_model_that_fails_is_followed_by_its_fallback(behaviour):
    routing = RoutingConfig(fallbacks={"first": FallbackConfig(general=["second"])})
    with scripted_openai(behaviour) as bad, scripted_openai(SOUND) as good:
        models = {"first": model(bad), "second": model(good)}
        async with upstream_gateway("", models=models, routing=routing) as system:
            answer = await ask(system, "first")
            assert text(answer) == TEXT
            assert answer.headers["x-maitred-fallback"] == "general=second"
            lines = []
            async with system.client.stream(
                "POST", "/v1/chat/completions", json={"model": "first", "stream": True, **CHAT}
            ) as response:
                assert response.headers["x-maitred-fallback"] == "general=second"
                lines = [line async for line in response.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
            assert "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]) == TEXT
            await system.wait_until(lambda: system.nothing_left)
            # Every attempt has its line; who answered is billed, and nobody else.
            finished = [event.model for event in system.ledger.events if event.outcome is Outcome.FINISHED]
            assert finished == ["second", "second"]
            assert {event.output_tokens for event in system.ledger.events if event.model == "first"} <= {0}


async def test_where_all_models_fail_the_first_failure_is_returned():
    routing = RoutingConfig(fallbacks={"first": FallbackConfig(general=["second"])})
    with (
        scripted_openai(broken(FaultKind.STATUS, status=503, headers={"retry-after": "7"})) as bad,
        scripted_openai(broken(FaultKind.CLOSE)) as worse,
    ):
        models = {"first": model(bad), "second": model(worse)}
        async with upstream_gateway("", models=models, routing=routing) as system:
            answer = await ask(system, "first")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
            await system.wait_until(lambda: system.nothing_left)


async def test_what_does_not_fit_goes_to_the_longer_window():
    routing = RoutingConfig(fallbacks={"short": FallbackConfig(context_length=["long"])})
    with scripted_openai(SOUND) as one, scripted_openai(SOUND) as other:
        models = {"short": model(one, context_tokens=64), "long": model(other, context_tokens=4096)}
        async with upstream_gateway("", models=models, routing=routing) as system:
            assert "x-maitred-fallback" not in (await ask(system, "short")).headers
            answer = await ask(system, "short", messages=[{"role": "user", "content": "word " * 400}])
            assert answer.headers["x-maitred-fallback"] == "context_length=long"
            too_long = await ask(system, "short", messages=[{"role": "user", "content": "word " * 20_000}])
            assert too_long.json()["error"]["code"] == "context_length_exceeded"


async def test_aliases_and_wildcards_lead_where_the_table_says():
    routing = RoutingConfig(
        aliases={"gpt-4o": "mine"}, names={"cloud/*": [TargetConfig(pool="cloud", model="*-latest")]}
    )
    other = Server([chunk("stop", content=TEXT)])
    with scripted_openai(SOUND) as one:
        async with running(other.answer) as url:
            models = {
                "mine": model(one),
                "cloud": TextModelConfig(upstreams=[UpstreamConfig(url=f"{url}/v1", **PATIENT)]),
            }
            async with upstream_gateway("", models=models, routing=routing) as system, client(system) as sdk:
                assert [entry.id async for entry in sdk.models.list()] == ["mine", "cloud", "gpt-4o"]
                answer = await sdk.chat.completions.create(model="gpt-4o", **CHAT)
                assert answer.choices[0].message.content == TEXT
                await sdk.chat.completions.create(model="cloud/opus", **CHAT)
                assert other.bodies[-1]["model"] == "opus-latest"
                with pytest.raises(openai.NotFoundError, match="Served: cloud, gpt-4o, mine"):
                    await sdk.chat.completions.create(model="gpt-5", **CHAT)
                assert [event.model for event in system.ledger.events] == ["mine", "cloud/*"]


async def test_what_may_not_leave_is_refused_rather_than_sent():
    with scripted_openai(SOUND) as one, scripted_openai(broken(FaultKind.CLOSE)) as bad:
        models = {"cloud": model(one, local=False, region="us"), "mine": model(bad, region="eu")}
        routing = RoutingConfig(fallbacks={"mine": FallbackConfig(general=["cloud"])})
        async with upstream_gateway("", models=models, routing=routing) as system:
            refused = await ask(system, "cloud", {"x-maitred-local-only": "true"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
            assert "is not local" in refused.json()["error"]["message"]
            assert (await ask(system, "cloud", {"x-maitred-region": "eu"})).status_code == 403
            assert text(await ask(system, "cloud", {"x-maitred-region": "eu, us"})) == TEXT
            assert text(await ask(system, "mine")) == TEXT
            assert (await ask(system, "mine", {"x-maitred-local-only": "true"})).status_code == 502, "no way out"
            for header, value in (("x-maitred-local-only", "perhaps"), ("x-maitred-max-cost-usd", "-1")):
                wrong = await ask(system, "mine", {header: value})
                assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, header)


async def test_a_tenant_that_is_kept_local_cannot_ask_otherwise():
    acme = Principal(key="k", tenants=("acme",), scopes=frozenset({Scope.INFERENCE}), tags=frozenset({"local-only"}))
    with scripted_openai(SOUND) as one:
        async with upstream_gateway("", models={"cloud": model(one, local=False)}, principal=acme) as system:
            assert (await ask(system, "cloud", {"x-maitred-local-only": "false"})).status_code == 403


async def test_what_may_cost_too_much_goes_to_a_cheaper_model_or_nowhere():
    prices = AdmissionConfig(prices={"dear": PriceConfig(prompt=10, output=1000), "cheap": PriceConfig(output=1)})
    routing = RoutingConfig(fallbacks={"dear": FallbackConfig(general=["cheap"])})
    with scripted_openai(SOUND) as one, scripted_openai(SOUND) as other:
        models = {"dear": model(one), "cheap": model(other)}
        async with upstream_gateway("", models=models, routing=routing, admitting=prices) as system:
            assert "x-maitred-fallback" not in (await ask(system, "dear", {"x-maitred-max-cost-usd": "1"})).headers
            cheaper = await ask(system, "dear", {"x-maitred-max-cost-usd": "0.001"})
            assert cheaper.headers["x-maitred-fallback"] == "general=cheap"
            refused = await ask(system, "dear", {"x-maitred-max-cost-usd": "0.000001"})
            assert refused.json()["error"]["code"] == "cost_exceeded"


async def test_overflow_goes_to_the_provider_as_far_as_the_budget_for_it_reaches():
    step = DegradationStep(step="overflow", to="cloud")
    prices = AdmissionConfig(prices={"cloud": PriceConfig(output=1_000_000)})
    budget = Limit(id="day", subject="*", kind=LimitKind.USD_PER_DAY, value=20 * 10**9)
    with scripted_openai(SOUND) as own, scripted_openai(SOUND) as other:
        models = {"mine": model(own, degradation=[step]), "cloud": model(other, local=False)}
        async with upstream_gateway("", models=models, admitting=prices, limited=[budget]) as system:
            assert "x-maitred-degraded" not in (await ask(system, "mine")).headers
            own.stop()
            await system.wait_until(lambda: not system.upstream.status.is_up)
            for _ in range(2):
                answer = await ask(system, "mine")
                assert text(answer) == TEXT
                assert answer.headers["x-maitred-degraded"] == "overflow=cloud"
            refused = await ask(system, "mine")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "replica_unavailable")
            assert (await ask(system, "mine", {"x-maitred-local-only": "true"})).status_code == 503
            finished = [event.model for event in system.ledger.events if event.outcome is Outcome.FINISHED]
            assert finished == ["mine", "cloud", "cloud"]


async def test_a_client_that_leaves_during_a_fallback_leaves_nothing_behind():
    routing = RoutingConfig(fallbacks={"first": FallbackConfig(general=["second"])})
    slow = ServerScript(ttft=DelayDistribution(mean_s=600.0), itl=SOUND.itl)
    with scripted_openai(broken(FaultKind.CLOSE)) as bad, scripted_openai(slow) as good:
        models = {"first": model(bad), "second": model(good)}
        async with upstream_gateway("", models=models, routing=routing) as system:
            leaving = asyncio.create_task(ask(system, "first"))
            _, second = system.dispatchers
            (endpoint_state,) = second.core.endpoint_states
            await system.wait_until(lambda: endpoint_state.endpoint.replica.open_streams == 1)
            leaving.cancel()
            await system.wait_until(lambda: system.nothing_left)
            assert Outcome.FINISHED not in {event.outcome for event in system.ledger.events}
