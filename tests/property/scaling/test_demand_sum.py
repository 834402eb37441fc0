"""The demand of gateways that share a pool: each request counts once, in whatever order they tell and read."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maitred.scaling.demand import ArrivalWindow, Demand
from maitred.scaling.demand_sum import DemandSum

COUNTED = ("requests", "prompt_tokens", "output_tokens", "cached_tokens")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.floats(0.05, 4.0)),
        st.tuples(st.just("tell"), st.integers(0, 2)),
        st.tuples(st.just("lose"), st.integers(0, 2)),
        st.tuples(st.just("read"), st.just(0)),
        st.tuples(st.just("arrive"), st.integers(0, 2)),
    ),
    max_size=80,
)


class Gateways:
    """Three gateways that tell their demand, and another one that reads it now and then."""

    def __init__(self):
        self.now_s = 0.0
        self.sums = [DemandSum() for _ in range(3)]
        self.since_s = [0.0] * 3
        self.come = [0] * 3
        self.arrived = [0] * 3
        self.waiting = [0] * 3
        self.sequences = [0] * 3
        self.store = {}
        self.reader = DemandSum()
        self.read_s = 0.0
        self.counted = dict.fromkeys(COUNTED, 0.0)

    def arrive(self, number, count=3):
        self.come[number] += count
        self.arrived[number] += count
        self.waiting[number] += count

    def tell(self, number, *, is_lost=False):
        """A gateway tells what has come since it did last; another one may never see it."""
        window = window_of(self.come[number], self.since_s[number], self.now_s)
        told = self.sums[number].tell(Demand(waiting=self.waiting[number], window=window))
        self.come[number], self.since_s[number] = 0, self.now_s
        self.sequences[number] += 1
        if not is_lost:
            self.store[f"gateway-{number}"] = self.sequences[number], told

    def read(self):
        """The reader, which gets no requests itself, hears all and counts."""
        self.reader.hear([(name, sequence, told) for name, (sequence, told) in self.store.items()], self.now_s)
        return self.add()

    def add(self):
        demand = self.reader.add(Demand(window=window_of(0, self.read_s, self.now_s)), self.now_s)
        assert demand.window.length_s == pytest.approx(self.now_s - self.read_s)
        self.read_s = self.now_s
        for name in COUNTED:
            self.counted[name] += getattr(demand.window, name)
        return demand


def window_of(requests, since_s, now_s):
    return ArrivalWindow(
        start_s=since_s,
        length_s=now_s - since_s,
        requests=requests,
        prompt_tokens=5.0 * requests,
        output_tokens=7.0 * requests,
        cached_tokens=11.0 * requests,
    )


@given(EVENTS)
@example([("pass", 1.0), ("arrive", 0), ("tell", 0), ("read", 0), ("read", 0)])
@example([("pass", 4.0), ("arrive", 0), ("lose", 0), ("pass", 4.0), ("tell", 0), ("pass", 0.05), ("read", 0)])
@settings(max_examples=200, deadline=None)
def test_what_arrives_counts_once_and_nothing_is_lost(events):
    gateways = Gateways()
    gateways.read()
    quiet_s = 0.0
    for kind, value in events:
        match kind:
            case "pass":
                # Nobody is silent for so long that it is about the past.
                if quiet_s + value > 10.0:
                    for number in range(3):
                        gateways.tell(number)
                    gateways.read()
                    quiet_s = 0.0
                gateways.now_s += value
                quiet_s += value
            case "tell":
                gateways.tell(value)
            case "lose":
                gateways.tell(value, is_lost=True)
            case "read":
                gateways.read()
            case "arrive":
                gateways.arrive(value)
        assert gateways.counted["requests"] <= sum(gateways.arrived) + 1e-6
    for _ in range(30):
        gateways.now_s += 1.0
        for number in range(3):
            gateways.tell(number)
        gateways.read()
    for name, per_request in zip(COUNTED, (1.0, 5.0, 7.0, 11.0), strict=True):
        assert gateways.counted[name] == pytest.approx(per_request * sum(gateways.arrived))


@given(late_s=st.floats(0.1, 14.0), steps=st.lists(st.floats(0.05, 2.0), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_late_arrivals_look_like_no_crowd(late_s, steps):
    gateways = Gateways()
    gateways.tell(0)
    gateways.read()
    gateways.tell(0)
    gateways.read()
    gateways.now_s += late_s
    gateways.arrive(0, 100)
    gateways.tell(0)
    gateways.read_s = gateways.now_s  # it has read meanwhile, and heard nothing
    for step_s in steps:
        gateways.now_s += step_s
        window = gateways.read().window
        assert window.requests <= 2 * step_s * 100 / late_s + 1e-6


@given(silent_s=st.floats(20.0, 10_000.0), rate=st.integers(1, 50))
def test_of_a_long_silence_only_the_end_counts(silent_s, rate):
    gateways = Gateways()
    gateways.read()
    gateways.tell(0)
    gateways.read()
    gateways.now_s += silent_s
    gateways.read()
    gateways.arrive(0, round(rate * silent_s))
    gateways.tell(0)
    for _ in range(60):
        gateways.read()
        gateways.now_s += 1.0
    assert gateways.counted["requests"] == pytest.approx(15.0 * rate, rel=0.05)


@given(sequence=st.permutations(range(6)))
def test_an_old_telling_that_comes_late_changes_nothing(sequence):
    gateways, tellings = Gateways(), []
    gateways.read()
    for _ in range(6):
        gateways.now_s += 1.0
        gateways.arrive(0)
        gateways.tell(0)
        tellings.append(gateways.store["gateway-0"])
    for index in sequence:
        gateways.store["gateway-0"] = tellings[index]
        gateways.read()
    gateways.now_s += 10.0
    gateways.add()
    assert gateways.counted["requests"] == pytest.approx(18.0)


def test_who_is_gone_counts_no_more():
    gateways = Gateways()
    gateways.read()
    gateways.arrive(0)
    gateways.tell(0)
    gateways.now_s += 1.0
    assert gateways.read().waiting == 3
    gateways.now_s += 4.5
    assert gateways.read().waiting == 3, "too early to judge"
    gateways.now_s += 0.6
    assert gateways.read().waiting == 0, "it has told nothing new for five seconds"
    assert gateways.reader.silent(60.0, gateways.now_s) == {}
    gateways.now_s += 60.0
    gateways.read()
    assert gateways.reader.silent(60.0, gateways.now_s) == {"gateway-0": 1}
    gateways.tell(0)
    assert gateways.read().waiting == 3
    assert gateways.reader.silent(60.0, gateways.now_s) == {}


def test_who_was_there_before_counts_from_the_next_telling_on():
    gateways = Gateways()
    gateways.arrive(0)
    gateways.tell(0)
    gateways.now_s += 1.0
    demand = gateways.read()
    assert (demand.waiting, demand.window.requests) == (0, 0), "it may be gone since long"
    gateways.arrive(0)
    gateways.tell(0)
    gateways.now_s += 1.0
    demand = gateways.read()
    assert (demand.waiting, demand.window.requests) == (6, 3)
