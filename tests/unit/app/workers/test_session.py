"""The controller's end of the line to a worker."""

import asyncio

import msgspec
import pytest

from maitred.api.in_flight import InFlightLimiter
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.workers.context_codec import encode_context
from maitred.app.workers.controller_server import ControllerServer, WorkerSession, WorkerSessions
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import CachedAnswerTooLong
from maitred.core.flow import ONE_FLOW
from maitred.core.request import Usage
from maitred.core.tenancy import ANONYMOUS
from maitred.core.timeline import SpanName
from maitred.wire.error_codec import decode_error
from maitred.wire.frames import FrameReader, encode_frame
from maitred.wire.worker_protocol import (
    AdmitAccepted,
    AdmitRejected,
    AdmitRequest,
    ControllerSnapshot,
    LimitQuery,
    LimitReply,
    PromptSummary,
    ReleaseRequest,
    ResumeGrant,
    SettleReply,
    SettleRequest,
    ToWorker,
)
from tests.support.admission_services import ALICE, AdmissionSetup, limit
from tests.support.clock import FakeClock
from tests.support.dispatchers import DispatchSetup


class Socket(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self._read = FrameReader(ToWorker)
        self.received = []

    def write(self, data):
        self.received += self._read.messages(data)


class Observed:
    """Keeps the contexts of ended requests."""

    def __init__(self):
        self.contexts = []

    def on_request_end(self, *contexts):
        self.contexts += contexts


@pytest.fixture
def dispatchers():
    """Of a controller that has no model."""
    return {}


@pytest.fixture
def observed():
    return Observed()


@pytest.fixture
def admission_setup():
    return AdmissionSetup()


@pytest.fixture
async def worker(dispatchers, observed, admission_setup):
    """What a worker has: a socket to a controller."""
    clock = FakeClock()
    controller = ControllerServer(
        InFlightLimiter(10), None, None, lambda: ControllerSnapshot(1, frozenset(), {}, {}), clock, None
    )
    controller.reconfigure(LocalFlowController(dispatchers, admission_setup.admission, clock), [observed])
    session, socket = WorkerSession(WorkerSessions()), Socket()
    session.connection.connection_made(socket)
    session.start(controller)
    return session, socket


def asks(number):
    return AdmitRequest(
        *(number, "m", ANONYMOUS, f"request-{number}", "chat", "m", 0.0, ONE_FLOW, [PromptSummary(3, [])]),
        *(1, 10, 100, 10, 0, None, None, "max_tokens", "messages"),
    )


def asks_for_hit(number, pool="m"):
    return msgspec.structs.replace(asks(number), pool=pool, cache="exact", cached_tokens=2)


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


async def send(session, *messages: msgspec.Struct):
    """In one piece, as one system call brings it."""
    session.connection.data_received(b"".join(map(encode_frame, messages)))
    await turns()


async def test_who_leaves_in_the_moment_of_asking_holds_nothing(worker):
    session, socket = worker
    await send(session, asks(1), ReleaseRequest(1, Usage(3, 0), None, cancelled=True))
    assert session.requests == 0
    assert not [message for message in socket.received if isinstance(message, AdmitRejected)]


async def test_who_asks_for_a_model_that_is_gone_is_refused(worker):
    session, socket = worker
    await send(session, asks(1))
    assert [message.number for message in socket.received if isinstance(message, AdmitRejected)] == [1]
    assert session.requests == 0


def ended(number, outcome=Outcome.FINISHED):
    context = RequestContext(f"request-{number}", 0.0)
    context.close(outcome, 200, 1.0)
    return encode_context(context)


@pytest.mark.parametrize("dispatchers", [{"m": DispatchSetup().dispatcher}])
async def test_the_timeline_is_complete_when_the_end_of_a_request_is_reported(worker, observed):
    session, _ = worker
    await send(session, asks(1))
    # What a request ends with and the news of its end may come in one piece.
    await send(session, SettleRequest(1, Usage(3, 2), Outcome.FINISHED, 0.5), ended(1))
    (context,) = observed.contexts
    assert {SpanName.ADMISSION, SpanName.SETTLEMENT} <= {span.name for span in context.timeline.spans}
    assert not session._pending_reports


@pytest.mark.parametrize("dispatchers", [{"m": DispatchSetup().dispatcher}])
async def test_who_leaves_is_billed_as_its_worker_has_counted(worker, admission_setup):
    session, _ = worker
    await send(session, asks(1))
    await send(session, ReleaseRequest(1, Usage(5, 2), 0.5, cancelled=True))
    (event,) = admission_setup.ledger.events
    assert (event.outcome, event.prompt_tokens, event.output_tokens) == (Outcome.CANCELLED, 5, 2)


@pytest.mark.parametrize("dispatchers", [{"m": DispatchSetup().dispatcher}])
async def test_who_is_settled_holds_nothing_any_more(worker, dispatchers):
    session, socket = worker
    await send(session, asks(1))
    assert (session.requests, dispatchers["m"].core.running) == (1, 1)
    await send(session, SettleRequest(1, Usage(3, 2), Outcome.FINISHED, 0.5))
    assert SettleReply(1) in socket.received
    assert (session.requests, dispatchers["m"].core.running) == (0, 0)
    await send(session, ReleaseRequest(1, Usage(3, 2), 0.5))  # from a worker that has not received the end yet
    assert socket.received[-1] == SettleReply(1)


async def test_an_answer_from_a_cache_needs_no_replica(dispatchers, worker, admission_setup):
    setup = DispatchSetup()
    for replica in setup.replicas:
        replica.up = False
    dispatchers["m"] = setup.dispatcher
    session, socket = worker
    await send(session, asks_for_hit(1))
    (accepted,) = [message for message in socket.received if isinstance(message, AdmitAccepted)]
    assert (accepted.max_tokens, accepted.queue_position, accepted.expected_tokens) == (2, None, 0)
    assert (session.requests, len(admission_setup.ledger.begun), setup.dispatcher.core.running) == (1, 1, 0)
    await send(session, SettleRequest(1, Usage(3, 2), Outcome.FINISHED, 0.5))
    assert socket.received[-1] == SettleReply(1)
    (event,) = admission_setup.ledger.events
    assert (event.cache, event.saved_tokens, event.outcome) == ("exact", 5, Outcome.FINISHED)
    assert session.requests == 0


@pytest.mark.parametrize("dispatchers", [{"m": DispatchSetup().dispatcher}])
async def test_who_leaves_during_an_answer_from_a_cache_holds_nothing(worker, admission_setup):
    session, _ = worker
    await send(session, asks_for_hit(1))
    await send(session, ReleaseRequest(1, Usage(3, 1), 0.5, cancelled=True))
    (event,) = admission_setup.ledger.events
    assert (event.outcome, event.saved_tokens, event.output_tokens) == (Outcome.CANCELLED, 4, 0)
    assert session.requests == 0


@pytest.mark.parametrize("dispatchers", [{"m": DispatchSetup().dispatcher}])
@pytest.mark.parametrize("admission_setup", [AdmissionSetup(limit("*", "output_tokens", 1))])
async def test_a_worker_hears_that_a_cached_answer_is_too_long(worker):
    session, socket = worker
    await send(session, asks_for_hit(1))
    (rejected,) = [message for message in socket.received if isinstance(message, AdmitRejected)]
    assert type(decode_error(rejected.error)) is CachedAnswerTooLong
    assert session.requests == 0


@pytest.mark.parametrize("dispatchers", [{"m": DispatchSetup().dispatcher}])
@pytest.mark.parametrize("ended", [None, SettleRequest(1, Usage(3, 2), Outcome.FINISHED, 0.5)])
async def test_an_answer_from_a_cache_goes_on_with_the_next_controller(worker, dispatchers, admission_setup, ended):
    session, socket = worker
    controller = session.controller
    grant = ResumeGrant(asks_for_hit(1), "use-1", 2, "", Usage(3, 1), 0.5, ended)
    controller.surviving_leases = {"use-1"}
    await session.resume(controller, grant)
    assert not [message for message in socket.received if isinstance(message, AdmitRejected)]
    if ended is None:
        assert (session.requests, dispatchers["m"].core.running) == (1, 0)
        await send(session, SettleRequest(1, Usage(3, 2), Outcome.FINISHED, 0.5))
    (event,) = admission_setup.ledger.events
    assert (event.id, event.cache, event.saved_tokens) == ("use-1", "exact", 5)
    assert session.requests == 0


async def test_an_answer_from_a_cache_ends_though_its_grant_is_lost(worker):
    session, socket = worker
    session.decline_resume(ResumeGrant(asks_for_hit(1), "use-1", 2, "", Usage(3, 1), 0.5))
    await turns()
    assert socket.received[-1] == SettleReply(1)


async def test_nothing_is_kept_of_who_leaves_in_the_moment_of_asking(worker, observed):
    session, _ = worker
    await send(session, asks(1), ReleaseRequest(1, Usage(3, 0), None, cancelled=True), ended(1, Outcome.CANCELLED))
    assert [context.request_id for context in observed.contexts] == ["request-1"]
    assert not session._pending_reports


async def test_a_request_that_needed_no_admission_is_reported_at_once(worker, observed):
    session, _ = worker
    session.connection.data_received(encode_frame(ended(1)))
    assert [context.request_id for context in observed.contexts] == ["request-1"]
    assert not session._pending_reports


async def test_a_worker_asks_for_the_limits_before_it_decodes_a_body(dispatchers, observed):
    clock = FakeClock()
    setup = AdmissionSetup(limit("tenant:acme", "concurrent_requests", 1))
    controller = ControllerServer(
        InFlightLimiter(10), None, None, lambda: ControllerSnapshot(1, frozenset(), {}, {}), clock, None
    )
    controller.reconfigure(LocalFlowController(dispatchers, setup.admission, clock), [observed])
    session, socket = WorkerSession(WorkerSessions()), Socket()
    session.connection.connection_made(socket)
    session.start(controller)
    await send(session, LimitQuery(1, ALICE, 1))
    async with setup.admit():
        await send(session, LimitQuery(2, ALICE, 1))
    replies = [message for message in socket.received if isinstance(message, LimitReply)]
    assert [reply.number for reply in replies] == [1, 2]
    assert replies[0].error is None
    assert replies[1].error.kind == "RateLimited"
    assert replies[1].error.limit.limit == "concurrent_requests"
