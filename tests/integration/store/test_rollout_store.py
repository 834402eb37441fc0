"""What was decided of rollouts outlives gateways, and reaches the others."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from maitred.app.admin.rollouts import RolloutAdmin
from maitred.core.clock import SystemClock
from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound, StoreUnavailable
from maitred.core.rollout import RolloutPhase
from maitred.routing.pools.config import PoolConfig, RoutesConfig, TargetConfig
from maitred.routing.pools.names import NameResolver
from maitred.routing.rollout.config import RolloutConfig
from maitred.routing.rollout.live import LiveRollouts
from maitred.routing.rollout.trial import TrialDecision
from maitred.store.database import open_database
from maitred.store.rollouts import RolloutStore
from maitred.wire.admin.requests import StartRollout, WeighRollout
from tests.support.rollout_store import PaperRollouts

CHAT = RolloutConfig(stable="v1", canary="v2", weight=0.2, shadow=0.1)
MODELS = ("v1", "v2", "v3")


class Gateway(RolloutAdmin):
    def __init__(self, store, declared=None):
        self.live = LiveRollouts()
        table = RoutesConfig(
            pools=dict.fromkeys(MODELS, PoolConfig()),
            names={name: [TargetConfig(pool=name)] for name in MODELS},
            rollouts=declared or {},
        )
        super().__init__(store, self.live, NameResolver(table), SystemClock(), interval_s=0.01)


@asynccontextmanager
async def started(store, **declared):
    gateway = Gateway(store, declared)
    await gateway.open(declared)
    task = asyncio.create_task(gateway.run())
    try:
        yield gateway
    finally:
        task.cancel()


async def until(condition):
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


@pytest.fixture
async def store(store_config):
    async with open_database(store_config) as database:
        yield RolloutStore(database, SystemClock())


async def test_an_aborted_canary_stays_so_until_the_configuration_says_something_else(store):
    async with started(store, chat=CHAT) as one, started(store, chat=CHAT) as other:
        assert (one.all()[0].phase, one.all()[0].weight, one.all()[0].shadow) == (RolloutPhase.RUNNING, 0.2, 0.1)
        one.apply_decision(one.live["chat"], TrialDecision.ABORT)
        assert one.all()[0].weight == 0.0, "before anybody has stored it"
        await until(lambda: other.all()[0].phase is RolloutPhase.ABORTED)
        assert (other.all()[0].weight, other.all()[0].shadow) == (0.0, 0.0)
    async with started(store, chat=CHAT) as again:
        assert again.all()[0].phase is RolloutPhase.ABORTED
        assert "after 0 requests" in again.all()[0].why
        with pytest.raises(Conflict):
            await again.weigh("chat", WeighRollout(name="chat", weight=0.5))
        restarted = await again.start(StartRollout(name="chat", weight=0.05))
        assert (restarted.phase, restarted.weight, restarted.canary) == (RolloutPhase.RUNNING, 0.05, "v2")
    async with started(store, chat=CHAT) as again:
        assert again.all()[0].weight == 0.05, "what the configuration says as before changes nothing"
    async with started(store, chat=RolloutConfig(stable="v1", canary="v3", weight=0.3)) as changed:
        assert (changed.all()[0].canary, changed.all()[0].weight) == ("v3", 0.3)
    async with started(store) as without:
        assert without.all() == []


async def test_a_rollout_of_the_administration_needs_no_configuration(store):
    async with started(store) as gateway:
        begun = await gateway.start(StartRollout(name="v1", canary="v2", weight=0.1, trial={"failed_abort": 0.01}))
        assert (begun.stable, begun.canary, begun.weight) == ("v1", "v2", 0.1)
        assert gateway.live["v1"].config.trial.failed_abort == 0.01
        for name, phase in (
            ("switch", RolloutPhase.SWITCHED),
            ("rollback", RolloutPhase.ROLLED_BACK),
            ("promote", RolloutPhase.PROMOTED),
        ):
            assert (await getattr(gateway, name)("v1")).phase is phase
        assert gateway.live.default_models == {"v1": "v2"}
    async with started(store) as gateway:
        assert gateway.live.default_models == {"v1": "v2"}
        assert (await gateway.end("v1")).phase is RolloutPhase.ENDED
        assert gateway.all() == []
        with pytest.raises(ResourceNotFound):
            await gateway.rollback("v1")


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (StartRollout(name="new", canary="v2"), "name"),
        (StartRollout(name="v1"), "canary"),
        (StartRollout(name="v1", canary="v9"), "canary"),
        (StartRollout(name="v1", canary="v1"), "canary"),
        (StartRollout(name="v1", canary="v2", trial={"slow": 1}), "trial"),
        (StartRollout(name="v1", canary="v2", trial={"slow_abort": 7}), "trial.slow_abort"),
        (StartRollout(name="v1", canary="v2", trial={"slow_abort": 0.5}), "trial.slow_promote"),
    ],
)
async def test_what_cannot_be_is_refused_and_changes_nothing(request_, param):
    store = PaperRollouts()
    async with started(store) as gateway:
        with pytest.raises(InvalidRequest) as refusal:
            await gateway.start(request_)
        assert refusal.value.param == param
        assert store.states == {}


async def test_a_verdict_holds_while_the_store_is_away_and_loses_to_an_operator():
    store = PaperRollouts()
    async with started(store, chat=CHAT) as gateway:
        store.away = True
        gateway.apply_decision(gateway.live["chat"], TrialDecision.ABORT)
        await asyncio.sleep(0.05)
        assert gateway.all()[0].phase is RolloutPhase.ABORTED
        with pytest.raises(StoreUnavailable):
            await gateway.switch("chat")
        store.away = False
        await until(lambda: store.states["chat"].phase is RolloutPhase.ABORTED)
        # Another gateway's operator has begun a new trial before this one's verdict of the old trial arrives.
        await gateway.start(StartRollout(name="chat"))
        old = gateway.live["chat"].state
        store.states["chat"] = old.start(dict(old.settings), 0.0)
        gateway.apply_decision(gateway.live["chat"], TrialDecision.ABORT)
        await until(lambda: gateway.all()[0].phase is RolloutPhase.RUNNING)
        assert store.states["chat"].phase is RolloutPhase.RUNNING


@pytest.mark.parametrize(
    ("automatic", "decision", "phase"),
    [
        ("none", TrialDecision.ABORT, RolloutPhase.RUNNING),
        ("abort", TrialDecision.PROMOTE, RolloutPhase.RUNNING),
        ("abort", TrialDecision.ABORT, RolloutPhase.ABORTED),
        ("promote", TrialDecision.PROMOTE, RolloutPhase.PROMOTED),
    ],
)
async def test_the_trial_does_what_it_may(automatic, decision, phase):
    async with started(PaperRollouts(), chat=RolloutConfig(stable="v1", canary="v2", automatic=automatic)) as gateway:
        gateway.apply_decision(gateway.live["chat"], decision)
        assert gateway.all()[0].phase is phase
