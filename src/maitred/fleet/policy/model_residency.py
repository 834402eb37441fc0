"""One model that can be in memory or not: what it takes, how long it loads, how it is used."""

from dataclasses import dataclass
from enum import StrEnum

_FOLLOW = 0.5
"""Weight of the newest measurement. Loads are few, and what slows them (a cold file cache, a busy machine) comes and
goes."""


class ResidencyPhase(StrEnum):
    """Where a model is."""

    OUT = "out"
    LOADING = "loading"
    IN = "in"
    LEAVING = "leaving"
    """Its process is being ended; until that is gone, its memory is taken."""


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """What a model has to do now."""

    waiting: int = 0
    running: int = 0

    @property
    def any(self) -> bool:
        """Whether it has anything to do."""
        return bool(self.waiting or self.running)


class MovingEstimate:
    """A duration that follows what is measured.

    Args:
        guess_s: What stands for it before the first measurement.
    """

    __slots__ = ("_initial_s", "measured", "seconds")

    def __init__(self, guess_s: float) -> None:
        self._initial_s = self.seconds = guess_s
        self.measured = 0

    def observe(self, seconds: float) -> None:
        """It took so long."""
        self.seconds = seconds if not self.measured else self.seconds + _FOLLOW * (seconds - self.seconds)
        self.measured += 1

    def observe_others(self, ratio: float) -> None:
        """Others took so many times what had been guessed; believed until it is measured itself."""
        if not self.measured:
            self.seconds = self._initial_s * ratio

    @property
    def ratio(self) -> float:
        """What it takes, in times of what had been guessed."""
        return self.seconds / self._initial_s if self._initial_s else 1.0


class ModelResidency:
    """A model and its history.

    Args:
        name: The name that requests use.
        memory_bytes: What it takes while it is in, as estimated.
        pinned: Never unloaded.
        keep_alive_s: Unloaded after it was idle for so long, even if nobody needs the room; None: never for that.
        load_s: How long its first load is expected to take.

    Attributes:
        phase: Where it is...
        since_s: ...and since when.
        asked_s: Since when it is needed and not there; None: it is not.
        used_s: When it last had something to do.
        gap_s: How long it usually has nothing to do in between; infinite before that has been seen once.
        served: Whether it has had anything to do since it was loaded.
        not_before_s: After a load that failed, when the next one may be tried.
        wanted: Whether it is to be loaded though no request waits for it.
        dismissed: Whether the operator has told it to go...
        naps: ...and to keep its process, so that it is back soon.
        asleep: Whether it has kept it: out, or on its way in from there.
        asleep_bytes: What that takes.
        held: Whether it is not to be loaded until he says so.
        worked_s: When it last did something for anybody; None: it never has.
        load: From the start of its process until it can serve.
        waking: The same, from its sleep.
        drain: From the end of its turn until its last answer is complete.
        spell: For how long it has something to do at a time.
    """

    def __init__(
        self, name: str, memory_bytes: int, *, pinned: bool = False, keep_alive_s: float | None = None, load_s: float
    ) -> None:
        self.name = name
        self.memory_bytes = memory_bytes
        self.pinned = pinned
        self.keep_alive_s = keep_alive_s
        self.phase = ResidencyPhase.OUT
        self.since_s = 0.0
        self.asked_s: float | None = None
        self.used_s = 0.0
        self.gap_s = float("inf")
        self.served = False
        self.not_before_s = float("-inf")
        self.wanted = pinned
        self.dismissed = self.held = self.naps = self.asleep = False
        self.asleep_bytes = 0
        self.worked_s: float | None = None
        self.load = MovingEstimate(load_s)
        self.waking = MovingEstimate(load_s)
        self.drain = MovingEstimate(0.0)
        self.spell = MovingEstimate(0.5)
        self._busy_s: float | None = None

    @property
    def counted_bytes(self) -> int:
        """What it takes as things stand."""
        if self.asleep and self.phase in (ResidencyPhase.OUT, ResidencyPhase.LEAVING):
            return self.asleep_bytes
        return 0 if self.phase is ResidencyPhase.OUT else self.memory_bytes

    @property
    def ready_in_s(self) -> float:
        """How long it should take to come."""
        return self.waking.seconds if self.asleep else self.load.seconds

    def enter(self, phase: ResidencyPhase, now_s: float) -> None:
        """It is there from now on."""
        wanted_back = self.phase is ResidencyPhase.LEAVING and self.wanted
        self.phase, self.since_s = phase, now_s
        if phase is ResidencyPhase.IN:
            self.served, self.wanted, self.asked_s, self.used_s = False, False, None, now_s
            self.asleep = False
        elif phase is ResidencyPhase.OUT:
            self.wanted, self.dismissed, self.naps = self.pinned or wanted_back, False, False

    def observe(self, demand: ModelDemand, now_s: float) -> None:
        """This is what it has to do now."""
        there = self.phase is ResidencyPhase.IN
        if demand.any:
            if self._busy_s is None and self.used_s:
                gap_s = now_s - self.used_s
                self.gap_s = gap_s if self.gap_s == float("inf") else self.gap_s + _FOLLOW * (gap_s - self.gap_s)
            self.used_s = now_s
            self.served = self.served or there
            self.worked_s = now_s if there else self.worked_s
            self._busy_s = now_s if self._busy_s is None else self._busy_s
        elif self._busy_s is not None:
            if there:
                self.spell.observe(now_s - max(self._busy_s, self.since_s))
            self._busy_s = None
        if not there:
            needed = not self.held and (demand.waiting > 0 or self.wanted)
            self.asked_s = (now_s if self.asked_s is None else self.asked_s) if needed else None

    def next_use_s(self, now_s: float) -> float:
        """For how long an idle model is expected to stay idle in all, counted from its last use."""
        idle_s = now_s - self.used_s
        return max(idle_s, self.gap_s) if self.served else idle_s
