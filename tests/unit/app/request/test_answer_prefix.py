"""Answers that another server has begun and an engine of ours ends."""

from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from maitred.app.models.router import Router, read_routes
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.config.tree import Config
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import ReplicaLost
from maitred.core.inference import TextDelta
from maitred.core.request import TokenDelta, Usage
from maitred.core.text_replica import TextBatch
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.routing.catalog import Catalog, ServedModel, TextModel
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig
from tests.support.admission_services import AdmissionSetup
from tests.support.clock import FakeClock
from tests.unit.app.request.test_pipeline import EOS, STOP, TOKENIZER, MemoryReplica, ask, ids, text_of


class BrokenServer(MemoryReplica):
    """A server of others that sends these texts, and breaks off."""

    name = "far-1"

    @property
    def trace_attributes(self):
        return {}

    def is_refusing(self):
        return False

    @asynccontextmanager
    async def generate(self, request):
        self.requests.append(request)
        yield BrokenStream(self.batches)


class BrokenStream:
    ignored_fields = ()

    def __init__(self, texts):
        self.texts = texts

    def listen(self, on_batch):
        pass

    async def __aiter__(self):
        for text in self.texts:
            yield TextBatch([TextDelta(0, text)], chunks=1)
        raise ReplicaLost


async def run(server, engine, asked, allowed=True):
    """The deltas, the failure, the context and the lines of the ledger."""
    clock, setup = FakeClock(), AdmissionSetup()
    config = DispatchConfig(headroom=0.0)
    dispatchers = {
        "far": Dispatcher("far", [Endpoint("far-1", server)], config, clock),
        "m": Dispatcher("m", [Endpoint("here", engine)], config, clock),
    }
    far = TextModel("far", [server], TOKENIZER, continues_at_fallback=allowed)
    catalog = Catalog([far, ServedModel("m", [engine], TOKENIZER)])
    routing = RoutingConfig(fallbacks={"far": FallbackConfig(general=["m"])})
    flow = LocalFlowController(dispatchers, setup.admission, clock)
    pipeline = Pipeline(Router(catalog, read_routes(Config(routing=routing), catalog)), flow, clock=clock)
    context = RequestContext("req", clock.now_s)
    fields = {"prompt": asked.prompts[0], "max_tokens": asked.max_tokens}
    parts, failure = [], None
    try:
        async with pipeline.generate(replace(asked, model="far", to_openai=lambda: fields), context) as answer:
            async for batch in answer:
                parts += batch
    except ReplicaLost as lost:
        failure = lost
    assert engine.open == 0
    assert all(dispatcher.core.running == dispatcher.core.waiting == 0 for dispatcher in dispatchers.values())
    return parts, failure, context, setup.ledger.events


HELLO = "Hello there, dear friends"
BEGUN = "Hello there,"


def rest_of(text=HELLO, begun=BEGUN):
    tokens = ids(text.removeprefix(begun))
    return [[TokenDelta(0, [token])] for token in tokens] + [[TokenDelta(0, [EOS], STOP)]]


async def test_an_engine_ends_the_answer_that_another_server_began():
    engine = MemoryReplica(*rest_of())
    parts, failure, context, events = await run(BrokenServer("Hello ", "there,"), engine, ask(seed=5))
    assert (text_of(parts), failure) == (HELLO, None)
    assert [part.finish for part in parts if part.finish] == [STOP]
    assert [part.text for part in parts if part.continued] == [text_of(parts[2:3])]
    (request,) = engine.requests
    assert request.resumes == {0: ids(BEGUN)}
    assert request.sampling.max_tokens == 20
    tokens = len(ids(BEGUN)) + len(engine.batches)
    assert context.usage == Usage(len(request.prompt), tokens)
    assert (context.continued, context.recoveries, context.fallbacks) == (1, 1, ["general=m"])
    assert [(event.model, event.outcome, event.output_tokens) for event in events] == [
        ("far", Outcome.FAILED, events[0].output_tokens),
        ("m", Outcome.FINISHED, tokens),
    ]


async def test_only_where_the_operator_allows_it():
    engine = MemoryReplica(*rest_of())
    parts, failure, *_ = await run(BrokenServer(BEGUN), engine, ask(), allowed=False)
    assert (text_of(parts), engine.requests) == (BEGUN, [])
    assert isinstance(failure, ReplicaLost)


@pytest.mark.parametrize(
    ("begun", "asked"),
    [
        (f"a{TOKENIZER.decode([EOS], skip_special_tokens=False)}b", ask()),  # it would read a control token
        (BEGUN, ask(max_tokens=2)),  # nothing is left to write
    ],
)
async def test_what_an_engine_cannot_end_stays_broken(begun, asked):
    engine = MemoryReplica(*rest_of())
    parts, failure, *_ = await run(BrokenServer(begun), engine, asked)
    assert (text_of(parts), engine.requests) == (begun, [])
    assert isinstance(failure, ReplicaLost)


async def test_stop_strings_and_minimal_lengths_count_from_the_beginning_of_the_answer():
    begun = ids(BEGUN)
    engine = MemoryReplica(*rest_of())
    asked = ask(stops=("dear",), min_tokens=len(begun))
    parts, failure, *_ = await run(BrokenServer(BEGUN), engine, asked)
    assert (text_of(parts), failure) == ("Hello there, ", None)
    assert parts[-1].stop == "dear"
