"""The doctor in the gateway says what it says from outside, on the last seconds only."""

from maitred.observe.diagnosis.finding import FindingKind
from maitred.observe.live_diagnosis import LiveDiagnosis
from maitred.observe.metrics.registry import Metrics
from maitred.observe.metrics.stores import AccountMetrics, AccountsState
from maitred.observe.samples import MetricSamples, MetricSeries, parse_metrics
from tests.support.clock import FakeClock


def line(waiting, steps_s):
    """A queue in which so many wait for an engine that computes all the time, and has no place left."""

    def samples(prefix, values, **labels):
        return {
            MetricSeries(prefix + name, frozenset({"model": "m", **labels}.items())): v for name, v in values.items()
        }

    return MetricSamples(
        samples("maitred_dispatch_", {"waiting": waiting, "running": 4})
        | samples("maitred_dispatch_credits", {"": 0}, resource="slots", state="free")
        | samples("maitred_dispatch_credits", {"": 4}, resource="slots", state="total")
        | samples(
            "maitred_engine_",
            {"up": 1, "running": 4, "steps_total": steps_s, "step_seconds_total": steps_s},
            replica="r",
        )
    )


class Patient:
    """A queue of a given length."""

    def __init__(self):
        self.waiting, self.looks, self.clock = 40, 0, FakeClock()
        self.rounds = LiveDiagnosis(self.look, self.clock)

    def look(self):
        self.looks += 1
        return line(self.waiting, self.clock.now_s)

    def watched(self, seconds):
        """Watched every second for so long; what is found in the end."""
        for _ in range(seconds):
            found = self.rounds.findings()
            self.clock.now_s += 1
        return None if found is None else [finding.kind for finding in found]


def test_nothing_is_reported_in_the_first_seconds():
    patient = Patient()
    assert patient.watched(4) is None
    assert patient.watched(1) == [FindingKind.COMPUTE]


def test_what_is_over_is_forgotten():
    patient = Patient()
    assert patient.watched(10) == [FindingKind.COMPUTE]
    patient.waiting = 0
    assert patient.watched(14) == []


def test_after_a_time_without_viewers_it_begins_anew():
    patient = Patient()
    assert patient.watched(10) == [FindingKind.COMPUTE]
    patient.clock.now_s += 60
    assert patient.watched(1) is None


def test_looks_are_no_more_frequent_than_they_need_be():
    patient = Patient()
    patient.watched(20)
    assert patient.looks == 10


def test_a_gateway_reads_of_itself_what_others_read_in_its_scrape():
    metrics = Metrics(lambda: 3, dict, collectors=[AccountMetrics(AccountsState)])
    inside = metrics.samples()
    outside = MetricSamples(parse_metrics(metrics.render()[0].decode()))
    for name in ("maitred_in_flight", "maitred_stalled_requests_total", "maitred_ledger_backlog"):
        assert name in inside
        assert inside.sum_by(name) == outside.sum_by(name)
