"""A machine with models that take their time to load, and callers; time is counted in ticks."""

from collections import defaultdict
from dataclasses import dataclass, field

from maitred.fleet.policy.load_eta import ready_in_s
from maitred.fleet.policy.model_residency import ModelDemand, ModelResidency, ResidencyPhase
from maitred.fleet.policy.residency import ResidencyPolicy

TICK_S = 0.25
UNLOAD_S = 0.5
WAKE_S = 0.25


@dataclass
class Call:
    model: str
    at_s: float
    runs_s: float
    began_s: float | None = None
    predicted_s: float | None = None

    @property
    def waited_s(self):
        return self.began_s - self.at_s


@dataclass
class Machine:
    """Plays the decisions; every model serves any number of calls at once.

    Attributes:
        left: (model, when, whether its turn was over, its demand) of every unload.
    """

    residents: ResidencyPolicy
    loads_s: dict
    now_s: float = 100.0
    waiting: dict = field(default_factory=lambda: defaultdict(list))
    running: dict = field(default_factory=lambda: defaultdict(list))
    ends_s: dict = field(default_factory=dict)
    loads: list = field(default_factory=list)
    left: list = field(default_factory=list)
    calls: list = field(default_factory=list)
    closed: frozenset = frozenset()
    dozing: set = field(default_factory=set)
    asleep_bytes: int = 0

    def demands(self):
        return {name: ModelDemand(len(self.waiting[name]), len(self.running[name])) for name in self.residents.models}

    def call(self, model, runs_s=0.1):
        call = Call(model, self.now_s, runs_s)
        call.predicted_s = ready_in_s(self.residents, model, self.now_s, self.demands())
        self.waiting[model].append(call)
        self.calls.append(call)
        return call

    def tick(self):
        self.now_s += TICK_S
        for name, at_s in list(self.ends_s.items()):
            if at_s <= self.now_s:
                del self.ends_s[name]
                if self.residents[name].phase is ResidencyPhase.LOADING:
                    self.residents.on_loaded(name, self.now_s, 0)
                elif name in self.dozing:
                    self.dozing.remove(name)
                    self.residents.on_asleep(name, self.now_s, self.asleep_bytes, WAKE_S)
                else:
                    self.residents.on_unloaded(name, self.now_s)
        for name, calls in self.running.items():
            self.running[name] = [call for call in calls if call.began_s + call.runs_s > self.now_s]
        self.decide()
        for name, one in self.residents.models.items():
            if one.phase is ResidencyPhase.LOADED and name not in self.closed:
                for call in self.waiting[name]:
                    call.began_s = self.now_s
                self.running[name] += self.waiting[name]
                self.waiting[name] = []

    def decide(self):
        before = {
            name: (one.phase_since_s + self.residents.turn_s(one) <= self.now_s, one.next_use_s(self.now_s))
            for name, one in self.residents.models.items()
        }
        phases = {name: one.phase for name, one in self.residents.models.items()}
        demands = self.demands()
        desired = self.residents.decide(self.now_s, demands)
        self.closed = frozenset(self.residents.draining_since_s)
        for name, one in self.residents.models.items():
            is_open = one.phase is ResidencyPhase.LOADED and name not in self.closed
            assert desired[name].serving == (is_open or one.phase is ResidencyPhase.LOADING)
            assert desired[name].asleep <= (one.is_asleep or one.sleep_ordered) * (not desired[name].serving)
            if name in self.closed:
                assert one.phase is ResidencyPhase.LOADED
                assert not one.is_pinned
            if one.phase is phases[name]:
                continue
            if one.phase is ResidencyPhase.UNLOADING:
                self.ends_s[name] = self.now_s + UNLOAD_S
                if one.sleep_ordered:
                    assert not demands[name].running
                    self.dozing.add(name)
                else:
                    self.left.append((name, self.now_s, before[name][0], before[name][1], demands[name]))
            elif one.phase is ResidencyPhase.LOADING:
                self.loads.append(name)
                self.ends_s[name] = self.now_s + (WAKE_S if one.is_asleep else self.loads_s[name])
        assert self.residents.used_bytes <= self.residents.budget_bytes

    def until(self, now_s):
        while self.now_s < now_s:
            self.tick()


def machine(memories, budget, *, loads_s=2.0, turn_loads=3.0, pinned=(), keep_alive_s=None, guess_s=None):
    """Models called a, b, c…; what each takes, and what all may take."""
    names = [chr(97 + number) for number in range(len(memories))]
    times = dict(zip(names, loads_s if isinstance(loads_s, list) else [loads_s] * len(names), strict=True))
    residents = [
        ModelResidency(
            *(name, memory),
            is_pinned=name in pinned,
            keep_alive_s=keep_alive_s,
            load_s=times[name] if guess_s is None else guess_s,
        )
        for name, memory in zip(names, memories, strict=True)
    ]
    return Machine(ResidencyPolicy(residents, budget, turn_loads), times)
