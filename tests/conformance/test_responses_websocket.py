"""The Responses API over WebSockets: OpenAI's own client, and one that does what a client should not.

Each turn is a request of its own, with its own reservation, outcome and bill.
"""

import asyncio
import json
import socket
import struct
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import openai
import pytest
import websockets
from websockets.asyncio.client import connect

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.api.config import WebSocketConfig
from maitred.core.context import Outcome
from maitred.core.limits import Limit, LimitKind
from maitred.testing.script import AnswerFault, ScriptedAnswer
from tests.support.gateway import MODEL, TOKENIZER, gateway, tokens_of
from tests.support.stores import response_routes

EOS = 2
TEXT = "Hello there, my friend. How are you?"
ANSWER = ScriptedAnswer(tokens=[*tokens_of(TEXT), EOS])
LONG = ScriptedAnswer(tokens=tokens_of(TEXT) * 20)
NEVER = ScriptedAnswer(fault=AnswerFault.STALL)
MASK = b"\0\0\0\0"
HANDSHAKE = {
    "Host": "127.0.0.1",
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
ENDS = {"response.completed", "response.incomplete", "response.failed", "error"}


@asynccontextmanager
async def serving(folder, answers=(ANSWER,), *, websocket=None, **options):
    """A gateway with WebSockets."""
    async with (
        response_routes(folder) as further,
        gateway(answers, further=further, websocket=WebSocketConfig(**websocket or {}), **options) as system,
    ):
        yield system


@asynccontextmanager
async def opened(system, **options):
    """A WebSocket of the gateway."""
    address = system.url.replace("http", "ws", 1) + "/v1/responses"
    async with asyncio.timeout(300), connect(address, max_size=None, ping_interval=None, **options) as one:
        yield one


def client_of(system):
    return openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)


def creating(text="Hi", **fields):
    return json.dumps({"type": "response.create", "model": MODEL, "input": text, **fields})


async def until_end(one):
    """Events of a turn."""
    events = []
    while not events or events[-1]["type"] not in ENDS:
        events.append(json.loads(await one.recv()))
    return events


async def next_end(one):
    """The last event of the next turn that ends."""
    return (await until_end(one))[-1]


async def turn(one, text="Hi", **fields):
    """The last event of a turn that runs alone."""
    await one.send(creating(text, **fields))
    return await next_end(one)


async def closed(one):
    """Code of the server's close."""
    with suppress(websockets.ConnectionClosedError):
        async for _ in one:
            pass
    return one.close_code


def descriptors():
    """Number of open files of this process."""
    return len([*Path("/proc/self/fd").iterdir()])


def turns(system):
    """The requests that have ended, without handshakes."""
    return [context for context in system.contexts if context.status != 101]


async def nothing_is_left(system):
    await system.wait_until(lambda: system.gate.count == 0 and system.websockets.count == 0)
    await system.engine.wait_until(lambda: system.engine.load().running == 0)
    core = system.dispatcher.core
    assert (core.waiting, core.running, system.link.open_streams) == (0, 0, 0)


async def test_a_turn_compacts_the_conversation_of_its_lane(tmp_path):
    """What is remembered of the lane is short from then on."""

    def answer(request):
        asks = "Summarise the conversation" in TOKENIZER.decode(request.prompt)
        return ScriptedAnswer(tokens=[*tokens_of("They met." if asks else TEXT), EOS])

    async with serving(tmp_path, answer) as system, opened(system) as one:
        begun = await turn(one, "Hello", store=False)
        asked = {"store": False, "context_management": [{"type": "compaction", "compact_threshold": 20}]}
        await one.send(creating("And?", previous_response_id=begun["response"]["id"], generate=False, **asked))
        prepared = (await next_end(one))["response"]
        assert prepared["output"] == [], "nothing is summarised for it"
        await one.send(creating([], previous_response_id=prepared["id"], **asked))
        events = await until_end(one)
        assert [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"] == [
            *("compaction", "message")
        ]
        await turn(one, "Sure?", store=False, previous_response_id=events[-1]["response"]["id"])
        read = TOKENIZER.decode(system.engine.submitted[-1].prompt)
        assert "Hello" not in read.replace(TEXT, "")
        assert sorted(("They met.", "And?", TEXT, "Sure?"), key=read.index) == ["They met.", "And?", TEXT, "Sure?"]
        assert len(system.ledger.events) == 5


async def test_the_official_client_goes_on_with_what_is_stored_nowhere(tmp_path):
    async with serving(tmp_path) as system:
        async with client_of(system) as client:
            async with client.responses.connect() as connection:
                await connection.response.create(model=MODEL, input="Hi", store=False, instructions="Be kind.")
                events = [event async for event in _turn_of(connection)]
                first = events[-1].response
                assert [event.sequence_number for event in events] == [*range(len(events))]
                assert (first.output_text, first.status, first.store) == (TEXT, "completed", False)
                assert events[0].headers["x-request-id"] == turns(system)[0].request_id
                assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
                asked = [{"role": "user", "content": "And?"}]
                await connection.response.create(
                    model=MODEL, input=asked, store=False, previous_response_id=first.id, instructions="Be kind."
                )
                second = [event async for event in _turn_of(connection)][-1].response
                assert second.previous_response_id == first.id
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model=MODEL, input="So?", previous_response_id=second.id)
            assert refused.value.code == "previous_response_not_found", "another connection does not know it"
            await client.responses.create(
                model=MODEL, instructions="Be kind.", input=[{"role": "user", "content": "Hi"}, first.output[0], *asked]
            )
        assert system.engine.submitted[1].prompt == system.engine.submitted[2].prompt
        await nothing_is_left(system)
        assert len({context.request_id for context in turns(system)}) == 4


async def _turn_of(connection):
    async for event in connection:
        yield event
        if event.type in ENDS:
            return


async def test_a_response_that_is_stored_is_found_on_any_connection(tmp_path):
    async with serving(tmp_path) as system, opened(system) as one:
        first = (await turn(one))["response"]
        whole = await system.client.post(
            "/v1/responses", json={"model": MODEL, "input": "And?", "previous_response_id": first["id"]}
        )
        assert whole.status_code == 200
        second = await turn(one, "So?", previous_response_id=whole.json()["id"])
        assert second["response"]["previous_response_id"] == whole.json()["id"]


async def test_lanes_run_beside_each_other_and_the_turns_of_one_after_each_other(tmp_path):
    """The lane of a turn that never ends delays no other; what comes for it waits."""

    def answer(request):
        return NEVER if len(system.engine.submitted) in (1, 5) else ANSWER

    async with serving(tmp_path, answer, websocket={"max_queued_turns": 2, "max_lanes": 2}) as system:
        async with opened(system) as one:
            await one.send(creating(stream_id="slow"))
            await system.engine.wait_until(lambda: len(system.engine.submitted) == 1)
            for text in ("second", "third", "fourth"):
                await one.send(creating(text, stream_id="slow"))
            full = await next_end(one)
            assert (full["stream_id"], full["status"], full["error"]["code"]) == ("slow", 429, "queue_full")
            for text in ("a", "b"):
                await one.send(creating(text, stream_id="a.b_c-1"))
            for _ in range(2):
                end = await next_end(one)
                assert (end["type"], end["stream_id"]) == ("response.completed", "a.b_c-1")
            assert len(system.engine.submitted) == 3, "what waits behind the slow turn has not begun"
            assert (await turn(one))["type"] == "response.completed"
            await one.send(creating(stream_id="also-slow"))
            await system.engine.wait_until(lambda: len(system.engine.submitted) == 5)
            third = await turn(one, stream_id="third")
            assert (third["stream_id"], third["error"]["param"]) == ("third", "stream_id")
            unnamed = await turn(one, stream_id="no name of a lane")
            assert (unnamed["status"], unnamed["error"]["param"]) == (400, "stream_id")
        await nothing_is_left(system)
        assert len(system.engine.submitted) == 5, "turns that waited go with their connection"


async def test_what_is_wrong_is_said_and_the_connection_goes_on(tmp_path):
    async with serving(tmp_path) as system, opened(system) as one:
        for message, param in (
            ("{", None),
            ("[]", None),
            (json.dumps({"type": "session.update"}), "type"),
            (creating(stream=False), "stream"),
            (creating(background=True), "background"),
            (creating(generate="no"), "generate"),
            (json.dumps({"type": "response.create", "input": "Hi"}), "model"),
            (creating(previous_response_id="resp_none"), "previous_response_id"),
        ):
            await one.send(message)
            (failure,) = await until_end(one)
            assert (failure["type"], failure["status"], failure["error"]["param"]) == ("error", 400, param), failure
            assert failure["error"]["type"] == "invalid_request_error"
        assert failure["error"]["code"] == "previous_response_not_found"
        missing = await turn(one, model="none", stream_id="lane")
        assert (missing["status"], missing["error"]["code"], missing["stream_id"]) == (404, "model_not_found", "lane")
        assert missing["error"]["headers"]["x-request-id"] == system.contexts[-1].request_id
        await one.send(json.dumps({"type": "response.steer", "previous_response_id": "resp_1", "input": "Stop"}))
        steered = json.loads(await one.recv())
        assert (steered["type"], steered["error"]["code"]) == ("response.steer.failed", "steering_not_supported")
        assert steered["steer"] == {"previous_response_id": "resp_1", "input": "Stop"}
        assert (await turn(one))["response"]["status"] == "completed"


async def test_a_warm_up_prepares_the_prompt_and_the_next_turn_goes_on_with_it(tmp_path):
    async with serving(tmp_path) as system, opened(system) as one:
        await one.send(creating("You know Ada.", generate=False, store=False))
        events = await until_end(one)
        assert [event["type"] for event in events] == [
            *("response.created", "response.in_progress", "response.completed")
        ]
        prepared = events[-1]["response"]
        assert (prepared["output"], prepared["usage"]["output_tokens"]) == ([], 1)
        assert system.engine.submitted[0].sampling.max_tokens == 1
        second = await turn(one, "Who is she?", previous_response_id=prepared["id"], store=False)
        assert second["response"]["status"] == "completed"
        warm, asked = (request.prompt for request in system.engine.submitted)
        assert asked[: len(warm) - 8] == warm[: len(warm) - 8], "the turn begins as the warm-up"


async def test_a_budget_that_ends_within_a_connection_is_not_overspent(tmp_path):
    """Turns of four lanes race for a budget; each refusal is an event, and later turns are served from a larger one."""
    prices = AdmissionConfig(prices={MODEL: PriceConfig(output=1_000_000.0)})
    budget = Limit(id="day", subject="*", kind=LimitKind.USD_PER_DAY, value=30 * 10**9)
    async with serving(tmp_path, [LONG], admitting=prices, limited=[budget]) as system, opened(system) as one:
        for number in range(8):
            await one.send(creating(stream_id=f"lane{number % 4}", max_output_tokens=8))
        ends = [await next_end(one) for _ in range(8)]
        refused = [end for end in ends if end["type"] == "error"]
        assert refused
        assert {end["error"]["code"] for end in refused} <= {"insufficient_quota", "rate_limit_exceeded"}
        assert {end["status"] for end in refused} == {429}
        served = [end["response"]["usage"]["output_tokens"] for end in ends if end["type"] != "error"]
        assert sum(served) == sum(event.output_tokens for event in system.ledger.events)
        assert 0 < sum(served) <= 30
        outcomes = [context.outcome for context in turns(system)]
        assert outcomes.count(Outcome.REFUSED) == len(refused)
        system.admission._limits.limits, system.admission._limits.edition = (), 1
        assert (await turn(one, max_output_tokens=8))["response"]["status"] == "incomplete"


async def test_a_turn_that_breaks_says_so_and_ends_as_failed(tmp_path):
    broken = ScriptedAnswer(tokens=ANSWER.tokens, fault=AnswerFault.DIE, fault_after=3)
    async with serving(tmp_path, [broken]) as system, opened(system) as one:
        await one.send(creating(stream_id="lane"))
        *before, failure = await until_end(one)
        failed = json.loads(await one.recv())
        assert (failure["status"], failure["error"]["code"], failure["stream_id"]) == (502, "replica_lost", "lane")
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        numbers = [event["sequence_number"] for event in (*before, failure, failed)]
        assert numbers == [*range(len(numbers))]
        (unavailable,) = [await turn(one)]
        assert (unavailable["status"], unavailable["error"]["headers"]["retry-after"]) == (503, "1")


async def test_an_abrupt_end_cancels_all_turns_and_leaves_nothing(tmp_path):
    async with serving(tmp_path, [LONG], step_s=0.02) as system:
        before = descriptors()
        async with opened(system) as one:
            for number in range(3):
                await one.send(creating(stream_id=f"lane{number}"))
            await system.wait_until(lambda: system.engine.load().output_tokens > 4)
            one.transport.abort()
            await system.engine.wait_until(lambda: len(system.engine.cancelled) == 3)
        await nothing_is_left(system)
        assert [context.outcome for context in turns(system)] == [Outcome.CANCELLED] * 3
        assert sum(event.output_tokens for event in system.ledger.events) == sum(
            context.completion_tokens for context in turns(system)
        )
        await system.wait_until(lambda: descriptors() <= before)


async def test_a_client_that_closes_gets_the_same_code_back(tmp_path):
    async with serving(tmp_path, [NEVER]) as system:
        async with opened(system) as one:
            await one.send(creating())
            await system.engine.wait_until(lambda: len(system.engine.submitted) == 1)
            await one.close(1000, "done")
            assert one.close_code == 1000
        await system.engine.wait_until(lambda: len(system.engine.cancelled) == 1)
        await nothing_is_left(system)


async def test_a_drain_cuts_no_turn_and_closes_between_turns(tmp_path):
    def answer(request):
        return NEVER if len(system.engine.submitted) == 2 else LONG

    async with serving(tmp_path, answer, step_s=0.01) as system:
        async with opened(system) as idle, opened(system) as busy:
            await busy.send(creating(max_output_tokens=40, stream_id="runs"))
            await system.engine.wait_until(lambda: len(system.engine.submitted) == 1)
            await busy.send(creating(stream_id="stalls"))
            await system.engine.wait_until(lambda: len(system.engine.submitted) == 2)
            system.gate.close()
            assert await closed(idle) == 1001
            await busy.send(creating(stream_id="late"))
            ends = {end["stream_id"]: end for end in (await next_end(busy), await next_end(busy))}
            assert (ends["late"]["status"], ends["late"]["error"]["code"]) == (503, "draining")
            assert ends["runs"]["response"]["usage"]["output_tokens"] == 40
            system.gate.cancel_all()
            cut = await next_end(busy)
            assert (cut["stream_id"], cut["error"]["code"]) == ("stalls", "draining")
            assert await closed(busy) == 1001
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with opened(system):
                pass
        assert refused.value.response.status_code == 503
        await nothing_is_left(system)


async def test_a_revoked_key_ends_its_connections_with_their_turns(tmp_path):
    async with serving(tmp_path, [NEVER]) as system, opened(system) as idle, opened(system) as busy:
        await busy.send(creating())
        await system.engine.wait_until(lambda: len(system.engine.submitted) == 1)
        system.websockets.close_revoked(lambda principal: True)
        assert system.websockets.count == 2
        system.gate.cancel_revoked(lambda principal: False)
        system.websockets.close_revoked(lambda principal: False)
        for one in (idle, busy):
            refusal = json.loads(await one.recv())
            assert (refusal["status"], refusal["error"]["code"]) == (401, "invalid_api_key")
            assert await closed(one) == 1008
        await nothing_is_left(system)


async def test_a_lifetime_ends_with_the_code_that_clients_know(tmp_path):
    async with serving(tmp_path, websocket={"lifetime_s": 0.05}) as system:
        async with opened(system) as one:
            expired = await next_end(one)
            assert (expired["status"], expired["error"]["code"]) == (400, "websocket_connection_limit_reached")
            assert await closed(one) == 1000
        await nothing_is_left(system)


async def test_handshakes_that_are_refused(tmp_path):
    async with serving(tmp_path, websocket={"max_per_key": 1}) as system:
        plain = await system.client.get("/v1/responses")
        assert (plain.status_code, plain.json()["error"]["code"]) == (426, "upgrade_required")
        assert plain.headers["upgrade"] == "websocket"
        for headers, status in (
            ({"Origin": "https://evil.example"}, 403),
            ({"Host": "evil.example"}, 403),
            ({"Sec-WebSocket-Version": "8"}, 426),
            ({"Connection": "keep-alive"}, 426),
            ({"Sec-WebSocket-Key": "short"}, 400),
            ({"Idempotency-Key": "once"}, 400),
            ({"Origin": "http://localhost:3000", "Connection": "keep-alive, Upgrade"}, 101),
        ):
            answer = await _raw(system, headers)
            assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in answer
        await system.wait_until(lambda: system.websockets.count == 0)
        async with opened(system):
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with opened(system):
                    pass
            assert refused.value.response.status_code == 429
        await system.wait_until(lambda: system.websockets.count == 0)
        async with opened(system) as one:
            assert (await turn(one))["response"]["status"] == "completed"


def handshake(headers=()):
    """A handshake as it is sent."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**HANDSHAKE, **dict(headers)}.items())
    return f"GET /v1/responses HTTP/1.1\r\n{lines}\r\n".encode()


async def _raw(system, headers, frames=b""):
    """What a connection answers to a handshake, until the server or the end of its answer ends it."""
    host, _, port = system.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(handshake(headers))
    answer = await reader.readuntil(b"\r\n\r\n")
    if frames:
        writer.write(frames)
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_frames_that_break_the_protocol_get_its_codes(tmp_path):
    async with serving(tmp_path, max_body_bytes=2048) as system:
        for frames, code in (
            (b"\x82\x81" + MASK + b"a", 1003),  # binary
            (b"\x81\x01a", 1002),  # not masked
            (b"\xf1\x81" + MASK + b"a", 1002),  # reserved bits
            (b"\x80\x81" + MASK + b"a", 1002),  # a continuation of nothing
            (b"\x81\x82" + MASK + b"\xc3\x28", 1007),  # not UTF-8
            (b"\x81\xfe\x08\x01" + MASK + b"a" * 2049, 1009),  # longer than a body may be
            (b"\x01\xfe\x04\x00" + MASK + b"a" * 1024 + b"\x80\xfe\x04\x01" + MASK + b"a" * 1025, 1009),  # in pieces
        ):
            answer = await _raw(system, {}, frames)
            assert (answer[:1], struct.unpack("!H", answer[2:4])) == (b"\x88", (code,)), (frames[:8], answer)
        async with opened(system) as one:
            pong = await one.ping(b"are you there")
            await pong
            assert (await turn(one))["response"]["status"] == "completed"
        await nothing_is_left(system)


async def test_a_client_that_answers_no_ping_is_ended(tmp_path):
    async with serving(tmp_path, [NEVER], websocket={"ping_s": 0.1}) as system:
        host, _, port = system.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(handshake())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_masked(creating()))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        await nothing_is_left(system)


def _masked(text):
    """A frame of a client, for messages of 126 bytes to 64 KiB."""
    data = text.encode().ljust(126)
    return b"\x81\xfe" + struct.pack("!H", len(data)) + MASK + data


async def test_nothing_more_is_read_of_a_client_that_does_not_read(tmp_path):
    """Its messages wait unread, so they fill no memory with errors; each is answered once it reads."""
    count = 20_000
    async with serving(tmp_path, stall_grace_s=3600.0) as system, unread(system) as (reader, writer):
        writer.write((b"\x81\x81" + MASK + b"{") * count)
        (connection,) = system.server.server_state.connections
        await system.wait_until(lambda: not connection.writable)
        await system.wait_until(lambda: connection.transport.get_write_buffer_size() > 0)
        assert connection.transport.get_write_buffer_size() < 128 * 1024
        writer.transport.resume_reading()
        answered = 0
        while answered < count:
            answered += (await reader.readuntil(b'"type":"error"')).count(b'"type":"error"')
    await nothing_is_left(system)


@asynccontextmanager
async def unread(system):
    """A WebSocket whose client reads nothing, and has little room for what it does not read."""
    host, _, port = system.url.removeprefix("http://").partition(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.to_thread(raw.connect, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=raw)
    try:
        writer.write(handshake())
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_a_client_that_does_not_read_is_waited_for_and_then_cut(tmp_path):
    endless = ScriptedAnswer(tokens=tokens_of(TEXT) * 3000, tokens_per_step=50)
    options = {"stall_grace_s": 0.5, "unread_tokens": 64}
    async with serving(tmp_path, [endless], **options) as system, unread(system) as (_, writer):
        for number in range(16 * 9):
            writer.write(_masked(creating(max_output_tokens=400, stream_id=f"lane{number % 16}")))
        await system.wait_until(lambda: any(context.stalled for context in system.contexts))
        await nothing_is_left(system)
