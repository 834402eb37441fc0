"""A name behind which a model is chosen, from outside: a gateway before three models that servers of others run."""

from contextlib import asynccontextmanager

import openai
import pytest

from maitred.core.context import Outcome
from maitred.core.tenancy import Principal, Scope
from maitred.routing.auto.config import AutoConfig
from maitred.routing.auto.tasks import Task
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig
from maitred.testing.scripted_openai import FaultKind, scripted_openai
from tests.integration.routing.test_routing import CHAT, SOUND, ask, broken, model, text
from tests.integration.upstream.test_upstream_faults import TEXT
from tests.integration.upstream.test_upstream_passing import client
from tests.support.upstream_gateway import upstream_gateway

EASY = "What is the capital of France?"
HARD = (
    "Statement 1 | Every function from a finite set onto itself must be one to one. Statement 2 | Every subgroup of an "
    "abelian group is abelian. Which of the following is not false?\nA. True, True\nB. False, False\nC. True, False\n"
    "D. False, True\nAnswer:"
)
CODE = "Write a Python function that reverses a list."
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def auto(**settings):
    return AutoConfig(**{"small": "s", "medium": "m", "large": "l", "thresholds": (0.3, 0.35)} | settings)


@asynccontextmanager
async def serving(*, scripts=None, principal=None, models=None, routing=None):
    """The gateway, with three models and the name `auto`."""
    scripts = {"s": SOUND, "m": SOUND, "l": SOUND} | (scripts or {})
    settings = {} if principal is None else {"principal": principal}
    with (
        scripted_openai(scripts["s"]) as small,
        scripted_openai(scripts["m"]) as medium,
        scripted_openai(scripts["l"]) as large,
    ):
        servers = {"s": small, "m": medium, "l": large}
        served = {name: model(server, **(models or {}).get(name, {})) for name, server in servers.items()}
        routing = routing or RoutingConfig(auto={"auto": auto()}, aliases={"default": "auto"})
        async with upstream_gateway("", models=served, routing=routing, **settings) as system:
            yield system


async def chosen(system, prompt, headers=None, **fields):
    """Which model answered."""
    answer = await ask(system, "auto", headers, messages=[{"role": "user", "content": prompt}], **fields)
    assert text(answer) == TEXT
    return answer.headers["x-maitred-model"]


def caller(**properties):
    return Principal(key="k", tenants=("acme",), scopes=frozenset({Scope.INFERENCE}), **properties)


async def test_how_hard_a_prompt_looks_decides_who_answers_it():
    async with serving() as system:
        assert await chosen(system, EASY) == "s"
        assert await chosen(system, HARD) == "l"
        assert "x-maitred-model" not in (await ask(system, "s")).headers, "the caller has named it"
        unread = await system.client.post("/v1/completions", json={"model": "auto", "prompt": EASY, "max_tokens": 8})
        assert (unread.status_code, unread.headers["x-maitred-model"]) == (200, "s")
        assert [
            context.selection and (context.selection.name, context.selection.reason) for context in system.contexts
        ] == [
            ("auto", "small"),
            ("auto", "large"),
            None,
            ("auto", "small"),
        ]
        assert [event.model for event in system.ledger.events] == ["s", "l", "s", "s"], "billed as what it is"


async def test_a_kind_of_work_goes_to_its_model_and_what_nobody_says_to_the_middle():
    tasks = {Task.CODE: "l", Task.EXTRACTION: "m"}
    async with serving(routing=RoutingConfig(auto={"auto": auto(tasks=tasks)})) as system:
        assert await chosen(system, CODE) == "l"
        assert await chosen(system, EASY, response_format=SCHEMA) == "m"
        assert await chosen(system, EASY) == "s"
        wordless = await ask(system, "auto", messages=[{"role": "system", "content": "Greet whoever comes."}])
        assert wordless.headers["x-maitred-model"] == "m"
        assert [context.selection.reason for context in system.contexts] == ["code", "extraction", "small", "medium"]


async def test_official_clients_list_it_and_stream_from_it():
    async with serving() as system, client(system) as sdk:
        assert [entry.id async for entry in sdk.models.list()] == ["s", "m", "l", "auto", "default"]
        assert (await sdk.models.retrieve("auto")).id == "auto"
        raw = await sdk.chat.completions.with_raw_response.create(model="default", stream=True, **CHAT)
        assert raw.headers["x-maitred-model"] == "s"
        parts = [chunk.choices[0].delta.content or "" async for chunk in raw.parse() if chunk.choices]
        assert "".join(parts) == TEXT
        await system.wait_until(lambda: any(context.selection for context in system.contexts))
        (context,) = [context for context in system.contexts if context.selection]
        assert (context.selection.name, context.selection.model) == ("auto", "s")


@pytest.mark.parametrize(
    ("models", "expected"),
    [({"auto", "s", "m", "l"}, "s"), ({"auto", "m", "l"}, "m"), ({"auto", "l"}, "l"), ({"auto", "s"}, "s")],
)
async def test_the_model_must_be_open_to_the_caller_too(models, expected):
    async with serving(principal=caller(models=frozenset(models))) as system:
        assert await chosen(system, EASY) == expected


async def test_a_caller_who_may_not_use_the_name_does_not_see_it():
    async with serving(principal=caller(models=frozenset({"s", "m", "l"}))) as system, client(system) as sdk:
        assert [entry.id async for entry in sdk.models.list()] == ["s", "m", "l"]
        with pytest.raises(openai.NotFoundError, match="Served: l, m, s"):
            await sdk.chat.completions.create(model="auto", **CHAT)
    async with serving(principal=caller(models=frozenset({"auto"}))) as system:
        assert (await ask(system, "auto")).status_code == 404, "the name alone opens no model"


async def test_bounds_hold_whatever_is_chosen():
    models = {"s": {"region": "eu"}, "m": {"region": "us", "local": False}, "l": {"region": "us", "local": False}}
    async with serving(models=models) as system:
        assert await chosen(system, EASY, {"x-maitred-region": "us"}) == "m"
        assert await chosen(system, HARD, {"x-maitred-local-only": "true"}) == "s"
        refused = await ask(system, "auto", {"x-maitred-region": "asia"})
        assert refused.status_code == 403


async def test_where_the_chosen_one_fails_its_own_chain_and_then_the_next_larger_answer():
    down = broken(FaultKind.STATUS, status=503)
    async with serving(scripts={"s": down}) as system:
        answer = await ask(system, "auto", messages=[{"role": "user", "content": EASY}])
        assert text(answer) == TEXT
        assert (answer.headers["x-maitred-model"], answer.headers["x-maitred-fallback"]) == ("m", "general=m")
        await system.wait_until(lambda: system.nothing_left)
        finished = [event.model for event in system.ledger.events if event.outcome is Outcome.FINISHED]
        assert finished == ["m"]
    routing = RoutingConfig(auto={"auto": auto()}, fallbacks={"s": FallbackConfig(general=["l"])})
    async with serving(scripts={"s": down}, routing=routing) as system:
        assert await chosen(system, EASY) == "l"
    async with serving(scripts={"l": down}) as system:
        hard = await ask(system, "auto", messages=[{"role": "user", "content": HARD}])
        assert hard.status_code == 503, "nothing is larger"


async def test_what_does_not_fit_the_small_model_goes_to_the_next():
    async with serving(models={"s": {"context_tokens": 64}, "m": {"context_tokens": 4096}}) as system:
        longer = await ask(system, "auto", messages=[{"role": "user", "content": "Hi " * 300}])
        assert text(longer) == TEXT
        assert longer.headers["x-maitred-model"] != "s"
