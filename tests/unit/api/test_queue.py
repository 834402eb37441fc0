"""Positions in the queue, and who may see them; and Retry-After in rejections."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from maitred.api.config import ServerConfig
from maitred.api.in_flight import InFlightLimiter
from maitred.core.context import Outcome
from maitred.core.counters import CounterState
from maitred.core.errors import (
    DeadlineUnmeetable,
    InvalidRequest,
    QueueFull,
    RateLimited,
    ReplicaLost,
    ReplicaUnavailable,
    ResourceNotFound,
)
from maitred.core.flow import PriorityClass, QueuePosition
from maitred.core.tenancy import Principal, Scope
from tests.support.applications import make_app
from tests.support.clock import FakeClock

BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'


def principal(*tenants, scopes=(Scope.INFERENCE,)):
    return Principal(key="k", tenants=tenants, scopes=frozenset(scopes))


class RefusingGateway:
    """An application whose system behind refuses everything with what the test says."""

    def __init__(self, caller, refusal=None, *, capacity=10, **config):
        self.caller = caller
        self.refusal = refusal
        self.asks = []
        self.contexts = []
        self.clock = FakeClock()
        self.app = make_app(ServerConfig(**config), self, self, InFlightLimiter(capacity), self.clock, observers=[self])

    async def identify(self, header):
        return self.caller

    async def rate_limit_status(self, context):
        return None

    def on_request_end(self, context):
        self.contexts.append(context)

    def generate(self, ask, context):
        self.asks.append(ask)
        context.predicted_position = QueuePosition(40, 9.5, 9.75)
        context.priority = PriorityClass.BATCH
        raise self.refusal

    def queue_position(self, principal, request_id):
        if principal.tenants[-1] != "acme" or request_id != "req/1":
            raise ResourceNotFound
        return QueuePosition(12, 3.4, 3.65)

    async def ask(self, path="/v1/chat/completions", method="POST", **headers):
        sent = []

        async def send(message):
            sent.append(message)

        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        messages = [{"type": "http.request", "body": BODY}]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError("nobody ever sends more")

        await self.app({"type": "http", "method": method, "path": path, "headers": given}, receive, send)
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return SimpleNamespace(status=sent[0]["status"], headers=headers, body=json.loads(sent[1]["body"]))


async def test_a_position_is_shown_to_the_organisation_of_the_request():
    answer = await RefusingGateway(principal("team", "acme")).ask("/v1/queue/req/1", "GET")
    assert (answer.status, answer.body) == (
        200,
        {
            "id": "req/1",
            "object": "queue.place",
            "position": 12,
            "predicted_wait_ms": 3400,
            "predicted_ttft_ms": 3650,
        },
    )
    assert (await RefusingGateway(principal("acme")).ask("/v1/queue/other", "GET")).status == 404
    assert (await RefusingGateway(principal("other")).ask("/v1/queue/req/1", "GET")).status == 404
    assert (
        await RefusingGateway(principal("acme", scopes=[Scope.METRICS])).ask("/v1/queue/req/1", "GET")
    ).status == 403


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (QueueFull(retry_after_s=2.5), 429, "queue_full"),
        (DeadlineUnmeetable(retry_after_s=2.5), 429, "deadline_unmeetable"),
        (ReplicaUnavailable(retry_after_s=2.5), 503, "replica_unavailable"),
    ],
)
async def test_a_refusal_tells_the_truth_and_grants_so_many_retries(refusal, status, code):
    gateway = RefusingGateway(principal("team", "acme"), refusal, retry_share=0.5, retry_allowance=1)
    answers = [await gateway.ask(x_maitred_explain="true") for _ in range(2)]
    for answer in answers:
        assert (answer.status, answer.body["error"]["code"]) == (status, code)
        assert answer.headers["retry-after"] == "3"
        assert answer.headers["retry-after-ms"] == "2500"
        assert answer.headers["x-maitred-queue-position"] == "40"
        assert answer.headers["x-maitred-predicted-wait-ms"] == "9500"
        assert answer.headers["x-maitred-predicted-ttft-ms"] == "9750"
        assert answer.headers["x-maitred-priority"] == "batch"
        assert answer.headers["x-maitred-waited"] == ""
        assert "x-should-retry" not in answer.headers
    assert {context.outcome for context in gateway.contexts} == {Outcome.REFUSED}
    # Two were granted, for one allowance and half of two first attempts. The retries earn nothing.
    retry = await gateway.ask(x_stainless_retry_count="1")
    assert retry.headers["x-should-retry"] == "false"
    assert [ask.retries for ask in gateway.asks] == [0, 0, 1]
    # Later there is room again, and another team has its own.
    gateway.clock.now_s += 600
    assert "x-should-retry" not in (await gateway.ask(x_stainless_retry_count="2")).headers
    gateway.caller = principal("others", "acme")
    assert "x-should-retry" not in (await gateway.ask()).headers


async def test_a_key_that_was_refused_before_makes_a_retry():
    gateway = RefusingGateway(principal("acme"), QueueFull(retry_after_s=1), retry_share=1.0, retry_allowance=0)
    assert "x-should-retry" not in (await gateway.ask(idempotency_key="a")).headers
    assert (await gateway.ask(idempotency_key="a")).headers["x-should-retry"] == "false"
    assert [ask.retries for ask in gateway.asks] == [0, 1]


async def test_a_rejection_by_a_full_gateway_counts_too():
    gateway = RefusingGateway(principal("acme"), capacity=0, retry_share=0.0, retry_allowance=1)
    answers = [await gateway.ask() for _ in range(2)]
    assert [answer.body["error"]["code"] for answer in answers] == ["saturated"] * 2
    assert [answer.headers.get("x-should-retry") for answer in answers] == [None, "false"]


@pytest.mark.parametrize(
    "refusal",
    [
        InvalidRequest("No."),
        ReplicaLost(),
        RateLimited(
            "No.", subject="*", limit="requests_per_minute", value=1, reading=CounterState(1, 0.0, 1.0), retry_after_s=1
        ),
    ],
)
async def test_other_errors_take_nothing_from_the_budget(refusal):
    gateway = RefusingGateway(principal("acme"), refusal, retry_share=0.0, retry_allowance=1)
    for _ in range(3):
        assert "x-should-retry" not in (await gateway.ask()).headers
    gateway.refusal = QueueFull()
    assert "x-should-retry" not in (await gateway.ask()).headers


async def test_what_headers_say_reaches_the_work():
    gateway = RefusingGateway(principal("acme"), QueueFull())
    await gateway.ask(
        x_maitred_priority="9", x_maitred_ttft_ms="200", x_maitred_deadline_ms="5000", x_maitred_partial="true"
    )
    ask = gateway.asks[0]
    assert (ask.priority, ask.ttft_in_s, ask.deadline_in_s, ask.partial) == (9, 0.2, 5.0, True)
    answer = await gateway.ask(x_maitred_deadline_ms="soon")
    assert (answer.status, answer.body["error"]["param"]) == (400, "x-maitred-deadline-ms")
    assert len(gateway.asks) == 1
