"""The backend against a dashboard of paper: what it orders, what it shows, and what it does while nobody answers."""

import asyncio
from contextlib import asynccontextmanager
from copy import deepcopy
from unittest.mock import Mock

import pytest
from aiohttp import web

from maitred.core.errors import ReplicaUnavailable
from maitred.core.secret import Secret
from maitred.fleet.backend import BackendFacts
from maitred.fleet.ray import backend as backend_module
from maitred.fleet.ray.backend import RayBackend
from maitred.fleet.ray.config import RayConfig, RayReplicaConfig
from maitred.scaling.replica_status import ReplicaPhase
from maitred.testing.scripted_engine import ScriptedEngine
from maitred.wire.link.config import LinkConfig
from tests.support.clock import FakeClock

LIMIT_S = 300.0
TOKEN = Secret("a token of the cluster", "{env: T}")


class PaperServe:
    """Ray Serve as far as its REST API shows it. Targets become replicas only when a test says so.

    Attributes:
        applications: The answer of the API.
        puts: Bodies of deployments.
        scales: Targets in the order in which they came.
        is_down: Whether every request fails.
        refused: Deployments whose targets are refused.
        refusals: Number of targets that were refused.
        dies_after: Target after which every request fails.
        nonsense: Text with which every question is answered; None: the answer is right.
    """

    def __init__(self):
        self.applications = {}
        self.puts = []
        self.scales = []
        self.is_down = False
        self.nonsense = None
        self.refused = set()
        self.refusals = 0
        self.dies_after = None
        self.asked = asyncio.Event()

    def deploy(self, ports, application="maitred", **targets):
        self.applications[application] = {
            "status": "RUNNING",
            "external_scaler_enabled": True,
            "deployments": {
                name: {
                    "status": "HEALTHY",
                    "message": "",
                    "target_num_replicas": targets.get(name.replace("-", "_"), 0),
                    "replicas": [],
                    "deployment_config": {"user_config": {"port": port}},
                }
                for name, port in ports.items()
            },
        }

    def deployment(self, name):
        return self.applications["maitred"]["deployments"][name]

    def run(self, name, state="RUNNING"):
        self.deployment(name)["replicas"] = [{"replica_id": "r", "state": state, "node_ip": "127.0.0.1", "pid": 1}]

    async def polled(self, times=2):
        """Waits until the backend has asked so often since now."""
        for _ in range(times):
            self.asked.clear()
            async with asyncio.timeout(LIMIT_S):
                await self.asked.wait()

    async def handle(self, request):
        self.asked.set()
        if self.is_down:
            return web.Response(status=503, text="The GCS may be down")
        if request.headers.get("Authorization") != f"Bearer {TOKEN.reveal()}":
            return web.Response(status=401)
        if request.method == "GET" and self.nonsense is not None:
            return web.Response(text=self.nonsense)
        if request.method == "GET":
            return web.json_response({"applications": self.applications, "controller_info": {}})
        body = await request.json()
        if request.method == "PUT":
            self.puts.append(body)
            for application in body["applications"]:
                if application["name"] not in self.applications:
                    count, first = application["args"]["max_replicas"], application["args"]["first_port"]
                    self.deploy({f"engine-{n}": first + n for n in range(count)}, application["name"])
                ours = self.applications[application["name"]]
                ours["deployed_app_config"] = application
                ours["external_scaler_enabled"] = application.get("external_scaler_enabled", False)
            return web.Response()
        name = request.path.split("/")[-2]
        if not self.applications:
            return web.Response(status=404)
        if name in self.refused or not self.applications["maitred"]["external_scaler_enabled"]:
            self.refusals += 1
            return web.Response(status=412, text="Refused.")
        self.scales.append((name, body["target_num_replicas"]))
        self.is_down = self.is_down or self.scales[-1] == self.dies_after
        self.deployment(name)["target_num_replicas"] = body["target_num_replicas"]
        return web.json_response({})


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(backend_module, "BUSY_POLL_S", 0.005)
    monkeypatch.setattr(backend_module, "IDLE_POLL_S", 0.01)
    monkeypatch.setattr(backend_module, "_RETRY", backend_module.BackoffCeiling(0.01, 0.01))


@pytest.fixture
async def serve():
    paper = PaperServe()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", paper.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    paper.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield paper
    await runner.cleanup()


def make_backend(serve, clock=None, link=None, **config):
    settings = RayConfig(address=serve.url, token=config.pop("token", TOKEN), **config)
    return RayBackend(
        settings,
        link or LinkConfig(),
        lambda card: None,
        {"engine": {"threads": 1}},
        BackendFacts(max_replicas=1),
        clock or FakeClock(),
    )


async def reached(backend, **phases):
    """Waits until the backend shows exactly these phases."""
    changed = asyncio.Event()
    backend.on_change(changed.set)
    async with asyncio.timeout(LIMIT_S):
        while {name.replace("-", "_"): str(r.phase) for name, r in backend.replicas().items()} != phases:
            changed.clear()
            await changed.wait()


@asynccontextmanager
async def engine():
    async with ScriptedEngine() as scripted:
        yield scripted, scripted.address.port


async def test_the_application_is_deployed_beside_others_where_it_is_missing(serve):
    other = {"name": "theirs", "import_path": "theirs:app"}
    serve.applications["theirs"] = {"status": "RUNNING", "deployments": {}, "deployed_app_config": other}
    async with make_backend(serve, replica=RayReplicaConfig(max_replicas=3, num_gpus=1)) as backend:
        (put,) = serve.puts
        assert put["applications"][0] == other
        ours = put["applications"][1]
        assert (ours["external_scaler_enabled"], ours["args"]["num_gpus"]) == (True, 1)
        assert ours["args"]["settings"] == {"engine": {"threads": 1}}
        assert backend.facts.max_replicas == 3
        assert not backend.replicas()


async def test_no_application_is_deployed_where_somebody_else_does_that(serve):
    with pytest.raises(ReplicaUnavailable, match="serve run"):
        await make_backend(serve, deploys=False).__aenter__()


async def test_a_wrong_token_is_named(serve):
    with pytest.raises(ReplicaUnavailable, match="get-auth-token"):
        await make_backend(serve, token=None).__aenter__()


async def test_a_start_is_ordered_once_and_serves_when_the_engine_does(serve):
    async with engine() as (_, port):
        serve.deploy({"engine-0": 1, "engine-1": port})
        async with make_backend(serve) as backend:
            backend.start("engine-1")
            backend.start("engine-1")
            assert backend.replicas()["engine-1"].phase is ReplicaPhase.STARTING
            await serve.polled(3)
            assert serve.scales == [("engine-1", 1)]
            assert backend.replicas()["engine-1"].engine is None
            serve.run("engine-1", "STARTING")
            await reached(backend, engine_1="serving")
            assert [phase.name for phase in backend.replicas()["engine-1"].start_phases] == [
                "actor",
                "process",
                "model",
            ]


async def test_a_stopped_replica_is_shown_until_serve_has_none(serve):
    async with engine() as (_, port):
        serve.deploy({"engine-0": port}, engine_0=1)
        serve.run("engine-0")
        async with make_backend(serve) as backend:
            await reached(backend, engine_0="serving")
            assert not backend.replicas()["engine-0"].start_phases  # somebody else has waited for its start
            backend.stop("engine-0")
            assert backend.replicas()["engine-0"].phase is ReplicaPhase.DRAINING
            await serve.polled(3)
            assert serve.scales == [("engine-0", 0)]
            backend.start("engine-0")  # is refused as long as it exists
            await reached(backend, engine_0="draining")
            serve.deployment("engine-0")["replicas"] = []
            await reached(backend)
            assert serve.scales == [("engine-0", 0)]


async def test_replicas_stay_when_the_backend_is_closed(serve):
    async with engine() as (_, port):
        serve.deploy({"engine-0": port}, engine_0=1)
        serve.run("engine-0")
        for _ in range(2):
            async with make_backend(serve) as backend:
                await reached(backend, engine_0="serving")
        assert backend.facts.outlives_gateway
        assert not serve.scales


async def test_a_dead_engine_is_seen_by_its_connection_and_comes_back_under_its_name(serve):
    async with engine() as (scripted, port):
        serve.deploy({"engine-0": port}, engine_0=1)
        serve.run("engine-0")
        async with make_backend(serve) as backend:
            await reached(backend, engine_0="serving")
            client = backend.replicas()["engine-0"].engine.client
            serve.is_down = True  # Serve has no part in it
            await scripted.__aexit__(None, None, None)
            await reached(backend, engine_0="failed")
            assert backend.replicas()["engine-0"].failure
            serve.is_down = False
            async with ScriptedEngine() as other:
                serve.deployment("engine-0")["deployment_config"] = {"user_config": {"port": other.address.port}}
                await reached(backend, engine_0="serving")
                assert backend.replicas()["engine-0"].engine.client is client


async def test_everything_stays_as_it_is_while_serve_does_not_answer_or_has_forgotten(serve):
    async with engine() as (_, port):
        serve.deploy({"engine-0": port, "engine-1": 1}, engine_0=1)
        serve.run("engine-0")
        async with make_backend(serve) as backend:
            await reached(backend, engine_0="serving")
            serve.is_down = True
            await serve.polled(3)
            backend.start("engine-1")
            await serve.polled(3)
            await reached(backend, engine_0="serving", engine_1="starting")
            assert backend.replicas()["engine-0"].serves_others, "its requests count, whoever has sent them"
            assert not backend.replicas()["engine-1"].serves_others
            kept, serve.applications = serve.applications, {}
            serve.is_down = False
            await serve.polled(3)
            await reached(backend, engine_0="serving", engine_1="starting")
            serve.applications = kept
            await serve.polled(3)
            assert serve.scales == [("engine-1", 1)]


async def test_a_replica_that_another_gateway_starts_or_stops_is_found(serve):
    async with engine() as (_, port):
        serve.deploy({"engine-0": port})
        async with make_backend(serve) as backend:
            serve.deployment("engine-0")["target_num_replicas"] = 1
            serve.run("engine-0")
            await reached(backend, engine_0="serving")
            serve.deployment("engine-0")["target_num_replicas"] = 0
            serve.run("engine-0", "STOPPING")
            await reached(backend, engine_0="draining")
            assert backend.replicas()["engine-0"].engine.client.is_ready  # its answers go on
            serve.deployment("engine-0")["replicas"] = []
            await reached(backend)


async def test_a_start_that_serve_has_given_up_is_shown_and_ordered_again(serve):
    serve.deploy({"engine-0": 1})
    clock = FakeClock()
    async with make_backend(serve, clock=clock) as backend:
        backend.start("engine-0")
        await serve.polled(2)
        serve.deployment("engine-0").update(status="DEPLOY_FAILED", message="No such model.")
        with pytest.raises(ReplicaUnavailable, match="No such model"):
            await backend.wait_started()
        assert backend.replicas()["engine-0"].failure == "No such model."
        clock.now_s += 60
        await serve.polled(4)
        assert serve.scales[:3] == [("engine-0", 1), ("engine-0", 0), ("engine-0", 1)]


async def test_a_policys_target_changes_one_bound_and_nothing_else(serve):
    async with make_backend(serve, replica=RayReplicaConfig(max_replicas=2, scaling="policy")) as backend:
        backend.start("engine-1")
        await serve.polled(3)
        deployed, changed = (put["applications"][-1] for put in deepcopy(serve.puts))
        bounds = [
            {entry["name"]: entry["autoscaling_config"].pop("min_replicas") for entry in put["deployments"]}
            for put in (deployed, changed)
        ]
        assert bounds == [{"engine-0": 0, "engine-1": 0}, {"engine-0": 0, "engine-1": 1}]
        assert deployed == changed
        backend.start("engine-0")  # whether Serve has followed the last target already or not
        await serve.polled(4)
        last = serve.puts[-1]["applications"][-1]["deployments"]
        assert [entry["autoscaling_config"]["min_replicas"] for entry in last] == [1, 1]
        assert not deployed["external_scaler_enabled"]
        assert not serve.scales


async def test_an_application_that_is_gone_for_long_is_deployed_again(serve):
    clock = FakeClock()
    async with make_backend(serve, clock=clock, replica=RayReplicaConfig(max_replicas=2)) as backend:
        backend.start("engine-1")
        await serve.polled(3)
        serve.applications = {}  # as after the loss of the whole cluster
        await serve.polled(3)
        await reached(backend, engine_1="starting")
        assert len(serve.puts) == 1
        clock.now_s += backend_module.REDEPLOY_AFTER_S
        await serve.polled(6)
        assert len(serve.puts) == 2
        assert serve.scales == [("engine-1", 1)] * 2


async def test_a_node_that_may_not_be_connected_to_is_a_failed_replica_with_the_reason(serve):
    serve.deploy({"engine-0": 9}, engine_0=1)
    serve.run("engine-0")
    serve.deployment("engine-0")["replicas"][0]["node_ip"] = "192.0.2.1"
    link = LinkConfig(secret=Secret("correct horse battery staple", "{env: L}"))
    async with make_backend(serve, link=link) as backend:
        await reached(backend, engine_0="failed")
        assert "engine_link.ca_file" in backend.replicas()["engine-0"].failure
        with pytest.raises(ReplicaUnavailable, match=r"engine_link\.ca_file"):
            await backend.wait_started()
        serve.deployment("engine-0").update(target_num_replicas=0, replicas=[])
        await reached(backend)


@pytest.mark.parametrize("nonsense", ["<html>", "[]", '{"applications": {"maitred": {"deployments": {}}}}'])
async def test_an_answer_of_something_else_is_named_at_the_start_and_waited_out_later(serve, nonsense):
    serve.deploy({"engine-0": 1})
    serve.nonsense = nonsense
    with pytest.raises(ReplicaUnavailable, match=r"Correct ray\.address"):
        await make_backend(serve).__aenter__()
    serve.nonsense = None
    async with make_backend(serve) as backend:
        serve.nonsense = nonsense
        await serve.polled(3)
        serve.nonsense = None
        serve.deployment("engine-0")["target_num_replicas"] = 1
        await reached(backend, engine_0="starting")


async def test_an_error_that_nobody_expected_is_logged_once_and_ends_nothing(serve, caplog, monkeypatch):
    monkeypatch.setattr(backend_module, "make_remote_engine", Mock(side_effect=OSError))
    serve.deploy({"engine-0": 1}, engine_0=1)
    async with make_backend(serve) as backend:
        serve.run("engine-0")
        await serve.polled(4)
        assert [record.message for record in caplog.records].count(
            "The replicas on Ray cannot be brought up to date; this is tried again."
        ) == 1
        serve.deployment("engine-0").update(target_num_replicas=0, replicas=[])
        await reached(backend)


async def test_an_application_that_others_deploy_anew_gets_the_targets_that_it_had(serve):
    serve.deploy({"engine-0": 1, "engine-1": 2, "engine-2": 3}, engine_1=1, engine_2=1)
    async with make_backend(serve, deploys=False) as backend:
        await reached(backend, engine_1="starting", engine_2="starting")
        serve.applications = {}
        await serve.polled(3)
        serve.deploy({"engine-0": 1, "engine-1": 2})
        await serve.polled(4)
        assert serve.scales == [("engine-1", 1)]
        await reached(backend, engine_1="starting")


async def test_a_refused_order_blocks_no_other_and_is_given_again(serve, caplog):
    serve.deploy({"engine-0": 1, "engine-1": 2})
    clock = FakeClock()
    serve.refused = {"engine-0"}
    async with make_backend(serve, clock=clock) as backend:
        backend.start("engine-0")
        backend.start("engine-1")
        await serve.polled(4)
        assert serve.scales == [("engine-1", 1)]
        assert serve.refusals == 1
        assert len([r for r in caplog.records if "given again later" in r.message]) == 1
        serve.refused = set()
        clock.now_s += 60
        await serve.polled(4)
        assert serve.scales == [("engine-1", 1), ("engine-0", 1)]


async def test_what_has_a_fixed_size_by_now_is_used_as_it_is(serve):
    async with engine() as (_, port):
        serve.deploy({"engine-0": port}, engine_0=1)
        serve.run("engine-0")
        async with make_backend(serve) as backend:
            await reached(backend, engine_0="serving")
            assert backend.facts.can_scale
            serve.applications["maitred"]["external_scaler_enabled"] = False
            backend.stop("engine-0")
            await reached(backend, engine_0="serving")
            assert not backend.facts.can_scale
            assert not serve.scales


async def test_a_fixed_size_of_nothing_is_an_error_at_the_start(serve):
    serve.deploy({"engine-0": 1})
    serve.applications["maitred"]["external_scaler_enabled"] = False
    with pytest.raises(ReplicaUnavailable, match="fixed size and no replica"):
        await make_backend(serve).__aenter__()


async def test_an_application_of_something_else_is_named(serve):
    serve.deploy({"chatbot": 1})
    with pytest.raises(ReplicaUnavailable, match=r"no deployment engine-0.*ray\.application"):
        await make_backend(serve).__aenter__()


async def test_a_retry_that_is_broken_off_in_its_middle_leaves_no_target_of_zero(serve):
    serve.deploy({"engine-0": 1})
    clock = FakeClock()
    async with make_backend(serve, clock=clock) as backend:
        backend.start("engine-0")
        await serve.polled(2)
        serve.deployment("engine-0").update(status="DEPLOY_FAILED")
        await reached(backend, engine_0="failed")
        serve.dies_after = ("engine-0", 0)
        clock.now_s += 60
        await serve.polled(4)
        assert serve.scales[-1] == ("engine-0", 0)
        serve.dies_after, serve.is_down = None, False
        await serve.polled(4)
        assert serve.deployment("engine-0")["target_num_replicas"] == 1
        assert backend.replicas()["engine-0"]


async def test_closing_waits_for_connections_of_replicas_that_are_gone_too(serve):
    async with engine() as (_, port):
        serve.deploy({"engine-0": port}, engine_0=1)
        serve.run("engine-0")
        async with make_backend(serve) as backend:
            await reached(backend, engine_0="serving")
            (connection,) = [task for task in asyncio.all_tasks() if task.get_name() == "replica engine-0"]
            serve.deployment("engine-0").update(target_num_replicas=0, replicas=[])
            gone = asyncio.Event()
            backend.on_change(lambda: backend.replicas() or gone.set())
            async with asyncio.timeout(LIMIT_S):
                await gone.wait()
            assert not connection.done()
        assert connection.done()
