"""The controller's end of the line to a worker."""

import asyncio

import msgspec
import pytest

from maitred.api.in_flight import InFlightLimiter
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.workers.context_codec import encode_context
from maitred.app.workers.controller_server import ControllerServer, WorkerSession, WorkerSessions
from maitred.core.context import Outcome, RequestContext
from maitred.core.flow import ONE_FLOW
from maitred.core.request import Usage
from maitred.core.tenancy import ANONYMOUS
from maitred.core.timeline import SpanName
from maitred.wire.frames import FrameReader, encode_frame
from maitred.wire.worker_protocol import (
    AdmitRejected,
    AdmitRequest,
    ControllerSnapshot,
    PromptSummary,
    ReleaseRequest,
    SettleReply,
    SettleRequest,
    ToWorker,
)
from tests.support.admission_services import Desk as Admitting
from tests.support.clock import FakeClock
from tests.support.dispatchers import Desk as Dispatching


class Socket(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self._read = FrameReader(ToWorker)
        self.heard = []

    def write(self, data):
        self.heard += self._read.messages(data)


class Observed:
    """Keeps what it is told of ended requests."""

    def __init__(self):
        self.tallies = []

    def on_request_end(self, *tallies):
        self.tallies += tallies


@pytest.fixture
def dispatchers():
    """Of a controller that has no model."""
    return {}


@pytest.fixture
def observed():
    return Observed()


@pytest.fixture
def admitting():
    return Admitting()


@pytest.fixture
async def worker(dispatchers, observed, admitting):
    """What a worker has: a socket to a controller."""
    clock = FakeClock()
    desk = ControllerServer(InFlightLimiter(10), None, None, lambda: ControllerSnapshot(1, frozenset(), {}, {}), clock)
    desk.reconfigure(LocalFlowController(dispatchers, admitting.admission, clock), [observed])
    clerk, socket = WorkerSession(WorkerSessions()), Socket()
    clerk.connection.connection_made(socket)
    clerk.start(desk)
    return clerk, socket


def asks(number):
    return AdmitRequest(
        *(number, "m", ANONYMOUS, f"request-{number}", "chat", "m", 0.0, ONE_FLOW, [PromptSummary(3, [])]),
        *(1, 10, 100, 10, 0, None, None, "max_tokens", "messages"),
    )


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


async def say(clerk, *messages: msgspec.Struct):
    """In one piece, as one system call brings it."""
    clerk.connection.data_received(b"".join(map(encode_frame, messages)))
    await turns()


async def test_who_leaves_in_the_moment_of_asking_holds_nothing(worker):
    clerk, socket = worker
    await say(clerk, asks(1), ReleaseRequest(1, Usage(3, 0), None, cancelled=True))
    assert clerk.requests == 0
    assert not [message for message in socket.heard if isinstance(message, AdmitRejected)]


async def test_who_asks_for_a_model_that_is_gone_is_refused(worker):
    clerk, socket = worker
    await say(clerk, asks(1))
    assert [message.number for message in socket.heard if isinstance(message, AdmitRejected)] == [1]
    assert clerk.requests == 0


def ended(number, outcome=Outcome.FINISHED):
    tally = RequestContext(f"request-{number}", 0.0)
    tally.close(outcome, 200, 1.0)
    return encode_context(tally)


@pytest.mark.parametrize("dispatchers", [{"m": Dispatching().dispatcher}])
async def test_the_story_of_an_answer_is_whole_when_its_end_is_told(worker, observed):
    clerk, _ = worker
    await say(clerk, asks(1))
    # What a request ends with and the news of its end may come in one piece.
    await say(clerk, SettleRequest(1, Usage(3, 2), Outcome.FINISHED, 0.5), ended(1))
    (tally,) = observed.tallies
    assert {SpanName.ADMISSION, SpanName.SETTLEMENT} <= {chapter.name for chapter in tally.timeline.spans}
    assert not clerk._pending_reports


@pytest.mark.parametrize("dispatchers", [{"m": Dispatching().dispatcher}])
async def test_who_leaves_is_billed_as_its_worker_has_counted(worker, admitting):
    clerk, _ = worker
    await say(clerk, asks(1))
    await say(clerk, ReleaseRequest(1, Usage(5, 2), 0.5, cancelled=True))
    (event,) = admitting.ledger.events
    assert (event.outcome, event.prompt_tokens, event.output_tokens) == (Outcome.CANCELLED, 5, 2)


@pytest.mark.parametrize("dispatchers", [{"m": Dispatching().dispatcher}])
async def test_who_is_settled_holds_nothing_any_more(worker, dispatchers):
    clerk, socket = worker
    await say(clerk, asks(1))
    assert (clerk.requests, dispatchers["m"].core.running) == (1, 1)
    await say(clerk, SettleRequest(1, Usage(3, 2), Outcome.FINISHED, 0.5))
    assert SettleReply(1) in socket.heard
    assert (clerk.requests, dispatchers["m"].core.running) == (0, 0)
    await say(clerk, ReleaseRequest(1, Usage(3, 2), 0.5))  # said by a worker that has not heard it yet
    assert socket.heard[-1] == SettleReply(1)


async def test_nothing_is_kept_of_who_leaves_in_the_moment_of_asking(worker, observed):
    clerk, _ = worker
    await say(clerk, asks(1), ReleaseRequest(1, Usage(3, 0), None, cancelled=True), ended(1, Outcome.CANCELLED))
    assert [tally.request_id for tally in observed.tallies] == ["request-1"]
    assert not clerk._pending_reports


async def test_who_has_asked_for_nothing_is_told_of_at_once(worker, observed):
    clerk, _ = worker
    clerk.connection.data_received(encode_frame(ended(1)))
    assert [tally.request_id for tally in observed.tallies] == ["request-1"]
    assert not clerk._pending_reports
