"""Answers that go from one replica to another: what these are asked, and what caller, ledger and queue see of it."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from maitred.app.models.router import Router
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import CallerError, DeadlineExceeded, ReplicaLost, ReplicaUnavailable
from maitred.core.flow import PriorityClass
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason, TokenDelta, Usage
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.routing.catalog import Catalog, ServedModel
from tests.support.admission_services import AdmissionSetup
from tests.support.clock import FakeClock
from tests.unit.app.request.test_pipeline import EOS, LENGTH, STOP, TOKENIZER, MemoryReplica, ask, ids, text_of

LOST, REFUSED = ReplicaLost(), ReplicaUnavailable("The engine is shutting down.")
HELLO = ids("Hello there, dear friends")


class Fragile(MemoryReplica):
    """Each life plays its batches, and then fails, or ends well with None."""

    def __init__(self, *lives):
        super().__init__()
        self.lives = list(lives)
        self.down_after = False

    @asynccontextmanager
    async def generate(self, request):
        async with super().generate(request) as stream:
            stream.batches, stream.failure = self.lives.pop(0)
            stream.__class__ = FragileStream
            yield stream


class FragileStream:
    async def __aiter__(self):
        for batch in self.batches:
            yield batch
        if self.failure is not None:
            self.replica.up = not self.replica.down_after
            raise self.failure

    def cancel(self, index):
        self.replica.cancelled.append((self.request.id, index))


class Gateway:
    """Two replicas and everything before them."""

    def __init__(self, *replicas, draw=1.0, **dispatch):
        self.clock = FakeClock()
        self.replicas = replicas
        endpoints = [Endpoint(name, replica) for name, replica in zip("ab", replicas, strict=False)]
        config = DispatchConfig(headroom=0.0, **dispatch)
        self.dispatcher = Dispatcher("m", endpoints, config, self.clock, draw=lambda: draw)
        self.admission_setup = AdmissionSetup()
        catalog = Catalog([ServedModel("m", [replicas[-1]], TOKENIZER)])
        self.pipeline = Pipeline(
            Router(catalog),
            LocalFlowController({"m": self.dispatcher}, self.admission_setup.admission, self.clock),
            clock=self.clock,
        )
        self.context = RequestContext("req", self.clock.now_s)

    async def run(self, asked) -> list[TextDelta]:
        parts: list[TextDelta] = []
        try:
            async with self.pipeline.generate(asked, self.context) as answer:
                async for batch in answer:
                    parts += batch
        finally:
            assert all(replica.open == 0 for replica in self.replicas)
            core = self.dispatcher.core
            assert core.running == core.waiting == 0
            assert all(endpoint_state.credits.request_count == 0 for endpoint_state in core.endpoint_states)
            (self.event,) = self.admission_setup.ledger.events
        return parts


async def test_the_rest_comes_from_the_other_replica_and_is_billed_once():
    first = Fragile(([[TokenDelta(0, HELLO[:1], cached_tokens=1)], [TokenDelta(0, HELLO[1:3])]], LOST))
    second = Fragile(([[TokenDelta(0, HELLO[3:])], [TokenDelta(0, [EOS], STOP)]], None))
    gateway = Gateway(first, second)
    parts = await gateway.run(ask(seed=5))
    assert text_of(parts) == "Hello there, dear friends"
    assert [part.finish for part in parts if part.finish] == [STOP]
    (begun,), (rest,) = first.requests, second.requests
    assert begun.resumes is None
    assert rest.resumes == {0: HELLO[:3]}
    assert (rest.prompt, rest.sampling, rest.flow) == (begun.prompt, begun.sampling, begun.flow)
    tokens = len(HELLO) + 1
    assert gateway.context.usage == Usage(len(begun.prompt), tokens, 1)
    assert gateway.context.recoveries == 1
    event = gateway.event
    assert (event.replica, event.outcome, event.output_tokens) == ("a,b", Outcome.FINISHED, tokens)
    weights = gateway.dispatcher.core.weights
    assert gateway.dispatcher.core.predictor.served == pytest.approx(weights.service(len(begun.prompt), 1, tokens))


@pytest.mark.parametrize("failure", [LOST, REFUSED])
async def test_before_the_first_token_nothing_is_resumed(failure):
    first, second = Fragile(([], failure)), Fragile(([[TokenDelta(0, HELLO, LENGTH)]], None))
    gateway = Gateway(first, second)
    assert text_of(await gateway.run(ask())) == "Hello there, dear friends"
    assert second.requests[0].resumes is None
    assert second.requests[0].sampling.seed == first.requests[0].sampling.seed, "a seed is drawn once"


async def test_choices_that_have_ended_are_not_resumed():
    first = Fragile(
        (
            [
                [
                    TokenDelta(0, HELLO[:2]),
                    TokenDelta(1, HELLO[:1]),
                    TokenDelta(2, HELLO[:1]),
                    TokenDelta(1, [EOS], STOP),
                ]
            ],
            LOST,
        ),
    )
    second = Fragile(([[TokenDelta(2, HELLO[1:], LENGTH)]], None))
    gateway = Gateway(first, second)
    parts = await gateway.run(ask(n=3, stops=(TOKENIZER.decode(HELLO[:2]),)))
    assert {part.index: part.finish for part in parts if part.finish} == dict.fromkeys(range(3), STOP)
    assert second.requests[0].resumes == {2: HELLO[:1]}


async def test_only_prompts_that_are_not_answered_are_submitted_again():
    first = Fragile(([[TokenDelta(0, HELLO[:1], LENGTH)]], None), ([[TokenDelta(0, HELLO[:1])]], LOST))
    second = Fragile(*[([[TokenDelta(0, HELLO[1:], LENGTH)]], None)] * 2)
    gateway = Gateway(first, second)
    parts = await gateway.run(ask(prompt=[[5, 6], [7, 8, 9]]))
    assert text_of(parts, 1) == "Hello there, dear friends"
    assert [request.prompt for request in second.requests][-1] == [7, 8, 9]
    assert gateway.context.completion_tokens == 1 + len(HELLO)


async def test_a_fault_of_the_caller_goes_nowhere_else():
    first, second = Fragile(([], CallerError("No."))), Fragile()
    with pytest.raises(CallerError):
        await Gateway(first, second).run(ask())
    assert not second.requests


async def test_what_fails_everywhere_fails_in_the_end():
    replica = Fragile(*[([[TokenDelta(0, [token])]], LOST) for token in HELLO])
    gateway = Gateway(replica, recoveries=3, draw=0.0)
    with pytest.raises(ReplicaLost):
        await gateway.run(ask())
    assert len(replica.requests) == 4
    assert replica.requests[-1].resumes == {0: HELLO[:3]}
    assert (gateway.event.outcome, gateway.event.cost_nusd) == (Outcome.FAILED, 0)


async def passing(gateway, seconds):
    """Lets time pass once the replica is lost and the request waits again."""
    while gateway.replicas[0].up or not gateway.dispatcher.core.waiting:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    gateway.clock.now_s += seconds
    gateway.dispatcher.refresh_and_dispatch()


@pytest.mark.parametrize("partial", [True, False])
async def test_a_deadline_that_passes_while_no_replica_is_there_ends_what_there_is(partial):
    replica = Fragile(([[TokenDelta(0, HELLO[:2])]], LOST))
    replica.down_after = True
    gateway = Gateway(replica)
    asked = msgspec.structs.replace(ask(), deadline_in_s=4.0, partial=partial)
    time = asyncio.create_task(passing(gateway, 5.0))
    if partial:
        parts = await gateway.run(asked)
        assert text_of(parts) == TOKENIZER.decode(HELLO[:2])
        assert parts[-1].finish is FinishReason.DEADLINE
    else:
        with pytest.raises(DeadlineExceeded):
            await gateway.run(asked)
    await time


async def test_no_replica_comes_back_in_time():
    replica = Fragile(([[TokenDelta(0, HELLO[:2])]], LOST))
    replica.down_after = True
    gateway = Gateway(replica, max_wait_s={PriorityClass.STANDARD: 10.0})
    time = asyncio.create_task(passing(gateway, 11.0))
    with pytest.raises(ReplicaLost):
        await gateway.run(ask())
    await time
    assert gateway.event.outcome is Outcome.FAILED
