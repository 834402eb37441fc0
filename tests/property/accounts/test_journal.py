"""The journal under damage: every entry before it comes back, none is invented, nothing is raised."""

import tempfile
from operator import attrgetter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from maitred.core.context import Outcome
from maitred.core.usage import UsageEvent
from maitred.store.batch import Backlog
from maitred.store.journal import Journal
from maitred.store.orphan_journal import journal_folders, open_orphan
from maitred.store.segment import BeginRecord, ReleaseRecord, Segment, UsageRecord, encode_frame
from tests.support.usage_events import usage_event

TEXT = st.text(max_size=12)
COUNT = st.integers(0, 2**53)
EVENT = st.builds(
    UsageEvent,
    id=TEXT,
    request_id=TEXT,
    time_s=st.floats(0, 4e9),
    key=TEXT,
    tenant=TEXT,
    organisation=TEXT,
    model=TEXT,
    prompt_tokens=COUNT,
    output_tokens=COUNT,
    cost_nusd=COUNT,
    ttft_s=st.none() | st.floats(0, 1e6),
    outcome=st.sampled_from(Outcome),
    charges=st.dictionaries(TEXT, COUNT, max_size=3),
    cache=st.sampled_from(["", "exact", "coalesced", "semantic"]),
    saved_tokens=COUNT,
)
ENTRY = st.builds(UsageRecord, EVENT, TEXT) | st.builds(BeginRecord, EVENT) | st.builds(ReleaseRecord, TEXT)
RESPONSES = ("resp_a", "resp_b")
id_of = attrgetter("id")


def read(data: bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "1.segment"
        path.write_bytes(data)
        segment = Segment(path)
        return [entry for entry, _ in segment], segment.damage


@given(st.lists(ENTRY, min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_cut_at_every_byte(entries):
    frames = [encode_frame(entry) for entry in entries]
    whole = b"".join(frames)
    ends = [sum(map(len, frames[: count + 1])) for count in range(len(frames))]
    for cut in range(len(whole) + 1):
        found, damage = read(whole[:cut])
        assert found == entries[: sum(end <= cut for end in ends)]
        assert (damage is None) == (cut in (0, *ends))
        assert damage is None or damage.torn


@given(st.lists(ENTRY, min_size=1, max_size=6), st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_that_changed(entries, data):
    frames = [encode_frame(entry) for entry in entries]
    whole = bytearray(b"".join(frames))
    at = data.draw(st.integers(0, len(whole) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=min(40, len(whole) - at)))
    before = bytes(whole)
    whole[at : at + len(patch)] = patch
    found, damage = read(bytes(whole))
    if whole == before:
        assert found == entries
        return
    first = next(place for place in range(len(whole)) if whole[place] != before[place])
    sound, end = 0, 0
    while end + len(frames[sound]) <= first:
        end += len(frames[sound])
        sound += 1
    assert found == entries[:sound]
    assert damage is not None
    assert damage.offset == end
    assert not damage.torn  # so that it is kept


@given(st.binary(max_size=400))
@settings(deadline=None)
def test_any_bytes_are_read_without_a_fault(data):
    found, damage = read(data)
    assert found == []
    assert (damage is None) == (data == b"")


class BacklogMachine(RuleBasedStateMachine):
    """Random work against a model of lists, with little memory and small segments; then the process dies."""

    @initialize(most_events=st.integers(1, 5), segment_bytes=st.integers(1, 2_000))
    def open(self, most_events, segment_bytes):
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.journal = Journal(self.root, segment_bytes=segment_bytes)
        self.most_events = most_events
        self.backlog = Backlog(self.journal, max_events=most_events)
        self.waiting: list[UsageEvent] = []
        self.unstored: dict[str, str] = {}
        """Events that wait for a response -> its id."""
        self.running: list[UsageEvent] = []
        self.number = 0

    @rule()
    def begin(self):
        self.number += 1
        event = usage_event(self.number, cost_nusd=0, charges={})
        self.journal.begin(event)
        self.running.append(event)

    @rule(data=st.data())
    def record(self, data):
        if self.running and data.draw(st.booleans()):
            number = int(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))).id.removeprefix("u-"))
        else:
            self.number += 1
            number = self.number
        event = usage_event(number)
        response = data.draw(st.sampled_from(["", "", *RESPONSES]))
        fits = not self.backlog._journal_only and len(self.backlog) < self.most_events
        self.backlog.add(event, response)
        self.waiting.append(event)
        if response and fits:
            self.unstored[event.id] = response

    @rule(most=st.integers(1, 6), responses=st.sets(st.sampled_from(RESPONSES)))
    def write(self, most, responses):
        batch = self.backlog.oldest_events(most, responses)
        free = [event for event in self.waiting if event.id not in self.unstored]
        with_responses = [event for event in self.waiting if self.unstored.get(event.id) in responses]
        oldest = [*batch.values()][: len(batch) - len(with_responses)]
        assert oldest == free[: len(oldest)]
        assert bool(oldest) or not free or self.unstored
        assert sorted([*batch.values()][len(oldest) :], key=id_of) == sorted(with_responses, key=id_of)
        self.backlog.mark_written(batch)
        written = {event.id for event in batch.values()}
        self.waiting = [event for event in self.waiting if event.id not in written]
        self.unstored = {event: response for event, response in self.unstored.items() if event not in written}

    @rule(response=st.sampled_from(RESPONSES))
    def release(self, response):
        self.backlog.release(response)
        self.unstored = {event: waits_for for event, waits_for in self.unstored.items() if waits_for != response}

    @invariant()
    def counts(self):
        if not hasattr(self, "backlog"):
            return
        assert len(self.backlog) == len(self.waiting)
        for counter in ("spend:tenant:acme", "spend:key:0"):
            expected = sum(event.charges.get(counter, 0) for event in self.waiting)
            assert self.backlog.pending_charges([counter]) == {counter: expected}

    def teardown(self):
        if not hasattr(self, "backlog"):
            return
        self.backlog.close()
        found: dict[str, UsageEvent] = {}
        unstored: dict[str, UsageEvent] = {}
        for path in journal_folders(self.root):
            with open_orphan(path) as orphan:
                for batch in orphan.batches(3):
                    for event in batch:
                        assert found.setdefault(event.id, event) == event
                unstored |= {event.id: event for event in orphan.unstored}
                orphan.remove()
        for event in self.waiting:
            assert (unstored if event.id in self.unstored else found)[event.id] == event
        for event in self.running:
            assert found[event.id].outcome == Outcome.FAILED
            assert not found[event.id].charges
        assert list(self.root.iterdir()) == []
        self.folder.cleanup()


TestBacklog = BacklogMachine.TestCase
TestBacklog.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
