"""Calls with an `Idempotency-Key`, without a server: which call does the work, and what each call gets."""

import asyncio

import pytest

from maitred.api.exchange import HttpExchange
from maitred.api.idempotent import Idempotency
from maitred.api.routes import Route
from maitred.cache.config import IdempotencyConfig
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.cache.recording import ENTRY_BYTES, PIECE_BYTES
from maitred.core.clock import SystemClock
from maitred.core.context import RateLimitStatus
from maitred.core.counters import CounterState
from maitred.core.errors import Draining, IdempotencyConflict
from maitred.core.tenancy import Principal, Scope


class GuardedRoute:
    """One route whose handler does what the test says."""

    def __init__(self, work, *, idempotent=True, **bounds):
        self.ran = []
        self.work = work
        self.store = MemoryIdempotencyStore(IdempotencyConfig(**bounds), SystemClock())
        route = Route("POST", "/work", self.handle, "Works.", reads=object, idempotent=idempotent)
        self.route = Idempotency(self.store, self.rate_limit_status).guard(route)

    async def handle(self, call):
        self.ran.append(call.context.request_id)
        await self.work(call)

    async def rate_limit_status(self, context):
        return RateLimitStatus(requests=CounterState(60, 59.0, 1.0))

    def call(self, request_id, *, key="k", principal=None, body=b"{}", may_send=None):
        sent = []

        async def send(message):
            if may_send is not None:
                await may_send.wait()
            sent.append(message)

        headers = [(b"x-request-id", request_id.encode()), (b"idempotency-key", key.encode())]
        scope = {"path": "/work", "method": "POST", "headers": headers}
        call = HttpExchange(scope, None, send, 0.0)
        call.body = body
        call.context.principal = principal
        return call, sent


def headers_in(sent):
    return dict(sent[0]["headers"])


def body_in(sent):
    return b"".join(message.get("body", b"") for message in sent)


def principal(key, *tenants):
    return Principal(key=key, tenants=tenants, scopes=frozenset({Scope.INFERENCE}))


async def whole(call):
    call.context.completion_tokens = 7
    call.context.clamped_max_tokens = 100
    await call.respond(b"answer", status=200, headers=[(b"x-kind", b"whole")])


async def streamed(call):
    await call.stream(b"one ")
    await asyncio.sleep(0)
    await call.stream(b"two ")
    await call.finish(b"three ")


async def test_a_repeat_is_a_call_of_its_own_with_the_same_answer():
    guarded = GuardedRoute(whole)
    first, first_sent = guarded.call("req-1")
    again, again_sent = guarded.call("req-2")
    await guarded.route.repeat_handler(first)
    await guarded.route.repeat_handler(again)
    assert guarded.ran == ["req-1"]
    assert body_in(first_sent) == body_in(again_sent) == b"answer"
    assert first.context.completion_tokens == 7
    # Nothing that the first one used is counted for the second.
    assert (again.context.completion_tokens, again.context.clamped_max_tokens) == (0, None)
    first_headers, again_headers = headers_in(first_sent), headers_in(again_sent)
    assert b"x-maitred-idempotent-replay" not in first_headers
    assert again_headers[b"x-maitred-idempotent-replay"] == b"true"
    assert again_headers[b"x-maitred-original-request-id"] == b"req-1"
    assert (first_headers[b"x-request-id"], again_headers[b"x-request-id"]) == (b"req-1", b"req-2")
    assert first_headers[b"x-maitred-max-tokens-clamped"] == again_headers[b"x-maitred-max-tokens-clamped"] == b"100"
    assert again_headers[b"x-ratelimit-remaining-requests"] == b"59"
    assert first_headers[b"x-kind"] == again_headers[b"x-kind"] == b"whole"
    assert len(first_sent[0]["headers"]) == len(dict(first_sent[0]["headers"]))


async def test_a_stream_is_repeated_byte_for_byte():
    guarded = GuardedRoute(streamed)
    calls = [guarded.call(f"req-{i}") for i in range(3)]
    await asyncio.gather(*(guarded.route.repeat_handler(call) for call, _ in calls))
    assert len(guarded.ran) == 1
    assert {body_in(sent) for _, sent in calls} == {b"one two three data: [DONE]\n\n"}
    assert {headers_in(sent)[b"cache-control"] for _, sent in calls} == {b"no-cache"}


async def test_a_key_is_its_callers_own():
    guarded = GuardedRoute(whole)
    callers = [None, principal("a", "acme"), principal("b", "acme"), principal("a", "team", "other")]
    for i, caller in enumerate(callers):
        call, sent = guarded.call(f"req-{i}", principal=caller, body=b"%d" % i)
        await guarded.route.repeat_handler(call)
        assert body_in(sent) == b"answer"
    assert len(guarded.ran) == len(callers)
    call, _ = guarded.call("req-x", principal=principal("a", "acme"), body=b"other")
    with pytest.raises(IdempotencyConflict):
        await guarded.route.repeat_handler(call)


async def test_a_route_that_takes_no_key_ignores_it():
    guarded = GuardedRoute(whole, idempotent=False)
    assert guarded.route.repeat_handler is None


async def test_a_fault_of_ours_reaches_everybody_and_is_not_kept():
    async def fails(call):
        await call.stream(b"one ")
        await asyncio.sleep(0)
        raise KeyError("ours")

    guarded = GuardedRoute(fails)
    calls = [guarded.call(f"req-{i}") for i in range(3)]
    ends = await asyncio.gather(*(guarded.route.repeat_handler(call) for call, _ in calls), return_exceptions=True)
    assert [type(end) for end in ends] == [KeyError] * 3
    assert {body_in(sent) for _, sent in calls} == {b"one "}
    assert (len(guarded.ran), len(guarded.store), guarded.store.held_bytes) == (1, 0, 0)


async def test_cancelled_work_is_not_recorded_and_attached_repeats_fail():
    begun = asyncio.Event()

    async def hangs(call):
        await call.stream(b"one ")
        begun.set()
        await asyncio.Event().wait()

    guarded = GuardedRoute(hangs)
    first, _ = guarded.call("req-1")
    working = asyncio.create_task(guarded.route.repeat_handler(first))
    attached = asyncio.create_task(guarded.route.repeat_handler(guarded.call("req-2")[0]))
    await begun.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    with pytest.raises(Draining):
        await attached
    assert (len(guarded.store), guarded.store.held_bytes) == (0, 0)


async def test_who_was_broken_off_for_its_slowness_holds_up_nobody():
    """The slow one's own request does the work. When the fast one has left as well, nobody is there to go on for."""
    go_on, may_send = asyncio.Event(), asyncio.Event()
    written = 0

    async def endless(call):
        nonlocal written
        await call.stream(b"one ")
        await go_on.wait()
        while True:
            await call.stream(b"x" * PIECE_BYTES)
            written += 1

    guarded = GuardedRoute(endless, max_answer_bytes=1024)
    slow, _ = guarded.call("req-slow", may_send=may_send)
    fast, sent = guarded.call("req-fast")
    working = asyncio.create_task(guarded.route.repeat_handler(slow))
    reading = asyncio.create_task(guarded.route.repeat_handler(fast))
    async with asyncio.timeout(300):
        await until(lambda: len(sent) > 1)
        go_on.set()
        await until(lambda: written > 10)
        may_send.set()
        reading.cancel()
        await asyncio.wait([reading])
        with pytest.raises(IdempotencyConflict, match="too slowly"):
            await working
    with pytest.raises(IdempotencyConflict, match="too large to keep"):
        await guarded.route.repeat_handler(guarded.call("req-late")[0])
    assert guarded.store.held_bytes == ENTRY_BYTES


async def test_a_connection_that_fails_holds_up_nobody():
    async def endless(call):
        while True:
            await call.stream(b"x" * PIECE_BYTES)

    guarded = GuardedRoute(endless, max_answer_bytes=1024)
    call, _ = guarded.call("req-1")

    async def fail(message):
        raise ConnectionError("gone")

    call._send = fail
    async with asyncio.timeout(300):
        with pytest.raises(ConnectionError):
            await guarded.route.repeat_handler(call)


async def until(condition):
    while not condition():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0)
