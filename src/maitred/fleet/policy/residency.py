"""Which models are in memory: load on demand, unload the least recently used, never above the budget, never thrash.

The model that has been needed for longest is loaded next, one at a time. Where there is no room, others must go. Which
of them may, is where least-recently-used alone fails: with three models in turn and room for two it unloads each model
just before it is needed, and loads all the time. Here a model that was loaded has a *turn*: so many times what its load
took (`turn_loads`), so that while all have work at most one part in ``1 + turn_loads`` of the time of a place in memory
goes into loading, however the load alternates. What waits for other models meanwhile is served together when they
come. During its turn a model may go only when it is idle and is not expected to be needed before it could be loaded
again: the break-even point of renting against buying (Karlin, Manasse, Rudolph and Sleator, "Competitive snoopy
caching", 1988), with the usual length of its idle times in place of the unknown future.

After its turn a model stays for as long as nobody needs its room. Then the idle ones go first, the one that is expected
to stay idle for longest before others; of those that are busy, the one that was loaded first. It is sent nothing new,
its running answers come to their end, its queue keeps its order and waits for its next turn.

So nobody starves: whoever is needed first waits at most for the rest of the turns of those that must go, for their
running answers, and for a load.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from maitred.fleet.policy.model_residency import ModelDemand, ModelResidency, MovingEstimate, ResidencyPhase

_IDLE = ModelDemand()
LEAST_TURN_S = 1.0
"""However short its load was: who waits for a model must have been let in before it goes."""

Demands = Mapping[str, ModelDemand]


@dataclass(frozen=True, slots=True)
class ResidencyActions:
    """What is to be done now."""

    load: str | None = None
    unload: tuple[str, ...] = ()
    sleep: tuple[str, ...] = ()
    """These go and keep their processes."""
    closed: frozenset[str] = frozenset()
    """These get nothing new: they are to go when their answers are complete."""


class ResidencyPolicy:
    """The models of one machine.

    Args:
        residents: Each of them, by name.
        budget_bytes: What those that are in may take together.
        turn_loads: How long a turn is, in times of the model's own load.

    Attributes:
        unload: From the order to unload until the memory is free.
        closed_s: Those that are to go and have work still, and since when.
    """

    def __init__(self, residents: Iterable[ModelResidency], budget_bytes: int, turn_loads: float) -> None:
        self.all = {resident.name: resident for resident in residents}
        self.budget_bytes = budget_bytes
        self._turn_loads = turn_loads
        self.unload = MovingEstimate(0.2)
        self.closed_s: dict[str, float] = {}

    def __getitem__(self, name: str) -> ModelResidency:
        return self.all[name]

    @property
    def taken_bytes(self) -> int:
        """What all take that are not out, and those that sleep."""
        return sum(one.counted_bytes for one in self.all.values())

    def available_bytes_for(self, name: str) -> int:
        """The most that a model could ever have: all but what others are pinned in."""
        return self.budget_bytes - sum(one.memory_bytes for one in self.all.values() if one.pinned and one.name != name)

    # --- decisions ---

    def decide(self, now_s: float, demands: Demands) -> ResidencyActions:
        """What to do. What it orders is to be begun at once; a second call before anything has changed orders no more.

        Args:
            now_s: Now.
            demands: What each model has to do; nothing for those that are not named.
        """
        for one in self.all.values():
            one.observe(demands.get(one.name, _IDLE), now_s)
        # One may be all three.
        going = dict.fromkeys((*self._victims(now_s, demands), *self._outlived(now_s, demands), *self._dismissed()))
        closed = frozenset(one.name for one in going if demands.get(one.name, _IDLE).running)
        self.closed_s = {
            name: since_s for name, since_s in self.closed_s.items() if name in {one.name for one in going}
        } | {name: now_s for name in closed if name not in self.closed_s}
        unload: list[str] = []
        sleep: list[str] = []
        for one in going:
            if one.name not in closed:
                if (since_s := self.closed_s.pop(one.name, None)) is not None:
                    one.drain.observe(now_s - since_s)
                (sleep if one.naps and one.phase is ResidencyPhase.IN else unload).append(one.name)
                one.enter(ResidencyPhase.LEAVING, now_s)
        head = self._head(now_s)
        free = self.budget_bytes - self.taken_bytes
        if head is None or head.memory_bytes - head.counted_bytes > free or self._loading():
            return ResidencyActions(None, tuple(unload), tuple(sleep), closed)
        head.enter(ResidencyPhase.LOADING, now_s)
        return ResidencyActions(head.name, tuple(unload), tuple(sleep), closed)

    def _there(self) -> list[ModelResidency]:
        return [one for one in self.all.values() if one.phase is ResidencyPhase.IN]

    def _loading(self) -> ModelResidency | None:
        return next((one for one in self.all.values() if one.phase is ResidencyPhase.LOADING), None)

    def _queue(self, now_s: float) -> list[ModelResidency]:
        """Those that are needed and can be loaded, in the order of their loads."""
        asked = [
            one
            for one in self.all.values()
            if one.phase is ResidencyPhase.OUT and one.asked_s is not None and not one.held
        ]
        return sorted((one for one in asked if one.not_before_s <= now_s), key=_order)

    def _head(self, now_s: float) -> ModelResidency | None:
        return next(iter(self._queue(now_s)), None)

    def _victims(self, now_s: float, demands: Demands) -> list[ModelResidency]:
        """Who has to go: enough of them, or nobody."""
        free = self.budget_bytes - sum(
            one.counted_bytes for one in self.all.values() if one.phase is not ResidencyPhase.LEAVING
        )
        head = None if self._loading() else self._head(now_s)
        # A model may turn out larger than was thought. Then somebody must go, whoever's turn it is.
        over = free < 0
        lacking = -free if over else head.memory_bytes - head.counted_bytes - free if head is not None else 0
        victims: list[ModelResidency] = []
        for one in self.all.values():
            if lacking > 0 and _sleeps(one) and one is not head:
                victims.append(one)
                lacking -= one.asleep_bytes
        for one in sorted(self._there(), key=lambda one: self._preference(one, demands.get(one.name, _IDLE), now_s)):
            if lacking <= 0:
                break
            if not one.pinned and (over or self.may_go_s(one, now_s, demands) <= now_s):
                victims.append(one)
                lacking -= one.memory_bytes
        return victims if lacking <= 0 or over else []

    def _preference(self, one: ModelResidency, demand: ModelDemand, now_s: float) -> tuple[bool, float, str]:
        """Who goes first."""
        return (
            not one.dismissed and demand.any,
            one.since_s if demand.any else -one.next_use_s(now_s),
            one.name,
        )

    def _outlived(self, now_s: float, demands: Demands) -> list[ModelResidency]:
        """Who has been idle for so long that its memory is given back though nobody needs it."""
        return [
            one
            for one in self._there()
            if one.keep_alive_s is not None
            and not (one.pinned or demands.get(one.name, _IDLE).any)
            and now_s - one.used_s >= one.keep_alive_s
        ]

    def _dismissed(self) -> list[ModelResidency]:
        """Whom the operator has told to go; of those that sleep, too, a process can be ended."""
        return [one for one in self.all.values() if one.dismissed and (one.phase is ResidencyPhase.IN or _sleeps(one))]

    def turn_s(self, one: ModelResidency) -> float:
        """How long its turn is."""
        return max(LEAST_TURN_S, self._turn_loads * one.load.seconds)

    def may_go_s(self, one: ModelResidency, now_s: float, demands: Demands) -> float:
        """From when on a model that is in may be told to go, as things stand."""
        over_s = one.since_s + self.turn_s(one)
        if one.dismissed:
            return now_s
        if demands.get(one.name, _IDLE).any:
            return over_s
        if one.next_use_s(now_s) >= one.load.seconds:
            return now_s
        return min(over_s, one.used_s + one.load.seconds)

    # --- what happened ---

    def loaded(self, name: str, now_s: float, measured_bytes: int) -> None:
        """A load is complete."""
        one = self.all[name]
        if one.asleep:
            one.waking.observe(now_s - one.since_s)
        else:
            one.load.observe(now_s - one.since_s)
            for other in self.all.values():
                other.load.observe_others(one.load.ratio)
        one.enter(ResidencyPhase.IN, now_s)
        self.grew(name, measured_bytes)

    def grew(self, name: str, measured_bytes: int) -> None:
        """A model was measured. It counts as estimated until it takes more: a KV cache fills as it is used."""
        one = self.all[name]
        one.memory_bytes = max(one.memory_bytes, measured_bytes)

    def unloaded(self, name: str, now_s: float) -> None:
        """The process of a model that was to go is gone."""
        one = self.all[name]
        self.unload.observe(now_s - one.since_s)
        one.asleep = False
        one.enter(ResidencyPhase.OUT, now_s)

    def fell_asleep(self, name: str, now_s: float, measured_bytes: int, wakes_in_s: float) -> None:
        """A model that was to sleep does."""
        one = self.all[name]
        one.asleep, one.asleep_bytes = True, measured_bytes
        if not one.waking.measured:
            one.waking = MovingEstimate(wakes_in_s)
        one.enter(ResidencyPhase.OUT, now_s)

    def failed(self, name: str, now_s: float, again_in_s: float) -> None:
        """A load has failed, and nothing of it is left."""
        one = self.all[name]
        one.asleep = False
        one.enter(ResidencyPhase.OUT, now_s)
        one.not_before_s, one.asked_s = now_s + again_in_s, None

    def want(self, name: str, now_s: float) -> None:
        """Somebody will come for it who could not wait."""
        one = self.all[name]
        if one.phase in (ResidencyPhase.OUT, ResidencyPhase.LEAVING) and not one.wanted:
            one.wanted = True
            one.asked_s = now_s if one.asked_s is None else one.asked_s

    def asked(self, name: str, now_s: float) -> None:
        """A request waits for it; noted at once, so that models are loaded in the order in which they were needed."""
        one = self.all[name]
        if one.phase is ResidencyPhase.OUT and one.asked_s is None and not one.held:
            one.asked_s = now_s

    # --- what the operator says ---

    def order_load(self, name: str, now_s: float) -> None:
        """It is loaded as if somebody waited for it, also after a load that has failed. To be called if it fits."""
        one = self.all[name]
        one.held = one.dismissed = one.naps = False
        one.not_before_s = float("-inf")
        self.want(name, now_s)

    def order_unload(self, name: str, *, hold: bool) -> None:
        """It goes when its answers have ended, and comes back when it is needed, or if held when it is told to."""
        one = self.all[name]
        one.held, one.wanted, one.naps = hold, False, False
        one.dismissed = one.phase in (ResidencyPhase.IN, ResidencyPhase.LOADING) or _sleeps(one)
        if hold:
            one.asked_s = None

    def order_sleep(self, name: str) -> None:
        """It gives its memory back when its answers have ended, and keeps its process. One that is out stays out."""
        one = self.all[name]
        one.wanted = False
        one.dismissed = one.naps = one.phase in (ResidencyPhase.IN, ResidencyPhase.LOADING)

    def pin(self, name: str, now_s: float) -> None:
        """It is loaded, and stays. To be called if it fits."""
        self.all[name].pinned = True
        self.order_load(name, now_s)

    def unpin(self, name: str) -> None:
        """It stays until others need its room."""
        one = self.all[name]
        one.pinned = one.wanted = False


def _sleeps(one: ModelResidency) -> bool:
    return one.asleep and one.phase is ResidencyPhase.OUT


def _order(one: ModelResidency) -> tuple[bool, float, str]:
    return not one.pinned, one.asked_s or 0.0, one.name
