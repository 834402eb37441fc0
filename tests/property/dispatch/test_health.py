"""Replicas fail, come back, slow down and are taken out in every order. There is never more than one trial, nobody is
locked out for good, and a pool never leaves out all that work.
"""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from maitred.replica.health.breaker import AttemptOutcome, BreakerState
from maitred.replica.health.config import BreakerConfig, HealthConfig, OutlierConfig
from maitred.replica.health.pool import PoolHealth
from maitred.replica.health.replica import ReplicaHealth, slow_start_weight

NUMBERS = st.integers(0, 4)


class HealthMachine(RuleBasedStateMachine):
    @initialize(
        count=st.integers(1, 5),
        share=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
        max_fails=st.integers(1, 4),
        draw=st.sampled_from([0.0, 0.5, 0.999]),
    )
    def start(self, count, share, max_fails, draw):
        self.config = HealthConfig(
            breaker=BreakerConfig(max_fails=max_fails, least_requests=3, window_s=10.0, most_open_s=8.0),
            outliers=OutlierConfig(share=share, every_s=1.0, least_requests=2, base_s=5.0, most_s=20.0),
            slow_start_s=4.0,
        )
        self.away = set()
        self.members = [
            ReplicaHealth(name, self.config, lambda: draw, partial(self.away.__contains__, name))
            for name in (f"replica-{number}" for number in range(count))
        ]
        self.peers = PoolHealth(self.config.outliers)
        for member in self.members:
            self.peers.add(member)
        self.now_s = 1_000.0
        self.running = []

    def member(self, number):
        return self.members[number % len(self.members)]

    @rule(passes_s=st.sampled_from([0.0, 0.1, 1.0, 7.0, 40.0]))
    def time(self, passes_s):
        self.now_s += passes_s

    @rule(number=NUMBERS)
    def begin(self, number):
        member = self.member(number)
        verdict = self.peers.availability(member.name, self.now_s)
        attempt = self.peers.start_attempt(member.name, self.now_s)
        if not member.is_out_of_service:
            assert (attempt is not None) == verdict.is_available
            assert attempt is None or attempt.is_trial == verdict.is_trial
        if attempt is not None:
            self.running.append((member, attempt))

    @rule(index=st.integers(0, 50), took_s=st.floats(0.01, 20))
    def answer(self, index, took_s):
        if self.running:
            member, attempt = self.running[index % len(self.running)]
            member.on_first_token(attempt, self.now_s + took_s)

    @rule(index=st.integers(0, 50), outcome=st.sampled_from(AttemptOutcome), twice=st.booleans())
    def end(self, index, outcome, twice):
        if self.running:
            member, attempt = self.running.pop(index % len(self.running))
            for _ in range(1 + twice):
                member.on_end(attempt, outcome, self.now_s)

    @rule()
    def sweep(self):
        ejected = self.peers.eject_outliers(self.now_s)
        serving = [member for member in self.members if not member.is_out_of_service]
        if ejected:
            assert (
                sum(member.is_ejected(self.now_s) for member in serving)
                <= self.config.outliers.share * len(serving) + 1e-9
            )
            assert any(member.availability(self.now_s).is_available for member in serving)

    @rule(number=NUMBERS)
    def go_or_come(self, number):
        self.away ^= {self.member(number).name}

    @invariant()
    def one_trial_at_a_time(self):
        for member in getattr(self, "members", []):
            trials = [
                attempt
                for owner, attempt in self.running
                if owner is member and attempt.is_trial and member.breaker._trial is attempt
            ]
            assert len(trials) <= 1
            if member.breaker.state(self.now_s) is not BreakerState.CLOSED:
                assert member.breaker.has_trial == bool(trials), "a trial is never forgotten, and never counted twice"

    @invariant()
    def who_works_can_be_used(self):
        if not hasattr(self, "members"):
            return
        verdicts = [self.peers.availability(member.name, self.now_s) for member in self.members]
        works = [
            member
            for member in self.members
            if not member.is_out_of_service and member.breaker.allows_request(self.now_s)
        ]
        assert any(verdict.is_available for verdict in verdicts) == bool(works)
        for verdict in verdicts:
            assert 0.0 <= verdict.weight <= 1.0
            assert verdict.is_available == (verdict.weight > 0)

    def teardown(self):
        """Whatever has happened: with good outcomes from now on, every replica is back in full."""
        if not hasattr(self, "members"):
            return
        for member, attempt in self.running:
            member.on_end(attempt, AttemptOutcome.NEUTRAL, self.now_s)
        self.away.clear()
        for _ in range(60):
            self.now_s += 1.0
            for member in self.members:
                if (attempt := member.start_attempt(self.now_s)) is not None:
                    member.on_first_token(attempt, self.now_s + 0.1)
                    member.on_end(attempt, AttemptOutcome.SUCCESS, self.now_s + 0.1)
        assert [member.availability(self.now_s).weight for member in self.members] == [1.0] * len(self.members)


TestHealth = HealthMachine.TestCase


@given(since_s=st.floats(-10, 1e6), rises_s=st.floats(0, 1e3), least=st.floats(0.01, 1))
def test_a_weight_only_rises(since_s, rises_s, least):
    now, later = slow_start_weight(since_s, rises_s, least), slow_start_weight(since_s + 1, rises_s, least)
    assert least <= now <= later + 1e-9 <= 1.0 + 1e-9
