"""Answers that fail a check, from outside: a gateway before three models with scripted servers."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.config.tree import TextModelConfig
from maitred.core.context import Outcome
from maitred.core.limits import Limit, LimitKind
from maitred.core.tenancy import Principal, Scope
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.auto.config import AutoConfig
from maitred.routing.config import RoutingConfig
from maitred.routing.escalation.config import EscalationConfig
from maitred.routing.escalation.schemas import SchemaChecker
from tests.integration.upstream.test_upstream_faults import PATIENT
from tests.integration.upstream.test_upstream_passing import Server, chunk, running
from tests.support.upstream_gateway import upstream_gateway

SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "object", "required": ["n"]}},
}
GOOD, BAD, REFUSED = '{"n": 1}', "It is one.", "I'm sorry, but I can't help with that."
PRICES = AdmissionConfig(prices={"s": PriceConfig(output=1), "m": PriceConfig(output=10), "l": PriceConfig(output=100)})
BOTH = {"schema": True, "refusal": True}
ALL = EscalationConfig(**BOTH)
TEXTS = {"m": "Medium.", "l": "Large."}


def usage(tokens=10):
    return {"id": "x", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}


def saying(text, finish="stop", logprob=None, **delta):
    first = chunk(content=text, **delta)
    if logprob is not None:
        first["choices"][0]["logprobs"] = {"content": [{"token": text, "logprob": logprob}]}
    return [first, chunk(finish), usage()]


BREAKS = [chunk(content="It"), usage()]
"""Ends before its end."""


class Slow(Server):
    """Says nothing until it is `over`."""

    def __init__(self, events):
        super().__init__(events)
        self.reached, self.over = asyncio.Event(), asyncio.Event()

    async def answer(self, request):
        if request.method == "POST":
            self.reached.set()
            await self.over.wait()
        return await super().answer(request)


@asynccontextmanager
async def serving(escalation=ALL, *, schemas=False, pools=None, limited=(), principal=None, **answers):
    """The gateway and its three servers; `answers` are what they say."""
    answers = {"s": saying(BAD), **{name: saying(text) for name, text in TEXTS.items()}} | answers
    auto = AutoConfig(small="s", medium="m", large="l", thresholds=(0.98, 0.99), escalation=escalation)
    servers = {name: script if isinstance(script, Server) else Server(script) for name, script in answers.items()}
    who = {} if principal is None else {"principal": principal}
    async with AsyncExitStack() as running_all:
        models = {}
        for name, server in servers.items():
            url = await running_all.enter_async_context(running(server.answer))
            upstream = UpstreamConfig(url=f"{url}/v1", dialect="openai", **PATIENT)
            models[name] = TextModelConfig(upstreams=[upstream], **(pools or {}).get(name, {}))
        judge = await running_all.enter_async_context(SchemaChecker(60.0, total_timeout_s=60.0)) if schemas else None
        system = await running_all.enter_async_context(
            upstream_gateway(
                *("",),
                models=models,
                routing=RoutingConfig(auto={"auto": auto}),
                admitting=PRICES,
                limited=limited,
                schemas=judge,
                **who,
            )
        )
        yield system, servers


async def ask(system, headers=None, **fields):
    body = {"model": "auto", "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 20, **fields}
    answer = await system.client.post("/v1/chat/completions", json=body, headers=headers or {})
    assert answer.status_code == 200, answer.text
    await system.wait_until(lambda: system.nothing_left)
    return answer


def headers_of(answer):
    """What it says, who says it, and which answers failed before."""
    text = answer.json()["choices"][0]["message"]["content"]
    return text, answer.headers["x-maitred-model"], answer.headers.get("x-maitred-escalated")


def lines(system):
    return [(event.model, event.output_tokens, event.outcome) for event in system.ledger.events]


async def test_an_answer_that_breaks_its_schema_is_asked_of_the_next_larger_model():
    async with serving(schemas=True, m=saying(GOOD)) as (system, servers):
        answer = await ask(system, response_format=SCHEMA)
        assert headers_of(answer) == (GOOD, "m", "s=schema")
        assert answer.json()["usage"]["completion_tokens"] == 10, "that of the answer which is given"
        assert lines(system) == [("s", 10, Outcome.FINISHED), ("m", 10, Outcome.FINISHED)], "each is billed"
        assert [event.cost_nusd for event in system.ledger.events] == [10_000, 100_000]
        (context,) = system.contexts
        assert [
            (rejected_answer.model, rejected_answer.reason, rejected_answer.replaced)
            for rejected_answer in context.rejected_answers
        ] == [("s", "schema", True)]
        assert servers["l"].bodies == []
        assert headers_of(await ask(system)) == (BAD, "s", None), "nobody has asked for JSON"


async def test_an_answer_that_follows_its_schema_is_given_as_it_is():
    async with serving(schemas=True, s=saying(GOOD)) as (system, servers):
        assert headers_of(await ask(system, response_format=SCHEMA)) == (GOOD, "s", None)
        assert headers_of(await ask(system, response_format={"type": "json_object"})) == (GOOD, "s", None)
        assert servers["m"].bodies == servers["l"].bodies == []
        assert len(system.ledger.events) == 2


async def test_the_largest_models_answer_is_returned_and_marked_as_failed():
    async with serving(schemas=True) as (system, _):
        answer = await ask(system, response_format=SCHEMA)
        assert headers_of(answer) == ("Large.", "l", "s=schema, m=schema, l=schema")
        assert [event.model for event in system.ledger.events] == ["s", "m", "l"]
        (context,) = system.contexts
        assert [rejected_answer.replaced for rejected_answer in context.rejected_answers] == [True, True, False]
    async with serving(EscalationConfig(most=1, **BOTH), schemas=True) as (system, _):
        assert headers_of(await ask(system, response_format=SCHEMA)) == ("Medium.", "m", "s=schema, m=schema")


@pytest.mark.parametrize(
    "refusal",
    [saying(REFUSED), saying("", refusal="No."), saying("It is", finish="content_filter")],
    ids=["text", "field", "filter"],
)
async def test_a_refusal_is_asked_of_the_next_larger_model(refusal):
    async with serving(s=refusal) as (system, _):
        assert headers_of(await ask(system)) == ("Medium.", "m", "s=refusal")


async def test_what_the_model_found_improbable_is_asked_of_the_next_larger_one():
    sure, unsure = saying("Medium.", logprob=-0.5), saying("Small.", logprob=-2.0)
    async with serving(EscalationConfig(logprob=-1.0), s=unsure, m=sure) as (system, servers):
        answer = await ask(system)
        assert headers_of(answer) == ("Medium.", "m", "s=logprob")
        assert servers["s"].bodies[0]["logprobs"] is True
        assert answer.json()["choices"][0]["logprobs"] is None, "the caller has not asked for them"
        asked = await ask(system, logprobs=True)
        assert asked.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
    pools = {"s": {"capabilities": ["tools"]}}
    async with serving(EscalationConfig(logprob=-1.0), s=unsure, pools=pools) as (system, servers):
        await ask(system)
        assert "logprobs" not in servers["s"].bodies[0], "they cannot be had there"
    async with serving(s=unsure) as (system, servers):
        assert headers_of(await ask(system))[1] == "s"
        assert "logprobs" not in servers["s"].bodies[0]


@pytest.mark.parametrize(
    ("escalation", "header", "model"),
    [
        (ALL, "false", "s"),
        (EscalationConfig(unasked=False, **BOTH), None, "s"),
        (EscalationConfig(unasked=False, **BOTH), "true", "m"),
        (EscalationConfig(), "true", "s"),
    ],
)
async def test_it_happens_if_both_allow_it(escalation, header, model):
    headers = {} if header is None else {"x-maitred-escalate": header}
    async with serving(escalation, s=saying(REFUSED)) as (system, _):
        answer = await ask(system, headers)
        assert answer.headers["x-maitred-model"] == model


async def test_a_header_that_says_neither_is_refused():
    async with serving() as (system, _):
        body = {"model": "auto", "messages": [{"role": "user", "content": "?"}]}
        answer = await system.client.post("/v1/chat/completions", json=body, headers={"x-maitred-escalate": "perhaps"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-maitred-escalate")


async def test_a_stream_is_held_back_only_if_its_caller_says_so():
    async with serving(s=saying(REFUSED)) as (system, _):
        streams = []
        for headers in ({}, {"x-maitred-escalate": "true"}):
            answer = await ask(system, headers, stream=True)
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert events[-1] == "[DONE]"
            deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
            text = "".join(delta.get("content") or "" for delta in deltas)
            streams.append((text, answer.headers["x-maitred-model"], answer.headers.get("x-maitred-escalated")))
        assert streams == [(REFUSED, "s", None), ("Medium.", "m", "s=refusal")]


async def test_a_larger_model_that_cannot_answer_takes_nothing_away():
    async with serving(s=saying(REFUSED), m=BREAKS, l=BREAKS) as (system, _):
        answer = await ask(system)
        assert headers_of(answer) == (REFUSED, "s", "s=refusal")
        assert answer.json()["usage"]["completion_tokens"] == 10
        finished = [event.model for event in system.ledger.events if event.outcome is Outcome.FINISHED]
        assert finished == ["s"], "what failed costs nothing"
        (context,) = system.contexts
        assert (context.model, context.completion_tokens, context.rejected_answers[0].replaced) == ("s", 10, False)
    async with serving(s=saying(REFUSED), m=BREAKS) as (system, _):
        assert headers_of(await ask(system)) == ("Large.", "l", "s=refusal")


async def test_the_highest_cost_holds_for_all_models_together():
    # 20 tokens at most: $0.00002 of s, $0.0002 of m, $0.002 of l.
    async with serving(s=saying(REFUSED), m=saying(REFUSED)) as (system, servers):
        answer = await ask(system, {"x-maitred-max-cost-usd": "0.00205"})
        assert headers_of(answer) == (REFUSED, "m", "s=refusal, m=refusal"), "s and m cost $0.00011, so that l may not"
        assert servers["l"].bodies == []
        answer = await ask(system, {"x-maitred-max-cost-usd": "0.0022"})
        assert answer.headers["x-maitred-model"] == "l"


async def test_a_limit_too_small_for_the_larger_model_keeps_the_first_answer():
    budget = Limit(id="day", subject="*", kind=LimitKind.USD_PER_DAY, value=15_000)
    async with serving(s=saying(REFUSED), limited=[budget]) as (system, servers):
        assert headers_of(await ask(system, max_tokens=10)) == (REFUSED, "s", "s=refusal")
        assert servers["m"].bodies == servers["l"].bodies == []


async def test_bounds_hold_for_the_larger_models():
    pools = {"s": {"region": "eu"}, "m": {"local": False, "region": "us"}, "l": {"region": "eu"}}
    async with serving(s=saying(REFUSED), pools=pools) as (system, servers):
        assert headers_of(await ask(system, {"x-maitred-local-only": "true"})) == ("Large.", "l", "s=refusal")
        assert headers_of(await ask(system, {"x-maitred-region": "eu"})) == ("Large.", "l", "s=refusal")
        assert servers["m"].bodies == []
    few = Principal(
        key="k", tenants=("acme",), scopes=frozenset({Scope.INFERENCE}), models=frozenset({"auto", "s", "m"})
    )
    async with serving(s=saying(REFUSED), m=saying(REFUSED), principal=few) as (system, servers):
        assert headers_of(await ask(system)) == (REFUSED, "m", "s=refusal, m=refusal")
        assert servers["l"].bodies == []


async def test_a_client_that_leaves_during_the_second_answer_leaves_nothing_behind():
    slow = Slow(saying("Late."))
    async with serving(s=saying(REFUSED), m=slow) as (system, _):
        asking = asyncio.create_task(ask(system))
        await slow.reached.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await system.wait_until(lambda: system.nothing_left and len(system.ledger.events) == 2)
        assert lines(system) == [("s", 10, Outcome.FINISHED), ("m", 0, Outcome.CANCELLED)]
        slow.over.set()
