"""The engine's loop over real sockets, with arithmetic in place of a model: the next token is the last one plus one."""

import socket
import threading

import pytest

from maitred.core.clock import SystemClock
from maitred.core.replica import ModelCard
from maitred.core.request import EngineRequest, FinishReason, SamplingParams
from maitred.engine.engine import Engine
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.server import EngineServer
from maitred.wire.frames import Cancel, EngineHello, FrameReader, Pause, Step, Submit, ToGateway, encode_frame
from tests.support.schedulers import make_scheduler

VOCAB_SIZE = 1000
CARD = ModelCard(
    name="counting",
    context_tokens=256,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(0,),
    max_sequences=8,
    kv_capacity_tokens=256,
    max_choices=8,
    dtype="fp32",
    device="cpu",
)


class CountingRunner:
    """Follows every token by its successor; optionally lets each step wait for a permit."""

    def __init__(self):
        self.permits: threading.Semaphore | None = None
        self.held: set[int] = set()

    def execute(self, plan):
        if self.permits is not None:
            self.permits.acquire()
        self.held |= {chunk.sequence.key for chunk in plan.chunks}
        tokens = [[(chunk.sequence.tokens[-1] + 1) % VOCAB_SIZE] for chunk in plan.sampling]
        return tokens, [None] * len(tokens)

    def forget(self, sequence):
        self.held.discard(sequence.key)


class Gateway:
    """A blocking client that speaks frames."""

    def __init__(self, sock):
        self.socket = sock
        self.reader = FrameReader(ToGateway)
        self.inbox: list = []
        self.hello = self.next()

    def next(self):
        while not self.inbox:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self.inbox += self.reader.feed(data)
        return self.inbox.pop(0)

    def rest(self):
        """Everything until the engine closes."""
        while True:
            try:
                yield self.next()
            except EOFError:
                return

    def send(self, *messages):
        self.socket.sendall(b"".join(encode_frame(message) for message in messages))

    def answer(self, request_id):
        """Tokens by choice, until every choice has finished."""
        tokens: dict[int, list[int]] = {}
        finished: dict[int, FinishReason] = {}
        while not finished or len(finished) < len(tokens):
            step = self.next()
            for output in step.outputs:
                if output.request_id == request_id:
                    tokens.setdefault(output.delta.index, []).extend(output.delta.tokens)
                    if output.delta.finish:
                        finished[output.delta.index] = output.delta.finish
        return tokens, finished


class Serving:
    def __init__(self, **options):
        self.pool = BlockPool(64)
        scheduler = make_scheduler(
            self.pool, block_tokens=4, max_sequences=8, step_tokens=32, context_tokens=256, eos_token_ids=(0,)
        )
        self.runner = CountingRunner()
        self.engine = Engine(scheduler, self.runner, SystemClock(), vocab_size=VOCAB_SIZE, max_choices=8)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.server = EngineServer(self.engine, CARD, listener, SystemClock(), **options)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.gateways: list[Gateway] = []

    def connect(self):
        gateway = Gateway(socket.create_connection(self.address, timeout=300))
        self.gateways.append(gateway)
        return gateway

    def idle(self):
        """Waits until nothing runs, and returns the load then."""
        done = threading.Event()
        for _ in range(200):
            if not self.engine.busy:
                break
            done.wait(0.01)
        return self.engine.load()


@pytest.fixture(params=[{}])
def serving(request):
    serving = Serving(**request.param)
    yield serving
    serving.server.stop()
    if serving.runner.permits:
        serving.runner.permits.release(1000)
    for gateway in serving.gateways:
        gateway.socket.close()  # also wakes a server that sleeps
    serving.thread.join(10)
    assert not serving.thread.is_alive()
    assert serving.pool.idle == serving.pool.total
    assert serving.runner.held == set()


def request(request_id, *, prompt=(1,), max_tokens=3, n=1):
    return EngineRequest(
        id=request_id, prompt=list(prompt), sampling=SamplingParams(max_tokens=max_tokens, seed=0, n=n)
    )


def test_hello_then_numbered_steps(serving):
    gateway = serving.connect()
    assert isinstance(gateway.hello, EngineHello)
    assert gateway.hello.card == CARD
    gateway.send(Submit(request("a")))
    steps = [gateway.next() for _ in range(3)]
    assert [step.sequence for step in steps] == [1, 2, 3]
    assert [step.outputs[0].delta.tokens for step in steps] == [[2], [3], [4]]
    assert [step.outputs[0].delta.finish for step in steps] == [None, None, FinishReason.LENGTH]
    assert steps[-1].load.finished == 1


def test_one_message_carries_all_streams(serving):
    serving.runner.permits = threading.Semaphore(0)
    gateway = serving.connect()
    gateway.send(*[Submit(request(str(i), prompt=(i + 1,), max_tokens=1)) for i in range(5)])
    serving.runner.permits.release(100)
    received = []
    while len(received) < 5:
        received += gateway.next().outputs
    assert sorted((output.request_id, output.delta.tokens[0]) for output in received) == [
        (str(i), i + 2) for i in range(5)
    ]


def test_choices_end_apart(serving):
    gateway = serving.connect()
    gateway.send(Submit(request("a", n=3, max_tokens=2)))
    tokens, finished = gateway.answer("a")
    assert tokens == {0: [2, 3], 1: [2, 3], 2: [2, 3]}
    assert set(finished.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (request("a", prompt=()), "no tokens"),
        (request("a", prompt=(VOCAB_SIZE,)), "vocabulary"),
        (request("a", max_tokens=256), "exceed"),
        (request("a", n=9), "at most 8"),
    ],
)
def test_what_can_never_run_is_rejected_with_a_reason(serving, bad, why):
    gateway = serving.connect()
    gateway.send(Submit(bad))
    [rejection] = gateway.next().rejections
    assert rejection.request_id == "a"
    assert why in rejection.message
    gateway.send(Submit(request("good")))
    assert gateway.answer("good")[0] == {0: [2, 3, 4]}


def test_an_id_in_use_is_rejected_and_the_first_goes_on(serving):
    serving.runner.permits = threading.Semaphore(0)
    gateway = serving.connect()
    gateway.send(Submit(request("a")), Submit(request("a", prompt=(50,))))
    serving.runner.permits.release(100)
    steps = [gateway.next() for _ in range(3)]
    [rejection] = [rejection for step in steps for rejection in step.rejections]
    assert "already running" in rejection.message
    assert [output.delta.tokens for step in steps for output in step.outputs] == [[2], [3], [4]]


def test_a_cancel_takes_effect_by_the_next_step(serving):
    serving.runner.permits = threading.Semaphore(1)
    gateway = serving.connect()
    gateway.send(Submit(request("a", max_tokens=100)))
    assert gateway.next().outputs
    gateway.send(Cancel("a"), Cancel("unknown"))
    serving.runner.permits.release(2)
    while (load := gateway.next().load).running:
        pass
    assert load.waiting == 0
    assert load.free_blocks == load.total_blocks
    assert load.cancelled == 1
    assert load.output_tokens <= 3


def test_one_choice_can_be_cancelled(serving):
    serving.runner.permits = threading.Semaphore(1)
    gateway = serving.connect()
    gateway.send(Submit(request("a", n=2, max_tokens=20)))
    gateway.next()
    gateway.send(Cancel("a", 0))
    serving.runner.permits.release(1000)
    tokens: dict[int, int] = {0: 0, 1: 0}
    while tokens[1] < 19:
        for output in gateway.next().outputs:
            tokens[output.delta.index] += len(output.delta.tokens)
    assert tokens[0] <= 2


def test_a_vanished_gateway_leaves_nothing_and_disturbs_nobody(serving):
    serving.runner.permits = threading.Semaphore(0)
    leaving, staying = serving.connect(), serving.connect()
    leaving.send(*[Submit(request(str(i), max_tokens=100, n=2)) for i in range(6)])
    staying.send(Submit(request("0", max_tokens=30)))
    serving.runner.permits.release(4)
    leaving.next()
    leaving.socket.close()
    serving.runner.permits.release(1000)
    assert staying.answer("0")[0] == {0: list(range(2, 32))}
    assert serving.idle().cancelled == 12


def test_garbage_ends_the_connection(serving):
    gateway = serving.connect()
    gateway.socket.sendall(b"\x00\x00\x00\x02{}")
    with pytest.raises(EOFError):
        gateway.next()
    assert serving.connect().hello.card == CARD


def test_draining_finishes_what_runs_and_refuses_the_rest(serving):
    serving.runner.permits = threading.Semaphore(1)
    gateway = serving.connect()
    gateway.send(Submit(request("a", max_tokens=4)))
    assert isinstance(gateway.next(), Step)
    serving.server.drain()
    gateway.send(Submit(request("late")))
    serving.runner.permits.release(1000)
    steps = list(gateway.rest())
    rejections = [rejection for step in steps for rejection in step.rejections]
    tokens = [token for step in steps for output in step.outputs for token in output.delta.tokens]
    assert tokens == [3, 4, 5]
    assert [(rejection.request_id, rejection.retryable) for rejection in rejections] == [("late", True)]
    serving.thread.join(10)
    assert not serving.thread.is_alive()


@pytest.mark.parametrize("serving", [{"drain_grace_s": 0.0}], indirect=True)
def test_a_drain_that_has_no_time_for_it_ends_what_runs(serving):
    serving.runner.permits = threading.Semaphore(1)
    gateway = serving.connect()
    gateway.send(Submit(request("a", max_tokens=4)))
    assert isinstance(gateway.next(), Step)
    serving.server.drain()
    serving.runner.permits.release(1)
    tokens = [token for step in gateway.rest() for output in step.outputs for token in output.delta.tokens]
    assert tokens in ([], [3]), "what the step gives that runs may still come"
    serving.thread.join(10)
    assert not serving.thread.is_alive()


@pytest.mark.parametrize("field", [{"logit_bias": {VOCAB_SIZE: 1.0}}, {"stop_token_ids": (-1,)}])
def test_token_ids_that_no_token_has_are_rejected_wherever_they_stand(serving, field):
    gateway = serving.connect()
    sampling = SamplingParams(max_tokens=1, seed=0, **field)
    gateway.send(Submit(EngineRequest(id="a", prompt=[1], sampling=sampling)))
    [rejection] = gateway.next().rejections
    assert "vocabulary" in rejection.message


def test_a_paused_request_is_not_computed_and_goes_on_where_it_stopped(serving):
    gateway = serving.connect()
    serving.runner.permits = threading.Semaphore(2)
    gateway.send(Submit(request("a", max_tokens=40)))
    assert [gateway.next().outputs[0].delta.tokens for _ in range(2)] == [[2], [3]]
    gateway.send(Pause("a"), Pause("a"), Pause("unknown"), Submit(request("b", max_tokens=20)))
    serving.runner.permits.release(1000)
    steps = []
    while not steps or not steps[-1].load.paused or steps[-1].load.running:
        steps.append(gateway.next())
    assert len([o for step in steps for o in step.outputs if o.request_id == "a"]) <= 1
    assert not serving.engine.busy, "a request that nobody reads must not keep the engine turning"
    assert steps[-1].load.free_blocks == serving.pool.total
    gateway.send(Pause("a", paused=False))
    tokens = [t for step in steps for o in step.outputs if o.request_id == "a" for t in o.delta.tokens]
    assert [2, 3, *tokens, *gateway.answer("a")[0][0]] == list(range(2, 42))


def test_a_paused_request_can_be_cancelled(serving):
    gateway = serving.connect()
    gateway.send(Submit(request("a", max_tokens=200, n=2)), Pause("a"))
    while not gateway.next().load.paused:
        pass
    gateway.send(Cancel("a", 1), Cancel("a"))
    while (load := gateway.next().load).paused:
        pass
    assert load.cancelled == 2
    assert serving.engine.occupied is False


def test_a_report_says_how_many_requests_it_knows_of(serving):
    gateway, other = serving.connect(), serving.connect()
    gateway.send(*[Submit(request(str(i), max_tokens=1)) for i in range(3)])
    while (step := gateway.next()).submits_heard < 3:
        pass
    assert step.submits_heard == 3
    assert other.next().submits_heard == 0


def test_a_deadline_ends_a_request_even_while_the_engine_sleeps(serving):
    gateway = serving.connect()
    serving.runner.permits = threading.Semaphore(1)
    sampling = SamplingParams(max_tokens=200, seed=0)
    gateway.send(Submit(EngineRequest(id="a", prompt=[1], sampling=sampling, deadline_in_s=0.3)))
    assert gateway.next().outputs
    gateway.send(Pause("a"))
    serving.runner.permits.release(1000)
    outputs = []
    while not outputs or outputs[-1].delta.finish is None:
        outputs += gateway.next().outputs
    assert outputs[-1].delta.finish is FinishReason.DEADLINE
    assert outputs[-1].delta.tokens == []
    assert not serving.engine.occupied
