"""What a worker asks its controller for an answer that comes from a cache."""

import asyncio

import msgspec
import pytest

from maitred.admission.config import AdmissionConfig
from maitred.admission.request import AdmissionRequest
from maitred.app.workers.remote_flow import RemoteFlowController
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import CachedAnswerTooLong
from maitred.core.request import Usage
from maitred.core.resource_stack import ResourceStack
from maitred.wire.error_codec import encode_error
from maitred.wire.worker_protocol import AdmitAccepted, AdmitRejected, AdmitRequest, SettleReply, SettleRequest
from tests.support.admission_services import ALICE


class Controller:
    """A controller that answers each message at once, as the test says; keeps what it is sent."""

    def __init__(self, *answers):
        self.answers, self.received = list(answers), []

    def register(self, listener):
        self.listener = listener
        return 7

    def unregister(self, number):
        assert number == 7

    async def wait_connected(self, **_):
        pass

    def send(self, message):
        # As from a socket: in a later turn of the event loop, through the codec.
        self.received.append(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)))
        if self.answers:
            asyncio.get_running_loop().call_soon(self.listener.on_message, self.answers.pop(0))


ACCEPTED = AdmitAccepted(7, "use-1", 20, clamped=False, rate_limits=None, queue_position=None, expected_tokens=0)


def make_request(context):
    return AdmissionRequest(
        principal=ALICE,
        request_id="req-1",
        route="completions",
        model="m",
        prompt_tokens=30,
        longest_prompt=12,
        window_left=100,
        choices=3,
        cache="exact",
        cached_tokens=20,
        context=context,
    )


async def admit(controller, context, stack):
    flow = RemoteFlowController(controller, {"m": {}}, {}, AdmissionConfig(), recoveries=1)
    return await flow.admit("m", None, make_request(context), context.timeline, stack)


async def test_an_answer_from_a_cache_is_asked_for_without_a_place_in_the_queue():
    controller, context = Controller(ACCEPTED, SettleReply(7)), RequestContext("req-1", 5.0, route="completions")
    async with ResourceStack() as stack:
        grant, entry = await admit(controller, context, stack)
        assert entry is None
        assert (grant.lease, grant.max_tokens) == ("use-1", 20)
        assert (context.predicted_position, context.clamped_max_tokens) == (None, None)
        await grant.settle(Usage(30, 55), Outcome.FINISHED)
    asked, settled = controller.received
    assert isinstance(asked, AdmitRequest)
    assert (asked.cache, asked.cached_tokens, asked.choices, asked.longest_prompt) == ("exact", 20, 3, 12)
    assert [prompt.tokens for prompt in asked.prompts] == [30]
    assert (asked.request_id, asked.arrived_s) == ("req-1", 5.0), "what the report of its end is found by"
    assert settled == SettleRequest(7, Usage(30, 55), Outcome.FINISHED, None)


async def test_a_cached_answer_that_is_too_long_is_refused_by_the_same_error():
    controller, context = (
        Controller(AdmitRejected(7, encode_error(CachedAnswerTooLong()))),
        RequestContext("req-1", 5.0),
    )
    with pytest.raises(CachedAnswerTooLong):
        async with ResourceStack() as stack:
            await admit(controller, context, stack)
    assert len(controller.received) == 1, "nothing is held, so nothing is released"


async def test_the_next_controller_hears_that_the_answer_comes_from_a_cache():
    controller, context = Controller(ACCEPTED), RequestContext("req-1", 5.0)
    async with ResourceStack() as stack:
        grant, _ = await admit(controller, context, stack)
        context.prompt_tokens, context.completion_tokens = 30, 4
        grant.on_disconnect()
        resumed = grant.take_resume_grant()
        assert (resumed.admit_request.cache, resumed.replica, resumed.usage) == ("exact", "", Usage(30, 4))
