"""A queue that keeps the nodes of a flow that is alone decides as one that forgets them as soon as all have ended.

Weights and services are powers of two and whole numbers, so that all counters are exact, wherever they begin.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.fairness.config import QueueOrderConfig
from maitred.fairness.entry import QueueEntry
from maitred.fairness.vtc import VtcQueue

FLOWS = [
    Flow((FlowLevel(org, weight), FlowLevel(f"{org}-{key}")), priority)
    for org, weight in (("acme", 1.0), ("bravo", 2.0), ("bravo", 4.0))
    for key in "ab"
    for priority in (PriorityClass.STANDARD, PriorityClass.BATCH)
]
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "come again", "take", "charge", "refund", "end", "end", "end all"]),
        st.sampled_from(FLOWS),
        st.integers(1, 64),
    ),
    max_size=60,
)


class Forgetful(VtcQueue):
    """Keeps nothing."""

    def done(self, flow):
        self._stop(flow, None)


class Hall:
    """A queue, and what was taken from it."""

    def __init__(self, queue):
        self.queue = queue
        self.running = []
        self.taken = []

    def play(self, number, what, flow, service):
        queue, now_s = self.queue, float(number)
        if what == "come again" and self.taken:
            what, flow = "come", self.taken[-1][0]
        if what == "come":
            entry = QueueEntry(None, flow, arrived_s=now_s, service=float(service))
            if len(queue) == 0 and service % 2:
                queue.pass_through(entry, now_s)
                self._runs(entry)
            else:
                queue.add(entry, now_s)
        elif what == "take" and (entry := queue.head(now_s)) is not None:
            queue.take(entry, now_s)
            self._runs(entry)
        elif what in ("charge", "refund") and self.running:
            queue.charge(self.running[-1].flow, float(service if what == "charge" else -service))
        elif what == "end" and self.running:
            queue.done(self.running.pop(service % len(self.running)).flow)
        elif what == "end all":
            while self.running:
                queue.done(self.running.pop().flow)

    def _runs(self, entry):
        self.running.append(entry)
        self.taken.append((entry.flow, entry.arrived_s))
        self.queue.charge(entry.flow, entry.service)


@settings(max_examples=150)
@given(moves=MOVES, ageing_s=st.sampled_from([None, 8.0]))
def test_to_keep_a_lone_flow_is_to_forget_it(moves, ageing_s):
    kept, forgotten = (Hall(kind(QueueOrderConfig(ageing_s=ageing_s))) for kind in (VtcQueue, Forgetful))
    for number, move in enumerate(moves):
        for player in (kept, forgotten):
            player.play(number, *move)
        assert kept.taken == forgotten.taken
        waiting = kept.queue.head(float(number))
        other = forgotten.queue.head(float(number))
        assert (waiting and (waiting.flow, waiting.number)) == (other and (other.flow, other.number))
        if number % 7 == 0:  # whoever looks may let go of what is kept, so not each time
            results = [
                [(player.queue.lead(flow), player.queue.over_service(flow)) for flow in FLOWS]
                for player in (kept, forgotten)
            ]
            assert results[0] == results[1]
