"""The published bound on unfairness, over random histories of a batch that takes from the queue.

Theorem 4.4 of "Fairness in Serving Large Language Models" (Sheng et al., OSDI'24): whatever the others do, what two
clients are served while both are backlogged differs by at most ``2 * max(w_p * L_input, w_q * M)``, with M the tokens
that fit into the memory of a batch. `maitred.fairness.tree` restates it for weights, a hierarchy, chunked prefill,
preemption, refunds and a deficit quantum; its *R* and *A* are measured here in each history, and *R* is held against
the paper's.

`MAITRED_HISTORIES` says how many histories are played; 10,000 take about a minute.
"""

import os
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.flow import Flow, FlowLevel
from maitred.fairness.fair_queue import QueueEntry, QueueOrderConfig, make_queue

HISTORIES = int(os.environ.get("MAITRED_HISTORIES", "1500"))
PARTS = 10
PROMPT, OUTPUT = 1.0, 2.0
STEPS = 60
ROUNDING = 1e-6


@dataclass(eq=False)
class Job:
    """A request: what it will cost, what was computed, what was billed."""

    nodes: tuple["Party", ...]
    prompt: int
    output: int
    prefilled: int = 0
    decoded: int = 0
    billed_prompt: int = 0
    billed_output: int = 0

    @property
    def unbilled(self) -> float:
        return PROMPT * (self.prompt - self.billed_prompt) + OUTPUT * (self.output - self.billed_output)


class Party:
    """A tenant or key as the books of the history have it; the queue knows nothing of this."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.waiting = 0
        self.spells = 0
        """Times that it stopped waiting."""
        self.served = 0.0
        self.outstanding = 0.0
        """May still be charged for what runs."""
        self.refundable = 0.0
        self.most_outstanding = 0.0
        self.most_refundable = 0.0

    @property
    def slack(self) -> float:
        return (self.most_outstanding + self.most_refundable) / self.weight


class History:
    """One batch, one queue, and tenants that come and go."""

    def __init__(self, seed: int, policy: str = "fair") -> None:
        draw = self.draw = random.Random(seed)
        self.quantum = draw.choice([0.0, 0.0, 40.0])
        self.whole_prompts = draw.random() < 0.5
        """Whether a prompt is charged when it is taken, as in the paper, or as it is computed."""
        self.queue = make_queue(QueueOrderConfig(policy=policy, quantum=self.quantum, ageing_s=None))
        self.capacity = draw.choice([60, 200, 600])
        self.budget = draw.choice([8, 32, 128])
        self.slots = draw.choice([2, 4, 12])
        self.longest = draw.choice([5, 20, 60])
        self.flows: list[tuple[Flow, tuple[Party, ...], float]] = []
        self.families: list[list[Party]] = [[]]
        for number in range(draw.randint(2, 5)):
            weight = draw.choice([0.5, 1.0, 1.0, 3.0])
            organisation = Party(weight)
            self.families[0].append(organisation)
            keys = []
            for key in range(draw.choice([1, 1, 2])):
                share = FlowLevel(f"key {key}", draw.choice([1.0, 2.0]))
                keys.append(Party(share.weight))
                eagerness = draw.choice([0.05, 0.3, 1.0, 3.0])
                self.flows.append(
                    (Flow((FlowLevel(f"org {number}", weight), share)), (organisation, keys[-1]), eagerness)
                )
            self.families.append(keys)
        self.running: list[QueueEntry[Job]] = []
        self.waiting: set[QueueEntry[Job]] = set()
        self.free = self.capacity
        self.pairs: dict[tuple[Party, Party], tuple[tuple[int, int], float, float]] = {}
        self.worst = 0.0
        """The largest difference seen, over what is allowed then."""

    def play(self) -> float:
        for step in range(STEPS):
            self.arrive(step)
            self.disturb(step)
            self.admit(step)
            self.compute()
            self.measure()
        return self.judge()

    def arrive(self, step: int) -> None:
        draw = self.draw
        for flow, nodes, eagerness in self.flows:
            if draw.random() < 0.05:
                continue
            for _ in range(int(eagerness + draw.random())):
                if nodes[1].waiting > 6:
                    break
                job = Job(nodes, draw.randint(1, self.longest), draw.randint(1, self.longest))
                locality = draw.choice(["a", "b", None]) if self.quantum else None
                entry = QueueEntry(job, flow, arrived_s=step, service=job.unbilled, locality=locality)
                self.queue.add(entry, step)
                self.wait(entry)

    def disturb(self, step: int) -> None:
        """Clients leave; sequences are preempted."""
        draw = self.draw
        if self.waiting and draw.random() < 0.1:
            entry = draw.choice(sorted(self.waiting, key=lambda entry: entry.number))
            self.queue.remove(entry)
            self.unwait(entry)
        if self.running and draw.random() < 0.2:
            entry = self.running.pop(draw.randrange(len(self.running)))
            job = entry.value
            self.stop(job)
            if draw.random() < 0.5:
                job.prefilled = job.decoded = 0
                self.queue.requeue(entry, step)
                self.wait(entry)
            else:
                unused = PROMPT * max(0, job.billed_prompt - job.prefilled)
                if unused and not job.decoded:
                    self.queue.charge(entry.flow, -unused)
                    for node in job.nodes:
                        node.served -= unused
                self.queue.done(entry.flow)

    def admit(self, step: int) -> None:
        while (entry := self.queue.head(step)) is not None and len(self.running) < self.slots:
            job = entry.value
            if job.prompt + job.output > self.free:
                break
            self.queue.take(entry, step)
            self.unwait(entry)
            self.free -= job.prompt + job.output
            self.running.append(entry)
            for node in job.nodes:
                node.outstanding += job.unbilled
                node.most_outstanding = max(node.most_outstanding, node.outstanding)
            if self.whole_prompts:
                self.bill(entry, job.prompt - job.billed_prompt, 0)
                for node in job.nodes:
                    node.refundable += PROMPT * job.prompt
                    node.most_refundable = max(node.most_refundable, node.refundable)

    def compute(self) -> None:
        budget = self.budget
        for entry in list(self.running):
            job = entry.value
            if job.prefilled < job.prompt:
                chunk = min(budget, job.prompt - job.prefilled)
                budget -= chunk
                job.prefilled += chunk
                self.bill(entry, max(0, job.prefilled - job.billed_prompt), 0)
            else:
                job.decoded += 1
                # What is computed a second time, after a preemption, is not billed again.
                self.bill(entry, 0, max(0, job.decoded - job.billed_output))
                if job.decoded == job.output:
                    self.running.remove(entry)
                    self.queue.done(entry.flow)
                    self.stop(job)

    def bill(self, entry: QueueEntry[Job], prompt: int, output: int) -> None:
        service = PROMPT * prompt + OUTPUT * output
        job = entry.value
        job.billed_prompt += prompt
        job.billed_output += output
        if service:
            self.queue.charge(entry.flow, service)
            for node in job.nodes:
                node.served += service
                node.outstanding -= service

    def stop(self, job: Job) -> None:
        self.free += job.prompt + job.output
        for node in job.nodes:
            node.outstanding -= job.unbilled
            if self.whole_prompts:
                node.refundable -= PROMPT * job.prompt

    def wait(self, entry: QueueEntry[Job]) -> None:
        self.waiting.add(entry)
        for node in entry.value.nodes:
            node.waiting += 1

    def unwait(self, entry: QueueEntry[Job]) -> None:
        self.waiting.discard(entry)
        for node in entry.value.nodes:
            node.waiting -= 1
            if not node.waiting:
                node.spells += 1

    def measure(self) -> None:
        """Notes, for every two siblings that have been waiting together, the extremes of how far one led the other."""
        for family in self.families:
            for position, one in enumerate(family):
                if not one.waiting:
                    continue
                for other in family[:position]:
                    if not other.waiting:
                        continue
                    lead = one.served / one.weight - other.served / other.weight
                    spell = one.spells, other.spells
                    known, least, most = self.pairs.get((one, other), (None, lead, lead))
                    if known != spell:
                        self.judge_pair(one, other)
                        least = most = lead
                    self.pairs[one, other] = spell, min(least, lead), max(most, lead)

    def judge(self) -> float:
        for one, other in self.pairs:
            self.judge_pair(one, other)
        for node in self.families[0]:
            # What runs is in memory, so the bound is never looser than the paper's 2 * w_q * M for weights of 1.
            assert node.most_outstanding <= OUTPUT * self.capacity
        return self.worst

    def judge_pair(self, one: Party, other: Party) -> None:
        if (one, other) in self.pairs:
            _, least, most = self.pairs[one, other]
            allowed = one.slack + other.slack + 2 * self.quantum
            self.worst = max(self.worst, (most - least) / (allowed + ROUNDING))


@pytest.mark.parametrize("part", range(PARTS))
def test_gap_of_two_backlogged_siblings_is_bounded(part):
    for seed in range(part, HISTORIES, PARTS):
        assert History(seed).play() <= 1.0, f"history {seed}"


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_gap_is_bounded_wherever_one_looks(seed):
    assert History(seed).play() <= 1.0


def test_bound_tells_fair_from_unfair():
    beyond = sum(History(seed, "fifo").play() > 1.0 for seed in range(100))
    assert beyond > 30
    closest = max(History(seed).play() for seed in range(100))
    assert closest > 0.6
