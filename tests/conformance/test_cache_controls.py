"""Official clients say what they want of caches, by their further fields and headers, and all APIs hear it."""
# ruff: noqa: SIM117 - nested contexts say who lives within whom

import anthropic
import openai
import pytest

from maitred.api.embeddings import EmbeddingRoutes
from maitred.core.inference import DEFAULT_CACHE_CONTROL, CacheControl
from maitred.testing.script import ScriptedAnswer
from tests.conformance.test_responses_websocket import opened, serving, turn, turns
from tests.support.gateway import MODEL, gateway, tokens_of

ANSWER = ScriptedAnswer(tokens=[*tokens_of("Hello there"), 2])
USER = [{"role": "user", "content": "Hi"}]
CACHE = {"no-cache": True, "ttl": 60, "s-maxage": 90.5, "namespace": "n"}
CONTROL = CacheControl(no_cache=True, ttl_s=60, max_age_s=90.5, namespace="n")
MORE = {"extra_body": {"cache": CACHE}, "extra_headers": {"Cache-Control": "No-Store, max-age=30"}}
BOTH = CacheControl(no_cache=True, no_store=True, ttl_s=60, max_age_s=30, namespace="n")


def openai_client(system):
    return openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)


def calls_of(client, other):
    """A call of each API, by the official client of each."""
    return {
        "chat": lambda **more: client.chat.completions.create(model=MODEL, messages=USER, **more),
        "completion": lambda **more: client.completions.create(model=MODEL, prompt="Hi", **more),
        "messages": lambda **more: other.messages.create(model=MODEL, messages=USER, max_tokens=9, **more),
        "responses": lambda **more: client.responses.create(model=MODEL, input="Hi", **more),
        "background": lambda **more: client.responses.create(model=MODEL, input="Hi", background=True, **more),
    }


@pytest.mark.parametrize("api", ["chat", "completion", "messages", "responses", "background"])
async def test_every_api_hears_it(tmp_path, api):
    async with serving(tmp_path, [ANSWER]) as system, openai_client(system) as client:
        async with anthropic.AsyncAnthropic(base_url=system.url, api_key="none", max_retries=0) as other:
            call = calls_of(client, other)[api]
            for more, control in (
                ({}, DEFAULT_CACHE_CONTROL),
                ({"extra_body": {"cache": CACHE}}, CONTROL),
                (MORE, BOTH),
                ({"extra_body": {"cache": None}}, DEFAULT_CACHE_CONTROL),
            ):
                await call(**more)
                await system.wait_until(lambda: system.contexts)
                context = system.contexts.pop()
                assert (context.request.cache, context.ignored_fields) == (control, ())
            wrong = (openai.BadRequestError, anthropic.BadRequestError)
            for cache, field in (({"ttl": "1h"}, "cache.ttl"), ({"use-cache": True}, "cache.use-cache")):
                with pytest.raises(wrong, match=f"{field} must ") as caught:
                    await call(extra_body={"cache": cache})
                assert api == "messages" or caught.value.param == field


@pytest.mark.parametrize("api", ["chat", "completion", "messages", "responses", "background"])
async def test_who_takes_only_what_is_kept_gets_a_504_and_does_not_come_back(tmp_path, api):
    async with serving(tmp_path, [ANSWER]) as system, openai_client(system) as client:
        async with anthropic.AsyncAnthropic(base_url=system.url, api_key="none", max_retries=2) as other:
            call = calls_of(client.with_options(max_retries=2), other)[api]
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match="only-if-cached") as caught:
                await call(extra_headers={"cache-control": "only-if-cached"})
            assert (caught.value.status_code, caught.value.response.headers["x-should-retry"]) == (504, "false")
            await system.wait_until(lambda: system.contexts)
            assert [context.request.cache for context in system.contexts] == [CacheControl(only_if_cached=True)]
            assert system.engine.submitted == []


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_what_is_not_to_be_stored_is_not_kept(tmp_path, api):
    async with serving(tmp_path, [ANSWER]) as system, openai_client(system) as client:
        call = calls_of(client, None)[api]
        for store, no_store in ((False, True), (True, False), (openai.omit, False)):
            await call(store=store)
            await system.wait_until(lambda: system.contexts)
            assert system.contexts.pop().request.cache == CacheControl(no_store=no_store)
        await call(store=False, extra_body={"cache": CACHE})
        await system.wait_until(lambda: system.contexts)
        control = system.contexts.pop().request.cache
        assert (control.no_store, control.ttl_s, control.namespace) == (True, 60, "n")


async def test_a_turn_over_a_websocket_says_it_in_its_body(tmp_path):
    """Browsers send `Cache-Control: no-cache` with every handshake; it says nothing about answers."""
    async with serving(tmp_path, [ANSWER]) as system:
        async with opened(system, additional_headers={"Cache-Control": "no-cache"}) as one:
            for cache, control in ((None, DEFAULT_CACHE_CONTROL), (CACHE, CONTROL)):
                assert (await turn(one, cache=cache))["type"] == "response.completed"
                await system.wait_until(lambda: turns(system))
                assert system.contexts.pop().request.cache == control
            failed = await turn(one, cache={"ttl": 0})
            assert (failed["type"], failed["error"]["param"]) == ("error", "cache.ttl")


class Embedder:
    """Computes vectors of zeros."""

    async def embed(self, request, context, dimensions):
        context.request, context.model = request, request.model
        return [bytes(4)]


async def test_embeddings_hear_it():
    routes = EmbeddingRoutes(Embedder(), strict=True).routes()
    async with gateway(further=lambda _: routes) as system, openai_client(system) as client:
        for more, control in (({}, DEFAULT_CACHE_CONTROL), (MORE, BOTH)):
            await client.embeddings.create(model="m", input="Hi", **more)
            await system.wait_until(lambda: system.contexts)
            context = system.contexts.pop()
            assert (context.request.cache, context.ignored_fields) == (control, ())


async def test_a_strict_server_takes_it():
    async with gateway([ANSWER], strict=True) as system, openai_client(system) as client:
        for call in list(calls_of(client, None).values())[:2]:
            await call(**MORE)
