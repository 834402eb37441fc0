"""A gateway before one engine in simulated time: requests that come at random, and what becomes of them.

Queue admission, queue, forecast, engine and scheduler are those of production; simulated are the clock, the time that a
step takes, and the transfer between the two processes. All that happens follows from the seed.
"""

import heapq
import math
import os
import random
from collections.abc import Iterator
from itertools import count

from benchmarks.support.simulated_replicas import Clock as SimulatedClock
from maitred.core.clock import Clock
from maitred.core.errors import Refused
from maitred.core.flow import Flow, FlowLevel
from maitred.core.replica import LoadReport, ModelCard, StepTimes
from maitred.core.request import EngineRequest, SamplingParams, TokenLogprobs
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.queue import QueuedRequest, QueueState
from maitred.dispatch.request import DispatchRequest, Endpoint
from maitred.dispatch.shedding import LoadShedder
from maitred.engine.config import BatchLineConfig, EngineConfig
from maitred.engine.engine import Engine
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.scheduler.plan import StepPlan
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.step_times import StepWork
from maitred.wire.frames import TokenOutput

TIMES = StepTimes(fixed_s=0.0047, token_s=0.00011, decode_s=0.0001, chunk_s=0.002)
"""Roughly those of the bundled model on two cores."""
PLACES, OVERCOMMIT_SLOTS, BLOCKS, BLOCK_TOKENS, STEP_TOKENS, CONTEXT_TOKENS = 32, 16, 1200, 16, 768, 2048
CARD = ModelCard(
    name="simulated",
    context_tokens=CONTEXT_TOKENS,
    vocab_size=40_000,
    eos_token_ids=(),
    max_sequences=PLACES,
    kv_capacity_tokens=BLOCKS * BLOCK_TOKENS,
    max_choices=8,
    dtype="float32",
    device="cpu",
)
TENANTS, PROMPT_TOKENS, OUTPUT_TOKENS = 5, (40, 80), (60, 140)
TRANSFER_S = 0.001
"""From the engine to the gateway."""
OWNER = "gateway"


class NoModel:
    """Computes nothing; every token is the same.

    Attributes:
        work: Of the last step.
    """

    def __init__(self) -> None:
        self.work = StepWork()

    def execute(self, plan: StepPlan) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
        """See `maitred.engine.engine.PlanRunner`."""
        self.work = StepWork.of(plan)
        return [[5] for _ in plan.sampling], [None] * len(plan.sampling)

    def forget(self, sequence: Sequence) -> None:
        """See `maitred.engine.engine.PlanRunner`."""


def make_engine(model: NoModel, line: BatchLineConfig, clock: Clock) -> Engine:
    """The engine of production around a model that computes nothing."""
    config = EngineConfig(
        block_tokens=BLOCK_TOKENS,
        max_sequences=PLACES,
        guests=OVERCOMMIT_SLOTS,
        step_tokens=STEP_TOKENS,
        prefix_cache=False,
        line=line,
    )
    scheduler = Scheduler(BlockPool(BLOCKS), config, context_tokens=CONTEXT_TOKENS, eos_token_ids=())
    return Engine(scheduler, model, clock, vocab_size=CARD.vocab_size, max_choices=CARD.max_choices)


class ReportedReplica:
    """What the gateway knows of the engine: its last report."""

    weight = 1.0

    def __init__(self, report: LoadReport) -> None:
        self.report = report
        self.sent = 0
        self.read = 0

    def card(self) -> ModelCard:
        """See `maitred.core.replica.ReplicaBase`."""
        return CARD

    def load(self) -> LoadReport:
        """See `maitred.core.replica.ReplicaBase`."""
        return self.report

    def count_unreported(self) -> int:
        """See `maitred.core.replica.ReplicaBase`."""
        return self.sent - self.read


class Simulation:
    """Requests of several tenants, in a Poisson stream, for one engine.

    Args:
        requests_per_s: How many come.
        line: The order in which they are served.
        objective_s: When a first token must be there; who is predicted later is refused.
        seed: Of all that is drawn.
        jitter: Standard deviation of the logarithm of what a step takes beside what the model says.

    Attributes:
        answered: Those who have had their first token, and after how long.
        output_tokens: That all have had.
    """

    def __init__(
        self, requests_per_s: float, line: BatchLineConfig, *, objective_s: float, seed: int, jitter: float = 0.0
    ) -> None:
        self.answered: list[tuple[QueuedRequest, float]] = []
        self.output_tokens = 0
        self._requests_per_s = requests_per_s
        self._objective_s = objective_s
        self._jitter = jitter
        self._numbers = count()
        self._clock = SimulatedClock()
        self._model = NoModel()
        self._engine = make_engine(self._model, line, self._clock)
        self._replica = ReportedReplica(self._engine.load())
        config = DispatchConfig(line=line)
        self._core = DispatchCore([Endpoint("engine", self._replica)], config)
        self._load_shedder = LoadShedder(self._core, config, lambda: 0.0)
        self._queued: dict[str, QueuedRequest] = {}
        self._step_ends_s = math.inf
        self._step_result: tuple[LoadReport, list[TokenOutput], int] = self._replica.report, [], 0
        """By the step that is under way: its report, its tokens, and how many requests it knew of."""
        self._in_transit: list[tuple[float, int, tuple[LoadReport, list[TokenOutput], int]]] = []
        self._reseed(seed)

    @property
    def now_s(self) -> float:
        """Simulated."""
        return self._clock.now_s

    def run(self, seconds: float) -> Iterator[QueuedRequest]:
        """Lets time go by; gives each request as it is let in."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            if (queued := self._next()) is not None:
                yield queued

    def outcome(self, watched: QueuedRequest, seed: int, within_s: float) -> float | None:
        """When the first token of a request would come if other requests came from now on; None: not within that time.

        The simulation is copied as it stands, with everything that is hidden from the gateway; it does not change.
        """
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.write(writer, repr(self._branch(watched, seed, within_s)).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        return None if text == "None" else float(text)

    def _branch(self, watched: QueuedRequest, seed: int, within_s: float) -> float | None:
        self._reseed(seed)
        before = len(self.answered)
        for _ in self.run(within_s):
            for queued, after_s in self.answered[before:]:
                if queued is watched:
                    return after_s
            before = len(self.answered)
        return None

    def _reseed(self, seed: int) -> None:
        self._draw, self._steps_draw = random.Random(seed), random.Random(seed + 1)
        self._next_comes_s = self.now_s + self._draw.expovariate(self._requests_per_s)

    def _next(self) -> QueuedRequest | None:
        """The next thing that happens."""
        arrives_s = self._in_transit[0][0] if self._in_transit else math.inf
        self._clock.now_s = min(arrives_s, self._step_ends_s, self._next_comes_s)
        if self.now_s == arrives_s:
            self._hear(*heapq.heappop(self._in_transit)[2])
        elif self.now_s == self._step_ends_s:
            heapq.heappush(self._in_transit, (self.now_s + TRANSFER_S, next(self._numbers), self._step_result))
            self._step()
        else:
            self._next_comes_s += self._draw.expovariate(self._requests_per_s)
            return self._arrive()
        return None

    def _arrive(self) -> QueuedRequest | None:
        dispatch_request = self._make_request()
        try:
            self._load_shedder.check(dispatch_request, self.now_s)
        except Refused:
            return None
        queued = self._queued[dispatch_request.id] = self._core.new_entry(dispatch_request)
        self._core.join(queued, self.now_s)
        self._turn()
        return queued

    def _make_request(self) -> DispatchRequest:
        tenant, prompt_tokens = self._draw.randrange(TENANTS), self._draw.randint(*PROMPT_TOKENS)
        return DispatchRequest(
            id=str(next(self._numbers)),
            organisation=f"tenant-{tenant}",
            flow=Flow((FlowLevel(f"tenant-{tenant}"), FlowLevel("key"))),
            prompt_tokens=prompt_tokens,
            prompts=[[7] * prompt_tokens],
            max_tokens=self._draw.randint(*OUTPUT_TOKENS),
            choices=1,
            arrived_s=self.now_s,
            ttft_deadline_s=self.now_s + self._objective_s,
        )

    def _turn(self) -> None:
        """The gateway releases what it can, and gives up what is too late."""
        for queued in self._core.run_dispatch_pass(self.now_s):
            dispatch_request = queued.request
            if queued.state is not QueueState.DISPATCHED:
                self._core.leave(queued, self.now_s, finished=False)
                del self._queued[dispatch_request.id]
                continue
            sampling = SamplingParams(max_tokens=dispatch_request.max_tokens, seed=0)
            request = EngineRequest(
                dispatch_request.id,
                list(dispatch_request.prompts[0]),
                sampling,
                flow=dispatch_request.flow,
                expected_tokens=queued.expected_tokens,
            )
            self._engine.submit(OWNER, request)
            self._replica.sent += 1
            self._core.on_submitted(queued)
            if self._step_ends_s == math.inf:
                self._step()

    def _step(self) -> None:
        """The engine begins a step, if it has work; what comes of it is known when it ends."""
        if not self._engine.busy:
            self._step_ends_s = math.inf
            return
        read = self._replica.sent
        outputs = self._engine.step().get(OWNER, [])
        takes_s = self._model.work.seconds(TIMES) * math.exp(self._steps_draw.gauss(0, self._jitter))
        self._step_ends_s = self.now_s + takes_s
        self._step_result = self._engine.load(), outputs, read

    def _hear(self, report: LoadReport, outputs: list[TokenOutput], read: int) -> None:
        """The gateway receives the outputs of a step."""
        core = self._core
        self._replica.report, self._replica.read = report, read
        core.refresh(self.now_s)
        for output in outputs:
            queued = self._queued[output.request_id]
            first = queued.output_tokens == 0
            core.charge_tokens(queued, queued.request.prompt_tokens if first else 0, 0, 1)
            self.output_tokens += 1
            if first:
                core.on_first_token(queued, self.now_s)
                self.answered.append((queued, self.now_s - queued.joined_s))
            if output.delta.finish is not None:
                core.leave(queued, self.now_s, finished=True)
                del self._queued[output.request_id]
        self._turn()


def capacity(line: BatchLineConfig) -> float:
    """Requests per second that the engine can serve when there are always some."""
    simulation = Simulation(100.0, line, objective_s=1e9, seed=0)
    for _ in simulation.run(5):
        pass
    before = simulation.output_tokens
    for _ in simulation.run(20):
        pass
    return (simulation.output_tokens - before) / 20 / (sum(OUTPUT_TOKENS) / 2)
