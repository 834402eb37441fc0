"""Scripted engine without a model: the real protocol on a real socket, with scripted answers.

It runs in a test's own process::

    async with ScriptedEngine([ScriptedAnswer(tokens=[7, 8, 9])]) as engine:

It also runs as a separate process, which can be killed::

    python -m maitred.testing.scripted_engine --listen unix:/tmp/engine.sock --script '{"answers": [{"fault": "die"}]}'

It records submissions, cancellations and pauses in the order of arrival.
"""

import argparse
import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import cast

import msgspec
from msgspec.structs import replace

from maitred.core.parent_watch import START_ID_VARIABLE, follow_parent
from maitred.core.replica import LoadReport, ModelCard
from maitred.core.request import EngineRequest
from maitred.testing.script import ECHO, SCRIPTED_CARD, AnswerFault, ChoiceRun, EngineScript, ScriptedAnswer
from maitred.wire.address import Address, TcpAddress, UnixAddress, parse_address
from maitred.wire.frames import (
    PROTOCOL_VERSION,
    Cancel,
    EngineHello,
    FrameReader,
    Pause,
    Ping,
    Pong,
    Rejection,
    SleepCommand,
    Step,
    Submit,
    ToEngine,
    ToGateway,
    TokenOutput,
    encode_frame,
)

SCRIPTED_BLOCK_TOKENS = 16
"""Tokens in each reported KV block; all blocks are always free."""

_epochs = itertools.count(time.time_ns())


class ScriptedEngine:
    """Server of the engine protocol. Enter it to listen; leave it to close every connection.

    Args:
        answers: Answers to the requests in order, the last one repeated; or a function from a request to its answer.
        address: Address to listen at; the default is a free port of this machine, known once the engine is entered.
        card: Card of the model that the engine reports.
        step_s: Pause between two steps.
        die: Function for `AnswerFault.DIE`; the default closes the listener and every connection.

    Attributes:
        submitted: All requests received. An id is the client's own form (the request's id, a slash, a number).
        cancelled: All cancellations received.
        pauses: All pauses and ends of pauses received.
        asleep: Whether the engine was last told to sleep; a request wakes it.
    """

    def __init__(
        self,
        answers: Sequence[ScriptedAnswer] | Callable[[EngineRequest], ScriptedAnswer] = (ECHO,),
        *,
        address: Address = TcpAddress("127.0.0.1", 0),  # noqa: B008 - frozen
        card: ModelCard = SCRIPTED_CARD,
        step_s: float = 0.0,
        die: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self.card = card
        self.submitted: list[EngineRequest] = []
        self.cancelled: list[Cancel] = []
        self.pauses: list[Pause] = []
        self.asleep = False
        self.epoch = next(_epochs)
        self.step_s = step_s
        self.die = die or self.close
        self._counted = LoadReport()
        self._blocks = card.kv_capacity_tokens // SCRIPTED_BLOCK_TOKENS
        self._answers = answers
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "ScriptedEngine":
        loop = asyncio.get_running_loop()
        if isinstance(self.address, UnixAddress):
            self._server = await loop.create_unix_server(lambda: _Connection(self), self.address.path)
        else:
            self._server = await loop.create_server(lambda: _Connection(self), self.address.host, self.address.port)
            self.address = TcpAddress(self.address.host, self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self._server is not None:
            await self._server.wait_closed()
        await self.wait_until(lambda: not self._connections)

    def close(self) -> None:
        """Closes the listener and all connections, which looks like a death from outside."""
        if self._server is not None:
            self._server.close()
        self.drop_connections()

    def drop_connections(self) -> None:
        """Closes every connection, but still accepts new ones."""
        for connection in list(self._connections):
            connection.drop()

    async def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = 300.0) -> None:
        """Waits until a condition on the received messages holds, so that tests need not sleep.

        Raises:
            TimeoutError: The condition did not become true in time.
        """
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def load(self) -> LoadReport:
        """Returns gauges of running requests, and counters of accepted requests and sent tokens."""
        running = sum(connection.running for connection in self._connections)
        return replace(
            self._counted,
            running=running,
            cancelled=len(self.cancelled),
            paused=sum(connection.paused for connection in self._connections),
            free_blocks=self._blocks,
            total_blocks=self._blocks,
            free_sequences=max(0, self.card.max_sequences - running),
            asleep=self.asleep,
        )

    # --- calls from connections ---

    def answer_to(self, request: EngineRequest) -> ScriptedAnswer:
        """Records a request, and returns its scripted answer."""
        self.submitted.append(request)
        self.asleep = False
        self._changed.set()
        if callable(self._answers):
            return self._answers(request)
        return self._answers[min(len(self.submitted), len(self._answers)) - 1]

    def count(self, *, prompt_tokens: int = 0, output_tokens: int = 0, finished: int = 0) -> None:
        """Increases the counters of the engine."""
        counted = self._counted
        self._counted = replace(
            counted,
            prompt_tokens=counted.prompt_tokens + prompt_tokens,
            output_tokens=counted.output_tokens + output_tokens,
            finished=counted.finished + finished,
        )

    def note_cancel(self, cancel: Cancel) -> None:
        """Notes that a request was cancelled."""
        self.cancelled.append(cancel)
        self._changed.set()

    def note_pause(self, pause: Pause) -> None:
        """Records that a reader has fallen behind, or caught up."""
        self.pauses.append(pause)
        self._changed.set()

    def on_connect(self, connection: "_Connection") -> None:
        """Records the connection of a gateway."""
        self._connections.add(connection)
        self._changed.set()

    def on_disconnect(self, connection: "_Connection") -> None:
        """Records the disconnection of a gateway."""
        self._connections.discard(connection)
        self._changed.set()


class _Connection(asyncio.Protocol):
    """Connection of one gateway. Timers make one step after the other while something runs."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine)
        self._transport: asyncio.Transport | None = None
        self._runs: dict[tuple[str, int], ChoiceRun] = {}
        self._paused: set[str] = set()
        self._sequence = 0
        self._submits_heard = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        return len(self._runs)

    @property
    def paused(self) -> int:
        return sum(request_id in self._paused for request_id, _ in self._runs)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it
        self._engine.on_connect(self)
        engine = self._engine
        self._send(
            EngineHello(
                protocol=PROTOCOL_VERSION,
                epoch=engine.epoch,
                pid=os.getpid(),
                card=engine.card,
                load=engine.load(),
                start_id=os.environ.get(START_ID_VARIABLE, ""),
            )
        )

    def data_received(self, data: bytes) -> None:
        for message in self._reader.messages(data):
            match message:
                case Submit(request):
                    self._submits_heard += 1
                    self._start(request)
                case Cancel(request_id, index):
                    self._engine.note_cancel(message)
                    for key in [k for k in self._runs if k[0] == request_id and index in (None, k[1])]:
                        del self._runs[key]
                case Ping(number):
                    self._send(Pong(number))
                    self._send_step([], [])
                case SleepCommand(asleep):
                    self._engine.asleep = asleep
                    self._send_step([], [])
                case Pause(request_id, paused):
                    self._engine.note_pause(message)
                    (self._paused.add if paused else self._paused.discard)(request_id)
                    self._schedule()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._runs.clear()
        self._engine.on_disconnect(self)

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._runs.clear()

    def _start(self, request: EngineRequest) -> None:
        answer = self._engine.answer_to(request)
        if answer.fault is AnswerFault.REJECT:
            self._send_step([], [Rejection(request.id, answer.rejection, answer.retryable)])
            return
        self._engine.count(prompt_tokens=len(request.prompt) * len(request.previous_outputs))
        for index in request.previous_outputs:
            self._runs[request.id, index] = ChoiceRun(request, index, answer)
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is None and self._runs:
            self._timer = asyncio.get_running_loop().call_later(self._engine.step_s, self._step)

    def _step(self) -> None:
        self._timer = None
        fault = next((run.fault for run in self._runs.values() if run.fault not in (None, AnswerFault.STALL)), None)
        if fault is not None:
            self._commit(fault)
            return
        outputs = []
        stalled = 0
        for (request_id, index), run in list(self._runs.items()):
            if run.fault is AnswerFault.STALL or request_id in self._paused:
                stalled += 1
                continue
            delta = run.step()
            if delta is None:
                continue
            outputs.append(TokenOutput(request_id, delta))
            self._engine.count(output_tokens=len(delta.tokens), finished=delta.finish is not None)
            if delta.finish is not None:
                del self._runs[request_id, index]
        if outputs:
            self._send_step(outputs, [])
        if stalled < len(self._runs):
            self._schedule()

    def _commit(self, fault: AnswerFault) -> None:
        """Applies a scripted fault to the connection."""
        match fault:
            case AnswerFault.DROP:
                self.drop()
            case AnswerFault.HALF_FRAME:
                frame = encode_frame(
                    Step(
                        sequence=self._sequence + 1,
                        outputs=[],
                        rejections=[],
                        load=self._engine.load(),
                        submits_heard=self._submits_heard,
                    )
                )
                self._write(frame[: len(frame) // 2])
                self.drop()
            case AnswerFault.GARBAGE:
                self._write(b"\0\0\0\4\xc1\xc1\xc1\xc1")
                self._runs.clear()
            case AnswerFault.SEQUENCE_GAP:
                self._sequence += 1
                self._send_step([], [])
                self._runs.clear()
            case AnswerFault.DIE:
                self._engine.die()
            case AnswerFault.REJECT | AnswerFault.STALL:
                raise AssertionError(f"{fault} is not done to a connection")

    def _send_step(self, outputs: list[TokenOutput], rejections: list[Rejection]) -> None:
        self._sequence += 1
        self._send(
            Step(self._sequence, outputs, rejections, load=self._engine.load(), submits_heard=self._submits_heard)
        )

    def _send(self, message: ToGateway) -> None:
        self._write(encode_frame(message))

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


async def _serve(script: EngineScript, address: Address) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await asyncio.sleep(script.load_s)
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    numbers = itertools.count()
    async with ScriptedEngine(
        lambda _: script.answer(next(numbers)), address=address, step_s=script.step_s, die=die
    ) as engine:
        print(f"scripted engine listens at {engine.address}", flush=True)  # noqa: T201 - what its owner's log shows
        await stop.wait()


def main(arguments: Sequence[str]) -> None:
    """Runs the engine as a process, until SIGTERM or until its parent has ended."""
    parser = argparse.ArgumentParser(prog="maitred.testing.scripted_engine", description=__doc__.partition("\n")[0])
    parser.add_argument("--listen", required=True, help="unix:/path or tcp:host:port")
    parser.add_argument("--script", default="{}", help="a Script as JSON, or @ and the name of a file that holds it")
    options = parser.parse_args(arguments)
    text: str = options.script
    source = Path(text[1:]).read_text() if text.startswith("@") else text
    follow_parent()
    asyncio.run(_serve(msgspec.json.decode(source, type=EngineScript), parse_address(options.listen)))


if __name__ == "__main__":
    main(sys.argv[1:])
