"""The controller's end of the line to a worker."""

import asyncio

import msgspec
import pytest

from maitred.api.gate import Gate
from maitred.app.control import LocalControl
from maitred.app.workers.clerk import Clerk
from maitred.app.workers.desk import Desk
from maitred.app.workers.lobby import Lobby
from maitred.core.flow import ONE_FLOW
from maitred.core.request import Usage
from maitred.core.tenancy import ANONYMOUS
from maitred.wire.desk import Asks, Leaves, Refused, ToWorker, Welcome, WrittenPrompt
from maitred.wire.frames import FrameReader, encode_frame
from tests.admission_desk import Desk as Admitting
from tests.clock import FakeClock


class Socket(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self._read = FrameReader(ToWorker)
        self.heard = []

    def write(self, data):
        self.heard += self._read.messages(data)


@pytest.fixture
async def worker():
    """What a worker has: a socket to a controller that has no model."""
    clock = FakeClock()
    desk = Desk(Gate(10), None, None, lambda: Welcome(1, frozenset(), {}, {}), clock)
    desk.adopt(LocalControl({}, Admitting().admission, clock), [])
    clerk, socket = Clerk(Lobby()), Socket()
    clerk.line.connection_made(socket)
    clerk.attend(desk)
    return clerk, socket


def asks(number):
    return Asks(
        *(number, "m", ANONYMOUS, f"request-{number}", "chat", "m", 0.0, ONE_FLOW, [WrittenPrompt(3, [])]),
        *(1, 10, 100, 10, 0, None, None, "max_tokens", "messages"),
    )


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


async def say(clerk, *messages: msgspec.Struct):
    """In one piece, as one system call brings it."""
    clerk.line.data_received(b"".join(map(encode_frame, messages)))
    await turns()


async def test_who_leaves_in_the_moment_of_asking_holds_nothing(worker):
    clerk, socket = worker
    await say(clerk, asks(1), Leaves(1, Usage(3, 0), None, cancelled=True))
    assert clerk.requests == 0
    assert not [message for message in socket.heard if isinstance(message, Refused)]


async def test_who_asks_for_a_model_that_is_gone_is_refused(worker):
    clerk, socket = worker
    await say(clerk, asks(1))
    assert [message.number for message in socket.heard if isinstance(message, Refused)] == [1]
    assert clerk.requests == 0
