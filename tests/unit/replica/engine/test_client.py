"""The link against a scripted engine in the same process."""
# ruff: noqa: SIM117 - nested contexts say who lives within whom

import asyncio
import logging
from contextlib import asynccontextmanager
from unittest.mock import Mock

import pytest

from maitred.core.errors import Bug, CallerError, ReplicaLost, ReplicaUnavailable
from maitred.core.prefix import BlockUpdate
from maitred.core.replica import LoadReport
from maitred.core.request import EngineRequest, FinishReason, PromptLogprobs, SamplingParams, TokenDelta
from maitred.replica.engine.client import EngineClient
from maitred.replica.engine.connection import EngineConnection
from maitred.replica.engine.stream import PAUSE_AT_TOKENS
from maitred.testing.script import ECHO, SCRIPTED_CARD, AnswerFault, ScriptedAnswer
from maitred.testing.scripted_engine import ScriptedEngine
from maitred.wire.address import TcpAddress, UnixAddress
from maitred.wire.frames import (
    PROTOCOL_VERSION,
    EngineHello,
    FrameReader,
    ResendBlocks,
    Step,
    ToEngine,
    TokenOutput,
    encode_frame,
)

LIMIT_S = 300.0


def request(max_tokens=4, n=1, name="req-1", prompt=(5, 6, 7), **sampling):
    return EngineRequest(name, list(prompt), SamplingParams(max_tokens=max_tokens, seed=0, n=n, **sampling))


@asynccontextmanager
async def linked(answers=(ECHO,), **options):
    async with ScriptedEngine(answers, **options) as engine:
        link = EngineClient(engine.address, expected_downtime_s=lambda: 7.0)
        await link.connect(LIMIT_S)
        try:
            yield engine, link
        finally:
            link.close()
            await engine.wait_until(lambda: engine.load().running == 0)
            assert link.open_streams == 0


async def tokens_of(stream, into=None):
    tokens = {} if into is None else into
    async for batch in stream:
        for delta in batch:
            tokens.setdefault(delta.index, []).extend(delta.tokens)
    return tokens


async def test_a_complete_answer():
    async with linked([ScriptedAnswer(tokens=[9, 8], cached_tokens=3)]) as (engine, link):
        async with link.generate(request()) as stream:
            deltas = [delta async for batch in stream for delta in batch]
        assert [delta.tokens for delta in deltas] == [[9], [8]]
        assert [delta.finish for delta in deltas] == [None, FinishReason.STOP]
        assert deltas[0].cached_tokens == 3
        assert engine.cancelled == []


async def test_over_a_unix_socket(tmp_path):
    async with linked(address=UnixAddress(str(tmp_path / "s"))) as (_, link), link.generate(request()) as stream:
        assert await tokens_of(stream) == {0: [5, 6, 7, 5]}


async def test_a_lagging_reader_gets_everything_in_one_batch():
    async with linked([ScriptedAnswer(tokens=[1, 2, 3]), ScriptedAnswer(tokens=[4])]) as (_, link):
        async with link.generate(request(name="a")) as first, link.generate(request(name="b", max_tokens=1)) as second:
            assert await tokens_of(second) == {0: [4]}
            async with link.generate(request(name="c", max_tokens=1)) as third:
                await tokens_of(third)
            batch = await anext(first)
            assert [token for delta in batch for token in delta.tokens] == [1, 2, 3]
            with pytest.raises(StopAsyncIteration):
                await anext(first)


async def test_requests_of_one_id_do_not_mix():
    async with linked([ScriptedAnswer(tokens=[1, 2]), ScriptedAnswer(tokens=[3, 4])]) as (_, link):
        async with link.generate(request()) as first, link.generate(request()) as second:
            assert await tokens_of(second) == {0: [3, 4]}
            assert await tokens_of(first) == {0: [1, 2]}


async def test_tokens_that_were_travelling_when_a_request_left_do_not_reach_the_next_of_its_id():
    answers = [ScriptedAnswer(tokens=[1] * 50), ScriptedAnswer(tokens=[2, 2])]
    async with linked(answers) as (_, link):
        async with link.generate(request(max_tokens=50)) as stream:
            await anext(stream)
        async with link.generate(request()) as stream:
            assert await tokens_of(stream) == {0: [2, 2]}


async def test_cancelling_a_choice_silences_it_and_leaves_the_others():
    async with linked() as (engine, link):
        async with link.generate(request(max_tokens=20, n=3)) as stream:
            await anext(stream)
            stream.cancel(1)
            stream.cancel(1)
            tokens = await tokens_of(stream)
        assert set(tokens) == {0, 2}
        assert [(cancel.request_id, cancel.index) for cancel in engine.cancelled] == [("req-1/1", 1)]


async def test_cancelling_drops_what_was_not_read_and_ends_a_waiting_reader():
    async with linked([ScriptedAnswer(fault=AnswerFault.STALL, fault_after=1)]) as (engine, link):
        async with link.generate(request()) as stream:
            await anext(stream)
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(tokens_of(stream))
                await asyncio.sleep(0)
                stream.cancel(0)
            assert reader.result() == {}
        assert len(engine.cancelled) <= 1
        await engine.wait_until(lambda: len(engine.cancelled) == 1)


async def test_leaving_the_context_cancels_what_runs():
    async with linked() as (engine, link):
        async with link.generate(request(max_tokens=4000, n=2)) as stream:
            await anext(stream)
        await engine.wait_until(lambda: bool(engine.cancelled))
        assert engine.cancelled[0].index is None
        with pytest.raises(Bug, match="after its context"):
            await anext(stream)


async def test_a_cancelled_reader_cancels_the_request():
    async with linked([ScriptedAnswer(fault=AnswerFault.STALL)]) as (engine, link):

        async def read():
            async with link.generate(request()) as stream:
                await tokens_of(stream)

        task = asyncio.create_task(read())
        await engine.wait_until(lambda: bool(engine.submitted))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert link.open_streams == 0
        await engine.wait_until(lambda: bool(engine.cancelled))


async def test_a_read_that_timed_out_can_be_repeated():
    async with linked([ScriptedAnswer(tokens=[1, 2], wait_steps=3)], step_s=0.02) as (_, link):
        async with link.generate(request()) as stream:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await anext(stream)
            assert await tokens_of(stream) == {0: [1, 2]}


async def test_two_readers_are_refused():
    async with linked([ScriptedAnswer(fault=AnswerFault.STALL)]) as (_, link), link.generate(request()) as stream:
        first = asyncio.create_task(tokens_of(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader"):
            await anext(stream)
        stream.cancel(0)
        assert await first == {}


@pytest.mark.parametrize(("retryable", "error"), [(False, CallerError), (True, ReplicaUnavailable)])
async def test_a_rejection_says_who_must_act(retryable, error):
    async with linked([ScriptedAnswer(fault=AnswerFault.REJECT, rejection="No.", retryable=retryable)]) as (
        engine,
        link,
    ):
        async with link.generate(request()) as stream:
            with pytest.raises(error, match=r"No\."):
                await anext(stream)
        assert engine.cancelled == []


@pytest.mark.parametrize(
    "fault", [AnswerFault.DROP, AnswerFault.HALF_FRAME, AnswerFault.GARBAGE, AnswerFault.SEQUENCE_GAP, AnswerFault.DIE]
)
async def test_every_death_delivers_what_came_and_fails_every_stream(fault):
    answers = [ScriptedAnswer(fault=AnswerFault.STALL, fault_after=1), ScriptedAnswer(fault=fault, fault_after=2)]
    async with ScriptedEngine(answers) as engine:
        link = EngineClient(engine.address, expected_downtime_s=lambda: 7.0)
        await link.connect(LIMIT_S)
        bystander: dict = {}
        victim: dict = {}
        async with link.generate(request(name="a", n=2, max_tokens=9)) as other:
            async with asyncio.timeout(LIMIT_S), link.generate(request(name="b")) as stream:
                with pytest.raises(ReplicaLost):
                    await tokens_of(stream, victim)
                with pytest.raises(ReplicaLost):
                    await anext(stream)
            assert not link.is_ready
            with pytest.raises(ReplicaLost):
                await tokens_of(other, bystander)
            other.cancel(0)
        assert victim == {0: [5, 6]}
        assert bystander == {0: [5], 1: [5]}
        assert link.open_streams == 0
        with pytest.raises(ReplicaUnavailable) as refusal:
            link.card()
        assert refusal.value.retry_after_s == 7.0
        with pytest.raises(ReplicaUnavailable):
            async with link.generate(request()):
                raise AssertionError("nothing may be submitted to a dead engine")
        assert await link.wait_lost()


async def test_an_answer_that_was_complete_is_not_lost():
    async with linked([ScriptedAnswer(tokens=[1])]) as (engine, link), link.generate(request(name="a")) as stream:
        async with link.generate(request(name="b")) as later:
            await tokens_of(later)
        engine.drop_connections()
        await link.wait_lost()
        assert await tokens_of(stream) == {0: [1]}


async def test_one_link_survives_its_engine(tmp_path):
    address = UnixAddress(str(tmp_path / "s"))
    link = EngineClient(address)
    epochs = []
    for _ in range(3):
        async with ScriptedEngine(address=address) as engine:
            await link.connect(LIMIT_S)
            epochs.append(link.epoch)
            async with link.generate(request()) as stream:
                assert len((await tokens_of(stream))[0]) == 4
            engine.close()
            await link.wait_lost()
            assert not link.is_ready
    assert len(set(epochs)) == 3


async def test_connect_waits_for_a_listener_and_gives_up_in_time(tmp_path):
    address = UnixAddress(str(tmp_path / "s"))
    link = EngineClient(address)
    with pytest.raises(ReplicaUnavailable, match=r"No engine answered at unix:.* within 0.05 s"):
        await link.connect(0.05)
    async with asyncio.TaskGroup() as tasks:
        connecting = tasks.create_task(link.connect(LIMIT_S))
        await asyncio.sleep(0)
        async with ScriptedEngine(address=address):
            await connecting
            assert link.is_ready
            with pytest.raises(RuntimeError, match="connected already"):
                await link.connect(LIMIT_S)
            link.close()


async def test_a_peer_that_is_not_an_engine_is_refused(caplog):
    async def speak(_, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        link = EngineClient(TcpAddress("127.0.0.1", server.sockets[0].getsockname()[1]))
        with caplog.at_level(logging.ERROR), pytest.raises(ReplicaUnavailable):
            await link.connect(0.3)
        assert "broke the protocol" in caplog.text
        assert not link.is_ready


async def test_the_load_is_the_last_one_heard():
    async with linked() as (_, link):
        assert link.load().running == 0
        async with link.generate(request(max_tokens=50)) as stream:
            await anext(stream)
            assert link.load().running == 1


async def test_more_tokens_than_were_asked_for_break_the_protocol(caplog):
    connection = EngineConnection()
    connection.connection_made(Mock(spec=asyncio.Transport))
    connection.data_received(encode_frame(EngineHello(PROTOCOL_VERSION, 1, 1, SCRIPTED_CARD, LoadReport())))
    stream = connection.submit(request(max_tokens=3))
    for sequence, tokens in enumerate(([1, 2], [3], [4]), start=1):
        output = TokenOutput(stream.wire_id, TokenDelta(0, tokens))
        connection.data_received(encode_frame(Step(sequence, [output], [], LoadReport())))
    heard = {}
    with pytest.raises(ReplicaLost):
        await tokens_of(stream, heard)
    assert heard == {0: [1, 2, 3]}
    assert "more tokens of req-1/1 than were asked for" in caplog.text


@pytest.mark.parametrize(("positions", "tokens", "amount"), [(3, [], "too many"), (1, [1], "too few"), (2, [1], "")])
async def test_the_log_probabilities_of_a_prompt_are_those_of_its_tokens_and_come_first(
    caplog, positions, tokens, amount
):
    connection = EngineConnection()
    connection.connection_made(Mock(spec=asyncio.Transport))
    connection.data_received(encode_frame(EngineHello(PROTOCOL_VERSION, 1, 1, SCRIPTED_CARD, LoadReport())))
    asked = EngineRequest("r", [5, 6, 7], SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0))
    stream = connection.submit(asked)
    part = PromptLogprobs(1, 0, bytes(4 * positions), bytes(4 * positions), b"", b"")
    deltas = [TokenDelta(0, [], prompt_logprobs=part), TokenDelta(0, tokens, FinishReason.LENGTH if tokens else None)]
    outputs = [TokenOutput(stream.wire_id, delta) for delta in deltas]
    connection.data_received(encode_frame(Step(1, outputs, [], LoadReport())))
    assert (f"sent log-probabilities for {amount} prompt tokens" in caplog.text) is bool(amount)
    if not amount:
        assert [delta.prompt_logprobs for batch in [await anext(stream)] for delta in batch] == [part, None]


async def test_tokens_are_counted_over_connections():
    async with linked() as (engine, link):
        assert link.output_tokens == 0
        for round_ in (1, 2):
            async with link.generate(request(n=2)) as stream:
                await tokens_of(stream)
            assert link.output_tokens == 8 * round_
            link.close()
            await link.wait_lost()
            assert link.output_tokens == 8 * round_
            await link.connect(LIMIT_S)
            assert link.output_tokens == 8 * round_
    async with ScriptedEngine(address=engine.address) as another:
        await link.connect(LIMIT_S)
        assert link.output_tokens == 16
        async with link.generate(request()) as stream:
            await tokens_of(stream)
        assert link.output_tokens == 20
        link.close()
        await another.wait_until(lambda: another.load().running == 0)


async def test_a_paused_request_stands_still_until_it_goes_on():
    async with linked() as (engine, link), link.generate(request(max_tokens=3000)) as stream:
        await anext(stream)
        stream.pause()
        stream.pause()
        await engine.wait_until(lambda: engine.load().paused == 1)
        stream.resume()
        stream.resume()
        await tokens_of(stream)
        assert [pause.paused for pause in engine.pauses] == [True, False]


async def test_a_reader_that_does_not_read_pauses_its_request_by_itself():
    async with linked([ScriptedAnswer(tokens_per_step=100)]) as (engine, link):
        async with link.generate(request(max_tokens=4000)) as stream:
            await engine.wait_until(lambda: engine.load().paused == 1)
            read = [token for delta in await anext(stream) for token in delta.tokens]
            assert PAUSE_AT_TOKENS <= len(read) < 4000
            assert len(read) + len((await tokens_of(stream))[0]) == 4000
        assert engine.pauses[0].paused
        assert [pause.paused for pause in engine.pauses] == [True, False] * (len(engine.pauses) // 2)


async def test_the_load_says_what_it_cannot_know_of():
    async with linked([ScriptedAnswer(wait_steps=3), ECHO]) as (_, link):
        assert link.count_unreported() == 0
        async with link.generate(request(name="a")) as first, link.generate(request(name="b")):
            assert link.count_unreported() == 2
            await anext(first)
            assert link.count_unreported() == 0
        async with link.generate(request(name="c")):
            assert link.count_unreported() == 1
            link.close()
            assert link.count_unreported() == 0


async def test_listeners_hear_of_reports_readiness_and_loss():
    async with ScriptedEngine() as engine:
        link = EngineClient(engine.address)
        heard: list[tuple[bool, int]] = []
        link.on_change(lambda: heard.append((link.is_ready, link.load().output_tokens)))
        await link.connect(LIMIT_S)
        assert heard == [(True, 0)]
        async with link.generate(request()) as stream:
            await tokens_of(stream)
        assert heard[1:] == [(True, count) for count in (1, 2, 3, 4)]
        link.close()
        assert heard[-1][0] is False


async def test_an_engine_that_acknowledges_more_than_was_sent_breaks_the_protocol():
    connection = EngineConnection()
    connection.connection_made(Mock(spec=asyncio.Transport))
    connection.data_received(encode_frame(EngineHello(PROTOCOL_VERSION, 1, 1, SCRIPTED_CARD, LoadReport())))
    connection.data_received(encode_frame(Step(1, [], [], LoadReport(), 1)))
    assert "heard 1 of 0" in connection.ended.result()


async def test_missed_news_of_blocks_are_asked_for():
    heard: list[BlockUpdate] = []
    connection = EngineConnection(on_block_update=heard.append)
    transport = Mock(spec=asyncio.Transport)
    connection.connection_made(transport)

    def step(number, news):
        connection.data_received(encode_frame(Step(number, [], [], LoadReport(), 0, news)))

    def asked():
        written = b"".join(call.args[0] for call in transport.write.call_args_list)
        return FrameReader(ToEngine).feed(written)

    whole, second, fourth, again = (
        BlockUpdate(1, 16, 100, b"a" * 16, whole=True),
        BlockUpdate(2, 16, 100, b"b" * 16),
        BlockUpdate(4, 16, 100, b"d" * 16),
        BlockUpdate(5, 16, 100, b"e" * 16, whole=True),
    )
    connection.data_received(encode_frame(EngineHello(PROTOCOL_VERSION, 1, 1, SCRIPTED_CARD, LoadReport(), whole)))
    step(1, second)
    step(2, None)
    assert heard == [whole, second]
    assert asked() == []
    step(3, fourth)
    step(4, BlockUpdate(5, 16, 100))
    assert heard == [whole, second], "the third was missed, so nothing more is known until the whole comes"
    assert asked() == [ResendBlocks()]
    step(5, again)
    step(6, BlockUpdate(6, 16, 100))
    assert heard[2:] == [again, BlockUpdate(6, 16, 100)]
    assert asked() == [ResendBlocks()]


async def test_it_says_when_its_last_stream_has_ended_whether_the_engine_lives_or_not():
    async with linked() as (_, link):
        idle = []
        link.on_idle = lambda: idle.append(link.open_streams)
        async with link.generate(request(name="a")):
            async with link.generate(request(name="b")):
                pass
            assert not idle
            link.close()
        assert idle == [0]
