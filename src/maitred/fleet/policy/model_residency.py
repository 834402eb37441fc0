"""Residency of one model: its memory, its load times and its use."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

_NEWEST_WEIGHT = 0.5
"""Weight of the newest measurement.

Loads are few, and the causes that slow them (a cold file cache, a busy machine) come and go.
"""

MEASURED_FOR_S = 600.0
"""Time for which a measured memory counts, also once the process is gone: the next one is likely to take as much.

After it, a model that was found too large is tried again."""


class ResidencyPhase(StrEnum):
    """Phase of a model between being unloaded and loaded."""

    UNLOADED = "out"
    LOADING = "loading"
    LOADED = "in"
    UNLOADING = "leaving"
    """The process is being ended; its memory counts as used until the process is gone."""


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Current demand for a model: its waiting and running requests."""

    waiting: int = 0
    running: int = 0

    @property
    def any(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)


class MovingEstimate:
    """Estimate of a duration, as a moving average of its measurements.

    Args:
        guess_s: Estimate before the first measurement.
    """

    __slots__ = ("_initial_s", "count", "seconds")

    def __init__(self, guess_s: float) -> None:
        self._initial_s = self.seconds = guess_s
        self.count = 0

    def observe(self, seconds: float) -> None:
        """Adds a measurement to the average."""
        self.seconds = seconds if not self.count else self.seconds + _NEWEST_WEIGHT * (seconds - self.seconds)
        self.count += 1

    def scale_guess(self, ratio: float) -> None:
        """Scales the guess by the ratio that others have measured; without effect after the first own measurement."""
        if not self.count:
            self.seconds = self._initial_s * ratio

    @property
    def ratio(self) -> float:
        """Estimate divided by the guess."""
        return self.seconds / self._initial_s if self._initial_s else 1.0


class ModelResidency:
    """Model that can be in memory or not, with its history.

    Args:
        name: The name that requests use.
        estimated_bytes: Memory that it takes while it is loaded, as estimated.
        is_pinned: Whether it is never unloaded.
        keep_alive_s: Idle time after which it is unloaded even if no other model needs the memory; None: it is never
            unloaded for idleness.
        load_s: Expected time of its first load.

    Attributes:
        estimated_bytes: Memory that it takes while it is loaded, as estimated.
        phase: Its phase...
        phase_since_s: ...and since when it has it.
        needed_since_s: When the model became needed while it was not loaded; None: it is not needed, or is loaded.
        last_demand_s: When it last had a request that waited or ran.
        usual_idle_s: Usual length of its idle times; infinite before the first one.
        has_served: Whether it has had a request since it was loaded.
        not_before_s: Earliest time of the next load after a failed one.
        is_wanted: Whether it is to be loaded though no request waits for it.
        unload_ordered: Whether the operator has ordered its unload...
        sleep_ordered: ...and to keep its process, so that it is back soon.
        is_asleep: Whether its process sleeps: the model is unloaded, or is loading from sleep.
        asleep_bytes: Memory that the sleeping process takes.
        is_held: Whether it is not to be loaded until the operator says so.
        last_served_s: When it last had a request while it was loaded; None: never.
        load_time: Time from the start of its process until it can serve.
        wake_time: Time from sleep until it can serve.
        drain_time: Time from the end of its turn until its last answer is complete.
        busy_time: Length of a period without idleness.
    """

    def __init__(
        self,
        name: str,
        estimated_bytes: int,
        *,
        is_pinned: bool = False,
        keep_alive_s: float | None = None,
        load_s: float,
    ) -> None:
        self.name = name
        self.estimated_bytes = estimated_bytes
        self.is_pinned = is_pinned
        self.keep_alive_s = keep_alive_s
        self.phase = ResidencyPhase.UNLOADED
        self.phase_since_s = 0.0
        self.needed_since_s: float | None = None
        self.last_demand_s = 0.0
        self.usual_idle_s = float("inf")
        self.has_served = False
        self.not_before_s = float("-inf")
        self.is_wanted = is_pinned
        self.unload_ordered = self.is_held = self.sleep_ordered = self.is_asleep = False
        self.asleep_bytes = 0
        self.last_served_s: float | None = None
        self.load_time = MovingEstimate(load_s)
        self.wake_time = MovingEstimate(load_s)
        self.drain_time = MovingEstimate(0.0)
        self.busy_time = MovingEstimate(0.5)
        self._busy_since_s: float | None = None
        self._measured: deque[tuple[float, int]] = deque()
        """Time and bytes of the measurements above the estimate that no later one has exceeded, the largest first."""

    @property
    def memory_bytes(self) -> int:
        """Memory that counts for it while it is loaded: the most that was measured lately, and no less than estimated.

        The estimate is the least, since a KV cache fills as it is used.
        """
        return max(self.estimated_bytes, self._measured[0][1]) if self._measured else self.estimated_bytes

    def on_measured(self, measured_bytes: int, now_s: float) -> None:
        """Records the measured memory of its process, loaded or just being loaded."""
        while self._measured and self._measured[-1][1] <= measured_bytes:
            self._measured.pop()
        if measured_bytes > self.estimated_bytes:
            self._measured.append((now_s, measured_bytes))

    def forget_measured(self, now_s: float) -> None:
        """Forgets measurements that are old: a process that took more has given it back, or is gone."""
        while self._measured and now_s - self._measured[0][0] > MEASURED_FOR_S:
            self._measured.popleft()

    @property
    def counted_bytes(self) -> int:
        """Memory that it counts for in its present phase."""
        if self.is_asleep and self.phase in (ResidencyPhase.UNLOADED, ResidencyPhase.UNLOADING):
            return self.asleep_bytes
        return 0 if self.phase is ResidencyPhase.UNLOADED else self.memory_bytes

    @property
    def expected_start_s(self) -> float:
        """Expected time to load it, or to wake it if it sleeps."""
        return self.wake_time.seconds if self.is_asleep else self.load_time.seconds

    def enter_phase(self, phase: ResidencyPhase, now_s: float) -> None:
        """Moves the model to a phase."""
        wanted_back = self.phase is ResidencyPhase.UNLOADING and self.is_wanted
        self.phase, self.phase_since_s = phase, now_s
        if phase is ResidencyPhase.LOADED:
            self.has_served, self.is_wanted, self.needed_since_s, self.last_demand_s = False, False, None, now_s
            self.is_asleep = False
        elif phase is ResidencyPhase.UNLOADED:
            self.is_wanted, self.unload_ordered, self.sleep_ordered = self.is_pinned or wanted_back, False, False

    def observe(self, demand: ModelDemand, now_s: float) -> None:
        """Records the present demand for the model."""
        is_loaded = self.phase is ResidencyPhase.LOADED
        if demand.any:
            if self._busy_since_s is None and self.last_demand_s:
                idle_s = now_s - self.last_demand_s
                self.usual_idle_s = (
                    idle_s
                    if self.usual_idle_s == float("inf")
                    else self.usual_idle_s + _NEWEST_WEIGHT * (idle_s - self.usual_idle_s)
                )
            self.last_demand_s = now_s
            self.has_served = self.has_served or is_loaded
            self.last_served_s = now_s if is_loaded else self.last_served_s
            self._busy_since_s = now_s if self._busy_since_s is None else self._busy_since_s
        elif self._busy_since_s is not None:
            if is_loaded:
                self.busy_time.observe(now_s - max(self._busy_since_s, self.phase_since_s))
            self._busy_since_s = None
        if not is_loaded:
            needed = not self.is_held and (demand.waiting > 0 or self.is_wanted)
            self.needed_since_s = (now_s if self.needed_since_s is None else self.needed_since_s) if needed else None

    def next_use_s(self, now_s: float) -> float:
        """Returns the total time that an idle model is expected to stay idle, counted from its last use."""
        idle_s = now_s - self.last_demand_s
        return max(idle_s, self.usual_idle_s) if self.has_served else idle_s
