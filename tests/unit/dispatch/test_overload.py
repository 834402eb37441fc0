"""Dispatch before a simulated engine, far beyond its capacity: what it promises, it keeps."""

import random

import pytest

from maitred.core.errors import Refused
from maitred.core.flow import Flow, FlowLevel
from maitred.core.replica import LoadReport, ModelCard, StepTimes
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.queue import QueueState
from maitred.dispatch.request import DispatchRequest, Endpoint
from maitred.dispatch.shedding import LoadShedder
from maitred.fairness.config import QueueOrderConfig

TIMES = StepTimes(fixed_s=0.008, token_s=0.0004, decode_s=0.0008, chunk_s=0.0002)
SLOTS, BLOCKS, BLOCK_TOKENS, STEP_TOKENS = 16, 2000, 16, 256
CARD = ModelCard(
    name="m",
    context_tokens=4096,
    vocab_size=10,
    eos_token_ids=(0,),
    max_sequences=SLOTS,
    kv_capacity_tokens=BLOCKS * BLOCK_TOKENS,
    max_choices=8,
    dtype="float32",
    device="cpu",
)
TTFT_S = 2.0


class Running:
    def __init__(self, queued):
        self.queued = queued
        self.prompt = queued.request.prompt_tokens
        self.computed = 0
        self.tokens = 0


class Engine:
    """Steps over a batch; every answer uses all of its `max_tokens`."""

    def __init__(self):
        self.sent, self.read, self.running, self.steps = [], 0, [], 0
        self.report = LoadReport(
            free_blocks=BLOCKS, total_blocks=BLOCKS, free_sequences=SLOTS, step_tokens=STEP_TOKENS, times=TIMES
        )

    def card(self):
        return CARD

    def load(self):
        return self.report

    weight = 1.0

    def count_unreported(self):
        return len(self.sent) + self.read

    def begin(self):
        """Reads what was sent, and takes so long for the step."""
        self.running += self.sent
        self.read, self.sent = len(self.sent), []
        self.decoding = [answer for answer in self.running if answer.computed == answer.prompt]
        free_tokens = STEP_TOKENS - len(self.decoding)
        self.chunks = []
        for answer in self.running:
            length = min(free_tokens, answer.prompt - answer.computed)
            if length:
                self.chunks.append((answer, length))
                free_tokens -= length
        tokens = len(self.decoding) + sum(length for _, length in self.chunks)
        return TIMES.of(tokens, 0, decodes=len(self.decoding), chunks=len(self.chunks))

    def end(self):
        """The answers that have got a token."""
        for answer, length in self.chunks:
            answer.computed += length
        served = self.decoding + [answer for answer, _ in self.chunks if answer.computed == answer.prompt]
        for answer in served:
            answer.tokens += 1
        self.running = [answer for answer in self.running if answer.tokens < answer.queued.request.max_tokens]
        self.steps, self.read = self.steps + 1, 0
        used = sum(-(-(answer.computed + answer.tokens) // BLOCK_TOKENS) for answer in self.running)
        needed = sum(answer.queued.cost.blocks for answer in self.running)
        self.report = LoadReport(
            steps=self.steps,
            running=len(self.running),
            free_blocks=BLOCKS - used,
            total_blocks=BLOCKS,
            free_sequences=SLOTS - len(self.running),
            promised_blocks=max(0, needed - used),
            waiting_prompt_tokens=sum(answer.prompt - answer.computed for answer in self.running),
            step_tokens=STEP_TOKENS,
            times=TIMES,
        )
        return served


class Day:
    """Callers at random moments, so many times what the engine can do, each with a deadline for its first token."""

    CAPACITY_PER_S = 5.0

    def __init__(self, policy, load, tenants, seconds=60.0):
        self.draw = random.Random(7)
        self.engine = Engine()
        config = DispatchConfig(line=QueueOrderConfig(policy=policy), headroom=0.0)
        self.core = DispatchCore([Endpoint("replica", self.engine)], config)
        self.load_shedder = LoadShedder(self.core, config, lambda: 0.0)
        self.now_s = 1000.0
        self.arrived = self.expired = self.good = 0
        self.errors, self.come_back_s = [], []
        rate = self.CAPACITY_PER_S * load
        arrives_s, step_ends_s = self.now_s + self.draw.expovariate(rate), None
        while self.now_s < 1000.0 + seconds:
            if step_ends_s is None and (self.engine.sent or self.engine.running):
                step_ends_s = self.now_s + self.engine.begin()
            if step_ends_s is not None and step_ends_s < arrives_s:
                self.now_s, step_ends_s = step_ends_s, None
                self.step()
                self.core.refresh(self.now_s)
                if self.engine.sent or self.engine.running:
                    step_ends_s = self.now_s + self.engine.begin()
                self.turn()
            else:
                self.now_s = arrives_s
                arrives_s += self.draw.expovariate(rate)
                self.arrive(self.draw.randrange(tenants))
        self.goodput = self.good / seconds

    def arrive(self, tenant):
        self.arrived += 1
        tokens = self.draw.randint(40, 80)
        made = DispatchRequest(
            id=str(self.arrived),
            organisation=f"org-{tenant}",
            flow=Flow((FlowLevel(f"org-{tenant}"), FlowLevel("key"))),
            prompt_tokens=tokens,
            prompts=[[1] * tokens],
            max_tokens=self.draw.randint(60, 140),
            choices=1,
            arrived_s=self.now_s,
            ttft_deadline_s=self.now_s + TTFT_S,
        )
        try:
            self.load_shedder.check(made, self.now_s)
        except Refused as refusal:
            self.come_back_s.append(refusal.retry_after_s)
            return
        self.core.join(self.core.new_entry(made), self.now_s)
        self.turn()

    def turn(self):
        for queued in self.core.run_dispatch_pass(self.now_s):
            if queued.state is QueueState.DISPATCHED:
                self.engine.sent.append(Running(queued))
                self.core.on_submitted(queued)
            else:
                self.expired += 1
                self.core.leave(queued, self.now_s, finished=False)
        assert len(self.engine.sent) + len(self.engine.running) <= SLOTS

    def step(self):
        for answer in self.engine.end():
            queued = answer.queued
            self.core.charge_tokens(queued, answer.prompt if answer.tokens == 1 else 0, 0, 1)
            if answer.tokens == 1:
                self.core.on_first_token(queued, self.now_s)
                actual_s = self.now_s - queued.joined_s
                self.errors.append(abs(queued.predicted_position.ttft_s - actual_s) / actual_s)
                self.good += actual_s <= TTFT_S
            if answer.tokens == queued.request.max_tokens:
                self.core.leave(queued, self.now_s, finished=True)

    def error(self, quantile):
        late = sorted(self.errors[len(self.errors) // 4 :])
        return late[int(quantile * len(late))]


@pytest.mark.parametrize("load", [2, 10])
def test_predictions_are_exact_when_requests_run_in_order_of_arrival(load):
    day = Day("fifo", load, tenants=1)
    assert day.goodput >= 0.95 * Day.CAPACITY_PER_S
    assert day.expired <= 0.02 * day.arrived
    assert day.error(0.9) <= 0.15


@pytest.mark.parametrize("load", [2, 10])
def test_with_several_tenants_goodput_holds_and_predictions_are_mostly_kept(load):
    day = Day("fair", load, tenants=5)
    assert day.goodput >= 0.9 * Day.CAPACITY_PER_S
    assert day.expired <= 0.05 * day.arrived
    assert day.error(0.5) <= 0.35
    assert min(day.come_back_s) > 0
    assert max(day.come_back_s) < 70


def test_below_capacity_no_request_is_rejected():
    day = Day("fair", 0.5, tenants=5)
    assert not day.come_back_s
    assert day.expired == 0
    assert day.good >= 0.97 * day.arrived
    assert day.error(0.5) <= 0.1
