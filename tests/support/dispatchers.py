"""A replica with scripted load reports, and a dispatcher in front of it."""

from msgspec.structs import replace

from maitred.core.errors import ReplicaUnavailable
from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.core.replica import LoadReport, ModelCard
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import DispatchRequest, Endpoint
from tests.support.clock import FakeClock

CARD = ModelCard(
    name="m",
    context_tokens=4096,
    vocab_size=100,
    eos_token_ids=(0,),
    max_sequences=4,
    kv_capacity_tokens=1600,
    max_choices=4,
    dtype="float32",
    device="cpu",
)
EMPTY = LoadReport(free_blocks=100, total_blocks=100, free_sequences=4, step_tokens=256)


class ScriptedReplica:
    """Reports what the test says. Each `submit` is unreported until `say`."""

    def __init__(self, card=CARD, load=EMPTY):
        self._card = card
        self._load = load
        self._unreported = 0
        self._listeners = []
        self.up = True

    def card(self):
        if not self.up:
            raise ReplicaUnavailable(retry_after_s=3.0)
        return self._card

    def load(self):
        return self._load

    weight = 1.0

    def count_unreported(self):
        return self._unreported

    def on_change(self, listener):
        self._listeners.append(listener)

    def generate(self, request):
        raise NotImplementedError

    def submit(self):
        self._unreported += 1

    def say(self, **gauges):
        """A report that includes all submissions."""
        self._load = replace(self._load, **gauges)
        self._unreported = 0
        self.notify()

    def set_up(self, up):
        self.up = up
        self._unreported = 0
        self.notify()

    def notify(self):
        for listener in self._listeners:
            listener()


def make_dispatch_request(
    number=1, org="acme", *, weight=1.0, tokens=16, max_tokens=32, choices=1, prompts=1, **fields
):
    priority = fields.pop("priority", PriorityClass.STANDARD)
    fields = {"arrived_s": 1_000_000.0, "id": f"req-{number}", "ttft_deadline_s": None} | fields
    return DispatchRequest(
        organisation=org,
        flow=Flow((FlowLevel(org, weight), FlowLevel(f"{org}-key")), priority),
        prompt_tokens=tokens * prompts,
        prompts=[[7] * tokens] * prompts,
        max_tokens=max_tokens,
        choices=choices,
        **fields,
    )


def without_waiting(coroutine):
    """Runs a coroutine that never waits, such as entering and leaving a dispatch entry."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("It waits.")


def enter(entry):
    """Enters a dispatch entry."""
    without_waiting(entry.__aenter__())


def leave(entry):
    """Leaves a dispatch entry as after a complete answer."""
    without_waiting(entry.__aexit__(None, None, None))


class DispatchSetup:
    """A dispatcher with its replica and a clock that stands still."""

    def __init__(self, config=None, *, replicas=1, reports_capacity=True, clock=None, **settings):
        settings = {"headroom": 0.0, "unknown_output_share": 1.0} | settings
        self.clock = clock or FakeClock()
        self.replicas = [ScriptedReplica() for _ in range(replicas)]
        self.replica = self.replicas[0]
        endpoints = [
            Endpoint(f"replica-{number}", replica, reports_capacity) for number, replica in enumerate(self.replicas)
        ]
        self.dispatcher = Dispatcher("m", endpoints, config or DispatchConfig(**settings), self.clock, draw=lambda: 0.0)
        self.core = self.dispatcher.core

    def check(self, *args, **fields):
        return self.dispatcher.load_shedder.check(make_dispatch_request(*args, **fields), self.clock.monotonic_s())

    def enqueue(self, *args, **fields):
        return self.dispatcher.enqueue(make_dispatch_request(*args, **fields))

    def assert_empty(self):
        assert self.core.waiting == 0
        assert self.core.running == 0
        assert self.core.allocator.holdings.slots == 0
        assert not self.dispatcher._entries
        assert not self.dispatcher._queued_by_request_id
        for quota in self.core.allocator.quotas.all:
            assert quota.used == (0, 0, 0)
        for queue in self.core.queues:
            assert len(queue.wait_account) == 0
        for endpoint_state in self.core.endpoint_states:
            assert endpoint_state.credits.request_count == 0
            assert endpoint_state.credits.unreported == (0, 0, 0)
            assert endpoint_state.credits.outstanding == (0, 0, 0)
            assert endpoint_state.credits.unanswered_tokens == 0
            assert endpoint_state.endpoint.admin_state.running == 0
