"""A model whose number of replicas an autoscaler decides, with requests as a fluid that Poisson noise moves."""

import math
import random

from maitred.core.replica import StepTimes
from maitred.scaling.autoscaler import Autoscaler
from maitred.scaling.capacity import ReplicaCapacity
from maitred.scaling.demand import ArrivalWindow, Demand
from maitred.scaling.forecast import DemandForecast
from maitred.scaling.objectives import ScalingObjectives
from maitred.scaling.replica_status import ReplicaPhase, ReplicaStatus
from maitred.scaling.startup_times import StartKind, StartupTimes

TIMES = StepTimes(fixed_s=0.012, token_s=5e-5, context_token_s=2e-8, decode_s=1e-4, chunk_s=2e-4)
CAPACITY = ReplicaCapacity(times=TIMES, max_sequences=32, kv_tokens=10_000_000)
PROMPT, OUTPUT = 600, 200
RESIDENT_S = 4.5
"""About how long a request runs beside a full batch."""


def objectives(**changed) -> ScalingObjectives:
    return ScalingObjectives(**{"ttft_s": 2.0, "itl_s": 0.05, "max_replicas": 64, **changed})


def autoscaler(*, lead_s: float = 30.0, **changed) -> Autoscaler:
    return Autoscaler(objectives(**changed), StartupTimes({StartKind.COLD: lead_s}), DemandForecast())


def serving(number: int, since_s: float = -1_000.0) -> list[ReplicaStatus]:
    return [
        ReplicaStatus(name=f"serving-{index}", phase=ReplicaPhase.SERVING, since_s=since_s) for index in range(number)
    ]


def window(at_s: float, requests: float, length_s: float = 1.0) -> ArrivalWindow:
    return ArrivalWindow(
        start_s=at_s - length_s,
        length_s=length_s,
        requests=requests,
        prompt_tokens=requests * PROMPT,
        output_tokens=requests * OUTPUT,
    )


def poisson(random_: random.Random, mean: float) -> int:
    if mean > 50:
        return max(0, round(random_.gauss(mean, math.sqrt(mean))))
    left, count = math.exp(-mean), 0
    product = random_.random()
    while product > left:
        product *= random_.random()
        count += 1
    return count


class ScaledModel:
    """Replicas that start as the autoscaler says; requests wait while all slots are taken."""

    def __init__(self, scaler: Autoscaler, *, lead_s: float = 30.0, replicas: int = 1, seed: int = 0) -> None:
        self.scaler, self.lead_s = scaler, lead_s
        self.since_s = [-1_000.0] * replicas
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.running = self.waiting = 0.0
        self.changes: list[tuple[float, int]] = []
        self.decision = None

    def play(self, seconds: float, rate, every_s: float = 1.0) -> None:
        """Plays with arrivals at `rate` of the time, in requests per second."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += every_s
            come = poisson(self.random, rate(self.now_s) * every_s)
            ready = sum(since_s + self.lead_s <= self.now_s for since_s in self.since_s)
            self.running *= math.exp(-every_s / RESIDENT_S)
            self.waiting += come
            # Within the time, slots become free and are taken again.
            taken = min(self.waiting, max(0.0, ready * 32 * (1 + every_s / RESIDENT_S) - self.running))
            self.waiting -= taken
            self.running = min(ready * 32.0, self.running + taken)
            self.decide(come, every_s)

    def decide(self, come: float, every_s: float) -> None:
        statuses = [
            ReplicaStatus(
                name=f"{index}",
                phase=ReplicaPhase.SERVING if since_s + self.lead_s <= self.now_s else ReplicaPhase.STARTING,
                since_s=since_s,
            )
            for index, since_s in enumerate(self.since_s)
        ]
        demand = Demand(
            waiting=round(self.waiting), running=round(self.running), window=window(self.now_s, come, every_s)
        )
        self.decision = self.scaler.decide(demand, statuses, CAPACITY, self.now_s)
        if self.decision.desired != len(self.since_s):
            self.changes.append((self.now_s, self.decision.desired))
        del self.since_s[self.decision.desired :]
        self.since_s += [self.now_s] * (self.decision.desired - len(self.since_s))
