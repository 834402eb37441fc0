"""Backend of a Deployment against an API server: what it orders, what it follows, and what it leaves alone."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from maitred.core.clock import SystemClock
from maitred.core.errors import ConfigInvalid, ReplicaUnavailable
from maitred.fleet.backend import BackendFacts, LeasedBackend
from maitred.fleet.kubernetes import backend as kubernetes_backend
from maitred.fleet.kubernetes.api import DELETION_COST, KubernetesApi
from maitred.fleet.kubernetes.backend import KubernetesBackend
from maitred.fleet.kubernetes.config import KubernetesConfig
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.remote import RemoteEngine
from maitred.scaling.replica_status import ReplicaPhase
from maitred.scaling.startup_times import StartKind, StartupTimes
from tests.support.kubernetes.api_server import ApiServer

STARTING, DRAINING, FAILED = ReplicaPhase.STARTING, ReplicaPhase.DRAINING, ReplicaPhase.FAILED


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    monkeypatch.setattr(kubernetes_backend, "MARK_S", 0.05)


@pytest.fixture
async def server():
    async with ApiServer().running() as started:
        yield started


@asynccontextmanager
async def backend(server, tmp_path, *, epoch=1, **settings):
    file = tmp_path / "kubeconfig"
    file.write_text(server.kubeconfig())
    made = KubernetesBackend(
        KubernetesApi(KubernetesConfig(kubeconfig=str(file), **settings)),
        RemoteEngine,
        port=9100,
        lease="scaler",
        facts=BackendFacts(max_replicas=8, max_starts=8),
        clock=SystemClock(),
    )
    made.epoch = lambda: epoch
    if epoch is not None:
        server.give_lease(epoch)
    async with made:
        yield made


async def until(condition, seconds=20):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - only asking tells
            await asyncio.sleep(0.01)


def phases(made):
    return {name: replica.phase for name, replica in made.replicas().items()}


def living(server):
    return [name for name, pod in server.pods.items() if "deletionTimestamp" not in pod["metadata"]]


def cost(server, name):
    return server.pods[name]["metadata"].get("annotations", {}).get(DELETION_COST)


async def ordered(server, made, count):
    """Orders replicas, and returns their names once their pods are there."""
    for _ in range(count):
        made.start(next(name for name in map(made.name_of, range(99)) if name not in made.replicas()))
    await until(lambda: len(living(server)) == count and set(made.replicas()) == set(living(server)))
    return list(made.replicas())


async def test_a_replica_has_a_provisional_name_until_its_pod_is_there(server, tmp_path):
    async with backend(server, tmp_path) as made:
        name = made.name_of(0)
        made.start(name)
        assert phases(made) == {name: STARTING}
        await until(lambda: list(made.replicas()) == list(server.pods) != [])
        (replica,) = made.replicas().values()
        assert (replica.ordered_as, replica.phase) == (name, STARTING)
        assert server.deployment["spec"]["replicas"] == 1


async def test_it_is_a_backend_whose_orders_need_the_lease(server, tmp_path):
    async with backend(server, tmp_path) as made:
        assert isinstance(made, LeasedBackend)


async def test_the_pod_that_is_to_go_is_the_one_that_goes(server, tmp_path):
    async with backend(server, tmp_path) as made:
        names = await ordered(server, made, 3)
        chosen = names[0]  # the oldest, which Kubernetes would keep
        made.keep_leaving([chosen])
        await until(lambda: cost(server, chosen) == "-1000")
        assert server.deployment["spec"]["replicas"] == 3
        made.stop(chosen)
        await until(lambda: set(living(server)) == set(names[1:]))
        assert server.deployment["spec"]["replicas"] == 2
        assert phases(made)[chosen] is DRAINING


async def test_of_pods_that_leave_the_one_that_is_told_to_end_goes_first(server, tmp_path):
    async with backend(server, tmp_path) as made:
        names = await ordered(server, made, 3)
        made.keep_leaving(names[:2])  # the newer one of them still gives answers
        await until(lambda: cost(server, names[0]) == cost(server, names[1]) == "-1000")
        made.stop(names[0])
        await until(lambda: set(living(server)) == set(names[1:]))


async def test_a_pod_goes_on_when_kubernetes_has_ended_another_one_in_its_place(server, tmp_path):
    async with backend(server, tmp_path) as made:
        names = await ordered(server, made, 3)
        server.knows_costs = False
        made.keep_leaving(names[:1])
        made.stop(names[0])
        await until(lambda: set(living(server)) == set(names[:2]))
        await until(lambda: phases(made)[names[0]] is STARTING)
        assert not made.replicas()[names[0]].is_leaving
        await until(lambda: cost(server, names[0]) is None)
        assert server.deployment["spec"]["replicas"] == 2


async def test_two_pods_go_that_are_told_to_one_after_the_other_whatever_kubernetes_ends_first(server, tmp_path):
    async with backend(server, tmp_path) as made:
        names = await ordered(server, made, 3)
        server.knows_costs = False
        made.keep_leaving(names[1:])
        made.stop(names[1])
        await until(lambda: cost(server, names[1]) == "-2000")
        made.stop(names[2])  # which Kubernetes ends first
        await until(lambda: living(server) == names[:1])
        await until(lambda: server.deployment["spec"]["replicas"] == 1)
        assert [name for name, phase in phases(made).items() if phase is not DRAINING] == names[:1]


async def test_a_pool_ends_with_as_many_as_desired_where_costs_are_not_known(server, tmp_path):
    server.knows_costs = False
    async with backend(server, tmp_path) as made:
        pool = ReplicaPool(_Opened(made), DesiredReplicas(0), StartupTimes({StartKind.COLD: 10.0}), SystemClock())
        async with pool:
            pool.set_desired(4)
            await until(lambda: {replica.name for replica in pool.replicas()} == set(server.pods) != set())
            pool.set_desired(2)
            await until(lambda: len(living(server)) == 2 and len(pool.replicas()) == 2)
            await asyncio.sleep(0.5)
            assert len(living(server)) == 2
            assert {replica.name for replica in pool.replicas()} == set(living(server))
            assert pool.desired == DesiredReplicas(2)


async def test_a_replica_that_serves_again_has_no_lower_cost_any_more(server, tmp_path):
    async with backend(server, tmp_path) as made:
        (name,) = await ordered(server, made, 1)
        made.keep_leaving([name])
        await until(lambda: cost(server, name) == "-1000")
        made.keep_leaving([])
        await until(lambda: cost(server, name) is None)


async def test_other_gateways_read_which_pod_is_to_go(server, tmp_path):
    async with backend(server, tmp_path) as owner, backend(server, tmp_path, epoch=None) as follower:
        (name,) = await ordered(server, owner, 1)
        owner.keep_leaving([name])
        await until(lambda: name in follower.replicas() and follower.replicas()[name].is_leaving)


async def test_a_gateway_without_the_lease_orders_nothing(server, tmp_path):
    async with backend(server, tmp_path, epoch=None) as follower:
        server.scale(1)
        await until(lambda: list(follower.replicas()) == list(server.pods) != [])
        (name,) = follower.replicas()
        assert follower.facts.follows
        follower.start("pod-9")
        follower.keep_leaving([name])
        follower.stop(name)
        await asyncio.sleep(0.3)
        assert server.deployment["spec"]["replicas"] == 1
        assert cost(server, name) is None
        assert {method for method, _ in server.requests} == {"GET"}


async def test_a_gateway_that_loses_the_lease_drops_what_it_has_not_done(server, tmp_path):
    async with backend(server, tmp_path) as made:
        (name,) = await ordered(server, made, 1)
        made.check_lease()
        server.is_down = True
        made.stop(name)
        made.start("pod-7")
        made.epoch = lambda: None
        made.check_lease()
        server.is_down = False
        await asyncio.sleep(1.5)
        assert living(server) == [name]
        assert phases(made) == {name: STARTING}


async def test_a_gateway_that_does_not_know_yet_that_its_lease_was_taken_changes_nothing(server, tmp_path):
    async with backend(server, tmp_path) as made:
        (name,) = await ordered(server, made, 1)
        server.give_lease(2)
        made.start("pod-9")
        await asyncio.sleep(0.7)
        made.stop("pod-9")
        made.stop(name)
        await asyncio.sleep(0.7)
        assert server.deployment["spec"]["replicas"] == 1
        assert living(server) == [name]


async def test_a_start_and_an_end_at_the_same_time_exchange_the_pod(server, tmp_path):
    async with backend(server, tmp_path) as made:
        (old,) = await ordered(server, made, 1)
        made.stop(old)
        made.start("pod-9")
        await until(lambda: len(living(server)) == 1 and old not in living(server))
        await until(lambda: server.deployment["spec"]["replicas"] == 1)
        assert made.replicas()[living(server)[0]].ordered_as == "pod-9"


async def test_an_order_that_somebody_else_is_quicker_than_is_given_again(server, tmp_path):
    rounds = iter([1, 2])
    server.before_scale = lambda: server.scale(number) if (number := next(rounds, None)) else None
    async with backend(server, tmp_path) as made:
        made.start("pod-1")
        await until(lambda: len(living(server)) == 3)  # the two of the other, and the one that was ordered
        await until(lambda: set(made.replicas()) == set(server.pods))
        assert server.deployment["spec"]["replicas"] == 3


async def test_a_number_that_somebody_else_sets_is_followed(server, tmp_path):
    async with backend(server, tmp_path) as made:
        server.scale(3)
        await until(lambda: len(made.replicas()) == 3 and set(made.replicas()) == set(server.pods))
        server.scale(1)
        await until(lambda: sum(phase is not DRAINING for phase in phases(made).values()) == 1)


async def test_a_pod_that_dies_is_replaced_under_a_name_of_its_own(server, tmp_path):
    async with backend(server, tmp_path) as made:
        (name,) = await ordered(server, made, 1)
        del server.pods[name]
        server._emit("DELETED", {"metadata": {"name": name, "uid": "p-1"}, "status": {}})
        await until(lambda: living(server) and list(made.replicas()) == living(server))
        assert name not in made.replicas()
        assert server.deployment["spec"]["replicas"] == 1


async def test_everything_stays_as_it_is_while_the_api_server_is_away(server, tmp_path):
    async with backend(server, tmp_path) as made:
        names = await ordered(server, made, 2)
        server.is_down = True
        await asyncio.sleep(0.3)
        made.start("pod-9")
        await asyncio.sleep(0.7)
        assert set(made.replicas()) == {*names, "pod-9"}
        server.is_down = False
        await until(lambda: len(living(server)) == 3 and set(made.replicas()) == set(living(server)))


async def test_what_changed_while_a_watch_had_expired_is_listed_anew(server, tmp_path):
    async with backend(server, tmp_path) as made:
        (name,) = await ordered(server, made, 1)
        del server.pods[name]
        server.scale(2)
        server.forget_events()
        await until(lambda: len(living(server)) == 2 and list(made.replicas()) == living(server))
        assert name not in made.replicas()


async def test_a_fault_of_the_gateway_while_it_lists_does_not_end_its_watch(server, tmp_path, monkeypatch, caplog):
    async with backend(server, tmp_path) as made:
        listed = made.api.pods
        faults = iter([ValueError("planted"), ValueError("planted")])

        async def fail_twice(selector):
            if (fault := next(faults, None)) is not None:
                raise fault
            return await listed(selector)

        monkeypatch.setattr(made.api, "pods", fail_twice)
        server.scale(1)
        server.forget_events()
        await until(lambda: list(made.replicas()) == list(server.pods) != [])
        assert caplog.text.count("ValueError: planted") == 2


async def test_a_pod_that_cannot_run_says_why(server, tmp_path):
    async with backend(server, tmp_path) as made:
        (name,) = await ordered(server, made, 1)
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
        server.pods[name]["status"] = {"phase": "Pending", "containerStatuses": [{"name": "engine", "state": waiting}]}
        server._emit("MODIFIED", server.pods[name])
        await until(lambda: made.replicas()[name].phase is FAILED)
        assert made.replicas()[name].failure == "ImagePullBackOff: no such image"


async def test_a_pod_that_waits_for_a_machine_is_starting_and_says_so(server, tmp_path):
    async with backend(server, tmp_path) as made:
        (name,) = await ordered(server, made, 1)
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU is free"}
        server.pods[name]["status"] = {"phase": "Pending", "conditions": [condition]}
        server._emit("MODIFIED", server.pods[name])
        await until(lambda: made.replicas()[name].failure != "")
        assert (made.replicas()[name].phase, made.replicas()[name].failure) == (
            STARTING,
            "Unschedulable: no GPU is free",
        )


async def test_a_deployment_that_is_not_there_is_said(server, tmp_path):
    with pytest.raises(ReplicaUnavailable, match=r"no Deployment other .* Install it"):
        async with backend(server, tmp_path, deployment="other"):
            pass


async def test_a_kubeconfig_that_is_not_there_is_said(tmp_path):
    api = KubernetesApi(KubernetesConfig(kubeconfig=str(tmp_path / "none")))
    with pytest.raises(ConfigInvalid, match=r"Nothing says where the Kubernetes API server is"):
        await api.__aenter__()


async def test_a_pool_keeps_a_member_under_its_own_name(server, tmp_path):
    async with backend(server, tmp_path) as made:
        pool = ReplicaPool(_Opened(made), DesiredReplicas(0), StartupTimes({StartKind.COLD: 10.0}), SystemClock())
        async with pool:
            pool.set_desired(2)
            before = [replica.name for replica in pool.replicas()]
            assert len(before) == 2
            await until(lambda: {replica.name for replica in pool.replicas()} == set(server.pods) != set())
            assert pool.desired == DesiredReplicas(2)
            assert all(member.ordered_s is not None for member in pool._members.values())
            pool.set_desired(0)
            await until(lambda: not living(server))
            assert pool.replicas() == []


class _Opened:
    """A backend that is open already."""

    def __init__(self, opened):
        self._opened = opened

    def __getattr__(self, name):
        return getattr(self._opened, name)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_the_fleet_ends_as_desired(server, tmp_path, seed):
    draw = random.Random(seed)
    async with backend(server, tmp_path) as made:
        pool = ReplicaPool(_Opened(made), DesiredReplicas(1), StartupTimes({StartKind.COLD: 10.0}), SystemClock())
        async with pool:

            def set_lease(epoch):
                made.epoch = lambda: epoch
                server.give_lease(epoch or 10)
                made.check_lease()

            def end_one():
                if pods := [pod for pod in server.pods.values() if "deletionTimestamp" not in pod["metadata"]]:
                    server._end(draw.choice(pods), draw.choice([0, 60]))

            def set_down(*, is_down):
                server.is_down = is_down

            def set_costs():
                server.knows_costs = draw.random() < 0.5

            events = [
                *[lambda: pool.set_desired(draw.randrange(5))] * 4,
                lambda: server.scale(draw.randrange(5)),
                end_one,
                lambda: set_down(is_down=True),
                lambda: set_down(is_down=False),
                server.forget_events,
                lambda: set_lease(None),
                lambda: set_lease(draw.randrange(1, 9)),
                set_costs,
            ]
            for _ in range(25):
                draw.choice(events)()
                await asyncio.sleep(draw.choice([0.0, 0.02, 0.1]))
                for pod in list(server.pods.values()):  # what is ending ends, sooner or later
                    if "deletionTimestamp" in pod["metadata"] and draw.random() < 0.3:
                        server._end(pod, 0)
            server.is_down, server.knows_costs = False, True
            set_lease(9)
            # What others have ordered is followed before this order, which is the last one.
            await until(lambda: set(living(server)) == {n for n, one in phases(made).items() if one is not DRAINING})
            await asyncio.sleep(0.5)
            wanted = draw.randrange(5)
            pool.set_desired(wanted)
            await until(
                lambda: (
                    len(living(server)) == wanted == server.deployment["spec"]["replicas"]
                    and {replica.name for replica in pool.replicas()} == set(living(server))
                    and not any(name.startswith("pod-") for name in made.replicas())
                ),
                seconds=60,
            )
            assert pool.desired == DesiredReplicas(wanted)
