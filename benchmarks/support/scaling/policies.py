"""Policies of others that choose the number of replicas, each from what its documentation says.

All see the queue of the gateway beside what runs, although most deployments show them less; all may take a draining
replica back, although pods that terminate do not return. Their start, and the limits from 1 to the most replicas, are
the same for all. Sources:

* Knative Serving, "Additional autoscaling configuration for Knative Pod Autoscaler" and ``config-autoscaler``: mean
  concurrency over a stable window of 60 s, a panic window of a tenth of it, panic at twice the capacity, no decrease in
  panic, at most half away at once (max-scale-down-rate 2), a tick of 2 s.
* Ray Serve, "Advanced Ray Serve Autoscaling": ongoing requests over a look-back of 30 s against
  `target_ongoing_requests` (2 by default), up only if wanted for 30 s without a break, down for 600 s, metrics every
  10 s.
* Kubernetes, "Horizontal Pod Autoscaling": a sync each 15 s, a tolerance of 0.1, the highest recommendation of 300 s
  before a decrease, an increase of at most 100 % or 4 pods in 15 s, pods that are not ready count as idle.
* KEDA, "ScaledObject specification": a metric for the autoscaler above, per replica (AverageValue). Its polling
  interval of 30 s is only for the step from zero; the autoscaler asks at each sync.
"""

import math
from collections import deque
from typing import Protocol

from benchmarks.support.scaling.fleet import Observation


class ScalingPolicy(Protocol):
    """Chooses the number of replicas from what is observed.

    Attributes:
        interval_s: Seconds between two decisions.
        at_wait: Whether a request that has to wait causes a decision at once.
    """

    interval_s: float
    at_wait: bool

    def desired(self, seen: Observation) -> int:
        """Returns how many replicas should serve or be on their way to it."""
        ...


class _Window:
    """Samples of the last seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> None:
        self._samples.append((now_s, value))
        while self._samples[0][0] <= now_s - self._length_s:
            self._samples.popleft()

    def mean(self) -> float:
        return sum(value for _, value in self._samples) / len(self._samples)

    def highest(self) -> float:
        return max(value for _, value in self._samples)


class KnativeConcurrency:
    """Knative's pod autoscaler on concurrency.

    Args:
        target: Requests per replica that are aimed at.
        window_s: Stable window.
        down_delay_s: Scale-down delay: the highest of so many seconds holds.
    """

    interval_s = 2.0
    at_wait = False

    def __init__(self, target: float, window_s: float = 60.0, down_delay_s: float = 0.0) -> None:
        self._target = target
        self._window_s = window_s
        self._stable, self._panic = _Window(window_s), _Window(window_s / 10)
        self._recent = _Window(max(down_delay_s, self.interval_s))
        self._panic_until_s, self._panic_replicas = -math.inf, 0

    def desired(self, seen: Observation) -> int:
        """See `ScalingPolicy`."""
        for window in (self._stable, self._panic):
            window.add(seen.now_s, seen.ongoing)
        ready = max(1, seen.serving)
        stable, panic = (
            max(math.ceil(window.mean() / self._target), math.floor(ready / 2))
            for window in (self._stable, self._panic)
        )
        if panic / ready >= 2:
            if seen.now_s > self._panic_until_s:
                self._panic_replicas = 0
            self._panic_until_s = seen.now_s + self._window_s
        wanted = stable
        if seen.now_s <= self._panic_until_s:
            wanted = self._panic_replicas = max(self._panic_replicas, panic, ready)
        self._recent.add(seen.now_s, wanted)
        return int(self._recent.highest())


class RayOngoingRequests:
    """Ray Serve's policy on ongoing requests.

    Args:
        target: `target_ongoing_requests`.
        up_delay_s: `upscale_delay_s`.
        down_delay_s: `downscale_delay_s`.
        look_back_s: `look_back_period_s`.
        interval_s: `metrics_interval_s`; the control loop itself is quicker, but sees nothing new.
        factor: `upscaling_factor` and `downscaling_factor`: what part of the distance is gone at once.
    """

    at_wait = False

    def __init__(
        self,
        target: float,
        up_delay_s: float = 30.0,
        down_delay_s: float = 600.0,
        look_back_s: float = 30.0,
        interval_s: float = 10.0,
        factor: float = 1.0,
    ) -> None:
        self.interval_s = interval_s
        self._target, self._factor = target, factor
        self._up_delay_s, self._down_delay_s = up_delay_s, down_delay_s
        self._window = _Window(look_back_s)
        self._since_s = 0.0
        self._direction = 0

    def desired(self, seen: Observation) -> int:
        """See `ScalingPolicy`."""
        self._window.add(seen.now_s, seen.ongoing)
        error = self._window.mean() / (self._target * max(1, seen.replicas))
        wanted = max(1, math.ceil(seen.replicas * (1 + (error - 1) * self._factor)))
        direction = (wanted > seen.replicas) - (wanted < seen.replicas)
        if direction != self._direction:
            self._direction, self._since_s = direction, seen.now_s
        delay_s = self._up_delay_s if direction > 0 else self._down_delay_s
        if direction and seen.now_s - self._since_s >= delay_s:
            self._direction = 0
            return wanted
        return seen.replicas


class _PodAutoscaler:
    """What Kubernetes' horizontal pod autoscaler makes of recommendations."""

    interval_s = 15.0
    at_wait = False
    tolerance = 0.1

    def __init__(self, stabilisation_s: float) -> None:
        self._recent = _Window(stabilisation_s)

    def _limited(self, seen: Observation, recommended: int) -> int:
        """Holds back decreases for the stabilisation window, and increases by the default policies."""
        self._recent.add(seen.now_s, recommended)
        held = max(recommended, min(seen.replicas, int(self._recent.highest())))
        return max(1, min(held, max(2 * seen.replicas, seen.replicas + 4)))


class UtilisationHpa(_PodAutoscaler):
    """Horizontal pod autoscaler on the share of taken slots, as a mean between two syncs.

    Args:
        target: Share of slots that is aimed at.
        stabilisation_s: Window before a decrease.
    """

    def __init__(self, target: float, stabilisation_s: float = 300.0) -> None:
        super().__init__(stabilisation_s)
        self._target = target
        self._running_s = self._serving_s = 0.0

    def desired(self, seen: Observation) -> int:
        """See `ScalingPolicy`."""
        serving_s = seen.serving_s - self._serving_s
        running_s = seen.running_s - self._running_s
        self._serving_s, self._running_s = seen.serving_s, seen.running_s
        ratio = running_s / (serving_s * seen.slots * self._target) if serving_s else 1.0
        wanted = seen.replicas
        if abs(ratio - 1) > self.tolerance:
            if ratio > 1:
                # Pods that are not ready count as idle, and the sum may then ask for nothing.
                idle_too = ratio * seen.serving / seen.replicas
                wanted = math.ceil(idle_too * seen.replicas) if idle_too > 1 + self.tolerance else seen.replicas
            else:
                wanted = math.ceil(ratio * max(1, seen.serving))
        return self._limited(seen, wanted)


class KedaMetric(_PodAutoscaler):
    """KEDA with a metric of requests, for the horizontal pod autoscaler.

    Args:
        target: Requests per replica that are aimed at.
        running_too: Whether running requests count beside the waiting ones.
        stabilisation_s: Window before a decrease.
    """

    def __init__(self, target: float, *, running_too: bool = False, stabilisation_s: float = 300.0) -> None:
        super().__init__(stabilisation_s)
        self._target, self._running_too = target, running_too

    def desired(self, seen: Observation) -> int:
        """See `ScalingPolicy`."""
        metric = seen.ongoing if self._running_too else seen.waiting
        ratio = metric / (self._target * seen.replicas)
        wanted = seen.replicas if abs(ratio - 1) <= self.tolerance else math.ceil(metric / self._target)
        return self._limited(seen, wanted)
