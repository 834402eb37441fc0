"""Replicas in simulated time: real schedulers and block pools, with steps that take as long as a formula says."""

from collections.abc import Callable

from msgspec.structs import replace

from maitred.core.prefix import BlockUpdate
from maitred.core.replica import LoadReport, ModelCard, StepTimes
from maitred.core.request import EngineRequest, TokenLogprobs
from maitred.engine.config import EngineConfig
from maitred.engine.engine import Engine
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.scheduler.plan import StepPlan
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.scheduler.sequence import Sequence
from maitred.wire.frames import TokenOutput

BLOCK_TOKENS = 16
MAX_SEQUENCES, STEP_TOKENS, CONTEXT_TOKENS = 64, 128, 4_500
TIMES = StepTimes(fixed_s=0.01, token_s=0.0024)
OWNER = "gateway"


class Clock:
    """Simulated."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        """Now."""
        return self.now_s

    def wall_s(self) -> float:
        """Now."""
        return self.now_s


class Paper:
    """Computes nothing; the tokens do not matter, for no prompt contains an answer of the replay."""

    def __init__(self) -> None:
        self.step_s = 0.0

    def execute(self, plan: StepPlan) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
        """See `maitred.engine.engine.PlanRunner`."""
        self.step_s = TIMES.of(plan.tokens, 0)
        tokens = [[0] for _ in plan.sampling]
        return tokens, [None] * len(tokens)

    def forget(self, sequence: Sequence) -> None:
        """See `maitred.engine.engine.PlanRunner`."""


class SimulatedReplica:
    """Implements `core.ports.Host`. Whoever holds the clock begins steps and ends them.

    Args:
        name: Its name.
        blocks: Of its cache.
        clock: The time.

    Attributes:
        stepping: Whether a step is under way.
        busy_s: Seconds in steps so far.
    """

    def __init__(self, name: str, blocks: int, clock: Clock) -> None:
        self.name = name
        self.stepping = False
        self.busy_s = 0.0
        config = EngineConfig(block_tokens=BLOCK_TOKENS, max_sequences=MAX_SEQUENCES, guests=0, step_tokens=STEP_TOKENS)
        scheduler = Scheduler(BlockPool(blocks), config, context_tokens=CONTEXT_TOKENS, eos_token_ids=(-1,))
        self._paper = Paper()
        self.engine = Engine(scheduler, self._paper, clock, vocab_size=1 << 30, max_choices=1)
        self._card = ModelCard(
            name="simulated",
            context_tokens=CONTEXT_TOKENS,
            vocab_size=1 << 30,
            eos_token_ids=(),
            max_sequences=MAX_SEQUENCES,
            kv_capacity_tokens=blocks * BLOCK_TOKENS,
            max_choices=1,
            dtype="",
            device="",
        )
        self._unreported = 0
        self._load = self._report()

    # --- as dispatch sees it ---

    def card(self) -> ModelCard:
        """See `core.ports.Host`."""
        return self._card

    def load(self) -> LoadReport:
        """See `core.ports.Host`."""
        return self._load

    def count_unreported(self) -> int:
        """See `core.ports.Host`."""
        return self._unreported

    @property
    def weight(self) -> float:
        """See `core.ports.Host`."""
        return 1.0

    def on_change(self, listener: Callable[[], None]) -> None:
        """See `core.ports.Host`. Whoever ends a step knows that there is news."""

    # --- what happens there ---

    def submit(self, request: EngineRequest) -> None:
        """A request came."""
        self._unreported += 1
        self.engine.submit(OWNER, request)

    def begin(self) -> tuple[float, list[TokenOutput]] | None:
        """Begins a step, where there is something to do and none under way: how long it takes, and what it brings."""
        if self.stepping or not self.engine.busy:
            return None
        self.stepping = True
        outputs = self.engine.step().get(OWNER, [])
        self.busy_s += self._paper.step_s
        return self._paper.step_s, outputs

    def end(self) -> BlockUpdate | None:
        """The step is over, and the replica reports; what has changed in its cache."""
        self.stepping = False
        self._load, self._unreported = self._report(), 0
        return self.engine.block_update()

    def _report(self) -> LoadReport:
        # The engine would measure its steps, and they take no time here.
        return replace(self.engine.load(), times=TIMES)
