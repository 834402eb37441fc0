"""A fleet of replicas in simulated time, before which requests wait in one line."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.scaling import fleet_kernels as kernels
from benchmarks.support.scaling.fleet_kernels import ABSENT, Counts, FleetState, Floats
from maitred.core.replica import StepTimes


@dataclass(frozen=True)
class RequestTrace:
    """Requests in the order of time.

    Attributes:
        name: Of the trace.
        seconds: Length of the trace.
        arrived: Seconds since its start.
        prompts: Prompt tokens.
        outputs: Output tokens, at least one.
    """

    name: str
    seconds: float
    arrived: Floats
    prompts: Counts
    outputs: Counts

    @cached_property
    def prompt_sums(self) -> Counts:
        """Prompt tokens of the first requests: of none, of one, of two..."""
        return np.concatenate([[0], np.cumsum(self.prompts)])

    def part(self, begin_s: float, end_s: float) -> "RequestTrace":
        """Returns the requests of a time span, which then starts at 0."""
        low, high = np.searchsorted(self.arrived, (begin_s, end_s))
        rows = slice(low, high)
        return RequestTrace(
            self.name, end_s - begin_s, self.arrived[rows] - begin_s, self.prompts[rows], self.outputs[rows]
        )


@dataclass(frozen=True)
class ReplicaKind:
    """What one replica is: its step times, and how much runs at once."""

    times: StepTimes
    slots: int
    step_tokens: int


@dataclass(frozen=True)
class Observation:
    """What is known at the gateway at the time of a decision.

    Attributes:
        now_s: Time.
        waiting: Requests that wait for a slot.
        oldest_wait_s: For how long the first of them has waited.
        running: Requests at replicas.
        serving: Replicas that take requests.
        starting: Replicas that are ordered and not ready.
        slots: Slots of a replica.
        running_s: Integral of the running requests of serving replicas over time.
        serving_s: Integral of the serving replicas over time.
        arrived: Requests so far.
        finished: Answers so far.
    """

    now_s: float
    waiting: int
    oldest_wait_s: float
    running: int
    serving: int
    starting: int
    slots: int
    running_s: float
    serving_s: float
    arrived: int
    finished: int

    @property
    def replicas(self) -> int:
        """Replicas that serve or start."""
        return self.serving + self.starting

    @property
    def ongoing(self) -> int:
        """Requests that wait or run."""
        return self.waiting + self.running


class SimulatedFleet:
    """Replicas that come and go, and the requests of a trace.

    A request waits at the gateway until a serving replica has a free slot (late binding, first come first served); of
    several it takes the one that runs least. A replica costs from its order to the end of its drain.

    Args:
        trace: Requests.
        kind: Of all replicas.
        lead_s: Seconds of a start.
        spread: Standard deviation of the logarithm of the seconds of a start.
        replicas: That serve from the beginning.
        most: Most replicas at once, draining ones included.
        seed: Of the seconds of starts.
    """

    def __init__(
        self,
        trace: RequestTrace,
        kind: ReplicaKind,
        *,
        lead_s: float,
        spread: float = 0.0,
        replicas: int,
        most: int = 128,
        seed: int = 0,
    ) -> None:
        self.trace, self.kind, self.lead_s = trace, kind, lead_s
        requests = len(trace.arrived)
        rows, table = (most,), (most, kind.slots)
        times = kind.times
        leads = lead_s * np.exp(np.random.default_rng(seed).normal(0, spread, 4096))
        self.state = FleetState(
            arrived=trace.arrived,
            prompts=trace.prompts,
            outputs=trace.outputs,
            first=np.full(requests, np.nan),
            finished=np.full(requests, np.nan),
            output_sums=np.zeros(requests + 1, np.int64),
            times=np.array(
                [times.fixed_s, times.token_s, times.context_token_s, times.decode_s, times.chunk_s, times.pair_s]
            ),
            sums=np.zeros(4),
            counts=np.zeros(5, np.int64),
            phase=np.zeros(rows, np.int64),
            ordered=np.zeros(rows),
            ready=np.zeros(rows),
            running=np.zeros(rows, np.int64),
            steps=np.zeros(rows, np.int64),
            run_began=np.zeros(rows),
            run_steps=np.zeros(rows, np.int64),
            run_ends=np.full(rows, np.inf),
            decoding=np.zeros(rows, np.int64),
            context=np.zeros(rows, np.int64),
            request=np.full(table, -1),
            left=np.zeros(table, np.int64),
            chunk=np.zeros(table, np.int64),
            last_step=np.zeros(table, np.int64),
            leads=leads,
            step_tokens=kind.step_tokens,
        )
        for row in range(replicas):
            kernels.order(self.state, row, 0.0, 0.0)
            kernels.serve(self.state, row, 0.0)

    @property
    def now_s(self) -> float:
        """Simulated time."""
        return float(self.state.sums[kernels.NOW])

    @property
    def starts(self) -> int:
        """Replicas that were ordered after the beginning."""
        return int(self.state.counts[kernels.STARTS])

    def advance(self, until_s: float, *, stop_at_wait: bool = False) -> float:
        """Lets time pass; see `fleet_kernels.advance`."""
        return kernels.advance(self.state, until_s, stop_at_wait)

    def scale(self, desired: int) -> int:
        """See `fleet_kernels.scale`."""
        return kernels.scale(self.state, desired)

    def observe(self) -> Observation:
        """Returns what is known now."""
        waiting, oldest_s, running, serving, starting = kernels.observe(self.state)
        sums = self.state.sums
        return Observation(
            now_s=float(sums[kernels.NOW]),
            waiting=waiting,
            oldest_wait_s=oldest_s,
            running=running,
            serving=serving,
            starting=starting,
            slots=self.kind.slots,
            running_s=float(sums[kernels.RUNNING_S]),
            serving_s=float(sums[kernels.SERVING_S]),
            arrived=int(self.state.counts[kernels.ARRIVED]),
            finished=int(self.state.counts[kernels.FINISHED]),
        )

    def replica_seconds(self) -> float:
        """Returns the seconds for which replicas have been paid until now."""
        there = self.state.phase != ABSENT
        return float(self.state.sums[kernels.PAID_S] + np.sum(self.now_s - self.state.ordered[there]))

    def missed(self, *, ttft_s: float, itl_s: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Returns for each request whether its TTFT, and whether its mean ITL misses the objective.

        A request that has no first token, or no end, has missed.
        """
        state = self.state
        late = ~(state.first - state.arrived <= ttft_s)
        gaps = np.maximum(state.outputs - 1, 1)
        slow = ~((state.finished - state.first) / gaps <= itl_s)
        return late, slow & ~late
