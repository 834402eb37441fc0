"""A pool with a backend of paper: what it orders, what dispatch sees, and what callers are told."""

import asyncio

import pytest

from maitred.core.errors import ModelLoading
from maitred.core.replica import AdminStatus, LoadReport
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.pool_member import HEARD_S, LONGEST_DRAIN_S, NEXT_REPLICA
from maitred.scaling.prediction import ReadyTimes
from maitred.scaling.replica_status import ReplicaPhase
from maitred.scaling.startup_times import StartKind, StartupTimes
from tests.support.clock import FakeClock
from tests.support.servers.paper_fleet import PaperBackend


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def clock():
    return FakeClock()


def pool_at(backend, clock, serving=1, **guesses):
    return ReplicaPool(
        backend, DesiredReplicas(serving), StartupTimes({StartKind.WEIGHTS_CACHED: 4.0, **guesses}), clock
    )


def phases(pool):
    return {status.name: status.phase.value for status in pool.replicas()}


def names(pool):
    return [endpoint.name for endpoint in pool.endpoints()]


async def test_a_static_pool_starts_its_replicas_and_nothing_else_stands_for_them(clock):
    backend = PaperBackend(clock)
    async with pool_at(backend, clock, serving=2) as pool:
        assert names(pool) == ["r0", "r1"]
        backend.become("r0", ReplicaPhase.SERVING)
        backend.become("r0", ReplicaPhase.FAILED)
        await settle()
        assert names(pool) == ["r0", "r1"]
        assert phases(pool) == {"r0": "failed", "r1": "starting"}


async def test_it_grows_and_learns_how_long_a_start_takes(clock):
    backend = PaperBackend(clock, found=["r0"])
    async with pool_at(backend, clock) as pool:
        changes = []
        pool.on_change(lambda: changes.append(phases(pool)))
        pool.set_desired(2)
        assert phases(pool) == {"r0": "serving", "r1": "starting"}
        assert pool.replicas()[1].ready_in_s == 4.0
        clock.now_s += 3.0
        assert pool.replicas()[1].ready_in_s == 1.0
        clock.now_s += 3.0
        assert pool.replicas()[1].ready_in_s == pytest.approx(0.4 + 1.0), "it is late, and may be later"
        backend.become("r1", ReplicaPhase.SERVING)
        await settle()
        assert changes[-1] == {"r0": "serving", "r1": "serving"}
        assert pool.startup_times.quantile(StartKind.WEIGHTS_CACHED, 0.9) == 6.0


async def test_a_replica_with_requests_drains_and_is_stopped_after_the_last_one(clock):
    backend = PaperBackend(clock, found=["r0", "r1"])
    async with pool_at(backend, clock) as pool:
        seen = []
        pool.on_endpoints(lambda: seen.append((names(pool), backend.there["r1"].phase)))
        busier, other = (endpoint.admin_state for endpoint in pool.endpoints())
        for admin_state, requests in [(busier, 3), (other, 1)]:
            for _ in range(requests):
                admin_state.on_begin()
        backend.there["r1"].engine.client.output_tokens = 7
        pool.set_desired(1)
        assert phases(pool) == {"r0": "serving", "r1": "draining"}
        assert not other.serving
        assert names(pool) == ["r0", "r1"]
        other.on_end()
        await settle()
        assert phases(pool) == {"r0": "serving"}
        assert seen == [(["r0"], ReplicaPhase.SERVING)], "it leaves dispatch before it is stopped"
        assert backend.there["r1"].phase is ReplicaPhase.DRAINING
        assert pool.output_tokens == 7


async def test_a_draining_replica_serves_again_when_it_is_needed(clock):
    backend = PaperBackend(clock, found=["r0", "r1"])
    async with pool_at(backend, clock) as pool:
        for endpoint in pool.endpoints():
            endpoint.admin_state.on_begin()
        pool.set_desired(1)
        (draining,) = [endpoint for endpoint in pool.endpoints() if not endpoint.admin_state.serving]
        pool.set_desired(2)
        assert draining.admin_state.state is AdminStatus.SERVING
        assert phases(pool) == {"r0": "serving", "r1": "serving"}
        assert len(backend.there) == 2


async def test_an_operator_cannot_make_a_leaving_replica_serve(clock):
    backend = PaperBackend(clock, found=["r0"])
    async with pool_at(backend, clock) as pool:
        (endpoint,) = pool.endpoints()
        endpoint.admin_state.on_begin()
        pool.set_desired(0)
        endpoint.admin_state.serve(clock.monotonic_s())
        pool.set_desired(0)
        assert not endpoint.admin_state.serving


async def test_without_replicas_requests_wait_for_the_next_one_and_are_told_a_true_time(clock):
    backend = PaperBackend(clock, found=["r0"])
    async with pool_at(backend, clock) as pool:
        pool.set_desired(0)
        await settle()
        assert names(pool) == [NEXT_REPLICA]
        assert retry_after_s(pool) == 4.0
        backend.vanish("r0")
        pool.set_desired(1)
        clock.now_s += 1.0
        assert names(pool) == ["r0"]
        assert retry_after_s(pool) == 3.0
        backend.become("r0", ReplicaPhase.SERVING)
        await settle()
        assert names(pool) == ["r0"]
        backend.become("r0", ReplicaPhase.FAILED)
        assert retry_after_s(pool) == 1.0, "also before the pool knows of it; the start has taken 1 s"


def retry_after_s(pool):
    with pytest.raises(ModelLoading) as raised:
        pool.endpoints()[0].replica.card()
    return raised.value.retry_after_s


async def test_the_name_of_a_replica_that_still_stops_is_not_used_again(clock):
    backend = PaperBackend(clock, found=["r0"])
    async with pool_at(backend, clock) as pool:
        pool.set_desired(0)
        pool.set_desired(1)
        assert phases(pool) == {"r1": "starting"}


async def test_the_warm_pool_sleeps_and_is_woken_before_anything_is_started(clock):
    backend = PaperBackend(clock, found=["r0", "r1"])
    async with pool_at(backend, clock) as pool:
        pool.set_desired(1, asleep=1)
        asleep = "r1"
        client = backend.there[asleep].engine.client
        assert client.orders == [True]
        assert phases(pool)[asleep] == "draining", "it falls asleep"
        client.tell(asleep=True)
        await settle()
        assert phases(pool)[asleep] == "asleep"
        clock.now_s += 10.0
        assert not pool.endpoints()[1].admin_state.serving
        pool.set_desired(2)
        assert client.orders == [True, False]
        assert phases(pool)[asleep] == "waking"
        (waking,) = [status for status in pool.replicas() if status.name == asleep]
        assert (waking.ready_in_s, waking.start_kind) == (0.5, StartKind.ASLEEP)
        clock.now_s += 2.0
        client.tell(asleep=False)
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "serving"}
        assert pool.startup_times.quantile(StartKind.ASLEEP, 0.9) == 2.0
        assert len(backend.there) == 2


async def test_a_sleeping_replica_that_was_started_again_sleeps_again(clock):
    backend = PaperBackend(clock, found=["r0", "r1"])
    async with pool_at(backend, clock) as pool:
        pool.set_desired(1, asleep=1)
        asleep = "r1"
        client = backend.there[asleep].engine.client
        client.tell(asleep=True)
        backend.become(asleep, ReplicaPhase.FAILED)
        client.tell(asleep=False)
        await settle()
        backend.become(asleep, ReplicaPhase.SERVING)
        await settle()
        assert client.orders == [True, True]
        client.tell(asleep=True)
        await settle()
        assert phases(pool)[asleep] == "asleep"


async def test_a_sleeping_replica_that_is_down_serves_when_it_is_back(clock):
    backend = PaperBackend(clock, found=["r0", "r1"])
    async with pool_at(backend, clock) as pool:
        pool.set_desired(1, asleep=1)
        client = backend.there["r1"].engine.client
        client.tell(asleep=True)
        backend.become("r1", ReplicaPhase.STARTING)
        await settle()
        pool.set_desired(2)
        assert phases(pool)["r1"] == "starting"
        client.tell(asleep=False)
        backend.become("r1", ReplicaPhase.SERVING)
        await settle()
        assert client.orders == [True]
        assert not pool.endpoints()[1].replica.is_waking
        assert phases(pool)["r1"] == "serving"


async def test_a_backend_that_puts_engines_to_sleep_is_told_which_and_the_engines_are_not(clock):
    backend = PaperBackend(clock, found=["r0", "r1"], serves_others=True, puts_to_sleep=True, outlives_gateway=True)
    async with pool_at(backend, clock) as pool:
        clients = [backend.there[name].engine.client for name in ("r0", "r1")]
        clients[0].tell(running=2)
        clients[1].tell(running=1)  # a request of another gateway
        pool.set_desired(1, asleep=1)
        clock.now_s += HEARD_S
        pool.refresh()
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "draining"}
        assert (backend.leaving, backend.asleep) == ({"r1"}, set()), "it has a request of another gateway"
        clients[1].tell()
        pool.refresh()
        await settle()
        assert (backend.leaving, backend.asleep) == ({"r1"}, {"r1"})
        assert clients[1].orders == []
        clients[1].tell(asleep=True)
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "asleep"}
        pool.set_desired(2)
        await settle()
        assert backend.asleep == set()
        assert phases(pool) == {"r0": "serving", "r1": "waking"}
        assert clients[1].orders == [False]
        clients[1].tell()
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "serving"}


async def test_who_follows_leaves_asleep_what_another_gateway_has_put_to_sleep(clock):
    backend = PaperBackend(
        clock, found=["r0", "r1"], serves_others=True, puts_to_sleep=True, outlives_gateway=True, follows=True
    )
    async with pool_at(backend, clock) as pool:
        client = backend.there["r1"].engine.client
        backend.tell_leaving("r1")
        backend.tell_reserved("r1")
        await settle()
        client.tell(asleep=True)
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "asleep"}
        pool.wake()  # requests wait here
        await settle()
        assert client.orders == []
        backend.tell_leaving()
        backend.tell_reserved()
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "waking"}
        assert client.orders == [], "whoever wakes it has told it"
        client.tell()
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "serving"}


async def test_who_leads_next_leaves_asleep_what_sleeps(clock):
    backend = PaperBackend(
        clock,
        found=["r0", "r1"],
        desired=DesiredReplicas(1, asleep=1),
        serves_others=True,
        puts_to_sleep=True,
        outlives_gateway=True,
    )
    backend.tell_leaving("r1")
    backend.tell_reserved("r1")
    client = backend.there["r1"].engine.client
    client.tell(asleep=True)
    async with pool_at(backend, clock) as pool:
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "asleep"}
        assert backend.asleep == {"r1"}
        assert client.orders == []


async def test_a_model_that_rests_lets_its_answers_end_and_sleeps_until_it_is_woken(clock):
    backend = PaperBackend(clock, found=["r0", "r1"], can_sleep=False)
    async with pool_at(backend, clock) as pool:
        clients = [backend.there[name].engine.client for name in ("r0", "r1")]
        busy, kept = (endpoint.admin_state for endpoint in pool.endpoints())
        busy.on_begin()
        kept.maintain()  # by an operator, before
        pool.rest()
        await settle()
        assert [client.orders for client in clients] == [[], [True]]
        assert names(pool) == [NEXT_REPLICA, "r0", "r1"], "what comes waits"
        busy.on_end()
        await settle()
        for client in clients:
            assert client.orders == [True]
            client.tell(asleep=True)
        await settle()
        assert phases(pool) == {"r0": "asleep", "r1": "asleep"}
        assert (pool.desired, pool.is_scaled) == (DesiredReplicas(2), False)
        backend.become("r0", ReplicaPhase.FAILED)
        clients[0].report = LoadReport()
        await settle()
        backend.become("r0", ReplicaPhase.SERVING)
        await settle()
        assert clients[0].orders == [True, True], "it is started again, and sleeps again"
        clients[0].tell(asleep=True)
        await settle()
        pool.wake()
        assert [client.orders[-1] for client in clients] == [False, False]
        for client in clients:
            client.tell(asleep=False)
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "serving"}
        assert (busy.serving, kept.serving) == (True, False)
        assert pool.startup_times.count(StartKind.ASLEEP) == 2


async def test_a_model_that_rests_serves_at_once_if_it_is_woken_before_it_sleeps(clock):
    backend = PaperBackend(clock, found=["r0"])
    async with pool_at(backend, clock) as pool:
        (admin_state,) = (endpoint.admin_state for endpoint in pool.endpoints())
        admin_state.on_begin()
        pool.rest()
        assert (phases(pool), pool.ready_in_s()) == ({"r0": "draining"}, 0.5)
        pool.wake()
        assert phases(pool) == {"r0": "serving"}
        assert admin_state.serving
        assert backend.there["r0"].engine.client.orders == []


async def test_a_gateway_that_follows_another_one_can_let_the_engines_sleep_too(clock):
    backend = PaperBackend(clock, found=["r0", "r1"], desired=DesiredReplicas(3), follows=True)
    async with pool_at(backend, clock) as pool:
        clients = [backend.there[name].engine.client for name in ("r0", "r1")]
        pool.rest()
        await settle()
        for client in clients:
            client.tell(asleep=True)
        await settle()
        assert phases(pool) == {"r0": "asleep", "r1": "asleep"}, "and it starts no third one"
        pool.wake()
        for client in clients:
            assert client.orders == [True, False]
            client.tell(asleep=False)
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "serving"}
        assert all(endpoint.admin_state.serving for endpoint in pool.endpoints())


async def test_engines_that_another_gateway_wakes_or_puts_to_sleep_are_followed(clock):
    backend = PaperBackend(clock, found=["r0"])
    async with pool_at(backend, clock) as pool:
        client = backend.there["r0"].engine.client
        pool.rest()
        await settle()
        client.tell(asleep=True)
        await settle()
        client.tell(asleep=False)
        await settle()
        assert (pool.rests, phases(pool), client.orders) == (False, {"r0": "serving"}, [True])
        for _ in range(2):
            client.tell(asleep=True)
            pool.wake()
            pool.wake()
            client.tell(asleep=False)
        assert client.orders == [True, False, False], "one order each time"


async def test_a_new_pool_takes_over_what_its_backend_has(clock):
    backend = PaperBackend(clock, found=["r0", "r1", "r2"])
    async with pool_at(backend, clock, serving=1) as pool:
        assert pool.desired == DesiredReplicas(3)
        assert len(backend.there) == 3
    async with pool_at(PaperBackend(clock, desired=DesiredReplicas(0)), clock, serving=1) as pool:
        assert pool.desired == DesiredReplicas(0)
        assert pool.replicas() == []


async def test_whoever_watches_engines_hears_of_each(clock):
    backend = PaperBackend(clock, found=["r0"])
    async with pool_at(backend, clock) as pool:
        heard = []
        pool.reconfigure(pause_at_tokens=5)
        pool.on_engine(lambda name, engine: heard.append((name, engine.client.pause_at_tokens)))
        pool.set_desired(2)
        assert heard == [("r0", 5), ("r1", 5)]


async def test_a_pool_stays_ready_once_a_replica_has_served_or_none_is_to(clock):
    backend = PaperBackend(clock)
    async with pool_at(backend, clock) as pool:
        pool.set_desired(1)
        assert not pool.stays_ready, "the first start is still to come"
        assert pool.is_scaled, "but requests wait for it"
        backend.become("r0", ReplicaPhase.SERVING)
        await settle()
        assert pool.stays_ready
        pool.set_desired(0)
        assert pool.stays_ready
    async with pool_at(PaperBackend(clock), clock) as pool:
        pool.set_desired(0)
        assert pool.stays_ready
    async with pool_at(PaperBackend(clock, found=["r0"]), clock) as pool:
        assert not pool.stays_ready, "nobody scales it"
    async with pool_at(PaperBackend(clock, desired=DesiredReplicas(0)), clock) as pool:
        assert pool.stays_ready


async def test_a_new_pool_desires_what_was_desired_and_not_what_it_finds(clock):
    backend = PaperBackend(clock, found=["r0", "r1", "r2"], desired=DesiredReplicas(1, asleep=1))
    for name in backend.there:
        backend.become(name, ReplicaPhase.STARTING)  # not connected yet
    async with pool_at(backend, clock) as pool:
        await settle()
        assert phases(pool) == {"r0": "starting", "r1": "starting", "r2": "starting"}
        assert pool.desired == DesiredReplicas(1, asleep=1)
        backend.there["r0"].engine.client.tell(asleep=True)
        for name in ("r2", "r1", "r0"):
            backend.become(name, ReplicaPhase.SERVING)
            await settle()
        assert phases(pool) == {"r0": "asleep", "r1": "serving"}, "it sleeps on, and no other takes its place"
        assert backend.there["r0"].engine.client.orders == []
        pool.set_desired(2)
        assert backend.kept == DesiredReplicas(2)


async def test_what_is_stopped_already_is_not_desired(clock):
    backend = PaperBackend(clock, found=["r0", "r1"])
    backend.stop("r1")
    async with pool_at(backend, clock) as pool:
        assert pool.desired == DesiredReplicas(1)
        backend.vanish("r1")
        await settle()
        assert list(backend.there) == ["r0"]


async def test_a_replica_in_maintenance_is_replaced_until_it_is_back(clock):
    backend = PaperBackend(clock, found=["r0"])
    async with pool_at(backend, clock) as pool:
        (endpoint,) = pool.endpoints()
        endpoint.admin_state.maintain()
        pool.refresh()
        await settle()
        assert phases(pool) == {"r0": "serving"}, "nobody scales it"
        pool.set_desired(1)
        assert phases(pool) == {"r0": "maintenance", "r1": "starting"}
        times = ReadyTimes(pool.replicas(), pool.startup_times, start_kind=StartKind.COLD, now_s=clock.monotonic_s())
        assert (times.ready, times.coming) == (0, 1), "one in maintenance serves nobody"
        assert names(pool) == [NEXT_REPLICA, "r0", "r1"]
        assert retry_after_s(pool) == 4.0
        backend.become("r1", ReplicaPhase.SERVING)
        await settle()
        assert names(pool) == ["r0", "r1"]
        endpoint.admin_state.serve(clock.monotonic_s())
        pool.refresh()
        await settle()
        assert list(phases(pool).values()) == ["serving"]


async def test_gateways_that_share_a_backend_follow_the_last_order_of_either(clock):
    shared = PaperBackend(clock, is_shared=True, can_sleep=False)
    async with pool_at(shared, clock, serving=2) as one, pool_at(shared, clock, serving=1) as other:
        assert (one.desired.serving, other.desired.serving) == (2, 2)
        for name in ("r0", "r1"):
            shared.become(name, ReplicaPhase.SERVING)
        one.set_desired(4)
        await settle()
        assert phases(other).keys() == {"r0", "r1", "r2", "r3"}
        assert other.desired.serving == 4
        other.set_desired(3)  # has scaled too, and still follows
        await settle()
        assert (len(phases(one)), one.desired.serving) == (3, 3)
        one.set_desired(1)
        await settle()
        assert (len(phases(other)), other.desired.serving) == (1, 1)
        assert len(shared.replicas()) == 4  # those that were stopped still end


async def test_a_replica_that_both_gateways_stop_counts_once(clock):
    shared = PaperBackend(clock, is_shared=True, found=["r0", "r1"])
    async with pool_at(shared, clock) as pool:
        for endpoint in pool.endpoints():
            endpoint.admin_state.on_begin()
        pool.set_desired(1)
        (leaving,) = [name for name, phase in phases(pool).items() if phase == "draining"]
        shared.stop(leaving)
        await settle()
        assert pool.desired.serving == 1
        shared.vanish(next(iter(phases(pool))))
        await settle()
        assert pool.desired.serving == 0
        assert names(pool) == [NEXT_REPLICA]


async def test_a_backend_of_ones_own_is_repaired_and_not_followed(clock):
    backend = PaperBackend(clock, found=["r0", "r1"])
    async with pool_at(backend, clock) as pool:
        backend.vanish("r1")
        await settle()
        assert pool.desired.serving == 2
        assert len(phases(pool)) == 2


async def test_a_fleet_of_a_fixed_size_is_taken_as_it_is_and_gets_no_orders(clock):
    backend = PaperBackend(clock, is_shared=True, can_scale=False, found=["r3"])
    async with pool_at(backend, clock, serving=2) as pool:
        assert (pool.desired.serving, phases(pool)) == (1, {"r3": "serving"})
        pool.set_desired(3)  # a scaler decides so
        backend.become("r3", ReplicaPhase.FAILED)
        await settle()
        assert (pool.desired.serving, phases(pool)) == (1, {"r3": "failed"})


async def test_a_replica_whose_end_is_taken_back_is_a_member_again(clock):
    backend = PaperBackend(clock, is_shared=True, found=["r0", "r1"])
    async with pool_at(backend, clock) as pool:
        pool.set_desired(1)
        await settle()
        (stopped,) = backend.there.keys() - phases(pool).keys()
        backend.become(stopped, ReplicaPhase.SERVING)
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "serving"}
        assert pool.desired.serving == 2


async def test_who_follows_gives_no_orders_until_it_leads_and_then_has_the_numbers_of_before(clock):
    backend = PaperBackend(clock, follows=True)
    async with pool_at(backend, clock, serving=2) as pool:
        assert not backend.there, "another gateway decides whether something is started"
        backend.start("r0")
        backend.become("r0", ReplicaPhase.SERVING)
        await settle()
        assert (names(pool), pool.desired.serving, pool.is_scaled) == (["r0"], 2, False)
        backend.desired = DesiredReplicas(3)
        backend.become("r0", ReplicaPhase.FAILED)
        await settle()
        assert (list(backend.there), pool.desired.serving, pool.is_scaled) == (["r0"], 3, True)
        backend.become("r0", ReplicaPhase.SERVING)
        backend.lead()
        await settle()
        assert list(backend.there) == ["r0", "r1", "r2"]


async def test_who_leads_no_more_lets_go_what_it_was_about_to_stop(clock):
    backend = PaperBackend(clock, found=["r0", "r1"])
    async with pool_at(backend, clock, serving=2) as pool:
        await settle()
        for endpoint in pool.endpoints():
            endpoint.admin_state.running += 1
        pool.set_desired(1)
        assert phases(pool) == {"r0": "serving", "r1": "draining"}
        backend.lead(follows=True)
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "serving"}
        backend.vanish("r1")
        await settle()
        assert (phases(pool), list(backend.there)) == ({"r0": "serving"}, ["r0"])


async def look(pool):
    pool.refresh()
    await settle()


async def test_a_replica_ends_when_no_gateway_has_requests_there_and_all_have_heard_of_it(clock):
    backend = PaperBackend(clock, found=["r0", "r1", "r2"], serves_others=True)
    async with pool_at(backend, clock, serving=3) as pool:
        for name, running in [("r0", 3), ("r1", 2), ("r2", 1)]:
            backend.there[name].engine.client.tell(running=running)
        first = pool.endpoints()[0].admin_state
        for _ in range(3):
            first.on_begin()  # all that runs there is of this gateway
        pool.set_desired(1)
        assert phases(pool) == {"r0": "serving", "r1": "draining", "r2": "draining"}
        assert backend.leaving == {"r1", "r2"}
        backend.there["r2"].engine.client.tell(waiting=1)
        clock.now_s += HEARD_S
        await look(pool)
        assert phases(pool).keys() == {"r0", "r1", "r2"}
        pool.set_desired(2)
        assert (phases(pool)["r1"], backend.leaving) == ("serving", {"r2"})
        backend.there["r2"].engine.client.tell()
        await look(pool)
        assert phases(pool) == {"r0": "serving", "r1": "serving"}
        assert backend.there["r2"].phase is ReplicaPhase.DRAINING
        backend.there["r1"].engine.client.tell()
        pool.set_desired(1)
        await settle()
        assert phases(pool)["r1"] == "draining", "another gateway may not have heard of it yet"
        clock.now_s += HEARD_S
        await look(pool)
        assert phases(pool) == {"r0": "serving"}


@pytest.mark.parametrize("is_connected", [True, False])
async def test_a_replica_waits_for_other_gateways_for_no_more_than_the_longest_time(clock, is_connected):
    backend = PaperBackend(clock, found=["r0"], serves_others=True)
    async with pool_at(backend, clock) as pool:
        if is_connected:
            backend.there["r0"].engine.client.tell(running=1)
        else:
            backend.become("r0", ReplicaPhase.FAILED)  # for this gateway: its agent says that it serves
        await settle()
        pool.set_desired(0)
        clock.now_s += LONGEST_DRAIN_S - 1.0
        await look(pool)
        assert phases(pool) == {"r0": "draining"}
        clock.now_s += 1.0
        await look(pool)
        assert not phases(pool)


async def test_who_follows_drains_what_another_gateway_lets_go_and_goes_on_with_it(clock):
    backend = PaperBackend(clock, found=["r0", "r1"], follows=True, serves_others=True)
    async with pool_at(backend, clock) as pool:
        backend.tell_leaving("r1")
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "draining"}
        assert [endpoint.admin_state.serving for endpoint in pool.endpoints()] == [True, False]
        backend.tell_leaving()
        await settle()
        assert phases(pool) == {"r0": "serving", "r1": "serving"}
        assert pool.endpoints()[1].admin_state.serving
        backend.desired = DesiredReplicas(1)
        backend.tell_leaving("r0")
        await settle()
        clock.now_s += HEARD_S
        backend.lead()
        await settle()
        assert phases(pool) == {"r1": "serving"}, "it leaves, and not the one that this gateway would have chosen"


async def test_a_new_gateway_goes_on_with_what_another_one_has_let_go(clock):
    backend = PaperBackend(clock, found=["r0", "r1"], desired=DesiredReplicas(1), serves_others=True)
    backend.tell_leaving("r0")
    async with pool_at(backend, clock) as pool:
        await settle()
        assert phases(pool) == {"r0": "draining", "r1": "serving"}
        assert backend.leaving == {"r0"}


async def test_replicas_that_an_operator_has_put_to_sleep_are_not_said_to_leave(clock):
    backend = PaperBackend(clock, found=["r0"], serves_others=True)
    async with pool_at(backend, clock) as pool:
        pool.rest()
        await settle()
        assert backend.there["r0"].engine.client.orders == [True]
        assert not backend.leaving, "a request at another gateway wakes it"


async def test_requests_of_who_follows_wait_as_soon_as_it_hears_that_somebody_sets_the_numbers(clock):
    backend = PaperBackend(clock, found=["r0"], follows=True)
    async with pool_at(backend, clock) as pool:
        await settle()
        backend.desired = DesiredReplicas(1)
        backend.tell_leaving()  # nothing but the numbers is news
        await settle()
        endpoint = pool.endpoints()[0]
        backend.there["r0"].engine.client.is_ready = False
        with pytest.raises(ModelLoading):
            endpoint.replica.card()
        assert retry_after_s(pool) == 4.0


async def test_numbers_that_an_agent_brings_late_hold_where_nobody_has_set_any(clock):
    backend = PaperBackend(clock, outlives_gateway=True)
    async with pool_at(backend, clock, serving=1) as pool:
        backend.become("r0", ReplicaPhase.SERVING)
        await settle()
        backend.desired = DesiredReplicas(4)
        for name in ("a", "b", "c"):
            backend.start(name)
            backend.become(name, ReplicaPhase.SERVING)
        await settle()
        clock.now_s += 60
        pool.refresh()
        await settle()
        assert pool.desired == DesiredReplicas(4)
        assert set(phases(pool).values()) == {"serving"}
        assert pool.is_scaled
        pool.set_desired(3)
        backend.desired = DesiredReplicas(2)
        pool.refresh()
        await settle()
        assert pool.desired == DesiredReplicas(3), "what is set here comes first"


@pytest.mark.parametrize("decides", [True, False])
async def test_replicas_that_are_just_heard_of_stay_until_a_decision_has_counted_them(clock, decides):
    backend = PaperBackend(clock, outlives_gateway=True)
    async with pool_at(backend, clock) as pool:
        pool.set_desired(1)
        backend.become("r0", ReplicaPhase.SERVING)
        for name in ("a", "b"):
            backend.start(name)
            backend.become(name, ReplicaPhase.SERVING)
        await settle()
        clock.now_s += 9
        pool.set_desired(1, counted_s=clock.now_s - 10)
        await look(pool)
        assert phases(pool) == {"r0": "serving", "a": "serving", "b": "serving"}
        if decides:
            pool.set_desired(1)
        else:
            clock.now_s += 1
        await look(pool)
        assert len(phases(pool)) == 1
